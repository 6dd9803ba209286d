"""One sentence on what is wrong with a schema: file, section, key, value, and the nearest name there is."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from recsuite.errors import UserError, printable

# Of a value and of a list of names, in a sentence.
MOST_CHARACTERS, MOST_NAMES = 60, 8
# An integer with more bits is not shown: Python refuses to write one with thousands of digits.
MOST_BITS = 256


@dataclass(frozen=True)
class Place:
    """Where in a schema something is written: a file, and a section of it; empty for the file as a whole."""

    path: str
    section: str = ""

    def fault(self, why: str) -> UserError:
        """The error to raise, with where it is, and why it is one."""
        where = f"{self.path}: [{shortened(self.section)}]" if self.section else f"{self.path}:"
        return UserError(f"{where} {why}{'' if why.endswith('?') else '.'}")

    def at(self, section: str) -> Place:
        """Another section of the same file."""
        return Place(self.path, section)

    def wrong(self, key: str, value: object, why: str) -> UserError:
        """The error about the value of a key."""
        return self.fault(f"{shortened(key)} = {shown(value)} {why}")


def place_of(path: Path | str) -> Place:
    """A schema as a whole, by its path or what else tells it apart."""
    return Place(printable(path))


def shortened(text: str) -> str:
    """The beginning of what others wrote, in one line."""
    return printable(text[:MOST_CHARACTERS]) + "..." * (len(text) > MOST_CHARACTERS)


def shown(value: object) -> str:
    """A value as a schema.toml has it, where that is short."""
    if isinstance(value, str):
        return f'"{shortened(value)}"'
    # Its own text may be as deep as Python's stack.
    if isinstance(value, dict | list):
        return "(a section)" if isinstance(value, dict) else "(a list)"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return "(a huge number)"
    return shortened(str(value).lower() if isinstance(value, bool) else str(value))


def nearest(name: str, names: Iterable[str]) -> str:
    """What was probably meant, to end a sentence with; all that there is, where nothing is like it."""
    # The comparison takes time in proportion to both lengths.
    known = sorted({other for other in names if len(other) <= 2 * MOST_CHARACTERS})
    like = difflib.get_close_matches(name[: 2 * MOST_CHARACTERS].lower(), [each.lower() for each in known], 1)
    if like:
        meant = next(each for each in known if each.lower() == like[0])
        return f"did you mean {shown(meant)}?"
    listed = ", ".join(shortened(each) for each in known[:MOST_NAMES])
    return f"there is {listed or 'nothing'}{', ...' * (len(known) > MOST_NAMES)}"
