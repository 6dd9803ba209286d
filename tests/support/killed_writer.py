"""A writer that is killed before each of its system calls in turn, for `killed_ranks.py`.

Python announces to an audit hook what it is about to ask of the file system; the hook counts, and kills the
process before call number 1, 2, ... until one run comes through. Checkpoints are those of `tiny_dumps.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from recsuite.checkpoint.checkpointer import _retire_compacted
from recsuite.checkpoint.folder import (
    BEST,
    LATEST,
    LEFTOVER,
    LOCK,
    NAME,
    archive_checkpoints,
    best_in,
    deltas_in,
    full_checkpoints_in,
    making_name,
    new_attempt,
    newest_in,
    publish,
    step_of,
    writing,
)
from recsuite.files import digest_of
from tests.support.tiny_dumps import BETTER, GOOD, WORSE, add_delta, add_dump, check_whole, fill, link_to

CALLS = ("os.rename", "os.symlink", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.truncate")
FOREIGN = ("notes.txt", ".making-tea", "step-1")


def publish_dump(save_dir: Path) -> None:
    """A third checkpoint, the best, of which one is kept."""
    making = fill(save_dir / ".making-step-000000040", 40, progress=BETTER)
    publish(making, save_dir / "step-000000040", keep=1)


def publish_delta(save_dir: Path) -> None:
    """The second delta of a chain, the best checkpoint."""
    base = full_checkpoints_in(save_dir)[-1]
    making = fill(save_dir / ".making-delta-000000040", 40, link_to(base, 2, 30), progress=BETTER)
    publish(making, save_dir / "delta-000000040", keep=1)


def fold(save_dir: Path) -> None:
    """Compact: write the newest checkpoint in full, and remove the parts that it replaces."""
    making = fill(save_dir / ".making-step-000000030", 30, progress=WORSE)
    publish(making, save_dir / "step-000000030", keep=1)
    _retire_compacted(save_dir, keep=1)


def begin(save_dir: Path) -> None:
    """A new writer, that finds leftovers of every kind."""
    attempt = making_name(save_dir / "step-000000070", new_attempt())
    for name in (attempt, ".making-step-000000050", ".making-delta-000000060", ".removing-step-000000001"):
        fill(save_dir / name, 50)
    for name in (".latest-7", ".best-7"):
        (save_dir / name).symlink_to("step-000000010")
    with writing(save_dir):
        pass


def put_aside(save_dir: Path) -> None:
    """A training that begins anew."""
    archive_checkpoints(save_dir)


# The action, and what it finds: checkpoints at steps 10, the best, and 20, and where it says so a delta to
# step 30.
ACTIONS: dict[str, tuple[Callable[[Path], None], bool]] = {
    "publish a dump": (publish_dump, False),
    "publish an increment": (publish_delta, True),
    "fold": (fold, True),
    "begin": (begin, True),
    "set aside": (put_aside, True),
}


def prepare(save_dir: Path, with_delta: bool) -> None:
    """Write the checkpoints that an action finds."""
    best = add_dump(save_dir, 10, progress=GOOD)
    # Every trainer makes it first.
    (save_dir / LOCK).touch()
    base = add_dump(save_dir, 20, progress=WORSE)
    if with_delta:
        add_delta(base, 1, 20, 30)
    (save_dir / BEST).symlink_to(best.name)
    (save_dir / LATEST).symlink_to("delta-000000030" if with_delta else base.name)
    for name in FOREIGN:
        (save_dir / name).write_text("mine")


def run_until_call(number: int, action: Callable[[Path], object], save_dir: Path) -> bool:
    """Run in a fork that is killed before its call of that number; whether it came through."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def watch(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            opened = event == "open" and str(arguments[0]).startswith(str(save_dir))
            if event not in CALLS and not opened:
                return
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            action(save_dir)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL), f"call {number} of {action.__name__} failed"
    return status == 0


def faults_of(save_dir: Path, least: int) -> list[str]:
    """Faults of a folder after a kill, and after the start of the next writer."""
    found = []
    for folder in (save_dir, save_dir / LATEST):
        # Where an earlier training is being set aside, `latest` and states may be gone from here.
        if newest_in(folder) or (folder.name == LATEST and folder.is_dir()):
            try:
                check_whole(folder)
            except Exception as error:
                found.append(f"{folder} is not whole: {error}")
    found += _faults_of_best(save_dir)
    before = {
        path: digest_of(path) for path in save_dir.rglob("*") if path.is_file() and _is_kept(path, save_dir)
    }
    with writing(save_dir):
        after = {path: digest_of(path) for path in save_dir.rglob("*") if path.is_file()}
    after = {path: digest for path, digest in after.items() if path.name != ".lock"}
    if before != after:
        found.append(f"the next writer changed {set(before.items()) ^ set(after.items())}")
    aside = [path for path in save_dir.iterdir() if path.name.startswith("run-")]
    steps = [
        step_of(path)
        for folder in (save_dir, *aside)
        for path in (*full_checkpoints_in(folder), *deltas_in(folder))
    ]
    if max(steps) < least:
        found.append(f"of step {least} only {steps} is left")
    return found


def _faults_of_best(save_dir: Path) -> list[str]:
    """Faults of the best checkpoint.

    Its link must name the complete one of step 10 or the better one of step 40; it may be missing only while
    an earlier training is set aside.
    """
    link, best = save_dir / BEST, best_in(save_dir)
    if not link.is_symlink():
        # Where an earlier training is set aside `latest` goes first.
        return [f"{link} is gone"] if (save_dir / LATEST).is_symlink() else []
    try:
        check_whole(link)
        check_whole(best or link)
    except Exception as error:
        return [f"the best state is not whole: {error}"]
    steps = step_of(link.resolve()), step_of(best or link.resolve())
    return [] if steps in ((10, 10), (10, 40), (40, 40)) else [f"{link} and {best} are of steps {steps}"]


def _is_kept(path: Path, save_dir: Path) -> bool:
    first = path.relative_to(save_dir).parts[0]
    return first != ".lock" and not LEFTOVER.fullmatch(first)


def kill_everywhere(work: Path, name: str) -> dict[str, Any]:
    """One kill before each call of an action; and after each the action is done again, to its end."""
    action, with_delta = ACTIONS[name]
    faults: list[str] = []
    least = 30 if with_delta else 20
    found = work / "found"
    prepare(found, with_delta)
    for number in range(1, 1000):
        save_dir = Path(shutil.copytree(found, work / str(number), symlinks=True))
        if run_until_call(number, action, save_dir):
            break
        faults += [f"before call {number} of {name}: {fault}" for fault in faults_of(save_dir, least)]
        if name == "set aside":
            faults += _set_aside_again(save_dir)
    return {"kills": number - 1, "faults": faults}


def _set_aside_again(save_dir: Path) -> list[str]:
    """After a second attempt nothing is left behind, and the chain is whole where it was put."""
    if newest_in(save_dir):
        archive_checkpoints(save_dir)
    whole = check_whole(save_dir / "run-one")
    left = [path.name for path in save_dir.iterdir() if NAME.fullmatch(path.name) and path.is_dir()]
    return [] if not left and len(whole.deltas) == 1 else [f"{left} was left, {whole} was set aside"]
