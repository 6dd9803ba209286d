"""What long work reports while it runs: a bar on a terminal, elsewhere a line before ten seconds of
silence are over.

    with shown():                                 once in a process; without it stages say nothing
        with stage("drawing", 20_000_000, "ratings") as reached:
            reached(4_096)

A thread speaks, so work that is one long call into a library is not silent either. Imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from recsuite.errors import duration
from recsuite.runtime.console import say, seconds_of_silence

# Of silence; what looks whether they are over comes by ten times as often.
INTERVAL_SECONDS = 8.0


class Stage:
    """One part of the work: how much there is, in which unit, and how much is done; 0 is not known."""

    def __init__(self, title: str, total: int, unit: str, done: int) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, done
        # It says nothing of the rate.
        self.done_before = done
        self.start = time.monotonic()
        self.bar: Any = None
        # A log would hold every state of the bar, one after the other.
        if sys.stderr.isatty():
            from tqdm import tqdm

            # A bar needs an end.
            shape = {} if total else {"bar_format": "{desc}: {elapsed}"}
            self.bar = tqdm(
                total=total, desc=title, unit=f" {unit}", unit_scale=True, leave=False, initial=done, **shape
            )

    def reached(self, done: int) -> None:
        """So much is done in all."""
        if self.bar is not None:
            self.bar.update(done - self.done)
        self.done = done

    def __str__(self) -> str:
        seconds = time.monotonic() - self.start
        now = self.done - self.done_before
        so_far = f"{duration(seconds)} so far" if seconds >= 1 else "begun just now"
        if not self.total or not now:
            return f"{self.title}: {so_far}"
        left, rate = (self.total - self.done) * seconds / now, now / seconds
        return (
            f"{self.title}: {self.done:,} of {self.total:,} {self.unit}, {rate:,.{0 if rate >= 10 else 2}f} "
            f"{self.unit}/s, about {duration(left)} left"
        )


class Clock:
    """The stages that this process is in, and when it last said something."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.stages: list[Stage] = []
        self._ended = threading.Event()
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say nothing any more; returns when nothing can follow."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.interval / 10):
            # The list may change at any moment, but not the copy. Of nested stages the innermost knows most.
            for innermost in self.stages[-1:]:
                if innermost.bar is not None:
                    innermost.bar.refresh()
                elif min(time.monotonic() - self._start, seconds_of_silence()) >= self.interval:
                    say(str(innermost))


# So that code deep in the work can report without being handed a clock.
_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def shown(interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Have the stages of this process be seen, unless somebody around sees to it already."""
    if _clock.get() is not None:
        yield
        return
    clock = Clock(interval)
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)
        clock.end()


@contextlib.contextmanager
def stage(
    title: str, total: int = 0, unit: str = "", *, done: int = 0, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A part of the work, which may lie in another one; gives what is to be called with how much is done.

    total: 0 where that is not known; done: before this process began; quiet: as ranks beside 0 are.
    """
    clock = _clock.get()
    if clock is None or quiet:
        yield lambda done: None
        return
    mine = Stage(title, total, unit, done)
    clock.stages.append(mine)
    try:
        yield mine.reached
    finally:
        clock.stages.remove(mine)
        if mine.bar is not None:
            mine.bar.close()
