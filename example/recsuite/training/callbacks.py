"""Callbacks of a training, and the protocol of its checkpointer.

A callback only observes: progress bar, timer, profiler, event log. A training learns the same with and
without callbacks. A checkpointer does more: it decides where the training begins, may end the process, and
restores the best weights. So the trainer keeps it apart from the callbacks, and calls it at other moments.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from recsuite.runtime.console import stage
from recsuite.training.progress import Progress

# For types only, so that callbacks can be made before TorchRec is imported.
if TYPE_CHECKING:
    import numpy as np
    import torch

    from recsuite.datasets.columns import Columns
    from recsuite.datasets.preparation.stream_reader import StreamReader
    from recsuite.metrics import Measured, Metrics
    from recsuite.training.state import ShardedModel

# Names of the parts of a training, for `Callback.phase`: building the model; waiting for a batch; the rest of
# an epoch's steps; validation and test; the checkpointer. A report has the seconds of each.
PHASES = ("model", "feed", "steps", "evaluation", "dumps")


@dataclass(frozen=True)
class Step:
    """A finished step; on a device it may still be computing.

    Attributes:
        progress: Progress of the training after the step.
        loss: Loss of this rank's rows, float32 [], on the device; reading it waits for the step.
        rates: Scheduled learning rates of "tables" and "dense".

    Example:
        def on_step(self, step: rs.Step) -> None:
            print(step.progress.step, step.rates["dense"])
    """

    progress: Progress
    loss: torch.Tensor
    rates: Mapping[str, float]


@dataclass(frozen=True)
class Epoch:
    """Results of one pass over the training events, the same on every rank.

    Attributes:
        progress: Progress of the training after the epoch.
        losses: Mean loss of each step's global batch, float32 [steps].
        train_loss: Mean of the losses, over events.
        validation: Validation metrics: `validation["rmse"]`, or `validation.values`, a dictionary of all.
        seconds: Duration of the pass.
        events_per_second: Training events per second of the pass, of all ranks.
        data_wait: Share of the pass spent waiting for batches, from 0 to 1, on the rank that waited most.

    Example:
        def on_epoch(self, epoch: rs.Epoch) -> None:
            print(epoch.number, epoch.train_loss, epoch.validation["rmse"])
    """

    progress: Progress
    losses: np.ndarray
    train_loss: float
    validation: Measured
    seconds: float
    events_per_second: float
    data_wait: float

    @property
    def number(self) -> int:
        """Number of the epoch, from 1."""
        # The progress counts finished passes, and this pass is finished.
        return self.progress.epoch


@dataclass(frozen=True)
class TrainedWindow(Epoch):
    """Results of one window of a stream, the same on every rank.

    `validation` has the metrics of its predictions, made before training on the window. The losses of a
    resumed window are those of the steps since it was resumed.

    Attributes:
        num_events: Number of events of the window.
        first_time: Time of its first event, in seconds since 1970.
        last_time: Time of its last event, in seconds since 1970.
        overall: Metrics of all windows up to this one, by name.
        biases: The same of the baseline, which predicts from all earlier events.
    """

    num_events: int
    first_time: int
    last_time: int
    overall: Metrics
    biases: Metrics


@dataclass(frozen=True)
class Run:
    """Results of a training, the same on every rank.

    Attributes:
        columns: Columns of its data.
        plan: Plan of its tables, in lines.
        epochs: Epochs of this process, or the newest 1,000 windows of a stream; empty if the training was
            already complete.
        test: Test metrics, as `Epoch.validation`; of a stream those of the predictions of all windows.
        test_epoch: Epoch whose weights were tested, the best one by validation.
        num_epochs: Number of finished epochs.
        stopped_early: True if --patience ended the training.
        is_stream: True for a stream.
        num_empty: Number of windows without events, which were skipped.
        initial_rows_seconds: Time to make the initial rows of the tables, see `Training.shard`; 0 for none.
        initial: Validation metrics of the initial rows; None if there are none.
        biases: Metrics of the baseline of a stream, by name.

    Example:
        def on_end(self, run: rs.Run) -> None:
            print(run.test_epoch, run.test["rmse"])
    """

    columns: Columns
    plan: str
    epochs: Sequence[Epoch]
    test: Measured
    test_epoch: int
    num_epochs: int
    stopped_early: bool
    is_stream: bool = False
    num_empty: int = 0
    initial_rows_seconds: float = 0.0
    initial: Measured | None = None
    biases: Metrics = field(default_factory=dict)

    @property
    def validation(self) -> Measured | None:
        """Validation metrics of the tested weights; None if another process had them."""
        if self.test_epoch == 0:
            return self.initial
        return next((epoch.validation for epoch in self.epochs if epoch.number == self.test_epoch), None)


class Callback:
    """Base of callbacks: observes a training without taking part in it, such as a log.

    Override the methods of interest; the others do nothing. An exception ends the training. Not collective:
    each rank has its own, or none.

    Example:
        class Losses(rs.Callback):
            def on_epoch(self, epoch):
                print(epoch.number, epoch.train_loss)

        with rs.session(args, runtime, rs.build_dataloader, [Losses()]) as training:
            ...
    """

    def phase(self, name: str, progress: Progress) -> AbstractContextManager[Any]:
        """Return a context around a phase of the training; phases may be nested.

        Args:
            name: One of `PHASES`.
            progress: Progress at the begin of the phase.
        """
        return contextlib.nullcontext()

    def on_begin(self, progress: Progress, run: str) -> None:
        """Handle the beginning of the training, after the model is built.

        Args:
            progress: Progress where it begins or is resumed.
            run: Name of the training in its checkpoints, which a resumed training keeps.
        """

    def on_step(self, step: Step) -> None:
        """Handle a finished step. Called between steps, so it should not wait for the device."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Handle a finished epoch: trained, checked, validated and, if configured, in a checkpoint.

        Not called for initial rows, see `Run.initial`.
        """

    def on_end(self, run: Run) -> None:
        """Handle the end of the training, after the test. Not called if it failed or a signal ended it."""


class CheckpointerProtocol(Protocol):
    """Checkpointer of a training: it decides where the training begins, and is called after every step.
    Collective.

    phase: the one of `PHASES` in which its time counts; run: see `Callback.on_begin`, the same on every rank
    if there are checkpoints; is_resumed: True if the rows are those of a checkpoint; stream_reader: of a
    stream, on the first rank of each machine.
    """

    phase: str
    run: str
    is_resumed: bool = False
    stream_reader: StreamReader | None = None

    @property
    def start(self) -> Progress:
        """Return the progress at which the training begins."""

    @property
    def dense(self) -> Mapping[str, torch.Tensor]:
        """Return the dense tensors that are saved, after the training has begun: the tensors themselves."""

    @property
    def saves_changes(self) -> bool:
        """Return True if the next checkpoint has only the rows that changed since the last one."""

    def begin(self, train_state: ShardedModel, progress: Progress) -> None:
        """Restore the train state at `start`, or keep it if it is validated initial rows.

        progress: `start`, with the result of that validation, if any.
        """

    def on_step(self, step: Step) -> None:
        """Handle a finished step that does not end its epoch; may end the process."""

    def on_epoch(self, epoch: Epoch) -> None:
        """Handle a finished epoch; may end the process.

        Its losses and weights were checked before, because what is written here replaces good checkpoints.
        """

    def request_stop(self) -> None:
        """End the training on all ranks after a step or two with a checkpoint and a SystemExit, as a SIGTERM
        does. For programs that train in a thread, where Python allows no handler of signals. Call it on any
        rank, from any thread.
        """

    def on_wait(self, progress: Progress) -> None:
        """Handle a wait for more data, with all training so far saved; may end the process."""
        return

    def on_rescale(self) -> None:
        """Handle that all rows of all tables were rescaled, with the same meaning."""
        return

    def on_growth(self, columns: Columns) -> None:
        """Handle that the data have grown to these columns.

        The files of the earlier columns are removed soon.
        """
        return

    def restore_best(self, train_state: ShardedModel) -> Progress | None:
        """Restore the best train state; return its progress, None if it was not saved."""


class Tracker:
    """Base of trackers: receives the flags and the metrics of a training, for a destination of your own.

    Give it to `session`, which calls it on rank 0 only; the other ranks only construct it. Not collective.

    Example:
        class Print(rs.Tracker):
            def log(self, metrics):
                for step, values in metrics.items():
                    print(step, values)

        with rs.session(args, runtime, rs.build_dataloader, trackers=[Print()]) as training:
            ...
    """

    def begin(self, params: Mapping[str, Any], run: str, step: int) -> None:
        """Begin, before the first step. An exception ends the training here.

        Args:
            params: Flags by name.
            run: Name of the training in its checkpoints, which a resumed training keeps.
            step: First step to run; values logged for it or later are replaced, because it runs again.
        """

    def log(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """Log metrics after each epoch. After an exception it is called again with the same and newer ones.

        Args:
            metrics: Finite numbers by step and by name, such as "validation/rmse".
        """

    def end(self, status: str) -> None:
        """End.

        Args:
            status: "finished", "failed" or, after a signal, "stopped".
        """


class Callbacks(Callback):
    """Several callbacks as one, in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    @override
    @contextlib.contextmanager
    def phase(self, name: str, progress: Progress) -> Iterator[None]:
        # Closed in the opposite order, each of them also when another one raises.
        with contextlib.ExitStack() as stack:
            # The first one is outermost, so the stopwatch includes the time of the others.
            for callback in self.callbacks:
                stack.enter_context(callback.phase(name, progress))
            yield

    @override
    def on_begin(self, progress: Progress, run: str) -> None:
        for callback in self.callbacks:
            callback.on_begin(progress, run)

    @override
    def on_step(self, step: Step) -> None:
        for callback in self.callbacks:
            callback.on_step(step)

    @override
    def on_epoch(self, epoch: Epoch) -> None:
        for callback in self.callbacks:
            callback.on_epoch(epoch)

    @override
    def on_end(self, run: Run) -> None:
        for callback in self.callbacks:
            callback.on_end(run)


