"""Streams of events: their windows, and the state of a stream whose data grow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from recsuite.config.units import Duration
from recsuite.errors import UserError

# A stream computes the mean label and the mean weight from so many first events: the means of all events
# would use the future, and change with new data.
HEAD = 1_000
# Keys that are digested at once.
AT_ONCE = 2**20
# Folder in --data_path with the copied messages of a topic: the tables in it are the events.
COPY = "events"
SECONDS_PER_DAY = 86_400
# At most one event in LONE is held back as of a wrong clock, if it lies LONE_GAP seconds after all others.
LONE, LONE_GAP = 100, 30 * SECONDS_PER_DAY
# Late events of a file: (its name, number of events after which they stand, time than which they are older).
Rule = tuple[str, int, int]


@dataclass(frozen=True)
class StreamState:
    """State of a stream that continues: the encoding of its values, and its late events.

    vocabulary: the content of its vocabulary.json, empty for a new stream. events_per_file: number of events
    of each file when it was last read. learned: newest time that was learned by then, in seconds since 1970,
    -1 for none. late: (file, number of events, time): events of this file after that number and older than
    that time are skipped. owner: of columns for one training alone; empty for shared columns.
    """

    vocabulary: str = ""
    late: tuple[Rule, ...] = ()
    events_per_file: dict[str, int] = field(default_factory=dict)
    learned: int = -1
    owner: str = ""

    @property
    def before(self) -> tuple[StreamState, ...]:
        """States with which the columns may have been made, if the files did not change."""
        return (EMPTY_STREAM_STATE, StreamState(self.vocabulary, self.late)) if self.events_per_file else ()

    @property
    def known(self) -> dict[str, Any]:
        """Feature to the values of its table rows, or the encoding of a number; empty for a new stream."""
        return json.loads(self.vocabulary) if self.vocabulary else {}

    @property
    def key(self) -> list[Any]:
        """All fields, as part of the name of columns."""
        digest = xxhash.xxh3_64_hexdigest(self.vocabulary.encode()) if self.vocabulary else ""
        return [digest, [list(rule) for rule in self.late], self.events_per_file, self.learned]

    def rules(self, events_per_file: Mapping[str, int]) -> tuple[Rule, ...]:
        """Return `late` and the rules for events that came since.

        events_per_file: the current one, in the order in which files are read.
        """
        rules, names, known = list(self.late), list(events_per_file), self.events_per_file
        last = max((place for place, name in enumerate(names) if known.get(name)), default=-1)
        for place, name in enumerate(names):
            number = known.get(name, 0)
            if events_per_file[name] > number:
                # Events of one second are in the order of the files. An event that comes before a learned one
                # in this order must be newer.
                rules.append((name, number, self.learned + (place < last)))
        return tuple(rules)

    def is_late(self, time: np.ndarray, events_per_file: Mapping[str, int]) -> np.ndarray:
        """Return True for late events, bool [n]. time: of all events in the order of the files."""
        late, number = np.zeros(len(time), bool), np.array(list(events_per_file.values()), np.int64)
        ends = dict(zip(events_per_file, number.cumsum().tolist(), strict=True))
        for name, known, learned in self.rules(events_per_file):
            if name in ends:
                part = slice(ends[name] - events_per_file[name] + known, ends[name])
                late[part] |= time[part] < learned
        return late


EMPTY_STREAM_STATE = StreamState()


def num_events_of_wrong_clock(time: np.ndarray, order: np.ndarray, learned: int, now: float) -> int:
    """Number of the newest events that seem to have the time of a wrong clock.

    They are more than a day after now. Or they are at most one in a hundred, and the gap between them and all
    others is longer than the span of the others and than 30 days. If they were learned, all later events
    would be late.

    time: int64, seconds since 1970. order: the places of events by time. learned: newest time that the stream
    has learned; no event up to it is held back.
    """
    number = int(np.count_nonzero(time > now + SECONDS_PER_DAY))
    # If most events are in the future, the clock of this machine is wrong, or times are not clock times.
    end = len(order) - (number if 2 * number <= len(order) else 0)
    newest = time[order[max(0, end - end // LONE - 1) : end]]
    is_lone = np.diff(newest) > np.maximum(newest[:-1] - time[order[:1]], LONE_GAP)
    if is_lone.any():
        end -= len(is_lone) - int(is_lone.argmax())
    return min(len(order) - end, int(np.count_nonzero(time > learned)))


def keys_of(user: np.ndarray, item: np.ndarray, label: np.ndarray, time: np.ndarray) -> np.ndarray:
    """Hash of each event, which changes with any of its parts, uint64 [n].

    user, item: digests of their raw ids, uint64 [n]: their positions may change with new data.
    """
    hashes = user.astype(np.uint64)
    for part in (item, label.astype(np.float32).view(np.uint32), time.astype(np.int64).view(np.uint64)):
        # The multiplier of splitmix64: an event with two parts exchanged has another hash.
        hashes *= np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(31)
        hashes += part.astype(np.uint64)
    return hashes


def digests_of(ids: Any) -> np.ndarray:
    """Digests of raw ids, whole numbers or texts, uint64 [n]."""
    values = np.asarray(ids)
    if values.dtype.kind in "iu":
        return values.astype(np.int64).view(np.uint64)
    digests = (xxhash.xxh3_64_intdigest(str(value).encode()) for value in values.tolist())
    return np.fromiter(digests, np.uint64, len(values))


class Prefix:
    """Digest of all events of a stream up to a place, which can be extended."""

    def __init__(self, keys: np.ndarray, end: int = 0) -> None:
        """keys: of all events in the order of the stream, see `keys_of`."""
        self._hash = xxhash.xxh3_128()
        self.keys = keys
        self.end = 0
        self.extend(end)

    def extend(self, end: int) -> str:
        """Return the digest of the events before `end`, which must not be below that of the last call."""
        for first in range(self.end, end, AT_ONCE):
            self._hash.update(self.keys[first : min(end, first + AT_ONCE)].tobytes())
        self.end = end
        return self._hash.hexdigest()


def check_prefix(keys: np.ndarray, end: int, digest: str, source: str) -> None:
    """Refuse data whose learned events changed. keys: of all events in the order of the stream.

    Raises:
        UserError: when fewer events are there than were learned from, or others.
    """
    if end > len(keys) or Prefix(keys, end).extend(end) != digest:
        raise UserError(
            f"The first {end:,} events in the order of time of {source} are not those that this stream has "
            "learned from: a stream continues with new files and with what is added at the end of files, not "
            "where anything before was added, changed or removed; put the files back as they were, or train "
            "anew without --resume."
        )


class Window(NamedTuple):
    """The events from position `begin` up to before `end` in the order of a stream."""

    begin: int
    end: int

    def __len__(self) -> int:
        """Number of events."""
        return self.end - self.begin


def next_window(times: np.ndarray, begin: int, span: Duration, is_open: bool) -> Window | None:
    """Return the window of the events from position `begin` on; None if it is empty or incomplete.

    Windows begin at multiples of the span, counted from 1970 or in events from the first one, or at the end
    of the previous window. times: of all events in order, seconds since 1970, int64; is_open: True if more
    events may come. Then a window of time is complete only if an event after it exists.
    """
    if begin >= len(times):
        return None
    if not span.is_time:
        end = (begin // span.amount + 1) * span.amount
        is_whole = end <= len(times)
    else:
        last = (int(times[begin]) // span.amount + 1) * span.amount
        # The times are in ascending order, so only those after `begin` are searched.
        end = begin + int(np.searchsorted(times[begin:], last, side="left"))
        is_whole = end < len(times)
    if is_open and not is_whole:
        return None
    return Window(begin, min(end, len(times)))


def num_empty(times: np.ndarray, end: int, span: Duration) -> int:
    """Number of windows without an event between the first event and position `end`."""
    if not span.is_time or end == 0:
        return 0
    cells = np.asarray(times[:end]) // span.amount
    return int(cells[-1] - cells[0] + 1 - len(np.unique(cells)))
