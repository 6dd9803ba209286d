"""Pool of data workers: it sends tasks, and receives batches in order through shared memory.

One pool serves every pass of every split. Each worker has at most `prefetch_factor` tasks, and a task names
the slot of its batch: a slot is free, or in use by one task, or leased to the consumer of its batch.
Batches are views of their slots, without a copy, unless the consumer keeps many of them.
Does not depend on torch, ratings or models.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.util
import os
import pickle
import resource
import select
import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import numpy as np

from recsuite.errors import UserError, counted, script_name
from recsuite.runtime.host import describe_memory, descriptor_limit, shown_bytes
from recsuite.workers.worker import (
    STACK_SIGNALS,
    AnonymousFile,
    BatchDone,
    BatchFailed,
    BatchSource,
    BatchTask,
    Ring,
    Worker,
    serve,
    starting_processes,
)

# Exit code from multiprocessing for a forked worker whose server is gone.
SERVER_GONE = 255


@dataclass(frozen=True)
class WorkerFailure:
    """Failed worker, its batch, and the memory of the batches."""

    rank: int
    worker_id: int
    pid: int
    # The oldest unanswered request.
    request: Any
    ring_bytes: int
    mp_context: str

    def __str__(self) -> str:
        doing = f"with {self.request}" if self.request is not None else "with no batch to make"
        return f"data worker {self.worker_id} of rank {self.rank} (pid {self.pid}), {doing}"


class WorkerError(Exception):
    """A worker failed, and its pool can no longer be used. The text is the full error message."""


class WorkerRaisedError(WorkerError):
    """A worker raised an exception."""

    # As text from the worker: an exception need not be picklable.
    def __init__(self, failure: WorkerFailure, traceback: str) -> None:
        super().__init__(
            f"An exception in {failure}.\n"
            f"{traceback.rstrip()}\n"
            "What to do: read the last line; --num_workers 0 raises the exception in the main process, where "
            "a debugger can stop at it."
        )


class WorkerDiedError(WorkerError):
    """A worker died without a message."""

    def __init__(self, failure: WorkerFailure, exitcode: int | None, stack: str) -> None:
        what, remedy = _explain(failure, exitcode)
        lines = [f"Lost {failure}.", what, *([f"Where it was:\n{stack.rstrip()}"] if stack else [])]
        super().__init__("\n".join([*lines, f"What to do: {remedy}"]))
        self.exitcode = exitcode


class WorkerSilentError(WorkerError):
    """A worker is alive, but has not answered in time."""

    def __init__(self, failure: WorkerFailure, timeout: float, stack: str) -> None:
        where = "It wrote no stack: it has not started yet, or it is stopped."
        if stack:
            where = f"Where it is:\n{stack.rstrip()}"
        super().__init__(
            f"Nothing for {timeout:g} s from {failure}.\n{where}\n"
            "What to do: if a batch may take that long, give a larger --worker_timeout; if not, the stack "
            "shows what it waits for."
        )


def _explain(failure: WorkerFailure, exitcode: int | None) -> tuple[str, str]:
    """Return the meaning of an exit code, with related facts, and the remedy."""
    if exitcode is None:
        return (
            "Its connection broke although it is still running.",
            "start again; if it comes back, give --num_workers 0.",
        )
    if exitcode == SERVER_GONE and failure.mp_context == "forkserver":
        return (
            "The server that forks workers has ended, and the worker with it.",
            "find the process that ended it (most often by a signal to the process group), and start again.",
        )
    if exitcode >= 0:
        return (
            f"It exited with code {exitcode} by itself.",
            "if it never made a batch, its start failed: the traceback above says why, and a script that "
            'starts workers needs `if __name__ == "__main__":` around what it runs. Else something in the '
            "data set called exit.",
        )
    number = -exitcode
    # Real-time signals have no name.
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    fact = f"It was killed by signal {number} ({name})"
    smaller = "a smaller --batch_size, --prefetch_factor or --num_workers"
    if number == signal.SIGKILL:
        return (
            f"{fact}: most often the kernel, when the memory limit is reached.\n{describe_memory()}",
            f"give {smaller}, or raise the memory limit; `dmesg` names what the kernel killed. If memory is "
            "left, another process sent the signal: start again.",
        )
    if number == signal.SIGBUS:
        return (
            f"{fact}: a page of mapped memory was missing. Either a file was truncated while it was read, or "
            f"the memory is full, of which batches take at most {shown_bytes(failure.ring_bytes)} on each "
            "rank.\n"
            f"{describe_memory()}",
            "do not change the files of the data set while it is used (truncated ones are made again at the "
            f"next start); where memory is full, give {smaller}.",
        )
    # Python itself raises none of these; they come from compiled code.
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return (
            f"{fact}: a crash in native code.",
            "the stack shows the call; packages that do not match are the usual reason: "
            f"{script_name()} --doctor checks them.",
        )
    return f"{fact}, which another process sent.", "find that process, and start again."


CLOSE_SECONDS = 2.0
# Seconds in which a worker with a closed connection must end, before it is reported as still running.
DEATH_SECONDS = 30.0
# Seconds to write a stack.
STACK_SECONDS = 0.3
# Capacity of a pipe. With more, the start of a worker would block until the worker reads.
PICKLE_LIMIT = 64 * 1024
# Imported once by the server, not by each worker: the heavy part of a worker's start, without CUDA. The
# server searches modules in the current folder, so modules of this project cannot be in the list.
PRELOADED = ("numpy",)


@dataclass
class WorkerHandle:
    """One worker: its process, the pipe to it, its own slots, and its open tasks."""

    process: Any
    connection: Connection
    crash_log: AnonymousFile
    # The thread that frees the last view of a slot returns the slot; append and pop are atomic.
    free_slots: deque[int]
    tasks: deque[BatchTask] = field(default_factory=deque)
    # Wakes up when it has answered, or when any worker is gone. Kept between batches, because registering
    # costs system calls; and poll, unlike select, supports descriptors above 1,023.
    poll: select.poll = field(default_factory=select.poll)

    def stack(self) -> str:
        """Return the content of its crash log."""
        # Without moving the offset, which the worker writes at.
        size = os.fstat(self.crash_log.descriptor).st_size
        return os.pread(self.crash_log.descriptor, size, 0).decode(errors="replace")

    def current_stack(self) -> str:
        """Return its current stack; "" if it does not answer."""
        # It may be gone by now.
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNALS[1])
        time.sleep(STACK_SECONDS)
        return self.stack()


def start_workers(
    workers: list[WorkerHandle], source: BatchSource, ring: Ring, context: Any, rank: int, num_workers: int
) -> None:
    """Start `num_workers` workers with equal parts of the slots of the ring.

    Each is added to the list at once, so that it is known after an exception.
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
            # A daemon, because Python's exit would wait for any other process of an unclosed pool.
            daemon=True,
        )
        first = worker_id * slots_per_worker
        workers.append(WorkerHandle(process, ours, crash_log, deque(range(first, first + slots_per_worker))))
        with _without_main_script(source):
            process.start()
        # Else the pipe would stay open when the worker is gone.
        theirs.close()
    for worker in workers:
        # All of them, because batches are returned in order: during the wait for one worker, another one
        # with a later batch may die, and would be noticed only then.
        for watched in (worker.connection, *(other.process.sentinel for other in workers)):
            worker.poll.register(watched, select.POLLIN)


