"""Passes of a training: batches on the device, plain or overlapped, and the work between steps.

A worker's plain tensors become the model's input here, and one loader serves all passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from torchrec.distributed.train_pipeline.utils import _wait_for_batch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from recsuite.config.config import Config
from recsuite.config.sections import TrainingConfig
from recsuite.datasets.batching import Batch
from recsuite.datasets.loader import BatchLoader
from recsuite.datasets.schema import HISTORY
from recsuite.models.inputs import Members
from recsuite.models.layers import repeated
from recsuite.runtime.process import STEP, RuntimeContext, profiler_range
from recsuite.sharding.cpu_tables import CpuTables
from recsuite.sharding.dynamic_ranks import grow
from recsuite.sharding.exchange import sum_in_order
from recsuite.sharding.recommender import ModelInput, Share
from recsuite.sharding.storage import RowsInHostMemory
from recsuite.sharding.table import EmbeddingTable
from recsuite.sharding.torchrec_tables import OneRankTables
from recsuite.training.callbacks import Step
from recsuite.training.device_batches import (
    DeviceBatches,
    check_data_device,
    why_not_on_device,
    why_not_padded,
    why_on_host,
)
from recsuite.training.progress import Progress
from recsuite.training.state import (
    RowScale,
    Schedule,
    ShardedModel,
    place_draws,
    scheduled_rates,
    set_rates,
)


class BatchFeed:
    """Batches of all passes; each pass is a new iterator.

    TorchRec's pipeline recognises an exhausted iterator by its identity, so a second pass with the same
    object would seem empty (torchrec issue 2327).

    phase: a context for the name of a phase, see `Callback.phase`; used while this waits for a batch.
    """

    def __init__(
        self,
        loader: BatchLoader,
        phase: Callable[[str], AbstractContextManager[Any]] = lambda name: contextlib.nullcontext(),
    ) -> None:
        self.loader = loader
        self.phase = phase
        dataset = loader.dataset
        self.keys = [table.name for table in dataset.tables]
        # Set for a model that reads histories by the rows of the items themselves.
        self.item = dataset.schema.item if dataset.model.reads_order else None
        first = dataset.rank * dataset.local_batch_size
        self.share = None
        if dataset.has_groups_of_ranks:
            self.share = Share(first, dataset.batch_size, dataset.world_size)
        self.seconds_waited = 0.0
        # Makes the batches on the device; None where they come from the loader, and the reason.
        self.on_device: DeviceBatches | None = None
        self.why_on_host = ""
        self._prepared: tuple[tuple[Any, ...], Iterator[Batch]] | None = None

    def prepare(self, split: str, epoch: int, first: int = 0, window: tuple[int, int] | None = None) -> None:
        """Start the workers on a pass, from event number `first` on, before its batches are requested."""
        sampler = self.loader.sampler
        sampler.split, sampler.epoch, sampler.first, sampler.window = split, epoch, first, window
        self._prepared = ((split, epoch, first, window), iter(self.loader))

    def batches(
        self, split: str, epoch: int, first: int = 0, window: tuple[int, int] | None = None
    ) -> Iterator[ModelInput]:
        """Yield the batches of a pass over a split; count the consumer's seconds of waiting.

        They are on the host, or on the device if `on_device` makes them.
        """
        self.seconds_waited = 0.0
        if self.on_device is not None:
            yield from self.on_device.batches(split, epoch, first, window)
            return
        with self._waiting():
            # Prepared batches are for that very pass only: an evaluation may come first.
            if self._prepared is None or self._prepared[0] != (split, epoch, first, window):
                self.prepare(split, epoch, first, window)
            assert self._prepared is not None
            source, self._prepared = self._prepared[1], None
        while True:
            with self._waiting():
                batch = next(source, None)
            if batch is None:
                return
            yield self.to_model_input(batch)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        start = time.perf_counter()
        with self.phase("feed"):
            yield
        self.seconds_waited += time.perf_counter() - start

    def to_model_input(self, batch: Batch) -> ModelInput:
        """Return a worker's plain tensors as the model's input, still on the host."""
        keys, values, lengths = self.keys, batch.values, batch.lengths
        if self.item is not None:
            keys, values, lengths = with_histories(keys, values, lengths, self.item)
            # Joined into new memory, from which a copy to the device would wait.
            if batch.values.is_pinned():
                values, lengths = values.pin_memory(), lengths.pin_memory()
        features = KeyedJaggedTensor(keys=keys, values=values, lengths=lengths)
        # Counts the ids of each key here, so that the device need not be asked for them.
        features.sync()
        first = Batch._fields.index("history_labels")
        return ModelInput(
            features,
            batch.labels,
            batch.weights,
            batch.numbers,
            batch.seen_bits,
            Members(*batch[first : first + len(Members._fields)]),
            batch.more_labels,
            batch.more_weights,
            self.share,
        )


def place_batches(
    inputs: BatchFeed,
    model: ShardedModel,
    config: Config,
    context: RuntimeContext,
    before: str | None = None,
) -> None:
    """Make batches on the device if --data_device and the model allow it, and say so. Collective: every rank.

    before: `BatchFeed.why_on_host` of a stream before it grew; nothing is said if batches stay where they
    were.

    Raises:
        UserError: for --data_device cuda, when it cannot be.
    """
    device, dataset = context.device, inputs.loader.dataset
    reason = why_on_host(config, device, context.world_size)
    if reason is None:
        reason = why_not_on_device(dataset, config, free_bytes(device))
    if reason is None:
        tables = [module for module in model.model.modules() if isinstance(module, OneRankTables)]
        names = [name for module in tables for name in module.feature_names]
        # There is one rank, see `why_on_host`, so that no other waits for what this one decides.
        try:
            batches = DeviceBatches(dataset, device, names)
            reason = why_not_padded(model, batches)
        except torch.OutOfMemoryError:
            reason = "the GPU has no memory for the columns and lists of one length"
    inputs.why_on_host = reason or ""
    if reason is None:
        inputs.on_device = batches
    check_data_device(config, reason)
    is_where_it_was = before is not None and bool(before) == bool(reason)
    if device.type == "cpu" or config.training.data_device == "cpu" or is_where_it_was:
        return
    if reason is None:
        context.say(f"batches are made on the GPU, from {batches.nbytes / 1e6:,.1f} MB of columns")
    else:
        context.say(f"batches are made on the host, because {reason}")


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a GPU, with what torch keeps of it for later."""
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + kept


