"""Data that grow while a stream is trained: when their files have changed, and are whole."""

from __future__ import annotations

from recsuite.config.config import Config
from recsuite.datasets.source import SourceFile, look
from recsuite.runtime.collectives import broadcast_from_rank0

# Seconds between two looks at the files.
LOOK_EVERY = 0.25
# Files of lines: whoever appends to one may be in the middle of its last line.
OF_LINES = (".csv", ".tsv", ".dat", ".data", ".txt", ".jsonl", ".ndjson")
# What is seen of the files: the name of each, and its size.
Seen = dict[str, int]


class Following:
    """Looks at the files of a data set, again and again. Every rank makes one before it reads them.

    A file that came or grew changes what is seen; one that changed and kept its size is no new data.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.known = self._before = {file.name: file.size for file in self._files()}

    def has_grown(self) -> bool:
        """Whether the files are others than those that were known, and seem to be whole; then they are known.

        Collective: every rank. One looks, for a network file system shows changes at different moments.

        Raises:
            UserError: when they cannot be looked at.
        """
        return bool(broadcast_from_rank0(self._has_settled))

    def _has_settled(self) -> bool:
        files = self._files()
        now = {file.name: file.size for file in files}
        # What is still being written is another one at the next look.
        is_settled, self._before = now == self._before, now
        if now == self.known or not is_settled:
            return False
        changed = [file for file in files if self.known.get(file.name) != file.size]
        if not all(map(_ends_a_line, changed)):
            return False
        self.known = now
        return True

    def _files(self) -> list[SourceFile]:
        found = look(self.config.data, self.config.runtime.seed)[1]
        # A folder that is moved away for a moment is one that has not settled.
        return [] if found is None else list(found.files)


def _ends_a_line(file: SourceFile) -> bool:
    """Whether a file holds whole lines, if it holds any."""
    if not file.name.endswith(OF_LINES) or file.size == 0:
        return file.size != 0
    with file.open() as opened:
        opened.seek(-1, 2)
        return opened.read(1) == b"\n"
