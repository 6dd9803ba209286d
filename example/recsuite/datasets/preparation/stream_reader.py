"""Segments of a stream: columns of the events that it has not learned, with what it keeps of the others.

The files are read from where the last reading ended. An event that is learned is not read again: its user
keeps it in a history, see `recent.RecentEvents`. So a segment costs as much as its events, however many the
stream has learned.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.arrays import only, sorted_places
from recsuite.datasets.columns import Columns, load_columns
from recsuite.datasets.preparation.cache import (
    STREAM,
    VOCABULARY,
    cache_of,
    check_stream,
    remove_owned,
    with_history,
)
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.preparation.recent import Entities, RecentEvents
from recsuite.datasets.preparation.splits import describe_held
from recsuite.datasets.schema import ITEM, USER, Codes, Events, RawData, Schema, with_columns
from recsuite.datasets.source import DATA_DEADLINE, locate, with_flags
from recsuite.datasets.streams import (
    PRUNE_EVERY,
    SECONDS_PER_DAY,
    TAIL_BYTES,
    FilePosition,
    Frontier,
    Mark,
    StreamSegment,
    StreamState,
    end_of_window,
    num_events_of_wrong_clock,
)
from recsuite.errors import UserError, counted
from recsuite.files import digest_of_part, explained, locked
from recsuite.ids import ids_of

if TYPE_CHECKING:
    import pandas

    from recsuite.datasets.tables.files import File
    from recsuite.datasets.tables.source import TableSource

# Marks of a file that are kept: with fewer, more is read again after a resume.
MOST_MARKS = 16
# Users out of a fixed vocabulary that are kept.
MOST_UNKNOWN = 2**16
# Bytes in which the last line end is searched.
AT_ONCE = 2**20
# Position of an event that is not in a segment.
NEVER = 2**53


@dataclasses.dataclass
class _Unlearned:
    """Events that were read and are not learned.

    raw: the events, by file and row; file: place of each in the names, int32; row: its row there, int64;
    order: their places in the order of time, int32, without those held back; begin: number of places of it
    that are learned.
    """

    raw: RawData
    file: np.ndarray
    row: np.ndarray
    order: np.ndarray
    begin: int = 0


class StreamReader:
    """Reader of a stream on the first process of a machine. Not collective.

    recent: what the stream keeps of learned events; position: of the next segment.
    """

    def __init__(
        self, config: Config, state: StreamState, recent: RecentEvents, owner: str, trains: bool = True
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
        self._source: TableSource | None = None
        # Attributes before the last reading.
        self._before: dict[str, Any] = {}
        self._events: _Unlearned | None = None
        self._names: list[str] = []
        self._number = 0
        self._notes: list[str] = []

    # --- reading ---

    def read(self, ends: Mapping[str, int]) -> None:
        """Read what the files have beyond the last reading. ends: size of each file, in bytes.

        Raises:
            UserError: when it cannot be read, or files changed before where they were read up to. Nothing is
                changed then.
        """
        source = with_flags(locate(self._data, self._config.runtime.seed), self._config.tables, self._data)
        self._source = source
        check_stream(source, self._config)
        parts, begins, marks = self._parts(source, ends)
        names = [source.tables.name_of(file) for file in source.tables.events]
        if not parts and self._events is None:
            # All is learned. The features of users and items are those of any file with rows, whose rows are
            # old: it gets no mark.
            part = next((file for file in source.tables.events if self._has_rows(source, file)), None)
            parts, begins = [part or source.tables.events[-1]], dict.fromkeys(names, 0)
        if not parts:
            return
        cache, is_first = cache_of(source, self._data), not self._marks
        advice = "give --cache_dir a folder with space that can be written"
        with explained(f"Cannot write the columns of {source.folder} to {cache}", advice):
            cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".reading-", dir=cache) as folder:
                # Only a first reading may be repeated by another training.
                kept = None if is_first else Path(folder)
                tables = dataclasses.replace(source.tables, events=tuple(parts))
                raw = read(dataclasses.replace(source, tables=tables), self._data, cache, kept)
        self._add(raw, source.schema, names, begins, marks)

    def _parts(
        self, source: TableSource, ends: Mapping[str, int]
    ) -> tuple[list[File], dict[str, int], dict[str, FilePosition]]:
        """Return the parts of files to read, the number of rows before each, and its end."""
        # Imported here: a rank that reads no files needs no Arrow.
        from recsuite.datasets.tables.formats import header_of

        parts: list[File] = []
        begins: dict[str, int] = {}
        marks: dict[str, FilePosition] = {}
        files = {source.tables.name_of(file): file for file in source.tables.events}
        for name, before in self._marks.items():
            if name not in files and before[0].rows < self._seen[name]:
                raise UserError(
                    f"{source.folder / name} is gone, and {self._seen[name] - before[0].rows:,} of its rows "
                    "may not be learned. Fix: put it back, or train anew without --resume."
                )
        for name, file in files.items():
            known, end = self._marks.get(name, [FilePosition()])[-1], ends.get(name, 0)
            # A server may not tell the size.
            end = max(end, 0)
            if file.has_byte_lines:
                end = self._whole_lines(file, known.bytes, end)
            if end == known.bytes or end <= len(header_of(file) if file.has_byte_lines else b""):
                continue
            if not file.has_byte_lines:
                parts.append(file)
                begins[name], marks[name] = 0, FilePosition(bytes=end)
                continue
            size = min(file.size, end)
            if size < max(end, known.bytes) or (known.bytes and known.tail != _tail_of(file, known.bytes)):
                raise UserError(
                    f"The first {known.bytes or end:,} bytes of {file}, which has {size:,}, are not those "
                    "that this stream has learned from: a stream continues with new files and with what is "
                    "added at the end of files. Fix: put the file back as it was, or train anew without "
                    "--resume."
                )
            is_whole = known.bytes == 0 and end == file.size
            parts.append(file if is_whole else dataclasses.replace(file, part=(known.bytes, end)))
            begins[name], marks[name] = known.rows, FilePosition(bytes=end, tail=_tail_of(file, end))
        return parts, begins, marks

    def _has_rows(self, source: TableSource, file: File) -> bool:
        return self._seen.get(source.tables.name_of(file), 0) > 0

    def _whole_lines(self, file: File, begin: int, end: int) -> int:
        """Return the end of the lines to read of a text; refuse a line that goes on where one was read.

        The last line of data that are followed is read when its end has come.
        """
        if end <= begin:
            return end
        with Path(file.path).open("rb") as opened:
            opened.seek(max(0, begin - 1))
            start = opened.read(2 if begin else 0)
            if len(start) == 2 and start[:1] != b"\n" and start[1:] not in (b"\n", b"\r"):
                raise UserError(
                    f"A line of {file} that was read without its end goes on at byte {begin:,}. Fix: end the "
                    "file there with a line end and write the whole line again, or train anew."
                )
            if not self._config.stream.follow_data:
                return end
            for first in range(max(begin, end - AT_ONCE), begin - 1, -AT_ONCE):
                opened.seek(first)
                place = opened.read(min(AT_ONCE, end - first)).rfind(b"\n")
                if place >= 0:
                    return first + place + 1
        return begin

    def _add(
        self,
        raw: RawData,
        schema: Schema,
        names: list[str],
        begins: Mapping[str, int],
        marks: Mapping[str, FilePosition],
    ) -> None:
        """Add the events of a reading to the unlearned ones, without late ones."""
        counts, place = raw.events_per_file, {name: number for number, name in enumerate(names)}
        file = np.repeat([place[name] for name in counts], [*counts.values()]).astype(np.int32)
        row = np.concatenate([begins[name] + np.arange(number) for name, number in counts.items()])
        # A file that is not read in parts was read again from its begin.
        known = np.array([self._marks[name][-1].rows if name in self._marks else 0 for name in names])
        for name, number in counts.items():
            if begins[name] + number < self._seen.get(name, 0):
                raise UserError(
                    f"{name} has {begins[name] + number:,} rows, and {self._seen[name]:,} of it were read: "
                    "they are not those that this stream has learned from. Fix: put the file back as it was, "
                    "or train anew without --resume."
                )
        seen = np.array([self._seen.get(name, 0) for name in names])
        times, position = raw.events.time, self.position
        is_late = position.predicted.includes(times, file, row, names) & (row >= seen[file])
        num_late = int(np.count_nonzero(is_late))
        is_left = (row >= known[file]) & ~is_late & ~position.frontier.includes(times, file, row, names)
        notes = [*raw.skipped]
        if num_late:
            one = f"{schema.label} is older than the trained events, and is skipped"
            several = f"{schema.labels} are older than the trained events, and are skipped"
            notes.append(counted(num_late, one, several))
        file, row, num_skipped = file[is_left], row[is_left], raw.num_skipped
        raw = dataclasses.replace(raw if is_left.all() else only(raw, is_left), num_skipped=num_skipped)
        if self._events is not None:
            held = self._events
            mask = np.ones(len(held.row), bool)
            mask[held.order[: held.begin]] = False
            # Other files may have come between.
            moved = np.array([place.get(name, -1) for name in self._names], np.int32)
            file = np.concatenate([moved[held.file[mask]], file])
            row = np.concatenate([held.row[mask], row])
            raw = _joined(_only(held.raw, mask), raw, schema)
            order = np.lexsort((row, file))
            file, row = file[order], row[order]
            raw = dataclasses.replace(raw, events=with_columns(raw.events, lambda column: column[order]))
        order = self._order_of(raw, schema, names, file, row, notes)
        # Only now, when the reading cannot fail any more.
        self._before = {name: getattr(self, name) for name in ("_events", "_names", "_notes", "position")}
        self._before |= {name: {**getattr(self, name)} for name in ("_marks", "_seen")}
        for name, end in marks.items():
            rows = begins[name] + counts[name]
            mark = dataclasses.replace(end, rows=rows, read=rows)
            self._marks[name] = _thinned([*self._marks.get(name, [FilePosition()]), mark])
            self._seen[name] = max(rows, self._seen.get(name, 0))
        self._events, self._names, self._notes = _Unlearned(raw, file, row, order), names, notes
        self.position = dataclasses.replace(self.position, num_late=self.position.num_late + num_late)

    def _order_of(
        self,
        raw: RawData,
        schema: Schema,
        names: list[str],
        file: np.ndarray,
        row: np.ndarray,
        notes: list[str],
    ) -> np.ndarray:
        """Return the places of the events in the order of time, without those of a wrong clock."""
        order, position = sorted_places(raw.events.time), self.position
        times = raw.events.time[order]
        if times[:1].min(initial=0) < 0:
            raise UserError(f"A stream of {schema.labels} from before 1970 is not known; leave --stream out.")
        learned = position.frontier.time if self._first else -1
        held = num_events_of_wrong_clock(times, time.time(), learned, position.first_time, self._first)
        if held:
            first = order[-held]
            before = int(times[-held - 1]) if held < len(times) else learned
            notes.append(
                describe_held(schema, held, (names[file[first]], int(row[first])), int(times[-held]), before)
            )
        return order[: len(order) - held]

    # --- columns ---

    @property
    def has_more(self) -> bool:
        """True if events were read that are not learned."""
        return self._events is not None and self._events.begin < len(self._events.order)

    def columns(self) -> Columns:
        """Write and return the columns of the next segment, which is empty if all is learned.

        Raises:
            UserError: when they cannot be written, or a new stream has no event. Then the last reading is
                undone: its files may be mended.
        """
        try:
            columns = self._columns()
        except UserError:
            for name, value in self._before.items():
                setattr(self, name, value)
            raise
        finally:
            self._before = {}
        return columns

    def _columns(self) -> Columns:
        source, events = self._source, self._events
        assert source is not None
        assert events is not None
        if self._first == 0 and not self.has_more:
            raise UserError(
                f"A stream requires {source.schema.labels}, and there are none; give files that hold some."
            )
        cache = cache_of(source, self._data)
        order, is_last = self._next_order(events)
        if not self._vocabulary and not is_last:
            self._vocabulary = self._whole_vocabulary(events, source.schema, cache)
        raw, of_raw = events.raw, order
        if self._first or not is_last:
            raw, of_raw = _restricted(events.raw, order, source.schema, self.recent), np.arange(len(order))
        segment = StreamSegment(
            self._first, is_last, tuple(self._names), self._marks_of(events, order), self.position
        )
        # Imported here: a rank that does not make columns needs no compiler of loops.
        from recsuite.datasets.preparation.making import StreamPart, make_columns

        stream = StreamPart(
            order=of_raw,
            file=events.file[order],
            row=events.row[order],
            vocabulary=self._vocabulary,
            sums=self.recent.sums_of(_ids_of(raw, source.schema)),
            notes=self._notes,
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

    def _next_order(self, events: _Unlearned) -> tuple[np.ndarray, bool]:
        """Return the places of the next segment's events, and True if no others were read."""
        order = events.order[events.begin :]
        if not self._trains:
            return order, True
        # Where the kept users are looked at again: the same place however the events came.
        most = PRUNE_EVERY - self._first % PRUNE_EVERY
        if len(order) <= most:
            return order, True
        times = events.raw.events.time[order]
        end = end_of_window(times, self._first + most - 1, self._span, self._first) - self._first
        return (order[:end], False) if end < len(order) else (order, True)

    def _whole_vocabulary(self, events: _Unlearned, schema: Schema, cache: Path) -> str:
        """Return the vocabulary of all events that the first reading found."""
        from recsuite.datasets.preparation.making import vocabulary_of

        with tempfile.TemporaryDirectory(prefix=".vocabulary-", dir=cache) as folder:
            return vocabulary_of(Path(folder), events.raw, events.order, schema)

    def _marks_of(self, events: _Unlearned, order: np.ndarray) -> tuple[Mark, ...]:
        """Return the marks of all files, each with the position up to which all before it is learned."""
        learned_at = np.full(len(events.row), NEVER)
        # An event of the future would have its file read again from there after each resume, for years.
        learned_at[events.raw.events.time > time.time() + SECONDS_PER_DAY] = self._first
        learned_at[events.order[events.begin :]] = NEVER
        learned_at[events.order[: events.begin]] = self._first
        learned_at[order] = self._first + 1 + np.arange(len(order))
        marks = []
        for place, name in enumerate(self._names):
            of_file = events.file == place
            rows, positions = events.row[of_file], learned_at[of_file]
            for mark in self._marks.get(name, ()):
                before = positions[rows < mark.rows]
                marks.append(Mark(name, mark, int(before.max(initial=self._first))))
        return tuple(marks)

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
        is_left = np.ones(len(events.row), bool)
        is_left[events.order[: events.begin]] = False
        for place, name in enumerate(self._names):
            rows = events.row[is_left & (events.file == place)]
            marks = self._marks.get(name, [])
            learned = [mark for mark in marks if not len(rows) or mark.rows <= rows.min()]
            if learned:
                self._marks[name] = marks[marks.index(learned[-1]) :]