class ShownProgress(Callback):
    """Progress of a pass, an epoch of `num_events` events or a window of a stream; and of all epochs.

    unit: the noun for events; num_epochs: of the training.
    """

    def __init__(self, num_events: int, unit: str, num_epochs: int, quiet: bool) -> None:
        self.num_events, self.unit, self.num_epochs, self.quiet = num_events, unit, num_epochs, quiet

    @contextlib.contextmanager
    def of_epochs(self, progress: Progress) -> Iterator[None]:
        """Show the time left of all epochs, with validations and checkpoints; a stream may have no end."""
        # The rest of a resumed epoch is no measure of the others.
        self._unmeasured = progress.epoch if progress.samples else None
        quiet = self.quiet or progress.stream is not None
        with stage("training", self.num_epochs, done=progress.epoch, quiet=quiet) as self._reached_epoch:
            yield

    @override
    @contextlib.contextmanager
    def phase(self, name: str, progress: Progress) -> Iterator[None]:
        # Waiting for a batch is a phase within the steps, and must not begin a second stage. Other phases
        # have no events to count.
        if name != "steps":
            yield
            return
        title, number = f"epoch {progress.epoch + 1}/{self.num_epochs}", self.num_events
        if stream := progress.stream:
            title, number = f"window {progress.epoch + 1}", stream.end - stream.begin
        # A resumed pass begins at its checkpoint, and not at 0.
        with stage(title, number, self.unit, done=progress.samples, quiet=self.quiet) as self._reached:
            yield

    @override
    def on_step(self, step: Step) -> None:
        self._reached(step.progress.samples)
        if step.progress.epoch != self._unmeasured:
            # In each step, as the first one begins the clock: code is compiled in it.
            self._reached_epoch(step.progress.epoch)
