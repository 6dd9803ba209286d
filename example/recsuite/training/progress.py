"""Progress of a training, as checkpoints hold it. Imports nothing heavy: servers read it too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from recsuite.datasets.streams import StreamPosition
from recsuite.files import OPTIONAL

# Metrics whose squares are averaged over windows, not the values themselves.
ROOTS = ("rmse",)
# Prefix of the metrics of the baseline, see `datasets.preparation.baselines.PastBiases`.
OF_BIASES = "biases/"


@dataclass(frozen=True)
class StreamProgress:
    """Progress of a stream. Positions are among its events in the order of time.

    begin, end: of the window under way; if there is none, both are the end of the last window. time: of the
    last event before `end`, in seconds since 1970. begins_at: the clock of event time, which is the time of
    the first event of the last window. predicted: metrics of the window under way, which is predicted before
    it is trained on; sums, counts: of the metrics of all windows up to it, and of those of the baseline, with
    the prefix OF_BIASES. num_empty: number of windows without an event before `end`; position: in the files,
    of the events before `begin`.
    """

    begin: int = 0
    end: int = 0
    time: int = 0
    begins_at: int = 0
    predicted: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    num_empty: int = field(default=0, metadata=OPTIONAL)
    position: StreamPosition = field(default=StreamPosition(), metadata=OPTIONAL)

    @property
    def is_under_way(self) -> bool:
        """True if a window was predicted and not all of it is trained on."""
        return self.begin < self.end

    def done(self, position: StreamPosition) -> StreamProgress:
        """Return the progress at the end of the window under way, which has a position in the files."""
        return dataclasses.replace(self, begin=self.end, predicted={}, position=position)

    def with_window(
        self, predicted: Mapping[str, float], biases: Mapping[str, float], number: int
    ) -> StreamProgress:
        """Return the progress with the metrics of a window of `number` events; undefined ones are skipped.

        predicted: of the model; biases: of the baseline.
        """
        sums, counts = dict(self.sums), dict(self.counts)
        known = {name: value for name, value in predicted.items() if math.isfinite(value)}
        of_biases = {OF_BIASES + name: value for name, value in biases.items() if math.isfinite(value)}
        for name, value in (known | of_biases).items():
            is_root = name.removeprefix(OF_BIASES) in ROOTS
            sums[name] = sums.get(name, 0.0) + number * (value**2 if is_root else value)
            counts[name] = counts.get(name, 0) + number
        return dataclasses.replace(self, predicted=known, sums=sums, counts=counts)

    def overall(self) -> dict[str, float]:
        """Return the metrics over all windows: exact for errors; for an AUC, the mean weighted by events."""
        return self._means("")

    def overall_biases(self) -> dict[str, float]:
        """Return the metrics of the baseline over all windows.

        Without those over other events than the model's: of windows in which one of the two is undefined, and
        of streams that an earlier version began.
        """
        return self._means(OF_BIASES)

    def _means(self, prefix: str) -> dict[str, float]:
        means = {
            name: self.sums[prefix + name] / number
            for name, number in self.counts.items()
            if not name.startswith(OF_BIASES) and self.counts.get(prefix + name) == number
        }
        return {name: math.sqrt(value) if name in ROOTS else value for name, value in means.items()}


@dataclass(frozen=True)
class Progress:
    """Progress of a training: steps, the epoch under way, counted from 0, and its ratings that were used.

    The next rating is at position `samples` of the epoch's order, on any number of ranks. best: the best
    validation result so far, None before the first; epochs_since_best: number of epochs that ended since the
    best one, see `training.loop.with_validation`. In a stream an epoch is a window; `stream` is its progress,
    and None for other trainings.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    epochs_since_best: int = 0
    stream: StreamProgress | None = field(default=None, metadata=OPTIONAL)

    @property
    def is_best(self) -> bool:
        """True if no checkpoint before this one was better.

        Without validation, each one counts as better than those before it, once an epoch has ended. With it,
        validated initial rows count as an epoch.
        """
        if self.best is None:
            return self.epoch > 0
        return self.samples == 0 and self.epochs_since_best == 0


def describe_step(progress: Progress) -> str:
    """Return a text with the step of a training."""
    if progress.step == 0:
        return "step 0, untrained" if progress.best is None else "step 0, initial rows"
    return f"step {progress.step:,}"
