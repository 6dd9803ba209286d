"""The passes of a training: batches on the device, plain or overlapped, and what happens between steps."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.sections import TrainingConfig
from recsuite.runtime.process import STEP, RuntimeContext, named
from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.dynamic.sharded.collective import begin_step, dynamic_modules, dynamic_rows, grow
from recsuite.sharding.recommender import ModelInput
from recsuite.training.callbacks import Step
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.optimizer import RowScale, Schedule, scheduled_rates, set_rates
from recsuite.training.state import ShardedModel


class Overlap(TrainPipelineSparseDist):
    """TorchRec's pipeline for a loop that makes the steps itself: the copy of the next batches and the
    exchange of their ids run beside this one's computation.
    """

    def taken(self, source: Iterator[ModelInput]) -> Iterator[ModelInput]:
        """Yield batches on the device, whose ids were exchanged. Give each to the model once, and call
        `after_forward` then.
        """
        # In the order of `progress`, which makes the step itself.
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
        """Send the ids of the next batch, while the backward computes."""
        if len(self.batches) >= 2:
            self.wait_sparse_data_dist(self.contexts[1])


class Pass:
    """The batches of what is left of an epoch, or of a window of a stream; to be iterated over once.

        for batch in part:
            loss = model(batch)
            loss.backward()
            model.step()

    What a step needs beside that happens between the batches: learning rates, the decay of the tables, the
    clock and growth of dynamic tables, callbacks. Nothing waits for the device but the end: losses stay there
    until then. Collective: every rank.

    step, is_last: the number of the batch under way in the training, from 1, and whether it is the last one
    of the pass; losses: of each global batch, float32 [steps], once all batches were taken; progress: of the
    training; seconds: that the pass took.
    """

    def __init__(
        self,
        model: ShardedModel,
        input_pipeline: InputPipeline,
        progress: Progress,
        schedule: Schedule,
        config: TrainingConfig,
        context: RuntimeContext,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.model, self.input_pipeline = model, input_pipeline
        self.begin = self.progress = progress
        self.schedule, self.context, self.on_step = schedule, context, on_step
        self.overlaps = (
            context.device.type == "cuda" if config.pipeline == "auto" else config.pipeline == "sparse_dist"
        )
        self.window = (progress.stream.begin, progress.stream.end) if progress.stream else None
        self.step_sizes = input_pipeline.loader.dataset.step_sizes("train", progress.samples, self.window)
        self.losses: np.ndarray | None = None
        self.seconds = 0.0

    def __iter__(self) -> Iterator[ModelInput]:
        """Yield the batches on the device."""
        start = time.perf_counter()
        model, progress, device = self.model, self.begin, self.context.device
        model.model.train()
        # Reads the scale from the device, for a checkpoint may have set it: once in a pass, as reading waits.
        scale = RowScale(model.row_scale, model.weight_decay)
        # Found once: to look through all modules takes time in every step, also where no table is dynamic.
        shares, modules = dynamic_rows(model.model), dynamic_modules(model.model)
        losses = torch.zeros(len(self.step_sizes), device=device)
        source = self.input_pipeline.batches("train", progress.epoch, progress.samples, self.window)
        batches = self._overlapped(source) if self.overlaps else self._copied(source)
        for number, size in enumerate(self.step_sizes):
            left = self.schedule.left(progress)
            # Before the step: TorchRec gives the tables' rate to their kernel in `zero_grad`, and the kernel
            # learns in the backward.
            set_rates(model.optimizer, left, scale.value, progress.step)
            model.table_optimizer.zero_grad()
            start_clock(shares, progress, scale.value)
            with named(STEP):
                yield next(batches)
                losses[number] = self._taken_loss()
                for module in modules:
                    module.end_step()
            # In shares of a pass, so that a pass decays alike however many steps it has.
            scale.decay(left, size / self.schedule.num_events)
            progress = dataclasses.replace(progress, step=progress.step + 1, samples=progress.samples + size)
            for sentence in grow(model.model, progress.step):
                self.context.say(sentence)
            self.progress = progress
            self.on_step(Step(progress, losses[number], scheduled_rates(model.optimizer)))
        # Ends the pipeline, which takes the place of the model's plain forward.
        next(batches, None)
        self.losses = _means_over_ranks(losses, self.context.world_size)
        self.seconds = time.perf_counter() - start

    @property
    def step(self) -> int:
        """See above."""
        return self.progress.step + 1

    @property
    def is_last(self) -> bool:
        """See above."""
        return self.step == self.begin.step + len(self.step_sizes)

    def _copied(self, source: Iterator[ModelInput]) -> Iterator[ModelInput]:
        for batch in source:
            with named("feed"):
                there = batch.to(self.context.device, non_blocking=True)
            yield there

    def _overlapped(self, source: Iterator[ModelInput]) -> Iterator[ModelInput]:
        overlap = Overlap(self.model.model, self.model.optimizer, self.context.device)
        self.model.after_forward = overlap.after_forward
        try:
            yield from overlap.taken(source)
        finally:
            # Evaluation needs the model's plain forward, which TorchRec's pipeline replaces.
            overlap.detach()
            self.model.after_forward = None

    def _taken_loss(self) -> torch.Tensor:
        loss, self.model.loss = self.model.loss, None
        if loss is None:
            raise RuntimeError(
                "A batch was taken and no loss computed of it. Fix: call model(batch), or with a loss of "
                "your own model.step(loss), or set model.loss = loss.detach() where the step comes later."
            )
        return loss


def learn(part: Pass) -> np.ndarray:
    """Train on all batches of a pass; returns the losses, float32 [steps]. Collective: every rank."""
    for batch in part:
        part.model(batch).backward()
        part.model.step()
    assert part.losses is not None
    return part.losses


def start_clock(shares: Mapping[str, DynamicRows], progress: Progress, scale: float = 1.0) -> None:
    """Tell dynamic tables when the next step is; scale: the row scale. Not collective."""
    # The events' time moves on from window to window.
    time = progress.stream.begins_at if progress.stream else 0
    begin_step(shares, progress.step, time, scale)


def _means_over_ranks(losses: torch.Tensor, world_size: int) -> np.ndarray:
    """The mean over ranks of each entry. Collective: every rank."""
    # Gathered, not reduced: how a sum over three ranks is rounded would depend on where in the pass a step
    # lies, and a resumed epoch begins in the middle.
    everyones = [torch.empty_like(losses) for _ in range(world_size)]
    dist.all_gather(everyones, losses)
    return torch.stack(everyones).mean(dim=0).cpu().numpy()
