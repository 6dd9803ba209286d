"""Loop over the passes of a training: epochs, or windows of a stream."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self, override

from recsuite.config.config import Config
from recsuite.config.sections import MOST_DECAY_OF_FP16, TrainingConfig
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.opening import LOOK_EVERY, Data
from recsuite.datasets.streams import StreamPosition, Window
from recsuite.errors import UserError, counted, format_metric, require
from recsuite.hooks import INITIAL_ROWS, extra
from recsuite.metrics import Measured, Metrics
from recsuite.models.losses import LossMaker
from recsuite.models.tasks import TASKS, ModelMaker, WorkerTask
from recsuite.runtime.console import stage
from recsuite.runtime.process import RuntimeContext, all_gather_object, broadcast_from_rank0, raise_on_all
from recsuite.sharding.dynamic_ranks import counts_of, describe_counts
from recsuite.sharding.plan import describe_plan
from recsuite.sharding.recommender import Metric, ModelInput
from recsuite.sharding.table import describe_storage
from recsuite.sharding.table_rules import TableRule
from recsuite.training.callbacks import (
    Callback,
    Callbacks,
    CheckpointerProtocol,
    Epoch,
    Run,
    ShownProgress,
    Step,
    TrainedWindow,
)
from recsuite.training.captured import WARM_UP_STEPS, StepFunction, TrainingStep, check_capture, why_eager
from recsuite.training.evaluation import PredictionEvaluator, make_evaluator
from recsuite.training.progress import Progress, StreamProgress
from recsuite.training.results import report_run
from recsuite.training.state import (
    EVENTS_OF_DECAY,
    DenseOptimizer,
    Schedule,
    ShardedModel,
    build_train_state,
    has_epochs_left,
    stops_early,
)
from recsuite.training.steps import BatchFeed, Pass, learn, place_batches, start_clock
from recsuite.training.stream import StreamWindows, WindowLog, describe_growth
from recsuite.training.weights import (
    InitialRows,
    InMemoryBest,
    apply_row_scale,
    begins_with_biases,
    bias_rows,
    check_finite,
    check_no_invalid_weights,
    describe_invalid_weights,
    fill_initial_rows,
    project_rows,
)

# The newest windows of which the results are kept: a stream may never end.
MOST_WINDOWS = 1_000


class Training:
    """Training that begins where its checkpointer says, in passes: epochs, or windows of a stream.

    In epochs the model is validated after each, and tested at the end. Along a stream each window is first
    predicted, then trained on once. Collective: every rank makes one, and makes the same calls.

    Args:
        data: Data, from `open_data`.
        config: Flags.
        context: This process.
        checkpointer: Checkpointer, see `checkpointing`; None keeps the best weights in memory.
        callbacks: Callbacks that observe the training.
        seconds: Function that returns the seconds of the parts of the run up to now, for its report.

    Example:
        with Training(data, config, context, checkpointer, callbacks) as training:
            model = training.shard(make_model, loss=make_loss(training.columns, config))
            step = training.step(model.train_on)
            for epoch in training.epochs():
                for batch in epoch:
                    step(batch)
                training.save(training.validate())
            run = training.finish()
    """

    def __init__(
        self,
        data: Data,
        config: Config,
        context: RuntimeContext,
        checkpointer: CheckpointerProtocol | None = None,
        callbacks: Sequence[Callback] = (),
        seconds: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.config = config = config.with_global_batch(data.columns.num_train, context.world_size)
        self.context = context
        self.columns = data.columns
        self.task = TASKS[config.model.task]
        # Also a training without checkpoints is tested with its best weights.
        self.checkpointer = checkpointer or InMemoryBest(config.training, context)
        self.progress = self.checkpointer.start
        self.unit = data.columns.schema.labels
        self.initial_rows_seconds = 0.0
        self.initial: Measured | None = None
        self.epoch: TrainingPass
        self._steps: list[TrainingStep] = []
        self.results: list[Epoch] = []
        self._seconds = seconds
        num_epochs = config.training.epochs
        self.shown = ShownProgress(self.columns.num_train, self.unit, num_epochs, context.rank != 0)
        self.callbacks = Callbacks([*callbacks, self.shown])
        self.feed = BatchFeed(data.loader, self.phase)
        self.windows: StreamWindows | None = None
        if config.stream.stream:
            self.windows = StreamWindows(data, config, context)
            self.lines = WindowLog(self.task, self.unit, context)
            self.stream = self.windows.begin(self.progress.stream)
            self.checkpointer.stream_reader = data.stream_reader
        # The workers start on the first batches, while the model is built. Initial rows are validated before,
        # and then the workers begin again.
        has_more = (
            self.stream.is_under_way if self.windows else has_epochs_left(self.progress, config.training)
        )
        if has_more:
            context.say(describe_batch(data.loader.dataset, self.unit, is_stream=self.windows is not None))
            self.feed.prepare("train", self.progress.epoch, self.progress.samples, self.window)

    def shard(
        self,
        maker: ModelMaker,
        loss: nn.Module | None = None,
        tables: TableRule | None = None,
        dense: DenseOptimizer | None = None,
        metrics: Mapping[str, Metric] | None = None,
        initial_rows: InitialRows | None = None,
    ) -> ShardedModel:
        """Build the model, shard its tables, and load the state at which the checkpointer begins. Collective.

        Args:
            maker: Function that makes the model from the columns and the flags of the model. The attribute
                `embedding_dims` of the model gives tables another width than --embedding_dim.
            loss: Called with the output of the model and the batch; returns the mean over the batch. None for
                a loop that computes its own from `model.output(batch)`.
            tables: Optimizer of the tables; None for that of the flags.
            dense: Function that makes the optimizer of the dense part from its parameters.
            metrics: Name to a function of predictions and labels, numpy float32 [n], that returns a number.
                They are shown with those of the task. One with the name of the main metric replaces it, and
                chooses the best epoch.
            initial_rows: Function of the columns, the flags of the model and the seed that returns rows by
                table, float32 [rows, at most D]; the other numbers and tables stay as drawn. It is called on
                rank 0, unless the training is resumed. The rows count as epoch 0: they are validated, and
                tested if no epoch is better; not without validation events or with dynamic tables.

        Returns:
            The model, called with a batch of `epochs`.

        Raises:
            UserError: when the tables do not fit, the optimizer is unsupported, or a checkpoint is damaged or
                of another model.
        """
        self._make_evaluator()
        with self.phase("model"), stage("building the model", quiet=self.context.rank != 0):
            self.train_state = build_train_state(
                self.columns, self.config, self.context, maker, loss, tables, dense, metrics
            )
        self.plan = describe_plan(self.train_state.model, self.columns)
        for line in self.plan.splitlines():
            self.context.say(line)
        place_batches(self.feed, self.train_state, self.config, self.context)
        if initial_rows is None and self.config.model.initial_rows in INITIAL_ROWS:
            name = self.config.model.initial_rows
            initial_rows = getattr(extra(name), INITIAL_ROWS[name])
        what = "the initial rows"
        if initial_rows is None and begins_with_biases(self.train_state, self.columns, self.config):
            initial_rows, what = bias_rows, "the initial rows, with biases"
        if initial_rows is not None and not self.checkpointer.is_resumed:
            begun = time.perf_counter()
            with self.phase("model"):
                fill_initial_rows(initial_rows, self.train_state, self.columns, self.config, self.context)
                project_rows(self.train_state, self.columns)
            self.initial_rows_seconds = time.perf_counter() - begun
            self._validate_initial_rows(what)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.begin(self.train_state, self.progress)
        # A row may have expired since it was written: evaluation, which is no step, needs the time too.
        start_clock(self.train_state.tables, self.progress)
        # A tracker of one rank may refuse, and then all ranks end with its message.
        raise_on_all(lambda: self.callbacks.on_begin(self.progress, self.checkpointer.run))
        return self.train_state

    def _validate_initial_rows(self, what: str) -> None:
        """Validate the initial rows as epoch 0, see `shard`; what: the rows in words. Collective."""
        has_dynamic = any(table.feature.is_dynamic for table in self.columns.tables)
        if self.windows is not None or self.columns.num_validation == 0 or has_dynamic:
            return
        with self.phase("evaluation"):
            self.initial = self.evaluator.validate(self.train_state.model, 0)
        self.progress = self._judged(self.initial)
        self.context.say(f"epoch 0, {what}: {describe_validation(self.initial, self.task)}")

    def step(self, function: StepFunction) -> StepFunction:
        """Return a function of a batch that makes a step, as one CUDA graph where that is possible.

        Elsewhere it calls the function, and the result is the same, bit for bit. The first steps are always
        eager. What is captured is what the function launches on the GPU. Python in it, such as a print, runs
        only in eager steps, and numbers that it computes are those of the capture until the next epoch, or in
        a stream until more events are read. See --capture. Collective, like the function.

        Args:
            function: Makes a whole step of a batch: forward, backward and `model.step()`. Tensors in the
                tuple, list or dictionary that it returns are copied, without a gradient.

        Returns:
            The function, to be called with each batch of an epoch.

        Raises:
            UserError: for --capture on, when steps cannot be captured.

        Example:
            @training.step
            def step(batch):
                loss = model(batch)
                loss.backward()
                model.step()
                return loss
        """
        capture = self.config.training.capture
        if not hasattr(self, "train_state"):
            raise RuntimeError("There is no model yet. Fix: call training.shard before training.step.")
        if capture == "off":
            return function
        reason = why_eager(self.config, self.context.device, self.feed.why_on_host)
        step = TrainingStep(function, self.train_state, self.context, reason, capture == "on")
        self._steps.append(step)
        return step

    def run(self, maker: ModelMaker, loss: LossMaker) -> Run:
        """Train by the plain loop. Collective: every rank. maker, loss: make the model and its loss.

        Returns:
            The results.

        Raises:
            UserError: when the tables do not fit, the training diverges, or data that grow cannot be read.
            WorkerError: when a data worker fails.
        """
        with self:
            self.shard(maker, loss(self.columns, self.config))
            step = self.step(self.train_state.train_on)
            for epoch in self.epochs():
                learn(epoch, step)
                self.save(self.validate())
            return self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the background work of the training; harmless twice. Not collective."""
        for step in self._steps:
            step.close()
        if self.windows is not None:
            self.lines.say()
            self.windows.close()

    @property
    def stream(self) -> StreamProgress:
        """Progress of the stream; it is a part of that of the training."""
        assert self.progress.stream is not None
        return self.progress.stream

    @stream.setter
    def stream(self, stream: StreamProgress) -> None:
        self.progress = dataclasses.replace(self.progress, stream=stream)

    @property
    def window(self) -> Window | None:
        """Current window of the stream, in its columns; None in a training by epochs."""
        return self.windows.window_of(self.stream) if self.windows else None

    def epochs(self) -> Iterator[TrainingPass]:
        """Yield the remaining epochs, or windows of a stream. Collective.

        Yields:
            A pass over its batches on the device, to be followed by `save`, which is called here if missing.
        """
        with self.shown.of_epochs(self.progress):
            while self._begin_pass():
                epoch = TrainingPass(self)
                yield epoch
                if epoch.validation is None:
                    self.save(self.validate())
        if self.windows is not None:
            self.close()
            self.print_counts()

    def _make_evaluator(self) -> None:
        # It maps its columns now: like the loader, it does not need the files later.
        self.evaluator = make_evaluator(self.feed, self.columns, self.config, self.context)

    def _begin_pass(self) -> bool:
        """Prepare the next pass, for a stream with a prediction of it; return False if there is none."""
        if self.windows is None:
            if not has_epochs_left(self.progress, self.config.training):
                return False
        elif (window := self._next_window(self.windows)) is None:
            return False
        elif not self.stream.is_under_way:
            # A ranking of a stream was refused with the flags.
            assert isinstance(self.evaluator, PredictionEvaluator)
            with self.phase("evaluation"):
                model, labels = self.train_state.model, self.windows.labels_of(window)
                predicted = self.evaluator.window(model, self.progress.epoch, window, labels)
                by_biases = self.windows.predict_by_biases(window)
                biases = self.evaluator.measure_window(model, by_biases, labels)
                self.stream = self.windows.begun(self.stream, window, predicted, biases)
        # A graph reads the columns at their addresses, so windows of the same ones can repeat it.
        first = self.progress.samples if self.window is None else self.window.begin
        for step in self._steps:
            left = self.feed.loader.dataset.num_steps("train", first)
            step.begin_pass(left, keeps=self.windows is not None)
        if apply_row_scale(self.train_state):
            # It may wait for a checkpoint that is still being written.
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_rescale()
        return True

    def _next_window(self, windows: StreamWindows) -> Window | None:
        """Wait for the next window; return None at the end of data that are not followed."""
        is_waiting = False
        while (window := windows.next(self.stream)) is None:
            if windows.has_more:
                self._grow(windows)
                continue
            if windows.following is None:
                return None
            if not is_waiting:
                self.lines.say()
                # The stream may never end, and other trainings print it at the end.
                self.print_counts()
                self.context.say(windows.describe_wait(self.stream))
                is_waiting = True
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_wait(self.progress)
            if windows.following.has_grown():
                self._grow(windows)
            else:
                time.sleep(LOOK_EVERY)
        decay = self.train_state.weight_decay * len(window) / EVENTS_OF_DECAY
        require(
            self.config.tables.row_precision == "fp32" or decay <= MOST_DECAY_OF_FP16,
            f"--row_precision fp16 requires a decay of at most {MOST_DECAY_OF_FP16} in a window, and "
            f"{counted(len(window), 'event')} with --weight_decay {self.train_state.weight_decay} have "
            f"{decay:.1f}; give a smaller --window or --weight_decay, or fp32",
        )
        return window

    def _grow(self, windows: StreamWindows) -> None:
        """Switch to columns of the next events, if they can be read. Collective."""
        before, reads = self.columns, not windows.has_more
        if not windows.grow(self.stream):
            return
        self.columns = windows.columns
        self.feed.loader.close()
        # Frees the columns on the device before the next ones are copied.
        for step in self._steps:
            step.begin_pass(0)
        if self.feed.on_device is not None:
            self.feed.on_device.free()
        self.feed.on_device, why_on_host = None, self.feed.why_on_host
        self.feed = BatchFeed(windows.load(), self.phase)
        place_batches(self.feed, self.train_state, self.config, self.context, why_on_host)
        reason = why_eager(self.config, self.context.device, self.feed.why_on_host)
        check_capture(self.config.training.capture == "on", reason)
        self._make_evaluator()
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_growth(self.columns)
        if reads:
            self.context.say(describe_growth(before, self.columns))
        windows.drop_columns()

    def validate(self) -> Measured:
        """Return the metrics of the trained pass. Collective.

        Returns:
            Metrics on the validation events; of a window those of its predictions before training on it.
        """
        self._check_whole()
        if self.windows is not None:
            number = self.stream.end - self.stream.begin
            return Measured({**self.task.no_metrics(), **self.stream.predicted}, number)
        with self.phase("evaluation"):
            # Also after a finite loss: a model may be broken and still give one.
            self._check_weights()
            return self.evaluator.validate(self.train_state.model, self.progress.epoch - 1)

    def finish(self) -> Run:
        """Test the best weights, and end the training; a stream has no test. Collective.

        Returns:
            The results, the same on every rank.
        """
        for line in describe_storage(self.train_state.tables):
            self.context.say(line)
        if self._lacks_captures:
            self.context.say(f"no step was captured: the first {WARM_UP_STEPS} are eager")
        if num_above := sum(step.above_budget for step in self._steps):
            self.context.say(f"{counted(num_above, 'step')} had lists above the budget, and were eager")
        number = self.progress.epoch
        if self.windows is not None:
            overall, empty = Measured(self._overall(), self.stream.end), self.stream.num_empty
            biases = self.stream.overall_biases()
            run = Run(
                self.columns,
                self.plan,
                self.results,
                overall,
                number,
                number,
                stopped_early=False,
                is_stream=True,
                num_empty=empty,
                biases=biases,
            )
        else:
            has_stopped = stops_early(self.progress, self.config.training)
            if has_stopped:
                self.context.say(describe_early_stop(self.progress, self.task, self.config.training))
            with self.phase(self.checkpointer.phase):
                best = self.restore_best_weights()
            if best.epoch == 0 and not self.initial and self.columns.num_validation:
                # The process that validated them ended, and this one was resumed.
                with self.phase("evaluation"):
                    self.initial = self.evaluator.validate(self.train_state.model, 0)
            # Only now: no choice may depend on the test.
            test = Measured(self.task.no_metrics())
            if self.columns.num_test:
                with self.phase("evaluation"):
                    test = self.evaluator.test(self.train_state.model, best.epoch)
            run = Run(
                self.columns,
                self.plan,
                self.results,
                test,
                best.epoch,
                number,
                has_stopped,
                initial_rows_seconds=self.initial_rows_seconds,
                initial=self.initial,
            )
        self.callbacks.on_end(run)
        return run

    def report(self, run: Run) -> None:
        """Print the results of a training, and have the extras report them. Not collective.

        Args:
            run: Results, from `finish`.

        Raises:
            UserError: when the report cannot be written.
        """
        report_run(run, self._seconds(), self.config, self.context)

    def request_stop(self) -> None:
        """End the training after the current step, with a checkpoint. Not collective."""
        self.checkpointer.request_stop()

    def _overall(self) -> Metrics:
        return {**self.task.no_metrics(), **self.stream.overall()}

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context around one of `callbacks.PHASES`."""
        return self.callbacks.phase(name, self.progress)

    def _check_whole(self) -> None:
        """Refuse a pass that was not completely trained."""
        if self.epoch.losses is None:
            raise RuntimeError(
                "The loop over the batches ended early. Fix: take every batch of a pass; for a shorter "
                "training give --epochs."
            )
        if self.train_state.is_pending:
            raise RuntimeError(
                "Gradients of the last batches were not applied to the dense part. Fix: call model.step() "
                "after loss.backward(); with gradient accumulation, also when epoch.is_last."
            )

    def _check_weights(self, changed: bool = False) -> None:
        """Refuse weights that no trained model has; changed: see `describe_invalid_weights`. Collective."""
        dense, tables = self.checkpointer.dense, self.train_state.tables
        faults = all_gather_object(lambda: describe_invalid_weights(dense, tables, changed))
        check_no_invalid_weights(faults, self.progress.step, self.train_state.rates)

    def print_counts(self) -> None:
        """Print the rows and counters of tables that have counters. Collective: every rank."""
        sentence = describe_counts(counts_of(self.train_state.tables))
        if sentence:
            self.context.say(sentence)

    def after_step(self, step: Step, is_last: bool) -> None:
        """Call the callbacks after a step, and the checkpointer, unless the step was the last of its pass."""
        self.callbacks.on_step(step)
        # After the last step of an epoch its losses are checked first, and it is validated. Checkpoints hold
        # no gradients, so none is written while gradients wait for their step.
        if not (is_last or self.train_state.is_pending):
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_step(step)

    def trained(self, epoch: TrainingPass) -> None:
        """Handle a pass with all of its steps made."""
        assert epoch.losses is not None
        # A resumed training may have fewer steps left than are eager before a capture.
        num_steps = self.progress.step + len(epoch.losses) - self.checkpointer.start.step
        if self._lacks_captures and num_steps > WARM_UP_STEPS:
            raise UserError(
                "--capture on: no step of the epoch was captured. Fix: decorate the step with "
                "@training.step, or give auto or off."
            )
        # First of all: the next steps would validate, compare and save a broken model.
        check_finite(epoch.losses, self.progress.step, self.train_state.rates)
        # The wait of the rank that waited most: in every step all ranks wait for it.
        epoch.wait = _largest(self.feed.seconds_waited / epoch.seconds, self.context)
        step, number = self.progress.step + len(epoch.losses), self.progress.epoch + 1
        self.progress = dataclasses.replace(self.progress, step=step, epoch=number, samples=0)
        if self.windows is None:
            project_rows(self.train_state, self.columns)

    @property
    def _lacks_captures(self) -> bool:
        """True if captured steps are required, and there was none yet."""
        return self.config.training.capture == "on" and not any(step.has_captured for step in self._steps)

    def save(self, validation: Measured | Mapping[str, float]) -> None:
        """Save the model after an epoch: a checkpoint where flags request one, and the best weights.

        Collective; it may end the process.

        Args:
            validation: Metrics of the epoch, by which the best one is chosen: those of `validate`, or your
                own by name, on the same scale.
        """
        self._check_whole()
        epoch = self.epoch
        assert epoch.losses is not None
        if not isinstance(validation, Measured):
            validation = Measured(dict(validation))
        epoch.validation, window = validation, self.window
        if self.windows is None:
            self.progress = self._judged(validation)
        else:
            # Before they are in a checkpoint.
            self._check_weights(self.checkpointer.saves_changes)
            self.windows.prune(self.stream, self.train_state.model)
            self.stream = self.windows.done(self.stream)
        # Steps are of different sizes, so their losses are weighted with their events.
        train_loss = float(np.average(epoch.losses, weights=epoch.step_sizes))
        rate = sum(epoch.step_sizes) / epoch.seconds
        results = self.progress, epoch.losses, train_loss, validation, epoch.seconds, rate, epoch.wait
        result = Epoch(*results)
        if self.windows is not None and window is not None:
            overall, biases = self._overall(), self.stream.overall_biases()
            result = TrainedWindow(*results, len(window), *self.windows.times_of(window), overall, biases)
        # Before the callbacks, for it may end the process; and after the checks, because it replaces good
        # checkpoints.
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_epoch(result)
        self.callbacks.on_epoch(result)
        if isinstance(result, TrainedWindow):
            self.lines.add(result)
            # An endless stream must not keep all losses, which a slice of them would, nor positions in files.
            stream = dataclasses.replace(self.stream, position=StreamPosition())
            progress = dataclasses.replace(self.progress, stream=stream)
            kept = dataclasses.replace(result, losses=result.losses[:0].copy(), progress=progress)
            self.results.append(kept)
            del self.results[:-MOST_WINDOWS]
        else:
            self.context.say(describe_epoch(result, self.task, self.unit, self.config.training))
            self.print_counts()
            self.results.append(result)

    def _judged(self, validation: Measured) -> Progress:
        """Return the progress at the end of an epoch, with the result of its validation."""
        value = validation[self.task.main_metric]
        # Only one rank decides: other machines may round differently.
        return broadcast_from_rank0(lambda: with_validation(self.progress, value, self.task))

    def restore_best_weights(self) -> Progress:
        """Restore the best weights, if they were saved, and print their epoch; return their progress.
        Collective: every rank.
        """
        progress = self.progress
        if progress.is_best:
            return progress
        best = self.checkpointer.restore_best(self.train_state)
        if best is None:
            self.context.say(
                f"the test uses the last weights, of epoch {progress.epoch}: no better ones were kept"
            )
            return progress
        wanted = progress.epoch - progress.epochs_since_best
        lost = f" that is still there; epoch {wanted} was better, but its checkpoint is gone"
        which = f"weights of epoch {best.epoch}" if best.epoch else "initial rows"
        lost = lost if best.epoch < wanted else ""
        is_short = best.epoch == 0 and not stops_early(progress, self.config.training)
        more = "; no epoch is better yet, so give more --epochs" if is_short else ""
        self.context.say(f"the test uses the {which}, the best on the validation {self.unit}{lost}{more}")
        return best


class TrainingPass(Pass):
    """Pass of a training, see `Pass`.

    wait: the share of it that was spent waiting for batches; validation: its metrics, after it was ended.
    """

    def __init__(self, training: Training) -> None:
        window, config, num_train = training.window, training.config.training, training.columns.num_train
        num_events = num_train if window is None else len(window)
        super().__init__(
            training.train_state,
            training.feed,
            training.progress,
            Schedule(num_train, config.epochs, training.config.optimizer.decay_power)
            if window is None
            else Schedule(),
            config,
            training.context,
            lambda step: training.after_step(step, is_last=step.progress.samples == num_events),
            window,
        )
        training.epoch, self.training, self.wait = self, training, 0.0
        self.validation: Measured | None = None

    @override
    def __iter__(self) -> Iterator[ModelInput]:
        with self.training.phase("steps"):
            yield from super().__iter__()
        self.training.trained(self)


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def with_validation(progress: Progress, value: float, task: WorkerTask) -> Progress:
    """Return the progress at the end of an epoch with a value of the main metric."""
    if not task.is_better(value, progress.best):
        return dataclasses.replace(progress, epochs_since_best=progress.epochs_since_best + 1)
    return dataclasses.replace(progress, best=value, epochs_since_best=0)


def describe_batch(dataset: EventBatches, unit: str, is_stream: bool) -> str:
    """Describe the batches of a training in one line; unit: the noun for events."""
    shared = f" ({dataset.local_batch_size:,} per process)" if dataset.world_size > 1 else ""
    steps = "" if is_stream else f", {counted(dataset.num_steps('train'), 'step')} an epoch"
    return f"batches of {dataset.batch_size:,} {unit}{shared}{steps}"


def describe_epoch(epoch: Epoch, task: WorkerTask, unit: str, config: TrainingConfig) -> str:
    """Describe an epoch in one line; unit: the noun for events."""
    return (
        f"epoch {epoch.number}/{config.epochs}: train loss {epoch.train_loss:.4f}, "
        f"{describe_validation(epoch.validation, task)}, {epoch.seconds:.1f} s, "
        f"{epoch.events_per_second:,.0f} {unit}/s, data wait {epoch.data_wait:.1%}"
    )


def describe_validation(validation: Measured, task: WorkerTask) -> str:
    """Describe the metrics of a validation that are shown after each epoch."""
    shown = (
        f"{label} {format_metric(validation[name])}"
        for name, label in task.labels_for(validation.values).items()
        if name in task.epoch_metrics or name not in task.metrics
    )
    return f"validation {', '.join(shown)}"


def describe_early_stop(progress: Progress, task: WorkerTask, config: TrainingConfig) -> str:
    """Describe in one line why a training ended before its last epoch."""
    assert progress.best is not None
    return (
        f"stopped early, after epoch {progress.epoch}: "
        f"{counted(progress.epochs_since_best, 'epoch')} without a better "
        f"validation {task.main_label} than {progress.best:.4f} (--patience {config.patience})"
    )
