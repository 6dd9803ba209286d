"""Origin of the events of a stream, and its growth: the parts of files that were not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import check_stream
from recsuite.datasets.source import locate, look, with_flags
from recsuite.datasets.streams import TAIL_BYTES, FilePosition
from recsuite.errors import UserError
from recsuite.files import digest_of_part

if TYPE_CHECKING:
    from recsuite.datasets.tables.files import File
    from recsuite.datasets.tables.source import TableSource

# Bytes in which the last line end is searched.
AT_ONCE = 2**20


class Growth(NamedTuple):
    """Part of a file to read. file: None if nothing is in it; end: position after it.

    rows: number of rows before it, None if rows before it were removed; then `end.read` is that at its end.
    begin: of a new partition, its first offset.
    """

    file: File | None
    rows: int | None
    end: FilePosition
    begin: int = 0


class StreamFiles(Protocol):
    """Files from which a stream is read, or partitions of a topic that are read like files. Not collective.

    keeps_parts: True if a first reading of the files may be repeated. notes: what is to be told once.
    """

    keeps_parts: bool
    notes: list[str]

    def ends(self) -> dict[str, Any]:
        """Return for each file how far it can be read now. One rank asks, and all ranks read up to there."""

    def source(self) -> TableSource:
        """Return the data set: its schema, its tables of users and items, and its files of events if any."""

    def names(self, source: TableSource, ends: Mapping[str, Any]) -> list[str]:
        """Return the names of all files of events."""

    def growth(
        self, source: TableSource, ends: Mapping[str, Any], known: Mapping[str, FilePosition], folder: Path
    ) -> dict[str, Growth]:
        """Return what is to be read, by the name of the file.

        known: positions up to which the files were read; folder: for temporary files.
        """

    def unread(self, ends: Mapping[str, Any], known: Mapping[str, FilePosition]) -> list[str]:
        """Return the names of the files of which `growth` would return more."""

    def close(self) -> None:
        """Close connections."""


class GrowingFiles:
    """Files of a stream, which grow at their ends and become more, see `StreamFiles`."""

    keeps_parts = True

    def __init__(self, config: Config) -> None:
        self._config = config
        self.notes: list[str] = []

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def ends(self) -> dict[str, int]:
        """Return the size of each file, in bytes."""
        data, seed = self._config.data, self._config.runtime.seed
        source = look(data, seed)[1] or locate(data, seed)
        return {file.name: file.size for file in source.files}

    def source(self) -> TableSource:
        """Return the data set, with all its files.

        Raises:
            UserError: when there is none, or it is no stream.
        """
        data = self._config.data
        source = with_flags(locate(data, self._config.runtime.seed), self._config.tables, data)
        check_stream(source, self._config)
        return source

    def names(self, source: TableSource, ends: Mapping[str, int]) -> list[str]:
        """Return the names of all files of events."""
        return [source.tables.name_of(file) for file in source.tables.events]

    def growth(
        self, source: TableSource, ends: Mapping[str, int], known: Mapping[str, FilePosition], folder: Path
    ) -> dict[str, Growth]:
        """Return what is to be read, by the name of the file.

        Raises:
            UserError: when a file changed before where it was read up to.
        """
        growth = {}
        for file in source.tables.events:
            name = source.tables.name_of(file)
            # A server may not tell the size.
            part = self._part(file, known.get(name, FilePosition()), max(ends.get(name, 0), 0))
            if part is not None:
                growth[name] = part
        return growth

    def unread(self, ends: Mapping[str, int], known: Mapping[str, FilePosition]) -> list[str]:
        """Return no file: `growth` returns all at once."""
        return []

    def _part(self, file: File, known: FilePosition, end: int) -> Growth | None:
        # Imported here: a rank that reads no files needs no Arrow.
        from recsuite.datasets.tables.formats import can_be_cut, header_of

        if end == known.bytes:
            return None
        if not can_be_cut(file):
            # Read again from its begin, because only its rows can be counted.
            return Growth(file, 0, FilePosition(bytes=end))
        end = self._whole_lines(file, known.bytes, end)
        if end == known.bytes or (not known.bytes and end <= len(header_of(file))):
            return None
        size = min(file.size, end)
        if size < max(end, known.bytes) or (known.bytes and known.tail != _tail_of(file, known.bytes)):
            raise UserError(
                f"The first {known.bytes or end:,} bytes of {file}, which has {size:,}, are not those that "
                "this stream has learned from: a stream continues with new files and with what is added at "
                "the end of files. Fix: put the file back as it was, or train anew with --move_aside instead "
                "of --resume."
            )
        if known.bytes or end != file.size:
            begin, rows = known.bytes, known.rows
            file = dataclasses.replace(file, part=(begin, end), rows_before=rows, is_more=begin > 0)
        return Growth(file, known.rows, FilePosition(bytes=end, tail=_tail_of(file, end)))

    def _whole_lines(self, file: File, begin: int, end: int) -> int:
        """Return the end of the lines to read of a text; refuse a line that goes on where one was read.

        The last line of data that are followed is read when its end has come.
        """
        if end <= begin:
            return end
        with Path(file.path).open("rb") as opened:
            opened.seek(max(0, begin - 1))
            start = opened.read(2 if begin else 0)
            if len(start) == 2 and start[:1] != b"\n" and start[1:] not in (b"\n", b"\r"):
                raise UserError(
                    f"A line of {file} that was read without its end goes on at byte {begin:,}. Fix: end the "
                    "file there with a line end and write the whole line again, or train anew."
                )
            if not self._config.stream.follow_data:
                return end
            for first in range(max(begin, end - AT_ONCE), begin - 1, -AT_ONCE):
                opened.seek(first)
                place = opened.read(min(AT_ONCE, end - first)).rfind(b"\n")
                if place >= 0:
                    return first + place + 1
        return begin


def _tail_of(file: File, end: int) -> str:
    """Return the digest of the bytes of a file before a position."""
    return digest_of_part(Path(file.path), max(0, end - TAIL_BYTES), end)
