"""What a data worker runs: it waits for requests, makes batches in shared memory, and says where they lie.

It imports numpy and what the data set needs, no torch: it starts in a tenth of the time, and there is no CUDA
context that it could meet.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
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
from recsuite.workers.ring import AnonymousFile, ArrayLayout, Ring

# What the trainer decides about is not the workers' to act on: a batch system sends both to every process.
TRAINERS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# What a worker answers with its stack, from the moment that it can.
STACK_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# What the libraries of a worker read when they start their threads.
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_IO_THREADS")


class BatchSource(Protocol):
    """A data set whose items are whole batches, each a function of its request alone."""

    @property
    def batch_bytes(self) -> int:
        """The most bytes that a batch can take."""

    def make(self, request: Any, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[Any]:
        """The arrays of a batch, best allocated by `empty`, which takes the arguments of `np.empty`."""


class Task(NamedTuple):
    """Which batch to make, and the slot that is the worker's until it has answered."""

    slot: int
    request: Any


class Made(NamedTuple):
    """The batch of a task lies in its slot."""

    layouts: list[ArrayLayout]


class Failed(NamedTuple):
    """The exception that a task raised, in words: it need not be picklable, nor be made from one argument."""

    traceback: str
    # The sentence, where it was a user's mistake.
    mistake: str | None


@dataclass(frozen=True)
class Worker:
    """Who a worker is, and what it is born with."""

    rank: int
    worker_id: int
    # A worker that dies of a signal leaves its stack there.
    crash_log: AnonymousFile

    def __str__(self) -> str:
        return f"RANK {self.rank} W {self.worker_id}"


def serve(worker: Worker, source: BatchSource, ring: Ring, connection: Connection) -> None:
    """Answer tasks until the trainer says None or is gone."""
    # Of a process that was forked, what is there is the trainer's: collected here too, its destructors would
    # run without the threads and libraries that they need.
    gc.freeze()
    _settle(worker)
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            # The trainer is gone. Nothing is left to say, and nobody to say it to.
            return
        if task is None:
            return
        with contextlib.suppress(BrokenPipeError):
            connection.send(_answer(task, source, ring))


def _answer(task: Task, source: BatchSource, ring: Ring) -> Made | Failed:
    try:
        # The data set writes into the slot itself, by way of `empty`, so most batches are never copied.
        writer = ring.writer(task.slot)
        return Made([writer.put(array) for array in source.make(task.request, writer.empty)])
    except Exception as error:
        return Failed(traceback.format_exc(), str(error) if isinstance(error, UserError) else None)


def _settle(worker: Worker) -> None:
    """Tie this process to its trainer: signals, life and death, the tag of its lines."""
    die_with_parent()
    trainer = multiprocessing.parent_process()
    # It may have died before, while this worker was still importing.
    if trainer is None or not trainer.is_alive():
        os._exit(1)
    for number in TRAINERS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # The first is for whoever asks `kill -USR1`; the trainer asks with the second, and reads the crash log.
    faulthandler.register(STACK_SIGNALS[0])
    faulthandler.register(STACK_SIGNALS[1], file=worker.crash_log.descriptor)
    # Into memory that the trainer reads: what a dying process writes to the terminal would come in between
    # the lines of others, and nobody could tell whose it is.
    faulthandler.enable(file=worker.crash_log.descriptor)
    # They were blocked when this process was born, so that none came before it could take them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*TRAINERS_SIGNALS, *STACK_SIGNALS))
    keep_freed_memory()
    # A worker that wakes up lets the trainer finish what it does; one that the trainer waits for runs anyway.
    # A sandbox, or a policy lower still, may refuse it.
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    install_tag(str(worker))
    # Only a forked worker has it, or one whose data set or main module imports it.
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(1)


@contextlib.contextmanager
def birth() -> Iterator[None]:
    """What a process that is started within this context inherits: one thread, and the signals blocked.

    For the main thread of the trainer. What came for the trainer meanwhile reaches it at the end.
    """
    # It comes with the first process that multiprocessing starts, and unblocks the signals again (CPython's
    # `ResourceTracker.ensure_running`): before they are blocked, then.
    resource_tracker.ensure_running()
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (*TRAINERS_SIGNALS, *STACK_SIGNALS))
    # In the environment, because libraries read them when they are loaded, before a line of ours runs there.
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
