"""How far the training of a stream is, beside what is known of any training."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

# Of metrics whose squares have a mean over several windows, and not they themselves.
ROOTS = ("rmse",)


@dataclass(frozen=True)
class StreamProgress:
    """Where a stream is: positions are places among its events in the order of time.

    begin, end: of the window under way; both are where the last one ended, where none is. time: of the last
    event before `end`, in seconds since 1970. begins_at: where the clock of event time stands, that of the
    first event of the last window. events_per_file: of the data as they were last read, by which what comes
    later is known; late: see `datasets.streams.past.Past`; digest: of all events before `end`. predicted: the
    metrics of the window under way, which was predicted before it is learned from; sums, counts: of the
    metrics of all windows before it.
    """

    begin: int = 0
    end: int = 0
    time: int = 0
    begins_at: int = 0
    events_per_file: dict[str, int] = field(default_factory=dict)
    late: tuple[tuple[str, int, int], ...] = ()
    digest: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        """Whether a window was predicted, and not all of it is learned."""
        return self.begin < self.end

    @property
    def learned(self) -> int:
        """Up to when events are learned, -1 for none."""
        return self.time if self.end else -1

    def done(self) -> StreamProgress:
        """Where it is when the window under way is learned."""
        return dataclasses.replace(self, begin=self.end, predicted={})

    def with_window(self, predicted: Mapping[str, float], number: int) -> StreamProgress:
        """With the metrics of one more window, of so many events; those that are not defined do not count."""
        sums, counts = dict(self.sums), dict(self.counts)
        known = {name: value for name, value in predicted.items() if math.isfinite(value)}
        for name, value in known.items():
            sums[name] = sums.get(name, 0.0) + number * (value**2 if name in ROOTS else value)
            counts[name] = counts.get(name, 0) + number
        return dataclasses.replace(self, predicted=known, sums=sums, counts=counts)

    def overall(self) -> dict[str, float]:
        """The metrics over all windows: exact for errors; of an AUC the mean of windows, by their events."""
        means = {name: value / self.counts[name] for name, value in self.sums.items()}
        return {name: math.sqrt(value) if name in ROOTS else value for name, value in means.items()}
