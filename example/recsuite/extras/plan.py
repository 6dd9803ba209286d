"""A dry run of TorchRec's planner for a cluster that is only described: no GPU is used and no rank starts.

    ./run.sh plan --hosts 16 --gpus_per_host 8 --hbm 80GB --host_memory 1TB --network 400Gb \\
        --table user:1_000_000_000:64 --table item:100_000_000:64:20 --batch_size 8192
    ./run.sh plan --procs_per_host 2 --data_path shop --embedding_dim 64

It plans tables of given sizes, or with flags of a training the tables of that training, whose first batches
then tell what ranks send each other. The plan is that of `sharding/plan.py`. A plan that does not fit the
memory ends with status 2 and a sentence with what would make it fit, found with the same planner.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import csv
import dataclasses
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow
import torch
from pyarrow import parquet
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import DDR_MEM_BW, INTRA_NODE_BANDWIDTH
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import HardwareConfig, PlannerError
from torchrec.distributed.types import ParameterSharding
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.config.config import Config, alone_modes
from recsuite.config.fitting import with_preset
from recsuite.config.parser import parse_given
from recsuite.config.presets import AUTO
from recsuite.config.sections import MAX_EMBEDDING_DIM
from recsuite.config.units import size_of
from recsuite.datasets.arrays import MOST
from recsuite.datasets.batches import SPLITS, EventBatches, Request
from recsuite.datasets.columns import DIGEST_THREADS, Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler
from recsuite.datasets.preparation.cache import cache_of, open_columns
from recsuite.datasets.source import locate, with_flags
from recsuite.datasets.tables.files import File, split_part
from recsuite.datasets.tables.formats import explained_damage
from recsuite.errors import UserError, counted, markdown_table, require
from recsuite.files import explained
from recsuite.ids import UNKNOWN_ID
from recsuite.models.tasks import ModelMaker
from recsuite.places import open_raw
from recsuite.runtime.console import filter_library_messages
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.cpu_tables import CpuTablesSharder, RequestCounter
from recsuite.sharding.dynamic_ranks import bytes_of_a_place
from recsuite.sharding.plan import RESERVED_FOR_DENSE as RESERVED
from recsuite.sharding.plan import (
    bytes_of_row,
    constraints_of,
    make_planner,
    make_sharder,
    make_topology,
    unsharded,
)
from recsuite.sharding.recommender import make_embeddings, table_of
from recsuite.sharding.table_rules import RULES, RowWiseAdagrad, TableRule
from recsuite.tools.script import exit_status, fitted_to_data
from recsuite.training.steps import BatchFeed

# Kernels of tables that are not in the memory of a GPU, by the flag that names the tables.
KERNELS = {
    "uvm": EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
    "on_disk": EmbeddingComputeKernel.KEY_VALUE.value,
}
TIERS = ("HBM", "host memory", "disk")
# Parts of a step, by the fields of TorchRec's `Perf`. Like its sum, without the exchange of ids, which a
# pipeline does beside the step before, and which the planner over-estimates for tables that are split.
PARTS = {
    "prefetch_compute": "fill caches",
    "fwd_compute": "look up",
    "fwd_comms": "send rows",
    "bwd_comms": "send gradients",
    "bwd_compute": "update",
}
# Bytes of an event on the disk: columns with user histories, and the parts that they are made of. Events that
# a rank reads in a second of its core. Measured with texts as ids, a label and times: docs/ingest_texts.json.
EVENT_BYTES, READ_RATE = 91, 1_300_000
# Events of the partitions that are read for a plan: as many as show the bytes of an event.
LEAST_SAMPLED = 2**20
# Ranks that are listed each; of more, only the extremes. Ranks of the largest cluster that is tried.
MOST_LISTED, MOST_RANKS = 8, 8192
TABLE = re.compile(r"([^:.]+):([1-9][\d_]*):(\d+)(?::(\d*\.?\d+))?", re.ASCII)


class Cluster(argparse.Namespace):
    """Machines of a plan: the flags of this program, with bytes and bytes a second for sizes and rates."""

    @property
    def context(self) -> RuntimeContext:
        """Rank 0, as the sharding of a training sees it."""
        ranks, device = self.gpus_per_host or self.procs_per_host, "cuda" if self.gpus_per_host else "cpu"
        return RuntimeContext(0, 0, self.hosts * ranks, ranks, torch.device(device), 1)

    @property
    def tier(self) -> int:
        """Place in `TIERS` of the memory of a rank's device."""
        return 0 if self.gpus_per_host else 1

    @property
    def limits(self) -> np.ndarray:
        """Bytes of a rank for tables in each of `TIERS`, float64 [3]."""
        of_host = [self.hbm * self.gpus_per_host, self.host_memory, self.disk_size]
        return np.array(of_host) * (1 - RESERVED, 1 - RESERVED, 1) / self.context.local_world_size

    def with_hosts(self, hosts: int) -> Cluster:
        """Return the same cluster with another number of machines."""
        return Cluster(**{**vars(self), "hosts": hosts})


