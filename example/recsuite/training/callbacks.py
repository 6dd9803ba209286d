"""Callbacks of a training, and the checkpointer that keeps its weights.

A callback looks on: progress bar, timer, profiler, event log. It changes nothing, and a training without any
learns the same. A checkpointer is more than that: it says where the training begins, it may end the process,
and it brings back the best weights; so the trainer holds it apart from the callbacks, and calls it at moments
of its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.runtime.console import stage

# For types alone, so that who looks at a training can be made before TorchRec is imported.
if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from recsuite.datasets.columns import Columns
    from recsuite.datasets.metrics import Metrics
    from recsuite.training.state import ShardedModel

# The parts of a training that `Callback.phase` names: building the model; waiting for a batch; the rest of an
# epoch's steps; validation and test; what the checkpointer does. A report has the seconds of each, by these
# names.
PHASES = ("model", "feed", "steps", "evaluation", "dumps")


@dataclass(frozen=True)
class Step:
    """A step that was just made; on a device it may still be computed.

    progress: where the training is after it; loss: of this rank's rows, float32 [], on the device, so that
    reading it waits for the step; rates: the scheduled learning rates of "tables" and "dense".

        def on_step(self, step: rs.Step) -> None:
            print(step.progress.step, step.rates["dense"])
    """

    progress: Progress
    loss: torch.Tensor
    rates: Mapping[str, float]


@dataclass(frozen=True)
class Epoch:
    """Results of one pass over the training events, the same on every rank.

    progress: of the training after it; losses: mean loss of each step's global batch, float32 [steps];
    train_loss: their mean, over events; validation: metrics by name; seconds: of the pass; events_per_second:
    in it; data_wait: share of the pass that the rank which waited most spent waiting for batches.

        def on_epoch(self, epoch: rs.Epoch) -> None:
            print(epoch.number, epoch.train_loss, epoch.validation["rmse"])
    """

    progress: Progress
    losses: np.ndarray
    train_loss: float
    validation: Metrics
    seconds: float
    events_per_second: float
    data_wait: float

    @property
    def number(self) -> int:
        """Which epoch of the training it was, from 1."""
        # The progress counts passes that are done, and this one is.
        return self.progress.epoch


@dataclass(frozen=True)
class TrainedWindow(Epoch):
    """What was done with one window of a stream, the same on every rank: `validation` is of its predictions,
    which were made before anything was learned from it.

    num_events: of the window; first_time, last_time: of its events, in seconds since 1970; overall: the
    metrics of all windows up to it. Of a window that was resumed the losses are those of the steps since
    then.
    """

    num_events: int
    first_time: int
    last_time: int
    overall: Metrics


@dataclass(frozen=True)
class Run:
    """Results of a training, the same on every rank.

    columns: of its data; plan: of its tables, in lines; epochs: those of this process, which may be none of a
    training that was complete; test: of the weights after epoch `test_epoch`, the best one by validation;
    num_epochs: those that are done; stopped_early: true if --patience ended it; is_stream: true of a stream:
    its epochs are windows, and the test is that of all their predictions; num_empty: the windows that had no
    event, and were skipped.

        def on_end(self, run: rs.Run) -> None:
            print(run.test_epoch, run.test["rmse"])
    """

    columns: Columns
    plan: str
    epochs: Sequence[Epoch]
    test: Metrics
    test_epoch: int
    num_epochs: int
    stopped_early: bool
    is_stream: bool = False
    num_empty: int = 0

    @property
    def validation(self) -> Metrics:
        """The validation metrics of the weights that were tested; nothing where another process had them."""
        return next((each.validation for each in self.epochs if each.number == self.test_epoch), {})


class Callback:
    """Base of callbacks: observes a training without taking part in it, such as a log. Not collective: each
    rank has its own, or none.

    Override the methods of interest; the others do nothing. An exception ends the training.

        class Losses(rs.Callback):
            def on_epoch(self, epoch):
                print(epoch.number, epoch.train_loss)

        with rs.observing(args, runtime, [Losses()]) as observers:
            ...
    """

    def phase(self, name: str, progress: Progress) -> AbstractContextManager[Any]:
        """A context around one of `PHASES`, which begins at this progress; phases may lie in each other."""
        return contextlib.nullcontext()

    def on_begin(self, progress: Progress, run: str) -> None:
        """The model is built, and the training begins or is resumed at this progress. run: its name in its
        checkpoints, which a resumed training keeps.
        """

    def on_step(self, step: Step) -> None:
        """A step is done. Called between steps, so it should not wait for the device."""

    def on_epoch(self, epoch: Epoch) -> None:
        """An epoch is trained, found sound, validated and, where that is asked for, in a checkpoint."""

    def on_end(self, run: Run) -> None:
        """The training is over, and was tested. Not called when it failed or was told to end."""


class CheckpointerProtocol(Protocol):
    """Keeps what is learned: it says where a training begins, and learns of every step. Collective.

    phase: the one of `PHASES` in which its time counts; run: see `Callback.on_begin`, the same on every rank
    where there are checkpoints.
    """

    phase: str
    run: str

    @property
    def start(self) -> Progress:
        """Where the training begins."""

    @property
    def tensors(self) -> Mapping[str, torch.Tensor | ShardedTensor]:
        """All that is kept of the train state, once it has begun: the tensors themselves."""

    @property
    def changed(self) -> Mapping[str, torch.Tensor] | None:
        """Table to the rows of this rank's shards that may have changed since the last one was kept; None
        where that is not known.
        """

    def begin(self, train_state: ShardedModel) -> None:
        """Put the train state where it was at `start`."""

    def on_step(self, step: Step) -> None:
        """A step is done that does not end its epoch; may end the process."""

    def on_epoch(self, epoch: Epoch) -> None:
        """An epoch is done; may end the process.

        Its losses and `tensors` were checked before, and are those of a trained model: what is written here
        replaces checkpoints that were good.
        """

    def on_wait(self, progress: Progress) -> None:
        """There is nothing to train on at present, and what was trained is kept; may end the process."""
        return

    def on_fold(self) -> None:
        """All rows of all tables were written anew, and mean what they meant."""
        return

    def on_growth(self, columns: Columns) -> None:
        """The data have grown, and are these from now on; no file of those before is there for long."""
        return

    def restore_best(self, train_state: ShardedModel) -> Progress | None:
        """Put the train state where it was best; where the training was then, None if that was not kept."""


class Callbacks(Callback):
    """Several callbacks as one, in their order."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = list(callbacks)

    @contextlib.contextmanager
    def phase(self, name: str, progress: Progress) -> Iterator[None]:
        """See `Callback`."""
        # They are left in the opposite order, each of them also when another one raises.
        with contextlib.ExitStack() as stack:
            # The first of them is around the others, so the stopwatch counts their time too.
            for callback in self.callbacks:
                stack.enter_context(callback.phase(name, progress))
            yield

    def on_begin(self, progress: Progress, run: str) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_begin(progress, run)

    def on_step(self, step: Step) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_step(step)

    def on_epoch(self, epoch: Epoch) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_epoch(epoch)

    def on_end(self, run: Run) -> None:
        """See `Callback`."""
        for callback in self.callbacks:
            callback.on_end(run)