def _ids_of(raw: RawData, schema: Schema) -> tuple[np.ndarray, np.ndarray]:
    """Return the raw ids of users and of items."""
    return raw.users[schema.column_of(USER)].to_numpy(), raw.items[schema.column_of(ITEM)].to_numpy()


def _tail_of(file: File, end: int) -> str:
    """Return the digest of the bytes of a file before a position."""
    return digest_of_part(Path(file.path), max(0, end - TAIL_BYTES), end)


def _thinned(marks: list[FilePosition]) -> list[FilePosition]:
    """Return the marks of a file, every second one if they are too many; the first and the last stay."""
    return marks if len(marks) <= MOST_MARKS else [*marks[:-1:2], marks[-1]]


def _only(raw: RawData, mask: np.ndarray) -> RawData:
    """Return the data with the marked events, and the users and items of these alone."""
    return _restricted(raw, np.flatnonzero(mask), None, None)


def _restricted(
    raw: RawData, order: np.ndarray, schema: Schema | None, recent: RecentEvents | None
) -> RawData:
    """Return the data with some events, in their order, and the users and items of these alone.

    recent: adds the histories of the users as the context, and their items; schema: of the data then.
    """
    events = with_columns(raw.events, lambda column: column[order])
    frames = []
    for name, frame in ((USER, raw.users), (ITEM, raw.items)):
        used, positions = np.unique(getattr(events, name), return_inverse=True)
        # A table of nothing has no longest list.
        used = used if len(used) or not len(frame) else np.zeros(1, np.int64)
        frames.append(frame.iloc[used].reset_index(drop=True))
        setattr(events, name, positions.astype(np.int32))
    users, items = frames
    context = None
    if recent is not None and schema is not None and recent.number:
        slots = recent.users.find(users[schema.column_of(USER)].tolist())
        known = np.flatnonzero(slots >= 0)
        owner, item, label, times = recent.lists.of(slots[known])
        distinct, positions = np.unique(item, return_inverse=True)
        ids = [recent.items.ids[slot] for slot in distinct]
        # In the order of their ids, which is the same on any machine.
        by_id = sorted(range(len(ids)), key=ids.__getitem__)
        items, place = _with_ids(items, schema.column_of(ITEM), [ids[number] for number in by_id])
        place = place[np.argsort(by_id)] if ids else place
        context = Events(
            known[owner].astype(np.int32), place[positions].astype(np.int32), label.astype(np.float32), times
        )
    return dataclasses.replace(raw, events=events, users=users, items=items, context=context)


