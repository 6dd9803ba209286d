"""Files and records: paths, writing, checking, and reading of JSON.

A file is complete or absent: it is written under another name and renamed in one step. The writer flushes a
file that must survive a power cut before the rename, and its folder afterwards. A checkpoint is flushed; a
report, which can be made again, is not.

A record may be read by another version of the program, after copies and crashes, and by a server from any
source. So each value is checked against its type before it is used, and a text that is shown in a message is
safe to print on a terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import hashlib
import io
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from recsuite.errors import UserError, printable

# A block that is read for a digest should still be in the core's cache when it is digested.
BLOCK_BYTES = 2**20
# Between two tries to take a lock.
LOCK_SECONDS = 0.05
# A `Path` has one slash where a text has two. A password may stand before the host.
URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+:/+)(?:[^/?#]*@)?([^?#]*)")


def local(path: Path | str, flag: str = "") -> Path:
    """Return a path of this machine. flag: the name of the flag that gave it.

    Raises:
        UserError: for a URL, of which a folder such as "s3:" would be made; see also `check_name`.
    """
    if url := URL.match(str(path)):
        raise UserError(
            f"{flag and f'--{flag} '}{printable(url[1] + url[2])} is a URL and must be a path of this "
            "machine; give such a path, for example one where the bucket is mounted."
        )
    check_name(str(path))
    return Path(path)


def check_name(path: str) -> None:
    """Refuse a name that is not UTF-8: schema.toml and Arrow do not support it.

    Raises:
        UserError: with the name.
    """
    if path != path.encode(errors="replace").decode():
        raise UserError(f"The name {path} is not UTF-8; rename it, or give another one.")


def reason_of(error: OSError) -> str:
    """Reason that the system gives, such as "No space left on device", without the number and the path."""
    return error.strerror or str(error)


@contextlib.contextmanager
def explained(what: str, advice: str = "") -> Iterator[None]:
    """Turn an OSError into a UserError: what failed, as in "Cannot read FILE", the reason, and the fix.

    Raises:
        UserError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {reason_of(error)}.{advice and f' Fix: {advice}.'}") from error


def locked(path: Path, doing: str, deadline: float) -> contextlib.AbstractContextManager[int]:
    """Hold a lock on this file against all other processes, see `held`.

    Raises:
        UserError: when another process keeps it for `deadline` seconds; `doing` says what it does meanwhile.
    """
    return held(
        path, f"Another process has been {doing} for {deadline:.0f} s; end it and start again.", deadline
    )


@contextlib.contextmanager
def held(path: Path, refusal: str, deadline: float = 0, is_inherited: bool = False) -> Iterator[int]:
    """Hold a lock on this file against all other processes, and yield its descriptor.

    The file is not removed. is_inherited: true to leave the lock to the processes that inherited its
    descriptor: the system releases it when all of them have ended.

    Raises:
        UserError: with the sentence `refusal`, when another process keeps it for `deadline` seconds.
    """
    descriptor, end = os.open(path, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + deadline
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise UserError(refusal) from None
            time.sleep(LOCK_SECONDS)
        yield descriptor
    finally:
        # Of a process that was forked meanwhile too.
        if not is_inherited:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextlib.contextmanager
def replacing(final: Path, aside: Path | None = None) -> Iterator[Path]:
    """Yield a path beside `final` for a file or a folder, and rename it to `final` at the end.

    After an error it is removed. aside: the path to use, if its name must be known.

    Raises:
        OSError: when it cannot be renamed, such as a folder onto one that is not empty.
    """
    # The name contains the process id: another process may write the same file at the same time.
    aside = aside or final.with_name(f".{final.name}.{os.getpid()}")
    try:
        yield aside
        # One system call, which replaces the old file: a reader finds the old file or the new one, never a
        # part.
        aside.replace(final)
    except BaseException:
        remove(aside)
        raise


def remove(path: Path) -> None:
    """Remove a file, link or folder as far as possible, for cleaning up. Errors are not reported."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write or replace a file in one rename."""
    with replacing(path) as aside:
        aside.write_bytes(content)


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    # Opened for reading: a folder cannot be opened otherwise. The kernel flushes the writes of other
    # processes too.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileEntry:
    """Name, size and 128-bit XXH3 digest of a written file. The digest detects damage, not forgery."""

    name: str
    bytes: int
    xxh3_128: str


def digest_of(path: Path) -> str:
    """Digest of a file's bytes, as in `FileEntry`."""
    with path.open("rb", buffering=0) as file:
        return digest_of_open(file)


def digest_of_part(path: Path, begin: int, end: int) -> str:
    """Digest of the bytes of a file from one position to before another, as in `FileEntry`."""
    with path.open("rb") as file:
        file.seek(begin)
        return digest_of_bytes(file.read(end - begin))


def digest_of_open(file: io.RawIOBase) -> str:
    """Digest of the bytes of an open file, as in `FileEntry`."""
    # Not at the top: flags are checked with these modules before any package is installed.
    import xxhash

    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    while size := file.readinto(block):
        digest.update(block[:size])
    return digest.hexdigest()


def digest_of_bytes(*contents: Any) -> str:
    """Digest of bytes in memory, or of several contiguous buffers one after the other, as in `FileEntry`."""
    import xxhash

    digest = xxhash.xxh3_128()
    for content in contents:
        digest.update(content)
    return digest.hexdigest()


def flushed(path: Path) -> FileEntry:
    """Wait until a file is on the disk and return its entry. The digest is computed meanwhile."""
    # Neither thread holds Python's lock: one waits in the kernel, the other computes a digest of large
    # blocks from the page cache.
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush, path)
        entry = entry_of(path)
        flushing.result()
    return entry


