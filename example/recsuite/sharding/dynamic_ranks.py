"""Dynamic tables on all ranks: capacity, clock, growth and counters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, fields
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import ShardedEmbeddingCollection

from recsuite.config.presets import AUTO
from recsuite.config.sections import TablesConfig
from recsuite.datasets.schema import Table
from recsuite.errors import UserError
from recsuite.runtime.host import shown_bytes
from recsuite.sharding.dynamic import (
    BUCKET_WIDTH,
    NO_ROW,
    BucketPlacement,
    ChangeMarks,
    DynamicSpec,
    DynamicTable,
    LiveRows,
    ResizedShare,
    SeenIds,
)
from recsuite.sharding.table import EmbeddingTable, IdCounters

# Places for each id of the data. Buckets fill at random: half full, one in three hundred has no place for one
# id more.
PLACES_PER_ID = 2
# Memory of a place besides its row: id, time and count, marks, and the optimizer state.
BYTES_BESIDE_A_ROW = 8 + 8 + 4 + 2 + 4
# Memory of a place for ids that wait for admission.
BYTES_OF_WAITING = 8 + 8 + 4 + 2


def specs_of(
    tables: Sequence[Table],
    config: TablesConfig,
    widths: Mapping[str, int],
    init_std: float,
    seed: int,
    memory: int,
    is_stream: bool = False,
) -> dict[str, DynamicSpec]:
    """Return the spec of each dynamic table, by its name.

    widths: of each table; memory: bytes of all ranks for tables; is_stream: the number of ids is unknown.

    Raises:
        UserError: when --capacity names a table that is not dynamic, asks a stream for a count, or for more
            than fits the memory.
    """
    dynamic = [table for table in tables if table.feature.is_dynamic]
    wanted = config.capacities()
    names = [table.name for table in dynamic]
    for name in wanted:
        if name and name not in names:
            raise UserError(
                f"--capacity must name a dynamic table ({', '.join(names) or 'there are none'}), got {name}; "
                "a capacity without a name is for all of them."
            )
    if not dynamic:
        return {}
    if is_stream:
        _check_stream(dynamic, wanted, config)
    shares = _shares(dynamic, is_stream)
    # A share is for the tables after all growth, because that is what they need in the end.
    sizes = {name: bytes_of_a_place(config, widths[name]) * _growth(config) for name in names}
    places = _places(dynamic, wanted, shares, sizes, memory)
    _check_memory(places, sizes, config, memory)
    return {
        name: DynamicSpec(
            name,
            widths[name],
            capacity,
            capacity * _growth(config),
            seed=seed,
            init_std=init_std,
            admit=config.admission_threshold,
            evict=config.eviction,
            ttl=config.expiry.amount,
            half_life=config.halving.amount,
            unit=config.unit,
            distribution=config.distribution,
            grow=config.max_load_factor,
        )
        for name, capacity in places.items()
    }


def _check_stream(tables: Sequence[Table], wanted: Mapping[str, str], config: TablesConfig) -> None:
    """Refuse to count the ids of files for a stream, which must not know later ids."""
    name = next((table.name for table in tables if wanted.get(table.name, wanted[""]) == AUTO), None)
    if name is not None:
        growth = f", which may grow to {_growth(config)} times as many" if config.max_load_factor else ""
        raise UserError(
            f"--capacity auto counts the ids of all files, and those of a stream are not known yet (table "
            f"{name}); give a number of places such as 10000{growth}, or a share of the memory such as 25%."
        )


def _check_memory(
    places: Mapping[str, int], bytes_of_a_place: Mapping[str, int], config: TablesConfig, memory: int
) -> None:
    """Refuse what the planner would refuse too, but before memory is needed to plan it."""
    needed = sum(bytes_of_a_place[name] * number for name, number in places.items())
    if needed > memory:
        growth = f" ({_growth(config)} times as many after growth)" if config.max_load_factor else ""
        raise UserError(
            f"--capacity {config.capacity} makes {sum(places.values()):,} places{growth}, which need "
            f"{shown_bytes(needed)}; all ranks together have {shown_bytes(memory)} for tables. Fix: "
            "give a smaller --capacity, --max_growth or --embedding_dim, or start more processes."
        )


def _shares(tables: Sequence[Table], is_stream: bool) -> dict[str, float]:
    """Return each table's share of the memory: in proportion to its ids, or equal for a stream."""
    numbers = {table.name: 1 if is_stream else table.rows for table in tables}
    return {name: number / sum(numbers.values()) for name, number in numbers.items()}


def _growth(config: TablesConfig) -> int:
    """Return the factor by which a table may grow by doubling."""
    return 1 << (config.max_growth.bit_length() - 1) if config.max_load_factor else 1


def bytes_of_a_place(config: TablesConfig, embedding_dim: int) -> int:
    """Return the bytes of a row with its id, counters and optimizer state."""
    return (
        4 * embedding_dim + BYTES_BESIDE_A_ROW + (BYTES_OF_WAITING if config.admission_threshold > 1 else 0)
    )