class ProgressBar(Callback):
    """Shows how far an epoch is: num_events of each, which have the noun `unit`, and so many epochs."""

    def __init__(self, num_events: int, unit: str, num_epochs: int, quiet: bool) -> None:
        self.num_events, self.unit, self.num_epochs, self.quiet = num_events, unit, num_epochs, quiet

    @contextlib.contextmanager
    def phase(self, name: str, progress: Progress) -> Iterator[None]:
        """See `Callback`."""
        # Waiting for a batch is a phase within the steps, and must not begin a second bar.
        # The other phases have no events to count.
        if name != "steps":
            yield
            return
        title, number = self.extent(progress)
        # A resumed epoch begins where its checkpoint was written, and not at 0.
        with stage(title, number, self.unit, done=progress.samples, quiet=self.quiet) as self._reached:
            yield

    def extent(self, progress: Progress) -> tuple[str, int]:
        """What is under way, in words, and how many events that has."""
        return f"epoch {progress.epoch + 1}/{self.num_epochs}", self.num_events

    def on_step(self, step: Step) -> None:
        """See `Callback`."""
        self._reached(step.progress.samples)


class WindowBar(ProgressBar):
    """Shows how far a window of a stream is."""

    def __init__(self, unit: str, quiet: bool) -> None:
        super().__init__(0, unit, 0, quiet)

    def extent(self, progress: Progress) -> tuple[str, int]:
        """See `ProgressBar`."""
        assert progress.stream is not None
        return f"window {progress.epoch + 1}", progress.stream.end - progress.stream.begin