def entry_of(path: Path) -> FileEntry:
    """Return the entry of a file."""
    return FileEntry(path.name, path.stat().st_size, digest_of(path))


def check_size(folder: Path, entry: FileEntry) -> None:
    """Refuse a file that is missing or has another size. Does not read it.

    Raises:
        UserError: names it.
    """
    path = folder / entry.name
    # A name with a slash could be a path outside the folder.
    if Path(entry.name).name != entry.name or not path.is_file():
        raise UserError(f"{path} is missing.")
    size = path.stat().st_size
    if size != entry.bytes:
        raise UserError(f"{path} has {size:,} bytes and had {entry.bytes:,} when it was written.")


def check_file(folder: Path, entry: FileEntry) -> None:
    """Read every byte of a file and refuse it if its size or digest differs.

    Raises:
        UserError: when it is missing, too short, or damaged.
    """
    check_size(folder, entry)
    path = folder / entry.name
    digest = digest_of(path)
    if digest != entry.xxh3_128:
        raise UserError(f"{path} is damaged: its digest is {digest}, and was {entry.xxh3_128}.")


@contextlib.contextmanager
def flushing(folder: Path) -> Iterator[None]:
    """Flush the .npy files of a folder in the background, which shortens the wait at the end."""
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.map(flush, sorted(folder.glob("*.npy")))
        yield
        list(flushing)


def checkout() -> Path | None:
    """Folder of the repository, with run.sh and the lists of packages; None for an installed package."""
    package = Path(__file__).resolve().parent
    # Check both: the package may be installed in the folder of another project, with such a list there too.
    is_one = package.parent.name == "example" and (package.parents[1] / "requirements.txt").is_file()
    return package.parents[1] if is_one else None


def shared_folder() -> Path:
    """Folder with run.sh, and the scripts in its folder example: the repository, or that of an installation.

    Raises:
        UserError: if the library is neither in a repository nor installed by pip.
    """
    package = Path(__file__).resolve().parent
    for folder in (checkout(), *(parent / "share" / "recsuite" for parent in package.parents)):
        if folder and (folder / "run.sh").is_file():
            return folder
    raise UserError(
        f"This requires the scripts of recsuite, and none are in a share/recsuite beside {package}; install "
        "the wheel with pip, or clone the repository."
    )


# Folder of downloaded data sets, and of columns whose source folder is read-only.
DATA_ROOT = (checkout() or Path()) / "data"


def resolved(path: Any) -> Any:
    """Return what a path names, without links; the path itself if its links lead back to it."""
    try:
        return path.resolve()
    # Of Python before 3.13; later ones return the path.
    except RuntimeError:
        return path


def place_for(folder: Path, name: str) -> Path:
    """Path for output made from the files in a folder: in it, or below DATA_ROOT if it is read-only."""
    # Root may write anywhere, but a folder whose mode forbids writing counts as read-only for root too.
    if os.access(folder, os.W_OK) and folder.stat().st_mode & 0o222:
        return folder / name
    # Another folder may have the same name and hold other files.
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return (DATA_ROOT / "columns" / f"{folder.resolve().name}-{digest}").absolute() / name