class PlannedTables(NamedTuple):
    """Tables on the meta device, and all that a plan of them needs.

    model: holds them, and the dense part; widths, ids, bytes_of_row: by table, the numbers in a row, the ids
    of an event, and the bytes of a row with its optimizer state; batch_size: events of a step of each rank;
    weight_bytes: of a number in a row; others as of `sharding.plan.unsharded`.
    """

    model: nn.Module
    sharder: EmbeddingCollectionSharder
    num_rows: Mapping[str, int]
    specs: Mapping[str, Any]
    widths: Mapping[str, int]
    ids: Mapping[str, float]
    bytes_of_row: Mapping[str, int]
    batch_size: int
    rule: TableRule
    weight_bytes: int

    @property
    def is_distinct(self) -> bool:
        """True if a rank requests a row once for all its ids of a step."""
        return isinstance(self.sharder, CpuTablesSharder) or self.sharder._use_index_dedup

    @property
    def dense(self) -> int:
        """Number of parameters besides tables."""
        return sum(weight.numel() for weight in self.model.parameters() if not weight.is_meta)

    def requested(self, name: str) -> float:
        """Return the most rows of a table that a rank requests in a step."""
        return min(self.batch_size * self.ids[name], self.num_rows[name] if self.is_distinct else np.inf)

    def bytes_of(self, *names: str) -> int:
        """Return the bytes of some tables, or of all, with their optimizer state."""
        return sum(self.num_rows[name] * self.bytes_of_row[name] for name in names or self.num_rows)


class Plan(NamedTuple):
    """Plan that fits.

    shardings: TorchRec's, by module and table; memory: bytes on each rank, float64 [ranks, TIERS]; held: of
    the rows with their optimizer state in a checkpoint, float64 [ranks]; parts: the planner's milliseconds of
    a step, float64 [ranks, PARTS].
    """

    shardings: list[dict[str, ParameterSharding]]
    memory: np.ndarray
    held: np.ndarray
    parts: np.ndarray

    @property
    def tables(self) -> dict[str, ParameterSharding]:
        """All tables, by name."""
        return {name: table for held in self.shardings for name, table in held.items()}


class Sample(NamedTuple):
    """Some partitions of a data set, from which all are estimated.

    folder: of all that was made of them; part: their columns; whole: the same with the sizes of all; sizes:
    events of each partition, int64 [partitions]; source: what was read.
    """

    folder: Path
    part: Columns
    whole: Columns
    sizes: np.ndarray
    source: str


# Makes the tables for a cluster, with at most so many numbers in a row.
Maker = Callable[[Cluster, int], PlannedTables]


