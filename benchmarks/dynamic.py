"""Measure the costs of a dynamic table: lookups, insertions, evictions and memory.

    python benchmarks/dynamic.py --write         docs/dynamic.json and its tables: minutes
    python benchmarks/dynamic.py --rows 20000 --rounds 3

One core, one share, batches of ids drawn evenly. A table is full when all places of all buckets are taken, so
that every inserted id evicts another one. Times are of the table alone, with the initial rows of inserted
ids; there is no model.

Two modules of TorchRec are measured beside it. The module of sorted ids inserts ids only every
`eviction_interval` steps, when it sorts all of its ids; ids of the steps between are on average without a row
for half of that time. Of the multi-probe module (`HashZchManagedCollisionModule`) only the lookup runs on a
CPU, so its table is filled by hand.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import torch
from common import DOCS, bar, describe, finish, make_parser, origin, resident_memory, table, timed
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.runtime.host import allowed_cores
from recsuite.sharding.dynamic import (
    BUCKET_WIDTH,
    DynamicSpec,
    DynamicTable,
    LiveRows,
    SeenIds,
    bucket_of,
    positions_in_buckets,
)
from recsuite.sharding.storage import TableRows

PAGE = DOCS / "log" / "benchmarks.md"
ONE_MILLION, TEN_MILLION = 1_000_000, 10_000_000
# Names in the JSON, and in the table.
FOUND, TOUCHED, TAKEN = "found", "found and touched by a step", "taken in, others leave"
SHOWN = {FOUND: "lookup", TOUCHED: "lookup in a step", TAKEN: "insertion with eviction"}
# Ids a second, by live rows.
BARS = {(FOUND, TEN_MILLION): 8e6, (FOUND, ONE_MILLION): 12e6, (TAKEN, TEN_MILLION): 2e6}
PUT_AT_A_TIME = 2**18
STEPS_BETWEEN = 10
# Insertions of the sorted module: at ten million rows each takes seconds.
TIMES = 2
# Slots that are tried for an id, as in the documentation of the multi-probe module; and batches of lookups.
PROBES, LOOKUPS = 128, 60
FREE = -1


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[ONE_MILLION, TEN_MILLION], help="live rows")
    parser.add_argument("--batch", type=int, default=8192, help="ids at a time")
    parser.add_argument("--embedding_dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60, help="batches of each kind")
    finish("dynamic", parser.parse_args(), measure, judge, render, PAGE, mark="costs")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    torch.set_num_threads(1)
    sizes = [measure_size(rows, flags) for rows in flags.rows]
    return {**describe(), "batch": flags.batch, "embedding_dim": flags.embedding_dim, "sizes": sizes}


def measure_size(rows: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Ids a second of a full table, batch by batch, and its bytes."""
    num_buckets = -(-rows // BUCKET_WIDTH)
    places = num_buckets * BUCKET_WIDTH
    spec = DynamicSpec("user", flags.embedding_dim, places, places)
    ids = ids_that_fill(places)
    # Of different ages, which decide on evictions.
    seen = ids % 1000
    before, num_rows = resident_memory(), places + 1
    share = DynamicTable(spec, 0, 1, empty_rows(num_rows, spec.embedding_dim))
    put_ids(share, ids, seen)
    resident, weights = resident_memory() - before, num_rows * (spec.embedding_dim + 1) * 4
    found = {
        "rows": rows,
        "bytes": {"rows": weights, "places": share.places.nbytes, "resident": resident},
        "waiting": places_that_wait(spec),
        "rates": rates(share, ids, flags),
    }
    counts = share.counts()
    found["sorted"] = dict(zip((FOUND, TAKEN), rates_of_sorted(places, flags.batch), strict=True))
    rate, share_taken = rates_of_multi_probe(places, flags.batch)
    found["multi-probe"] = {FOUND: rate, "share of slots taken": share_taken}
    if counts.live != places or not counts.evicted:
        raise RuntimeError(f"the table of {places} places was not full: {counts}")
    return found


def ids_that_fill(capacity: int) -> torch.Tensor:
    """Ids that fill every place of a table, int64 [capacity]."""
    num_buckets, generator = capacity // BUCKET_WIDTH, torch.Generator().manual_seed(0)
    drawn = draw_ids(4 * capacity // 2 + 64 * BUCKET_WIDTH, generator).unique()
    buckets, order = bucket_of(drawn, num_buckets).sort()
    _, _, turn = positions_in_buckets(buckets)
    ids = drawn[order[turn < BUCKET_WIDTH]]
    # Until the last bucket is full.
    while len(ids) < capacity:
        more = torch.cat([ids, draw_ids(capacity, generator)]).unique()
        buckets, order = bucket_of(more, num_buckets).sort()
        ids = more[order[positions_in_buckets(buckets)[2] < BUCKET_WIDTH]]
    return ids


def put_ids(share: DynamicTable, ids: torch.Tensor, seen: torch.Tensor, spread: float = 0.0) -> None:
    """Insert ids, as a load does.

    Args:
        seen: step at which each was last seen, int64 [n].
        spread: of the rows, which are drawn evenly between it and its negative.
    """
    for part, when in zip(ids.split(PUT_AT_A_TIME), seen.split(PUT_AT_A_TIME), strict=True):
        rows = torch.empty(len(part), share.spec.embedding_dim).uniform_(-spread, spread)
        once = torch.full_like(part, 256, dtype=torch.int32)
        waiting = SeenIds(part[:0], once[:0], when[:0])
        share.put(LiveRows(part, rows, torch.zeros(len(part)), when, once, waiting))


def draw_ids(number: int, generator: torch.Generator) -> torch.Tensor:
    """Ids, int64 [n], hardly any of them twice."""
    return torch.randint(-(2**63) + 1, 2**63 - 1, (number,), generator=generator)


def rates(share: DynamicTable, ids: torch.Tensor, flags: argparse.Namespace) -> dict[str, list[float]]:
    """Ids a second of each kind of call, in turns."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[float]] = {FOUND: [], TOUCHED: [], TAKEN: []}

    def there() -> torch.Tensor:
        some = ids[torch.randint(len(ids), (2 * flags.batch,), generator=generator)]
        # Some were evicted since the beginning.
        return some[share.find(some) >= 0][: flags.batch].unique()

    for number in range(flags.rounds):
        share.begin_step(1000 + number)
        for name, call, batch in (
            (FOUND, share.find, there()),
            (TOUCHED, share.find_or_insert, there()),
            (TAKEN, share.find_or_insert, draw_ids(flags.batch, generator).unique()),
        ):
            found[name].append(len(batch) / timed(call, batch)[0])
    return found


def empty_rows(number: int, dim: int) -> TableRows:
    """Rows of a table that were not drawn."""
    return TableRows(torch.empty(number, dim), {"momentum1": torch.empty(number)})


def places_that_wait(spec: DynamicSpec) -> dict[str, int]:
    """Bytes for ids that wait for admission, as counted and as resident memory."""
    before = resident_memory()
    empty = empty_rows(spec.capacity + 1, 0)
    share = DynamicTable(DynamicSpec("user", 0, spec.capacity, spec.capacity, admit=2), 0, 1, empty)
    resident = resident_memory() - before - share.places.nbytes
    return {"counted": share.waiting.nbytes, "resident": resident}


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    rates = {(name, size["rows"]): size["rates"][name] for size in result["sizes"] for name in size["rates"]}
    bars = [
        bar(
            f"{name}, {rows:,} rows",
            median(rates[name, rows]),
            limit,
            f"{median(rates[name, rows]) / 1e6:.1f} million/s",
            f"{limit / 1e6:.0f} million/s",
        )
        for (name, rows), limit in BARS.items()
        if (name, rows) in rates
    ]
    for size in result["sizes"]:
        found = size["bytes"]["resident"] / (size["bytes"]["rows"] + size["bytes"]["places"])
        bars.append(
            bar(f"memory / counted, {size['rows']:,} rows", found, 1.1, f"{found:.2f}", "1.1", at_most=True)
        )
    return bars


def render(result: dict[str, Any]) -> str:
    """Table with rows for each size, of this project and of TorchRec."""
    heads = ["rows", *(f"{shown}, million ids/s" for shown in SHOWN.values())]
    heads += ["MiB", "of it ids and counters", "MiB for ids that wait"]
    lines = []
    for size in result["sizes"]:
        speeds = [
            f"{median(found) / 1e6:.1f} (best {max(found) / 1e6:.1f})" for found in size["rates"].values()
        ]
        places = size["bytes"]["places"]
        mib = [f"{number / 2**20:,.0f}" for number in (size["bytes"]["rows"] + places, places)]
        lines.append([f"{size['rows']:,}", *speeds, *mib, f"{size['waiting']['counted'] / 2**20:,.0f}"])
        theirs = {name: f"{median(rates) / 1e6:.3g}" for name, rates in size["sorted"].items()}
        lines.append([f"{size['rows']:,}, TorchRec's sorted", theirs[FOUND], "", theirs[TAKEN], "", "", ""])
        probed = f"{median(size['multi-probe'][FOUND]) / 1e6:.3g}"
        lines.append([f"{size['rows']:,}, TorchRec's multi-probe", probed, *5 * [""]])
    about = (
        f"Batches of {result['batch']:,} ids, rows of {result['embedding_dim']} numbers, one of "
        f"{allowed_cores()} cores. TorchRec's sorted module inserts ids every {STEPS_BETWEEN} batches, and "
        "sorts all of its ids then; its multi-probe module inserts none on a CPU, and was filled by hand to "
        f"{size['multi-probe']['share of slots taken']:.0%}. {origin(result)}."
    )
    return f"{table(heads, lines, left=())}\n\n{about}"


def rates_of_sorted(rows: int, batch: int) -> tuple[list[float], list[float]]:
    """Ids a second of the sorted module when it is full: lookups by batch, insertions by interval."""
    generator = torch.Generator().manual_seed(0)
    module = MCHManagedCollisionModule(
        rows, torch.device("cpu"), LRU_EvictionPolicy(), eviction_interval=STEPS_BETWEEN
    )
    ids = _draw(2 * rows, generator).unique()[: rows - 1]
    # The last place is for all ids without one.
    module._mch_sorted_raw_ids[:-1] = ids
    found, taken = [], []
    for _ in range(TIMES):
        module.eval()
        for _ in range(STEPS_BETWEEN):
            some = ids[torch.randint(len(ids), (batch,), generator=generator)].unique()
            begin = time.perf_counter()
            module.remap({"user": _jagged(some)})
            found.append(len(some) / (time.perf_counter() - begin))
        module.train()
        new = [_draw(batch, generator).unique() for _ in range(STEPS_BETWEEN)]
        begin = time.perf_counter()
        for some in new:
            module.profile({"user": _jagged(some)})
        taken.append(sum(map(len, new)) / (time.perf_counter() - begin))
        if module.evict() is None:
            raise RuntimeError("TorchRec's table inserted nothing")
        ids = module._mch_sorted_raw_ids[:-1].clone()
    return found, taken


def rates_of_multi_probe(rows: int, batch: int) -> tuple[list[float], float]:
    """Ids a second of lookups in the multi-probe module, batch by batch, and its share of taken slots.

    As many ids as slots are inserted; some find no free slot.
    """
    generator = torch.Generator().manual_seed(0)
    identities, _ = torch.ops.fbgemm.create_zch_buffer(
        rows, support_evict=False, device=torch.device("cpu"), long_type=True
    )
    ids = _fill(identities, _draw(rows, generator).unique())
    found = []
    for _ in range(LOOKUPS):
        some = ids[torch.randint(len(ids), (batch,), generator=generator)].unique()
        begin = time.perf_counter()
        slots = _probe(identities, some, PROBES)
        found.append(len(some) / (time.perf_counter() - begin))
        if not torch.equal(identities.view(-1)[slots], some):
            raise RuntimeError("TorchRec's table did not find ids that it holds")
    return found, len(ids) / rows


def _probe(identities: torch.Tensor, ids: torch.Tensor, probes: int) -> torch.Tensor:
    """Slot of each id, int64 [n]; the last one tried for an id that is not there."""
    slots: torch.Tensor = torch.ops.fbgemm.zero_collision_hash(
        input=ids, identities=identities, max_probe=probes, circular_probe=True, readonly=True
    )[0]
    return slots


def _fill(identities: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Insert ids where a lookup finds them and return those with a slot."""
    flat, home = identities.view(-1), _probe(identities, ids, 1)
    left = torch.arange(len(ids))
    for probe in range(PROBES):
        slots = (home[left] + probe) % len(flat)
        # Of several writes to a slot the last one counts.
        wants = (flat[slots] == FREE).nonzero().view(-1)
        flat[slots[wants]] = ids[left[wants]]
        left = left[flat[slots] != ids[left]]
    has_slot = torch.ones(len(ids), dtype=torch.bool)
    has_slot[left] = False
    return ids[has_slot]


def _draw(number: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(2**62, (number,), generator=generator)


def _jagged(ids: torch.Tensor) -> JaggedTensor:
    return JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))


if __name__ == "__main__":
    main()
