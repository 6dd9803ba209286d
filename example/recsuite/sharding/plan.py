"""Sharding plan of the tables, and the distributed model made from it.

Initial weights depend only on the seed, the table and the row. So every number of ranks and every plan starts
from the same model.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    ParameterConstraints,
    PlannerError,
    Topology,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.types import CacheParams, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType

from recsuite.config.config import Config
from recsuite.config.sections import UVM, UVM_CACHING, TablesConfig, TrainingConfig
from recsuite.config.units import size_of
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import HISTORY, UNKNOWN_ROW, Table
from recsuite.errors import UserError, counted, require
from recsuite.files import explained
from recsuite.models.tasks import ModelMaker, widths_of
from recsuite.runtime.host import allowed_memory, shown_bytes
from recsuite.runtime.process import RuntimeContext, num_local_devices
from recsuite.sharding.cpu_tables import CpuTablesSharder
from recsuite.sharding.data_parallel import FixedBuckets
from recsuite.sharding.dynamic import DynamicSpec, DynamicTable, rows_per_rank
from recsuite.sharding.dynamic_ranks import dynamic_rows, specs_of
from recsuite.sharding.recommender import TrainableModel, make_head, make_model, table_of, torchrec_name
from recsuite.sharding.storage import DiskStorage, RowsInHostMemory, TableRows
from recsuite.sharding.table import EmbeddingTable, StaticTable
from recsuite.sharding.table_rules import TableRule, check_rule
from recsuite.sharding.torchrec_tables import (
    DistinctTablesSharder,
    OneRankTablesSharder,
    TorchRecTablesSharder,
)

# Rows are drawn in blocks, so that a shard can be filled without drawing the whole table.
INIT_BLOCK_ROWS = 4096
# Chosen together with the learning rates, on real and on synthetic ratings.
INIT_STD = 0.025
# With events of several types an item begins with the same row as itself in a history, and these are larger:
# what is in the cart is likely to be bought, also if it was rarely bought. Chosen among 0.025 (not equal),
# 0.05, 0.1, 0.15 and 0.25 on the validation of three drawn shops: NDCG@10 0.38 with the first, 0.46 with 0.1.
EQUAL_STD = 0.1
ROWS_PER_RANK_WORTH_SPLITTING = 256
# Numbers in a row. CPU tables were tested with wider rows, and compute them correctly.
WIDEST_ON_GPU = 1_024
# Share of a rank's memory that the planner leaves to the dense part, the batches and everything else.
RESERVED_FOR_DENSE = 0.15
FUSED = EmbeddingComputeKernel.FUSED.value
# Memory of a rank for tables and rows of --storage disk.
DEFAULT_BUDGET = "1GB"


def build_model(
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    tables: TableRule,
    maker: ModelMaker,
    loss: nn.Module | None = None,
) -> DistributedModelParallel:
    """Return the model of a data set, sharded over all ranks, with the tables' optimizer in the backward.

    tables: their optimizer; maker, loss: see `make_head` and `make_model`. Collective: every rank.

    Raises:
        UserError: see `make_plan` and `check_rule`.
    """
    config = config.with_global_batch(columns.num_train, context.world_size)
    memory = _room_per_rank(config.tables, context)
    model, sharder, num_rows, specs = unsharded(columns, config, context, tables, memory, maker, loss)
    plan = make_plan(model, sharder, num_rows, specs, config, context, tables)
    # Tables are allocated here, each shard on the rank that owns it; before, only their shapes exist.
    sharded = DistributedModelParallel(
        model, device=context.device, plan=plan, sharders=[sharder], data_parallel_wrapper=FixedBuckets()
    )
    # TorchRec draws initial rows from the generator of each rank, so they would depend on the plan.
    equal = (columns.schema.item, HISTORY) if columns.schema.event_types else ()
    fill_tables(sharded, config.runtime.seed, specs, equal)
    return sharded


def unsharded(
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    tables: TableRule,
    memory: int,
    maker: ModelMaker,
    loss: nn.Module | None = None,
) -> tuple[TrainableModel, EmbeddingCollectionSharder, dict[str, int], dict[str, DynamicSpec]]:
    """Return the model of a data set with its tables on the meta device, and all that a plan is made from.

    Also returns the sharder of its tables, the rows of each table on all ranks, and the specs of dynamic
    tables. Not collective.

    context: of a rank, or a description of one that is not running; memory: bytes of each rank; others: see
    `build_model`.

    Raises:
        UserError: see `check_rule` and `specs_of`.
    """
    # Again, right before the dense weights are drawn: they must not depend on earlier draws from torch's
    # generator.
    torch.manual_seed(config.runtime.seed)
    config = config.with_global_batch(columns.num_train, context.world_size)
    head = make_head(columns, config.model, config.data.history, maker)
    held, seed, is_stream = held_tables(columns), config.runtime.seed, bool(config.stream.stream)
    widths = widths_of(head, [table.name for table in held], config.model.embedding_dim)
    memory = int((1 - RESERVED_FOR_DENSE) * memory) * context.world_size
    specs = specs_of(held, config.tables, widths, INIT_STD, seed, memory, is_stream)
    num_rows = {
        table.name: context.world_size * rows_per_rank(specs[table.name], context.world_size)
        if table.name in specs
        else table.rows
        for table in held
    }
    model = make_model(columns, config, head, num_rows, loss)
    storage = make_storage(config.tables, num_rows, widths, specs, tables, context)
    rate = tables.rate(config.rated_batch(columns.num_train))
    sharder = make_sharder(tables, config, specs, context, max(widths.values()), rate, storage)
    return model, sharder, num_rows, specs


def held_tables(columns: Columns) -> list[Table]:
    """Return the tables of a model: a feature without a table of its own uses that of another feature."""
    return [table for table in columns.tables if table.rows]


def bytes_of_row(rule: TableRule, width: int, weight_bytes: int = 4) -> int:
    """Return the bytes of a row with the state of its optimizer. weight_bytes: of a number in the row."""
    return weight_bytes * width + 4 * sum(1 if is_of_row else width for is_of_row in rule.slots.values())


def make_storage(
    config: TablesConfig,
    num_rows: Mapping[str, int],
    widths: Mapping[str, int],
    specs: Mapping[str, DynamicSpec],
    rule: TableRule,
    context: RuntimeContext,
) -> DiskStorage | None:
    """Return the storage of tables on a disk; None if all are in memory. Not collective.

    Raises:
        UserError: for a table that there is not, and a budget without room for those in memory.
    """
    if not config.is_on_disk:
        return None
    size = {name: rows * bytes_of_row(rule, widths[name]) for name, rows in num_rows.items()}
    budget = size_of(config.memory_budget or DEFAULT_BUDGET, "memory_budget")
    names = set(config.tables_on_disk)
    require(
        names <= size.keys(),
        f"--storage must be memory, disk, or some of the tables {', '.join(size)}, got {config.storage}",
    )
    if not names:
        if sum(size.values()) <= budget * context.world_size:
            return None
        # The smallest tables stay in memory while half of the budget is left for rows of the others.
        smallest = sorted(size.keys() - specs.keys(), key=lambda name: size[name])
        sums = accumulate(size[name] for name in smallest)
        names = size.keys() - {name for name, used in zip(smallest, sums, strict=True) if used <= budget / 2}
    # One kind of sharding is on the disk, and dynamic tables have no other.
    names |= specs.keys()
    in_memory = sum(size[name] for name in size.keys() - names)
    require(
        in_memory < budget,
        f"--memory_budget {config.memory_budget or DEFAULT_BUDGET} has no room for the tables in memory, "
        f"which take {in_memory / 1e6:,.1f} MB; give a larger budget, or --storage disk",
    )
    totals: dict[int, int] = {}
    for name in names:
        totals[widths[name]] = totals.get(widths[name], 0) + size[name]
    shares = {width: total / sum(totals.values()) for width, total in totals.items()}
    return DiskStorage(config.folder, frozenset(names), shares, budget - in_memory)


def check_tables(config: Config, device: torch.device, has_dynamic: bool) -> None:
    """Refuse flags of tables that a device, or dynamic tables, do not support.

    Raises:
        UserError: names the flag.
    """
    kind, is_cpu = config.tables.storage, device.type == "cpu"
    is_ours = is_cpu and config.training.cpu_tables == "vectorised"
    is_half = config.tables.weight_bytes == 2
    require(
        not config.tables.is_on_disk or is_ours,
        f"--storage {kind} requires a CPU and --cpu_tables vectorised",
    )
    require(kind not in (UVM, UVM_CACHING) or not is_cpu, f"--storage {kind} requires a GPU")
    require(
        not is_half or not is_ours,
        "--row_precision fp16 requires a GPU or --cpu_tables torchrec; give one of them, or fp32",
    )
    require(
        not is_half or not has_dynamic,
        "--row_precision fp16 does not support dynamic tables; give fp32, or --vocabulary fixed",
    )
    require(
        kind != UVM_CACHING or not has_dynamic,
        "--storage uvm_caching does not support dynamic tables, whose rows change outside FBGEMM; give uvm",
    )


def make_sharder(
    rule: TableRule,
    config: Config,
    specs: Mapping[str, DynamicSpec],
    context: RuntimeContext,
    width: int,
    rate: float,
    storage: DiskStorage | None = None,
) -> EmbeddingCollectionSharder:
    """Return the sharder of the tables, with their optimizer in the backward; on a CPU --cpu_tables chooses.

    width: of the widest table; rate: of the rows, before the schedule; storage: of tables on a disk.

    Raises:
        UserError: on a GPU, for rows that are wider than FBGEMM reads there; see also `check_tables` and
            `check_rule`.
    """
    cpu_tables, is_cpu = config.training.cpu_tables, context.device.type == "cpu"
    is_ours = is_cpu and cpu_tables == "vectorised"
    check_tables(config, context.device, bool(specs))
    check_rule(rule, cpu_tables if is_cpu else "gpu", bool(specs))
    fused_params = {"optimizer": rule.fbgemm, "learning_rate": rate, **rule.options()}
    # A row out of range is a bug in this library: it must end the run, and not become row 0.
    fused_params["bounds_check_mode"] = BoundsCheckMode.FATAL
    if is_ours:
        return CpuTablesSharder(fused_params, rule, config.runtime.timeout, specs, storage)
    if not is_cpu:
        require(
            width <= WIDEST_ON_GPU,
            f"An embedding_dim of {width} is too large for a GPU, where FBGEMM returns zeros for wider rows "
            f"(torchrec#3673); give at most {WIDEST_ON_GPU:,}",
        )
        if cpu_tables != TrainingConfig.cpu_tables:
            context.say(f"--cpu_tables {cpu_tables} has no effect on a GPU")
    # Distinct ids are for the exchange.
    is_alone = context.world_size == 1
    if specs:
        return TorchRecTablesSharder(fused_params, specs, is_alone)
    return OneRankTablesSharder(fused_params) if is_alone else DistinctTablesSharder(fused_params)


def make_plan(
    model: TrainableModel,
    sharder: EmbeddingCollectionSharder,
    num_rows: Mapping[str, int],
    specs: Mapping[str, DynamicSpec],
    config: Config,
    context: RuntimeContext,
    rule: TableRule,
) -> ShardingPlan:
    """Return TorchRec's plan: rank 0 makes it, all ranks use it. Collective: every rank.

    num_rows: of each table; rule: the optimizer of the tables.

    Raises:
        UserError: when the tables do not fit the memory of the ranks.
    """
    memory = _room_per_rank(config.tables, context)
    # Of a GPU and its host; on a CPU only one of the two counts is used.
    host = memory if context.device.type == "cpu" else allowed_memory() // context.local_world_size
    weight_bytes = config.tables.weight_bytes
    topology = make_topology(context, rule, memory, host, weight_bytes=weight_bytes)
    kernels, cache = _kernels(config)
    every = dict.fromkeys(num_rows, kernels)
    constraints = constraints_of(num_rows, specs, sharder, context.world_size, every, cache)
    planner = make_planner(topology, constraints, -(-int(config.loader.batch_size) // context.world_size))
    try:
        return planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    except PlannerError as error:
        widths = model.recommender.widths
        needed = sum(rows * widths[name] for name, rows in num_rows.items()) * weight_bytes
        raise UserError(
            f"The tables need {shown_bytes(needed)}, plus their optimizer state and batches, which do not "
            f"fit {counted(context.world_size, 'rank')} with {shown_bytes(memory)} of "
            f"{'disk' if config.tables.is_on_disk else 'memory'} each "
            f"({str(error).strip().splitlines()[0]}). Fix: start more processes or give a smaller "
            f"--embedding_dim{' or --capacity' if specs else ''}."
        ) from error


def _kernels(config: Config) -> tuple[Sequence[str], CacheParams | None]:
    """Return the kernels that the planner may choose from, and the cache of that in the host's memory."""
    storage = config.tables.storage
    if storage == UVM:
        return [FUSED, EmbeddingComputeKernel.FUSED_UVM.value], None
    if storage == UVM_CACHING:
        # Only with a pipeline that loads rows before their step.
        prefetches = config.training.pipeline == "auto"
        cache = CacheParams(load_factor=config.tables.cache_load_factor, prefetch_pipeline=prefetches)
        return [FUSED, EmbeddingComputeKernel.FUSED_UVM_CACHING.value], cache
    return [FUSED], None


