"""A dry run of TorchRec's planner for a cluster that is only described: no GPU is used and no rank starts.

    ./run.sh plan --hosts 16 --gpus_per_host 8 --hbm 80GB --host_memory 1TB --network 400Gb \\
        --table user:1_000_000_000:64 --table item:100_000_000:64:20 --batch_size 8192
    ./run.sh plan --gpus_per_host 0 --procs_per_host 2 --data_path shop --embedding_dim 64

It plans tables of given sizes, or with flags of a training the tables of that training, whose first batches
then tell what ranks send each other. The plan is that of `sharding/plan.py`. A plan that does not fit the
memory ends with status 2 and a sentence with what would make it fit, found with the same planner.
"""

from __future__ import annotations

import argparse
import bisect
import csv
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import DDR_MEM_BW, INTRA_NODE_BANDWIDTH
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import HardwareConfig, PlannerError
from torchrec.distributed.types import ShardingPlan
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recsuite.config.config import ALONE, Config
from recsuite.config.parser import parse_given
from recsuite.config.presets import with_preset
from recsuite.config.sections import MAX_EMBEDDING_DIM, require, size_of
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import BatchLoader, EpochSampler
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError, counted, markdown_table
from recsuite.files import explained
from recsuite.runtime.console import filter_library_messages
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.cpu_tables import CpuTablesSharder, RequestCounter
from recsuite.sharding.dynamic_ranks import bytes_of_a_place
from recsuite.sharding.plan import (
    RESERVED_FOR_DENSE,
    constraints_of,
    make_planner,
    make_sharder,
    make_topology,
    unsharded,
)
from recsuite.sharding.recommender import make_embeddings
from recsuite.sharding.table_rules import RULES, RowWiseAdagrad, TableRule
from recsuite.tools.script import exit_status, fitted_to_data, run_script
from recsuite.training.steps import InputPipeline

# Flag that moves a table to another memory, and its kernel.
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
# Ranks that are listed each; of more, only the extremes.
MOST_LISTED = 8
# Ranks of the largest cluster that is tried.
MOST_RANKS = 8192
WHOLE_MODES = {*ALONE, "load", "compact", "stream"}


@dataclass(frozen=True)
class Cluster:
    """Machines of a plan. Bytes of each rank (hbm) and host, bytes a second of each host.

    device: "cuda" or "cpu".
    """

    hosts: int
    ranks_per_host: int
    device: str
    hbm: int
    host_memory: int
    disk_size: int
    network: int
    disk: int

    @property
    def context(self) -> RuntimeContext:
        """Rank 0, as the sharding of a training sees it."""
        ranks = self.hosts * self.ranks_per_host
        return RuntimeContext(0, 0, ranks, self.ranks_per_host, torch.device(self.device), 1)

    @property
    def limits(self) -> np.ndarray:
        """Bytes of a rank for tables in each of `TIERS`, float64 [3]."""
        hbm = self.hbm if self.device == "cuda" else 0
        shared = np.array([self.host_memory, self.disk_size]) / self.ranks_per_host
        return np.array([hbm, *shared]) * (1 - RESERVED_FOR_DENSE, 1 - RESERVED_FOR_DENSE, 1)

    @property
    def tier(self) -> int:
        """Place in `TIERS` of the memory of a rank's device."""
        return int(self.device == "cpu")

    @property
    def memory(self) -> int:
        """Bytes of a rank's device."""
        return self.hbm if self.device == "cuda" else self.host_memory // self.ranks_per_host

    def hardware(self) -> HardwareConfig:
        """Rates and disks, as the planner takes them: bytes of a rank, and bytes a millisecond."""
        between = self.network / self.ranks_per_host / 1000
        within = INTRA_NODE_BANDWIDTH if self.device == "cuda" else DDR_MEM_BW
        return HardwareConfig(
            ssd_cap_bytes=self.disk_size // self.ranks_per_host,
            intra_host_bw=max(within, between),
            inter_host_bw=between,
        )


