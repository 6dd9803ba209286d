"""Programs that follow a training: wait for its first and newer models."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from recsuite.checkpoint.folder import BEST, best_in, newest_in, step_of
from recsuite.errors import UserError, format_duration, printable, with_script_name
from recsuite.files import resolved
from recsuite.places import ObjectError
from recsuite.runtime.console import say
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import Snapshot

POLL_SECONDS, LONGEST_PAUSE = 1.0, 10.0
# A wait without an end is said again after these.
REMIND_SECONDS = 600.0
# Longest time that a store may refuse requests before there is a model.
STORE_SECONDS = 60.0
Answer = TypeVar("Answer")


def wait_for_first(save_dir: Path, checkpoint: str = BEST) -> None:
    """Wait for the first checkpoint of a training, which may not have started; SIGINT ends the wait.

    checkpoint: see `Follower`.
    """
    begun, reminders = time.monotonic(), 0
    while not retried(lambda: _has_learned(save_dir, checkpoint)):
        waited = time.monotonic() - begun
        if waited >= REMIND_SECONDS * reminders:
            already = f", for {format_duration(waited)} already" if reminders else ""
            say(f"waiting for the first checkpoint in {save_dir}{already}")
            reminders += 1
        time.sleep(POLL_SECONDS)


def retried(ask: Callable[[], Answer]) -> Answer:
    """Return the answer of `ask`, which reads a store: a failed request is tried again for STORE_SECONDS.

    Raises:
        UserError: the last one, after that time; and at once one that is no failed request.
    """
    begun, pause = time.monotonic(), POLL_SECONDS
    while True:
        try:
            return ask()
        except (OSError, UserError) as error:
            has_failed = isinstance(error, ObjectError) or isinstance(error.__cause__, ObjectError)
            if not has_failed or time.monotonic() - begun > STORE_SECONDS:
                raise
            if pause == POLL_SECONDS:
                say(f"{printable(error)} Retrying for {STORE_SECONDS:.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _has_learned(save_dir: Path, checkpoint: str) -> bool:
    """Return True if there is a checkpoint after step 0, or validated initial rows and the best is wanted."""
    # It may be a link, see `Follower`.
    save_dir = resolved(save_dir)
    newest = newest_in(save_dir)
    if newest is None or step_of(newest) > 0:
        return newest is not None
    return checkpoint == BEST and best_in(save_dir) is not None


def follow(follower: Follower, stop: threading.Event, show: Callable[[], None] = lambda: None) -> None:
    """Look for a newer checkpoint every second, until `stop` is set. Call it from one thread.

    An exception does not end the loop: it is printed once and kept in `follower.failure`, and the next look
    comes after a pause that doubles up to LONGEST_PAUSE.

    show: called after each newer checkpoint, and again if it failed.
    """
    pause, is_newer = POLL_SECONDS, False
    while not stop.wait(pause):
        try:
            is_newer |= follower.refresh()
            if is_newer:
                show()
            follower.failure, follower.looked, pause, is_newer = "", time.monotonic(), POLL_SECONDS, False
        except Exception as error:
            # The previous model can still be used.
            is_mistake = isinstance(error, UserError)
            said = printable(error if is_mistake else f"{type(error).__name__}: {error}")
            is_new, follower.failure = said != follower.failure, said
            pause = min(2 * pause, LONGEST_PAUSE)
            # stderr may be closed, or memory may be short; following continues all the same.
            with contextlib.suppress(Exception):
                if is_new:
                    shown = error if is_mistake else traceback.format_exc()
                    print(with_script_name(shown), file=sys.stderr, flush=True)


def unknown_of(
    model: ServedModel, snapshot: Snapshot, users: Iterable[Any], items: Iterable[Any]
) -> dict[str, list[Any]]:
    """Return the ids of a request that have no row in a model, each once, by the names of users and items.

    Items that are described to the model are not unknown.

    Raises:
        UserError: when one cannot be an id.
    """
    unknown = {}
    for name, ids in ((snapshot.schema.user, users), (snapshot.schema.item, items)):
        # None and NaN are no ids, so they are not listed as unknown.
        given = [*dict.fromkeys(value for value in ids if isinstance(value, (int, str)) or _is_finite(value))]
        known = snapshot.known(name, given).tolist()
        unknown[name] = [value for value, is_known in zip(given, known, strict=True) if not is_known]
    unknown[snapshot.schema.item] = model.unknown_items(unknown[snapshot.schema.item])
    return unknown


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def from_one_snapshot(follower: Follower, ask: Callable[[], Answer]) -> tuple[Answer, Snapshot]:
    """Return the answer of `ask`, and the one snapshot that all of it comes from.

    ask: calls the model of the follower, once or several times. It is called again if a delta or another
    model came meanwhile, even if it failed. Newer models wait for the second call: otherwise a long request
    might never end when one comes every second.
    """
    model = follower.model
    before = model.snapshot
    try:
        answer = ask()
    except Exception:
        # If the model has changed, the error may come from a mix of two models.
        if model.snapshot is before:
            raise
    else:
        # Every delta makes a new snapshot, under the same lock as reads of rows.
        if model.snapshot is before:
            return answer, before
    with follower.changing:
        return ask(), model.snapshot
