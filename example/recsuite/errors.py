"""Exceptions for mistakes of the user, and the form of messages and numbers."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path

# Longest text of a file or server that is shown in a sentence.
MAX_CHARACTERS = 300
# Control characters that a text of several lines, such as a traceback, keeps.
LINES = "\n\t"


class UserError(Exception):
    """Mistake outside the program: bad flag, file, row, network or installation.

    Its message is one sentence with the value, the limit and what to do. A script prints it from one rank
    without a traceback and exits with status 2; every other exception keeps its traceback.

    Example:
        try:
            model = rs.ServedModel.open("dumps/example", model=make_model)
        except rs.UserError as error:
            print(error)
    """

    def __str__(self) -> str:
        # Many messages contain names of files and folders.
        return escaped(super().__str__())


class LostPeerError(RuntimeError):
    """Another rank ended or does not answer. This rank can only end too."""


class BrokenLaunchError(LostPeerError):
    """LostPeerError that names the rank. Its message is complete, like that of a UserError."""


def script_name() -> str:
    """Name of the script that this process runs; example.py if it runs none, as with `python -m` and `-c`."""
    name = Path(sys.argv[0]).name
    # `python -m` runs a __main__.py, such as the check of a command line, for example.py.
    return name if name.endswith(".py") and not name.startswith("__") else "example.py"


def with_script_name(sentence: object) -> str:
    """Message that begins with the name of the script."""
    return f"{script_name()}: {escaped(sentence, LINES)}"


def escaped(text: object, kept: str = "") -> str:
    """Return a text with escapes for control characters and for those that change the text direction.

    kept: characters that are not escaped.
    """
    words = str(text)
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() or c in kept else c.encode("unicode_escape").decode() for c in words)


def printable(value: object) -> str:
    """Return a text of a server or file as one line that is safe to print on a terminal."""
    words = " ".join(str(value).split())
    return escaped(words[:MAX_CHARACTERS]) + "..." * (len(words) > MAX_CHARACTERS)


def with_article(noun: str) -> str:
    """A noun with its article."""
    # The article depends on the sound: "a user".
    is_vowel = noun[:1].lower() in "aeiou" and not noun.lower().startswith(("use", "uni"))
    return f"{'an' if is_vowel else 'a'} {noun}"


def counted(number: int, one: str, many: str = "") -> str:
    """Number with its noun, such as "1 row" or "2,000 rows"; many: the plural, unless it is formed with s."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_metric(value: float | None) -> str:
    """Metric as tables and lines show it; "-" if it is not defined or not finite."""
    return f"{value:.4f}" if value is not None and math.isfinite(value) else "-"


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Markdown table. The first row is the heading. All columns but the first are right-aligned."""
    widths = [max(6, *map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        f"| {name:<{widths[0]}} | {' | '.join(map(str.rjust, row, widths[1:]))} |" for name, *row in rows
    ]
    rule = "|".join("-" * (width + 1) + ":" for width in widths[1:])
    return "\n".join([lines[0], f"|{'-' * (widths[0] + 2)}|{rule}|", *lines[1:]])


def format_duration(seconds: float) -> str:
    """Duration in the largest unit of which there are at least two: "12 s", "7 min", "3 h" or "2 d"."""
    # The age of a file is negative if this clock is behind the clock of its writer.
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def require(condition: bool, sentence: str) -> None:
    """Check a condition.

    Raises:
        UserError: the sentence.
    """
    if not condition:
        raise UserError(f"{sentence}.")
