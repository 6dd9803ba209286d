"""The pool of data workers: tasks out, batches back in order through shared memory, and an end in time.

One pool serves every pass of every split. Each worker has `prefetch_factor` tasks at most, and a task names
the slot that its batch goes to: a slot is either free, or one task's, or leased to the consumer of its batch.
Batches are views of their slots: nothing is copied on the way, unless the consumer keeps many of them.
Knows processes and arrays; nothing of torch, ratings or models.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.util
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from recsuite.errors import UserError
from recsuite.workers.failure import WorkerDiedError, WorkerFailure, WorkerRaisedError, WorkerSilentError
from recsuite.workers.handle import (
    DEATH_SECONDS,
    WorkerHandle,
    check_pickle,
    end_workers,
    refusals_in_words,
    start_workers,
)
from recsuite.workers.ring import Ring
from recsuite.workers.worker import BatchSource, Failed, Made, Task, birth

# One that the consumer reads while the next is handed over, and two more for a pipeline that looks ahead.
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
        local_world_size: int = 1,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"a pool of {num_workers} workers makes no batch; without workers call `make`")
        if prefetch_factor > MAX_PREFETCH_FACTOR:
            raise ValueError(f"prefetch_factor {prefetch_factor} is above {MAX_PREFETCH_FACTOR}")
        # Before any memory or process is asked for: it costs nothing, and says in a sentence what the start
        # of a worker would say in a traceback.
        check_pickle(source, mp_context)
        self.rank = rank
        self.local_world_size = local_world_size
        self.prefetch_factor = prefetch_factor
        self.timeout = timeout
        self.mp_context = mp_context
        num_slots = num_workers * self.slots_per_worker
        with refusals_in_words(num_workers, num_slots * source.batch_bytes):
            self.ring = Ring(num_slots, source.batch_bytes)
        self.num_copied = 0
        self._workers: list[WorkerHandle] = []
        self._pass = 0
        # Before the one of multiprocessing, which would wait for workers that ignore its signal. Also at the
        # end of an interpreter that never called `close`. It is given the list and the ring and not the pool,
        # which it would keep alive.
        self._finalizer = multiprocessing.util.Finalize(
            self, end_workers, args=(self._workers, self.ring), exitpriority=100
        )
        try:
            with refusals_in_words(num_workers, self.ring.num_bytes), birth():
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
        """The process id of each worker."""
        return [worker.process.pid for worker in self._workers]

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
        next_worker = 0
        for _ in range(self.prefetch_factor * len(self._workers)):
            next_worker = self._send(next_worker, source, order)
        return self._rest(source, order, next_worker, self._pass)

    def _rest(
        self, source: Iterator[Any], order: deque[int], next_worker: int, this_pass: int
    ) -> Iterator[Sequence[np.ndarray]]:
        # A generator of its own: what comes before it, in `batches`, has to happen when that is called, and
        # not when the first batch is asked for.
        while order:
            self._check_open()
            if self._pass != this_pass:
                raise RuntimeError("another pass over the same loader has begun; a pool makes one at a time")
            worker = self._workers[order.popleft()]
            arrays = self._receive(worker)
            # Before the batch is handed out: the worker makes the next one while the consumer computes.
            next_worker = self._send(next_worker, source, order)
            yield arrays
            # Else this frame would hold the batch while the next one is waited for.
            del arrays

    def _check_open(self) -> None:
        if not self._workers:
            raise RuntimeError("the pool is closed; iterate inside its `with`")

    def _send(self, next_worker: int, source: Iterator[Any], order: deque[int]) -> int:
        request = next(source, None)
        if request is None:
            return next_worker
        worker = self._workers[next_worker]
        # The one that came back last: it is still in the cache.
        task = Task(worker.free_slots.pop(), request)
        try:
            worker.connection.send(task)
        except OSError:
            raise self._died(worker) from None
        worker.tasks.append(task)
        order.append(next_worker)
        # In turn, and not to whoever is free. Which worker has the next batch is then known without asking,
        # and there is no queue in common that a worker could leave locked when it is killed.
        return (next_worker + 1) % len(self._workers)

    def _receive(self, worker: WorkerHandle) -> list[np.ndarray]:
        task, reply = self._answer(worker)
        if isinstance(reply, Failed):
            failure = self._failure(worker, task)
            if reply.mistake:
                raise UserError(f"{reply.mistake} (Found by {failure}.)")
            # The worker lives and could continue. But its batch is missing, and no training may skip one in
            # silence.
            raise WorkerRaisedError(failure, reply.traceback)
        leased, arrays = self.ring.lease(task.slot, reply.layouts)
        # Slots are free, with the worker, or leased; this one is none of them.
        num_leased = self.slots_per_worker - len(worker.free_slots) - len(worker.tasks) - 1
        if num_leased < SLOTS_BEYOND_PREFETCH:
            release = weakref.finalize(leased, worker.free_slots.append, task.slot)
            # When the interpreter ends nobody needs a free slot any more.
            release.atexit = False
            return arrays
        # The consumer keeps batches: this slot must come back now, or the worker would soon have none.
        self.num_copied += 1
        arrays = [array.copy() for array in arrays]
        worker.free_slots.append(task.slot)
        return arrays

    def _answer(self, worker: WorkerHandle) -> tuple[Task, Made | Failed]:
        """The oldest task of a worker and what came of it."""
        task = worker.tasks[0]
        ready = [descriptor for descriptor, _ in worker.poll.poll(self.timeout * 1000)]
        if not ready:
            raise WorkerSilentError(self._failure(worker, task), self.timeout, worker.stack_now())
        # The answer first, even if some worker has ended meanwhile: what was made before is good, and the
        # next call finds the one that ended.
        if worker.connection.fileno() in ready:
            try:
                reply = worker.connection.recv()
            except (EOFError, OSError):
                raise self._died(worker) from None
            return worker.tasks.popleft(), reply
        raise self._died(next(other for other in self._workers if other.process.sentinel in ready))

    def _drop_abandoned(self) -> None:
        """Take back what a pass asked for that its consumer left early."""
        # Waited for and not cancelled: a worker writes into its slot until it has answered, and an answer
        # that is left in the pipe would be taken for that of the next task.
        for worker in self._workers:
            while worker.tasks:
                task, _ = self._answer(worker)
                worker.free_slots.append(task.slot)

    def _died(self, worker: WorkerHandle) -> WorkerDiedError:
        worker.process.join(DEATH_SECONDS)
        # What it had answered before lies in the pipe; the task after that is the one that it died with.
        with contextlib.suppress(EOFError, OSError):
            while worker.tasks and worker.connection.poll():
                worker.connection.recv()
                worker.tasks.popleft()
        failure = self._failure(worker, worker.tasks[0] if worker.tasks else None)
        return WorkerDiedError(failure, worker.process.exitcode, worker.stack())

    def _failure(self, worker: WorkerHandle, task: Task | None) -> WorkerFailure:
        return WorkerFailure(
            rank=self.rank,
            worker_id=self._workers.index(worker),
            pid=worker.process.pid,
            request=task.request if task else None,
            ring_bytes=self.ring.num_bytes,
            num_slots=self.ring.num_slots,
            local_world_size=self.local_world_size,
            mp_context=self.mp_context,
        )

    def close(self) -> None:
        """End all workers within one deadline and free what they shared; harmless twice."""
        self._finalizer()
