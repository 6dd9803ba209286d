"""Data that grow while a stream is trained: when their files have changed, and are whole."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from recsuite.config.config import Config
from recsuite.datasets.source import look
from recsuite.runtime.collectives import broadcast_from_rank0

if TYPE_CHECKING:
    from recsuite.datasets.tables.source import TableFile

# Seconds between two looks at the files.
LOOK_EVERY = 0.25
# Seconds after which it is said what is waited for.
SAID_AFTER = 10.0
# Files of lines: whoever appends to one may be in the middle of its last line.
OF_LINES = (".csv", ".tsv", ".dat", ".data", ".txt", ".jsonl", ".ndjson")
# What is seen of the files: the name of each, and its size.
Seen = dict[str, int]


class Following:
    """Looks at the files of a data set, again and again. Every rank makes one before it reads them.

    A file that came or grew changes what is seen; one that changed and kept its size is no new data.
    """

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        self.config, self.say = config, say
        self.known = self._before = {file.name: file.size for file in self._files()}
        # Since when files that have changed are not whole; and what was said last.
        self._since: float | None = None
        self._said = ""

    def has_grown(self) -> bool:
        """Whether the files are others than those that were known, and seem to be whole; then they are known.

        Collective: every rank. One looks, for a network file system shows changes at different moments.

        Raises:
            UserError: when they cannot be looked at.
        """
        return bool(broadcast_from_rank0(self._has_settled))

    def _has_settled(self) -> bool:
        files = self._files()
        now, before = {file.name: file.size for file in files}, self._before
        self._before = now
        if now == self.known:
            self._since = None
            return False
        # What is still being written is another one at the next look.
        if moving := {name for name, _ in now.items() ^ before.items()}:
            self._say_after_a_while(f"{min(moving)} is written to without rest, and is read when it rests")
            return False
        changed = [file for file in files if self.known.get(file.name) != file.size]
        if unfinished := [file.name for file in changed if not _ends_a_line(file)]:
            self._say_after_a_while(f"{unfinished[0]} does not end with a whole line, and is waited for")
            return False
        self.known, self._since = now, None
        return True

    def say_once(self, sentence: str) -> None:
        """Say it, unless it was what was said last."""
        if sentence != self._said:
            self.say(sentence)
        self._said = sentence

    def _say_after_a_while(self, sentence: str) -> None:
        now = time.monotonic()
        self._since = self._since or now
        if now - self._since > SAID_AFTER:
            self.say_once(sentence)

    def _files(self) -> list[TableFile]:
        found = look(self.config.data, self.config.runtime.seed)[1]
        # A folder that is moved away for a moment is one that has not settled.
        return [] if found is None else found.files


def _ends_a_line(file: TableFile) -> bool:
    """Whether a file holds whole lines, if it holds any."""
    if not file.name.endswith(OF_LINES) or file.size == 0:
        return file.size != 0
    with file.open() as opened:
        opened.seek(-1, 2)
        return opened.read(1) == b"\n"
