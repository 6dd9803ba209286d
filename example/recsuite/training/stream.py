"""Windows of a stream: the next one, growth of its files, and lines about what was learned."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from datetime import datetime, timezone
from pathlib import Path

import numpy as np
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsuite.config.config import Config
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader
from recsuite.datasets.opening import Data, load, open_same_columns
from recsuite.datasets.preparation.baselines import PastBiases
from recsuite.datasets.preparation.cache import VOCABULARY, owner_of, remove_owned
from recsuite.datasets.schema import ENTITIES, ITEM, UNKNOWN_ROW, USER
from recsuite.datasets.streams import (
    AT_ONCE,
    Prefix,
    Rule,
    StreamState,
    Window,
    check_prefix,
    next_window,
    num_empty,
)
from recsuite.errors import UserError, counted, format_metric
from recsuite.metrics import Metrics
from recsuite.models.tasks import TASKS, WorkerTask
from recsuite.places import folder_at
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, launch_name, raise_on_all
from recsuite.training.callbacks import TrainedWindow
from recsuite.training.evaluation import Evaluator, PredictionEvaluator
from recsuite.training.progress import Progress, StreamProgress, describe_step


class StreamWindows:
    """Windows of a stream's events, in columns that are replaced when the files of the data have grown.

    columns: the current ones; following: looks for growth, None if the data are not followed. Collective:
    every rank makes one, and makes the same calls.
    """

    def __init__(self, data: Data, config: Config, context: RuntimeContext) -> None:
        self.following, self._data, self._config, self._context = data.following, data, config, context
        self._span, self._is_answers = config.stream.span, TASKS[config.model.task].evaluation == "answers"
        self._loader = contextlib.ExitStack()
        self._owner = owner_of(broadcast_from_rank0(lambda: owner_name(config.checkpoint)))
        self._read(data.columns)
        # Columns of a training that was killed.
        self.drop_columns()

    def begin(self, stream: StreamProgress | None) -> StreamProgress:
        """Return the progress of the stream, with what later reads of the data need."""
        stream, columns, stream_state = stream or StreamProgress(), self.columns, self._data.stream_state
        self._prefix = Prefix(columns.column("keys"), stream.end)
        self._learn_biases(stream)
        return self._noted(stream, stream_state.rules(columns.events_per_file) if columns.num_late else ())

    def _read(self, columns: Columns) -> None:
        # Mapped now, because their files may be removed.
        self.columns, self._times, self._labels = columns, columns.column("time"), columns.column("rating")
        self._events = columns.column("rows")

    def _noted(self, stream: StreamProgress, late: tuple[Rule, ...]) -> StreamProgress:
        """Add the data that identify later events, and the rules for events that came too late."""
        return dataclasses.replace(stream, events_per_file=self.columns.events_per_file, late=late)

    def next(self, stream: StreamProgress) -> Window | None:
        """Return the window under way, or the next one; None if there is none yet."""
        if stream.is_under_way:
            return Window(stream.begin, stream.end)
        return next_window(self._times, stream.end, self._span, is_open=self.following is not None)

    def _learn_biases(self, stream: StreamProgress) -> None:
        """Restart the baseline from all events that were predicted."""
        columns = self.columns
        sizes = columns.num_users, columns.num_items
        self._biases = PastBiases(sizes, columns.mean_label, self._is_answers)
        for begin in range(0, stream.end, AT_ONCE):
            self._biases.learn(*self._events_of(Window(begin, min(begin + AT_ONCE, stream.end))))

    def _events_of(self, window: Window) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return users, items and what is predicted of the events of a window, [n] each."""
        events, labels = self._events[window.begin : window.end], self.labels_of(window)
        if self._is_answers:
            labels = labels >= self.columns.schema.liked_label
        return events[USER], events[ITEM], labels

    def predict_by_biases(self, window: Window) -> np.ndarray:
        """Predict the next window by the baseline, float64 [n]; then the baseline learns it."""
        user, item, label = self._events_of(window)
        predicted = self._biases.predict(user, item)
        self._biases.learn(user, item, label)
        return predicted

    def begun(
        self, stream: StreamProgress, window: Window, predicted: Metrics, biases: Metrics
    ) -> StreamProgress:
        """Return the progress after a window was predicted, and before any event of it is learned.

        predicted, biases: the metrics of the model and of the baseline.
        """
        first_time, last_time = self.times_of(window)
        return dataclasses.replace(
            stream.with_window(predicted, biases, len(window)),
            begin=window.begin,
            end=window.end,
            begins_at=first_time,
            time=last_time,
            digest=self._prefix.extend(window.end),
        )

    def times_of(self, window: Window) -> tuple[int, int]:
        """Return the times of the first and the last event of a window."""
        return int(self._times[window.begin]), int(self._times[window.end - 1])

    def labels_of(self, window: Window) -> np.ndarray:
        """Return the first labels of the events of a window, float32 [n]."""
        return np.asarray(self._labels[window.begin : window.end])

    def num_empty(self, stream: StreamProgress) -> int:
        """Return the number of windows without events so far."""
        return num_empty(self._times, stream.end, self._span)

    def describe_wait(self, stream: StreamProgress) -> str:
        """Describe the wait for more events in one line."""
        unit, number = self.columns.schema.labels, len(self._times) - stream.end
        said = f"waiting for more {unit} in {self.columns.source}"
        if number == 0:
            return said
        some = counted(number, unit[:-1], unit)
        return f"{said}; {some} held until their window ends"

    def grow(self, stream: StreamProgress) -> StreamProgress | None:
        """Switch to columns of the files as they are now; None if they cannot be read yet. Then `load`.

        Raises:
            UserError: when learned events are missing or changed.
        """
        before = self.columns
        vocabulary = Path(before.folder, VOCABULARY).read_text()
        stream_state = StreamState(
            vocabulary, stream.late, stream.events_per_file, stream.learned, self._owner
        )
        try:
            # --rebuild was done when the data were first read.
            columns = open_same_columns(self._config.replaced(rebuild=False), self._context, stream_state)
        except UserError as error:
            assert self.following is not None
            # Possibly half of a file has come, or an event before its item: the next change brings the rest.
            self.following.report_once(f"{error} The stream waits until the files change again.")
            return None
        keys = columns.column("keys")
        raise_on_all(lambda: check_prefix(keys, stream.end, stream.digest, columns.source))
        self._prefix.keys = keys
        self._read(columns)
        # Users and items may have other positions now.
        self._learn_biases(stream)
        # A rule that excluded no event need not be saved: later events are under a later rule.
        has_late = columns.num_late > before.num_late
        return self._noted(stream, stream_state.rules(columns.events_per_file) if has_late else stream.late)

    def load(self) -> BatchLoader:
        """Return a loader of the current columns; the one before ends."""
        # An endless stream must not keep all earlier loaders.
        self._loader.close()
        build = self._data.build
        return self._loader.enter_context(load(self.columns, self._config, self._context, build))

    def drop_columns(self) -> None:
        """Remove columns that this training made and that no rank reads any more."""
        raise_on_all(lambda: None)
        if self._context.local_rank == 0:
            used = Path(self.columns.folder)
            remove_owned(used.parent, self._owner, used)

    def close(self) -> None:
        """End the loader, and remove the columns of a training without checkpoints. Not collective."""
        self._loader.close()
        # Checkpoints that are still being written copy the vocabulary of the last columns.
        if not self._config.checkpoint.writes and self._context.local_rank == 0:
            remove_owned(Path(self.columns.folder).parent, self._owner)


