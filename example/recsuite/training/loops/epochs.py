"""Passes over a fixed set of training events: a validation after each, and a test at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.sections import TrainingConfig
from recsuite.datasets.metrics import Metrics
from recsuite.errors import counted, four_places
from recsuite.models.co_occurrence import standard_error
from recsuite.models.tasks import Task
from recsuite.runtime.process import broadcast_from_rank0
from recsuite.training.callbacks import Callback, Epoch, ProgressBar, Run
from recsuite.training.evaluation import make_evaluator
from recsuite.training.loops.loop import Training, TrainingPass
from recsuite.training.loops.spreads import WARM_UP, describe_spreads, learn_spreads
from recsuite.training.optimizer import Falling
from recsuite.training.state import has_epochs_left, stops_early


class EpochLoop(Training):
    """A training in epochs. See `Training`."""

    def make_bar(self) -> Callback:
        """See `Training`."""
        num_train, epochs = self.columns.num_train, self.config.training.epochs
        return ProgressBar(num_train, self.unit, epochs, quiet=self.context.rank != 0)

    def prepare(self) -> None:
        """See `Training`."""
        if self.has_epochs_left:
            self.input_pipeline.prepare("train", self.progress.epoch, self.progress.samples)

    @property
    def has_epochs_left(self) -> bool:
        """Whether there is something left to train."""
        return has_epochs_left(self.progress, self.config.training)

    def passes(self) -> Iterator[TrainingPass]:
        """See `Training`."""
        # It maps its columns now: like the loader, the training continues when the files are removed.
        self.evaluator = make_evaluator(self.input_pipeline, self.columns, self.config.model, self.context)
        self.epochs: list[Epoch] = []
        while self.has_epochs_left:
            self.train_state.expect_noise(self.task.noise_of(self.progress.best, self.columns.schema.unit))
            num_train = self.columns.num_train
            part = TrainingPass(self, Falling(num_train, self.config.training.epochs), num_train)
            yield part
            if part.validation is None:
                part.end(self.validate())
        if self.epochs and self.train_state.prior is not None:
            self.context.say(describe_spreads(self.train_state.head))

    def validate(self) -> Metrics:
        """See `Training`."""
        self.check_whole()
        with self.phase("evaluation"):
            # Also where the loss was a number: a model may be broken and still give one.
            self.check_weights()
            return self.evaluator.validate(self.train_state.model, self.progress.epoch - 1)

    def ended(self, part: TrainingPass) -> None:
        """See `Training`."""
        assert part.losses is not None
        assert part.validation is not None
        self.progress = self._judged(part.validation)
        self._learn_spreads()
        # Steps are of different sizes, so their losses are weighted with their events.
        train_loss = float(np.average(part.losses, weights=part.step_sizes))
        rate, wait = sum(part.step_sizes) / part.seconds, part.wait
        epoch = Epoch(self.progress, part.losses, train_loss, part.validation, part.seconds, rate, wait)
        # Before all others, for it may end the process; and after the checks, because what it writes replaces
        # checkpoints that were good.
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_epoch(epoch)
        self.callbacks.on_epoch(epoch)
        self.context.say(describe_epoch(epoch, self.task, self.unit, self.config.training))
        self.say_dynamic_tables()
        self.epochs.append(epoch)

    def finish(self) -> Run:
        """See `Training`."""
        has_stopped = stops_early(self.progress, self.config.training)
        if has_stopped:
            self.context.say(describe_early_stop(self.progress, self.task, self.config.training))
        with self.phase(self.checkpointer.phase):
            best = self.take_best()
        # Only now: nothing may be chosen by what the test says.
        with self.phase("evaluation"):
            test = self.evaluator.test(self.train_state.model, best.epoch)
        number = self.progress.epoch
        run = Run(self.columns, self.plan, self.epochs, test, best.epoch, number, has_stopped)
        self.callbacks.on_end(run)
        return run

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
        f"{label} {four_places(epoch.validation[name])}"
        for name, label in task.labels_for(epoch.validation).items()
        if name in task.epoch_metrics or name not in task.metrics
    )
    return (
        f"epoch {epoch.number}/{config.epochs}: train loss {epoch.train_loss:.4f}, "
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
