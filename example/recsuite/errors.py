"""The one exception that means "the user can mend this", and how messages and numbers are shown."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

# Of what others wrote, in a sentence.
MAX_CHARACTERS = 300
# What a text of several lines, such as a traceback, keeps.
LINES = "\n\t"


class UserError(Exception):
    """Mistake outside the program: bad flag, file, row, network or installation.

    Its message is one sentence with the value, the limit and what to do. A script prints it from one rank
    without a traceback and exits with status 2; every other exception keeps its traceback.

        try:
            model = rs.ServedModel.open("dumps")
        except rs.UserError as error:
            print(error)
    """

    def __str__(self) -> str:
        # Names of files and folders are in many of them.
        return harmless(super().__str__())


class LostPeerError(RuntimeError):
    """Another rank is gone, or sends nothing: this one can only end too."""


class BrokenLaunchError(LostPeerError):
    """The same where it is known which rank is gone: the sentence says all, as a mistake's."""


def script_name() -> str:
    """The script that this process runs; example.py where it runs none, as with `python -m` and `-c`."""
    name = Path(sys.argv[0]).name
    # A module that is run, such as the check of a command line, is a __main__.py, and works for the example.
    return name if name.endswith(".py") and not name.startswith("__") else "example.py"


def signed(sentence: object) -> str:
    """A message of the script's, which begins with its name."""
    return f"{script_name()}: {harmless(sentence, LINES)}"


def harmless(text: object, kept: str = "") -> str:
    """Return a text with escapes for control characters and for those that change the order of others; `kept`
    stay.
    """
    words = str(text)
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in words)


def printable(found: object) -> str:
    """What others wrote, such as a server or a file, as one line that does nothing to a terminal."""
    words = " ".join(str(found).split())
    return harmless(words[:MAX_CHARACTERS]) + "..." * (len(words) > MAX_CHARACTERS)


def an(noun: str) -> str:
    """A noun with its article."""
    # "A user", by its sound.
    is_vowel = noun[:1].lower() in "aeiou" and not noun.lower().startswith(("use", "uni"))
    return f"{'an' if is_vowel else 'a'} {noun}"


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun, such as "1 row" or "2,000 rows"; many: where an s does not make the plural."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def four_places(value: float | None) -> str:
    """A metric as tables and lines show it; "-" where it is not defined or not finite."""
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "-"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table, the first row its heading; numbers stand to the right, in all columns but the first."""
    widths = [max(6, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {name:<{widths[0]}} | {' | '.join(map(str.rjust, row, widths[1:]))} |" for name, *row in rows
    ]
    rule = "|".join("-" * (width + 1) + ":" for width in widths[1:])
    return "\n".join([lines[0], f"|{'-' * (widths[0] + 2)}|{rule}|", *lines[1:]])


def duration(seconds: float) -> str:
    """In the largest unit of which there are two, such as "12 s", "7 min", "3 h" or "2 d"."""
    # The age of a file is below zero where the clock is behind that of whoever wrote it.
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
