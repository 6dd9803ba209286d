"""What each user had, and who had each item, by positions in the data."""

from __future__ import annotations

import numpy as np

from recsuite.datasets.schema import RawData


def last_of(number: int, longest: int | None) -> slice:
    """The last of so many, at most `longest`; None is all."""
    # Not [-longest:], which takes all of them where the longest is 0.
    return slice(0 if longest is None else max(0, number - longest), None)


class EventsOf:
    """What each user had, or who had each item: positions and labels, the oldest first.

    owners, others: positions of whose it is and of what, int32 [events]; number: of owners.
    """

    def __init__(self, owners: np.ndarray, others: np.ndarray, raw: RawData, number: int) -> None:
        order = np.lexsort([raw.events.time, owners])
        self._others, self._labels, self._times = (
            column[order] for column in (others, raw.events.label, raw.events.time)
        )
        counts = np.bincount(owners, minlength=number)
        self._ends = np.concatenate([[0], np.cumsum(counts)])

    def of(
        self, place: int, longest: int | None = None, before: int | None = None, without: int = -1
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Positions of the last that an owner has, at most `longest`, their labels and times; nobody has
        place -1.

        before: leaves out what is not strictly before this time, in seconds since 1970; without: and who has
        this position.
        """
        first, end = self._ends[place : place + 2] if place >= 0 else (0, 0)
        if before is not None:
            end = first + np.searchsorted(self._times[first:end], before)
        others, *rest = (column[first:end] for column in (self._others, self._labels, self._times))
        kept = others != without
        others, labels, times = (column[kept] for column in (others, *rest))
        last = last_of(len(others), longest)
        return others[last], labels[last], times[last]


def ages_in(times: np.ndarray, before: int | None = None) -> list[int]:
    """How many seconds before an event each of a user's was; times: of those, int64 [n], the oldest first.

    before: when the event is; None is at the time of the newest of them, as what comes next in that sitting.
    """
    if before is None:
        before = int(times[-1]) if len(times) else 0
    ages: list[int] = (before - times).tolist()
    return ages
