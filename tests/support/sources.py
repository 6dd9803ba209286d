"""Small data sets for the pool, some of which fail: a worker must be able to import them."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from recsuite.errors import UserError

FAILING_STEP = 5
SIZE = 1000


class NeedsTwoError(Exception):
    """Cannot be made again from its message, as torch and pickle try to."""

    def __init__(self, number: int, reason: str) -> None:
        super().__init__(f"{number}: {reason}")


class Numbers:
    """Batch k is [k, k, ...], and an empty array; a fault strikes at one step."""

    batch_bytes = SIZE * 8 + 128

    def __init__(self, fault: str = "", size: int = SIZE) -> None:
        self.fault = fault
        self.size = size

    def make(self, request: int, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[Any]:
        """The batch of step `request`."""
        if request == FAILING_STEP and self.fault:
            result = FAULTS[self.fault]()
            if result is not None:
                return result
        values = empty(self.size, np.int64)
        values[:] = request
        return [values, np.zeros(0, np.float32)]


def _unpicklable() -> list[Any]:
    return [threading.Lock(), np.zeros(0)]


def _raise() -> None:
    raise NeedsTwoError(7, "seven is too many")


def _bus_error() -> None:
    """Touch a page of a file that has been cut meanwhile."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
        mapped[0]


def _mistake() -> None:
    raise UserError("a row is bad.")


def _killed(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


FAULTS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "unpicklable": _unpicklable,
    "mistake": _mistake,
    "sleep": lambda: time.sleep(3600),
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(4),
    "kill 9": _killed(signal.SIGKILL),
    "bus error": _bus_error,
    "crash": lambda: ctypes.string_at(0),
    "interrupt": _killed(signal.SIGINT),
    "terminate": _killed(signal.SIGTERM),
    "slow": lambda: time.sleep(0.5),
}
