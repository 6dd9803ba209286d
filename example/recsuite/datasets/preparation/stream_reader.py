"""Segments of a stream: columns of the events that it has not learned, with what it keeps of the others.

The files are read from where the last reading ended. An event that is learned is not read again: its user
keeps it in a history, see `recent.RecentEvents`. So a segment costs as much as its events, however many the
stream has learned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.arrays import only, sorted_places
from recsuite.datasets.columns import Columns, load_columns
from recsuite.datasets.preparation.cache import (
    STREAM,
    VOCABULARY,
    cache_of,
    check_number,
    reading_folder,
    remove_owned,
    with_history,
)
from recsuite.datasets.preparation.growing_files import Growth, StreamFiles
from recsuite.datasets.preparation.joining import joined, restricted, with_histories
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.preparation.recent import Entities, RecentEvents
from recsuite.datasets.preparation.splits import describe_held
from recsuite.datasets.schema import ITEM, USER, RawData, Schema, with_columns
from recsuite.datasets.source import DATA_DEADLINE
from recsuite.datasets.streams import (
    HEAD,
    PRUNE_EVERY,
    SECONDS_PER_DAY,
    FilePosition,
    Frontier,
    Mark,
    StreamPosition,
    StreamSegment,
    StreamState,
    end_of_window,
    next_window,
    num_events_of_wrong_clock,
)
from recsuite.datasets.tables.files import File
from recsuite.errors import UserError, counted
from recsuite.files import explained, locked
from recsuite.ids import ids_of

if TYPE_CHECKING:
    from recsuite.datasets.tables.source import TableSource

# Marks of a file that are kept: with fewer, more is read again after a resume.
MOST_MARKS = 16
# Users out of a fixed vocabulary that are kept.
MOST_UNKNOWN = 2**16
# Late partitions that a note names.
MOST_NAMES = 3
# Position of an event that is held back.
NEVER = 2**53


class _Placed(NamedTuple):
    """Events, the place of the file of each in the names, int32, and its row there, int64."""

    raw: RawData
    file: np.ndarray
    row: np.ndarray


@dataclasses.dataclass
class _Unlearned:
    """Events that were read and are not learned.

    raw: the events, by file and row; file: place of each in the names, int32; row: its row there, int64;
    order: their places in the order of time, int32, without those held back. after: by the file and the rows
    of a mark, the number of events of the order after which all before it is learned. held_back: describes
    the others; empty without any. begin: number of events of the order that are learned.
    """

    raw: RawData
    file: np.ndarray
    row: np.ndarray
    order: np.ndarray
    after: dict[tuple[str, int], int]
    held_back: str
    begin: int = 0

    @property
    def left(self) -> np.ndarray:
        """Places of the events of the order that are not learned."""
        return self.order[self.begin :]

    @property
    def times(self) -> np.ndarray:
        """Times of these, int64."""
        return self.raw.events.time[self.left]

    def num_before(self, name: str, mark: FilePosition) -> int:
        """Return after how many more events of the order all before a mark of a file is learned."""
        # A mark of a reading without events is known at the next one.
        return max(0, self.after.get((name, mark.rows), NEVER) - self.begin)


class StreamReader:
    """Reader of a stream on the first process of a machine. Not collective.

    files: of its events; recent: what the stream keeps of learned events; position: of the next segment.
    """

    def __init__(
        self,
        config: Config,
        files: StreamFiles,
        state: StreamState,
        recent: RecentEvents,
        owner: str,
        trains: bool = True,
    ) -> None:
        # Without a training no users are looked at again: all events are one segment.
        self._trains = trains
        self._config, self._span, self._owner = config, config.stream.span, owner
        self._data = dataclasses.replace(config.data, split=STREAM, duplicates="keep")
        self.recent, self._first, self.position = recent, state.first, state.position
        self._vocabulary = state.vocabulary
        # Places in each file up to which it was read, the newest last. All before the first is learned.
        self._marks = {name: [position] for name, position in state.position.files.items()}
        # Number of rows of each file that were ever read: later ones may be late.
        self._seen = {name: position.read for name, position in state.position.files.items()}
        self._files = files
        self._source: TableSource | None = None
        # Attributes before the readings since the last columns.
        self._before: dict[str, Any] = {}
        self._events: _Unlearned | None = None
        self._names: list[str] = []
        # Partitions for which the windows wait.
        self._late = ""
        self._number = 0
        self._notes: list[str] = []

    # --- reading ---

    def read(self, ends: Mapping[str, Any]) -> list[str]:
        """Read what the files have beyond the last reading, and return what is to be told of it.

        ends: see `StreamFiles.ends`.

        Raises:
            UserError: when it cannot be read, or files changed before where they were read up to. Nothing is
                changed then.
        """
        self._source = source = self._files.source()
        names = self._files.names(source, ends)
        gone = sorted(self._marks.keys() - set(names))
        for name in gone:
            if left := self._seen[name] - self._marks[name][0].rows:
                raise UserError(
                    f"{self._config.stream.topic or source.folder}/{name} is gone, and {left:,} of its rows "
                    "may not be learned. Fix: put it back, or train anew with --move_aside instead of "
                    "--resume."
                )
        with self._undoing():
            self._read_growth(source, names, ends)
            while self._files.unread(ends, self._known()):
                self._read_growth(source, names, ends)
        for name in gone:
            # A stream may have new files for ever.
            del self._marks[name], self._seen[name]
        notes, self._files.notes = self._files.notes, []
        before, self._late = self._late, self._late_partitions()
        if self._late not in ("", before):
            notes.append(
                f"a window waits until {self._late} has a newer event, or others are newer by "
                f"--partition_delay {self._config.stream.partition_delay}"
            )
        return notes

    @contextlib.contextmanager
    def _undoing(self) -> Iterator[None]:
        """Undo the readings since the last columns if one fails: its files may be mended."""
        try:
            yield
        except UserError:
            for name, value in self._before.items():
                setattr(self, name, value)
            self._before = {}
            raise

    def _known(self) -> dict[str, FilePosition]:
        """Return the positions up to which the files were read."""
        return {name: marks[-1] for name, marks in self._marks.items()}

    def _read_growth(self, source: TableSource, names: list[str], ends: Mapping[str, Any]) -> None:
        is_first, cache = not self._marks, cache_of(source, self._data)
        kept = reading_folder(cache, self._owner)
        said = f"Cannot write the columns of {source.folder} to {cache}"
        advice = "give --cache_dir a folder with space that can be written"
        # Hidden from the parts beside it. After a kill it has files of an earlier reading.
        temporary = kept / ".files"
        with explained(said, advice):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        try:
            growth = self._files.growth(source, ends, self._known(), temporary)
            parts = [part.file for part in growth.values() if part.file is not None]
            if not parts:
                if self._events is not None and names == self._names:
                    self._check_rows(growth, {})
                    self._mark(growth, {})
                    return
                # No events, with the columns and the types that those of a reading have.
                (nothing := temporary / "nothing.jsonl").write_text("\n")
                parts = [File(str(nothing), "jsonl", is_more=True)]
            with explained(said, advice):
                tables = dataclasses.replace(source.tables, events=tuple(parts))
                # Only a first reading may be repeated by another training.
                is_kept = is_first and bool(growth) and self._files.keeps_parts
                source = dataclasses.replace(source, tables=tables)
                raw = read(source, self._data, cache, None if is_kept else kept)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if is_first:
            check_number(source, self._data, len(raw.events.time) + raw.num_skipped)
        of_file = raw.events_per_file
        counts = {
            name: of_file[source.tables.name_of(part.file)]
            for name, part in growth.items()
            if part.file is not None
        }
        self._check_rows(growth, counts)
        self._add(dataclasses.replace(raw, events_per_file=counts), source.schema, names, growth)

    def _add(
        self,
        raw: RawData,
        schema: Schema,
        names: list[str],
        growth: Mapping[str, Growth],
    ) -> None:
        """Add the events of a reading to the unlearned ones, without late ones."""
        counts = raw.events_per_file
        read, num_late = self._without_late(raw, *self._places_of(counts, names, growth), names)
        raw, file, row = read if self._events is None else self._with_held(self._events, read, names, schema)
        order, held_back = self._order_of(raw, schema, names, file, row)
        notes = [*read.raw.skipped]
        if num_late:
            one = f"{schema.label} is older than the trained events, and is skipped"
            several = f"{schema.labels} are older than the trained events, and are skipped"
            notes.append(counted(num_late, one, several))
        # Only now, when the reading cannot fail any more.
        if not self._before:
            self._before = {name: getattr(self, name) for name in ("_events", "_names", "_notes", "position")}
            self._before |= {name: {**getattr(self, name)} for name in ("_marks", "_seen")}
        self._mark(growth, counts)
        after = self._learned_after(names, file, row, raw.events.time, order)
        self._events, self._names = _Unlearned(raw, file, row, order, after, held_back), names
        self._notes = [*self._notes, *notes]
        num_late += self.position.num_late
        self.position = dataclasses.replace(self.position, num_late=num_late)

    def _places_of(
        self, counts: Mapping[str, int], names: list[str], growth: Mapping[str, Growth]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the file and the row of each event of a reading. counts: number of events of each file."""
        place = {name: number for number, name in enumerate(names)}
        file = np.repeat([place[name] for name in counts], [*counts.values()]).astype(np.int32)
        rows = [_first_row(growth[name], number) + np.arange(number) for name, number in counts.items()]
        return file, np.concatenate([np.zeros(0, np.int64), *rows])

    def _without_late(
        self, raw: RawData, file: np.ndarray, row: np.ndarray, names: list[str]
    ) -> tuple[_Placed, int]:
        """Return the events of a reading that are neither learned nor late, and the number of late ones."""
        # A file that is not read in parts was read again from its begin.
        known = np.array([self._marks[name][-1].rows if name in self._marks else 0 for name in names])
        seen = np.array([self._seen.get(name, 0) for name in names])
        place = (raw.events.time, file, row, names)
        is_late = self.position.predicted.includes(*place) & (row >= seen[file])
        is_left = (row >= known[file]) & ~is_late & ~self.position.frontier.includes(*place)
        left = raw if is_left.all() else only(raw, is_left)
        left = dataclasses.replace(left, num_skipped=raw.num_skipped)
        return _Placed(left, file[is_left], row[is_left]), int(np.count_nonzero(is_late))

    def _with_held(self, held: _Unlearned, read: _Placed, names: list[str], schema: Schema) -> _Placed:
        """Return the unlearned events and those of a reading, by file and row."""
        place = {name: number for number, name in enumerate(names)}
        # Other files may have come between, and those of which all is learned may be gone.
        moved = np.array([place.get(name, -1) for name in self._names], np.int32)
        mask = moved[held.file] >= 0
        mask[held.order[: held.begin]] = False
        file = np.concatenate([moved[held.file[mask]], read.file])
        row = np.concatenate([held.row[mask], read.row])
        raw = joined(restricted(held.raw, np.flatnonzero(mask)), read.raw, schema)
        order = np.lexsort((row, file))
        raw = dataclasses.replace(raw, events=with_columns(raw.events, lambda column: column[order]))
        return _Placed(raw, file[order], row[order])

    def _check_rows(self, growth: Mapping[str, Growth], counts: Mapping[str, int]) -> None:
        """Refuse files without rows that they had. counts: number of rows of each that were read."""
        for name, part in growth.items():
            number, seen = counts.get(name, 0), self._seen.get(name, 0)
            begin = _first_row(part, number)
            if part.rows is None and begin < self._marks[name][-1].rows:
                raise UserError(
                    f"{name} has {number:,} rows that follow the learned ones and were read, and there were "
                    f"{seen - self._marks[name][-1].rows:,}: it is another topic, or a compacted one. Fix: "
                    "give the topic that this stream has learned from, or train anew with --move_aside "
                    "instead of --resume."
                )
            if begin + number < seen:
                raise UserError(
                    f"{name} has {begin + number:,} rows, and {seen:,} of it were read: they are not those "
                    "that this stream has learned from. Fix: put the file back as it was, or train anew "
                    "with --move_aside instead of --resume."
                )

    def _mark(self, growth: Mapping[str, Growth], counts: Mapping[str, int]) -> None:
        """Add the marks of a reading. counts: number of rows of each file that were read."""
        for name, part in growth.items():
            rows = part.end.read if part.rows is None else part.rows + counts.get(name, 0)
            mark = dataclasses.replace(part.end, rows=rows, read=rows, read_bytes=part.end.bytes)
            self._marks[name] = _thinned([*self._marks.get(name, [FilePosition(bytes=part.begin)]), mark])
            self._seen[name] = max(rows, self._seen.get(name, 0))

    def _order_of(
        self,
        raw: RawData,
        schema: Schema,
        names: list[str],
        file: np.ndarray,
        row: np.ndarray,
    ) -> tuple[np.ndarray, str]:
        """Return the places of the events in the order of time, and a note on those of a wrong clock."""
        order, position = sorted_places(raw.events.time), self.position
        times = raw.events.time[order]
        if times[:1].min(initial=0) < 0:
            raise UserError(f"A stream of {schema.labels} from before 1970 is not known; leave --stream out.")
        learned = position.frontier.time if self._first else -1
        held = num_events_of_wrong_clock(times, time.time(), learned, position.first_time, self._first)
        said = ""
        if held:
            first = order[-held]
            before = int(times[-held - 1]) if held < len(times) else learned
            said = describe_held(
                schema, held, (names[file[first]], int(row[first])), int(times[-held]), before
            )
            ahead = int(np.count_nonzero(times[-held:] > time.time() + SECONDS_PER_DAY))
            said += f"; a --resume skips {ahead:,} over a day ahead of the clock" if ahead else ""
        order = order[: len(order) - held]
        return order, said

    def _learned_after(
        self, names: list[str], file: np.ndarray, row: np.ndarray, times: np.ndarray, order: np.ndarray
    ) -> dict[tuple[str, int], int]:
        """Return after how many events of the order all before a mark is learned, by its file and rows.

        The events are those of `_Unlearned`.
        """
        rank = np.full(len(row), NEVER)
        # An event of the future would have its file read again from there after each resume, for years.
        rank[times > time.time() + SECONDS_PER_DAY] = 0
        rank[order] = 1 + np.arange(len(order))
        begins = np.searchsorted(file, np.arange(len(names) + 1))
        after = {}
        for name, begin, end in zip(names, begins[:-1], begins[1:], strict=True):
            highest = np.maximum.accumulate(rank[begin:end])
            for mark in self._marks.get(name, ()):
                number = int(np.searchsorted(row[begin:end], mark.rows))
                after[name, mark.rows] = int(highest[number - 1]) if number else 0
        return after

    # --- columns ---

    @property
    def has_more(self) -> bool:
        """True if events were read that are not learned."""
        return self._events is not None and len(self._events.left) > 0

    @property
    def is_due(self) -> bool:
        """True if the next window is complete."""
        assert self._events is not None
        until = self._until()
        return next_window(self._events.times, self._first, self._span, until, self._first) is not None

    def _until(self) -> int | None:
        """Return the time for `next_window`."""
        events, stream = self._events, self._config.stream
        assert events is not None
        if not (self._trains and stream.follow_data):
            return None
        times = events.times
        if not len(times):
            return self.position.predicted.time
        if stream.delay is None or not self._span.is_time:
            return int(times[-1])
        return int(max(self._newest().min(), times[-1] - stream.delay.amount, times[0]))

    def _newest(self) -> np.ndarray:
        """Return the time of the newest event of each partition, int64 [names]."""
        events = self._events
        assert events is not None
        newest = np.full(len(self._names), self.position.predicted.time)
        np.maximum.at(newest, events.file[events.left], events.times)
        return newest

    def _late_partitions(self) -> str:
        """Return the names of the partitions without which a window would be complete; "" if none is."""
        assert self._events is not None
        until, times = self._until(), self._events.times
        if until is None or not len(times) or not self._span.is_time:
            return ""
        # The ends of the windows that are complete, and that would be.
        ends = [time // self._span.amount * self._span.amount for time in (until, int(times[-1]))]
        if not ((times >= ends[0]) & (times < ends[1])).any():
            return ""
        late = [name for name, time in zip(self._names, self._newest(), strict=True) if time <= until]
        return f"{', '.join(late[:MOST_NAMES])}{', ...' * (len(late) > MOST_NAMES)}"

    def columns(self) -> Columns:
        """Write and return the columns of the next segment, which is empty if all is learned.

        Raises:
            UserError: when they cannot be written, or a new stream has no event. Then the last reading is
                undone: its files may be mended.
        """
        with self._undoing():
            columns = self._columns()
        self._before = {}
        return columns

    def _columns(self) -> Columns:
        source, events = self._source, self._events
        assert source is not None
        assert events is not None
        if not (self._first or self.has_more or self._vocabulary):
            raise UserError(
                f"A stream requires {source.schema.labels}, and there are none; give files that hold some."
            )
        cache = cache_of(source, self._data)
        if not self._first:
            self.position = _with_means(self.position, events)
        until = self._until()
        order, num_left = self._next_order(events, until)
        if not self._vocabulary and len(order) < len(events.order):
            self._vocabulary = self._whole_vocabulary(events, source.schema, cache)
        raw, of_raw = events.raw, order
        if self._first or num_left:
            raw, of_raw = restricted(events.raw, order), np.arange(len(order))
            raw = with_histories(raw, source.schema, self.recent)
        segment = StreamSegment(
            self._first, num_left, tuple(self._names), self._marks_of(events), self.position, until
        )
        # Imported here: a rank that does not make columns needs no compiler of loops.
        from recsuite.datasets.preparation.making import StreamPart, make_columns

        stream = StreamPart(
            order=of_raw,
            file=events.file[order],
            row=events.row[order],
            vocabulary=self._vocabulary,
            sums=self.recent.sums_of(_ids_of(raw, source.schema)),
            notes=[*self._notes, *filter(None, [events.held_back])],
            segment=segment,
        )
        folder = cache / f"{STREAM}_{self._owner}-{self._number}"
        self._number += 1
        advice = "give --cache_dir a folder with space that can be written"
        with (
            explained(f"Cannot write the columns of {source.folder} to {cache}", advice),
            locked(cache / ".lock", f"writing columns to {cache}", DATA_DEADLINE),
        ):
            shutil.rmtree(folder, ignore_errors=True)
            make_columns(folder, raw, source.schema, self._data, self._config.runtime.seed, stream=stream)
        columns, fault = load_columns(folder, source.folder, source.schema, every_byte=False)
        assert columns is not None, fault
        assert columns.segment is not None
        self.position, self._notes = columns.segment.position, []
        self._vocabulary = self._vocabulary or (folder / VOCABULARY).read_text()
        return with_history(columns, self._config)

    def _next_order(self, events: _Unlearned, until: int | None) -> tuple[np.ndarray, int]:
        """Return the places of the next segment's events, and the number of events after them."""
        order = events.left
        if not self._trains:
            return order, 0
        if until is not None:
            order = order[: np.searchsorted(events.times, until, side="right")]
        # Where the kept users are looked at again: the same place however the events came.
        most = PRUNE_EVERY - self._first % PRUNE_EVERY
        if len(order) <= most:
            return order, 0
        times = events.raw.events.time[order]
        end = end_of_window(times, self._first + most - 1, self._span, self._first) - self._first
        return order[:end], max(0, len(order) - end)

    def _whole_vocabulary(self, events: _Unlearned, schema: Schema, cache: Path) -> str:
        """Return the vocabulary of all events that the first reading found."""
        from recsuite.datasets.preparation.making import vocabulary_of

        folder = reading_folder(cache, self._owner)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            return vocabulary_of(Path(temporary), events.raw, events.order, schema)

    def _marks_of(self, events: _Unlearned) -> tuple[Mark, ...]:
        """Return the marks of all files, each with the position up to which all before it is learned."""
        return tuple(
            Mark(name, mark, min(NEVER, self._first + events.num_before(name, mark)))
            for name in self._names
            for mark in self._marks.get(name, ())
        )

    def arrays(self, position: int, is_delta: bool) -> dict[str, np.ndarray]:
        """Return what the stream keeps at a position, see `RecentEvents.arrays`."""
        self.advance(position)
        return self.recent.arrays(is_delta)

    def ids_of(self, entity: str, position: int) -> np.ndarray:
        """Return the ids of the kept users or items at a position, as of a dynamic table, int64 [n]."""
        self.advance(position)
        # In order: the same on any machine.
        return ids_of(sorted(self._kept(entity).slot_of))

    def keep(self, entity: str, mask: np.ndarray) -> None:
        """Remove the users or items without a mark, bool [n], in the order of `ids_of`."""
        kept = self._kept(entity)
        slots = kept.find(sorted(kept.slot_of))[~mask]
        if entity == USER:
            self.recent.remove_users(slots)
        else:
            # Those of histories stay.
            self.recent.items.remove(np.setdiff1d(slots, self.recent.lists.items()))

    def keep_known(self, entity: str) -> None:
        """Remove users or items out of a fixed vocabulary, except `MOST_UNKNOWN` with the most events."""
        kept, source = self._kept(entity), self._source
        assert source is not None
        known = {*json.loads(self._vocabulary)[source.schema.name_of(entity)]}
        slots = kept.find(sorted(kept.slot_of))
        unknown = [
            (-kept.counts[slot], kept.ids[slot], slot) for slot in slots if kept.ids[slot] not in known
        ]
        removed = [slot for _, _, slot in sorted(unknown)[MOST_UNKNOWN:]]
        self.keep(entity, ~np.isin(slots, removed))

    def _kept(self, entity: str) -> Entities:
        return self.recent.users if entity == USER else self.recent.items

    def remove_before(self, columns: Columns) -> None:
        """Remove the columns of earlier segments, and those of a training that was killed."""
        remove_owned(Path(columns.folder).parent, self._owner, Path(columns.folder))

    def close(self) -> None:
        """Remove the columns."""
        if self._source is not None:
            remove_owned(cache_of(self._source, self._data), self._owner)

    # --- learning ---

    def advance(self, position: int) -> None:
        """Learn the events up to a position of the stream: only their users' histories keep them."""
        events = self._events
        if events is None or position == self._first:
            return
        assert self._first < position <= self._first + len(events.order) - events.begin
        order = events.order[events.begin : events.begin + position - self._first]
        raw, source = events.raw, self._source
        assert source is not None
        columns = (raw.events.user, raw.events.item, raw.events.label, raw.events.time)
        self.recent.learn(_ids_of(raw, source.schema), *(column[order] for column in columns))
        last = order[-1]
        name = self._names[events.file[last]]
        frontier = Frontier(int(raw.events.time[last]), name, int(events.row[last]))
        self.position = dataclasses.replace(self.position, frontier=frontier, predicted=frontier)
        events.begin += len(order)
        self._first = position
        # What is learned is not read again.
        self._drop_marks()

    def _drop_marks(self) -> None:
        """Remove the marks of each file before the newest one up to which everything is learned."""
        events = self._events
        assert events is not None
        for name in self._names:
            marks = self._marks.get(name, [])
            learned = [mark for mark in marks if events.num_before(name, mark) == 0]
            if learned:
                self._marks[name] = marks[marks.index(learned[-1]) :]


def _ids_of(raw: RawData, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Return the raw ids of users and of items."""
    return raw.users[schema.column_of(USER)].to_numpy(), raw.items[schema.column_of(ITEM)].to_numpy()


def _thinned(marks: list[FilePosition]) -> list[FilePosition]:
    """Return the marks of a file, every second one if they are too many; the first and the last stay."""
    return marks if len(marks) <= MOST_MARKS else [*marks[:-1:2], marks[-1]]


def _first_row(part: Growth, number: int) -> int:
    """Return the number of rows of a file before a part, which has so many."""
    # The rows that a topic still has are numbered from their end, which was read before.
    return part.end.read - number if part.rows is None else part.rows


def _with_means(position: StreamPosition, events: _Unlearned) -> StreamPosition:
    """Return the position at the begin of a stream with the means of the first events."""
    head, columns = events.order[:HEAD], events.raw.events
    if not len(head):
        return position
    return dataclasses.replace(
        position,
        first_time=int(columns.time[head[0]]),
        mean_label=float(columns.label[head].mean(dtype=np.float64)),
        mean_weight=1.0 if columns.weight is None else float(columns.weight[head].mean(dtype=np.float64)),
    )
