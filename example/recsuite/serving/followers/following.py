"""What every program that follows a training shares: the wait for its first model, and for each newer one."""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from recsuite.checkpoint.storage.directory import newest_in, step_of
from recsuite.errors import UserError, signed
from recsuite.runtime.console import say
from recsuite.serving.served import Follower
from recsuite.serving.snapshot import Snapshot

POLL_SECONDS = 1.0
Answer = TypeVar("Answer")


def wait_for_first(save_dir: Path) -> None:
    """Wait for the first checkpoint of a training that has begun, or will; SIGINT ends it."""
    if not _has_learned(save_dir):
        say(f"waiting for the first checkpoint in {save_dir}")
    while not _has_learned(save_dir):
        time.sleep(POLL_SECONDS)


def _has_learned(save_dir: Path) -> bool:
    """Whether there is a checkpoint after a step."""
    newest = newest_in(save_dir)
    return newest is not None and step_of(newest) > 0


def follow(follower: Follower, stop: threading.Event, show: Callable[[], None] = lambda: None) -> None:
    """Look for a newer checkpoint every second, until `stop` is set. Call it from one thread.

    show: called after each newer one; may raise a UserError too, which is said as those of the checkpoints.
    """
    said = ""
    while not stop.wait(POLL_SECONDS):
        try:
            if follower.refresh():
                show()
            said = ""
        except UserError as error:
            # The model before is still good. Said once, for the fault may stay.
            if str(error) != said:
                print(signed(error), file=sys.stderr, flush=True)
            said = str(error)


def unknown_of(snapshot: Snapshot, users: Iterable[Any], items: Iterable[Any]) -> dict[str, list[Any]]:
    """Ids of a request that have no row in a model, each once, under the names of users and of items.

    Raises:
        UserError: when one cannot be an id.
    """
    found = {}
    for name, ids in ((snapshot.schema.user, users), (snapshot.schema.item, items)):
        # Of nobody, such as None, nothing can be unknown.
        given = [*dict.fromkeys(each for each in ids if isinstance(each, (int, str)) or _is_finite(each))]
        known = snapshot.known(name, given).tolist()
        found[name] = [each for each, is_known in zip(given, known, strict=True) if not is_known]
    return found


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def of_one_moment(follower: Follower, ask: Callable[[], Answer]) -> tuple[Answer, Snapshot]:
    """What `ask` gets from the model of a follower, and the snapshot that all of it comes from.

    ask: asks the model, once or several times, and is called again where a delta came in between; the second
    time deltas wait for it, for a long request would never end where one comes every second.
    """
    model = follower.model
    before = model.snapshot
    answer = ask()
    # Every delta makes another snapshot, under the lock under which rows are read.
    if model.snapshot is before:
        return answer, before
    with follower.changing:
        return ask(), model.snapshot
