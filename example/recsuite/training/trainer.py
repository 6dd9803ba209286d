"""One loop for every task and mode: epochs with a validation after each, and a test at the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.config.sections.training import TrainingConfig
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.opening import Data
from recsuite.errors import counted, four_places
from recsuite.models.tasks.task import Task, task_named
from recsuite.runtime.collectives import all_gather_object, broadcast_from_rank0
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.progress_bar import stage
from recsuite.sharding.plan import describe_plan
from recsuite.training.callbacks import (
    Callback,
    Callbacks,
    CheckpointerProtocol,
    Epoch,
    ProgressBar,
    Run,
    Step,
)
from recsuite.training.evaluation import make_evaluator
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.state import build_train_state, has_epochs_left, stops_early
from recsuite.training.steps import train_epoch
from recsuite.training.weights import BestInMemory, check_finite, check_sound, unsound


def train(
    data: Data,
    config: Config,
    context: RuntimeContext,
    checkpointer: CheckpointerProtocol | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a model, validate it after every epoch, and test it at the end. Collective: every rank.

    Raises:
        UserError: when the tables do not fit, or the training diverges.
        WorkerError: when a data worker fails.
    """
    return Trainer(data, config, context, checkpointer, callbacks).run()


class Trainer:
    """A training: what is learned, from what, how it is measured, where it is, and who looks on.

    Collective: every rank makes one and runs it. Raises what `train` does.
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
        self.columns = data.columns
        self.task = task_named(config.model.task)
        # A training without checkpoints is tested with its best weights too.
        self.checkpointer = checkpointer or BestInMemory(config.training, context)
        self.progress = self.checkpointer.start
        self.unit = data.columns.schema.labels
        bar = ProgressBar(data.columns.num_train, self.unit, config.training.epochs, quiet=context.rank != 0)
        self.callbacks = Callbacks([*callbacks, bar])
        self.input_pipeline = InputPipeline(data.loader, self.phase)
        if self.has_epochs_left:
            # The workers make the first batches while the model is built.
            self.input_pipeline.prepare("train", self.progress.epoch, self.progress.samples)
        with self.phase("model"), stage("building the model", quiet=context.rank != 0):
            self.train_state = build_train_state(data.columns, config, context)
        self.plan = describe_plan(self.train_state.model, data.columns, config.model)
        context.say(self.plan)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.begin(self.train_state)
        # It maps its columns now: like the loader, the training continues when the files are removed.
        self.evaluator = make_evaluator(self.input_pipeline, data.columns, config.model, context)

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """A context around one of `callbacks.PHASES`."""
        return self.callbacks.phase(name, self.progress)

    @property
    def has_epochs_left(self) -> bool:
        """Whether there is something left to train."""
        return has_epochs_left(self.progress, self.config.training)

    def run(self) -> Run:
        """Train what is left, and test."""
        epochs: list[Epoch] = []
        while self.has_epochs_left:
            epochs.append(self.run_epoch())
        has_stopped = stops_early(self.progress, self.config.training)
        if has_stopped:
            self.context.say(describe_early_stop(self.progress, self.task, self.config.training))
        with self.phase(self.checkpointer.phase):
            best = self.take_best()
        # Only now: nothing may be chosen by what the test says.
        with self.phase("evaluation"):
            test = self.evaluator.test(self.train_state.model, best.epoch)
        run = Run(self.columns, self.plan, epochs, test, best.epoch, self.progress.epoch, has_stopped)
        self.callbacks.on_end(run)
        return run

    def run_epoch(self) -> Epoch:
        """The rest of a pass, its validation, and what is kept of it."""
        epoch = self._train_and_validate()
        # Before all others, for it may end the process; and after the checks, because what it writes replaces
        # checkpoints that were good.
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_epoch(epoch)
        self.callbacks.on_epoch(epoch)
        self.context.say(describe_epoch(epoch, self.task, self.unit, self.config.training))
        return epoch

    def _train_and_validate(self) -> Epoch:
        dataset, before = self.input_pipeline.loader.dataset, self.progress
        step_sizes = dataset.step_sizes("train", before.samples)
        start = time.perf_counter()
        with self.phase("steps"):
            losses = train_epoch(
                self.train_state,
                self.input_pipeline,
                before,
                self.config.training,
                self.context,
                self._after_step,
            )
        seconds = time.perf_counter() - start
        # First of all: what follows would validate, compare and keep a model that is broken.
        check_finite(losses, before.step, self.config.optimizer)
        # Of the rank that waited most: in every step all wait for it.
        data_wait = _largest(self.input_pipeline.seconds_waited / seconds, self.context)
        # Steps are of different sizes, so their losses are weighted with their events.
        train_loss = float(np.average(losses, weights=step_sizes))
        step = before.step + len(losses)
        self.progress = dataclasses.replace(before, step=step, epoch=before.epoch + 1, samples=0)
        validation = self._validate()
        self.progress = self._judged(validation)
        rate = sum(step_sizes) / seconds
        return Epoch(self.progress, losses, train_loss, validation, seconds, rate, data_wait)

    def _after_step(self, step: Step) -> None:
        self.callbacks.on_step(step)
        # After the last step of an epoch its losses are checked first, and it is validated.
        if step.progress.samples < self.columns.num_train:
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_step(step)

    def _validate(self) -> Metrics:
        """The metrics on the validation events, of weights that can be those of a trained model."""
        with self.phase("evaluation"):
            tensors = self.checkpointer.tensors
            # Also where the loss was a number: a model may be broken and still give one.
            faults = all_gather_object(lambda: unsound(tensors))
            check_sound(faults, self.progress.step, self.config.optimizer)
            return self.evaluator.validate(self.train_state.model, self.progress.epoch - 1)

    def _judged(self, validation: Metrics) -> Progress:
        """The progress at the end of an epoch, with what its validation says."""
        value, best = validation[self.task.main_metric], self.progress.best
        # One rank judges: the machines of others may round otherwise.
        if broadcast_from_rank0(lambda: self.task.is_better(value, best)):
            return dataclasses.replace(self.progress, best=value, epochs_since_best=0)
        return dataclasses.replace(self.progress, epochs_since_best=self.progress.epochs_since_best + 1)

    def take_best(self) -> Progress:
        """Put what was learned where it was best, as far as that was kept, and say which epoch it is; where
        the training was then. Collective: every rank.
        """
        progress = self.progress
        if progress.is_best:
            return progress
        best = self.checkpointer.restore_best(self.train_state)
        if best is None:
            self.context.say(
                f"the test is read with the last weights, of epoch {progress.epoch}: no better ones were kept"
            )
            return progress
        wanted = progress.epoch - progress.epochs_since_best
        lost = f" that is still there; epoch {wanted} was better, but its checkpoint is gone"
        self.context.say(
            f"the test is read with the weights of epoch {best.epoch}, the best on the validation "
            f"{self.unit}{lost if best.epoch < wanted else ''}"
        )
        return best


def describe_epoch(epoch: Epoch, task: Task, unit: str, config: TrainingConfig) -> str:
    """One line on one epoch; unit: the noun for events."""
    validation = ", ".join(
        f"{task.metrics[name]} {four_places(epoch.validation[name])}" for name in task.epoch_metrics
    )
    return (
        f"epoch {epoch.number}/{config.epochs}: train {task.describe_loss(epoch.train_loss)}, "
        f"validation {validation}, {epoch.seconds:.1f} s, {epoch.events_per_second:,.0f} {unit}/s, "
        f"data wait {epoch.data_wait:.1%}"
    )


def describe_early_stop(progress: Progress, task: Task, config: TrainingConfig) -> str:
    """One line on a training that ended before its last epoch."""
    assert progress.best is not None
    return (
        f"stopped early, after epoch {progress.epoch}: "
        f"{counted(progress.epochs_since_best, 'epoch')} without a better "
        f"validation {task.main_label} than {progress.best:.4f} (--patience {config.patience})"
    )


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
