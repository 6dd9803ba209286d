"""The loader of batches: in this process, or from a pool of workers."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from recsuite.config.config import Config
from recsuite.config.sections import LoaderConfig
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching import Batch, to_tensors
from recsuite.errors import UserError, counted
from recsuite.runtime.console import say
from recsuite.runtime.host import allowed_cores, spare_cores
from recsuite.runtime.process import Launch, read_launch

if TYPE_CHECKING:
    from recsuite.workers.pool import WorkerPool

# Steps measured by --num_workers auto, and the share of waiting time below which no worker is started.
WARM_UP_STEPS = 5
TIMED_STEPS = 20
WAIT_WORTH_A_WORKER = 0.02


class EpochSampler:
    """Requests of one pass, in order. Exists in the main process, which chooses the pass."""

    def __init__(self, dataset: EventBatches) -> None:
        self.dataset = dataset
        self.split = "train"
        self.epoch = 0
        self.first = 0
        self.window: tuple[int, int] | None = None

    def __iter__(self) -> Iterator[Request]:
        # Copied now: workers prefetch, and the pass must not change in the middle.
        split, epoch, first, window = self.split, self.epoch, self.first, self.window
        schema = self.dataset.schema
        noun = schema.item if split == "catalogue" else schema.label
        return (Request(split, epoch, step, first, noun, window) for step in range(len(self)))

    def __len__(self) -> int:
        return self.dataset.num_steps(self.split, self.first, self.window)


class BatchLoader(contextlib.AbstractContextManager["BatchLoader"]):
    """Iterable of batches with its workers. As a context manager it ends the workers.

    Each `iter` is one pass over the split of the sampler. A batch stays valid as long as the consumer holds
    it.
    """

    def __init__(self, dataset: EventBatches, sampler: EpochSampler, config: LoaderConfig) -> None:
        import torch

        self.dataset = dataset
        self.sampler = sampler
        self.config = config
        self.pool: WorkerPool | None = None
        self._pin = torch.cuda.is_available()
        self._undecided = config.num_workers == "auto"
        if config.num_workers != 0:
            check_start_method(config.mp_context)
            _warn(config, read_launch())
        if isinstance(config.num_workers, int) and config.num_workers > 0:
            self.pool = self._start_pool(config.num_workers)

    def __len__(self) -> int:
        """Number of batches in a pass."""
        return len(self.sampler)

    def __iter__(self) -> Iterator[Batch]:
        """Start one pass. The workers begin now, before the first batch is requested.

        Raises:
            UserError: when the data cannot be read any more.
            WorkerError: when a worker raises, dies or is silent for --worker_timeout seconds.
        """
        requests = iter(self.sampler)
        # Not for the validation of initial rows, which comes first: its steps are shorter.
        if self._undecided and self.sampler.split == "train":
            return self._try_out(requests)
        return self._rest(requests)

    def _rest(self, requests: Iterator[Request]) -> Iterator[Batch]:
        # Without a pool a batch is made when it is requested, between two steps.
        arrays = self.pool.batches(requests) if self.pool else map(self.dataset.make, requests)
        return map(self._finished, arrays)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the workers, within seconds. May be called twice. Also done at the exit of the interpreter."""
        if self.pool is not None:
            self.pool.close()

    def _start_pool(self, num_workers: int) -> WorkerPool:
        from recsuite.workers.pool import WorkerPool

        config, launch = self.config, read_launch()
        return WorkerPool(
            self.dataset,
            num_workers=num_workers,
            prefetch_factor=config.prefetch_factor,
            timeout=config.worker_timeout,
            mp_context=config.mp_context,
            rank=launch.rank,
        )

    def _finished(self, arrays: Sequence[np.ndarray]) -> Batch:
        batch = to_tensors(arrays)
        if self._pin:
            # The copy frees the ring's slot at once, whatever the pace of the device: torch tracks the use of
            # its own page-locked memory.
            return Batch(*(tensor.pin_memory() for tensor in batch))
        return batch

    def _try_out(self, requests: Iterator[Request]) -> Iterator[Batch]:
        """Do and time the first steps without workers, then choose the number of workers."""
        # A batch does not depend on the process that makes it, so the pool may start in the middle of a pass.
        start, making = time.perf_counter(), 0.0
        for steps, request in enumerate(requests, start=1):
            begin = time.perf_counter()
            batch = self._finished(self.dataset.make(request))
            making += time.perf_counter() - begin
            yield batch
            # The first steps allocate memory that later ones reuse. A GPU computes asynchronously: without
            # waiting for it, a step would seem to take no time.
            if steps == WARM_UP_STEPS:
                _synchronize()
                start, making = time.perf_counter(), 0.0
            if steps == WARM_UP_STEPS + TIMED_STEPS:
                break
        else:
            # The pass was too short to measure; the next one tries again.
            return
        _synchronize()
        batch_seconds = making / TIMED_STEPS
        step_seconds = (time.perf_counter() - start) / TIMED_STEPS - batch_seconds
        num_workers, why = choose_num_workers(
            batch_seconds, step_seconds, allowed_cores(), read_launch().local_world_size
        )
        say(f"--num_workers auto: {why}")
        # Chosen once: the next passes keep the pool.
        self._undecided = False
        if num_workers > 0:
            self.pool = self._start_pool(num_workers)
        yield from self._rest(requests)


