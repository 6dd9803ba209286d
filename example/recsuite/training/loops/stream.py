"""A stream of events in the order of time: each window is first predicted, then learned from once."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recsuite.checkpoint.storage.manifest import VOCABULARY
from recsuite.checkpoint.storage.stream_progress import StreamProgress
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.opening import LOOK_EVERY, Following, find_same, load
from recsuite.datasets.preparation.cache import owner_of, remove_owned
from recsuite.datasets.schema import ENTITIES, UNKNOWN_ROW
from recsuite.datasets.streams import Past, Prefix, Rule, Window, check_prefix, next_window, num_empty
from recsuite.errors import UserError, counted
from recsuite.runtime.process import broadcast_from_rank0, launch_name, raise_on_all
from recsuite.training.callbacks import Callback, Run, TrainedWindow, WindowBar
from recsuite.training.evaluation import PredictionEvaluator
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.loops.loop import Training, TrainingPass
from recsuite.training.loops.saying import WindowLines
from recsuite.training.optimizer import Constant
from recsuite.training.weights import fold_scale


class StreamLoop(Training):
    """A training along a stream. See `Training`."""

    def make_bar(self) -> Callback:
        """See `Training`."""
        return WindowBar(self.unit, quiet=self.context.rank != 0)

    def prepare(self) -> None:
        """See `Training`: here the place in the stream is found."""
        self.span = self.config.stream.span
        self.following = self.data.following
        self.lines = WindowLines(self.task, self.unit, self.context)
        self.loader = contextlib.ExitStack()
        self.owner = owner_of(broadcast_from_rank0(lambda: owner_name(self.config.checkpoint)))
        # Of a training that was killed.
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
        """Keep what tells events that come later, and those that came too late."""
        stream = dataclasses.replace(stream, events_per_file=self.columns.events_per_file, late=late)
        self.progress = dataclasses.replace(self.progress, stream=stream)

    @property
    def stream(self) -> StreamProgress:
        """Where the stream is."""
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
        # Checkpoints that are still being written copy the vocabulary of the last ones.
        if not self.config.checkpoint.writes and self.context.local_rank == 0:
            remove_owned(Path(self.columns.folder).parent, self.owner)

    def _next(self, lines: WindowLines) -> Window | None:
        """The window under way, or the next one; None at the end of data that are not followed."""
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
                # It may never end, which is where others say it.
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
        """Predict a window, unless that was done before; the rest of it is to be learned."""
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
        # Before a checkpoint is made of them.
        self.check_weights(self.checkpointer.changed)
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
        # An endless stream must not keep all of its losses.
        self.windows.append(dataclasses.replace(done, losses=done.losses[:0]))

    def _predict(self, window: Window) -> None:
        """Predict a window of which nothing was learned, and begin it."""
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
        """Go over to columns of the files as they are now, if they can be read. Collective.

        Raises:
            UserError: when what was learned from is not there as it was.
        """
        stream, before = self.stream, self.columns
        vocabulary = Path(before.folder, VOCABULARY).read_text()
        past = Past(vocabulary, stream.late, stream.events_per_file, stream.learned, self.owner)
        try:
            # What was asked to be made again was, when it was first read.
            columns = find_same(self.config.replaced(rebuild=False), self.context, past)
        except UserError as error:
            # Half of a file may have come, or an event before its item: the rest is another change.
            following.say_once(f"{error} The stream waits until the files change again.")
            return
        keys = columns.column("keys")
        raise_on_all(lambda: check_prefix(keys, stream.end, stream.digest, columns.source))
        self.prefix.keys = keys
        self._take_up(columns)
        # A rule that left nothing out need not be remembered: what comes later is under a later one.
        found_late = columns.num_late > before.num_late
        self._remember(stream, past.rules(columns.events_per_file) if found_late else stream.late)
        self.input_pipeline.loader.close()
        # An endless stream must not keep all that it had.
        self.loader.close()
        loader = self.loader.enter_context(load(columns, self.config, self.context, self.data.build))
        self.input_pipeline = InputPipeline(loader, self.phase)
        self.evaluator = PredictionEvaluator(self.task, self.input_pipeline, columns, self.context)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.on_growth(columns)
        self.context.say(describe_growth(before, columns))
        self._drop_columns()

    def _drop_columns(self) -> None:
        """Remove columns that this training made on its way, and that no rank reads any more. Collective."""
        raise_on_all(lambda: None)
        if self.context.local_rank == 0:
            used = Path(self.columns.folder)
            remove_owned(used.parent, self.owner, used)


def owner_name(config: CheckpointConfig) -> str:
    """Who has the columns that a training makes on its way: whoever writes its checkpoints, for two that
    follow the same data must not remove each other's.
    """
    return str(Path(config.save_dir).absolute()) if config.writes else launch_name()


def describe_growth(before: Columns, columns: Columns) -> str:
    """One line on files that have grown: how many events are new, and how many of those have an unknown user
    or item.
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
