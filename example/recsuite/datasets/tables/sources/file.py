"""What is known of the files of a table before they are read."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

from recsuite.datasets.tables.sources.remote import is_remote, mark_of, shown
from recsuite.files import digest_of, explained

EVENTS, USERS, ITEMS = "events", "users", "items"
# By the ends of names.
FORMATS = {
    **dict.fromkeys((".csv", ".txt", ".dat", ".data", ".inter", ".user", ".item"), "csv"),
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
}
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
# What writers of partitions call a missing value.
MISSING_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """A file of a table.

    path: as it is opened. format: csv, tsv, jsonl, parquet or arrow. compression: gzip, zstd or empty, by the
    name. size: in bytes, -1 where a server does not say. partitions: (column, value) of the folders that it
    lies in. encoding, delimiter: of text. columns: their names, where the text has no line with them.
    """

    # An address may hold a password, and so this is never shown.
    path: str = field(repr=False)
    format: str
    compression: str = ""
    size: int = 0
    partitions: tuple[tuple[str, str], ...] = ()
    encoding: str = "utf-8"
    delimiter: str = ""
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """What messages call it: the path, or the URL without secrets."""
        return shown(self.path) if is_remote(self.path) else self.path

    @property
    def is_text(self) -> bool:
        """Whether its columns have no types but that of text."""
        return self.format in ("csv", "tsv")

    # Found once: a run asks for it twice, and reads all bytes for it.
    @functools.cached_property
    def digest(self) -> str:
        """What tells its content from another: the digest of the bytes; of a URL see `remote.mark_of`."""
        if is_remote(self.path):
            return mark_of(self.path)
        with explained(f"{self.name} cannot be read", "give a file that can"):
            return digest_of(Path(self.path))


@dataclass(frozen=True)
class Tables:
    """The files of each role, in the order of their paths; of events there is one at least.

    root: the folder or URL that was given. ignored: the names of what lies there and is no table.
    """

    root: str = field(repr=False)
    events: tuple[File, ...]
    users: tuple[File, ...] = ()
    items: tuple[File, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, tuple[File, ...]]:
        """The files by what they hold."""
        return {EVENTS: self.events, USERS: self.users, ITEMS: self.items}

    @property
    def files(self) -> tuple[File, ...]:
        """All of them."""
        return (*self.events, *self.users, *self.items)

    def name_of(self, file: File) -> str:
        """A file's name from the folder on: the same in a copy elsewhere."""
        return file.name.removeprefix(self.root).lstrip("/")
