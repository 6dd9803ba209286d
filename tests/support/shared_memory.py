"""Names in the machine's shared memory, which other processes change too, and open descriptors."""

from __future__ import annotations

import os
import time

# Longer than any other test keeps a name.
SECONDS = 300


def names() -> set[str]:
    """All that have one now."""
    return set(os.listdir("/dev/shm"))


def num_descriptors() -> int:
    """Number of open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def check_nothing_stays(before: set[str]) -> None:
    """Nothing that is there now and was not before stays; what others have made goes by itself."""
    new = names() - before
    deadline = time.monotonic() + SECONDS
    while new := new & names():
        assert time.monotonic() < deadline, new
        time.sleep(0.1)