def find_plan(tables: PlannedTables, cluster: Cluster, kernels: Mapping[str, str]) -> Plan | None:
    """Return the plan of a training on a cluster; None if there is none that fits."""
    context, limits = cluster.context, cluster.limits
    # The planner takes bytes a millisecond of a rank, and reserves a part of HBM itself.
    between = cluster.network / context.local_world_size / 1000
    within = INTRA_NODE_BANDWIDTH if cluster.gpus_per_host else DDR_MEM_BW
    rates = {"intra_host_bw": max(within, between), "inter_host_bw": between}
    hardware = HardwareConfig(ssd_cap_bytes=int(limits[2]), **rates)
    weight_bytes = tables.weight_bytes
    topology = make_topology(context, tables.rule, cluster.hbm, int(limits[1]), hardware, weight_bytes)
    chosen = {name: [kernel] for name, kernel in kernels.items()}
    constraints = constraints_of(tables.num_rows, tables.specs, tables.sharder, context.world_size, chosen)
    try:
        planned = make_planner(topology, constraints, tables.batch_size).plan(tables.model, [tables.sharder])
    except PlannerError:
        return None
    # Placed as in a training, which does not tell the planner the ids of an event; estimated with them.
    for name, constraint in constraints.items():
        constraint.pooling_factors = [tables.requested(table_of(name)) / tables.batch_size]
    enumerator = EmbeddingEnumerator(topology, tables.batch_size, constraints)
    options = {
        table_of(option.name): option for option in enumerator.enumerate(tables.model, [tables.sharder])
    }
    used, held, parts = (np.zeros((context.world_size, n)) for n in (len(TIERS), 1, len(PARTS)))
    shardings = [{table_of(key): table for key, table in part.items()} for part in planned.plan.values()]
    plan = Plan(shardings, used, held[:, 0], parts)
    for name, table in plan.tables.items():
        tier = 2 if kernels.get(name) == KERNELS["on_disk"] else max(cluster.tier, int(name in kernels))
        for shard, estimate in zip(table.sharding_spec.shards, options[name].shards, strict=True):
            rank, rows = shard.placement.rank(), shard.shard_sizes[0]
            used[rank] += (estimate.storage.hbm, estimate.storage.ddr, estimate.storage.ssd)
            # The planner counts rows without optimizer state, ids and counters.
            beside = tables.bytes_of_row[name] - weight_bytes * tables.widths[name]
            used[rank, tier] += rows * beside
            held[rank] += rows * (beside + 4 * tables.widths[name])
            parts[rank] += [getattr(estimate.perf, part) for part in PARTS]
    # Ranks send fp32, and the planner assumes numbers of the tables' size.
    parts[:, ["comms" in part for part in PARTS]] *= 4 / weight_bytes
    return plan if (used <= limits).all() else None


