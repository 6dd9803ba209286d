"""Files of tables: find them below a path, on this machine or behind a URL, and open them.

A path is one file, a folder of parts, day partitions, or a URL. A folder may hold tables of users and items
beside the events. This module finds and classifies files; `formats` reads them.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from recsuite.datasets.tables.sections import EVENTS, FILENAME, ITEMS, USERS, Files
from recsuite.errors import UserError, printable
from recsuite.files import check_name, digest_of, digest_of_part, explained, place_for
from recsuite.hooks import extra
from recsuite.places import is_remote, shown

# Bytes of JSON lines that are parsed at once; no line may be longer.
JSON_BLOCK_BYTES = 2**22


# Formats by the suffix of a name; `formats.READERS` and `hooks.READERS` have their readers.
FORMATS = {
    **dict.fromkeys((".csv", ".txt", ".dat", ".data", ".inter", ".user", ".item"), "csv"),
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
}
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
# Suffixes of packed files that are not unpacked.
ARCHIVES = {
    *(".bz2", ".bzip2", ".xz", ".lzma", ".zip", ".7z", ".rar", ".tar", ".tgz", ".tbz2", ".txz", ".lz4"),
    *(".lzo", ".br", ".z", ".sz", ".snappy"),
}
PACKED = re.compile("(" + "|".join(map(re.escape, (*ARCHIVES, *COMPRESSIONS))) + ")+$", re.IGNORECASE)
# Files that a message lists.
MOST_LISTED = 5
# Name of a missing value in a partition.
MISSING_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """File of a table.

    path: as it is opened. format: csv, tsv, jsonl, parquet or arrow. compression: gzip, zstd or empty, by the
    name. size: in bytes, -1 if a server does not report it. partitions: (column, value) of its folders.
    encoding, delimiter: of text. columns: their names, if the text has no header. part: (begin, end) of the
    bytes that are read of a text that grows, besides its header; None for all. rows_before: number of rows
    before the part. is_more: True if other events were read before, so it may have none that is readable.
    label: name for messages instead of the path.
    """

    # Never shown: an address may hold a password.
    path: str = field(repr=False)
    format: str
    compression: str = ""
    size: int = 0
    partitions: tuple[tuple[str, str], ...] = ()
    encoding: str = "utf-8"
    delimiter: str = ""
    columns: tuple[str, ...] = ()
    # Not in the name of its rows on the disk, which has a digest of the bytes.
    part: tuple[int, int] | None = field(default=None, repr=False)
    rows_before: int = field(default=0, repr=False)
    is_more: bool = field(default=False, repr=False)
    label: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Name for messages: the path, or the URL without secrets."""
        return self.label or shown(self.path)

    @property
    def is_text(self) -> bool:
        """True if all its columns are texts."""
        return self.format in ("csv", "tsv")

    @property
    def is_of_lines(self) -> bool:
        """True if it is a text that can grow by lines."""
        return not self.compression and self.format in ("csv", "tsv", "jsonl")

    # Cached: a run needs it twice, and it reads all bytes.
    @functools.cached_property
    def digest(self) -> str:
        """Digest of the bytes; for a URL, a mark of its version."""
        if is_remote(self.path):
            return str(extra("urls").mark_of(self.path))
        with explained(f"Cannot read {self.name}", "give another file"):
            path = Path(self.path)
            return digest_of(path) if self.part is None else digest_of_part(path, *self.part)


@dataclass(frozen=True)
class Tables:
    """Files of each role, in the order of their paths; only a topic has no file of events.

    root: the given folder or URL. ignored: the names of the files there that are no tables.
    """

    root: str = field(repr=False)
    events: tuple[File, ...]
    users: tuple[File, ...] = ()
    items: tuple[File, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, tuple[File, ...]]:
        """Files by role."""
        return {EVENTS: self.events, USERS: self.users, ITEMS: self.items}

    @property
    def files(self) -> tuple[File, ...]:
        """All files."""
        return (*self.events, *self.users, *self.items)

    def name_of(self, file: File) -> str:
        """Return a file's path relative to the root; it is the same in a copy of the folder."""
        return file.name.removeprefix(self.root).lstrip("/")


