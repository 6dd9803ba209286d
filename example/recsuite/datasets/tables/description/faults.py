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

    def unreadable(self, why: str) -> UserError:
        """The error about the file as a whole, as one sentence that begins with it."""
        return UserError(f"{self.path} {why}.")

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
        # Spaces that are not seen, such as one at the end, may be all that is wrong with it.
        is_plain = " ".join(value[:MOST_CHARACTERS].split()) == value[:MOST_CHARACTERS]
        return f'"{shortened(value)}"' if is_plain else shortened(ascii(value))
    # Its own text may be as deep as Python's stack.
    if isinstance(value, dict | list):
        return "(a section)" if isinstance(value, dict) else "(a list)"
    if isinstance(value, int) and value.bit_length() > MOST_BITS:
        return "(a huge number)"
    return shortened(str(value).lower() if isinstance(value, bool) else str(value))


def nearest(name: str, names: Iterable[str]) -> str:
    """What was probably meant, to end a sentence with; all that there is, where nothing is like it."""
    known = _comparable(names)
    listed = ", ".join(shortened(each) for each in known[:MOST_NAMES])
    return meant(name, known) or f"known are {listed or 'none'}{', ...' * (len(known) > MOST_NAMES)}"


def meant(name: str, names: Iterable[str]) -> str:
    """What was probably meant, as a question; empty where nothing is like it."""
    known = {each.lower(): each for each in _comparable(names)}
    like = difflib.get_close_matches(name[: 2 * MOST_CHARACTERS].lower(), known, 1)
    return f"did you mean {shown(known[like[0]])}?" if like else ""


def _comparable(names: Iterable[str]) -> list[str]:
    # A comparison takes time in proportion to both lengths.
    return sorted({name for name in names if len(name) <= 2 * MOST_CHARACTERS})