def with_histories(
    keys: Sequence[str], values: torch.Tensor, lengths: torch.Tensor, item: str
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Append each history to the event's own item, as values of one key.

    With two keys that share a table, checkpoints and the tracking of rows would need a mapping. See
    `models.sequences.apart`.
    """
    of_keys = lengths.view(len(keys), -1)
    parts = dict(zip(keys, values.split(of_keys.sum(dim=1).tolist()), strict=True))
    lengths_by_key = dict(zip(keys, of_keys, strict=True))
    counts = lengths_by_key[HISTORY].long()
    # One item for each event, followed by its history.
    own = counts.cumsum(0) - counts + torch.arange(len(counts))
    joined = values.new_empty(len(counts) + len(parts[HISTORY]))
    joined[own] = parts[item]
    rows = repeated(torch.arange(len(counts)), counts, len(parts[HISTORY]))
    joined[torch.arange(len(rows)) + rows + 1] = parts.pop(HISTORY)
    parts[item], lengths_by_key[item] = joined, lengths_by_key.pop(HISTORY) + 1
    return [*parts], torch.cat([*parts.values()]), torch.cat([*lengths_by_key.values()])


def copied(source: Iterator[ModelInput], device: torch.device) -> Iterator[ModelInput]:
    """Yield batches on the device.

    A GPU copies them on a stream of their own, so that no kernel waits for the next batch.
    """
    stream = _copy_stream(device)

    def take() -> ModelInput | None:
        with profiler_range("feed"):
            batch = next(source, None)
            if batch is None or stream is None:
                return batch
            with torch.cuda.stream(stream):
                return batch.to(device, non_blocking=True)

    if stream is None:
        yield from iter(take, None)
        return
    ahead = take()
    while (batch := ahead) is not None:
        # Before the next copy begins: the wait is for all copies so far.
        _wait_for_batch(batch, stream)
        ahead = take()
        yield batch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    # One for all passes, because memory is reused only for copies of the same stream.
    return None if device.type == "cpu" else torch.cuda.Stream(device)


class Overlap(TrainPipelineSparseDist):
    """TorchRec's pipeline for a loop that makes the steps itself.

    Copying the next batches and exchanging their ids overlap with the computation of the current one.
    """

    def device_batches(self, source: Iterator[ModelInput]) -> Iterator[ModelInput]:
        """Yield batches on the device, whose ids were exchanged.

        The caller gives each to the model once, and then calls `after_forward`.
        """
        # In the order of TorchRec's `progress`, which makes the step itself.
        while True:
            if not self._model_attached:
                self.attach(self._model)
            self.fill_pipeline(source)
            if not self.batches:
                return
            self._set_module_context(self.contexts[0])
            self._wait_for_batch()
            if len(self.batches) >= 2:
                self.start_sparse_data_dist(self.batches[1], self.contexts[1])
            self.enqueue_batch(source)
            yield self.batches[0]
            self.dequeue_batch()

    def after_forward(self) -> None:
        """Send the ids of the next batch, during the backward."""
        if len(self.batches) >= 2:
            self.wait_sparse_data_dist(self.contexts[1])


class Prefetch(PrefetchTrainPipelineSparseDist, Overlap):
    """`Overlap` that also loads the rows of the next batch into the cache on the GPU."""

    @override
    def device_batches(self, source: Iterator[ModelInput]) -> Iterator[ModelInput]:
        while True:
            if not self._model_attached:
                self.attach(self._model)
            self.fill_pipeline(source)
            if not self.batches:
                return
            self._set_module_context(self.contexts[0])
            _wait_for_batch(self.batches[0], self._prefetch_stream)
            self.enqueue_batch(source)
            if len(self.batches) >= 2:
                self.wait_sparse_data_dist(self.contexts[1])
            yield self.batches[0]
            if len(self.batches) >= 3:
                self.start_sparse_data_dist(self.batches[2], self.contexts[2])
            self.dequeue_batch()

    def after_forward(self) -> None:
        """Load the rows of the next batch, during the backward."""
        # Frees the memory of the current batch first.
        self.contexts[0].module_input_post_prefetch.clear()
        self.contexts[0].module_contexts_post_prefetch.clear()
        if len(self.batches) >= 2:
            self._prefetch(self.contexts[1])


# Batches whose ids are exchanged, and whose rows are loaded from the disk, before their step.
STEPS_AHEAD = 2


def load_ahead(model: nn.Module, batches: Iterator[ModelInput]) -> Iterator[ModelInput]:
    """Yield batches on the device; the rows of the next ones are loaded from the disk. Collective."""
    tables = [module for module in model.modules() if isinstance(module, CpuTables)]
    waiting: deque[ModelInput] = deque()
    try:
        for batch in batches:
            for module in tables:
                module.load_ahead(batch.features)
            waiting.append(batch)
            if len(waiting) > STEPS_AHEAD:
                yield waiting.popleft()
        yield from waiting
    finally:
        for module in tables:
            module.requested_ahead.clear()


class Pass:
    """Batches of the rest of an epoch, or of a window of a stream; to be iterated over once.

        for batch in epoch:
            loss = model(batch)
            loss.backward()
            model.step()

    The rest of a step happens between the batches: learning rates, the decay, clock and growth of the tables,
    callbacks. The device is waited for only at the end: losses stay there until then. Collective: every rank.

    step, is_last: the number of the current batch in the training, from 1, and True for the last one of the
    pass; losses: of each global batch, float32 [steps], after all batches were taken; progress: of the
    training; seconds: duration of the pass.
    """

    def __init__(
        self,
        model: ShardedModel,
        feed: BatchFeed,
        progress: Progress,
        schedule: Schedule,
        config: TrainingConfig,
        context: RuntimeContext,
        on_step: Callable[[Step], None] = lambda step: None,
        window: tuple[int, int] | None = None,
    ) -> None:
        self.model, self.feed = model, feed
        self.begin = self.progress = progress
        self.schedule, self.context, self.on_step = schedule, context, on_step
        exchanges = context.device.type == "cuda" and context.world_size > 1
        is_auto, held = config.pipeline == "auto", [table.rows for table in model.tables.values()]
        # Rows that are elsewhere are loaded as soon as their ids are known.
        self.loads = is_auto and any(getattr(module, "loads", False) for module in model.model.modules())
        self.prefetches = is_auto and any(isinstance(rows, RowsInHostMemory) for rows in held)
        self.overlaps = exchanges or self.prefetches if is_auto else config.pipeline == "sparse_dist"
        self.window = window
        self.step_sizes = feed.loader.dataset.step_sizes("train", progress.samples, self.window)
        self.losses: np.ndarray | None = None
        self.seconds = 0.0

    def __iter__(self) -> Iterator[ModelInput]:
        """Yield the batches on the device."""
        start = time.perf_counter()
        model, progress, device = self.model, self.begin, self.context.device
        model.model.train()
        # Reads the scale from the device, for a checkpoint may have set it: once in a pass, because reading
        # waits.
        scale = RowScale(model.row_scale, model.weight_decay)
        losses = torch.zeros(len(self.step_sizes), device=device)
        full = self.feed.loader.dataset.batch_size
        source = self.feed.batches("train", progress.epoch, progress.samples, self.window)
        if self.feed.on_device is not None:
            batches = source
        else:
            batches = self._overlapped(source) if self.overlaps else copied(source, device)
        if self.loads:
            batches = load_ahead(model.model, batches)
        for number, size in enumerate(self.step_sizes):
            left, decay_left = self.schedule.left(progress), self.schedule.decay_left(progress)
            # Before the step: TorchRec passes the tables' rate to their kernel in `zero_grad`, and the kernel
            # updates rows in the backward.
            set_rates(model.optimizer, left, scale.value, progress.step)
            model.table_optimizer.zero_grad()
            start_clock(model.tables, progress, scale.value)
            with profiler_range(STEP):
                batch = next(batches)
                # Now: a pipeline that begins has filled a cache, which draws too.
                place_draws(model.optimizer, progress.step)
                yield batch
                # In a stream the events of a small batch have the weights of those of a full one.
                loss = self._taken_loss()
                losses[number] = loss * (full / size) if self.window else loss
                for table in model.tables.values():
                    table.end_step()
            # In shares of a pass, so that a pass has the same decay with any number of steps.
            scale.decay(decay_left, size / self.schedule.num_events)
            progress = dataclasses.replace(progress, step=progress.step + 1, samples=progress.samples + size)
            for sentence in grow(model.tables, progress.step):
                self.context.say(sentence)
            self.progress = progress
            self.on_step(Step(progress, losses[number], scheduled_rates(model.optimizer)))
        # Ends the pipeline, which replaces the model's plain forward.
        next(batches, None)
        self.losses = _means_over_ranks(losses, self.context.world_size)
        self.seconds = time.perf_counter() - start

    @property
    def step(self) -> int:
        """Number of the current batch, see the class."""
        return self.progress.step + 1

    @property
    def is_last(self) -> bool:
        """True for the last batch, see the class."""
        return self.step == self.begin.step + len(self.step_sizes)

    def _overlapped(self, source: Iterator[ModelInput]) -> Iterator[ModelInput]:
        pipeline = Prefetch if self.prefetches else Overlap
        overlap = pipeline(self.model.model, self.model.optimizer, self.context.device)
        self.model.after_forward = overlap.after_forward
        try:
            yield from overlap.device_batches(source)
        finally:
            # Evaluation needs the model's plain forward, which TorchRec's pipeline replaces.
            overlap.detach()
            self.model.after_forward = None

    def _taken_loss(self) -> torch.Tensor:
        loss, self.model.loss = self.model.loss, None
        if loss is None:
            raise RuntimeError(
                "No loss was computed for a batch. Fix: call model(batch), or with a loss of "
                "your own model.step(loss), or set model.loss = loss.detach() where the step comes later."
            )
        return loss


def learn(epoch: Pass, step: Callable[[ModelInput], Any] | None = None) -> np.ndarray:
    """Train on all batches of a pass; return the losses, float32 [steps]. Collective: every rank.

    step: makes one, see `Training.step`; None for an eager one.
    """
    step = step or epoch.model.train_on
    for batch in epoch:
        step(batch)
    assert epoch.losses is not None
    return epoch.losses


def start_clock(tables: Mapping[str, EmbeddingTable], progress: Progress, scale: float = 1.0) -> None:
    """Set the time of the next step in the tables; scale: the row scale. Not collective."""
    # The event time moves on from window to window.
    seconds = progress.stream.begins_at if progress.stream else 0
    for table in tables.values():
        table.begin_step(progress.step, seconds, scale)


def _means_over_ranks(losses: torch.Tensor, world_size: int) -> np.ndarray:
    """Return the mean over ranks of each entry. Collective: every rank."""
    # Gathered and added in the order of the ranks: the rounding of an all-reduce over three ranks, and of
    # torch.mean over five, depends on the position of a step in the pass, and a resumed epoch begins in the
    # middle.
    everyones = [torch.empty_like(losses) for _ in range(world_size)]
    dist.all_gather(everyones, losses)
    return sum_in_order(everyones).div_(world_size).cpu().numpy()
