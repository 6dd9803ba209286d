"""The dynamic tables of a sharded model: their clock, their growth, and what became of ids on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from recsuite.sharding.dynamic.contents import Counts, Moving
from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.dynamic.sharded.moving import exchanged

# Looked at so often, because all ranks have to add up what they hold.
STEPS_BETWEEN_GROWTH = 32


class DynamicTables(Protocol):
    """A module with dynamic tables."""

    def dynamic_rows(self) -> Mapping[str, DynamicRows]:
        """This rank's share of each table, by its name."""

    def on_growth(self) -> None:
        """Told when shares have moved between the ranks."""

    def end_step(self) -> None:
        """Told when a step of training has ended. Collective: every rank."""


def dynamic_rows(model: nn.Module) -> dict[str, DynamicRows]:
    """This rank's share of each dynamic table, by its name. Not collective."""
    return {name: rows for module in dynamic_modules(model) for name, rows in module.dynamic_rows().items()}


def dynamic_modules(model: nn.Module) -> list[DynamicTables]:
    """The modules with dynamic tables. Not collective."""
    return [module for module in model.modules() if hasattr(module, "dynamic_rows")]  # type: ignore[misc]


def begin_step(shares: Mapping[str, DynamicRows], step: int, time: int, scale: float) -> None:
    """Say when the next step of training is, in steps and in the time of the events, in seconds, and what a
    row is of what the tables hold. shares: see `dynamic_rows`. Not collective.
    """
    for rows in shares.values():
        rows.begin_step(time if rows.spec.unit == "seconds" else step, scale)


def grow(model: nn.Module, step: int) -> list[str]:
    """Give tables that are too full twice their capacity, between two steps; a sentence for each that grew.

    Looks only every `STEPS_BETWEEN_GROWTH` steps, of the whole training. Collective: every rank.
    """
    grown: list[str] = []
    if step % STEPS_BETWEEN_GROWTH:
        return grown
    for module in dynamic_modules(model):
        before = len(grown)
        tables = module.dynamic_rows()
        growing = {name: rows for name, rows in tables.items() if rows.spec.grow}
        for rows in growing.values():
            # They are no reason to grow; and who is looked for when depends on when checkpoints are written.
            rows.let_expired_go()
        taken = _summed([rows.places.taken for rows in growing.values()])
        for (name, rows), places in zip(growing.items(), taken, strict=True):
            spec = rows.spec
            if places > spec.grow * spec.capacity and spec.capacity < spec.max_capacity:
                resize(rows, 2 * spec.capacity)
                grown.append(
                    f"{name} has {rows.spec.capacity:,} places from step {step:,} on: "
                    f"{places:,} of {spec.capacity:,} were taken"
                )
        if len(grown) > before:
            module.on_growth()
    return grown


def resize(rows: DynamicRows, capacity: int) -> None:
    """Give a table another capacity, and every row to the rank that then has its bucket. Collective."""
    moving: Moving = rows.resized(capacity)
    rows.settle(exchanged(moving, rows.placement))


def _summed(numbers: list[int], group: Any = None) -> list[int]:
    """The sums over all ranks of a group. Collective: every rank of it."""
    if not numbers:
        return []
    total = torch.tensor(numbers)
    # The process group of a GPU adds up only what lies on it.
    if dist.get_backend(group) == "nccl":
        total = total.cuda()
    dist.all_reduce(total, group=group)
    summed: list[int] = total.tolist()
    return summed


def counts_of(shares: Mapping[str, DynamicRows], group: Any = None) -> dict[str, Counts]:
    """What became of ids, of all ranks of a group together, by table. Collective: every rank of it.

    shares: see `dynamic_rows`.
    """
    mine = [number for rows in shares.values() for number in dataclasses.astuple(rows.counts())]
    everyones = iter(_summed(mine, group))
    return {table: Counts(*(next(everyones) for _ in dataclasses.fields(Counts))) for table in shares}


def describe_counts(counts: Mapping[str, Counts]) -> str:
    """One line on the dynamic tables: rows, and what became of ids since the beginning; "" without any."""
    shown = []
    for table, count in counts.items():
        others = [
            f"{getattr(count, name):,} {name}"
            for name in ("waiting", "evicted", "expired", "unplaced", "unadmitted")
            if getattr(count, name)
        ]
        shown.append(f"{table} {count.live:,} rows" + (f" ({', '.join(others)})" if others else ""))
    return f"dynamic tables: {'; '.join(shown)}" if shown else ""
