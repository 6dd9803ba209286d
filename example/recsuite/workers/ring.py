"""Memory that a rank and its workers share: slots into which workers write batches.

It is anonymous (memfd), so it needs no room in /dev/shm, which containers keep small, has no name that could
be left behind, and goes with the last process that maps it. Pages that no batch has reached cost nothing.

Imports numpy and the standard library only: a worker imports it.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

# A cache line: arrays that begin on one are never shared between two writers.
ALIGNMENT = 64


class ArrayLayout(NamedTuple):
    """Where an array lies in its slot."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class AnonymousFile:
    """A file without a name. Pickles, while a process is being started, to a descriptor of its own there."""

    def __init__(self, name: str) -> None:
        # Closed in programs that this process executes, unless it is passed on to them.
        self.descriptor = os.memfd_create(name)

    def close(self) -> None:
        """Give the descriptor back; harmless twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> Any:
        from multiprocessing.reduction import DupFd

        # It passes the descriptor on in the way that the start method has for this.
        return DupFd(self.descriptor)

    def __setstate__(self, state: Any) -> None:
        self.descriptor = state.detach()


class Ring:
    """`num_slots` slots of `slot_bytes` each, in one anonymous file.

    Who may write to a slot is decided by one process alone (`WorkerPool`), so there is no lock.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        # Whole pages: where no batch reaches, none is ever touched.
        self.slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.file = AnonymousFile("batches")
        try:
            os.ftruncate(self.file.descriptor, self.num_bytes)
            self._map()
        except BaseException:
            self.close()
            raise

    @property
    def num_bytes(self) -> int:
        """The size of all slots."""
        return self.num_slots * self.slot_bytes

    def writer(self, slot: int) -> SlotWriter:
        """For the process that may write to the slot."""
        return SlotWriter(self, slot)

    def lease(self, slot: int, layouts: Sequence[ArrayLayout]) -> tuple[Any, list[np.ndarray]]:
        """The arrays of a slot, not copied, and an object that lives while any of them or a view does."""
        # An object for this slot alone: every view of its arrays keeps it, and it ends with the last of them.
        leased: Any = (ctypes.c_char * self.slot_bytes).from_buffer(self.memory, slot * self.slot_bytes)
        arrays = [
            np.ndarray(layout.shape, layout.dtype, buffer=leased, offset=layout.offset) for layout in layouts
        ]
        return leased, arrays

    def close(self) -> None:
        """Give the memory back, as soon as nobody uses an array in it any more; harmless twice."""
        self.file.close()
        # Not unmapped: a batch that the consumer keeps lies in it.
        self.__dict__.pop("memory", None)

    def _map(self) -> None:
        self.memory = mmap.mmap(self.file.descriptor, self.num_bytes)

    def __getstate__(self) -> dict[str, Any]:
        # A mapping belongs to its process; the descriptor is what a worker maps the memory by.
        return {name: value for name, value in self.__dict__.items() if name != "memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()
        # The mapping keeps the memory.
        self.file.close()


class SlotWriter:
    """Hands out the memory of one slot, piece after piece."""

    def __init__(self, ring: Ring, slot: int) -> None:
        self._memory = np.frombuffer(ring.memory, np.uint8, ring.slot_bytes, slot * ring.slot_bytes)
        self._start = _address(self._memory)
        self._used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """An uninitialised array in the slot; takes the arguments of `np.empty`.

        Raises:
            ValueError: when the slot is full.
        """
        # A bump allocator: a slot is filled once and then given away whole, so nothing is ever freed in it.
        num_bytes = math.prod(shape if isinstance(shape, tuple) else (shape,)) * np.dtype(dtype).itemsize
        first = self._used
        if first + num_bytes > len(self._memory):
            raise ValueError(
                f"a batch of at least {first + num_bytes:,} bytes does not fit its slot of "
                f"{len(self._memory):,}; `batch_bytes` of the data set must say how large a batch can be"
            )
        self._used = -(-(first + num_bytes) // ALIGNMENT) * ALIGNMENT
        return self._memory[first : first + num_bytes].view(dtype).reshape(shape)

    def put(self, array: Any) -> ArrayLayout:
        """Where an array lies; one that was not made by `empty` is copied into the slot first.

        Raises:
            TypeError: when it is not an array of numbers.
        """
        given, array = array, np.asarray(array)
        if array.dtype.hasobject:
            raise TypeError(f"a batch holds {given!r}, which is not an array of numbers")
        # By its address, because a view or a reshape of an array from `empty` is as good as the array itself.
        if not self._holds(array):
            copy = self.empty(array.shape, array.dtype)
            copy[...] = array
            array = copy
        return ArrayLayout(_address(array) - self._start, array.dtype.str, array.shape)

    def _holds(self, array: np.ndarray) -> bool:
        offset = _address(array) - self._start
        return array.flags.c_contiguous and 0 <= offset <= len(self._memory) - array.nbytes


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])
