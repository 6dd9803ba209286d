"""A data worker: it waits for requests, makes batches in shared memory, and sends their layouts.

The memory is anonymous (memfd). So it needs no space in /dev/shm, which containers keep small, has no name
that could be left behind, and is freed with the last process that maps it. Untouched pages cost nothing.

A worker imports numpy and the modules of the data set, not torch: so it starts in a tenth of the time, and
has no CUDA context.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import math
import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

from recsuite.errors import UserError
from recsuite.runtime.console import install_tag
from recsuite.runtime.host import die_with_parent, keep_freed_memory

# A cache line: arrays aligned to it never share a line between two writers.
ALIGNMENT = 64


class ArrayLayout(NamedTuple):
    """Offset, dtype and shape of an array in its slot."""

    offset: int
    dtype: str
    shape: tuple[int, ...]


class AnonymousFile:
    """A file without a name. While a process is being started, it pickles to a descriptor in that process."""

    def __init__(self, name: str) -> None:
        # Closed in programs that this process executes, unless it is passed on to them.
        self.descriptor = os.memfd_create(name)

    def close(self) -> None:
        """Close the descriptor; safe to call twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __del__(self) -> None:
        self.close()

    def __getstate__(self) -> Any:
        from multiprocessing.reduction import DupFd

        # It passes the descriptor on by the means of the start method.
        return DupFd(self.descriptor)

    def __setstate__(self, state: Any) -> None:
        self.descriptor = state.detach()