def choose_num_workers(
    batch_seconds: float, step_seconds: float, num_cores: int, local_world_size: int
) -> tuple[int, str]:
    """Return the number of workers that a rank needs so that its steps do not wait, and the explanation."""
    # Share of a step without workers, in which making a batch and training on it follow each other.
    share = batch_seconds / (batch_seconds + step_seconds)
    spare = spare_cores(local_world_size, num_cores)
    # A consumer that only receives batches has steps of zero length.
    needed = math.ceil(batch_seconds / max(step_seconds, 1e-9))
    facts = (
        f"a batch takes {batch_seconds * 1e3:.2f} ms and a step {step_seconds * 1e3:.2f} ms; "
        f"{counted(num_cores, 'core')} for {counted(local_world_size, 'rank')} leave {spare} beside each"
    )
    if share <= WAIT_WORTH_A_WORKER:
        return 0, f"0, because waiting takes only {share:.1%} of the time ({facts})"
    if spare == 0:
        return 0, f"0, as there is no core for one ({facts})"
    if needed <= spare:
        return needed, f"{needed}, as {needed} keep pace ({facts})"
    return spare, f"{spare}, as {needed} would keep pace but there is no core for more ({facts})"


def check_start_method(mp_context: str) -> None:
    """Refuse to fork a process that uses CUDA.

    Raises:
        UserError: for fork, when CUDA is initialised.
    """
    if mp_context == "fork" and "torch" in sys.modules:
        import torch

        if torch.cuda.is_initialized():
            raise UserError(
                "--mp_context fork cannot be used once CUDA is initialised, as a forked worker can neither "
                "use nor free what it inherits of it; give spawn or forkserver."
            )


def _warn(config: LoaderConfig, launch: Launch) -> None:
    """Warn, once on a machine, about settings that are allowed but seldom useful."""
    if launch.local_rank != 0:
        return
    if config.mp_context == "fork":
        say("--mp_context fork: workers inherit the locks of all threads, and may hang; spawn does not")
    num_workers = 0 if config.num_workers == "auto" else int(config.num_workers) * launch.local_world_size
    if num_workers > allowed_cores():
        workers, cores = counted(num_workers, "data worker"), counted(allowed_cores(), "core")
        say(f"{workers} on this machine share {cores} with the ranks")


def build_dataloader(dataset: EventBatches, sampler: EpochSampler, config: Config) -> BatchLoader:
    """Return a loader of whole batches. Not collective.

    Batches are made in this process for --num_workers 0, else by worker processes. Workers are spawned,
    unless --mp_context is given, because a forked worker inherits the CUDA context and the locks of every
    thread. They are persistent, and one pool serves training and evaluation. They start at once, while the
    caller continues. Batches are pinned if CUDA is available; the main process copies them to the device,
    after `init_runtime` has set it.

    Args:
        dataset: Makes batch k of an epoch.
        sampler: The numbers of this rank's batches.
        config: Its section `loader` has the flags of workers.

    Returns:
        The loader; each `iter` of it is one pass over the split of the sampler.

    Raises:
        UserError: When the data set cannot be sent to a worker, or the machine cannot start that many.

    Example:
        with rs.open_data(args, runtime, rs.build_dataloader) as data:
            ...
    """
    return BatchLoader(dataset, sampler, config.loader)


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
