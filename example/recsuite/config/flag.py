"""A flag: its help text and limits; and a section, which is a group of flags."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from recsuite.errors import require


@dataclass(frozen=True)
class Flag:
    """Help text and limits of a flag.

    choices: the allowed texts; empty means any. least, most: limits of a number. requires: another flag and
    the value that it must have; True means any value except the empty one. per_machine: it may differ between
    the machines of a training.
    """

    text: str
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    requires: tuple[str, str | bool] | None = None
    per_machine: bool = False

    def check(self, name: str, value: Any) -> None:
        """Refuse a value that is neither a choice nor within the limits.

        Raises:
            UserError: with the flag, its limits and the value.
        """
        choices = ", ".join(self.choices)
        if value in self.choices or (self.least is None and not self.choices):
            return
        require(self.least is not None, f"--{name} must be one of {choices}, got {value}")
        assert self.least is not None
        most = float("inf") if self.most is None else self.most
        limits = (
            f"at least {self.least:,}" if self.most is None else f"between {self.least:,} and {self.most:,}"
        )
        words = f", or {choices}" if choices else ""
        is_within = not isinstance(value, str) and self.least <= value <= most
        require(is_within, f"--{name} must be {limits}{words}, got {value}")


def flag(
    default: Any,
    text: str,
    choices: tuple[str, ...] = (),
    least: float | None = None,
    most: float | None = None,
    requires: tuple[str, str | bool] | None = None,
    per_machine: bool = False,
) -> Any:
    """Return a field of a section; see `Flag`. default: of the flag, or a function that returns it."""
    limits = Flag(text, choices, least, most, requires, per_machine)
    if callable(default):
        return dataclasses.field(default_factory=default, metadata={"flag": limits})
    return dataclasses.field(default=default, metadata={"flag": limits})


@dataclass(frozen=True)
class Section:
    """A group of flags; each is a field that `flag` makes."""

    @classmethod
    def flag(cls, name: str) -> Flag:
        """Return the help text and the limits of a flag of this section."""
        flag_of_field = cls.__dataclass_fields__[name].metadata["flag"]
        assert isinstance(flag_of_field, Flag)
        return flag_of_field

    @classmethod
    def default(cls, name: str) -> Any:
        """Return the default value of a field of this section."""
        return getattr(cls(), name)

    def validate(self) -> None:
        """Refuse impossible values, each with its own message.

        Raises:
            UserError: for the first fault found.
        """
        for name, value in vars(self).items():
            # A default may be none of the choices: an empty one means that none was chosen.
            if not self.is_default(name):
                self.flag(name).check(name, value)

    def is_default(self, name: str) -> bool:
        """True if a field has its default value."""
        return bool(getattr(self, name) == self.default(name))
