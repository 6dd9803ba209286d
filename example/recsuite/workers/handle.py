"""A data worker as the trainer sees it: how it is started, how it is ended, and what the system refuses."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

from recsuite.errors import UserError, counted
from recsuite.runtime.host import descriptor_limit, gib, num_descriptors, process_limit
from recsuite.workers.ring import AnonymousFile, Ring
from recsuite.workers.worker import STACK_SIGNALS, BatchSource, Task, Worker, serve

CLOSE_SECONDS = 2.0
# How long one whose connection is closed may take to be gone, before it is said to run still.
DEATH_SECONDS = 30.0
# What a stack needs to be written in.
STACK_SECONDS = 0.3
# Its connection and its crash log, and the two that multiprocessing keeps until it has ended.
DESCRIPTORS_PER_WORKER = 4
# As much as a pipe takes at once. Above it the start of a worker would wait until that one reads.
PICKLE_LIMIT = 64 * 1024
# Imported by the server once, not by each worker: the heavy part of a worker's start, and clean of CUDA. The
# server looks for modules in the current folder, so nothing of ours can be among them.
PRELOADED = ("numpy",)


@dataclass
class WorkerHandle:
    """One worker: its process, the pipe to it, the slots that are its own, and what it was asked for."""

    process: Any
    connection: Connection
    crash_log: AnonymousFile
    # A slot comes back from whatever thread frees the last view of it; append and pop are atomic.
    free_slots: deque[int]
    tasks: deque[Task] = field(default_factory=deque)
    # Wakes up when it has answered, or when any worker is gone. Kept between batches, because registering
    # costs system calls; and poll, unlike select, takes descriptors above 1,023.
    poll: select.poll = field(default_factory=select.poll)

    def stack(self) -> str:
        """What it has left in its crash log."""
        # Without moving the offset, which the worker writes at.
        size = os.fstat(self.crash_log.descriptor).st_size
        return os.pread(self.crash_log.descriptor, size, 0).decode(errors="replace")

    def stack_now(self) -> str:
        """Where it is at this moment; nothing if it cannot say."""
        # It may be gone by now.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNALS[1])
        time.sleep(STACK_SECONDS)
        return self.stack()


def start_workers(
    workers: list[WorkerHandle], source: BatchSource, ring: Ring, context: Any, rank: int, num_workers: int
) -> None:
    """Start so many workers and add each to the list, so that those are known which were started before an
    exception. The slots of the ring are shared out among them.
    """
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(list(PRELOADED))
    slots_per_worker = ring.num_slots // num_workers
    for worker_id in range(num_workers):
        crash_log = AnonymousFile(f"stack-{worker_id}")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(Worker(rank, worker_id, crash_log), source, ring, theirs),
            name=f"data worker {worker_id} of rank {rank}",
            # At its end Python would wait for one that is not, should nobody have closed the pool.
            daemon=True,
        )
        first = worker_id * slots_per_worker
        workers.append(WorkerHandle(process, ours, crash_log, deque(range(first, first + slots_per_worker))))
        with _script_left_out(source):
            process.start()
        # Else the pipe would stay open when the worker is gone.
        theirs.close()
    for worker in workers:
        # All of them, because batches are handed out in order: while one worker is waited for, another one
        # whose turn comes later may die, and would be missed until then.
        for watched in (worker.connection, *(other.process.sentinel for other in workers)):
            worker.poll.register(watched, select.POLLIN)


@contextlib.contextmanager
def _script_left_out(source: BatchSource) -> Iterator[None]:
    """Have a worker that starts not import the script of this process, which may import torch.

    Only where it needs nothing that the script defines.
    """
    if b"__main__" in pickle.dumps(source):
        yield
        return
    # The start of a process looks here for the script.
    script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = script


def end_workers(workers: list[WorkerHandle], ring: Ring) -> None:
    """End all workers within one deadline, and free what they shared; harmless twice."""
    started = [worker for worker in workers if worker.process.pid is not None]
    # All are told first and waited for afterwards, so that they end at the same time.
    for worker in started:
        with contextlib.suppress(OSError):
            worker.connection.send(None)
    deadline = time.monotonic() + CLOSE_SECONDS
    for worker in started:
        worker.process.join(max(0.0, deadline - time.monotonic()))
    for worker in started:
        # Nothing is lost: a worker only reads.
        if worker.process.is_alive():
            worker.process.kill()
        worker.process.join()
        worker.process.close()
    for worker in workers:
        worker.connection.close()
        worker.crash_log.close()
    workers.clear()
    ring.close()


@contextlib.contextmanager
def refusals_in_words(num_workers: int, num_bytes: int) -> Iterator[None]:
    """What the system refuses to a pool, as a sentence: descriptors, processes or memory."""
    workers = counted(num_workers, "data worker needs", "data workers need")
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise UserError(
                f"{workers} about {num_workers * DESCRIPTORS_PER_WORKER} more file "
                f"descriptors, but {num_descriptors()} of {descriptor_limit()} are in use; raise the limit "
                "with ulimit -n 4096, or give a smaller --num_workers."
            ) from None
        if error.errno == errno.EAGAIN:
            raise UserError(
                f"{num_workers} data workers are more processes than this machine lets its user start, who "
                f"may have {process_limit()}; raise the limit with ulimit -u, or give a smaller "
                "--num_workers."
            ) from None
        if error.errno in (errno.ENOMEM, errno.EFBIG):
            raise UserError(
                f"The batches of {counted(num_workers, 'data worker')} take up to {gib(num_bytes)}, more "
                "than this machine gives; give a smaller --batch_size, --history, --others, "
                "--prefetch_factor or --num_workers."
            ) from None
        raise


def check_pickle(source: BatchSource, mp_context: str) -> None:
    """Refuse a data set that cannot be sent to a worker, or is large: every worker starts from a copy."""
    # A forked worker has the data set already, in memory that it shares with its parent.
    if mp_context == "fork":
        return
    name = type(source).__name__
    try:
        size = len(pickle.dumps(source))
    except Exception as error:
        raise UserError(
            f"{name} cannot be sent to a data worker ({error}); keep paths and numbers in it, and open "
            "files, locks and tensors where they are first used."
        ) from error
    if size > PICKLE_LIMIT:
        raise UserError(
            f"{name} pickles to {size:,} bytes, which every worker would copy, and {PICKLE_LIMIT:,} is the "
            "limit; keep the data in files that are memory-mapped where they are first used."
        )