def owner_name(config: CheckpointConfig) -> str:
    """Return the name of the owner of the columns that a training makes.

    This is the folder of its checkpoints, or else this launch. Two trainings on the same data must not remove
    each other's columns.
    """
    return str(folder_at(config.save_dir).absolute()) if config.writes else launch_name()


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
            unknown.append(f"{number:,} of {schema.name_of(entity)}s out of vocabulary")
    said = f"{columns.source} has {counted(new, f'new {schema.label}')}"
    late = columns.num_late - before.num_late
    if late:
        were = counted(late, "other", "others")
        said += f", and {were} older than the learned events, skipped"
    held = [note for note in columns.notes if " held back until " in note and note not in before.notes]
    said = "; ".join([said, *held])
    return said + (f" ({', '.join(unknown)})" if unknown else "")


# Minimum seconds between two lines about windows.
AT_LEAST = 2.0


class WindowLog:
    """Log lines about windows, several windows in one line."""

    def __init__(self, task: WorkerTask, unit: str, context: RuntimeContext) -> None:
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


def describe_windows(windows: list[TrainedWindow], task: WorkerTask, unit: str) -> str:
    """Describe consecutive windows in one line; unit: the noun for events."""
    first, last = windows[0], windows[-1]
    numbers = f"window {last.number}" if len(windows) == 1 else f"windows {first.number} to {last.number}"
    number, seconds = sum(window.num_events for window in windows), sum(window.seconds for window in windows)
    name = task.main_metric
    shown = [("", last.validation[name])] if len(windows) == 1 else []
    shown.append((" of all windows so far", last.overall[name]))
    errors = ", ".join(f"{task.main_label}{of} {format_metric(value)}" for of, value in shown)
    if name in last.biases:
        errors += f" (biases {format_metric(last.biases[name])})"
    return (
        f"{numbers} ({day(first.first_time)} to {day(last.last_time)}): {counted(number, unit[:-1], unit)}, "
        f"predicted with {errors}, {number / max(seconds, 1e-9):,.0f} {unit}/s trained"
    )


def day(seconds: int) -> str:
    """Format a time in seconds since 1970, to the minute."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")


def report_rest_of_stream(
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
        context.say(f"{step} was trained on all {end:,} {unit} of the stream: none is left to predict")
        return
    labels = np.asarray(columns.column("rating")[begin:end])
    metrics = evaluator.window(model, progress.epoch, (begin, end), labels)
    name, label = evaluator.task.main_metric, evaluator.task.main_label
    many, error = counted(end - begin, unit[:-1], unit), format_metric(metrics[name])
    context.say(f"{step}: {many} after it, not trained on, predicted with {label} {error}")
