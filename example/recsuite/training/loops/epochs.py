"""Passes over a fixed set of training events: a validation after each, and a test at the end."""

from __future__ import annotations

import dataclasses

import numpy as np

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.sections.training import TrainingConfig
from recsuite.datasets.metrics import Metrics
from recsuite.errors import counted, four_places
from recsuite.models.prior import standard_error
from recsuite.models.tasks.task import Task
from recsuite.runtime.collectives import broadcast_from_rank0
from recsuite.training.callbacks import Callback, Epoch, ProgressBar, Run
from recsuite.training.evaluation import make_evaluator
from recsuite.training.loops.loop import Loop, after
from recsuite.training.loops.spreads import WARM_UP, describe_spreads, learn_spreads
from recsuite.training.state import has_epochs_left, stops_early
from recsuite.training.steps import train_epoch


class EpochLoop(Loop):
    """A training in epochs. See `Loop`."""

    def make_bar(self) -> Callback:
        """See `Loop`."""
        num_train, epochs = self.columns.num_train, self.config.training.epochs
        return ProgressBar(num_train, self.unit, epochs, quiet=self.context.rank != 0)

    def prepare(self) -> None:
        """See `Loop`."""
        if self.has_epochs_left:
            self.input_pipeline.prepare("train", self.progress.epoch, self.progress.samples)

    @property
    def has_epochs_left(self) -> bool:
        """Whether there is something left to train."""
        return has_epochs_left(self.progress, self.config.training)

    def run(self) -> Run:
        """Train what is left, and test."""
        # It maps its columns now: like the loader, the training continues when the files are removed.
        self.evaluator = make_evaluator(self.input_pipeline, self.columns, self.config.model, self.context)
        epochs: list[Epoch] = []
        while self.has_epochs_left:
            epochs.append(self.run_epoch())
        if epochs and self.train_state.prior is not None:
            self.context.say(describe_spreads(self.train_state.head))
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
        self.say_dynamic_tables()
        return epoch

    def _train_and_validate(self) -> Epoch:
        dataset, before = self.input_pipeline.loader.dataset, self.progress
        self.train_state.expect_noise(self.task.noise_of(before.best, self.columns.schema.unit))
        step_sizes = dataset.step_sizes("train", before.samples)
        losses, seconds, data_wait = self.timed(
            lambda: train_epoch(
                self.train_state,
                self.input_pipeline,
                before,
                self.config.training,
                self.context,
                lambda step: self.after_step(step, self.columns.num_train),
            )
        )
        # Steps are of different sizes, so their losses are weighted with their events.
        train_loss = float(np.average(losses, weights=step_sizes))
        self.progress = dataclasses.replace(before, **after(before, len(losses)))
        validation = self._validate()
        self.progress = self._judged(validation)
        self._learn_spreads()
        rate = sum(step_sizes) / seconds
        return Epoch(self.progress, losses, train_loss, validation, seconds, rate, data_wait)

    def _validate(self) -> Metrics:
        """The metrics on the validation events, of weights that can be those of a trained model."""
        with self.phase("evaluation"):
            # Also where the loss was a number: a model may be broken and still give one.
            self.check_weights()
            return self.evaluator.validate(self.train_state.model, self.progress.epoch - 1)

    def _learn_spreads(self) -> None:
        """Learn from the validation events how far from zero held rows lie."""
        # After the last epoch too: a checkpoint of it may be resumed for more.
        is_warm = self.progress.epoch >= WARM_UP * self.config.training.epochs
        if self.train_state.prior is not None and is_warm and self.columns.num_validation:
            with self.phase("evaluation"):
                learn_spreads(self.train_state.model, self.input_pipeline, self.progress.epoch - 1)

    def _judged(self, validation: Metrics) -> Progress:
        """The progress at the end of an epoch, with what its validation says."""
        value, best, leeway = validation[self.task.main_metric], self.progress.best, 0.0
        # Rows that a prior holds learn more with each pass, and a few validation events may say otherwise by
        # chance.
        if self.train_state.prior is not None and best is not None:
            leeway = standard_error(best, self.columns.num_validation)
        # One rank judges: the machines of others may round otherwise.
        found: Progress = broadcast_from_rank0(lambda: judged(self.progress, value, self.task, leeway))
        return found

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


def judged(progress: Progress, value: float, task: Task, leeway: float) -> Progress:
    """The progress at the end of an epoch, with what a value of the main metric says: the epoch counts as the
    best unless an earlier one was better by the leeway.
    """
    if not task.is_better(value, progress.best, leeway):
        return dataclasses.replace(progress, epochs_since_best=progress.epochs_since_best + 1)
    # By the best value itself, or it would creep away step by step.
    best = value if task.is_better(value, progress.best) else progress.best
    return dataclasses.replace(progress, best=best, epochs_since_best=0)


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