def schema_path(path: str | Path) -> Path:
    """Path of the schema of tables: in their folder, or that of the file; for a URL in the working folder.

    If it does not exist there and cannot be written there, it is in the folder of the tables' columns.
    """
    if is_remote(str(path)):
        return Path.cwd() / FILENAME
    with explained(f"Cannot read {printable(path)}"):
        folder = Path(path) if Path(path).is_dir() else Path(path).parent
        beside = folder / FILENAME
        return beside if beside.exists() or not folder.is_dir() else place_for(folder, FILENAME)


# Limits the search in a wrong folder, such as the root of the disk.
MAX_FILES = 100_000
# Suffixes of RecBole's tables: https://recbole.io/docs/user_guide/data/atomic_files.html
RECBOLE = {".inter": EVENTS, ".user": USERS, ".item": ITEMS}
# Separates several files or patterns of one role.
SEVERAL = ", "
# Names of the files of a split.
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "val", "validation", "dev"), "validation"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# Words in the names of the parts of one table.
PART_WORDS = {"part", "parts", "chunk", "shard", "of", "day", "week", "month", "year", "q"} | {
    *("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"),
    *("january", "february", "march", "april", "june", "july", "august", "september", "october"),
    *("november", "december"),
}
# Words in the names of text files that are no tables.
PROSE = re.compile(
    r"readme|licen[cs]e|copying|notice|changelog|description|about|citation|terms", re.IGNORECASE
)
PARTITION = re.compile(r"([^=]+)=(.*)")


def find_tables(path: str | Path, files: Files | None = None, events: Sequence[str] | None = None) -> Tables:
    """Find the tables of a file, a folder or a URL, without reading them.

    files: the section of the schema; its paths are relative to the folder, or to the folder of the file.
    events: paths of the events, which are not searched then.

    Raises:
        UserError: when there are none, a named one is missing, one role has files of several formats, or a
            table is packed in a way that is not read.
    """
    files, root = files or Files(), str(path)
    if root.startswith("file://"):
        root = unquote(root.removeprefix("file://"))
    elif not is_remote(root):
        root = os.path.abspath(root)
    is_folder = not _is_file(root)
    folder = root if is_folder else root.rpartition("/")[0] or "."
    named = {
        role: _named(folder, pattern, role)
        for role, pattern in ((EVENTS, files.events), (USERS, files.users), (ITEMS, files.items))
        if pattern
    }
    listed, others = _listed(root, is_folder) if EVENTS not in named else ([], [])
    by_role, ignored = _roles(folder, listed, others)
    if not is_folder and EVENTS not in named:
        by_role = {EVENTS: listed}
    # A table that is named for another role is not one of the events.
    taken = {path for role in named for path in named[role]}
    roles = {role: [each for each in paths if each not in taken] for role, paths in by_role.items()} | named
    for path_of in ignored:
        name = PACKED.sub("", path_of)
        # A table that is there only packed.
        if name != path_of and _is_table(name) and name not in listed:
            raise UserError(
                f"Cannot read {path_of}: {why_no_table(path_of)}. Fix: unpack it, pack it as .gz, or move "
                f"it to another folder; or name the events to read under [files] of {FILENAME}."
            )
    if events is not None:
        roles[EVENTS] = [*events]
    elif not roles.get(EVENTS):
        raise UserError(
            f"{shown(root)} holds no table of events; give a file or a folder with CSV, TSV, JSON lines, "
            f"Parquet or Arrow files{_of_others(folder, ignored)}."
        )
    made = {role: _files(folder, role, paths, files) for role, paths in roles.items()}
    left = tuple(sorted({*ignored} - taken))
    return Tables(root, made[EVENTS], made.get(USERS, ()), made.get(ITEMS, ()), left)


def why_no_table(path: str) -> str:
    """Return the reason why a file is not taken for a table by its name; empty if it is taken."""
    ends = _ends_of(path) or ["(none)"]
    if packed := [end for end in ends if end in ARCHIVES]:
        return f"files of the ending {packed[0]} are not unpacked"
    if _format_of(path):
        return "" if _is_table(path) else "it is called like a description"
    return f"the ending {ends[-1]} is none of a table"


