"""The steps of an epoch: plain, or overlapped by TorchRec's pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.sections.training import TrainingConfig
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.ranges import STEP, named
from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.dynamic.sharded.collective import begin_step, dynamic_modules, dynamic_rows, grow
from recsuite.sharding.recommender import ModelInput, Output
from recsuite.training.callbacks import Step
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.optimizer import Falling, RowScale, Schedule, scheduled_rates, set_rates
from recsuite.training.state import TrainState


class PlainSteps:
    """A training step as it reads in a textbook, with the interface of TorchRec's pipelines."""

    def __init__(
        self, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device

    def progress(self, batches: Iterator[ModelInput]) -> Output:
        """Train on the next batch."""
        with named("feed"):
            batch = next(batches).to(self.device, non_blocking=True)
        with named("optimizer"):
            self.optimizer.zero_grad()
        with named("dense"):
            loss, output = self.model(batch)
        with named("backward"):
            # The tables learn in here, each row as soon as its gradient is known; no gradient of a table is
            # kept.
            loss.backward()
        with named("optimizer"):
            self.optimizer.step()
        return output

    def detach(self) -> DistributedModelParallel:
        """The model as it is outside the pipeline."""
        return self.model


def make_pipeline(
    train_state: TrainState, config: TrainingConfig, context: RuntimeContext
) -> PlainSteps | TrainPipelineSparseDist:
    """What makes the steps. TorchRec's pipeline overlaps the copy and the exchange of ids of the next batches
    with this one's computation; on a CPU there is nothing free to overlap with.
    """
    overlaps = (
        context.device.type == "cuda" if config.pipeline == "auto" else config.pipeline == "sparse_dist"
    )
    kind = TrainPipelineSparseDist if overlaps else PlainSteps
    return kind(train_state.model, train_state.optimizer, context.device)


def train_epoch(
    train_state: TrainState,
    input_pipeline: InputPipeline,
    progress: Progress,
    config: TrainingConfig,
    context: RuntimeContext,
    on_step: Callable[[Step], None] = lambda step: None,
) -> np.ndarray:
    """The rest of a pass over the training events; otherwise as `train_pass`. Collective: every rank."""
    schedule = Falling(len(input_pipeline.loader.dataset.ranges["train"]), config.epochs)
    return train_pass(train_state, input_pipeline, progress, schedule, config, context, on_step)


def train_pass(
    train_state: TrainState,
    input_pipeline: InputPipeline,
    progress: Progress,
    schedule: Schedule,
    config: TrainingConfig,
    context: RuntimeContext,
    on_step: Callable[[Step], None],
) -> np.ndarray:
    """The rest of a pass over the training events, or of the window of a stream that is under way; returns
    the loss of each global batch, float32 [steps].

    Nothing waits for the device but the end: losses stay there until then. Collective: every rank.
    """
    train_state.model.train()
    pipeline = make_pipeline(train_state, config, context)
    dataset = input_pipeline.loader.dataset
    window = (progress.stream.begin, progress.stream.end) if progress.stream else None
    step_sizes = dataset.step_sizes("train", progress.samples, window)
    # Reads the scale from the device, for a checkpoint may have set it: once in a pass, as reading waits.
    scale = RowScale(train_state.row_scale, train_state.weight_decay)
    # Found once: to look through all modules takes time in every step, also where no table is dynamic.
    shares, modules = dynamic_rows(train_state.model), dynamic_modules(train_state.model)
    losses = torch.zeros(len(step_sizes), device=context.device)
    batches = input_pipeline.batches("train", progress.epoch, progress.samples, window)
    for number, size in enumerate(step_sizes):
        left = schedule.left(progress)
        # Before the step: TorchRec gives the tables' rate to their kernel in `zero_grad`, and the kernel
        # learns in the backward.
        set_rates(train_state.optimizer, left, scale.value)
        start_clock(shares, progress, scale.value)
        with named(STEP):
            losses[number] = pipeline.progress(batches).loss
            for module in modules:
                module.end_step()
        # In shares of a pass, so that a pass decays alike however many steps it has.
        scale.decay(left, size / schedule.num_events)
        progress = dataclasses.replace(progress, step=progress.step + 1, samples=progress.samples + size)
        for sentence in grow(train_state.model, progress.step):
            context.say(sentence)
        on_step(Step(progress, losses[number], scheduled_rates(train_state.optimizer)))
    # Evaluation needs the model's plain forward, which TorchRec's pipeline replaces.
    pipeline.detach()
    return _means_over_ranks(losses, context.world_size)


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
