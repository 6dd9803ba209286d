"""Digests of files that earlier starts have read, so that a start reads the files that changed alone.

A change that keeps the size, the time and the inode of a file is not noticed; --rebuild reads every byte.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from recsuite.datasets.columns import DIGEST_THREADS, Columns
from recsuite.datasets.preparation.cache import digests_of_files
from recsuite.datasets.tables.source import TableFile
from recsuite.files import digest_of, replace_file
from recsuite.places import is_remote

KNOWN = "digests.json"
# A file that changed less long ago may change again at the same time of its file system.
RECENT_SECONDS = 2.0

# Size, time in nanoseconds, and inode.
Mark = tuple[int, int, int]


class KnownDigests:
    """Digests of files, kept in a folder. every_byte: True to read all files again."""

    def __init__(self, folder: Path, every_byte: bool) -> None:
        self._path = folder / KNOWN
        self._known = {} if every_byte else _read(self._path)
        self._kept: dict[str, tuple[Mark, str]] = {}

    def of_files(self, files: Sequence[TableFile]) -> dict[str, str]:
        """Map the name of each source file to its digest."""
        by_name = {file.name: file for file in files}
        paths = {file.name: Path(file.file.path) for file in files if not is_remote(file.file.path)}
        return self._of(by_name, paths, lambda names: digests_of_files([by_name[name] for name in names]))

    def fault_of(self, columns: Columns) -> str:
        """Return a sentence that names a file of columns with other bytes than when it was written, or ""."""
        paths = _paths_of(columns)

        def read(names: Sequence[str]) -> dict[str, str]:
            with ThreadPoolExecutor(DIGEST_THREADS) as pool:
                return dict(zip(names, pool.map(lambda name: digest_of(paths[name]), names), strict=True))

        digests = self._of(paths, paths, read)
        damaged = [path for name, path in paths.items() if digests[name] != columns.files[path.name]]
        return f"{damaged[0]} has another digest than when it was written." if damaged else ""

    def keep(self, columns: Columns) -> None:
        """Keep the digests of columns that were just written."""
        for name, path in _paths_of(columns).items():
            self._kept[name] = _mark_of(path), columns.files[path.name]

    def write(self) -> None:
        """Write the digests for the next start."""
        replace_file(self._path, json.dumps(self._kept).encode())

    def _of(
        self,
        names: Mapping[str, object],
        paths: Mapping[str, Path],
        read: Callable[[Sequence[str]], dict[str, str]],
    ) -> dict[str, str]:
        # Before the files are read: a later change gives another mark.
        recent = time.time_ns() - int(RECENT_SECONDS * 1e9)
        marks = {name: _mark_of(path) for name, path in paths.items() if path.is_file()}
        known = {**self._known, **self._kept}
        held = {
            name: known[name][1] for name, mark in marks.items() if name in known and known[name][0] == mark
        }
        digests = held | read([name for name in names if name not in held])
        self._kept |= {
            name: (mark, digests[name]) for name, mark in marks.items() if name in held or mark[1] < recent
        }
        return {name: digests[name] for name in names}


def _paths_of(columns: Columns) -> dict[str, Path]:
    folder = Path(columns.folder)
    return {f"{folder.name}/{name}": folder / name for name in columns.files}


def _mark_of(path: Path) -> Mark:
    status = path.stat()
    return status.st_size, status.st_mtime_ns, status.st_ino


def _read(path: Path) -> dict[str, tuple[Mark, str]]:
    """Return the digests of the last start; none if there was none, or they cannot be read."""
    try:
        content = json.loads(path.read_bytes())
        return {
            str(name): ((int(size), int(time_ns), int(inode)), str(digest))
            for name, ((size, time_ns, inode), digest) in content.items()
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
