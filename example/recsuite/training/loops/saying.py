"""What is said of the windows of a stream: a line now and then, for there may be many in a second."""

from __future__ import annotations

import time
from datetime import datetime, timezone

from recsuite.errors import counted, four_places
from recsuite.models.tasks import Task
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import TrainedWindow

# Seconds from one line to the next, where windows are shorter.
AT_LEAST = 2.0


class WindowLines:
    """Says what windows were, several in one line."""

    def __init__(self, task: Task, unit: str, context: RuntimeContext) -> None:
        """unit: the noun for events."""
        self.task, self.unit, self.context = task, unit, context
        self._windows: list[TrainedWindow] = []
        self._said_at = time.monotonic()

    def add(self, window: TrainedWindow) -> None:
        """Take note of a window, and say a line if it is time to."""
        self._windows.append(window)
        if time.monotonic() - self._said_at >= AT_LEAST:
            self.say()

    def say(self) -> None:
        """Say what was not said yet."""
        if self._windows:
            self.context.say(describe_windows(self._windows, self.task, self.unit))
        self._windows, self._said_at = [], time.monotonic()


def describe_windows(windows: list[TrainedWindow], task: Task, unit: str) -> str:
    """One line on windows that follow each other; unit: the noun for events."""
    first, last = windows[0], windows[-1]
    numbers = f"window {last.number}" if len(windows) == 1 else f"windows {first.number} to {last.number}"
    number, seconds = sum(window.num_events for window in windows), sum(window.seconds for window in windows)
    name = task.main_metric
    shown = [("", last.validation[name])] if len(windows) == 1 else []
    shown.append((" of all windows", last.overall[name]))
    errors = ", ".join(f"{task.main_label}{of} {four_places(value)}" for of, value in shown)
    return (
        f"{numbers} ({day(first.first_time)} to {day(last.last_time)}): {counted(number, unit[:-1], unit)}, "
        f"predicted with {errors}, {number / max(seconds, 1e-9):,.0f} {unit}/s trained"
    )


def day(seconds: int) -> str:
    """A time since 1970 as people write it, to the minute."""
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M")
