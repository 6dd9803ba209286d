"""Training from the beginning, or from a checkpoint, to the end: in epochs, or along a stream.

In epochs there is a validation after each, and a test at the end. In a stream each window is first predicted,
then learned once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from typing_extensions import Self

from recsuite.config.config import Config
from recsuite.config.sections import CheckpointConfig, TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.opening import LOOK_EVERY, Data, Following, find_same, load
from recsuite.datasets.preparation.cache import VOCABULARY, owner_of, remove_owned
from recsuite.datasets.schema import ENTITIES, UNKNOWN_ROW
from recsuite.datasets.streams import Past, Prefix, Rule, Window, check_prefix, next_window, num_empty
from recsuite.errors import UserError, counted, four_places
from recsuite.models.co_occurrence import GROUPS, CoOccurrence, learned_spreads, standard_error
from recsuite.models.tasks import TASKS, ModelMaker, Task
from recsuite.runtime.console import stage
from recsuite.runtime.process import (
    RuntimeContext,
    all_gather_object,
    broadcast_from_rank0,
    launch_name,
    raise_on_all,
)
from recsuite.sharding.dynamic_ranks import counts_of, describe_counts, dynamic_rows
from recsuite.sharding.plan import describe_plan
from recsuite.sharding.recommender import Metric, ModelInput, Recommender
from recsuite.sharding.table_rules import TableRule
from recsuite.training.callbacks import (
    Callback,
    Callbacks,
    CheckpointerProtocol,
    Epoch,
    ProgressBar,
    Run,
    Step,
    TrainedWindow,
    WindowBar,
)
from recsuite.training.evaluation import Evaluator, PredictionEvaluator, make_evaluator
from recsuite.training.progress import Progress, StreamProgress, describe_step
from recsuite.training.state import (
    Constant,
    DenseOptimizer,
    Falling,
    Schedule,
    ShardedModel,
    build_train_state,
    has_epochs_left,
    stops_early,
)
from recsuite.training.steps import InputPipeline, Pass, learn, start_clock
from recsuite.training.weights import BestInMemory, check_finite, check_sound, fold_scale, unsound

# Minimum seconds between two lines about windows.
AT_LEAST = 2.0


class WindowLines:
    """Log lines about windows, several windows in one line."""

    def __init__(self, task: Task, unit: str, context: RuntimeContext) -> None:
        """Start without windows. unit: the noun for events."""
        self.task, self.unit, self.context = task, unit, context
        self._windows: list[TrainedWindow] = []
        self._said_at = time.monotonic()

    def add(self, window: TrainedWindow) -> None:
        """Add a window, and print a line if it is time."""
        self._windows.append(window)
        if time.monotonic() - self._said_at >= AT_LEAST:
            self.say()

    def say(self) -> None:
        """Print a line about the windows since the last line."""
        if self._windows:
            self.context.say(describe_windows(self._windows, self.task, self.unit))
        self._windows, self._said_at = [], time.monotonic()


def describe_windows(windows: list[TrainedWindow], task: Task, unit: str) -> str:
    """Describe consecutive windows in one line; unit: the noun for events."""
    first, last = windows[0], windows[-1]
    numbers = f"window {last.number}" if len(windows) == 1 else f"windows {first.number} to {last.number}"
    number, seconds = sum(window.num_events for window in windows), sum(window.seconds for window in windows)
    name = task.main_metric
    shown = [("", last.validation[name])] if len(windows) == 1 else []
    shown.append((" of all windows", last.overall[name]))
    errors = ", ".join(f"{task.main_label}{of} {four_places(value)}" for of, value in shown)
    return (
        f"{numbers} ({day(first.first_time)} to {day(last.last_time)}): {counted(number, unit[:-1], unit)}, "
        f"predicted with {errors}, {number / max(seconds, 1e-9):,.0f} {unit}/s trained"
    )


def day(seconds: int) -> str:
    """Format a time in seconds since 1970, to the minute."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