def constraints_of(
    num_rows: Mapping[str, int],
    specs: Mapping[str, DynamicSpec],
    sharder: EmbeddingCollectionSharder,
    world_size: int,
    kernels: Mapping[str, Sequence[str]] = MappingProxyType({}),
    cache: CacheParams | None = None,
) -> dict[str, ParameterConstraints]:
    """Return the constraints of a plan: sharding type and kernel of each table, by its name in TorchRec.

    Dynamic tables are split by rows, equally over the ranks. Static tables with many rows per rank are split
    too, so that all ranks share their memory and work. Small ones stay whole on the rank that the planner
    chooses: splitting them has no benefit, and costs an exchange with all ranks. So does a table of one rank:
    two kinds of sharding are two lookups.

    With tables on a disk these are split, and no others: the kind of sharding decides the storage.

    num_rows: of each table; kernels: those to choose from, of tables that may have another than the fused
    one; cache: of a kernel in the host's memory.
    """
    # With one kind of sharding there is one exchange of ids, see `torchrec_tables`.
    splits_all = isinstance(sharder, TorchRecTablesSharder)
    large = ROWS_PER_RANK_WORTH_SPLITTING * world_size if world_size > 1 else math.inf
    split = {name for name, rows in num_rows.items() if splits_all or name in specs or rows >= large}
    if isinstance(sharder, CpuTablesSharder) and sharder.storage is not None:
        split = {*sharder.storage.tables}
    return {
        torchrec_name(name): ParameterConstraints(
            sharding_types=[(ShardingType.ROW_WISE if name in split else ShardingType.TABLE_WISE).value],
            # The kernel with the optimizer in the backward. Otherwise the planner may choose one that keeps
            # rows in the host's memory and copies them to a GPU when they are needed, which is slower.
            compute_kernels=[*kernels.get(name, [FUSED])],
            cache_params=cache,
            output_dtype=DataType.FP32,
        )
        for name in num_rows
    }


