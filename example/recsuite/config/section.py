"""What the sections of the configuration share: how a value is checked and refused.

A refusal is one sentence with the flag, its value and what to give instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from recsuite.errors import UserError


def require(condition: bool, sentence: str) -> None:
    """Refuse what does not hold.

    Raises:
        UserError: the sentence.
    """
    if not condition:
        raise UserError(f"{sentence}.")


def as_given(value: Any) -> str:
    """The value of a flag as it is given on the command line."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


@dataclass(frozen=True)
class Section:
    """A group of flags: a field each, with a sentence under it that --help prints.

    CHOICES, POSITIVE and MOST: the values that a field may have, the fields that are at least 1, and the most
    that anything could use: beyond it a mistyped number would end as an exhausted machine.
    """

    CHOICES: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    POSITIVE: ClassVar[tuple[str, ...]] = ()
    MOST: ClassVar[Mapping[str, int]] = {}

    def validate(self) -> None:
        """Refuse impossible values, each with its own sentence.

        Raises:
            UserError: for the first fault found.
        """
        for name, choices in self.CHOICES.items():
            value = getattr(self, name)
            # A default may be none of the choices: empty, it says that nothing was chosen.
            known = value in choices or self.is_default(name)
            require(known, f"--{name} {value} is not known; choose one of {', '.join(choices)}")
        for name in self.POSITIVE:
            value = getattr(self, name)
            require(value >= 1, f"--{name} {value} is too small; give at least 1")
        for name, most in self.MOST.items():
            value = getattr(self, name)
            # One flag with a limit, --num_workers, may be a word.
            fits = value == "auto" or value <= most
            require(fits, f"--{name} {value} is too large; give at most {most:,}")

    def is_default(self, name: str) -> bool:
        """Whether a field has the value that it has when no flag is given."""
        # A dataclass keeps the default of a field as an attribute of the class.
        return bool(getattr(self, name) == getattr(type(self), name))

    def require_at_least_0(self, name: str) -> None:
        """Refuse a negative value, where 0 means none."""
        value = getattr(self, name)
        require(value >= 0, f"--{name} {value} is negative; give 0 for none")