def _with_ids(frame: pandas.DataFrame, column: str, ids: list[Any]) -> tuple[pandas.DataFrame, np.ndarray]:
    """Return a frame of items with rows for some ids too, and the positions of these, int64 [n].

    Rows that are added have no features: batches have only the ids of items of histories.
    """
    import pandas

    index = pandas.Index(frame[column])
    places = index.get_indexer(pandas.Index(ids, dtype=index.dtype)) if ids else np.zeros(0, np.int64)
    missing = np.flatnonzero(places < 0)
    if len(missing):
        added = [ids[place] for place in missing]
        empty = {
            name: added if name == column else [_missing_like(values.iloc[0])] * len(added)
            for name, values in frame.items()
        }
        places[missing] = len(frame) + np.arange(len(missing))
        frame = pandas.concat([frame, pandas.DataFrame(empty)], ignore_index=True)
    return frame, places


def _missing_like(value: Any) -> Any:
    """Return the missing value of a column with a value."""
    if isinstance(value, list):
        return []
    if isinstance(value, np.ndarray):
        return np.full_like(value, np.nan)
    return None


def _joined(first: RawData, second: RawData, schema: Schema) -> RawData:
    """Return the events of two readings, the first ones first; the features are those of the second."""
    frames, moved = [], []
    for name in (USER, ITEM):
        frame, positions = _joined_frames(
            getattr(first, f"{name}s"), getattr(second, f"{name}s"), schema.column_of(name)
        )
        frames.append(frame)
        moved.append(positions)
    before, after = first.events, second.events
    number = len(before.user), len(after.user)
    joined = Events(
        np.concatenate([moved[0][before.user], after.user]).astype(np.int32),
        np.concatenate([moved[1][before.item], after.item]).astype(np.int32),
        np.concatenate([before.label, after.label]),
        np.concatenate([before.time, after.time]),
        _joined_numbers(before.weight, after.weight, number),
        {
            name: _joined_features(before.features.get(name), after.features.get(name), number)
            for name in {**before.features, **after.features}
        },
        {
            name: _joined_numbers(before.more_labels.get(name), after.more_labels.get(name), number)
            for name in {**before.more_labels, **after.more_labels}
        },
        {
            name: _joined_numbers(before.more_weights.get(name), after.more_weights.get(name), number)
            for name in {**before.more_weights, **after.more_weights}
        },
    )
    counts = {**first.events_per_file}
    for name, count in second.events_per_file.items():
        counts[name] = counts.get(name, 0) + count
    return dataclasses.replace(
        second, events=joined, users=frames[0], items=frames[1], events_per_file=counts
    )


