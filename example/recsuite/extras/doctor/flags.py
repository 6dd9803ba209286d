"""Flag of the check of this machine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from recsuite.config.config import Config, ExtraSection
from recsuite.config.flag import flag


@dataclass(frozen=True)
class DoctorConfig(ExtraSection):
    """Check of this machine."""

    doctor: bool = flag(
        False, "Check the packages, the device, the memory and the data on this machine; trains nothing."
    )
    modes: ClassVar[tuple[str, ...]] = ("doctor",)

    def run_alone(self, config: Config, given: Collection[str], model: Any) -> int:
        """Examine the machine, and return the exit status."""
        from recsuite.extras.doctor.doctor import diagnose

        return diagnose(config)
