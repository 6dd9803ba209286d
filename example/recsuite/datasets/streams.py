"""Streams of events: their windows, and what a stream remembers of data that grow."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import xxhash

from recsuite.config.sections import Duration
from recsuite.errors import UserError

# A stream begins from the mean of so many first labels, and weights are one in their mean: of all events it
# would be known too early, and change as they become more.
HEAD = 1_000
# Keys that are digested at once.
AT_ONCE = 2**20
SECONDS_PER_DAY = 86_400
# Which share of the events is a few, and how far behind the others these must lie to be left out.
LONE, LONE_GAP = 100, 30 * SECONDS_PER_DAY
# Which events of a file came too late: (its name, those behind this number, if older than this time).
Rule = tuple[str, int, int]


@dataclass(frozen=True)
class Past:
    """Of a stream that goes on: how its values became table rows, and which events came too late.

    vocabulary: the content of its vocabulary.json, empty for a stream that begins. events_per_file: how many
    events each file had when they were last read, and learned: up to when events were learned by then, in
    seconds since 1970, -1 for none. late: (file, number of events, time): of this file, what stands behind
    that number and is older than that time is left out. owner: of columns that are for one training
    alone; empty where they are for all.
    """

    vocabulary: str = ""
    late: tuple[Rule, ...] = ()
    events_per_file: dict[str, int] = field(default_factory=dict)
    learned: int = -1
    owner: str = ""

    @property
    def before(self) -> tuple[Past, ...]:
        """As which the columns may have been made, if the files are as they were."""
        return (BEGINNING, Past(self.vocabulary, self.late)) if self.events_per_file else ()

    @property
    def known(self) -> dict[str, Any]:
        """Feature to what its table rows stand for, or how a number becomes one; empty where all is new."""
        found: dict[str, Any] = json.loads(self.vocabulary) if self.vocabulary else {}
        return found

    @property
    def key(self) -> list[Any]:
        """All of it, as the name of columns depends on it."""
        digest = xxhash.xxh3_64_hexdigest(self.vocabulary.encode()) if self.vocabulary else ""
        return [digest, [list(rule) for rule in self.late], self.events_per_file, self.learned]

    def rules(self, events_per_file: Mapping[str, int]) -> tuple[Rule, ...]:
        """`late`, and what makes events too late that came since. events_per_file: as it is now, in the order
        in which files are read.
        """
        found, names, known = list(self.late), list(events_per_file), self.events_per_file
        last = max((place for place, name in enumerate(names) if known.get(name)), default=-1)
        for place, name in enumerate(names):
            number = known.get(name, 0)
            if events_per_file[name] > number:
                # Events of one second lie in the order of the files: what comes before one that was learned
                # must be newer than that.
                found.append((name, number, self.learned + (place < last)))
        return tuple(found)

    def is_late(self, time: np.ndarray, events_per_file: Mapping[str, int]) -> np.ndarray:
        """Which events came too late, bool [n], of the times of all events in the order of the files."""
        late, number = np.zeros(len(time), bool), np.array(list(events_per_file.values()), np.int64)
        ends = dict(zip(events_per_file, number.cumsum().tolist(), strict=True))
        for name, known, learned in self.rules(events_per_file):
            if name in ends:
                part = slice(ends[name] - events_per_file[name] + known, ends[name])
                late[part] |= time[part] < learned
        return late


BEGINNING = Past()


def num_held_back(time: np.ndarray, order: np.ndarray, learned: int, now: float) -> int:
    """Number of the newest events that have a time of a wrong clock.

    They are later than a day from now, or they are at most one in a hundred and lie farther behind all others
    than these span, and than 30 days. Once they are learned, all that comes afterwards would be too late.

    time: int64, seconds since 1970. order: the places of events by time. learned: up to when a stream has
    learned; nothing before it is held back.
    """
    number = int(np.count_nonzero(time > now + SECONDS_PER_DAY))
    # Where most are of the future it is another clock that is wrong, or there is none.
    end = len(order) - (number if 2 * number <= len(order) else 0)
    newest = time[order[max(0, end - end // LONE - 1) : end]]
    is_lone = np.diff(newest) > np.maximum(newest[:-1] - time[order[:1]], LONE_GAP)
    if is_lone.any():
        end -= len(is_lone) - int(is_lone.argmax())
    return min(len(order) - end, int(np.count_nonzero(time > learned)))


def keys_of(user: np.ndarray, item: np.ndarray, label: np.ndarray, time: np.ndarray) -> np.ndarray:
    """A number for each event that changes with any of its parts, uint64 [n].

    user, item: digests of their raw ids, uint64 [n], for their places change as others come between them.
    """
    found = user.astype(np.uint64)
    for part in (item, label.astype(np.float32).view(np.uint32), time.astype(np.int64).view(np.uint64)):
        # The multiplier of splitmix64: an event with two parts exchanged is another one.
        found *= np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(31)
        found += part.astype(np.uint64)
    return found


def digests_of(ids: Any) -> np.ndarray:
    """A digest of each raw id, whole numbers or texts, uint64 [n]."""
    values = np.asarray(ids)
    if values.dtype.kind in "iu":
        return values.astype(np.int64).view(np.uint64)
    found = (xxhash.xxh3_64_intdigest(str(value).encode()) for value in values.tolist())
    return np.fromiter(found, np.uint64, len(values))


class Prefix:
    """A digest of all events of a stream up to a place, which grows with it."""

    def __init__(self, keys: np.ndarray, end: int = 0) -> None:
        """keys: of all events in the order of the stream, see `keys_of`."""
        self._hash = xxhash.xxh3_128()
        self.keys = keys
        self.end = 0
        self.extend(end)

    def extend(self, end: int) -> str:
        """The digest of the events before `end`, which is not before the last one."""
        for first in range(self.end, end, AT_ONCE):
            self._hash.update(self.keys[first : min(end, first + AT_ONCE)].tobytes())
        self.end = end
        return self._hash.hexdigest()


def check_prefix(keys: np.ndarray, end: int, digest: str, source: str) -> None:
    """Refuse data whose past is not what was learned from. keys: of all events in the order of the stream.

    Raises:
        UserError: when fewer events are there than were learned from, or others.
    """
    if end > len(keys) or Prefix(keys, end).extend(end) != digest:
        raise UserError(
            f"The first {end:,} events in the order of time of {source} are not those that this stream has "
            "learned from: a stream goes on with new files and with what is added at the end of files, not "
            "where anything before was added, changed or removed; put the files back as they were, or train "
            "anew without --resume."
        )


class Window(NamedTuple):
    """The events from position `begin` up to before `end` in the order of a stream."""

    begin: int
    end: int

    def __len__(self) -> int:
        """How many events."""
        return self.end - self.begin


def next_window(times: np.ndarray, begin: int, span: Duration, is_open: bool) -> Window | None:
    """The window of the events from position `begin` on; None where there are none, or not all of them yet.

    Windows begin at multiples of the span, counted from 1970 or in events from the first one, or where the
    one before ended. times: of all events in their order, seconds since 1970, int64; is_open: whether more
    events may come, so that a window is whole only where one behind it is there.
    """
    if begin >= len(times):
        return None
    if not span.is_time:
        end = (begin // span.amount + 1) * span.amount
        is_whole = end <= len(times)
    else:
        last = (int(times[begin]) // span.amount + 1) * span.amount
        # The times rise, so only those behind `begin` are searched.
        end = begin + int(np.searchsorted(times[begin:], last, side="left"))
        is_whole = end < len(times)
    if is_open and not is_whole:
        return None
    return Window(begin, min(end, len(times)))


def num_empty(times: np.ndarray, end: int, span: Duration) -> int:
    """How many windows before position `end` had no event, between those that had some."""
    if not span.is_time or end == 0:
        return 0
    cells = np.asarray(times[:end]) // span.amount
    return int(cells[-1] - cells[0] + 1 - len(np.unique(cells)))
