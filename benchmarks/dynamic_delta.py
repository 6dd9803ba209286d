"""Measure a delta of a dynamic table, with evicted ids, beside one of a static table.

    python benchmarks/dynamic_delta.py --write      docs/dynamic_delta.json and its table
    python benchmarks/dynamic_delta.py --rows 20000 --ratings 20000 --rounds 2

Three tables of as many rows in one training each, all in the same processes, write their deltas in turns,
from the end of a step until the delta is published:

    static         a share of the rows was touched
    full           as many rows, but half of them of new ids, each of which evicted another one
    half full      the same in twice the places, the default; ids leave when their time to live ends

All else lies in a folder that is removed. Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from checkpoint import (
    DIM,
    NUM_RANKS,
    AllRanksClock,
    CheckpointSettings,
    add_flags,
    launch,
    open_settings,
    run_rank,
    table_of,
    wide_columns,
)
from common import DOCS, bar, describe, finish, make_parser, origin, ratio, shown_ratio, table
from dynamic import draw_ids, ids_that_fill, put_ids
from safetensors import safe_open

from example import make_model
from recsuite.checkpoint.checkpointer import Checkpointer
from recsuite.checkpoint.folder import deltas_in, remove_checkpoint
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

PAGE = DOCS / "log" / "benchmarks.md"
STATIC, FULL, HALF_FULL = KINDS = ("static", "full", "half full")
# Share of the rows in a delta.
SHARE = 0.01
BAR = 1.3
# Figures of a delta that have a bar.
COMPARED = ("bytes", "seconds")
TABLE = "user"
# In steps, which are rounds here: ids that are TTL older than a round leave in it.
TTL = 1_000_000


def main() -> None:
    """Measure and show, and write if that is asked for; or be a rank of a launch."""
    if sys.argv[1:2] == ["rank"]:
        run_rank({"deltas": measure_deltas}, *sys.argv[2:])
        return
    parser = make_parser(__doc__)
    add_flags(parser, [1_000_000], ratings=100_000, rounds=21)
    finish("dynamic_delta", parser.parse_args(), measure, judge, render, PAGE, mark="delta")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    sizes = []
    with open_settings(flags) as settings:
        for rows in flags.rows:
            with table_of(settings, rows) as wide:
                sizes.append({"rows": rows, "deltas": launch(NUM_RANKS, "deltas", wide, __file__)})
    return {**describe(), "dim": DIM, "ranks": NUM_RANKS, "share": SHARE, "sizes": sizes}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    bars = []
    for size in result["sizes"]:
        static = size["deltas"][STATIC]
        for kind in (FULL, HALF_FULL):
            for what in COMPARED:
                found = ratio(size["deltas"][kind][what], static[what])
                name = f"{size['rows']:,} rows, {kind}, {what} of a static delta"
                bars.append(bar(name, found, BAR, f"{found:.2f}", f"{BAR}", at_most=True))
    return bars


def render(result: dict[str, Any]) -> str:
    """Table with a row for each size and kind of table."""
    heads = ["rows", "table", "rows in a delta", "evicted ids", "MiB", "ms"]
    heads += [f"{what}, of static (bar: {BAR})" for what in ("bytes", "time")]
    lines = []
    for size in result["sizes"]:
        static = size["deltas"][STATIC]
        for kind, found in size["deltas"].items():
            counts = [f"{median(found[what]):,.0f}" for what in ("rows", "gone")]
            usual, best = (1000 * which(found["seconds"]) for which in (median, min))
            amounts = [f"{median(found['bytes']) / 2**20:.2f}", f"{usual:.0f} (best {best:.0f})"]
            ratios = ["" if kind == STATIC else shown_ratio(found[what], static[what]) for what in COMPARED]
            lines.append([f"{size['rows']:,}", kind, *counts, *amounts, *ratios])
    rounds = len(result["sizes"][0]["deltas"][STATIC]["seconds"])
    about = (
        f"Deltas of {100 * result['share']:g} % of the rows of {result['dim']} numbers, {result['ranks']} "
        f"processes; half of those of dynamic tables belong to new ids, and about as many were evicted. "
        f"Medians over {rounds} rounds, of ratios within a round, and [least, most]. {origin(result)}."
    )
    return f"{table(heads, lines, left=(1,))}\n\n{about}"


def measure_deltas(settings: CheckpointSettings, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Bytes, seconds, rows and evicted ids of the deltas of each kind, round by round."""
    changed = max(2, round(SHARE * settings.rows / context.world_size))
    makers = {STATIC: make_static, FULL: make_full, HALF_FULL: make_half_full}
    kinds = {name: make(changed, settings, config, context) for name, make in makers.items()}
    found: dict[str, dict[str, list[float]]] = {name: {} for name in kinds}
    clock, names = AllRanksClock(), list(kinds)
    # The first round warms up.
    for number in range(settings.rounds + 1):
        # Each kind comes first in some rounds: a measurement may meet leftovers of the one before it.
        for name in (*names[number % len(names) :], *names[: number % len(names)]):
            figures = kinds[name].delta(number + 1, clock, context)
            for what, value in figures.items():
                found[name].setdefault(what, []).extend([value] if number else [])
    return found