# The share of the epochs after which spreads are learned. Before that, rows are small because they have
# learned little, and not because of the prior.
WARM_UP = 0.2


def learn_spreads(model: DistributedModelParallel, input_pipeline: InputPipeline, epoch: int) -> None:
    """Update the spreads of a model with a prior by the validation events. Collective: every rank.

    epoch: for messages of failures of the batches.
    """
    recommender: Recommender = model.module.recommender
    head: CoOccurrence = recommender.head
    assert head.prior is not None
    products, errors = _evidence(model, input_pipeline, epoch)
    spreads = head.spreads.double().cpu()
    noise = head.prior.noise
    # Only one rank solves: other machines may round differently.
    learned = broadcast_from_rank0(lambda: learned_spreads(spreads, products, errors, noise).tolist())
    head.spreads.copy_(torch.tensor(learned))


@torch.no_grad()
def _evidence(
    model: DistributedModelParallel, input_pipeline: InputPipeline, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return products and errors for `learned_spreads`, summed over the events of all ranks."""
    # In this mode the tracker of a delta marks no row as changed.
    model.eval()
    recommender: Recommender = model.module.recommender
    head: CoOccurrence = recommender.head
    device = head.spreads.device
    # One tensor for one exchange: the errors are the last column.
    sums = torch.zeros(len(GROUPS), len(GROUPS) + 1, dtype=torch.float64, device=device)
    for batch in input_pipeline.batches("validation", epoch):
        batch = batch.to(device, non_blocking=True)
        predictions, directions = head.predict_with_directions(recommender.look_up(batch), batch)
        # Padding has the weight 0.
        is_real = (batch.weights > 0).double()
        directions = directions.double() * is_real
        missed = (batch.labels - predictions).double() * is_real
        sums += directions @ torch.cat([directions, missed.unsqueeze(0)]).T
    dist.all_reduce(sums)
    sums = sums.cpu()
    return sums[:, :-1], sums[:, -1]


def describe_spreads(head: CoOccurrence) -> str:
    """Describe the spreads in one line."""
    times = (
        f"{group} {math.exp(spread):.2f}" for group, spread in zip(GROUPS, head.spreads.tolist(), strict=True)
    )
    return (
        "learned from the validation: how many times as far from zero as the prior says rows lie: "
        f"{', '.join(times)} (docs/quality.md, Who had what)"
    )


def say_rest(
    evaluator: Evaluator,
    model: DistributedModelParallel,
    progress: Progress,
    columns: Columns,
    context: RuntimeContext,
) -> None:
    """Predict all events of a stream after those that a model has learned, and print the error. Collective:
    every rank.

    Raises:
        UserError: when what it has learned is not there as it was.
    """
    # A ranking of a stream was refused with the flags.
    assert isinstance(evaluator, PredictionEvaluator)
    stream, end = progress.stream or StreamProgress(), columns.num_train
    raise_on_all(lambda: check_prefix(columns.column("keys"), stream.end, stream.digest, columns.source))
    begin = stream.begin + progress.samples
    step, unit = describe_step(progress), columns.schema.labels
    if begin == end:
        context.say(f"{step} has learned all {end:,} {unit} of the stream, and none is left to predict")
        return
    labels = np.asarray(columns.column("rating")[begin:end])
    metrics = evaluator.window(model, progress.epoch, (begin, end), labels)
    name, label = evaluator.task.main_metric, evaluator.task.main_label
    many, error = counted(end - begin, unit[:-1], unit), four_places(metrics[name])
    context.say(f"{step}: {many} after it, none of them learned, predicted with {label} {error}")


class Training(ABC):
    """Training that begins where its checkpointer says.

        with begin_training(data, config, context, checkpointer, callbacks) as training:
            model = training.shard()
            for part in training.passes():
                for batch in part:
                    loss = model(batch)
                    loss.backward()
                    model.step()
                part.end(training.validate())
            run = training.finish()

    Collective: every rank makes one, and makes the same calls.
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
        self.task = TASKS[config.model.task]
        # Also a training without checkpoints is tested with its best weights.
        self.checkpointer = checkpointer or BestInMemory(config.training, context)
        self.progress = self.checkpointer.start
        self.unit = data.columns.schema.labels
        self.part: TrainingPass
        self.callbacks = Callbacks([*callbacks, self.make_bar()])
        self.input_pipeline = InputPipeline(data.loader, self.phase)
        self.prepare()

    def shard(
        self,
        maker: ModelMaker | None = None,
        loss: nn.Module | None = None,
        tables: TableRule | None = None,
        dense: DenseOptimizer | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> ShardedModel:
        """Build the model, shard its tables, and load the state at which the checkpointer begins. Collective.

        maker: makes the model from the columns and the flags of the model, and its attribute `embedding_dims`
        gives the tables that it names another width than --embedding_dim; loss: called with the output of the
        model and the batch, returns the mean over the batch; tables, dense: the optimizers. None stands for
        that of the task and the flags. metrics: a name to a function of predictions and labels, numpy float32
        [n], which returns a number; shown with those of the task. One with the name of the main metric
        replaces it, and chooses the best epoch.

        Raises:
            UserError: when the tables do not fit, there is no such optimizer of them, or a checkpoint is
                damaged or of another model.
        """
        with self.phase("model"), stage("building the model", quiet=self.context.rank != 0):
            self.train_state = build_train_state(
                self.columns, self.config, self.context, maker, loss, tables, dense, metrics
            )
        self.plan = describe_plan(self.train_state.model, self.columns)
        for line in self.plan.splitlines():
            self.context.say(line)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.begin(self.train_state)
        # A row may have expired since it was written: evaluation, which is no step, needs the time too.
        start_clock(dynamic_rows(self.train_state.model), self.progress)
        # A tracker of one rank may refuse, and then all ranks end with its message.
        raise_on_all(lambda: self.callbacks.on_begin(self.progress, self.checkpointer.run))
        return self.train_state

    def run(self) -> Run:
        """Train with the model of the task. Collective: every rank.

        Raises:
            UserError: when the tables do not fit, the training diverges, or data that grow cannot be read.
            WorkerError: when a data worker fails.
        """
        with self:
            self.shard()
            for part in self.passes():
                learn(part)
                part.end(self.validate())
            return self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the background work of the training; harmless twice. Not collective."""
        return

    @abstractmethod
    def passes(self) -> Iterator[TrainingPass]:
        """Yield the remaining passes: epochs, or windows of a stream.

        Ends the previous pass if it was not ended.
        """

    @abstractmethod
    def validate(self) -> Metrics:
        """Return the metrics of the trained pass.

        They are on the validation events, or of a window's predictions, which were made before it was
        learned.
        """

    @abstractmethod
    def finish(self) -> Run:
        """Test the best weights, and call the callbacks at the end."""

    @abstractmethod
    def make_bar(self) -> Callback:
        """Return the progress bar of the steps."""

    @abstractmethod
    def prepare(self) -> None:
        """Start the workers on the first batches, while the model is built."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context around one of `callbacks.PHASES`."""
        return self.callbacks.phase(name, self.progress)

    def check_whole(self) -> None:
        """Refuse a pass that was not completely trained."""
        if self.part.losses is None:
            raise RuntimeError(
                "The loop over the batches ended early. Fix: take every batch of a pass; for a shorter "
                "training give --epochs."
            )
        if self.train_state.is_pending:
            raise RuntimeError(
                "The dense part has not learned from the last batches. Fix: call model.step() after "
                "loss.backward(); where gradients add up over batches, also when part.is_last."
            )

    def check_weights(self, changed: bool = False) -> None:
        """Refuse weights that no trained model has; changed: see `unsound`. Collective."""
        dense, tables = self.checkpointer.dense, self.checkpointer.tables
        faults = all_gather_object(lambda: unsound(dense, tables, changed))
        check_sound(faults, self.progress.step, self.config.optimizer)

    def say_dynamic_tables(self) -> None:
        """Print the rows and counters of dynamic tables. Collective: every rank."""
        sentence = describe_counts(counts_of(dynamic_rows(self.train_state.model)))
        if sentence:
            self.context.say(sentence)

    def trained(self, part: TrainingPass) -> None:
        """Handle a pass with all of its steps made."""
        assert part.losses is not None
        # First of all: the next steps would validate, compare and save a broken model.
        check_finite(part.losses, self.progress.step, self.config.optimizer)
        # The wait of the rank that waited most: in every step all ranks wait for it.
        part.wait = _largest(self.input_pipeline.seconds_waited / part.seconds, self.context)
        self.progress = dataclasses.replace(self.progress, **after(self.progress, len(part.losses)))

    @abstractmethod
    def ended(self, part: TrainingPass) -> None:
        """Save the results of a pass."""

    def after_step(self, step: Step, num_events: int) -> None:
        """Call the callbacks after a step, and the checkpointer too.

        After the last of `num_events` the checkpointer is not called.
        """
        self.callbacks.on_step(step)
        # After the last step of an epoch its losses are checked first, and it is validated. Checkpoints hold
        # no gradients, so none is written while gradients wait for their step.
        if step.progress.samples < num_events and not self.train_state.is_pending:
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_step(step)


class TrainingPass(Pass):
    """Pass of a training, see `Pass`.

    wait: the share of it that was spent waiting for batches; validation: its metrics, after it was ended.
    """

    def __init__(self, training: Training, schedule: Schedule, num_events: int) -> None:
        super().__init__(
            training.train_state,
            training.input_pipeline,
            training.progress,
            schedule,
            training.config.training,
            training.context,
            lambda step: training.after_step(step, num_events),
        )
        training.part, self.training, self.wait = self, training, 0.0
        self.validation: Metrics | None = None

    def __iter__(self) -> Iterator[ModelInput]:
        """See `Pass`."""
        with self.training.phase("steps"):
            yield from super().__iter__()
        self.training.trained(self)

    def end(self, validation: Metrics) -> None:
        """Save the results, and call the callbacks. Collective; it may end the process.

        validation: the metrics of the pass, by which the best one is chosen.
        """
        self.training.check_whole()
        self.validation = validation
        self.training.ended(self)


def after(progress: Progress, num_steps: int) -> dict[str, Any]:
    """Return the changes of a progress when its epoch ends after so many more steps."""
    return {"step": progress.step + num_steps, "epoch": progress.epoch + 1, "samples": 0}


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


class EpochLoop(Training):
    """Training in epochs. See `Training`."""

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
        """True if there are epochs left to train."""
        return has_epochs_left(self.progress, self.config.training)

    def passes(self) -> Iterator[TrainingPass]:
        """See `Training`."""
        # It maps its columns now: like the loader, it does not need the files later.
        self.evaluator = make_evaluator(self.input_pipeline, self.columns, self.config.model, self.context)
        self.epochs: list[Epoch] = []
        while self.has_epochs_left:
            # The strength of the prior depends on the error that the model has so far.
            noise = self.task.noise_of(self.progress.best, self.columns.schema.unit)
            if self.train_state.prior is not None and noise is not None:
                self.train_state.prior.noise = noise
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
            # Also after a finite loss: a model may be broken and still give one.
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
        # Before the callbacks, for it may end the process; and after the checks, because it replaces good
        # checkpoints.
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
        # Only now: no choice may depend on the test.
        with self.phase("evaluation"):
            test = self.evaluator.test(self.train_state.model, best.epoch)
        number = self.progress.epoch
        run = Run(self.columns, self.plan, self.epochs, test, best.epoch, number, has_stopped)
        self.callbacks.on_end(run)
        return run

    def _learn_spreads(self) -> None:
        """Learn the spreads of rows with a prior from the validation events."""
        # After the last epoch too: a checkpoint of it may be resumed for more.
        is_warm = self.progress.epoch >= WARM_UP * self.config.training.epochs
        if self.train_state.prior is not None and is_warm and self.columns.num_validation:
            with self.phase("evaluation"):
                learn_spreads(self.train_state.model, self.input_pipeline, self.progress.epoch - 1)

    def _judged(self, validation: Metrics) -> Progress:
        """Return the progress at the end of an epoch, with the result of its validation."""
        value, best, leeway = validation[self.task.main_metric], self.progress.best, 0.0
        # Rows with a prior learn more with each pass, and a few validation events may show otherwise by
        # chance.
        if self.train_state.prior is not None and best is not None:
            leeway = standard_error(best, self.columns.num_validation)
        # Only one rank decides: other machines may round differently.
        found: Progress = broadcast_from_rank0(lambda: judged(self.progress, value, self.task, leeway))
        return found

    def take_best(self) -> Progress:
        """Restore the best weights, if they were saved, and print their epoch; return their progress.
        Collective: every rank.
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
    """Return the progress at the end of an epoch with a value of the main metric.

    The epoch counts as the best unless an earlier one was better by the leeway.
    """
    if not task.is_better(value, progress.best, leeway):
        return dataclasses.replace(progress, epochs_since_best=progress.epochs_since_best + 1)
    # The best value itself, because it could get worse step by step otherwise.
    best = value if task.is_better(value, progress.best) else progress.best
    return dataclasses.replace(progress, best=best, epochs_since_best=0)


def describe_epoch(epoch: Epoch, task: Task, unit: str, config: TrainingConfig) -> str:
    """Describe an epoch in one line; unit: the noun for events."""
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
    """Describe in one line why a training ended before its last epoch."""
    assert progress.best is not None
    return (
        f"stopped early, after epoch {progress.epoch}: "
        f"{counted(progress.epochs_since_best, 'epoch')} without a better "
        f"validation {task.main_label} than {progress.best:.4f} (--patience {config.patience})"
    )


class StreamLoop(Training):
    """Training along a stream. See `Training`."""

    def make_bar(self) -> Callback:
        """See `Training`."""
        return WindowBar(self.unit, quiet=self.context.rank != 0)

    def prepare(self) -> None:
        """See `Training`: here the position in the stream is found."""
        self.span = self.config.stream.span
        self.following = self.data.following
        self.lines = WindowLines(self.task, self.unit, self.context)
        self.loader = contextlib.ExitStack()
        self.owner = owner_of(broadcast_from_rank0(lambda: owner_name(self.config.checkpoint)))
        # Columns of a training that was killed.
        self._drop_columns()
        self._take_up(self.columns)
        before = self.progress.stream or StreamProgress()
        self.prefix = Prefix(self.columns.column("keys"), before.end)
        past = self.data.past
        self._remember(before, past.rules(self.columns.events_per_file) if self.columns.num_late else ())
        if before.is_under_way:
            window = before.begin, before.end
            self.input_pipeline.prepare("train", self.progress.epoch, self.progress.samples, window)

    def _take_up(self, columns: Columns) -> None:
        self.columns = columns
        self.times, self.labels = columns.column("time"), columns.column("rating")

    def _remember(self, stream: StreamProgress, late: tuple[Rule, ...]) -> None:
        """Save the data that identify later events, and the rules for events that came too late."""
        stream = dataclasses.replace(stream, events_per_file=self.columns.events_per_file, late=late)
        self.progress = dataclasses.replace(self.progress, stream=stream)

    @property
    def stream(self) -> StreamProgress:
        """Position in the stream."""
        assert self.progress.stream is not None
        return self.progress.stream

    def passes(self) -> Iterator[TrainingPass]:
        """See `Training`."""
        self.evaluator = PredictionEvaluator(self.task, self.input_pipeline, self.columns, self.context)
        self.windows: list[TrainedWindow] = []
        while (window := self._next(self.lines)) is not None:
            part = self._begin(window)
            yield part
            if part.validation is None:
                part.end(self.validate())
        self.close()
        self.say_dynamic_tables()

    def validate(self) -> Metrics:
        """See `Training`."""
        self.check_whole()
        return {**self.task.no_metrics(), **self.stream.predicted}

    def finish(self) -> Run:
        """See `Training`."""
        overall = {**self.task.no_metrics(), **self.stream.overall()}
        empty = num_empty(self.times, self.stream.end, self.span)
        number = self.progress.epoch
        run = Run(self.columns, self.plan, self.windows, overall, number, number, False, True, empty)
        self.callbacks.on_end(run)
        return run

    def close(self) -> None:
        """See `Training`."""
        self.lines.say()
        self.loader.close()
        # Checkpoints that are still being written copy the vocabulary of the last columns.
        if not self.config.checkpoint.writes and self.context.local_rank == 0:
            remove_owned(Path(self.columns.folder).parent, self.owner)

    def _next(self, lines: WindowLines) -> Window | None:
        """Return the current window, or the next one; None at the end of data that are not followed."""
        stream, is_waiting = self.stream, False
        if stream.is_under_way:
            return Window(stream.begin, stream.end)
        while True:
            is_open = self.following is not None
            window = next_window(self.times, self.stream.end, self.span, is_open)
            if window is not None or self.following is None:
                return window
            if not is_waiting:
                lines.say()
                # The stream may never end, and other trainings print it at the end.
                self.say_dynamic_tables()
                self.context.say(self._describe_wait())
                is_waiting = True
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_wait(self.progress)
            if self.following.has_grown():
                self._grow(self.following)
            else:
                time.sleep(LOOK_EVERY)

    def _describe_wait(self) -> str:
        said = f"waiting for more {self.unit} in {self.columns.source}"
        number = len(self.times) - self.stream.end
        if number == 0:
            return said
        some = counted(number, self.unit[:-1], self.unit)
        return f"{said}; {some} will be learned when the window of the first is over"

    def _begin(self, window: Window) -> TrainingPass:
        """Predict a window, unless that was done before; return the pass over the rest of it."""
        if not self.stream.is_under_way:
            with self.phase("evaluation"):
                self._predict(window)
        if fold_scale(self.train_state):
            # It may wait for a checkpoint that is still being written.
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_fold()
        self.window = window
        return TrainingPass(self, Constant(), len(window))

    def ended(self, part: TrainingPass) -> None:
        """See `Training`."""
        assert part.losses is not None
        assert part.validation is not None
        window = self.window
        # Before they are in a checkpoint.
        self.check_weights(self.checkpointer.saves_changes)
        self.progress = dataclasses.replace(self.progress, stream=self.stream.done())
        done = TrainedWindow(
            self.progress,
            part.losses,
            float(np.average(part.losses, weights=part.step_sizes)),
            part.validation,
            part.seconds,
            sum(part.step_sizes) / part.seconds,
            part.wait,
            len(window),
            int(self.times[window.begin]),
            int(self.times[window.end - 1]),
            {**self.task.no_metrics(), **self.stream.overall()},
        )
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_epoch(done)
        self.callbacks.on_epoch(done)
        self.lines.add(done)
        # An endless stream must not keep all losses.
        self.windows.append(dataclasses.replace(done, losses=done.losses[:0]))

    def _predict(self, window: Window) -> None:
        """Predict a window of which no event was learned, and begin it."""
        model, number = self.train_state.model, self.progress.epoch
        labels = np.asarray(self.labels[window.begin : window.end])
        predicted = self.evaluator.window(model, number, window, labels)
        stream = dataclasses.replace(
            self.stream.with_window(predicted, len(window)),
            begin=window.begin,
            end=window.end,
            begins_at=int(self.times[window.begin]),
            time=int(self.times[window.end - 1]),
            digest=self.prefix.extend(window.end),
        )
        self.progress = dataclasses.replace(self.progress, stream=stream)

    def _grow(self, following: Following) -> None:
        """Switch to columns of the files as they are now, if they can be read. Collective.

        Raises:
            UserError: when what was learned from is not there as it was.
        """
        stream, before = self.stream, self.columns
        vocabulary = Path(before.folder, VOCABULARY).read_text()
        past = Past(vocabulary, stream.late, stream.events_per_file, stream.learned, self.owner)
        try:
            # --rebuild was done when the data were first read.
            columns = find_same(self.config.replaced(rebuild=False), self.context, past)
        except UserError as error:
            # Possibly half of a file has come, or an event before its item: the next change brings the rest.
            following.say_once(f"{error} The stream waits until the files change again.")
            return
        keys = columns.column("keys")
        raise_on_all(lambda: check_prefix(keys, stream.end, stream.digest, columns.source))
        self.prefix.keys = keys
        self._take_up(columns)
        # A rule that excluded no event need not be saved: later events are under a later rule.
        found_late = columns.num_late > before.num_late
        self._remember(stream, past.rules(columns.events_per_file) if found_late else stream.late)
        self.input_pipeline.loader.close()
        # An endless stream must not keep all earlier loaders.
        self.loader.close()
        loader = self.loader.enter_context(load(columns, self.config, self.context, self.data.build))
        self.input_pipeline = InputPipeline(loader, self.phase)
        self.evaluator = PredictionEvaluator(self.task, self.input_pipeline, columns, self.context)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_growth(columns)
        self.context.say(describe_growth(before, columns))
        self._drop_columns()

    def _drop_columns(self) -> None:
        """Remove columns that this training made and that no rank reads any more. Collective."""
        raise_on_all(lambda: None)
        if self.context.local_rank == 0:
            used = Path(self.columns.folder)
            remove_owned(used.parent, self.owner, used)


def owner_name(config: CheckpointConfig) -> str:
    """Return the name of the owner of the columns that a training makes.

    This is the folder of its checkpoints, or else this launch. Two trainings on the same data must not remove
    each other's columns.
    """
    return str(Path(config.save_dir).absolute()) if config.writes else launch_name()


def describe_growth(before: Columns, columns: Columns) -> str:
    """Describe the growth of files in one line.

    It has the number of new events, and how many of these have an unknown user or item.
    """
    schema, new = columns.schema, columns.num_train - before.num_train
    events = columns.column("rows")[before.num_train :]
    unknown = []
    for entity in ENTITIES:
        own = columns.column(f"{schema.name_of(entity)}_features")["features"][:, columns.place_of(entity)]
        number = int(np.count_nonzero(own[events[entity]] == UNKNOWN_ROW))
        if number:
            unknown.append(f"{number:,} of {schema.name_of(entity)}s that no table row is of")
    said = f"{columns.source} has {counted(new, f'new {schema.label}')}"
    late = columns.num_late - before.num_late
    if late:
        were = counted(late, "other", "others")
        said += f", and {were} older than what was trained, left out"
    held = [note for note in columns.notes if " held back until " in note and note not in before.notes]
    said = "; ".join([said, *held])
    return said + (f" ({', '.join(unknown)})" if unknown else "")


def begin_training(
    data: Data,
    config: Config,
    context: RuntimeContext,
    checkpointer: CheckpointerProtocol | None = None,
    callbacks: Sequence[Callback] = (),
) -> Training:
    """Return a training and start its workers. Collective: every rank.

    In epochs it is validated after each and tested at the end. Along a stream each window is predicted before
    it is learned.

    data: see `open_data`; config, context: flags and process; checkpointer: see `checkpointing`, None keeps
    the best weights in memory; callbacks: observe the training.

        with rs.begin_training(data, args, runtime, checkpoints) as training:
            model = training.shard(make_model)
            for part in training.passes():
                for batch in part:
                    model(batch).backward()
                    model.step()
                part.end(training.validate())
            result = training.finish()
    """
    kind = StreamLoop if config.stream.stream else EpochLoop
    return kind(data, config, context, checkpointer, callbacks)


def train(
    data: Data,
    config: Config,
    context: RuntimeContext,
    checkpointer: CheckpointerProtocol | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train the model of the task, see `Training.run`. Collective: every rank."""
    return begin_training(data, config, context, checkpointer, callbacks).run()
