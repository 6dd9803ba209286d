"""Streams of events: their windows, and the state of a stream whose data grow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from recsuite.config.units import Duration

# A stream computes the mean label and the mean weight from so many first events: the means of all events
# would use the future, and change with new data.
HEAD = 1_000
SECONDS_PER_DAY = 86_400
# At most one event in LONE is held back as of a wrong clock, if it lies LONE_GAP seconds after all others.
LONE, LONE_GAP = 100, 30 * SECONDS_PER_DAY
# Every so many events the users and items without a row are removed from what a stream keeps.
PRUNE_EVERY = 2**20
# Bytes before a position in a file by which the file is recognised.
TAIL_BYTES = 4_096


@dataclass(frozen=True)
class FilePosition:
    """Position in a file of a stream: what is before it need not be read again.

    rows, bytes: numbers of readable rows and of bytes before it; tail: digest of the last `TAIL_BYTES` of
    these. read, read_bytes: the same numbers at the end of what was read; a later row that is older than the
    learned events is late. In a partition of a topic bytes are offsets of messages, and `tail` is empty.
    """

    rows: int = 0
    bytes: int = 0
    tail: str = ""
    read: int = 0
    read_bytes: int = 0


@dataclass(frozen=True)
class Mark:
    """Place in a file, and the position of the stream up to which everything before it is learned."""

    file: str
    position: FilePosition
    learned_at: int


@dataclass(frozen=True)
class Frontier:
    """Newest learned event of a stream, by time, then file, then row; without a file before the first one."""

    time: int = 0
    file: str = ""
    row: int = 0

    def includes(
        self, time: np.ndarray, file: np.ndarray, row: np.ndarray, names: Sequence[str]
    ) -> np.ndarray:
        """Return True for events up to it, bool [n]. file: places in the names, int [n]; row: int [n]."""
        is_same = time == self.time
        is_before = np.array([name < self.file for name in names], bool)[file]
        of_file = np.array([name == self.file for name in names], bool)[file]
        return (time < self.time) | is_same & (is_before | of_file & (row <= self.row))


@dataclass(frozen=True)
class StreamPosition:
    """Position of a stream in its files, after some events.

    files: by name; frontier: the newest event before it; predicted: the newest one that was predicted, behind
    it in a window under way: events that come later and are older are late; first_time: of the first event of
    the stream; num_late: number of late events so far; mean_label, mean_weight: of the first events.
    """

    files: dict[str, FilePosition] = field(default_factory=dict)
    frontier: Frontier = Frontier()
    predicted: Frontier = Frontier()
    first_time: int = 0
    num_late: int = 0
    mean_label: float = 0.0
    mean_weight: float = 1.0


@dataclass(frozen=True)
class StreamState:
    """State of a stream that continues.

    vocabulary: the content of its vocabulary.json, empty for a new stream; first: number of learned events;
    position: after them.
    """

    vocabulary: str = ""
    first: int = 0
    position: StreamPosition = StreamPosition()


EMPTY_STREAM_STATE = StreamState()


@dataclass(frozen=True)
class StreamSegment:
    """Part of a stream in columns: the events from position `first` of the stream on.

    num_left: number of events that were read and come after it. names: of the files, and marks in them.
    position: that of the stream at its begin. until: see `next_window`.
    """

    first: int = 0
    num_left: int = 0
    names: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    position: StreamPosition = StreamPosition()
    until: int | None = None


def num_events_of_wrong_clock(
    time: np.ndarray, now: float, learned: int = -1, first_time: int = -1, num_learned: int = 0
) -> int:
    """Number of the newest events that seem to have the time of a wrong clock.

    They are more than a day after now. Or they are at most one in a hundred, and the gap between them and all
    others is longer than the span of the others and than 30 days. If they were learned, all later events
    would be late.

    time: of the events that are not learned, ascending, int64, seconds since 1970. learned: newest time that
    the stream has learned; no event up to it is held back. first_time: of its first event; num_learned:
    number of learned events.
    """
    number = int(np.count_nonzero(time > now + SECONDS_PER_DAY))
    # If most events are in the future, the clock of this machine is wrong, or times are not clock times.
    end = len(time) - (number if 2 * number <= len(time) + num_learned else 0)
    newest = time[max(0, end - (end + num_learned) // LONE - 1) : end]
    if num_learned and (end + num_learned) // LONE >= end:
        newest = np.concatenate([[learned], newest])
    begin = first_time if num_learned else time[:1]
    is_lone = np.diff(newest) > np.maximum(newest[:-1] - begin, LONE_GAP)
    if is_lone.any():
        end -= len(is_lone) - int(is_lone.argmax())
    return min(len(time) - end, int(np.count_nonzero(time > learned)))


class Window(NamedTuple):
    """The events from position `begin` up to before `end` in the order of a stream."""

    begin: int
    end: int

    def __len__(self) -> int:
        """Number of events."""
        return self.end - self.begin


def next_window(
    times: np.ndarray, begin: int, span: Duration, until: int | None, first: int = 0
) -> Window | None:
    """Return the window of the events from position `begin` on; None if it is empty or incomplete.

    Windows begin at multiples of the span, counted from 1970 or in events from the first one, or at the end
    of the previous window. times: of the events from position `first` on, in order, seconds since 1970,
    int64; until: time before which no more events are expected, so that windows of time up to it are
    complete; None if no more are expected at all. For windows of events only whether it is None counts.
    """
    last = first + len(times)
    if begin >= last:
        return None
    end = end_of_window(times, begin, span, first)
    if until is not None:
        if span.is_time and until < _end_of_time(int(times[begin - first]), span):
            return None
        if not span.is_time and end > last:
            return None
    return Window(begin, min(end, last))


def end_of_window(times: np.ndarray, position: int, span: Duration, first: int = 0) -> int:
    """Return the end of the window with the event at a position; arguments as for `next_window`."""
    if not span.is_time:
        return (position // span.amount + 1) * span.amount
    place = position - first
    last = _end_of_time(int(times[place]), span)
    # The times are in ascending order, so only those after it are searched.
    return position + int(np.searchsorted(times[place:], last, side="left"))


def _end_of_time(time: int, span: Duration) -> int:
    """Return the end of the window of time with a time."""
    return (time // span.amount + 1) * span.amount


def num_empty_before(time: int, before: int, span: Duration) -> int:
    """Number of windows without an event between two consecutive events, given by their times."""
    return max(0, time // span.amount - before // span.amount - 1) if span.is_time else 0
