"""What every loop of a training has: what is learned, from what, how it is measured, where it is, who looks
on.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.datasets.opening import Data
from recsuite.models.tasks.task import task_named
from recsuite.runtime.collectives import all_gather_object
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.progress_bar import stage
from recsuite.sharding.dynamic.sharded.collective import counts_of, describe_counts, dynamic_rows
from recsuite.sharding.plan import describe_plan
from recsuite.training.callbacks import Callback, Callbacks, CheckpointerProtocol, Run, Step
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.state import build_train_state
from recsuite.training.steps import start_clock
from recsuite.training.weights import BestInMemory, check_finite, check_sound, unsound


class Loop(ABC):
    """A training from where its checkpointer begins. Collective: every rank makes one and runs it.

    Raises what `trainer.train` does.
    """

    def __init__(
        self,
        data: Data,
        config: Config,
        context: RuntimeContext,
        checkpointer: CheckpointerProtocol | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = config
        self.context = context
        self.data = data
        self.columns = data.columns
        self.task = task_named(config.model.task)
        # A training without checkpoints is tested with its best weights too.
        self.checkpointer = checkpointer or BestInMemory(config.training, context)
        self.progress = self.checkpointer.start
        self.unit = data.columns.schema.labels
        self.callbacks = Callbacks([*callbacks, self.make_bar()])
        self.input_pipeline = InputPipeline(data.loader, self.phase)
        self.prepare()
        with self.phase("model"), stage("building the model", quiet=context.rank != 0):
            self.train_state = build_train_state(data.columns, config, context)
        self.plan = describe_plan(self.train_state.model, data.columns, config.model)
        for line in self.plan.splitlines():
            context.say(line)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.begin(self.train_state)
        # A row may have expired since it was written: evaluation, which is no step, has to know the time too.
        start_clock(dynamic_rows(self.train_state.model), self.progress)

    @abstractmethod
    def make_bar(self) -> Callback:
        """What shows how far the steps are."""

    @abstractmethod
    def prepare(self) -> None:
        """Have the workers make the first batches, while the model is built."""

    @abstractmethod
    def run(self) -> Run:
        """Train what is left, and measure it."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """A context around one of `callbacks.PHASES`."""
        return self.callbacks.phase(name, self.progress)

    def timed(self, train: Callable[[], np.ndarray]) -> tuple[np.ndarray, float, float]:
        """The losses of some steps that were just made, float32 [steps], found to be numbers; the seconds
        that they took, and the share of them that was spent waiting for batches.
        """
        start = time.perf_counter()
        with self.phase("steps"):
            losses = train()
        seconds = time.perf_counter() - start
        # First of all: what follows would validate, compare and keep a model that is broken.
        check_finite(losses, self.progress.step, self.config.optimizer)
        # Of the rank that waited most: in every step all wait for it.
        return losses, seconds, _largest(self.input_pipeline.seconds_waited / seconds, self.context)

    def check_weights(self, rows: Mapping[str, torch.Tensor] | None = None) -> None:
        """Refuse weights that cannot be those of a trained model; rows: see `unsound`. Collective."""
        tensors, shares = self.checkpointer.tensors, dynamic_rows(self.train_state.model)
        faults = all_gather_object(lambda: unsound(tensors, shares, rows))
        check_sound(faults, self.progress.step, self.config.optimizer)

    def say_dynamic_tables(self) -> None:
        """Say how full dynamic tables are, and what became of ids. Collective: every rank."""
        sentence = describe_counts(counts_of(dynamic_rows(self.train_state.model)))
        if sentence:
            self.context.say(sentence)

    def after_step(self, step: Step, num_events: int) -> None:
        """Tell who looks on of a step, and the checkpointer too unless it was the last of `num_events`."""
        self.callbacks.on_step(step)
        # After the last step of an epoch its losses are checked first, and it is validated.
        if step.progress.samples < num_events:
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_step(step)


def after(progress: Progress, num_steps: int) -> dict[str, Any]:
    """What changes of a progress when its epoch ended after so many more steps."""
    return {"step": progress.step + num_steps, "epoch": progress.epoch + 1, "samples": 0}


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