@contextlib.contextmanager
def _without_main_script(source: BatchSource) -> Iterator[None]:
    """Start workers without this process's script, which may import torch, unless the data set needs it."""
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
    """End all workers within one deadline, and free shared resources; safe to call twice."""
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
def explaining_os_errors(num_workers: int, num_bytes: int) -> Iterator[None]:
    """Turn a system error of a pool into a sentence: on descriptors, processes or memory."""
    files = (
        f"a process may have {descriptor_limit()} files open, and all are in use. Fix: raise the limit with "
        "ulimit -n 4096"
    )
    memory = (
        f"their batches take up to {shown_bytes(num_bytes)}, more than this machine has. Fix: give a smaller "
        "--batch_size, --history or --prefetch_factor"
    )
    causes = {
        errno.EMFILE: files,
        errno.ENFILE: files,
        errno.EAGAIN: f"this user may have {resource.getrlimit(resource.RLIMIT_NPROC)[0]} processes, and "
        "all are in use. Fix: raise the limit with ulimit -u",
        errno.ENOMEM: memory,
        errno.EFBIG: memory,
    }
    try:
        yield
    except OSError as error:
        if error.errno not in causes:
            raise
        raise UserError(
            f"Cannot start {counted(num_workers, 'data worker')}: {causes[error.errno]}, or give a smaller "
            "--num_workers."
        ) from None


