"""Files that are complete or absent: written aside, flushed to the disk, renamed in one step; their digests.

What a power cut must not take is flushed before its rename and the folder around it afterwards, by whoever
writes it: a report that can be drawn again does not wait for the disk, a checkpoint does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

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