def _places(
    tables: Sequence[Table],
    wanted: Mapping[str, str],
    shares: Mapping[str, float],
    bytes_of_a_place: Mapping[str, int],
    memory: int,
) -> dict[str, int]:
    """Return the places of each table, in whole buckets, at least one."""
    places = {}
    for table in tables:
        value = wanted.get(table.name, wanted[""])
        if value.endswith("%"):
            part = 1.0 if table.name in wanted else shares[table.name]
            share = float(value[:-1]) / 100 * memory * part
            buckets = int(share / bytes_of_a_place[table.name]) // BUCKET_WIDTH
        else:
            buckets = -(-(PLACES_PER_ID * table.rows if value == AUTO else int(value)) // BUCKET_WIDTH)
        places[table.name] = BUCKET_WIDTH * max(1, buckets)
    return places


# Values of one rank, one for each of its ids -> the values that were sent to it.
Send = Callable[[torch.Tensor], torch.Tensor]


def exchanged(moving: ResizedShare, placement: BucketPlacement) -> ResizedShare:
    """Send the contents of shares to their ranks by a placement. Collective: every rank.

    Returns the contents that belong to this rank.
    """
    if placement.world_size == 1:
        return moving

    def send(ids: torch.Tensor) -> Send:
        return _sender(placement.owner_of(ids), placement.world_size)

    live, waiting = moving.live, moving.live.waiting
    rows, waits = send(live.ids), send(waiting.ids)
    arrived = LiveRows(
        rows(live.ids),
        rows(live.weight),
        rows(live.state),
        rows(live.seen),
        rows(live.count),
        SeenIds(waits(waiting.ids), waits(waiting.count), waits(waiting.seen)),
    )
    return ResizedShare(arrived, _marks(moving.marks, send), _marks(moving.waiting_marks, send))


def _marks(marks: ChangeMarks, send: Callable[[torch.Tensor], Send]) -> ChangeMarks:
    return ChangeMarks(*(send(ids)(ids) for ids in (marks.touched, marks.fresh, marks.gone)))


def _sender(ranks: torch.Tensor, world_size: int) -> Send:
    """Return a function that sends each of n values, [n, ...], to its rank, and returns the received ones."""
    order = ranks.argsort(stable=True)
    leaving = ranks.bincount(minlength=world_size)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    num_out, num_in = leaving.tolist(), arriving.tolist()

    def send(values: torch.Tensor) -> torch.Tensor:
        received = values.new_empty(sum(num_in), *values.shape[1:])
        dist.all_to_all_single(received, values[order].contiguous(), num_in, num_out)
        return received

    return send


# Not in every step, because all ranks have to sum their counts.
STEPS_BETWEEN_GROWTH = 32


def dynamic_rows(model: nn.Module) -> dict[str, DynamicTable]:
    """Return this rank's share of each dynamic table of a sharded model, by its name. Not collective."""
    # Only our own modules of tables have shares.
    modules = (module for module in model.modules() if isinstance(module, ShardedEmbeddingCollection))
    return {name: share for module in modules for name, share in getattr(module, "shares", {}).items()}


def have_rows(model: nn.Module, name: str, ids: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a mask of the ids that have a row in a dynamic table, bool [n]. Collective: every rank.

    ids: int64 [n], the same on every rank; name: of the table.
    """
    table, has_row = dynamic_rows(model)[name], torch.zeros_like(ids)
    mine = table.placement.owner_of(ids) == rank
    has_row[mine] = (table.find(ids[mine]) != NO_ROW).long()
    dist.all_reduce(has_row)
    return has_row > 0


def grow(tables: Mapping[str, EmbeddingTable], step: int) -> list[str]:
    """Double the capacity of tables that are too full, between two steps; return a sentence for each of them.

    Checks only every `STEPS_BETWEEN_GROWTH` steps of the whole training. Collective: every rank.
    """
    if step % STEPS_BETWEEN_GROWTH:
        return []
    growing = [table for table in tables.values() if isinstance(table, DynamicTable) and table.spec.grow]
    for table in growing:
        # Expired ids are no reason to grow. Removed here, because otherwise it would depend on when
        # checkpoints are written.
        table.remove_expired()
    grown = []
    for table, places in zip(growing, _summed([table.places.taken for table in growing]), strict=True):
        spec = table.spec
        if places > spec.grow * spec.capacity and spec.capacity < spec.max_capacity:
            resize(table, 2 * spec.capacity)
            grown.append(
                f"{table.name} has {table.spec.capacity:,} places from step {step:,} on: "
                f"{places:,} of {spec.capacity:,} were taken"
            )
    return grown


def resize(rows: DynamicTable, capacity: int) -> None:
    """Change the capacity of a table, and move every row to the rank of its new bucket. Collective."""
    moving: ResizedShare = rows.resized(capacity)
    rows.settle(exchanged(moving, rows.placement))


def _summed(numbers: list[int], group: Any = None) -> list[int]:
    """Return the sums over all ranks of a group. Collective: every rank of it."""
    if not numbers:
        return []
    total = torch.tensor(numbers)
    # nccl sums only tensors on the GPU.
    if dist.get_backend(group) == "nccl":
        total = total.cuda()
    dist.all_reduce(total, group=group)
    return total.tolist()


def counts_of(tables: Mapping[str, EmbeddingTable], group: Any = None) -> dict[str, IdCounters]:
    """Return the counters of all ranks of a group together, by table. Collective: every rank of it."""
    of_rank = {name: counts for name, table in tables.items() if (counts := table.counts()) is not None}
    everyones = iter(_summed([number for counts in of_rank.values() for number in astuple(counts)], group))
    return {table: IdCounters(*(next(everyones) for _ in fields(IdCounters))) for table in of_rank}


def describe_counts(counts: Mapping[str, IdCounters]) -> str:
    """Describe the rows and counters of the dynamic tables in one line; "" if there are none."""
    shown = []
    for table, count in counts.items():
        others = [
            f"{getattr(count, name):,} {name}"
            for name in ("waiting", "evicted", "expired", "unplaced", "unadmitted")
            if getattr(count, name)
        ]
        shown.append(f"{table} {count.live:,} rows" + (f" ({', '.join(others)})" if others else ""))
    return f"dynamic tables: {'; '.join(shown)}" if shown else ""