def _of_others(folder: str, paths: Sequence[str]) -> str:
    """Return the files of a folder without tables, each with the reason, and what to write to read one."""
    names = {path: path.removeprefix(folder).lstrip("/") for path in paths[:MOST_LISTED]}
    texts = [name for path, name in names.items() if not {*_ends_of(path)} & ARCHIVES]
    fix = (
        f'call a text .csv, or write events = "{texts[0]}" under [files] of {FILENAME}' if texts else "unpack"
    )
    listed = "; ".join(f"{name}: {why_no_table(path)}" for path, name in names.items())
    return f". It holds {listed}{'; ...' * (len(paths) > MOST_LISTED)}. Fix: {fix}" if paths else ""


def beside(tables: Tables) -> tuple[File, ...]:
    """Return the tables of a local folder that are not read, as another one is called or named events."""
    if is_remote(tables.root) or not os.path.isdir(tables.root):
        return ()
    read = {os.path.normpath(file.path) for file in tables.files}
    others = [path for path in _listed(tables.root, True)[0] if os.path.normpath(path) not in read]
    return tuple(_file(path, tables.root, Files()) for path in others)


def unread(tables: Tables) -> list[str]:
    """Return the files of a local folder that are called like those of the events, but are not read."""
    alike = {_likeness(file.path) for file in tables.events}
    # A schema that names its files need not allow all others to be listed.
    with contextlib.suppress(UserError):
        paths = [file.path for file in beside(tables) if _likeness(file.path) in alike]
        return [os.path.relpath(path, tables.root) for path in paths]
    return []


def _likeness(path: str) -> tuple[str, str]:
    """Return what all files of a table have in common: their folder and the words of their names."""
    return os.path.dirname(os.path.normpath(path)), stem_of(path)


def split_part(name: str) -> str:
    """Return "train", "validation" or "test" if the file's name says so, else an empty text."""
    # The file's name has priority over a folder's.
    words = [word for part in reversed(name.lower().split("/")) for word in re.split(r"[^a-z]+", part)]
    return next((SPLIT_WORDS[word] for word in words if word in SPLIT_WORDS), "")


def has_split(names: Iterable[str]) -> bool:
    """True if some files are called train and others test."""
    return {split_part(name) for name in names} >= {"train", "test"}


def stem_of(path: str) -> str:
    """Words of a file's name that all parts of a table share: without numbers, months and words for parts."""
    words = re.split(r"[^a-z]+", path.rpartition("/")[2].partition(".")[0].lower())
    return " ".join(word for word in words if word and word not in SPLIT_WORDS and word not in PART_WORDS)


def _is_file(root: str) -> bool:
    """Return True for one file, False for a folder; refuse anything else."""
    if is_remote(root):
        return _format_of(root) is not None and not set("*[") & set(root.partition("?")[0])
    if os.path.isdir(root):
        return False
    if not os.path.exists(root):
        raise UserError(f"{root} does not exist; give a file, a folder or a URL.")
    # Reading from a pipe or a device may never end.
    if not os.path.isfile(root):
        raise UserError(f"{root} is neither a file nor a folder.")
    return True


def _named(folder: str, pattern: str, role: str) -> list[str]:
    """Return the files of an entry of [files]: a file, a folder, a glob pattern, or several of these."""
    path = pattern if is_remote(pattern) or os.path.isabs(pattern) else f"{folder.rstrip('/')}/{pattern}"
    if SEVERAL in pattern and not os.path.exists(path):
        return [one for each in pattern.split(SEVERAL) for one in _named(folder, each, role)]
    if is_remote(path):
        paths = [path] if _is_file(path) else [*filter(_is_table, extra("urls").list_files(path))]
    elif os.path.isdir(path):
        paths = [each for each in _walked(path) if _is_table(each)]
    else:
        paths = [path] if os.path.isfile(path) else sorted(glob.glob(path, recursive=True))
    if not paths:
        raise UserError(
            f"{shown(path)} is not there; put the {role} there, or name another file under "
            f"[files] in {FILENAME}."
        )
    return paths


def _listed(root: str, is_folder: bool) -> tuple[list[str], list[str]]:
    """Return the tables below a path, and the other files. A path that is a file is always a table."""
    if not is_folder:
        return [root], []
    if is_remote(root):
        paths = [each for each in extra("urls").list_files(root) if not _is_hidden(each.removeprefix(root))]
        # A server may give the requested file under another name.
        if len(paths) == 1:
            return paths, []
    else:
        paths = _walked(root)
    return [each for each in paths if _is_table(each)], [each for each in paths if not _is_table(each)]


