"""Windows of a stream: the next one, growth of its files, and lines about what was learned."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from datetime import datetime, timedelta, timezone

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader
from recsuite.datasets.opening import Data, load, open_segment
from recsuite.datasets.preparation.baselines import PastBiases
from recsuite.datasets.schema import ENTITIES, ITEM, UNKNOWN_ROW, USER
from recsuite.datasets.source import PREPARATION_DEADLINE
from recsuite.datasets.streams import (
    PRUNE_EVERY,
    FilePosition,
    Frontier,
    Window,
    next_window,
    num_empty_before,
)
from recsuite.errors import UserError, counted, format_metric
from recsuite.metrics import Metrics
from recsuite.models.tasks import TASKS, WorkerTask
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, raise_on_all
from recsuite.sharding.dynamic_ranks import have_rows
from recsuite.training.callbacks import TrainedWindow
from recsuite.training.evaluation import Evaluator, PredictionEvaluator
from recsuite.training.progress import Progress, StreamProgress, describe_step


class StreamWindows:
    """Windows of a stream's events, in columns of its stream_reader, which follow each other.

    columns: those of the current segment; following: looks for growth, None if the data are not followed. A
    `Window` has positions in the columns, and a `StreamProgress` has those in the stream. Collective: every
    rank makes one, and makes the same calls.
    """

    def __init__(self, data: Data, config: Config, context: RuntimeContext) -> None:
        self.following, self._data, self._config, self._context = data.following, data, config, context
        self._span, self._is_answers = config.stream.span, TASKS[config.model.task].evaluation == "answers"
        self._loader = contextlib.ExitStack()
        # One for all readings: the store of the ranks keeps the keys of each group for ever.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=PREPARATION_DEADLINE))
        self._open(data.columns)
        # Columns of a training that was killed.
        self.drop_columns()

    def begin(self, stream: StreamProgress | None) -> StreamProgress:
        """Return the progress of the stream."""
        stream = stream or StreamProgress(position=self._segment.position)
        # A window under way was predicted, and the baseline knows it.
        self._biases.learn(*self._events_of(self.window_of(stream)))
        return stream

    def _open(self, columns: Columns) -> None:
        assert columns.segment is not None
        # Mapped now, because their files may be removed.
        self.columns, self._segment = columns, columns.segment
        self._times, self._labels = columns.column("time"), columns.column("rating")
        self._events = columns.column("rows")
        self._files, self._rows = columns.column("file"), columns.column("file_row")
        user, item, of_all = (columns.column(f"past_{name}") for name in ("user", "item", "all"))
        self._biases = PastBiases(user, item, of_all, columns.mean_label, self._is_answers)

    def window_of(self, stream: StreamProgress) -> Window:
        """Return the window under way, which is empty if there is none."""
        return Window(stream.begin - self._segment.first, stream.end - self._segment.first)

    def next(self, stream: StreamProgress) -> Window | None:
        """Return the window under way, or the next one; None if these columns have no other."""
        if stream.is_under_way:
            return self.window_of(stream)
        first = self._segment.first
        window = next_window(self._times, stream.end, self._span, self._segment.until, first)
        return None if window is None else Window(window.begin - first, window.end - first)

    @property
    def has_more(self) -> bool:
        """True if events after those of the columns were read."""
        return self._segment.num_left > 0

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
        empty = num_empty_before(first_time, stream.time, self._span) if stream.end else 0
        return dataclasses.replace(
            stream.with_window(predicted, biases, len(window)),
            begin=self._segment.first + window.begin,
            end=self._segment.first + window.end,
            begins_at=first_time,
            time=last_time,
            num_empty=stream.num_empty + empty,
            position=dataclasses.replace(
                stream.position,
                files=self._files_at(self._segment.first + window.begin),
                predicted=self._frontier(window.end - 1),
            ),
        )

    def done(self, stream: StreamProgress) -> StreamProgress:
        """Return the progress after the window under way."""
        frontier = self._frontier(stream.end - self._segment.first - 1)
        position = dataclasses.replace(
            self._segment.position,
            files=self._files_at(stream.end),
            frontier=frontier,
            predicted=frontier,
        )
        return stream.done(position)

    def _files_at(self, learned: int) -> dict[str, FilePosition]:
        """Return the positions in the files before which all events are before a position of the stream."""
        files: dict[str, FilePosition] = {}
        for mark in self._segment.marks:
            # The first mark of a file is one up to which everything is learned.
            is_learned, end = mark.learned_at <= learned, mark.position
            before = end if is_learned else files.get(mark.file, end)
            files[mark.file] = dataclasses.replace(before, read=end.read, read_bytes=end.read_bytes)
        return files

    def _frontier(self, place: int) -> Frontier:
        """Return an event as the newest one of those up to it."""
        name = self._segment.names[self._files[place]]
        return Frontier(int(self._times[place]), name, int(self._rows[place]))

    def times_of(self, window: Window) -> tuple[int, int]:
        """Return the times of the first and the last event of a window."""
        return int(self._times[window.begin]), int(self._times[window.end - 1])

    def labels_of(self, window: Window) -> np.ndarray:
        """Return the first labels of the events of a window, float32 [n]."""
        return np.asarray(self._labels[window.begin : window.end])

    def describe_wait(self, stream: StreamProgress) -> str:
        """Describe the wait for more events in one line."""
        unit, number = self.columns.schema.labels, self._segment.first + len(self._times) - stream.end
        said = f"waiting for more {unit} in {self.columns.source}"
        if number == 0:
            return said
        some = counted(number, unit[:-1], unit)
        return f"{said}; {some} held until their window ends"

    def grow(self, stream: StreamProgress) -> bool:
        """Switch to columns of the next events; False if they have no other window yet. Then `load`.

        Reads what the files have beyond the last reading, unless events of it are left.

        Raises:
            UserError: when what was learned is missing or changed.
        """
        following = None if self.has_more else self.following
        ends = None if following is None else dict(broadcast_from_rank0(lambda: following.known))
        try:
            columns = open_segment(self._data.stream_reader, self._context, stream.begin, ends, self._group)
        except UserError as error:
            if following is None:
                raise
            following.on_unreadable(error)
            return False
        if columns is None:
            return False
        self._open(columns)
        return True

    def prune(self, stream: StreamProgress, model: DistributedModelParallel) -> None:
        """Every `PRUNE_EVERY` events, remove the users and items without a row from what the stream keeps.

        Call it with the progress of a window that is trained on.
        """
        if stream.end // PRUNE_EVERY == stream.begin // PRUNE_EVERY:
            return
        reader, rank = self._data.stream_reader, self._context.rank
        dynamic = {table.name for table in self.columns.tables if table.feature.is_dynamic}
        # Every machine has the same ids in the same order.
        mine = {} if reader is None else {entity: reader.ids_of(entity, stream.end) for entity in ENTITIES}
        kept = broadcast_from_rank0(lambda: mine)
        for entity in ENTITIES:
            name = self.columns.schema.name_of(entity)
            if name in dynamic:
                ids = torch.from_numpy(kept[entity]).to(self._context.device)
                mask = have_rows(model, name, ids, rank)
                if reader is not None:
                    reader.keep(entity, mask.cpu().numpy())
            elif reader is not None:
                reader.keep_known(entity)

    def load(self) -> BatchLoader:
        """Return a loader of the current columns; the one before ends."""
        # An endless stream must not keep all earlier loaders.
        self._loader.close()
        build = self._data.build
        return self._loader.enter_context(load(self.columns, self._config, self._context, build))

    def drop_columns(self) -> None:
        """Remove columns that no rank reads any more."""
        raise_on_all(lambda: None)
        if self._data.stream_reader is not None:
            self._data.stream_reader.remove_before(self.columns)

    def close(self) -> None:
        """End the loader. Not collective."""
        self._loader.close()


def describe_growth(before: Columns, columns: Columns) -> str:
    """Describe the growth of files in one line.

    It has the number of new events, and how many of these have an unknown user or item.
    """
    assert before.segment is not None
    assert columns.segment is not None
    # Those before them were read earlier, and are not learned.
    num_held = before.segment.first + before.num_train - columns.segment.first
    schema, new = columns.schema, columns.num_train - num_held
    events = columns.column("rows")[num_held:]
    unknown = []
    for entity in ENTITIES:
        own = columns.column(f"{schema.name_of(entity)}_features")["features"][:, columns.place_of(entity)]
        number = int(np.count_nonzero(own[events[entity]] == UNKNOWN_ROW))
        if number:
            unknown.append(f"{number:,} of {schema.name_of(entity)}s out of vocabulary")
    said = f"{columns.source} has {counted(new, f'new {schema.label}')}"
    late = columns.segment.position.num_late - before.segment.position.num_late
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


def check_window(stream: StreamProgress, columns: Columns) -> None:
    """Refuse the columns of a resume or a load that have not all events of the window under way.

    Raises:
        UserError: with the number of those that they have.
    """
    assert columns.segment is not None
    times, files, rows = (columns.column(name) for name in ("time", "file", "file_row"))
    is_in_window = stream.position.predicted.includes(times, files, rows, columns.segment.names)
    left, number = int(np.count_nonzero(is_in_window)), stream.end - stream.begin
    if left != number:
        raise UserError(
            f"The {columns.schema.labels} after the first {stream.begin:,} of {columns.source} are not those "
            f"that this stream has learned from: {left:,} of {number:,} in its window under way are left. A "
            "stream continues with new files and with what is added at the end of files. Fix: put the files "
            "back as they were, or train anew with --move_aside instead of --resume."
        )


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
        UserError: when another checkpoint was read than the one that chose the events, or the data have not
            all events of its window under way.
    """
    # A ranking of a stream was refused with the flags.
    assert isinstance(evaluator, PredictionEvaluator)
    segment, stream = columns.segment, progress.stream or StreamProgress()
    assert segment is not None
    if segment.first != stream.begin:
        raise UserError(
            f"The checkpoint was replaced while the {columns.schema.labels} were read. Fix: start again."
        )
    check_window(stream, columns)
    # The columns begin with the window under way.
    begin, end = progress.samples, columns.num_train
    step, unit = describe_step(progress), columns.schema.labels
    if begin == end:
        learned = segment.first + end
        context.say(f"{step} was trained on all {learned:,} {unit} of the stream: none is left to predict")
        return
    labels = np.asarray(columns.column("rating")[begin:end])
    metrics = evaluator.window(model, progress.epoch, (begin, end), labels)
    name, label = evaluator.task.main_metric, evaluator.task.main_label
    many, error = counted(end - begin, unit[:-1], unit), format_metric(metrics[name])
    context.say(f"{step}: {many} after it, not trained on, predicted with {label} {error}")