def _joined_frames(
    first: pandas.DataFrame, second: pandas.DataFrame, column: str
) -> tuple[pandas.DataFrame, np.ndarray]:
    """Return the rows of both frames, and the positions in it of the rows of the first, int64."""
    import pandas

    positions = pandas.Index(second[column]).get_indexer(pandas.Index(first[column]))
    missing = np.flatnonzero(positions < 0)
    positions[missing] = len(second) + np.arange(len(missing))
    if not len(missing):
        return second, positions
    return pandas.concat([second, first.iloc[missing]], ignore_index=True), positions


def _joined_features(first: Any, second: Any, number: tuple[int, int]) -> Any:
    """Return a feature of the events of two readings; it is missing in a reading without it."""
    some = second if first is None else first
    if not isinstance(some, Codes):
        return _joined_numbers(first, second, number)
    before, after = (
        Codes(np.full(size, -1, np.int32), []) if codes is None else codes
        for codes, size in zip((first, second), number, strict=True)
    )
    values = sorted({*before.values, *after.values})
    place = {value: code for code, value in enumerate(values)}
    moved = [
        # The last entry is that of code -1.
        np.array([*(place[value] for value in codes.values), -1], np.int32)[codes.codes]
        for codes in (before, after)
    ]
    return Codes(np.concatenate(moved), values)


def _joined_numbers(first: Any, second: Any, number: tuple[int, int]) -> Any:
    if first is None and second is None:
        return None
    return np.concatenate(
        [
            np.full(size, np.nan, np.float32) if column is None else column
            for column, size in zip((first, second), number, strict=True)
        ]
    )