def make_planner(
    topology: Topology, constraints: dict[str, ParameterConstraints], batch_size: int
) -> EmbeddingShardingPlanner:
    """Return TorchRec's planner. batch_size: of each rank."""
    return EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        # TorchRec's default estimates the dense part instead, and warns that it over-estimates.
        storage_reservation=FixedPercentageStorageReservation(RESERVED_FOR_DENSE),
        constraints=constraints,
        debug=False,
    )


def make_topology(
    context: RuntimeContext,
    rule: TableRule,
    hbm: int,
    host_memory: int,
    hardware: HardwareConfig | None = None,
    weight_bytes: int = 4,
) -> Topology:
    """Return the planner's view of the machines: ranks, nodes, and bytes of each rank.

    context: of a rank, or a description of one that is not running; hardware: disks and rates, where they are
    known; weight_bytes: of a number in a row.
    """
    # The planner does not count the optimizer state, which may be as large as the rows, and is always fp32.
    share = 1 + [*rule.slots.values()].count(False) * 4 // weight_bytes
    trainer = TrainerConfig(
        world_size=context.world_size,
        # By which TorchRec numbers the devices of tables.
        local_world_size=num_local_devices(context),
        hbm_cap_bytes=hbm // share,
        ddr_cap_bytes=host_memory // share,
    )
    # A kernel without rates of its own would ignore those of the hardware.
    kernels = KernelConfig(
        compute_device=context.device.type, use_hardware_based_bandwidth=hardware is not None
    )
    return TopologyFactory.create_topology(trainer, hardware, kernels)


