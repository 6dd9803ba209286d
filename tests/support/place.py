"""Check that a launch leaves no files and no shared memory behind."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from pathlib import Path

from tests.support import shared_memory

# From the fault to the end of all ranks.
END_SECONDS = 150


def marked_processes(mark: str) -> list[int]:
    """The pids of all that inherited a TEST_MARK, without those that are dead and not yet waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"TEST_MARK={mark}\0".encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


class Place:
    """A folder of data and of temporary files, and a mark by which the processes of a test are found."""

    def __init__(self, synthetic_folder: Path, tmp_path: Path) -> None:
        self.data = tmp_path / "data"
        shutil.copytree(synthetic_folder, self.data, ignore=shutil.ignore_patterns(".columns"))
        self.temporary = tmp_path / "temporary"
        self.temporary.mkdir()
        self.env = {"TMPDIR": str(self.temporary), "TEST_MARK": str(tmp_path)}
        self.shared_memory = shared_memory.names()

    def processes(self) -> list[int]:
        """The processes that inherited the mark."""
        return marked_processes(self.env["TEST_MARK"])

    def check_nothing_is_left(self, killed_launchers: int = 0) -> None:
        """No process, no shared memory, no temporary file but torchrun's own logs; and the folder of a killed
        launcher stays.
        """
        deadline = time.monotonic() + 50
        while self.processes():
            assert time.monotonic() < deadline, self.processes()
            time.sleep(0.1)
        shared_memory.check_nothing_stays(self.shared_memory)
        launches = list(self.temporary.glob("launch-*"))
        assert len(launches) <= killed_launchers
        files = [path for path in self.temporary.rglob("*") if path.is_file()]
        others = [path for path in files if not re.search("/(torchelastic_|launch-)", str(path))]
        assert others == []
