"""Commands with a limit of memory: a cgroup of version 1 or 2, where this user may make one."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import SUPPORT, started

ROOT = Path("/sys/fs/cgroup")


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[tuple[Path, str]]:
    """A new group with a limit in bytes, and the name of its memory without files in `memory.stat`."""
    lines = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    is_first = (ROOT / "memory").is_dir()
    parent = ROOT / "memory" / lines["memory"].lstrip("/") if is_first else ROOT / lines[""].lstrip("/")
    group, files = parent / f"test-{os.getpid()}", ("memory.limit_in_bytes" if is_first else "memory.max")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this user may make no group of processes with a limit of memory ({error.strerror})")
    try:
        if not (group / files).exists():
            pytest.skip("the group of this process does not pass limits of memory on")
        (group / files).write_text(str(limit))
        yield group, "rss" if is_first else "anon"
    finally:
        # Empty only a moment after its last process.
        for _ in range(100):
            with contextlib.suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)


def run_within(limit: int, command: list[str], **options: Any) -> tuple[int, str, int]:
    """Run a script with at most so many bytes; return its status, its output and its most bytes of memory
    without files.

    What was imported before a fork counts for the process that imported it.
    """
    with memory_group(limit) as (group, name):
        enter = [sys.executable, str(SUPPORT / "entered.py"), str(group)]
        with started([*enter, *command], **options) as process:
            most, deadline = 0, time.monotonic() + 600
            while process.poll() is None:
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                most = max(most, int(stat[name]))
                assert time.monotonic() < deadline, "still running after 600 s"
                time.sleep(0.02)
            output, errors = process.communicate()
    return process.returncode, output + errors, most
