"""A writer of a dynamic delta that is killed before each of its system calls, for `killed_ranks.py`."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path
from typing import Any

from recsuite.checkpoint import chain
from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.folder import LATEST, LOCK, newest_in, publish, writing
from recsuite.checkpoint.format import ParentLink, read_manifest, write_manifest
from recsuite.training.progress import Progress
from tests.support.dynamic_checkpoints import SPEC, Table, advance
from tests.support.killed_writer import run_until_call
from tests.support.tiny_dumps import link_to

ACTION = "publish a dynamic delta"
BASE, DELTA = "step-000000020", "delta-000000040"
STEPS = {BASE: 20, DELTA: 40}


def table_at(step: int) -> Table:
    """A table after so many steps of an invented training; nothing counts as changed before the base."""
    table, chance = Table(SPEC, 2), random.Random(3)
    advance(table, chance, 0, STEPS[BASE])
    table.shares.clear_changes()
    advance(table, chance, STEPS[BASE], step)
    return table


def write(folder: Path, step: int, link: ParentLink | None) -> None:
    """A checkpoint of that table, or with a link its delta."""
    manifest = table_at(step).write(folder, is_delta=link is not None)
    write_manifest(folder, dataclasses.replace(manifest, progress=Progress(step), link=link))


def publish_delta(save_dir: Path) -> None:
    """Ids that came and those that left, since the base."""
    making = save_dir / f".making-{DELTA}"
    write(making, STEPS[DELTA], link_to(save_dir / BASE, 1, STEPS[BASE]))
    publish(making, save_dir / DELTA, keep=1)


def kill_everywhere(work: Path) -> dict[str, Any]:
    """One kill before each call; after each the newest checkpoint is read, and after a second try again."""
    found, faults = work / "found", list[str]()
    found.mkdir(parents=True)
    write(found / BASE, STEPS[BASE], None)
    (found / LOCK).touch()
    (found / LATEST).symlink_to(BASE)
    states = {name: table_at(step).state() for name, step in STEPS.items()}
    for number in range(1, 1000):
        save_dir = Path(shutil.copytree(found, work / str(number), symlinks=True))
        if run_until_call(number, publish_delta, save_dir):
            break
        for attempt in ("after the kill", "after another try"):
            fault = fault_of(save_dir, states)
            faults += [f"before call {number}, {attempt}: {fault}"] if fault else []
            # What the next writer does first.
            with writing(save_dir):
                pass
            if not (save_dir / DELTA).exists():
                publish_delta(save_dir)
    return {"kills": number - 1, "faults": faults}


def fault_of(save_dir: Path, states: dict[str, Any]) -> str:
    """Fault of the newest checkpoint, loaded on another number of ranks; empty without one."""
    newest = newest_in(save_dir)
    if newest is None:
        return "nothing is left"
    state = chain_at(newest)
    chain.check_whole(state)
    table = Table(SPEC, 3)
    dropped = table.load([*state.folders], [read_manifest(folder) for folder in state.folders])
    return "" if dropped == 0 and table.state() == states[newest.name] else f"{newest} holds another table"
