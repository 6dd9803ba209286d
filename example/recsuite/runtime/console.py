"""The `print` of a process among others: each line begins with who says it. Importing it changes nothing."""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Callable
from typing import Any


class TaggedPrint:
    """A `print` that begins each line with a tag; it keeps the one it stands in for."""

    def __init__(self, original: Callable[..., None], tag: str) -> None:
        self.original = original
        self.tag = tag
        # The moment of the last line, by the monotonic clock.
        self.when = 0.0

    def __call__(
        self, *values: object, sep: str | None = " ", end: str | None = "\n", **options: Any
    ) -> None:
        """Print to the terminal with the tag, flushed; to any other file as it is."""
        if options.get("file") not in (None, sys.stdout, sys.stderr):
            self.original(*values, sep=sep, end=end, **options)
            return
        text = (" " if sep is None else sep).join(map(str, values))
        self.when = time.monotonic()
        tagged = "\n".join(f"[{self.tag}] {line}" for line in text.split("\n"))
        # Of one piece: where output is not buffered, the line of another rank could come before its end.
        self.original(tagged + ("\n" if end is None else end), **{**options, "end": "", "flush": True})


def install_print(tag: str) -> None:
    """Put a tagged print in the place of `print`; a second time replaces the first."""
    restore_print()
    builtins.print = TaggedPrint(builtins.print, tag)


def restore_print() -> None:
    """Give back the `print` that `install_print` found."""
    if isinstance(builtins.print, TaggedPrint):
        builtins.print = builtins.print.original
