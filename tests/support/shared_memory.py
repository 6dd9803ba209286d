"""Names in the machine's shared memory, in which the tests of other processes come and go."""

from __future__ import annotations

import os
import time

# Longer than any other test keeps a name.
SECONDS = 300


def names() -> set[str]:
    """All that have one now."""
    return set(os.listdir("/dev/shm"))


def check_nothing_stays(before: set[str]) -> None:
    """Nothing that is there now and was not before stays; what others have made goes by itself."""
    new = names() - before
    deadline = time.monotonic() + SECONDS
    while new := new & names():
        assert time.monotonic() < deadline, new
        time.sleep(0.1)
