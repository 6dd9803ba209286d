"""A temporary folder that all ranks of a machine know, for what is to be gone when the launch ends."""

from __future__ import annotations

import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from recsuite.runtime.host import stat_fields
from recsuite.runtime.launch import launch_name, read_launch

# Before the name of the launch, and what may be in a folder of this name.
PREFIX = "recsuite-launch-"
CONTENT = {"data", "columns", "checkpoints"}


@contextmanager
def folder_of_launch() -> Iterator[Path]:
    """A folder of this launch, with a folder `data`; whoever fails removes it, and what ends well has to
    `remove` it.
    """
    # The same on all ranks of a machine, which cannot tell each other before they have joined.
    folder = Path(tempfile.gettempdir(), f"{PREFIX}{launch_name()}")
    if read_launch().local_rank == 0:
        for leftover in filter(_is_leftover, folder.parent.glob(f"{PREFIX}*")):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Remove the folder of a launch, of which no rank needs anything any more."""
    if read_launch().local_rank == 0:
        shutil.rmtree(folder, ignore_errors=True)


def _is_leftover(path: Path) -> bool:
    """Whether a fit of this machine was killed, and could not remove its folder."""
    host, _, process = path.name.removeprefix(PREFIX).rpartition("-")[0].rpartition("-")
    began = path.name.rpartition("-")[2]
    # Another machine may have this folder too, and only that one knows its processes.
    if host != socket.gethostname() or not process.isdecimal() or not began.isdecimal():
        return False
    if path.is_symlink() or not path.is_dir():
        return False
    with suppress(OSError):
        found = {each.name for each in path.iterdir()}
        return found <= CONTENT and stat_fields(int(process))[19:20] != [began]
    return False
