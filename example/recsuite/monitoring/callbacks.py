"""Callbacks and trackers of a training, by flags and by arguments, and the stopwatch of every rank."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import PHASES, Callback

if TYPE_CHECKING:
    from recsuite.monitoring.trackers import Tracker

# In the order of a run. "other" is what no part claims: the report, the end of the workers.
PARTS = ("imports", "data", *PHASES, "other")


class Stopwatch(Callback):
    """Seconds by part since it was made; they add up to the whole, because a part stops the one around it.

    Reads the host's clock alone: on CUDA a part ends when its work is queued, and what is still to be
    computed counts for the part that waits for it.
    """

    def __init__(self, parts: Sequence[str] = PARTS) -> None:
        """The last of the parts is what no other claims."""
        self._seconds = dict.fromkeys(parts, 0.0)
        self._part = parts[-1]
        self._since = time.perf_counter()

    def phase(self, name: str, progress: Progress) -> AbstractContextManager[None]:
        """See `Callback`: each phase of a training is a part."""
        return self.part(name)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what happens inside for one of the parts, but for what is inside a part of its own there."""
        around = self._switch(name)
        try:
            yield
        finally:
            self._switch(around)

    def split(self) -> dict[str, float]:
        """Seconds of each part up to now, in their order."""
        # The part under way gets its seconds when it is left, so it is left here and entered again.
        self._switch(self._part)
        return dict(self._seconds)

    def _switch(self, name: str) -> str:
        """Go over to a part; returns the one before."""
        now = time.perf_counter()
        before = self._part
        self._seconds[before] += now - self._since
        self._part, self._since = name, now
        return before


class Observers(Stopwatch):
    """The stopwatch of this rank, and all callbacks of its training, the stopwatch among them."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callback] = [self]


@contextlib.contextmanager
def observing(
    config: Config,
    context: RuntimeContext,
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[Tracker] = (),
) -> Iterator[Observers]:
    """Open the callbacks of a training: the stopwatch first, then, on rank 0, those that the flags ask for
    and those of trackers, then those that are given. A context manager, at whose end the trackers end. Not
    collective.

    config, context: flags and process; callbacks: your own; trackers: see `Tracker`.

    Raises:
        UserError: before anything is trained, when results could not be written.

        with rs.observing(args, runtime, [MyCallback()], [rs.FileTracker("track.jsonl")]) as observers:
            ...
    """
    found = Observers()
    with contextlib.ExitStack() as stack:
        # What an epoch shows is the same on every rank, and each file in --report_dir needs a single writer.
        if context.rank == 0:
            found.callbacks += _asked_for(config, context, trackers, stack)
        found.callbacks += callbacks
        yield found


def _asked_for(
    config: Config, context: RuntimeContext, trackers: Sequence[Tracker], stack: contextlib.ExitStack
) -> Iterator[Callback]:
    flags = config.monitoring
    # First, because the others write into this folder.
    if flags.report_dir:
        from recsuite.monitoring.report import make_report_dir

        make_report_dir(Path(flags.report_dir))
    if flags.profile:
        from recsuite.monitoring.profiler import Profile

        yield Profile(flags.profile, Path(flags.report_dir or "."), context)
    if flags.tensorboard or trackers:
        from recsuite.monitoring.trackers import TensorBoardTracker, Tracking

        if flags.tensorboard:
            trackers = [TensorBoardTracker(Path(flags.report_dir, "tensorboard")), *trackers]
        for tracker in trackers:
            tracking = Tracking(tracker, config.flags, context.say)
            # Also where the training fails: the tracker gets what was seen until then, and its end.
            stack.push(tracking.close)
            yield tracking