def _walked(root: str) -> list[str]:
    files: list[str] = []

    def refuse(error: OSError) -> None:
        raise UserError(
            f"Cannot read {error.filename}: {error.strerror}. Fix: allow it, or remove the folder."
        )

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in sorted(folders) if not _is_hidden(name)]
        paths = [f"{folder.rstrip('/')}/{name}" for name in names if not _is_hidden(name)]
        files += [path for path in paths if os.path.isfile(path)]
        if len(files) > MAX_FILES:
            raise UserError(f"{root} holds more than {MAX_FILES:,} files; give the folder of the tables.")
    return sorted(files)


def _is_hidden(path: str) -> bool:
    """True for files of programs, such as .columns, .crc, _SUCCESS and _delta_log, and for the schema."""
    return any(part.startswith((".", "_")) or part == FILENAME for part in path.split("/"))


def _roles(folder: str, paths: list[str], others: list[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Assign the tables of a folder to roles by their names; also return the ignored ones."""
    roles: dict[str, list[str]] = {}
    for path in paths:
        roles.setdefault(_role_of(path.removeprefix(folder).lstrip("/")), []).append(path)
    rest = roles.pop("", [])
    # If a table is called events, other tables are not events.
    if EVENTS in roles:
        others = [*others, *rest]
    elif rest:
        roles[EVENTS] = rest
    return roles, [shown(path) for path in others]


def _role_of(path: str) -> str:
    """Return the role that the first part of a path below the folder names; else an empty text."""
    first = path.split("/")[0].partition(".")[0].lower()
    if first in (EVENTS, USERS, ITEMS):
        return first
    return next((role for end, role in RECBOLE.items() if end in _ends_of(path)), "")


def _ends_of(path: str) -> list[str]:
    """Return the suffixes of a name in lower case, such as .csv and .gz."""
    plain = path.partition("?")[0].partition("#")[0] if is_remote(path) else path
    return [f".{part.lower()}" for part in plain.rpartition("/")[2].split(".")[1:]]


def _format_of(path: str) -> str | None:
    ends = [end for end in _ends_of(path) if end not in COMPRESSIONS]
    return FORMATS.get(ends[-1]) if ends else None


def _is_table(path: str) -> bool:
    is_prose = ".txt" in _ends_of(path) and PROSE.search(path.rpartition("/")[2])
    return _format_of(path) is not None and not is_prose


def _files(folder: str, role: str, paths: list[str], files: Files) -> tuple[File, ...]:
    """Return the files of a role, of one format and one partitioning, with the properties in their names."""
    listed = [_file(path, folder, files, role) for path in sorted(paths)]
    formats = [file.format for file in listed]
    partitions = [" and ".join(name for name, _ in file.partitions) or "none" for file in listed]
    for what, kinds in (("files of the formats", formats), ("partitions by", partitions)):
        # The first file of each format, for the message: one format may be no data, such as checkpoint files.
        first: dict[str, str] = {}
        for file, kind in zip(listed, kinds, strict=True):
            first.setdefault(kind, file.path.removeprefix(folder).lstrip("/"))
        if len(first) > 1:
            named = ", ".join(f"{kind} ({shown(path)})" for kind, path in sorted(first.items()))
            raise UserError(
                f"{shown(folder)} holds {what} {named} for the {role}; name those to "
                f"read under [files] in {FILENAME}."
            )
    return tuple(listed)


def _file(path: str, folder: str, files: Files, role: str = "") -> File:
    check_name(path)
    ends = _ends_of(path)
    below = path.partition("?")[0].removeprefix(folder).split("/")[:-1]
    given = files.constants if role == EVENTS else ()
    matches = [match for part in (*below, *given) if (match := PARTITION.fullmatch(part))]
    with explained(f"Cannot read {shown(path)}"):
        size = extra("urls").size_of(path) if is_remote(path) else os.path.getsize(path)
    return File(
        path,
        _format_of(path) or "csv",
        COMPRESSIONS.get(ends[-1], "") if ends else "",
        size,
        tuple((match[1], unquote(match[2])) for match in matches),
        files.encoding,
        files.delimiter or "\t" * ("tsv" in map(FORMATS.get, ends)),
        {EVENTS: files.columns, USERS: files.user_columns, ITEMS: files.item_columns}.get(role, ()),
    )