class Tables(NamedTuple):
    """Tables to plan, on the meta device.

    model: holds them, and the dense part; widths, ids, bytes_of_row: by table, the numbers in a row, the ids
    of an event, and the bytes of a row with its optimizer state; others as in `UnshardedModel`.
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

    @property
    def is_distinct(self) -> bool:
        """True if a rank requests a row once for all its ids of a step."""
        return isinstance(self.sharder, CpuTablesSharder) or self.sharder._use_index_dedup

    def requested(self, name: str) -> float:
        """Return the most rows of a table that a rank requests in a step."""
        ids = self.batch_size * self.ids[name]
        return min(ids, self.num_rows[name]) if self.is_distinct else ids


class Plan(NamedTuple):
    """Plan that fits.

    sharding: TorchRec's; tables: of each its sharding type, kernel and ranks; memory: bytes on each rank,
    float64 [ranks, TIERS]; held: of these the rows with their optimizer state, float64 [ranks]; parts: the
    planner's milliseconds of a step, float64 [ranks, PARTS].
    """

    sharding: ShardingPlan
    tables: Mapping[str, tuple[str, str, list[int]]]
    memory: np.ndarray
    held: np.ndarray
    parts: np.ndarray


# Makes the tables for a cluster, with at most so many numbers in a row.
Maker = Callable[[Cluster, int], Tables]


def find_plan(tables: Tables, cluster: Cluster, kernels: Mapping[str, str]) -> Plan | None:
    """Return the plan of a training on a cluster; None if there is none that fits."""
    context, specs = cluster.context, tables.specs
    memory = cluster.limits[1] if cluster.device == "cuda" else cluster.memory * (1 - RESERVED_FOR_DENSE)
    topology = make_topology(context, tables.rule, cluster.memory, int(memory), cluster.hardware())
    constraints = constraints_of(tables.num_rows, specs, tables.sharder, context.world_size, kernels)
    try:
        found = make_planner(topology, constraints, tables.batch_size).plan(tables.model, [tables.sharder])
    except PlannerError:
        return None
    # Placed as in a training, which does not tell the planner the ids of an event; estimated with them.
    requested = {name: [tables.requested(name) / tables.batch_size] for name in tables.num_rows}
    for name, constraint in constraints.items():
        constraint.pooling_factors = requested[name]
    enumerator = EmbeddingEnumerator(topology, tables.batch_size, constraints)
    options = {option.name: option for option in enumerator.enumerate(tables.model, [tables.sharder])}
    used, held = np.zeros((context.world_size, len(TIERS))), np.zeros(context.world_size)
    parts, described = np.zeros((context.world_size, len(PARTS))), {}
    for name, table in _shardings(found).items():
        option = options[name]
        tier = 2 if kernels.get(name) == KERNELS["on_disk"] else max(cluster.tier, int(name in kernels))
        described[name] = (table.sharding_type, table.compute_kernel, [*table.ranks])
        for shard, estimate in zip(table.sharding_spec.shards, option.shards, strict=True):
            rank, rows = shard.placement.rank(), shard.shard_sizes[0]
            used[rank] += (estimate.storage.hbm, estimate.storage.ddr, estimate.storage.ssd)
            # The planner counts rows without optimizer state, ids and counters.
            used[rank, tier] += rows * (tables.bytes_of_row[name] - 4 * tables.widths[name])
            held[rank] += rows * tables.bytes_of_row[name]
            parts[rank] += [getattr(estimate.perf, part) for part in PARTS]
    return Plan(found, described, used, held, parts) if (used <= cluster.limits).all() else None


def _shardings(plan: ShardingPlan) -> dict[str, Any]:
    return {name: table for module in plan.plan.values() for name, table in module.items()}


def fixes(make: Maker, cluster: Cluster, kernels: Mapping[str, str]) -> list[str]:
    """Return the changes each of which makes a plan fit, as flags; found with the planner."""
    tables, found = make(cluster, MAX_EMBEDDING_DIM), []

    def fits(hosts: int = cluster.hosts, widest: int = MAX_EMBEDDING_DIM, **moved: Sequence[str]) -> bool:
        changed = dataclasses.replace(cluster, hosts=hosts)
        added = {name: KERNELS[flag] for flag, names in moved.items() for name in names}
        return find_plan(make(changed, widest), changed, {**kernels, **added}) is not None

    # No smaller number can hold the rows; buffers come on top.
    most = MOST_RANKS // cluster.ranks_per_host
    room = cluster.limits[cluster.tier] * cluster.ranks_per_host
    first = last = max(cluster.hosts + 1, 0 if kernels else int(_bytes_of(tables) // room))
    while last <= most and not fits(last):
        first, last = last + 1, last + last // 4 + 1
    if last <= most:
        hosts = range(first, last)
        found.append(f"--hosts {first + bisect.bisect_left(hosts, True, key=lambda number: fits(number))}")
    widths = range(4, max(tables.widths.values()), 4)
    if number := bisect.bisect_left(widths, True, key=lambda width: not fits(widest=width)):
        found.append(f"an embedding_dim of {widths[number - 1]}")
    rest = sorted(tables.num_rows.keys() - kernels.keys(), key=lambda name: -_bytes_of(tables, name))
    for flag, kernel in KERNELS.items() if cluster.device == "cuda" else ():
        moves = [rest[: number + 1] for number in range(len(rest))]
        number = bisect.bisect_left(moves, True, key=lambda names, flag=flag: fits(**{flag: names}))  # type: ignore[misc]
        if number < len(moves):
            before = [name for name in kernels if kernels[name] == kernel]
            found.append(f"--{flag} {','.join(before + moves[number])}")
    return found


def _bytes_of(tables: Tables, *names: str) -> int:
    """Return the bytes of some tables, or of all, with their optimizer state."""
    return sum(tables.num_rows[name] * tables.bytes_of_row[name] for name in names or tables.num_rows)


def refusal(make: Maker, cluster: Cluster, kernels: Mapping[str, str]) -> str:
    """Return a sentence for tables that do not fit, with all changes that help."""
    tables, ranks = make(cluster, MAX_EMBEDDING_DIM), counted(cluster.context.world_size, "rank")
    found = fixes(make, cluster, kernels) or ["smaller tables: no change of one flag is enough"]
    return (
        f"The tables need {shown(_bytes_of(tables))} with their optimizer, and {ranks} have "
        f"{shown(cluster.limits[cluster.tier])} each for tables and buffers, {1 - RESERVED_FOR_DENSE:.0%} of "
        f"their memory. Fix: give {', or '.join(found)}."
    )


def requests(
    tables: Tables, plan: Plan, world_size: int, features: Sequence[KeyedJaggedTensor] = ()
) -> list[tuple[int, int, np.ndarray]]:
    """Return the keys that ranks request from each other in a step, for each width of rows.

    features: the batch of each rank; without them this is an upper bound: distinct ids, spread evenly over
    the rows. A tuple is the numbers in a row, the bytes of a key, and the keys that a rank (first dimension)
    requests from a rank (second dimension), float64 [ranks, ranks].
    """
    found = []
    for module in plan.sharding.plan.values():
        held: dict[str, Any] = dict(module.items())
        (width,) = {tables.widths[name] for name in held}
        if features:
            counter = RequestCounter(held, tables.num_rows, tables.specs, world_size, tables.is_distinct)
            counts = np.stack([counter(batch).numpy() for batch in features]).astype(np.float64)
        else:
            counts = np.zeros((world_size, world_size))
            for name, table in held.items():
                for shard in table.sharding_spec.shards:
                    share = shard.shard_sizes[0] / tables.num_rows[name]
                    counts[:, shard.placement.rank()] += tables.requested(name) * share
        # Our own tables number the rows of all tables; TorchRec sends ids.
        is_numbered = isinstance(tables.sharder, CpuTablesSharder) and not held.keys() & tables.specs.keys()
        is_narrow = is_numbered and sum(tables.num_rows[name] for name in held) < 2**31
        found.append((width, 4 if is_narrow else 8, counts))
    return found


def sent(requested: Sequence[tuple[int, int, np.ndarray]]) -> np.ndarray:
    """Return the bytes of ids, rows and gradients that each rank sends to others, float64 [ranks, 3]."""
    total: Any = 0
    for width, key_bytes, counts in requested:
        others = counts * (1 - np.eye(len(counts)))
        # Rows go to the rank that requested them, their gradients back to the rank that owns them.
        out, served = others.sum(1), others.sum(0)
        total = total + np.stack([key_bytes * out, 4 * width * served, 4 * width * out], axis=1)
    return np.asarray(total)


def given_tables(lines: Sequence[Sequence[str]], config: Config, rule: TableRule) -> Maker:
    """Return a function that makes tables of given sizes.

    lines: name, rows, numbers in a row and, optionally, ids of an event.
    """
    rows, widths, ids = dict[str, int](), dict[str, int](), dict[str, float]()
    for line in lines:
        try:
            name, number, width, *rest = line
            rows[name], widths[name], ids[name] = int(number), int(width), float(*rest or (1,))
            fits = name != "" and rows[name] > 0 and widths[name] % 4 == 0 and ids[name] > 0
        except (ValueError, TypeError):
            fits = False
        require(
            fits and 0 < widths[name] <= MAX_EMBEDDING_DIM,
            f"A table must be NAME:ROWS:DIM or NAME:ROWS:DIM:IDS, with ids of an event and a DIM that is a "
            f"multiple of 4 up to {MAX_EMBEDDING_DIM:,}, got {':'.join(line)}",
        )

    def make(cluster: Cluster, widest: int) -> Tables:
        cut = {name: min(width, widest) for name, width in widths.items()}
        sharder = make_sharder(rule, config, {}, cluster.context, max(cut.values()))
        sizes = {name: _bytes_of_row(rule, width) for name, width in cut.items()}
        model, batch_size = make_embeddings(rows, cut), config.loader.batch_size
        return Tables(model, sharder, rows, {}, cut, ids, sizes, batch_size, rule)

    return make


def trained_tables(columns: Columns, config: Config, rule: TableRule, ids: Mapping[str, float]) -> Maker:
    """Return a function that makes the tables of a training. ids: of an event, by table."""

    def make(cluster: Cluster, widest: int) -> Tables:
        width = min(config.model.embedding_dim, widest)
        narrowed = config.replaced(embedding_dim=width)
        found = unsharded(columns, narrowed, cluster.context, rule, cluster.memory)
        widths = found.model.recommender.widths
        sizes = {
            name: bytes_of_a_place(config.tables, width)
            if name in found.specs
            else _bytes_of_row(rule, width)
            for name in widths
        }
        return Tables(*found, widths, ids, sizes, config.loader.batch_size, rule)

    return make


def _bytes_of_row(rule: TableRule, width: int) -> int:
    return 4 * (width + sum(1 if is_of_row else width for is_of_row in rule.slots.values()))


def first_batches(columns: Columns, config: Config, ranks: int, steps: int) -> list[list[KeyedJaggedTensor]]:
    """Return the ids of the first steps of a training: for each step those of each rank."""
    steps = min(steps, EventBatches(columns, config, 0, ranks).num_steps("train"))
    found: list[list[KeyedJaggedTensor]] = [[] for _ in range(steps)]
    for rank in range(ranks):
        dataset = EventBatches(columns, config, rank, ranks)
        pipeline = InputPipeline(BatchLoader(dataset, EpochSampler(dataset), config.loader))
        for step, of_ranks in enumerate(found):
            of_ranks.append(pipeline.to_model_input(dataset[Request("train", 0, step)]).features)
    return found


def ids_of_an_event(features: KeyedJaggedTensor, batch_size: int) -> dict[str, float]:
    """Return the ids of an event in a batch, by table."""
    return {
        name: number / batch_size
        for name, number in zip(features.keys(), features.length_per_key(), strict=True)
    }


def shown(num_bytes: float) -> str:
    """Bytes in decimal units, as the flags have them."""
    place = max(0, min(4, (len(str(round(num_bytes))) - 1) // 3))
    return f"{num_bytes / 1000**place:.{min(place, 1)}f} {('B', 'kB', 'MB', 'GB', 'TB')[place]}"


def checkpoint_of(tables: Tables, plan: Plan, cluster: Cluster) -> np.ndarray:
    """Return the bytes of a full checkpoint that each host writes, float64 [hosts]: its tensors."""
    of_hosts = plan.held.reshape(cluster.hosts, -1).sum(1)
    # The first rank writes the dense part, with two numbers of optimizer state for each of its own.
    of_hosts[0] += 12 * dense_numbers(tables)
    return np.asarray(of_hosts)


def dense_numbers(tables: Tables) -> int:
    """Return the number of parameters besides tables."""
    return sum(weight.numel() for weight in tables.model.parameters() if not weight.is_meta)


def report(tables: Tables, plan: Plan, cluster: Cluster, exchanged: np.ndarray, source: str) -> None:
    """Print a plan. exchanged: see `sent`; source: the origin of these numbers."""
    milliseconds, fullest = plan.parts.sum(1), (plan.memory / np.maximum(cluster.limits, 1)).max(1)
    rows = [["table", "rows", "dim", "ids", "sharding", "kernel", "ranks", "bytes"]]
    for name, (kind, kernel, owners) in plan.tables.items():
        size = _bytes_of(tables, name)
        where = f"{min(owners)}-{max(owners)}" if len(owners) > 1 else str(owners[0])
        numbers = f"{tables.num_rows[name]:,}", str(tables.widths[name]), f"{tables.ids[name]:.4g}"
        rows.append([name, *numbers, kind, kernel, where, shown(size)])
    print(markdown_table(rows), end="\n\n")
    tiers = [place for place in range(len(TIERS)) if plan.memory[:, place].any()]
    heading = ["rank", *(TIERS[place] for place in tiers), "ids out", "rows out", "gradients out", "time"]
    ranks = np.arange(len(milliseconds))
    listed = {f"{rank}": ranks[rank : rank + 1] for rank in ranks}
    if len(listed) > MOST_LISTED:
        names: dict[int, list[str]] = {}
        extremes = {"slowest": milliseconds, "most memory": fullest, "sends most": exchanged.sum(1)}
        for name, values in extremes.items():
            names.setdefault(int(values.argmax()), []).append(name)
        listed = {f"{rank}: {', '.join(whys)}": ranks[rank : rank + 1] for rank, whys in names.items()}
    listed["mean"] = ranks
    cells = np.concatenate([plan.memory[:, tiers], exchanged], axis=1)
    lines = [
        [name, *map(shown, cells[some].mean(0)), f"{milliseconds[some].mean():.3g} ms"]
        for name, some in listed.items()
    ]
    print(markdown_table([heading, *lines]), end="\n\n")
    limits = " and ".join(f"{shown(cluster.limits[place])} of {TIERS[place]}" for place in tiers)
    print(f"memory: rank {fullest.argmax()} uses most, {fullest.max():.0%} of its {limits}")
    print(f"sent in a step by each rank to others: {source}")
    if (dense := dense_numbers(tables)) and len(ranks) > 1:
        print(f"dense gradients, averaged over ranks in each step: {shown(4 * dense)}")
    slowest = int(milliseconds.argmax())
    shares = ", ".join(
        f"{part} {share:.0%}"
        for part, share in zip(PARTS.values(), plan.parts[slowest] / milliseconds[slowest], strict=True)
        if share
    )
    estimate = f"{milliseconds[slowest]:.3g} ms by the planner's estimate"
    print(f"step: rank {slowest} is the slowest, {estimate}: {shares}")
    of_hosts = checkpoint_of(tables, plan, cluster)
    seconds, most = of_hosts.max() / cluster.disk, "at most " if tables.specs else ""
    print(
        f"checkpoint: {most}{shown(of_hosts.sum())}, {most}{shown(of_hosts.max())} of one host, "
        f"{seconds:.3g} s at {shown(cluster.disk)}/s a host"
    )


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, Config, frozenset[str]]:
    """Return the flags of this program, and those of the training with the names of the given ones.

    Raises:
        UserError: for flags that cannot be together.
    """
    parser = argparse.ArgumentParser(prog="./run.sh plan", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--hosts", type=int, default=1, help="machines: 1")
    add("--gpus_per_host", type=int, default=8, help="GPUs of each, with a rank for each: 8; 0 for CPU ranks")
    add("--procs_per_host", type=int, default=0, help="CPU ranks of each, with --gpus_per_host 0")
    add("--hbm", default="80GB", help="memory of a GPU: 80GB")
    add("--host_memory", default="1TB", help="memory of a machine: 1TB")
    add("--network", default="400Gb", help="rate between machines, of each, shared by its ranks: 400Gb")
    add("--disk", default="2GB/s", help="rate at which a machine writes to a disk or store: 2GB/s")
    add("--disk_size", default="8TB", help="disk of a machine for tables: 8TB")
    add("--table", action="append", default=[], help="NAME:ROWS:DIM[:IDS], IDS of an event: 1; repeatable")
    add("--tables", help="CSV file of such tables, with a first line name,rows,dim,ids")
    names = [rule.__name__ for rule in RULES]
    add("--optimizer", choices=names, default=RowWiseAdagrad.__name__, help="of the tables: RowWiseAdagrad")
    add("--uvm", default="", help="tables in host memory with a cache on the GPU, separated by commas")
    add("--on_disk", default="", help="tables on the machine's disk")
    add("--steps", type=int, default=4, help="first steps of a training whose ids are counted: 4")
    flags, others = parser.parse_known_args(argv)
    config, given = parse_given(others)
    has_gpus = flags.gpus_per_host > 0
    least = min(flags.hosts, flags.steps, flags.gpus_per_host if has_gpus else flags.procs_per_host)
    require(
        least >= 1, "plan requires at least 1 of --hosts, --steps, and --gpus_per_host or --procs_per_host"
    )
    require(
        has_gpus or not (flags.uvm or flags.on_disk), "--uvm and --on_disk require --gpus_per_host above 0"
    )
    require(not (has_gpus and flags.procs_per_host), "--procs_per_host requires --gpus_per_host 0")
    sized = bool(flags.table or flags.tables)
    unused = sorted(given - {"batch_size"} if sized else given & WHOLE_MODES)
    require(
        not unused, f"--{(unused or [''])[0]} cannot be used with plan{' and tables of given sizes' * sized}"
    )
    return flags, config, given


def cluster_of(flags: argparse.Namespace) -> Cluster:
    """Return the cluster that flags describe."""
    return Cluster(
        flags.hosts,
        flags.gpus_per_host or flags.procs_per_host,
        "cuda" if flags.gpus_per_host else "cpu",
        *(size_of(getattr(flags, name), name) for name in ("hbm", "host_memory", "disk_size")),
        *(size_of(getattr(flags, name), name, is_rate=True) for name in ("network", "disk")),
    )


def tables_of(
    flags: argparse.Namespace, config: Config, given: frozenset[str]
) -> tuple[Maker, list[list[KeyedJaggedTensor]]]:
    """Return a function that makes the tables of flags, and the ids of first steps, see `first_batches`.

    Raises:
        UserError: when the tables or the data cannot be read.
    """
    (rule,) = (kind(lr=config.optimizer.lr) for kind in RULES if kind.__name__ == flags.optimizer)
    if flags.table or flags.tables:
        lines = [each.split(":") for each in flags.table]
        if flags.tables:
            with explained(f"Cannot read --tables {flags.tables}", "give another file"):
                text = Path(flags.tables).read_text()
            lines += [line for line in csv.reader(text.splitlines()[1:]) if line]
        return given_tables(lines, config, rule), []
    ranks = cluster_of(flags).context.world_size
    fitted, name = fitted_to_data(config, given)
    config = with_preset(fitted.replaced(preset=name), given, ranks).replaced(num_workers=0)
    columns = open_columns(config)
    batches = first_batches(columns, config, ranks, flags.steps)
    ids = ids_of_an_event(batches[0][0], config.loader.batch_size)
    return trained_tables(columns, config, rule, ids), batches


def plan(flags: argparse.Namespace, config: Config, given: frozenset[str]) -> int:
    """Print the plan of tables on a cluster; return the exit status. Not collective.

    Raises:
        UserError: when the tables do not fit, with all that would make them fit.
    """
    filter_library_messages()
    cluster = cluster_of(flags)
    make, batches = tables_of(flags, config, given)
    tables, ranks = make(cluster, MAX_EMBEDDING_DIM), cluster.context.world_size
    kernels = {
        name: kernel for flag, kernel in KERNELS.items() for name in getattr(flags, flag).split(",") if name
    }
    for name in kernels:
        known = ", ".join(tables.num_rows)
        require(name in tables.num_rows, f"--uvm and --on_disk take names of the tables {known}, got {name}")
    found = find_plan(tables, cluster, kernels)
    if found is None:
        raise UserError(refusal(make, cluster, kernels))
    print(f"{counted(ranks, 'rank')} on {counted(cluster.hosts, 'host')}, batches of {tables.batch_size:,}\n")
    steps = [sent(requests(tables, found, ranks, of_ranks)) for of_ranks in batches]
    source = f"the mean of the first {counted(len(steps), 'step')}"
    if not steps:
        steps, source = (
            [sent(requests(tables, found, ranks))],
            "at most, with ids spread evenly over the rows",
        )
    report(tables, found, cluster, np.mean(steps, axis=0), source)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Plan, and return the exit status: 2 for a mistake or tables that do not fit."""
    return exit_status(lambda: plan(*parse(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    run_script(main)
