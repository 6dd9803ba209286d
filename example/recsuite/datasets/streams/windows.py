"""Windows of a stream: ranges of positions, cut from the times of its events in their order."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from recsuite.config.sections import Duration


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