class Ring:
    """`num_slots` slots of `slot_bytes` each, in one anonymous file.

    One process alone (`WorkerPool`) decides which process may write to a slot, so there is no lock.
    """

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        # Whole pages: a page that no batch uses is never touched.
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
        """Size of all slots in bytes."""
        return self.num_slots * self.slot_bytes

    def lease(self, slot: int, layouts: Sequence[ArrayLayout]) -> tuple[Any, list[np.ndarray]]:
        """Return the arrays of a slot, not copied, and an object that lives while any view of them does."""
        # An object for this slot alone: every view of its arrays keeps it alive.
        leased: Any = (ctypes.c_char * self.slot_bytes).from_buffer(self.memory, slot * self.slot_bytes)
        arrays = [
            np.ndarray(layout.shape, layout.dtype, buffer=leased, offset=layout.offset) for layout in layouts
        ]
        return leased, arrays

    def close(self) -> None:
        """Free the memory when no array in it is in use any more; safe to call twice."""
        self.file.close()
        # Not unmapped, because the consumer may keep a batch in it.
        self.__dict__.pop("memory", None)

    def _map(self) -> None:
        self.memory = mmap.mmap(self.file.descriptor, self.num_bytes)

    def __getstate__(self) -> dict[str, Any]:
        # A mapping belongs to its process; a worker maps the memory by the descriptor.
        return {name: value for name, value in self.__dict__.items() if name != "memory"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._map()
        # The mapping keeps the memory.
        self.file.close()


class SlotWriter:
    """Allocator of the memory of one slot, piece after piece."""

    def __init__(self, ring: Ring, slot: int) -> None:
        self._memory = np.frombuffer(ring.memory, np.uint8, ring.slot_bytes, slot * ring.slot_bytes)
        self._start = _address(self._memory)
        self._used = 0

    def empty(self, shape: int | tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an uninitialised array in the slot; takes the arguments of `np.empty`.

        Raises:
            ValueError: when the slot is full.
        """
        # A bump allocator: a slot is filled once and returned as a whole, so nothing in it is freed alone.
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
        """Return the layout of an array. An array that `empty` did not make is copied into the slot first.

        Raises:
            TypeError: when it is not an array of numbers.
        """
        given, array = array, np.asarray(array)
        if array.dtype.hasobject:
            raise TypeError(f"a batch holds {given!r}, which is not an array of numbers")
        # Checked by address, because a view or a reshape of an array from `empty` needs no copy either.
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


# Signals that only the trainer handles: a batch system sends both to every process.
TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Signals that a worker answers with its stack, as soon as it can.
STACK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Variables that the libraries of a worker read when they start their threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_IO_THREADS")


class BatchSource(Protocol):
    """A data set whose items are whole batches, each a function of its request alone."""

    @property
    def batch_bytes(self) -> int:
        """Maximum size of a batch in bytes."""

    def make(self, request: Any, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[Any]:
        """Return the arrays of a batch, best allocated by `empty`, which takes `np.empty`'s arguments."""


class BatchTask(NamedTuple):
    """Request of a batch, and the slot that the worker may use until it has answered."""

    slot: int
    request: Any


class BatchDone(NamedTuple):
    """Answer to a task: the batch is in its slot."""

    layouts: list[ArrayLayout]


class BatchFailed(NamedTuple):
    """Answer to a task: its exception as text, because it may be impossible to pickle or to rebuild."""

    traceback: str
    # The message, if it was a user's mistake.
    mistake: str | None


@dataclass(frozen=True)
class Worker:
    """Identity of a worker, and its crash log."""

    rank: int
    worker_id: int
    # A worker that dies from a signal writes its stack there.
    crash_log: AnonymousFile

    def __str__(self) -> str:
        return f"RANK {self.rank} W {self.worker_id}"


def serve(worker: Worker, source: BatchSource, ring: Ring, connection: Connection) -> None:
    """Answer tasks until the trainer sends None or is gone."""
    # In a forked process the existing objects are the trainer's: if they were collected here too, their
    # destructors would run without the threads and libraries that they need.
    gc.freeze()
    _settle(worker)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            # The trainer is gone, so there is no process to answer.
            return
        if task is None:
            return
        with contextlib.suppress(BrokenPipeError):
            connection.send(_answer(task, source, ring))


def _answer(task: BatchTask, source: BatchSource, ring: Ring) -> BatchDone | BatchFailed:
    try:
        # The data set writes into the slot itself, through `empty`, so most batches are never copied.
        writer = SlotWriter(ring, task.slot)
        return BatchDone([writer.put(array) for array in source.make(task.request, writer.empty)])
    except Exception as error:
        return BatchFailed(traceback.format_exc(), str(error) if isinstance(error, UserError) else None)


def _settle(worker: Worker) -> None:
    """Bind this process to its trainer: signals, end of life, the tag of its lines."""
    die_with_parent()
    trainer = multiprocessing.parent_process()
    # The trainer may have died before, while this worker was still importing.
    if trainer is None or not trainer.is_alive():
        os._exit(1)
    for number in TRAINERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The first is for a user's `kill -USR1`; the trainer sends the second, and reads the crash log.
    faulthandler.register(STACK_SIGNALS[0])
    faulthandler.register(STACK_SIGNALS[1], file=worker.crash_log.descriptor)
    # Into memory that the trainer reads: the output of a dying process on the terminal would be mixed with
    # the lines of others, without the name of its process.
    faulthandler.enable(file=worker.crash_log.descriptor)
    # They were blocked at the start of this process, so that none arrived before it could handle them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*TRAINERS_SIGNALS, *STACK_SIGNALS))
    keep_freed_memory()
    # A worker that wakes up does not preempt the trainer; a worker that the trainer waits for runs anyway.
    # A sandbox, or a policy lower still, may refuse it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    install_tag(str(worker))
    # Only a forked worker has it, or one whose data set or main module imports it.
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@contextlib.contextmanager
def starting_processes() -> Iterator[None]:
    """Start processes within this context with one thread, and with the signals blocked.

    For the main thread of the trainer. It receives its own blocked signals at the end.
    """
    # It starts with the first process of multiprocessing, and unblocks the signals again (CPython's
    # `ResourceTracker.ensure_running`): so it must start before they are blocked.
    resource_tracker.ensure_running()
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*TRAINERS_SIGNALS, *STACK_SIGNALS))
    # In the environment, because libraries read them when they are loaded, before any code of this project.
    # One thread, because workers are the parallelism: more would compete with the trainer for its cores.
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
