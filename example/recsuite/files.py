"""Files and records: where they lie, how they are written and checked, and how JSON is read.

A file is complete or absent: it is written aside, flushed to the disk, and renamed in one step. What a power
cut must not take is flushed before its rename and the folder around it afterwards, by its writer: a report
that can be drawn again does not wait for the disk, a checkpoint does.

A record is read back by programs of other ages, after copies and crashes, and by a server from wherever it
came. So each value is checked against its type before anything is done with it, and a text that is shown in a
sentence can do nothing to a terminal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import xxhash

from recsuite.errors import UserError, printable

# What is read for a digest should still be in the core's cache when it is digested.
BLOCK_BYTES = 2**20
# A `Path` has one slash where a text has two. In front of the host there may be a password.
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
    """Refuse a name that is not UTF-8: neither a schema.toml nor Arrow can have it.

    Raises:
        UserError: with the name.
    """
    if path != path.encode(errors="replace").decode():
        raise UserError(f"The name {path} is not UTF-8; rename it, or give another one.")


def reason_of(error: OSError) -> str:
    """What the system says, such as "No space left on device", without the number and the path."""
    return error.strerror or str(error)


@contextlib.contextmanager
def explained(what: str, advice: str = "") -> Iterator[None]:
    """Give an OSError as one sentence: what cannot be done, why, and what to do about it.

    Raises:
        UserError: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{what} ({reason_of(error)}){advice and f'; {advice}'}.") from error


@contextlib.contextmanager
def locked(path: Path, doing: str, deadline: float) -> Iterator[None]:
    """Hold a lock of all processes that name this file, which stays where it is.

    Raises:
        UserError: when another process keeps it for `deadline` seconds; `doing` says what it does meanwhile.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(path, timeout=deadline):
            yield
    except Timeout:
        raise UserError(
            f"Another process has been {doing} for {deadline:.0f} s; end it and start again."
        ) from None


@contextlib.contextmanager
def written_aside(final: Path, aside: Path | None = None) -> Iterator[Path]:
    """A path beside `final` for a file or a folder, which gets the final name in one rename at the end.

    Where the end is not reached, nothing is left of it. aside: the path, where its name must be a known one.

    Raises:
        OSError: when it cannot be renamed, such as a folder onto one that is not empty.
    """
    # A name of this process alone: another one may write the same file at the same time.
    aside = aside or final.with_name(f".{final.name}.{os.getpid()}")
    try:
        yield aside
        # One system call, which replaces what was there: a reader finds the old file or the new one, never a
        # part.
        aside.replace(final)
    except BaseException:
        remove(aside)
        raise


def remove(path: Path) -> None:
    """Remove a file, link or folder as far as that is possible, to clean up: what remains is not reported."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file that appears, or changes, in one rename."""
    with written_aside(path) as aside:
        aside.write_bytes(content)


def flush(path: Path) -> None:
    """Wait until a file, or the list of what is in a folder, is on the disk."""
    # To read, because a folder cannot be opened otherwise; the kernel flushes what others have written as
    # well.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True)
class FileEntry:
    """A file that was written: its size, and its XXH3 digest of 128 bits, which finds damage, not forgery."""

    name: str
    bytes: int
    xxh3_128: str


def digest_of(path: Path) -> str:
    """The digest of a file's bytes, as a `FileEntry` has it."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def digest_of_bytes(content: bytes) -> str:
    """The digest of bytes that were read already."""
    return xxhash.xxh3_128_hexdigest(content)


def flushed(path: Path) -> FileEntry:
    """Wait until a file is on the disk; its digest is taken meanwhile, from the page cache."""
    # Neither thread holds Python's lock: one waits in the kernel, and the other in a digest of large blocks.
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush, path)
        digest = digest_of(path)
        flushing.result()
    return FileEntry(path.name, path.stat().st_size, digest)


def check_size(folder: Path, entry: FileEntry) -> None:
    """Refuse a file that is not there, or not as long as it was. Does not read it.

    Raises:
        UserError: names it.
    """
    path = folder / entry.name
    # A name with a slash would lead out of the folder.
    if Path(entry.name).name != entry.name or not path.is_file():
        raise UserError(f"{path} is missing.")
    size = path.stat().st_size
    if size != entry.bytes:
        raise UserError(f"{path} has {size:,} bytes and had {entry.bytes:,} when it was written.")


def check_file(folder: Path, entry: FileEntry) -> None:
    """Read every byte of a file and refuse it when it is not what was written.

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
    """Let the disk write what is there meanwhile, so that there is less to wait for at the end."""
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.map(flush, sorted(folder.glob("*.npy")))
        yield
        list(flushing)


def checkout() -> Path | None:
    """The folder of the repository, with run.sh and the lists of packages; None outside of one."""
    package = Path(__file__).resolve().parent
    # Both: whoever installs into a folder of a project of their own may have such a list there too.
    is_one = package.parent.name == "example" and (package.parents[1] / "requirements.txt").is_file()
    return package.parents[1] if is_one else None


