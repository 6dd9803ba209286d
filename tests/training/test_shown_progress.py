"""Progress of a training: the line of an epoch, and the time left of all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from recsuite.runtime.console import Stage
from recsuite.training import callbacks
from recsuite.training.callbacks import ShownProgress, Step
from recsuite.training.progress import Progress

STEPS, EPOCHS = 10, 4
# Of the first step, another one, and a validation with its checkpoint.
FIRST, LATER, VALIDATION = 30.0, 2.0, 6.0


def seconds_left(monkeypatch: pytest.MonkeyPatch, begin: Progress) -> Iterator[float | None]:
    """Yield the time left of all epochs that is known after each step and each validation."""
    clock, stages = SimpleNamespace(now=100.0), list[Stage]()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)

    class Opened(Stage):
        def __init__(self, title: str, total: int, unit: str = "", done: int = 0, quiet: bool = False):
            super().__init__(title, total, unit, done)
            stages.append(self)

        def __enter__(self):  # type: ignore[no-untyped-def]
            return self.reached

        def __exit__(self, *error: object) -> None:
            stages.remove(self)

    monkeypatch.setattr(callbacks, "stage", Opened)
    shown = ShownProgress(STEPS, "ratings", EPOCHS, quiet=False)

    def left() -> float | None:
        known = stages[0].estimate()
        return known[1] if known else None

    with shown.of_epochs(begin):
        for epoch in range(begin.epoch, EPOCHS):
            first = begin.samples if epoch == begin.epoch else 0
            with shown.phase("steps", Progress(epoch=epoch, samples=first)):
                for step in range(first, STEPS):
                    is_first = (epoch, step) == (begin.epoch, first)
                    clock.now += FIRST if is_first else LATER
                    shown.on_step(Step(Progress(epoch=epoch, samples=step + 1), None, {}))  # type: ignore[arg-type]
                    yield left()
            clock.now += VALIDATION
            yield left()
    assert stages == []


def test_the_time_left_of_all_epochs_has_their_validations_and_never_rises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    epoch = STEPS * LATER + VALIDATION
    shown = [*seconds_left(monkeypatch, Progress())]
    # Known once a second epoch has begun: the first step of the first one tells nothing.
    assert shown[: STEPS + 1] == [None] * (STEPS + 1)
    assert shown[STEPS + 1 :] == pytest.approx(
        [
            (EPOCHS - epochs) * epoch - passed
            for epochs in range(1, EPOCHS)
            for passed in (*(LATER * step for step in range(STEPS)), epoch - LATER)
        ]
    )


def test_the_rest_of_a_resumed_epoch_is_no_measure_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [*seconds_left(monkeypatch, Progress(epoch=1, samples=STEPS - 1))]
    # The last step and its validation, then a whole epoch.
    assert shown[: 2 + STEPS + 1] == [None] * (2 + STEPS + 1)
    assert shown[2 + STEPS + 1] == pytest.approx(STEPS * LATER + VALIDATION)
