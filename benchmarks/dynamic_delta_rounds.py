"""Deltas of a static table and of dynamic ones in turns: what a rank of benchmarks/dynamic_delta.py measures.

What writes them is what writes them in a training, from when a step has ended until the delta is published.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from checkpoint_setup import Clock, Settings, wide_columns
from dynamic import draw_ids, ids_that_fill, put_ids
from dynamic_delta import FULL, HALF_FULL, SHARE, STATIC
from safetensors import safe_open

from recsuite.checkpoint.checkpointer import Checkpointer
from recsuite.checkpoint.folder import deltas_in, retire
from recsuite.checkpoint.format import read_manifest
from recsuite.checkpoint.shards import name_of
from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.dynamic import DynamicTable
from recsuite.sharding.dynamic_ranks import dynamic_rows
from recsuite.sharding.table import StaticTable
from recsuite.training.callbacks import Step
from recsuite.training.progress import Progress
from recsuite.training.state import build_train_state

TABLE = "user"
# In steps, which here are rounds: ids that are `TTL` older than a round leave in it.
TTL = 1_000_000


def measure_deltas(settings: Settings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Bytes, seconds, rows and tombstones of the deltas of each kind, round by round."""
    changed = max(2, round(SHARE * settings.rows / context.world_size))
    makers = {STATIC: make_static, FULL: make_full, HALF_FULL: make_half_full}
    kinds = {name: make(changed, settings, config, context) for name, make in makers.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    clock, names = Clock(), list(kinds)
    # The first round warms up.
    for number in range(settings.rounds + 1):
        # Who comes second may meet what the first one left behind, so they take turns.
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            figures = kinds[name].delta(number + 1, clock, context)
            for what, value in figures.items():
                found[name].setdefault(what, []).extend([value] if number else [])
    return found


class Kind:
    """A training with a table of one kind. change: makes the changes of a round on this rank."""

    def __init__(self, checkpointer: Checkpointer, change: Callable[[int], None]) -> None:
        self.checkpointer, self.change = checkpointer, change
        self.save_dir = Path(checkpointer.config.checkpoint.save_dir)

    def delta(self, number: int, clock: Clock, context: RuntimeContext) -> dict[str, float]:
        """The delta of a round, which is removed when it was looked at."""
        self.change(number)
        step = Step(Progress(number, 0, samples=1), torch.tensor(0.5), {})
        seconds = clock(lambda: self.checkpointer.on_step(step))
        (folder,) = deltas_in(self.save_dir)
        figures = {**contents_of(folder), "seconds": seconds}
        clock.barrier()
        if context.rank == 0:
            retire(folder)
        clock.barrier()
        return figures


def contents_of(folder: Path) -> dict[str, float]:
    """What is in a delta: bytes, and of the large table rows and ids that left."""
    manifest, gone = read_manifest(folder), 0
    for entry in manifest.files:
        if manifest.dynamic and entry.name.endswith(".safetensors"):
            with safe_open(folder / entry.name, framework="pt") as file:
                gone += len(file.get_tensor(name_of(TABLE, "gone")))
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"bytes": size, "rows": manifest.about["rows"][TABLE], "gone": gone}


def make_static(changed: int, settings: Settings, config: Config, context: RuntimeContext) -> Kind:
    """A table with a vocabulary."""
    checkpointer = _started(wide_columns(settings, config), config, context)
    table = checkpointer.writer.tables[TABLE]
    assert isinstance(table, StaticTable)
    number_of_rows = len(table.export()["weight"])
    generator = torch.Generator().manual_seed(context.rank)

    def change(number: int) -> None:
        # Marked as the tracker would have it, because a step touches as many rows as its batch has.
        table.mark(torch.randperm(number_of_rows, generator=generator)[:changed])

    return Kind(checkpointer, change)


def make_full(changed: int, settings: Settings, config: Config, context: RuntimeContext) -> Kind:
    """A dynamic table whose every place is taken."""
    ids = ids_that_fill(settings.rows)
    # Not all alike: who was seen last decides who leaves.
    return _dynamic(settings.rows, ids, ids % 1000, "0", changed, config, context)


def make_half_full(changed: int, settings: Settings, config: Config, context: RuntimeContext) -> Kind:
    """A dynamic table with twice the places, whose ids leave when they expire."""
    ids = draw_ids(settings.rows, torch.Generator().manual_seed(0)).unique()
    # In each round as many expire as new ones come.
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    seen = order // (changed // 2 * context.world_size)
    return _dynamic(2 * settings.rows, ids, seen, f"{TTL}", changed, config, context)


def _dynamic(
    places: int,
    ids: torch.Tensor,
    seen: torch.Tensor,
    ttl: str,
    changed: int,
    config: Config,
    context: RuntimeContext,
) -> Kind:
    folder = f"{config.checkpoint.save_dir}-{places}"
    capacity = f"{TABLE}={places}"
    config = config.replaced(ids="dynamic", capacity=capacity, grow=0.0, ttl=ttl, save_dir=folder)

    def fill(share: DynamicTable) -> None:
        mine = share.placement.owner_of(ids) == share.rank
        put_ids(share, ids[mine], seen[mine])

    checkpointer = _started(open_columns(config), config, context, fill)
    share = checkpointer.writer.tables[TABLE]
    assert isinstance(share, DynamicTable)
    # Not one of those with which the ids were drawn that are there already.
    generator = torch.Generator().manual_seed(100 + context.rank)

    def change(number: int) -> None:
        share.begin_step(TTL + number)
        there = share.places.flat_ids[share.places.flat_seen >= share.clock.horizon]
        known = there[torch.randperm(len(there), generator=generator)[: changed - changed // 2]]
        new = draw_ids(4 * context.world_size * changed, generator).unique()
        new = new[share.placement.owner_of(new) == share.rank]
        new = new[torch.randperm(len(new), generator=generator)[: changed // 2]]
        share.find_or_insert(torch.cat([known, new]).sort().values)

    return Kind(checkpointer, change)


def _started(
    columns: Any, config: Config, context: RuntimeContext, fill: Callable[[DynamicTable], None] | None = None
) -> Checkpointer:
    """What writes the checkpoints of an untrained model, after the first one."""
    # Bytes and seconds do not depend on what the rows say.
    state = build_train_state(columns, config, context)
    if fill is not None:
        fill(dynamic_rows(state.model)[TABLE])
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    checkpointer.begin(state)
    return checkpointer
