"""What the launcher writes of its own: each message begins with who says it."""

from __future__ import annotations

import sys

from recsuite.errors import LINES, harmless


def say(sentence: object) -> None:
    """Write a message to standard error, at once and of one piece."""
    # The ranks write there too, and a line of theirs could come between.
    sys.stderr.write(f"launcher: {harmless(sentence, LINES)}\n")
    sys.stderr.flush()
