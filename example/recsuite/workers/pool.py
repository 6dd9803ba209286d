"""The pool of data workers: tasks out, batches back in order through shared memory, and an end in time.

One pool serves every pass of every split. Each worker has `prefetch_factor` tasks at most, and a task names
the slot that its batch goes to: a slot is either free, or one task's, or leased to the consumer of its batch.
Batches are views of their slots: nothing is copied on the way, unless the consumer keeps many of them.
Knows processes and arrays; nothing of torch, ratings or models.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import multiprocessing.util
import os
import pickle
import select
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from recsuite.errors import UserError, counted
from recsuite.runtime.host import descriptor_limit, gib, num_descriptors, process_limit
from recsuite.workers.crash_log import Scene, WorkerDiedError, WorkerRaisedError, WorkerSilentError
from recsuite.workers.ring import AnonymousFile, Ring
from recsuite.workers.worker import STACK_SIGNALS, BatchSource, Failed, Made, Task, Worker, birth, serve

# One that the consumer reads while the next is handed over, and two more for a pipeline that looks ahead.
SLOTS_BEYOND_PREFETCH = 3
CLOSE_SECONDS = 2.0
# What a stack needs to be written in.
STACK_SECONDS = 0.3
DESCRIPTORS_PER_WORKER = 4
PICKLE_LIMIT = 64 * 1024
# Tasks wait in a pipe, which would be full before the worker has answered the first.
MAX_PREFETCH_FACTOR = 64
# Imported by the server once, not by each worker: the heavy part of a worker's start, and clean of CUDA. The
# server looks for modules in the current folder, so nothing of ours can be among them.
PRELOADED = ("numpy",)


@dataclass
class _Member:
    """A worker as the trainer sees it."""

    process: Any
    connection: Connection
    black_box: AnonymousFile
    # A slot comes back from whatever thread frees the last view of it; append and pop are atomic.
    free_slots: deque[int]
    tasks: deque[Task] = field(default_factory=deque)
    # Wakes up when it has answered, or when any worker is gone.
    poll: select.poll = field(default_factory=select.poll)


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
        local_world_size: int = 1,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a pool of {num_workers} workers makes no batch; without workers call `make`")
        if prefetch_factor > MAX_PREFETCH_FACTOR:
            raise ValueError(f"prefetch_factor {prefetch_factor} is above {MAX_PREFETCH_FACTOR}")
        _check_pickle(source, mp_context)
        self.rank = rank
        self.local_world_size = local_world_size
        self.prefetch_factor = prefetch_factor
        self.timeout = timeout
        self.mp_context = mp_context
        num_slots = num_workers * self.slots_per_worker
        with _refusals_in_words(num_workers, num_slots * source.batch_bytes):
            self.ring = Ring(num_slots, source.batch_bytes)
        self.num_copied = 0
        self._members: list[_Member] = []
        self._pass = 0
        # Before the one of multiprocessing, which would wait for workers that ignore its signal. Also at the
        # end of an interpreter that never called `close`.
        self._finalizer = multiprocessing.util.Finalize(
            self, _end, args=(self._members, self.ring), exitpriority=100
        )
        try:
            with _refusals_in_words(num_workers, self.ring.num_bytes), birth():
                self._start(source, multiprocessing.get_context(mp_context), num_workers)
        except BaseException:
            self.close()
            raise

    @property
    def slots_per_worker(self) -> int:
        """Slots of the ring that belong to one worker."""
        return self.prefetch_factor + SLOTS_BEYOND_PREFETCH

    @property
    def pids(self) -> list[int]:
        """The process id of each worker."""
        return [member.process.pid for member in self._members]

    def _start(self, source: BatchSource, context: Any, num_workers: int) -> None:
        if context.get_start_method() == "forkserver":
            context.set_forkserver_preload(list(PRELOADED))
        for worker_id in range(num_workers):
            black_box = AnonymousFile(f"stack-{worker_id}")
            ours, theirs = context.Pipe()
            first = worker_id * self.slots_per_worker
            process = context.Process(
                target=serve,
                args=(Worker(self.rank, worker_id, black_box), source, self.ring, theirs),
                name=f"data worker {worker_id} of rank {self.rank}",
                daemon=True,
            )
            slots = deque(range(first, first + self.slots_per_worker))
            self._members.append(_Member(process, ours, black_box, slots))
            process.start()
            theirs.close()
        for member in self._members:
            for watched in (member.connection, *(other.process.sentinel for other in self._members)):
                member.poll.register(watched, select.POLLIN)

    def batches(self, requests: Iterable[Any]) -> Iterator[Sequence[np.ndarray]]:
        """The batches of the requests, in order. A batch is valid as long as anyone holds an array of it.

        The workers begin at once, whenever the first batch is asked for. Request k is made by worker k modulo
        their number. A new pass ends the one before it.

        Raises:
            WorkerError: when a worker raises, dies or is silent too long; the pool is of no use any more.
        """
        self._check_open()
        self._pass += 1
        self._drop_abandoned()
        source = iter(requests)
        order: deque[int] = deque()
        turn = 0
        for _ in range(self.prefetch_factor * len(self._members)):
            turn = self._send(turn, source, order)
        return self._rest(source, order, turn, self._pass)

    def _rest(
        self, source: Iterator[Any], order: deque[int], turn: int, this_pass: int
    ) -> Iterator[Sequence[np.ndarray]]:
        while order:
            self._check_open()
            if self._pass != this_pass:
                raise RuntimeError("another pass over the same loader has begun; a pool makes one at a time")
            member = self._members[order.popleft()]
            arrays = self._receive(member)
            turn = self._send(turn, source, order)
            yield arrays
            # Else this frame would hold the batch while the next one is waited for.
            del arrays

    def _check_open(self) -> None:
        if not self._members:
            raise RuntimeError("the pool is closed; iterate inside its `with`")

    def _send(self, turn: int, source: Iterator[Any], order: deque[int]) -> int:
        request = next(source, None)
        if request is None:
            return turn
        member = self._members[turn]
        # The one that came back last: it is still in the cache.
        task = Task(member.free_slots.pop(), request)
        try:
            member.connection.send(task)
        except OSError:
            raise self._died(member) from None
        member.tasks.append(task)
        order.append(turn)
        return (turn + 1) % len(self._members)

    def _receive(self, member: _Member) -> list[np.ndarray]:
        task, reply = self._answer(member)
        if isinstance(reply, Failed):
            scene = self._scene(member, task)
            if reply.mistake:
                raise UserError(f"{reply.mistake} (Found by {scene}.)")
            raise WorkerRaisedError(scene, reply.traceback)
        leased, arrays = self.ring.lease(task.slot, reply.places)
        # Slots are free, with the worker, or leased; this one is none of them.
        num_leased = self.slots_per_worker - len(member.free_slots) - len(member.tasks) - 1
        if num_leased < SLOTS_BEYOND_PREFETCH:
            release = weakref.finalize(leased, member.free_slots.append, task.slot)
            release.atexit = False
            return arrays
        # The consumer keeps batches: this slot must come back now, or the worker would soon have none.
        self.num_copied += 1
        arrays = [array.copy() for array in arrays]
        member.free_slots.append(task.slot)
        return arrays

    def _answer(self, member: _Member) -> tuple[Task, Made | Failed]:
        """The oldest task of a worker and what came of it."""
        task = member.tasks[0]
        ready = [descriptor for descriptor, _ in member.poll.poll(self.timeout * 1000)]
        if not ready:
            raise WorkerSilentError(self._scene(member, task), self.timeout, self._stack_now(member))
        if member.connection.fileno() in ready:
            try:
                reply = member.connection.recv()
            except (EOFError, OSError):
                raise self._died(member) from None
            return member.tasks.popleft(), reply
        raise self._died(next(other for other in self._members if other.process.sentinel in ready))

    def _drop_abandoned(self) -> None:
        """Take back what a pass asked for that its consumer left early."""
        for member in self._members:
            while member.tasks:
                task, _ = self._answer(member)
                member.free_slots.append(task.slot)

    def _died(self, member: _Member) -> WorkerDiedError:
        member.process.join(CLOSE_SECONDS)
        # What it had answered before lies in the pipe; the task after that is the one that it died with.
        with contextlib.suppress(EOFError, OSError):
            while member.tasks and member.connection.poll():
                member.connection.recv()
                member.tasks.popleft()
        scene = self._scene(member, member.tasks[0] if member.tasks else None)
        return WorkerDiedError(scene, member.process.exitcode, _read(member.black_box))

    def _scene(self, member: _Member, task: Task | None) -> Scene:
        return Scene(
            rank=self.rank,
            worker_id=self._members.index(member),
            pid=member.process.pid,
            request=task.request if task else None,
            ring_bytes=self.ring.num_bytes,
            num_slots=self.ring.num_slots,
            local_world_size=self.local_world_size,
            mp_context=self.mp_context,
        )

    def _stack_now(self, member: _Member) -> str:
        # It may be gone by now.
        with contextlib.suppress(ProcessLookupError):
            os.kill(member.process.pid, STACK_SIGNALS[1])
        time.sleep(STACK_SECONDS)
        return _read(member.black_box)

    def close(self) -> None:
        """End all workers within one deadline and free what they shared; harmless twice."""
        self._finalizer()


@contextlib.contextmanager
def _refusals_in_words(num_workers: int, num_bytes: int) -> Iterator[None]:
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
                "than this machine gives; give a smaller --batch_size, --history, --prefetch_factor or "
                "--num_workers."
            ) from None
        raise


def _end(members: list[_Member], ring: Ring) -> None:
    born = [member for member in members if member.process.pid is not None]
    for member in born:
        try:
            member.connection.send(None)
        except OSError:
            continue
    deadline = time.monotonic() + CLOSE_SECONDS
    for member in born:
        member.process.join(max(0.0, deadline - time.monotonic()))
    for member in born:
        # Nothing is lost: a worker only reads.
        if member.process.is_alive():
            member.process.kill()
        member.process.join()
        member.process.close()
    for member in members:
        member.connection.close()
        member.black_box.close()
    members.clear()
    ring.close()


def _check_pickle(source: BatchSource, mp_context: str) -> None:
    """Refuse a data set that cannot be sent to a worker, or is large: every worker starts from a copy."""
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


def _read(file: AnonymousFile) -> str:
    size = os.fstat(file.descriptor).st_size
    return os.pread(file.descriptor, size, 0).decode(errors="replace")
