"""Where parts are kept: those of files that were read stay, and new files alone are read."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from recsuite.config.sections import DataConfig
from recsuite.datasets.columns import VERSION
from recsuite.datasets.tables.parts.part import Part, make_part, open_part
from recsuite.datasets.tables.parts.wanted import Wanted
from recsuite.datasets.tables.remote import File, Tables, is_remote
from recsuite.files import digest_of_bytes, explained, place_for, remove
from recsuite.runtime.console import stage

# Beside the columns, which have other names.
FOLDER = "parts"
# Unfinished work, of a part or of a whole reading, and the number of the process that does it.
UNFINISHED = re.compile(r"\.(?:[0-9a-f]{32}|reading)\.(\d+)(?:\.\w+)?")


@contextlib.contextmanager
def kept(tables: Tables, config: DataConfig) -> Iterator[Path]:
    """The folder of the parts of these tables: beside their columns, or one that ends where it cannot be."""
    root = Path(tables.root)
    home = root if root.is_dir() else root.parent
    beside = None if is_remote(tables.root) else place_for(home, ".columns")
    cache = Path(config.cache_dir) if config.cache_dir else beside
    if cache is not None:
        # Several data sets may share one folder for their columns.
        folder = cache / FOLDER / digest_of_bytes(tables.root.encode())[:12]
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if folder.is_dir() and os.access(folder, os.W_OK):
            _remove_leftovers(folder)
            yield folder
            return
    with tempfile.TemporaryDirectory(prefix="parts-") as temporary:
        yield Path(temporary)


@contextlib.contextmanager
def unfinished(folder: Path) -> Iterator[Path]:
    """A folder for what is needed while tables are read, in that of their parts."""
    with tempfile.TemporaryDirectory(prefix=f".reading.{os.getpid()}.", dir=folder) as temporary:
        yield Path(temporary)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that were killed have left."""
    for path in folder.iterdir():
        match = UNFINISHED.fullmatch(path.name)
        if match and not _is_another(int(match[1])):
            remove(path)


def _is_another(process: int) -> bool:
    """Whether another process with this number runs."""
    # After a restart of a container the number of the process that was killed may be this one's.
    if process == os.getpid():
        return False
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It is another user's.
        return True
    return True


def parts_of(
    folder: Path, roles: Sequence[tuple[File, tuple[Wanted, ...]]], config: DataConfig
) -> tuple[list[Part], list[str]]:
    """The parts of these files, of which those that are not there are read; and what was left out of each.

    Removes the parts of files that are there no more.

    Raises:
        UserError: for a file that cannot be read, for bad rows as --bad_rows and --max_bad_rows say, and when
            the disk is full.
    """
    names = [_name(file, wanted) for file, wanted in roles]
    found = {name: open_part(folder / name, *role) for name, role in zip(names, roles, strict=True)}
    # Of two files with the same bytes one is read.
    missing = {name: role for name, role in zip(names, roles, strict=True) if found[name] is None}
    with stage("reading the tables", sum(_size(file) for file, _ in missing.values()), "bytes") as reached:
        before = 0
        for name, (file, wanted) in missing.items():
            remove(folder / name)
            report = functools.partial(_report, reached, before)
            with explained(
                f"The columns cannot be written to {folder}", "make room there, or give --cache_dir"
            ):
                found[name] = make_part(folder / name, file, wanted, config.bad_rows == "skip", report)
            before += _size(file)
    for path in folder.iterdir():
        # Beside the parts lies a folder of unfinished work.
        if path.name not in names and not path.name.startswith("."):
            remove(path)
    parts = [
        dataclasses.replace(part, file=file)
        for name, (file, _) in zip(names, roles, strict=True)
        if (part := found[name]) is not None
    ]
    return parts, [note for part in parts for note in (*part.notes, *_accepted(part, config))]


def _size(file: File) -> int:
    return max(file.size, 0)


def _report(reached: Callable[[int], None], before: int, done: int) -> None:
    reached(before + done)


def _name(file: File, wanted: tuple[Wanted, ...]) -> str:
    """Name of a part: a digest of the bytes, of what is read of them, and of the version."""
    told = [file.digest, repr(file), repr(wanted), VERSION]
    return digest_of_bytes(json.dumps(told).encode())


def _accepted(part: Part, config: DataConfig) -> list[str]:
    """What to say of the bad rows of a file.

    Raises:
        UserError: where there are more than are allowed.
    """
    if config.bad_rows != "skip":
        part.faults.refuse(part.file)
    return part.faults.accepted(part.file, part.num_rows + part.faults.number, config.max_bad_rows)