class DeltaKind:
    """Training with a table of one kind. change: makes the changes of a round on this rank."""

    def __init__(self, checkpointer: Checkpointer, change: Callable[[int], None]) -> None:
        self.checkpointer, self.change = checkpointer, change
        self.save_dir = Path(checkpointer.config.checkpoint.save_dir)

    def delta(self, number: int, clock: AllRanksClock, context: RuntimeContext) -> dict[str, float]:
        """Write the delta of a round, describe it and remove it; collective."""
        self.change(number)
        step = Step(Progress(number, 0, samples=1), torch.tensor(0.5), {})
        seconds = clock(lambda: self.checkpointer.on_step(step))
        (folder,) = deltas_in(self.save_dir)
        figures = {**contents_of(folder), "seconds": seconds}
        clock.barrier()
        if context.rank == 0:
            remove_checkpoint(folder)
        clock.barrier()
        return figures


def contents_of(folder: Path) -> dict[str, float]:
    """Bytes of a delta, and rows and evicted ids of the large table in it."""
    manifest, gone = read_manifest(folder), 0
    for entry in manifest.files:
        if manifest.dynamic and entry.name.endswith(".safetensors"):
            with safe_open(folder / entry.name, framework="pt") as file:
                gone += len(file.get_tensor(name_of(TABLE, "gone")))
    size = sum(path.stat().st_size for path in folder.iterdir())
    return {"bytes": size, "rows": manifest.about["rows"][TABLE], "gone": gone}


def make_static(
    changed: int, settings: CheckpointSettings, config: Config, context: RuntimeContext
) -> DeltaKind:
    """Table with a fixed vocabulary."""
    checkpointer = _started(wide_columns(settings, config), config, context)
    table = checkpointer.writer.tables[TABLE]
    assert isinstance(table, StaticTable)
    number_of_rows = len(table.export()["weight"])
    generator = torch.Generator().manual_seed(context.rank)

    def change(number: int) -> None:
        # Marked as the tracker does: a step touches the rows of its batch, and no share of a table.
        table.mark(torch.randperm(number_of_rows, generator=generator)[:changed])

    return DeltaKind(checkpointer, change)


def make_full(
    changed: int, settings: CheckpointSettings, config: Config, context: RuntimeContext
) -> DeltaKind:
    """Dynamic table of which every place is taken."""
    ids = ids_that_fill(settings.rows)
    # Of different ages, which decide on evictions.
    return _dynamic(settings.rows, ids, ids % 1000, "0", changed, config, context)


def make_half_full(
    changed: int, settings: CheckpointSettings, config: Config, context: RuntimeContext
) -> DeltaKind:
    """Dynamic table with twice the places, whose ids leave when they expire."""
    ids = draw_ids(settings.rows, torch.Generator().manual_seed(0)).unique()
    # In each round as many expire as are inserted.
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
) -> DeltaKind:
    folder = f"{config.checkpoint.save_dir}-{places}"
    capacity = f"{TABLE}={places}"
    config = config.replaced(
        vocabulary="dynamic", capacity=capacity, max_load_factor=0.0, ttl=ttl, save_dir=folder
    )

    def fill(share: DynamicTable) -> None:
        mine = share.placement.owner_of(ids) == share.rank
        put_ids(share, ids[mine], seen[mine])

    checkpointer = _started(open_columns(config), config, context, fill)
    share = checkpointer.writer.tables[TABLE]
    assert isinstance(share, DynamicTable)
    # Another seed than that of the ids in the table.
    generator = torch.Generator().manual_seed(100 + context.rank)

    def change(number: int) -> None:
        share.begin_step(TTL + number)
        there = share.places.flat_ids[share.places.flat_seen >= share.clock.horizon]
        known = there[torch.randperm(len(there), generator=generator)[: changed - changed // 2]]
        new = draw_ids(4 * context.world_size * changed, generator).unique()
        new = new[share.placement.owner_of(new) == share.rank]
        new = new[torch.randperm(len(new), generator=generator)[: changed // 2]]
        share.find_or_insert(torch.cat([known, new]).sort().values)

    return DeltaKind(checkpointer, change)


def _started(
    columns: Any, config: Config, context: RuntimeContext, fill: Callable[[DynamicTable], None] | None = None
) -> Checkpointer:
    """Checkpointer of an untrained model, after its first checkpoint."""
    # Bytes and seconds do not depend on the values of rows.
    state = build_train_state(columns, config, context, make_model)
    if fill is not None:
        fill(dynamic_rows(state.model)[TABLE])
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    checkpointer.begin(state, checkpointer.start)
    return checkpointer


if __name__ == "__main__":
    main()