def check_pickle(source: BatchSource, mp_context: str) -> None:
    """Refuse a data set that cannot be pickled, or is large: every worker starts from a copy."""
    # A forked worker has the data set already, in memory that it shares with its parent.
    if mp_context == "fork":
        return
    name = type(source).__name__
    try:
        size = len(pickle.dumps(source))
    except Exception as error:
        raise UserError(
            f"Cannot send {name} to a data worker: {error}. Fix: keep paths and numbers in it, and open "
            "files, locks and tensors where they are first used."
        ) from error
    if size > PICKLE_LIMIT:
        raise UserError(
            f"{name} must pickle to at most {PICKLE_LIMIT:,} bytes, because every worker copies it, got "
            f"{size:,}; keep the data in files that are memory-mapped where they are first used."
        )


# One slot for the batch in use, and two more for a pipeline that prefetches.
SLOTS_BEYOND_PREFETCH = 3
# Tasks wait in a pipe, which would be full before the worker has answered the first.
MAX_PREFETCH_FACTOR = 64


class WorkerPool:
    """`num_workers` processes that make the batches of one rank. Started at once, ended by `close`."""

    def __init__(
        self,
        source: BatchSource,
        *,
        num_workers: int,
        prefetch_factor: int,
        timeout: float,
        mp_context: str,
        rank: int = 0,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers must be at least 1, got {num_workers}; without any call `make`")
        if prefetch_factor > MAX_PREFETCH_FACTOR:
            raise ValueError(f"prefetch_factor must be at most {MAX_PREFETCH_FACTOR}, got {prefetch_factor}")
        # Before any memory or process is allocated: it costs nothing, and gives a sentence instead of a
        # traceback from the start of a worker.
        check_pickle(source, mp_context)
        self.rank = rank
        self.prefetch_factor = prefetch_factor
        self.timeout = timeout
        self.mp_context = mp_context
        num_slots = num_workers * self.slots_per_worker
        with explaining_os_errors(num_workers, num_slots * source.batch_bytes):
            self.ring = Ring(num_slots, source.batch_bytes)
        self.num_copied = 0
        self._workers: list[WorkerHandle] = []
        self._pass = 0
        # Before the exit handler of multiprocessing, which would wait for workers that ignore its signal.
        # Also at the exit of an interpreter that never called `close`. Its arguments are the list and the
        # ring, because a reference to the pool would keep it alive.
        self._finalizer = multiprocessing.util.Finalize(
            self, end_workers, args=(self._workers, self.ring), exitpriority=100
        )
        try:
            with explaining_os_errors(num_workers, self.ring.num_bytes), starting_processes():
                context = multiprocessing.get_context(mp_context)
                start_workers(self._workers, source, self.ring, context, rank, num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def slots_per_worker(self) -> int:
        """Slots of the ring that belong to one worker."""
        return self.prefetch_factor + SLOTS_BEYOND_PREFETCH

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def batches(self, requests: Iterable[Any]) -> Iterator[Sequence[np.ndarray]]:
        """Yield the batches of the requests, in order. A batch is valid while any array of it is alive.

        The workers begin at this call, not at the first batch. Worker k modulo `num_workers` makes batch k. A
        new pass ends the one before it.

        Raises:
            WorkerError: when a worker raises, dies or is silent too long; the pool is of no use any more.
        """
        self._check_open()
        self._pass += 1
        self._drop_abandoned()
        source = iter(requests)
        order: deque[int] = deque()
        next_worker = 0
        for _ in range(self.prefetch_factor * len(self._workers)):
            next_worker = self._send(next_worker, source, order)
        return self._rest(source, order, next_worker, self._pass)

    def _rest(
        self, source: Iterator[Any], order: deque[int], next_worker: int, this_pass: int
    ) -> Iterator[Sequence[np.ndarray]]:
        # A separate generator: the code before it, in `batches`, must run at the call, and not at the first
        # batch.
        while order:
            self._check_open()
            if self._pass != this_pass:
                raise RuntimeError("another pass over the same loader has begun; a pool has one at a time")
            worker = self._workers[order.popleft()]
            arrays = self._receive(worker)
            # Before the batch is returned: the worker makes the next one while the consumer computes.
            next_worker = self._send(next_worker, source, order)
            yield arrays
            # Else this frame would hold the batch during the wait for the next one.
            del arrays

    def _check_open(self) -> None:
        if not self._workers:
            raise RuntimeError("the pool is closed; iterate inside its `with`")

    def _send(self, next_worker: int, source: Iterator[Any], order: deque[int]) -> int:
        request = next(source, None)
        if request is None:
            return next_worker
        worker = self._workers[next_worker]
        # The slot freed last, because it is still in the cache.
        task = BatchTask(worker.free_slots.pop(), request)
        try:
            worker.connection.send(task)
        except OSError:
            raise self._died(worker) from None
        worker.tasks.append(task)
        order.append(next_worker)
        # Round robin, not by free workers. So the worker of the next batch is known, and there is no shared
        # queue that a killed worker could leave locked.
        return (next_worker + 1) % len(self._workers)

    def _receive(self, worker: WorkerHandle) -> list[np.ndarray]:
        task, reply = self._answer(worker)
        if isinstance(reply, BatchFailed):
            failure = self._failure(worker, task)
            if reply.mistake:
                raise UserError(f"{reply.mistake} (Found by {failure}.)")
            # The worker is alive and could continue. But its batch is missing, and a training must not skip
            # one in silence.
            raise WorkerRaisedError(failure, reply.traceback)
        leased, arrays = self.ring.lease(task.slot, reply.layouts)
        # Slots are free, with the worker, or leased; this one is none of them.
        num_leased = self.slots_per_worker - len(worker.free_slots) - len(worker.tasks) - 1
        if num_leased < SLOTS_BEYOND_PREFETCH:
            release = weakref.finalize(leased, worker.free_slots.append, task.slot)
            # When the interpreter ends, no code needs a free slot.
            release.atexit = False
            return arrays
        # The consumer keeps batches: this slot must come back now, or the worker would soon have none.
        self.num_copied += 1
        arrays = [array.copy() for array in arrays]
        worker.free_slots.append(task.slot)
        return arrays

    def _answer(self, worker: WorkerHandle) -> tuple[BatchTask, BatchDone | BatchFailed]:
        """Return the oldest task of a worker and its answer."""
        task = worker.tasks[0]
        ready = [descriptor for descriptor, _ in worker.poll.poll(self.timeout * 1000)]
        if not ready:
            raise WorkerSilentError(self._failure(worker, task), self.timeout, worker.current_stack())
        # The answer first, even if some worker has ended meanwhile: an earlier batch is valid, and the next
        # call finds the worker that ended.
        if worker.connection.fileno() in ready:
            try:
                reply = worker.connection.recv()
            except (EOFError, OSError):
                raise self._died(worker) from None
            return worker.tasks.popleft(), reply
        raise self._died(next(other for other in self._workers if other.process.sentinel in ready))

    def _drop_abandoned(self) -> None:
        """Receive the open tasks of a pass that its consumer left early."""
        # Received, not cancelled: a worker writes into its slot until it has answered, and an answer left in
        # the pipe would be taken for that of the next task.
        for worker in self._workers:
            while worker.tasks:
                task, _ = self._answer(worker)
                worker.free_slots.append(task.slot)

    def _died(self, worker: WorkerHandle) -> WorkerDiedError:
        worker.process.join(DEATH_SECONDS)
        # Its earlier answers are in the pipe; it died in the task after those.
        with contextlib.suppress(EOFError, OSError):
            while worker.tasks and worker.connection.poll():
                worker.connection.recv()
                worker.tasks.popleft()
        failure = self._failure(worker, worker.tasks[0] if worker.tasks else None)
        return WorkerDiedError(failure, worker.process.exitcode, worker.stack())

    def _failure(self, worker: WorkerHandle, task: BatchTask | None) -> WorkerFailure:
        return WorkerFailure(
            rank=self.rank,
            worker_id=self._workers.index(worker),
            pid=worker.process.pid,
            request=task.request if task else None,
            ring_bytes=self.ring.num_bytes,
            mp_context=self.mp_context,
        )

    def close(self) -> None:
        """End all workers within one deadline and free shared resources; safe to call twice."""
        self._finalizer()
