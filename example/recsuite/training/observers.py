"""Callbacks and trackers of a training, from flags and arguments, and the stopwatch of every rank."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from typing_extensions import override

from recsuite.config.config import Config
from recsuite.hooks import extra
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import PHASES, Callback, Tracker
from recsuite.training.progress import Progress

# In the order of a run. "other" is the time outside of all parts: the report, the end of the workers.
PARTS = ("imports", "data", *PHASES, "other")


class Stopwatch(Callback):
    """Seconds by part since the start. They add up to the total, because a part stops the one around it.

    Reads only the host's clock: on CUDA a part ends when its work is queued, and the rest of the computation
    counts for the part that waits for it.
    """

    def __init__(self, parts: Sequence[str] = PARTS) -> None:
        """Start the clock. The last of the parts is the time outside of all others."""
        self._seconds = dict.fromkeys(parts, 0.0)
        self._part = parts[-1]
        self._since = time.perf_counter()

    @override
    def phase(self, name: str, progress: Progress) -> AbstractContextManager[None]:
        return self.part(name)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block for one of the parts, without that of parts nested in it."""
        around = self._switch(name)
        try:
            yield
        finally:
            self._switch(around)

    def split(self) -> dict[str, float]:
        """Return the seconds of each part up to now, in their order."""
        # The current part gets its seconds when it ends, so it is ended here and started again.
        self._switch(self._part)
        return dict(self._seconds)

    def _switch(self, name: str) -> str:
        """Switch to a part; return the one before."""
        now = time.perf_counter()
        before = self._part
        self._seconds[before] += now - self._since
        self._part, self._since = name, now
        return before


class Observers(Stopwatch):
    """Stopwatch of this rank, and all callbacks of its training, including the stopwatch.

    flags: those of the training, for trackers; the data decide some of them.
    """

    def __init__(self, flags: Mapping[str, Any]) -> None:
        super().__init__()
        self.callbacks: list[Callback] = [self]
        self.flags = dict(flags)


@contextlib.contextmanager
def observing(
    config: Config,
    context: RuntimeContext,
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[Tracker] = (),
) -> Iterator[Observers]:
    """Open the callbacks of a training: the stopwatch first, then, on rank 0, those of flags and of trackers,
    then the given ones. A context manager; on exit the trackers end. Not collective.

    config, context: flags and process; callbacks: your own; trackers: see `Tracker`.

    Raises:
        UserError: before anything is trained, when results could not be written.
    """
    observers = Observers(config.flags)
    with contextlib.ExitStack() as stack:
        # The output of an epoch is the same on every rank, and each file in --report_dir needs one writer.
        if context.rank == 0:
            observers.callbacks += _requested(config, context, trackers, observers.flags, stack)
        observers.callbacks += callbacks
        yield observers


def _requested(
    config: Config,
    context: RuntimeContext,
    trackers: Sequence[Tracker],
    all_flags: Mapping[str, Any],
    stack: contextlib.ExitStack,
) -> Iterator[Callback]:
    of_extras = (section.observers(config, context) for section in config.extras.values())
    for observer in itertools.chain(*of_extras, trackers):
        if isinstance(observer, Callback):
            yield observer
            continue
        tracking = extra("trackers").Tracking(observer, all_flags, context.say)
        # Also if the training fails: the tracker gets the values until then, and its end.
        stack.push(tracking.close)
        yield tracking