# Where data sets lie that were obtained, and what is made of files whose folder cannot be written.
DATA_ROOT = (checkout() or Path()) / "data"


def place_for(folder: Path, name: str) -> Path:
    """Path of what is made of the files in a folder: in it, or below DATA_ROOT where it cannot be written."""
    # Root may write anywhere; a folder whose mode forbids it is still not ours to write to.
    if os.access(folder, os.W_OK) and folder.stat().st_mode & 0o222:
        return folder / name
    # Folders elsewhere may have the same name and hold other files.
    digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]
    return (DATA_ROOT / "columns" / f"{folder.resolve().name}-{digest}").absolute() / name


# The name of a record's own digest in it.
SEAL = "xxh3_128"
# More than anything counts here; below it every whole number is exact as a float and in other languages too.
LARGEST = 2**53
# No path on Linux is longer.
LONGEST_TEXT = 4096
# Flags that name a folder or a file, in whose name there may be any character.
PATHS = ("data_path", "schema", "cache_dir", "save_dir", "report_dir", "load", "export")
# What may hold names of files.
NAMED = {*PATHS, "events_per_file"}
# Of a field of a record: a file has it only where it is not the default, so older files need not have it.
OPTIONAL = {"is_optional": True}


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record with their own digest, which tells whether any of them was changed."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    # In one form, whatever the order and the spaces in the file: other programs may write it in their own
    # way.
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, SEAL: digest_of_bytes(text.encode())}


def parsed(content: bytes) -> Any:
    """What JSON says; names that come twice, NaN and infinities are refused.

    Raises:
        ValueError: when it is not JSON, or too deep.
    """
    try:
        # Python would keep the last of two values with one name, where another program may keep the first.
        return json.loads(content, object_pairs_hook=_once, parse_constant=_not_a_number)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    refuse_twice([name for name, _ in pairs])
    return dict(pairs)


def refuse_twice(names: list[str]) -> None:
    """Raise ValueError for the first name that comes a second time."""
    if len({*names}) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"{twice!r} is there twice")


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def plain(record: Any) -> Any:
    """A record, and all records in it, as JSON can have them; fields that are OPTIONAL and have their default
    are left out. `typed` is the inverse.
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


def typed(kind: Any, found: Any, name: str = "it", least: int = 0) -> Any:
    """A value of a type, of what JSON held for it: a dataclass, also of such, a list, tuple or dict of a
    type, a text, number or truth value, one of these or None, or Any.

    name: what an error calls the value; least: the lowest whole number, for most of them count something.

    Raises:
        TypeError, ValueError: when the value is not of that type, or a field is missing or unknown.
    """
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return typed(next((one for one in of if type(found) is one), of[0]), found, name, least)
    if kind is Any:
        return found
    if dataclasses.is_dataclass(kind):
        # What a reader puts beside what the file holds is such a record already.
        if type(found) is kind:
            return found
        record: Any = kind
        held, fields = _plain(dict, found, name), _types_of(record)
        # Also those with a default, unless they are optional: what is missing may be damage.
        needed = {field.name for field in dataclasses.fields(record) if field.metadata != OPTIONAL}
        if not needed <= held.keys() <= fields.keys():
            raise ValueError(f"{record.__name__} has {', '.join(held)} instead of {', '.join(fields)}")
        return record(**{name: typed(fields[name], value, name, least) for name, value in held.items()})
    if origin is dict:
        held = _plain(dict, found, name).items()
        return {_plain(str, key, name): typed(of[1], value, key, least) for key, value in held}
    if origin is list:
        return [typed(of[0], value, name, least) for value in _plain(list, found, name)]
    if origin is tuple:
        values = _plain(list, found, name)
        kinds = of[:1] * len(values) if of[-1] is Ellipsis else of
        return tuple(typed(kind, value, name, least) for kind, value in zip(kinds, values, strict=True))
    return _plain(kind, found, name, least)


# Reading the hints takes longer than the rest of a record, and a chain has many records.
_types_of = functools.cache(get_type_hints)


def _plain(kind: type[Any], found: Any, name: str, least: int = 0) -> Any:
    # Compared by type itself: a truth value is an int to Python.
    if type(found) is int and not (least if kind is int else -LARGEST) <= found <= LARGEST:
        raise ValueError(f"{name} is {found}")
    if type(found) is int and kind is float:
        # Other languages write a float that is a whole number like an int.
        return float(found)
    if type(found) is not kind:
        raise TypeError(f"{name} is {found!r} and not of type {kind.__name__}")
    if kind is str and not ((found.isprintable() or name in NAMED) and len(found) <= LONGEST_TEXT):
        raise ValueError(f"{name} is {found!r}")
    return found
