"""Measure what the places of a dynamic table cost: finding rows, taking ids in, letting others go, and
memory.

    python benchmarks/dynamic.py --write         docs/dynamic.json and the tables of docs/dynamic.md: minutes
    python benchmarks/dynamic.py --rows 20000 --rounds 3

One core, one share, batches of ids drawn evenly. A table is full when all places of all buckets are taken, so
every id that comes in makes another one leave. Times are of the table alone, with the initial rows of those
that come in; there is no model. Prints each figure beside its bar; asserts nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from environment import DOCS, describe, finish, make_parser
from figures import bar, origin, table
from torchrec_collisions import STEPS_BETWEEN, rates_of_multi_probe, rates_of_sorted

from recsuite.runtime.host import allowed_cores
from recsuite.sharding.dynamic import (
    BUCKET_WIDTH,
    DynamicSpec,
    DynamicTable,
    LiveRows,
    Waiting,
    bucket_of,
    turns,
)

MARKS = ("<!-- costs -->", "<!-- end of costs -->")
PAGE = DOCS / "dynamic.md"
ONE_MILLION, TEN_MILLION = 1_000_000, 10_000_000
FOUND, TOUCHED, TAKEN = "found", "found and touched by a step", "taken in, others leave"
# Ids a second, by live rows.
BARS = {(FOUND, TEN_MILLION): 8e6, (FOUND, ONE_MILLION): 12e6, (TAKEN, TEN_MILLION): 2e6}
PUT_AT_A_TIME = 2**18


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    torch.set_num_threads(1)
    sizes = [measure(rows, flags) for rows in flags.rows]
    result = {**describe(), "batch": flags.batch, "embedding_dim": flags.embedding_dim, "sizes": sizes}
    result["bars"] = judge(result)
    finish("dynamic", result, render(result), flags, page=PAGE, marks=MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[ONE_MILLION, TEN_MILLION], help="live rows")
    parser.add_argument("--batch", type=int, default=8192, help="ids at a time")
    parser.add_argument("--embedding_dim", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=60, help="batches of each kind")
    return parser.parse_args()


def measure(rows: int, flags: argparse.Namespace) -> dict[str, Any]:
    """Ids a second of a full table, batch by batch, and the bytes that it takes."""
    num_buckets = -(-rows // BUCKET_WIDTH)
    places = num_buckets * BUCKET_WIDTH
    spec = DynamicSpec("user", flags.embedding_dim, places, places)
    ids = ids_that_fill(places)
    # Not all alike: who was seen last decides who leaves.
    seen = ids % 1000
    before, num_rows = _resident(), places + 1
    share = DynamicTable(spec, 0, 1, torch.empty(num_rows, spec.embedding_dim), torch.empty(num_rows))
    put_ids(share, ids, seen)
    resident, weights = _resident() - before, num_rows * (spec.embedding_dim + 1) * 4
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
    """Ids for every place of a table, int64 [capacity]."""
    num_buckets, generator = capacity // BUCKET_WIDTH, torch.Generator().manual_seed(0)
    drawn = draw_ids(4 * capacity // 2 + 64 * BUCKET_WIDTH, generator).unique()
    buckets, order = bucket_of(drawn, num_buckets).sort()
    _, _, turn = turns(buckets)
    ids = drawn[order[turn < BUCKET_WIDTH]]
    # Some bucket may have had less luck; ids are drawn for it until it is full.
    while len(ids) < capacity:
        more = torch.cat([ids, draw_ids(capacity, generator)]).unique()
        buckets, order = bucket_of(more, num_buckets).sort()
        ids = more[order[turns(buckets)[2] < BUCKET_WIDTH]]
    return ids


def put_ids(share: DynamicTable, ids: torch.Tensor, seen: torch.Tensor) -> None:
    """Give ids rows of zeros, as a load does. seen: when each was last seen, int64 [n]."""
    for part, when in zip(ids.split(PUT_AT_A_TIME), seen.split(PUT_AT_A_TIME), strict=True):
        rows = torch.zeros(1, share.spec.embedding_dim).expand(len(part), -1)
        once = torch.full_like(part, 256, dtype=torch.int32)
        share.put(LiveRows(part, rows, torch.zeros(len(part)), when, once, Waiting.none()))


def draw_ids(number: int, generator: torch.Generator) -> torch.Tensor:
    """Any ids, int64 [n]; hardly any is drawn twice."""
    return torch.randint(-(2**63) + 1, 2**63 - 1, (number,), generator=generator)


def rates(share: DynamicTable, ids: torch.Tensor, flags: argparse.Namespace) -> dict[str, list[float]]:
    """Ids a second of each kind of call, batch by batch, in turns."""
    generator = torch.Generator().manual_seed(1)
    found: dict[str, list[float]] = {FOUND: [], TOUCHED: [], TAKEN: []}

    def there() -> torch.Tensor:
        some = ids[torch.randint(len(ids), (2 * flags.batch,), generator=generator)]
        # Others have left since the beginning.
        return some[share.find(some) >= 0][: flags.batch].unique()

    for number in range(flags.rounds):
        share.begin_step(1000 + number)
        for name, call, batch in (
            (FOUND, share.find, there()),
            (TOUCHED, share.find_or_insert, there()),
            (TAKEN, share.find_or_insert, draw_ids(flags.batch, generator).unique()),
        ):
            found[name].append(len(batch) / _seconds(call, batch))
    return found


def _seconds(call: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> float:
    start = time.perf_counter()
    call(batch)
    return time.perf_counter() - start


def places_that_wait(spec: DynamicSpec) -> dict[str, int]:
    """Bytes of a table for the ids that wait for admission, as counted and as the kernel sees them."""
    before = _resident()
    empty = torch.empty(spec.capacity + 1, 0), torch.empty(0)
    share = DynamicTable(DynamicSpec("user", 0, spec.capacity, spec.capacity, admit=2), 0, 1, *empty)
    resident = _resident() - before - share.places.nbytes
    return {"counted": share.waiting.nbytes, "resident": resident}


def _resident() -> int:
    """Bytes of this process, without those that the allocator keeps though nothing uses them."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside what was measured."""
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
    """A line for each size."""
    head = ["rows", *(f"{name}, million ids/s" for name in (FOUND, TOUCHED, TAKEN)), "MiB", "of it places"]
    lines = [[*head, "of ids that wait"], ["---:"] * (len(head) + 1)]
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
        f"{allowed_cores()} cores. TorchRec's sorted module takes ids in every {STEPS_BETWEEN} batches, and "
        "sorts all of its ids then; its multi-probe module takes none in on a CPU, and was filled by hand to "
        f"{size['multi-probe']['share of slots taken']:.0%}. {origin(result)}."
    )
    return f"{table(lines)}\n\n{about}"


if __name__ == "__main__":
    main()