def _room_per_rank(config: TablesConfig, context: RuntimeContext) -> int:
    """Return the bytes for tables of a rank: of its GPU, of the memory of a CPU, or of the disk."""
    if config.is_on_disk:
        with explained(f"Cannot read --storage_dir {config.folder}", "give another folder"):
            return shutil.disk_usage(config.folder).free // context.local_world_size
    if context.device.type == "cuda":
        whole = torch.cuda.get_device_properties(context.device).total_memory
        whole = whole * num_local_devices(context) // context.local_world_size
        return min(whole, size_of(config.memory_budget, "memory_budget") if config.memory_budget else whole)
    return allowed_memory() // context.local_world_size


@torch.no_grad()
def fill_tables(
    model: DistributedModelParallel,
    seed: int,
    specs: Mapping[str, DynamicSpec] = MappingProxyType({}),
    equal: Sequence[str] = (),
) -> None:
    """Draw the initial rows of this rank's shards. Not collective.

    They are normal, and zero for the unknown row. Dynamic tables have no rows yet. equal: tables with equal
    initial rows.
    """
    for name, value in model.state_dict().items():
        table = table_of(name)
        if isinstance(value, ShardedTensor) and table not in specs:
            for shard in value.local_shards():
                drawn, std = (equal[0], EQUAL_STD) if table in equal else (table, INIT_STD)
                _fill_shard(shard, drawn, value.size(1), seed, std)


