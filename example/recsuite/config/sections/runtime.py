"""The flags of the processes that run together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.section import Section, require


@dataclass(frozen=True)
class RuntimeConfig(Section):
    """What all processes of a run share."""

    POSITIVE: ClassVar = ("timeout",)

    seed: int = 0
    """Seed of everything that is drawn: data, split, order, initial weights."""

    timeout: int = 300
    """Seconds that a rank waits for the others in training; preparing data may take longer."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(self.timeout <= 604_800, f"--timeout {self.timeout} is more than a week; give less")
        require(
            0 <= self.seed < 2**31, f"--seed {self.seed} is out of range; give a number from 0 to 2147483647"
        )