# Field of a record with the digest of its other fields.
SEAL = "xxh3_128"
# Limit of all counts. Up to here every whole number is exact as a float, in other languages too.
LARGEST = 2**53
# Longest path on Linux.
LONGEST_TEXT = 4096
# Flags that name a folder or a file. Such a name may contain any character.
PATHS = ("data_path", "schema", "cache_dir", "save_dir", "report_dir", "load", "export")
# Fields that may hold names of files, or of columns and types of events, which any text can be.
NAMED = {*PATHS, "files", "names", "file", "column", "title", "event_types"}
# Metadata of a field that a file has only if it is not the default. Older files need not have it.
OPTIONAL = {"is_optional": True}


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a record with their digest, which detects changes."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    # Canonical form: another program may write the file with other spaces or another order.
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, SEAL: digest_of_bytes(text.encode())}


def parsed(content: bytes) -> Any:
    """Parse JSON. Refuse duplicate names, NaN and infinities.

    Raises:
        ValueError: when it is not JSON, or too deep.
    """
    try:
        # Python would keep the last of two values with one name; another program may keep the first.
        return json.loads(content, object_pairs_hook=_once, parse_constant=_not_a_number)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    check_no_duplicates([name for name, _ in pairs])
    return dict(pairs)


def check_no_duplicates(names: list[str]) -> None:
    """Raise ValueError for the first duplicate name."""
    if len({*names}) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"{twice!r} is there twice")


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def plain(record: Any) -> Any:
    """Return a record, and all records in it, as values for JSON. `typed` is the inverse.

    OPTIONAL fields with their default value are omitted.
    """
    if isinstance(record, dict):
        return {name: plain(value) for name, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [plain(value) for value in record]
    if not dataclasses.is_dataclass(record):
        return record
    fields = {field.name: (field, getattr(record, field.name)) for field in dataclasses.fields(record)}
    return {
        name: plain(value)
        for name, (field, value) in fields.items()
        if not (field.metadata == OPTIONAL and value == field.default)
    }


def typed(kind: Any, content: Any, name: str = "it", least: int = 0) -> Any:
    """Convert a value from JSON to a type, and check it.

    kind: a dataclass, also with dataclasses in it; a list, tuple or dict of a type; a text, number or truth
    value; one of these or None; or Any. name: the name of the value in errors; least: the lowest whole
    number, 0 by default because most of them are counts.

    Raises:
        TypeError, ValueError: when the value is not of that type, or a field is missing or unknown.
    """
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return typed(next((one for one in of if type(content) is one), of[0]), content, name, least)
    if kind is Any:
        return content
    if dataclasses.is_dataclass(kind):
        # A value that the reader added to those of the file is already a record.
        if type(content) is kind:
            return content
        record: Any = kind
        held, fields = _plain(dict, content, name), _types_of(record)
        # Fields with a default are needed too, unless they are optional: a missing field may be damage.
        needed = {field.name for field in dataclasses.fields(record) if field.metadata != OPTIONAL}
        if not needed <= held.keys() <= fields.keys():
            raise ValueError(f"{record.__name__} has {', '.join(held)} instead of {', '.join(fields)}")
        return record(**{name: typed(fields[name], value, name, least) for name, value in held.items()})
    if origin is dict:
        held = _plain(dict, content, name).items()
        return {_plain(str, key, name): typed(of[1], value, key, least) for key, value in held}
    if origin is list:
        return [typed(of[0], value, name, least) for value in _plain(list, content, name)]
    if origin is tuple:
        values = _plain(list, content, name)
        kinds = of[:1] * len(values) if of[-1] is Ellipsis else of
        return tuple(typed(kind, value, name, least) for kind, value in zip(kinds, values, strict=True))
    return _plain(kind, content, name, least)


# Reading the hints takes longer than the rest of a record, and a chain has many records.
_types_of = functools.cache(get_type_hints)


def _plain(kind: type[Any], content: Any, name: str, least: int = 0) -> Any:
    # Compare the exact type: in Python a truth value is an int.
    if type(content) is int and not (least if kind is int else -LARGEST) <= content <= LARGEST:
        raise ValueError(f"{name} is {content}")
    if type(content) is int and kind is float:
        # Other languages write a float with a whole value like an int.
        return float(content)
    if type(content) is not kind:
        raise TypeError(f"{name} is {content!r} and not of type {kind.__name__}")
    if kind is str and not ((content.isprintable() or name in NAMED) and len(content) <= LONGEST_TEXT):
        raise ValueError(f"{name} is {content!r}")
    return content