def _fill_shard(shard: Shard, table: str, embedding_dim: int, seed: int, std: float) -> None:
    first_row, first_column = shard.metadata.shard_offsets
    num_rows, num_columns = shard.metadata.shard_sizes
    target = shard.tensor.detach()
    for block in range(first_row // INIT_BLOCK_ROWS, -(-(first_row + num_rows) // INIT_BLOCK_ROWS)):
        # A digest, because similar seeds, such as seed + block, would give the same rows to block 1 of one
        # seed and block 0 of the next. Seven bytes always fit a signed seed of 64 bits.
        digest = hashlib.sha256(f"{seed}/{table}/{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        rows = torch.randn(INIT_BLOCK_ROWS, embedding_dim, generator=generator) * std
        if block == 0:
            rows[UNKNOWN_ROW] = 0
        block_first = block * INIT_BLOCK_ROWS
        start, end = max(first_row, block_first), min(first_row + num_rows, block_first + INIT_BLOCK_ROWS)
        # Drawn on the CPU for every device: a GPU's generator gives other numbers for the same seed.
        part = rows[start - block_first : end - block_first, first_column : first_column + num_columns]
        target[start - first_row : end - first_row] = part.to(target.device)


def embedding_tables(model: DistributedModelParallel) -> dict[str, EmbeddingTable]:
    """Return this rank's share of each table of a model, by its name. Not collective."""
    tensors: dict[str, dict[str, ShardedTensor]] = {}
    for key, value in model.state_dict().items():
        if isinstance(value, ShardedTensor):
            tensors.setdefault(table_of(key), {})["weight"] = value
    for key, state in model.fused_optimizer.state_dict()["state"].items():
        # TorchRec repeats the table's name in its optimizer state.
        tensors[table_of(key)] |= {slot.rpartition(".")[2]: value for slot, value in state.items()}
    dynamic = dynamic_rows(model)
    names = model.module.recommender.widths
    rows = rows_of_tables(model)
    return {name: dynamic.get(name) or StaticTable(name, tensors[name], rows.get(name)) for name in names}


def rows_of_tables(model: nn.Module) -> dict[str, TableRows]:
    """Return this rank's rows of the group of each table; none of tables of TorchRec. Not collective."""
    rows: dict[str, TableRows] = {}
    for module in model.modules():
        rows |= getattr(module, "rows_of_tables", {})
        for table in getattr(getattr(module, "config", None), "embedding_tables", ()):
            if table.compute_kernel == EmbeddingComputeKernel.FUSED_UVM_CACHING:
                rows[table_of(table.name)] = RowsInHostMemory(module.emb_module)
    return rows


def describe_plan(model: DistributedModelParallel, columns: Columns) -> str:
    """Describe each table in a line: rows, dimension, how it is split, on which ranks, MiB of weights."""
    lines = [f"{'table':<12}{'rows':>12}{'dim':>5}  {'sharding':<12}{'ranks':<10}{'MiB':>8}"]
    dynamic, held = dynamic_rows(model), rows_of_tables(model)
    # There is a sharded module for each width.
    plan = {table_of(key): planned for part in model.plan.plan.values() for key, planned in part.items()}
    for table in held_tables(columns):
        parameter, width = plan[table.name], model.module.recommender.widths[table.name]
        ranks = sorted(parameter.ranks or [])
        shown = f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else ",".join(map(str, ranks))
        rows = dynamic[table.name].spec.capacity if table.name in dynamic else table.rows
        mib = rows * width * model.module.recommender.weight_bytes / 2**20
        line = f"{table.name:<12}{rows:>12,}{width:>5}  {parameter.sharding_type:<12}{shown:<10}{mib:>8.2f}"
        line += _describe_dynamic(dynamic[table.name]) if table.name in dynamic else ""
        line += "" if parameter.compute_kernel == FUSED else f"  {parameter.compute_kernel}, in host memory"
        on_disk = table.name in held and held[table.name].on_disk
        lines.append(line + (f"  on disk, {len(on_disk.row_of):,} rows in memory" if on_disk else ""))
    return "\n".join(lines)


def _describe_dynamic(rows: DynamicTable) -> str:
    """Describe the properties that only a dynamic table has."""
    spec = rows.spec
    growth = f", grows to {spec.max_capacity:,}" if spec.max_capacity > spec.capacity else ""
    return f"  dynamic, {spec.distribution}, evicts {spec.evict}{growth}"