def refusal(make: Maker, cluster: Cluster, kernels: Mapping[str, str]) -> str:
    """Return a sentence for tables that do not fit, with each change of one flag that makes them fit."""
    tables, fixes = make(cluster, MAX_EMBEDDING_DIM), list[str]()

    def fits(hosts: int = cluster.hosts, widest: int = MAX_EMBEDDING_DIM, **moved: Sequence[str]) -> bool:
        changed = cluster.with_hosts(hosts)
        added = {name: KERNELS[flag] for flag, names in moved.items() for name in names}
        return find_plan(make(changed, widest), changed, {**kernels, **added}) is not None

    # Fewer machines cannot even hold the rows without buffers.
    room, local = cluster.limits[cluster.tier], cluster.context.local_world_size
    first = last = max(cluster.hosts + 1, 0 if kernels else int(tables.bytes_of() // (room * local)))
    while last <= MOST_RANKS // local and not fits(last):
        first, last = last + 1, last + last // 4 + 1
    if last <= MOST_RANKS // local:
        fixes.append(f"--hosts {first + bisect.bisect_left(range(first, last), True, key=fits)}")
    widths = range(4, max(tables.widths.values()), 4)
    if number := bisect.bisect_left(widths, True, key=lambda width: not fits(widest=width)):
        fixes.append(f"an embedding_dim of {widths[number - 1]}")
    rest = sorted(tables.num_rows.keys() - kernels.keys(), key=lambda name: -tables.bytes_of(name))
    for flag, kernel in KERNELS.items() if cluster.gpus_per_host else ():
        moves = [rest[: number + 1] for number in range(len(rest))]
        number = bisect.bisect_left(moves, True, key=lambda names, flag=flag: fits(**{flag: names}))  # type: ignore[misc]
        if number < len(moves):
            before = [name for name in kernels if kernels[name] == kernel]
            fixes.append(f"--{flag} {','.join(before + moves[number])}")
    return (
        f"The tables need {shown(tables.bytes_of())} with their optimizer, and "
        f"{counted(cluster.context.world_size, 'rank')} have {shown(room)} each for tables and buffers, "
        f"{1 - RESERVED:.0%} of their memory. Fix: give {', or '.join(fixes or ['smaller tables'])}."
    )


def sent(tables: PlannedTables, plan: Plan, features: Sequence[KeyedJaggedTensor] = ()) -> np.ndarray:
    """Return the bytes of ids, rows and gradients that each rank sends to others, float64 [ranks, 3].

    Those of ids include the lengths that TorchRec sends with them.

    features: the batch of each rank in a step. Without them this is an upper bound: distinct ids, spread
    evenly over the rows.
    """
    total, is_ours = np.zeros((len(plan.memory), 3)), isinstance(tables.sharder, CpuTablesSharder)
    for held in plan.shardings:
        # Keys that a rank, the first dimension, requests from a rank, the second one.
        counts = np.zeros((len(total), len(total)))
        # Lengths likewise: with TorchRec one of each event, for each rank with rows of a table.
        lengths, dynamic = np.zeros_like(counts), held.keys() & tables.specs.keys()
        for name, table in held.items():
            for shard in table.sharding_spec.shards:
                rank, share = shard.placement.rank(), shard.shard_sizes[0] / tables.num_rows[name]
                counts[:, rank] += 0 if features else tables.requested(name) * share
                lengths[:, rank] += 0 if is_ours else tables.batch_size
        if features:
            counter = RequestCounter(held, tables.num_rows, tables.specs, len(total))
            counts += np.stack([counter(batch).numpy() for batch in features])
            # The tables of this library always request the row of unknown ids, TorchRec's for such an id.
            for batch, of_rank in [] if is_ours else zip(features, counts, strict=True):
                of_rank[0] -= sum(UNKNOWN_ID not in batch[name].values() for name in dynamic)
        np.fill_diagonal(counts, 0)
        np.fill_diagonal(lengths, 0)
        # Static tables of this library send row numbers over all tables; TorchRec sends ids.
        is_numbered = is_ours and not dynamic
        key_bytes = 4 if is_numbered and sum(tables.num_rows[name] for name in held) < 2**31 else 8
        # Rows go to the rank that requested them, their gradients back to the rank that owns them.
        row_bytes, out = 4 * tables.widths[next(iter(held))], counts.sum(1)
        ids_out = key_bytes * out + 4 * lengths.sum(1)
        total += np.stack([ids_out, row_bytes * counts.sum(0), row_bytes * out], axis=1)
    return total


def given_tables(lines: Sequence[str], config: Config, rule: TableRule) -> Maker:
    """Return a function that makes tables of given sizes, each NAME:ROWS:DIM or NAME:ROWS:DIM:IDS."""
    rows, widths, ids = dict[str, int](), dict[str, int](), dict[str, float]()
    for line in lines:
        name, number, width, of_event = match.groups() if (match := TABLE.fullmatch(line)) else ("", 0, 1, "")
        rows[name], widths[name], ids[name] = int(number), int(width), float(of_event or 1)
        require(
            widths[name] in range(4, MAX_EMBEDDING_DIM + 1, 4) and ids[name] > 0,
            "A table must be NAME:ROWS:DIM or NAME:ROWS:DIM:IDS, with the ids of an event, and a DIM that is "
            f"a multiple of 4 up to {MAX_EMBEDDING_DIM:,}, got {line}",
        )

    def make(cluster: Cluster, widest: int) -> PlannedTables:
        cut = {name: min(width, widest) for name, width in widths.items()}
        sharder = make_sharder(rule, config, {}, cluster.context, max(cut.values()), rule.lr)
        weight_bytes = config.tables.weight_bytes
        sizes = {name: bytes_of_row(rule, width, weight_bytes) for name, width in cut.items()}
        batch_size = local_batch(config, 0, cluster.context.world_size)
        made = make_embeddings(rows, cut, weight_bytes)
        return PlannedTables(made, sharder, rows, {}, cut, ids, sizes, batch_size, rule, weight_bytes)

    return make


def local_batch(config: Config, num_events: int, ranks: int) -> int:
    """Return the events of a step of each rank. num_events: of the training."""
    return -(-config.global_batch(num_events, ranks) // ranks)


def trained_tables(
    columns: Columns, config: Config, rule: TableRule, ids: Mapping[str, float], model: ModelMaker
) -> Maker:
    """Return a function that makes the tables of a training. ids: of an event, by table."""

    def make(cluster: Cluster, widest: int) -> PlannedTables:
        cut = config.replaced(embedding_dim=min(config.model.embedding_dim, widest))
        memory = cluster.hbm if cluster.gpus_per_host else cluster.host_memory // cluster.procs_per_host
        made, sharder, num_rows, specs = unsharded(columns, cut, cluster.context, rule, memory, model)
        widths, weight_bytes = made.recommender.widths, config.tables.weight_bytes
        sizes = {
            name: bytes_of_a_place(cut.tables, width)
            if name in specs
            else bytes_of_row(rule, width, weight_bytes)
            for name, width in widths.items()
        }
        batch_size = local_batch(config, columns.num_train, cluster.context.world_size)
        return PlannedTables(
            made, sharder, num_rows, specs, widths, ids, sizes, batch_size, rule, weight_bytes
        )

    return make


def first_batches(columns: Columns, config: Config, ranks: int, steps: int) -> list[list[KeyedJaggedTensor]]:
    """Return the ids of the first steps of a training: for each step those of each rank."""
    of_ranks: list[list[KeyedJaggedTensor]] = []
    for rank in range(ranks):
        dataset = EventBatches(columns, config, rank, ranks)
        feed = BatchFeed(BatchLoader(dataset, EpochSampler(dataset), config.loader))
        requests = [Request("train", 0, step) for step in range(min(steps, dataset.num_steps("train")))]
        of_ranks.append([feed.to_model_input(dataset[request]).features for request in requests])
    return [list(step) for step in zip(*of_ranks, strict=True)]


def partition_of(file: File) -> int:
    """Return the partition of a Parquet file, -1 for a file of none."""
    number = dict(file.partitions).get("part", "")
    return int(number) if number.isdecimal() and file.format == "parquet" else -1


def rows_in(files: Sequence[File]) -> np.ndarray:
    """Return the rows of Parquet files, int64 [files], from their footers alone."""

    def rows(file: File) -> int:
        with explained_damage(file), open_raw(file.path) as raw:
            return int(parquet.read_metadata(pyarrow.PythonFile(raw, "r")).num_rows)

    with ThreadPoolExecutor(DIGEST_THREADS) as pool:
        return np.array([*pool.map(rows, files)], np.int64)


def sampled(config: Config, partitions: int, exits: contextlib.ExitStack) -> Sample | None:
    """Return a sample of partitions, of whose other files only footers are read; None without partitions.

    exits: removes its folder at the end.

    Raises:
        UserError: when a file cannot be read, or --partitions is another number.
    """
    source = with_flags(locate(config.data, config.runtime.seed), config.tables, config.data)
    tables = source.tables
    numbers = np.array([partition_of(file) for file in tables.events])
    if numbers.min() < 0:
        return None
    last = int(numbers.max())
    require(
        last + 1 == partitions,
        f"--partitions must be the number of partitions, got {partitions}, and the last one is {last}",
    )
    rows, splits = rows_in(tables.events), np.array([split_part(tables.name_of(f)) for f in tables.events])
    sizes = np.stack([np.bincount(numbers, rows * (splits == split), partitions) for split in SPLITS[:3]])
    sizes, totals = sizes.sum(0).astype(np.int64), sizes.sum(1).astype(np.int64).tolist()
    # Of middle size, and with most splits: a small one may lack the test.
    both = {*zip(numbers.tolist(), splits, strict=True)}
    kinds = np.bincount([number for number, _ in both], minlength=partitions)
    away = np.abs(np.argsort(np.argsort(sizes, kind="stable")) - partitions // 2)
    order = np.lexsort((away, -kinds))
    chosen = order[: 1 + np.searchsorted(sizes[order].cumsum(), LEAST_SAMPLED)]
    taken = {-1, *chosen.tolist()}
    events, users = (
        tuple(file for file in files if partition_of(file) in taken)
        for files in (tables.events, tables.users)
    )
    some = dataclasses.replace(tables, events=events, users=users)
    cache = cache_of(source, config.data)
    with explained(f"Cannot write {cache}", "give --cache_dir a folder with space that can be written"):
        cache.mkdir(parents=True, exist_ok=True)
        folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix=".plan-", dir=cache)))
    config = config.replaced(cache_dir=str(folder))
    part = open_columns(config, source=dataclasses.replace(source, tables=some, config=config.data))
    size = int(sizes[chosen].sum())
    text = (
        f"the footers of {counted(len(rows), 'file')}, and {counted(len(chosen), 'partition')} with {size:,} "
        f"of {sum(totals):,} events, from which users are extrapolated"
    )
    return Sample(folder, part, _extrapolated(part, totals, size, tables.items), sizes, text)


def _extrapolated(part: Columns, totals: Sequence[int], size: int, items: Sequence[File]) -> Columns:
    """Return columns with the sizes of all partitions. totals: events of each split; size: events here."""
    schema, rows = part.schema, {table.name: table.rows for table in part.tables}
    rows[schema.user] = 1 + round((rows[schema.user] - 1) * sum(totals) / size)
    if all(file.format == "parquet" for file in items):
        rows[schema.item] = max(rows[schema.item], 1 + int(rows_in(items).sum()))
    # Those of the items, unless it has no table of its own.
    if rows.get(schema.history.name):
        rows[schema.history.name] = rows[schema.item]
    tables = tuple(dataclasses.replace(table, rows=rows[table.name]) for table in part.tables)
    train, validation, test = totals
    return dataclasses.replace(part, tables=tables, num_train=train, num_validation=validation, num_test=test)


def shown(num_bytes: float) -> str:
    """Bytes in decimal units, as the flags have them."""
    place = min(4, (len(str(round(num_bytes))) - 1) // 3)
    return f"{num_bytes / 1000**place:.{min(place, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[place]}"


def checkpoint_of(tables: PlannedTables, plan: Plan, hosts: int) -> np.ndarray:
    """Return the bytes of the tensors of a full checkpoint that each host writes, float64 [hosts]."""
    # The first rank writes the dense part, with two numbers of optimizer state for each of its own.
    dense = np.eye(1, len(plan.held))[0] * 12 * tables.dense
    return np.asarray((plan.held + dense).reshape(hosts, -1).sum(1))


def report(
    tables: PlannedTables, plan: Plan, cluster: Cluster, steps: Sequence[np.ndarray], source: str
) -> None:
    """Print a plan. steps: of each the result of `sent`; source: the origin of these numbers."""
    ranks, times = len(plan.held), plan.parts.sum(1)
    filled = plan.memory / np.maximum(cluster.limits, 1)
    slowest, fullest = int(times.argmax()), int(filled.max(1).argmax())
    print(f"{counted(ranks, 'rank')} on {counted(cluster.hosts, 'host')}, batches of {tables.batch_size:,}\n")
    lines = [["table", "rows", "dim", "ids", "sharding", "kernel", "ranks", "bytes"]]
    for name, table in plan.tables.items():
        numbers = f"{tables.num_rows[name]:,}", str(tables.widths[name]), f"{tables.ids[name]:.4g}"
        kinds = table.sharding_type, table.compute_kernel
        owners = "-".join(str(rank) for rank in sorted({min(table.ranks or ()), max(table.ranks or ())}))
        lines.append([name, *numbers, *kinds, owners, shown(tables.bytes_of(name))])
    print(markdown_table(lines), end="\n\n")
    tiers = [place for place in range(len(TIERS)) if plan.memory[:, place].any()]
    cells = np.concatenate([plan.memory[:, tiers], np.mean(steps, axis=0)], axis=1)
    lines = [["rank", *(TIERS[place] for place in tiers), "ids out", "rows out", "gradients out", "time"]]
    for rank in range(ranks) if ranks <= MOST_LISTED else sorted({slowest, fullest}):
        lines.append([str(rank), *map(shown, cells[rank]), f"{times[rank]:.3g} ms"])
    lines.append(["mean", *map(shown, cells.mean(0)), f"{times.mean():.3g} ms"])
    print(markdown_table(lines), end="\n\n")
    limits = (
        f"{filled[fullest, place]:.0%} of {shown(cluster.limits[place])} of {TIERS[place]}" for place in tiers
    )
    print(f"memory: rank {fullest} uses most, {', '.join(limits)}")
    print(f"sent in a step to other ranks: {source}")
    if tables.dense and ranks > 1:
        print(f"dense gradients, averaged over ranks in each step: {shown(4 * tables.dense)}")
    shares = zip(PARTS.values(), plan.parts[slowest] / times[slowest], strict=True)
    told = ", ".join(f"{part} {share:.0%}" for part, share in shares if share)
    print(f"step: rank {slowest} is the slowest, {times[slowest]:.3g} ms by the planner's estimate: {told}")
    of_hosts, most = checkpoint_of(tables, plan, cluster.hosts), "at most " if tables.specs else ""
    seconds = f"{of_hosts.max() / cluster.disk:,.1f} s at {shown(cluster.disk)}/s a host"
    print(f"checkpoint: {most}{shown(of_hosts.sum())}, {shown(of_hosts.max())} of one host, {seconds}")


def describe_partitions(cluster: Cluster) -> list[str]:
    """Return lines on the columns that ranks make of partitions, of equal size unless they are known.

    Raises:
        UserError: when there are more ranks than partitions, or too many events for a rank or a disk.
    """
    local = cluster.context.local_world_size
    sizes = np.full(cluster.partitions, -(-cluster.events // cluster.partitions))
    if cluster.sample:
        sizes = cluster.sample.sizes

    def events_of(hosts: int) -> np.ndarray:
        """Events of the partitions of each rank."""
        return np.bincount(np.arange(len(sizes)) % (hosts * local), sizes)

    def bytes_of(of_rank: int) -> float:
        """Bytes of the columns of a rank with so many events."""
        return of_rank * cluster.event_bytes + cluster.item_bytes

    def fits(hosts: int) -> bool:
        of_rank = int(events_of(hosts).max())
        return of_rank <= MOST and bytes_of(of_rank) * local <= cluster.disk_size

    ranks, most = cluster.context.world_size, cluster.partitions // local
    require(
        ranks <= cluster.partitions,
        f"{counted(ranks, 'rank')} require at least as many --partitions, got {cluster.partitions}",
    )
    rank, of_rank = int(events_of(cluster.hosts).argmax()), int(events_of(cluster.hosts).max())
    of_host = bytes_of(of_rank) * local
    if not fits(cluster.hosts):
        hosts = bisect.bisect_left(range(most + 1), True, cluster.hosts, key=fits)
        fix = f"--hosts {hosts}" if hosts <= most else "more --partitions and --hosts"
        raise UserError(
            f"A rank reads up to {of_rank:,} of {cluster.events:,} events, of {MOST:,} at most, and its "
            f"machine needs {shown(of_host)} for columns and has {shown(cluster.disk_size)}. Fix: give {fix}."
        )
    seconds, rate = of_rank / cluster.read_rate, f"{cluster.read_rate:,} events/s"
    share, number = of_host / cluster.disk_size, -(-(cluster.partitions - rank) // ranks)
    return [
        *([f"read: {cluster.sample.source}"] if cluster.sample else []),
        f"partitions: {cluster.partitions}, {number} of rank {rank}: {of_rank:,} events, "
        f"{shown(bytes_of(of_rank))} of columns, made once in {seconds:,.0f} s at {rate}",
        f"disk: {shown(of_host)} of columns on a machine, {share:.1%} of {shown(cluster.disk_size)}",
    ]


def parse(argv: Sequence[str]) -> tuple[Cluster, Config, frozenset[str]]:
    """Return the flags of this program, and those of the training with the names of the given ones.

    Raises:
        UserError: for flags that cannot be together.
    """
    parser = argparse.ArgumentParser(prog="./run.sh plan", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    rules = [rule.__name__ for rule in RULES]
    for name, default, text in (
        ("hosts", 1, "machines"),
        ("gpus_per_host", 0, "GPUs of each, with a rank for each"),
        ("procs_per_host", 0, "CPU ranks of each, without GPUs"),
        ("hbm", "80GB", "memory of a GPU"),
        ("host_memory", "1TB", "memory of a machine"),
        ("disk_size", "8TB", "disk of a machine for tables and columns"),
        ("network", "400Gb", "rate of a machine to others, shared by its ranks"),
        ("disk", "2GB/s", "rate at which a machine writes to a disk or store"),
        ("partitions", 0, "partitions of the events, each read by one rank alone"),
        ("events", 0, "events in all partitions, for tables of given sizes"),
        ("event_bytes", EVENT_BYTES, "bytes of an event in columns, for tables of given sizes"),
        ("read_rate", READ_RATE, "events that a rank reads in a second"),
        ("steps", 4, "first steps of a training whose ids are counted"),
        ("tables", "", "CSV file with a line for each table, after name,rows,dim,ids"),
        ("uvm", "", "tables in host memory with a cache on the GPU, separated by commas"),
        ("on_disk", "", "tables on the disk of the machine"),
    ):
        size = partial(size_of, flag=name, is_rate=name in ("network", "disk"))
        kind = int if isinstance(default, int) else size if default else str
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default: {default})")
    parser.add_argument("--table", action="append", default=[], help="NAME:ROWS:DIM[:IDS of an event]")
    parser.add_argument("--optimizer", choices=rules, default=RowWiseAdagrad.__name__, help="of the tables")
    flags, others = parser.parse_known_args(
        argv, Cluster(sample=None, item_bytes=0, exits=contextlib.ExitStack())
    )
    config, given = parse_given(others)
    ranks = sorted((flags.gpus_per_host, flags.procs_per_host))
    require(
        ranks[0] == 0 < min(ranks[1], flags.hosts, flags.steps),
        "plan requires --gpus_per_host or --procs_per_host, not both, and at least 1 of --hosts and --steps",
    )
    require(flags.gpus_per_host > 0 or not flags.uvm + flags.on_disk, "--uvm and --on_disk require GPUs")
    is_sized = bool(flags.table or flags.tables)
    require(
        (flags.events > 0) == (flags.partitions > 0 and is_sized)
        and min(flags.partitions + 1, flags.event_bytes, flags.read_rate) > 0,
        "plan requires --events with --partitions and tables of given sizes, and with nothing else",
    )
    trains = given & {*alone_modes(), "load", "compact", "stream", "storage"}
    unused = given - {"batch_size", "local_batch_size", "row_precision"} if is_sized else trains
    named = "plan and tables of given sizes" if is_sized else "plan"
    require(not unused, f"--{min(unused, default='')} cannot be used with {named}")
    return flags, config, given


def tables_of(
    flags: Cluster, config: Config, given: frozenset[str], model: ModelMaker | None = None
) -> tuple[Maker, list[list[KeyedJaggedTensor]]]:
    """Return a function that makes the tables of flags, and the ids of first steps, see `first_batches`.

    flags: with data, their numbers of events and bytes become those of the data, or of a `Sample` that they
    get; model: makes the model of a training.

    Raises:
        UserError: when the tables or the data cannot be read.
    """
    (rule,) = (kind(lr=config.optimizer.lr) for kind in RULES if kind.__name__ == flags.optimizer)
    lines = list(flags.table)
    if flags.tables:
        with explained(f"Cannot read --tables {flags.tables}", "give another file"):
            text = Path(flags.tables).read_text()
        lines += [":".join(line) for line in csv.reader(text.splitlines()[1:]) if line]
    if lines:
        return given_tables(lines, config, rule), []
    if model is None:
        raise UserError(
            "A plan of a training requires its model. Fix: ./run.sh plan, or main(model=make_model)."
        )
    ranks = flags.context.world_size
    fitted, name = fitted_to_data(config, given)
    config = with_preset(fitted.replaced(preset=name), given).replaced(num_workers=0)
    flags.sample = sampled(config, flags.partitions, flags.exits) if flags.partitions else None
    part = flags.sample.part if flags.sample else open_columns(config)
    num_events = part.num_train + part.num_validation + part.num_test
    folder = flags.sample.folder if flags.sample else Path(part.folder)
    files = [file for file in folder.rglob("*") if file.is_file()]
    # Each rank has the columns of all items.
    flags.item_bytes = sum(file.stat().st_size for file in files if file.match(f"{part.schema.item}_*"))
    flags.event_bytes = (sum(file.stat().st_size for file in files) - flags.item_bytes) / num_events
    of_part = config
    if flags.sample:
        of_part, ranks = config.replaced(batch_size=AUTO, local_batch_size=0), 1
    batches = first_batches(part, of_part, ranks, flags.steps)
    counts = zip(batches[0][0].keys(), batches[0][0].length_per_key(), strict=True)
    num_rows = local_batch(of_part, part.num_train, ranks)
    ids = {name: number / num_rows for name, number in counts}
    flags.events = num_events
    if flags.sample:
        flags.events = int(flags.sample.sizes.sum())
        # Its users are few and side by side in the table, so their rows would all be of a few ranks.
        return trained_tables(flags.sample.whole, config, rule, ids, model), []
    return trained_tables(part, config, rule, ids, model), batches


def plan(cluster: Cluster, config: Config, given: frozenset[str], model: ModelMaker | None = None) -> int:
    """Print the plan of tables on a cluster; return the exit status. Not collective.

    model: see `tables_of`.

    Raises:
        UserError: when the tables do not fit, with all that would make them fit.
    """
    filter_library_messages()
    with cluster.exits:
        return _plan(cluster, config, given, model)


def _plan(cluster: Cluster, config: Config, given: frozenset[str], model: ModelMaker | None) -> int:
    make, batches = tables_of(cluster, config, given, model)
    of_partitions = describe_partitions(cluster) if cluster.partitions else []
    tables = make(cluster, MAX_EMBEDDING_DIM)
    named = {flag: [name for name in getattr(cluster, flag).split(",") if name] for flag in KERNELS}
    kernels = {name: KERNELS[flag] for flag, names in named.items() for name in names}
    strange = ", ".join(kernels.keys() - tables.num_rows.keys())
    require(not strange, f"--uvm and --on_disk take names of {', '.join(tables.num_rows)}, got {strange}")
    fitting = find_plan(tables, cluster, kernels)
    if fitting is None:
        raise UserError(refusal(make, cluster, kernels))
    source = f"the mean of the first {counted(len(batches), 'step')}"
    if not batches:
        source = "at most, with ids spread evenly over the rows"
    report(tables, fitting, cluster, [sent(tables, fitting, step) for step in batches or [[]]], source)
    print(*of_partitions, sep="\n", end="\n" * bool(of_partitions))
    return 0


def main(argv: Sequence[str] | None = None, model: ModelMaker | None = None) -> int:
    """Plan, and return the exit status: 2 for a mistake or tables that do not fit. model: see `tables_of`."""
    return exit_status(lambda: plan(*parse(sys.argv[1:] if argv is None else argv), model))
