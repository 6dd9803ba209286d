"""TorchRec's sharded tables with a step of their own on the CPU: `--cpu_tables vectorised`.

TorchRec's plan, shards, names, states and pipelines stay. Its step on a CPU spends much of its time beside
the arithmetic, and FBGEMM updates rows at a third of the speed of PyTorch's own kernels. Here

    ids of all features -> keys -> distinct keys, in order          a row travels once for all its ids
    keys to the ranks that own the rows, rows back -> a row an id   one exchange for all tables
    gradients of ids -> sums for distinct keys -> to the owners     as many bytes as the rows
    -> sums over ranks -> the tables' optimizer, in place           see `table_rules`

Dynamic tables are asked for by ids, which the ranks that own them turn into rows (`sharding/dynamic`).

R: keys that come to a rank; D: numbers in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from recsuite.datasets.schema import AUDIENCE, LISTS
from recsuite.models.layers import DistinctRows
from recsuite.models.rows import SharedRows
from recsuite.runtime.process import named
from recsuite.sharding.cpu.groups import DynamicPart, TableGroup, make_state
from recsuite.sharding.cpu.lookup import LookupRequest, TableLayout, learn
from recsuite.sharding.cpu.request import CountsExchange
from recsuite.sharding.cpu.resolution import mark_missing, resolve, take_unknown
from recsuite.sharding.cpu.shared_exchange import open_exchange
from recsuite.sharding.dynamic.placement import rows_per_rank
from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.dynamic.spec import DynamicSpec
from recsuite.sharding.recommender import of_tables
from recsuite.sharding.table_rules import TableRule

Specs = Mapping[str, DynamicSpec]


class CpuTables(ShardedEmbeddingCollection):
    """The sharded tables of a model on the CPU, split by rows or whole.

    sharder: knows their optimizer, and those of them that take ids in.
    """

    def __init__(self, sharder: CpuTablesSharder, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.exchange = open_exchange(self._env.process_group, sharder.timeout)
        # TorchRec's pipelines ask whether its exchange still waits for a first batch; ours does not.
        self._has_uninitialized_input_dist = False
        # Autograd calls the backward only for inputs that want a gradient. The rows themselves are none, so
        # this empty tensor is what makes it come, also on a rank that holds no rows.
        self.anchor = torch.zeros(0, requires_grad=True)
        self.layout = self._lay_out(sharder.rule, sharder.dynamic)

    def _lay_out(self, rule: TableRule, dynamic: Specs) -> TableLayout:
        """Give the rows of all ranks their keys, and find the kernels of this rank."""
        plan = {name: self.module_sharding_plan[name] for name in self._table_names}
        num_rows = {name: config.num_embeddings for name, config in self._table_name_to_config.items()}
        layout = TableLayout(plan, num_rows)
        # Of all ranks, from the plan that all have: a rank finds out by itself who owns a row, and asks
        # nobody.
        for rank in range(self._env.world_size):
            for kind, lookup in zip(self._sharding_types, self._lookups, strict=True):
                first_key, tables = layout.add_group(rank, kind)
                if rank == self._env.rank:
                    module = _module_of(lookup, tables)
                    state = make_state(rule, module) if module else {}
                    kernel = module and module.emb_module
                    layout.groups.append(TableGroup(kernel, state, first_key, tables, rule))
        # Others of the model have another width, and so other tables.
        for name in [name for name in dynamic if name in plan]:
            layout.dynamic[name] = self._share_of(dynamic[name], layout)
        layout.close()
        return layout

    def _share_of(self, spec: DynamicSpec, layout: TableLayout) -> DynamicPart:
        """This rank's share of a dynamic table."""
        places = {name: (group, first) for group in layout.groups for name, first in group.tables}
        group, first_row = places[spec.name]
        rank, world_size = self._env.rank, self._env.world_size
        rows = slice(first_row, first_row + rows_per_rank(spec, world_size))
        state = group.state["momentum1"][rows]
        share = DynamicRows(spec, rank, world_size, group.weights[rows], state)
        if share.unknown is not None:
            # Learned like any other, and zero to begin with.
            share.unknown[0].zero_()
        return DynamicPart(share, group, first_row)

    def dynamic_rows(self) -> dict[str, DynamicRows]:
        """This rank's share of each dynamic table, by its name."""
        return {name: part.share for name, part in self.layout.dynamic.items()}

    def on_growth(self) -> None:
        """Shares have moved between the ranks: what was asked for before is to be asked for again."""
        self.layout.generation += 1

    def end_step(self) -> None:
        """Nothing is left to do: the rank that has the unknown's row got all gradients of it."""

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> KJTListSplitsAwaitable:
        """Ask the ranks for the rows of features. Collective: every rank."""
        with torch.no_grad():
            # TorchRec waits twice, for counts and then for keys; its pipeline does other work between the
            # two.
            features = of_tables(features, self.layout.plan)
            return KJTListSplitsAwaitable([CountsExchange(self.layout, self.exchange, features)], ctx)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """The rows of features; in the backward the tables learn. Collective: every rank."""
        (request,) = input
        if request.generation != self.layout.generation:
            # A pipeline asked for it before a table grew, and its ids went to the ranks that had them then.
            # It is so on all ranks.
            request = CountsExchange(self.layout, self.exchange, request.features).wait().wait()
        if not request.is_resolved:
            with named("lookup"):
                resolve(self.layout, request, self.training)
        if self.post_lookup_tracker_fn is not None:
            # Here, because TorchRec calls its tracker in the lookup that this one replaces.
            self._track(request)
        names = request.features.keys()
        lengths = dict(zip(names, request.features.lengths().view(len(names), -1), strict=True))
        *rows, distinct = Rows.apply(self.anchor, self, request)
        shared = shared_in(names)
        expanded = [name for name in names if name not in shared]
        found: dict[str, Any] = {
            name: JaggedTensor(values=values, lengths=lengths[name])
            for name, values in zip(expanded, rows, strict=True)
        }
        for name, places in zip(names, request.inverse_of_features(), strict=True):
            if name in shared:
                is_single = len(places) == len(lengths[name]) and bool((lengths[name] == 1).all())
                found[name] = DistinctRows(distinct, places, lengths[name], is_single)
        # Not an awaitable, unlike that of TorchRec's own tables: the exchange has ended above.
        if expanded:
            return {name: found[name] for name in names}
        return SharedRows(found, distinct, request.in_order_of_rows)

    def _track(self, request: LookupRequest) -> None:
        """Tell TorchRec's tracker, from which deltas are made, which rows of this rank are looked up."""
        for group, piece in self.layout.pieces(request):
            # Dynamic tables note by themselves what changes.
            if not isinstance(group, TableGroup):
                continue
            names = [name for name, _ in group.tables]
            firsts = torch.tensor([first for _, first in group.tables])
            rows = request.rows[piece]
            # What comes from a rank is sorted, and so is the list of tables: boundaries tell the rows of
            # each. The last table ends where no row number reaches.
            ends = torch.searchsorted(rows, torch.cat([firsts[1:], rows.new_tensor([2**62])]))
            counts = ends.diff(prepend=ends.new_zeros(1))
            rows = rows - firsts.repeat_interleave(counts)
            looked_up = KeyedJaggedTensor(names, rows, lengths=counts.int(), stride=1)
            self.post_lookup_tracker_fn(looked_up, rows, self, None)


def _module_of(lookup: Any, tables: tuple[tuple[str, int], ...]) -> Any:
    """TorchRec's module of a table group; None where this rank holds nothing of it."""
    held = [[table.name for table in config.embedding_tables] for config in lookup.grouped_configs]
    names = [name for name, _ in tables]
    if held != ([names] if names else []):
        # Another version of TorchRec may group otherwise; rows would be others than their keys say.
        raise RuntimeError(f"TorchRec has grouped the tables {names} as {held}")
    return lookup._emb_modules[0] if names else None


def shared_in(names: Sequence[str]) -> Sequence[str]:
    """Those of the features whose rows are added up as they are: a copy for each value would cost more."""
    # With an audience the rows of other features have a prior, whose gradient each event has for itself.
    return LISTS if AUDIENCE in names else names


def expanded_in(request: LookupRequest) -> list[torch.Tensor]:
    """The part of `LookupRequest.inverse` of each other feature."""
    names = request.features.keys()
    parts = zip(names, request.inverse_of_features(), strict=True)
    return [part for name, part in parts if name not in shared_in(names)]


class Rows(torch.autograd.Function):
    """The rows of features that are not shared, each float32 [its ids, D], and for those that are all
    distinct ones, float32 [distinct, D]; the backward is the step of the tables.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, tables: CpuTables, request: LookupRequest
    ) -> tuple[torch.Tensor, ...]:
        """Collective: every rank."""
        ctx.tables, ctx.request = tables, request
        with named("lookup"):
            mine = tables.exchange.outgoing("rows", (len(request.rows), tables._embedding_dim))
            rows = request.rows if request.missing is None else request.rows.clamp(min=0)
            for part, piece in tables.layout.pieces(request):
                # Written where other ranks read it: rows are copied once on this side.
                torch.index_select(part.group.weights, 0, rows[piece], out=mine.rows[piece])
            mark_missing(request, mine.rows)
        with named("output exchange"):
            found = tables.exchange.swap(mine, request.received, request.num_sent)()
        with named("lookup"):
            if tables.layout.dynamic:
                take_unknown(request, found)
            return *(found.index_select(0, inverse) for inverse in expanded_in(request)), found

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        """Collective: every rank."""
        tables, request = ctx.tables, ctx.request
        sums = tables.exchange.outgoing("gradients", (sum(request.num_sent), tables._embedding_dim))
        *of_features, of_distinct = gradients
        # The slot still holds an earlier step. Adding up here, before the exchange, sends as many rows as
        # came.
        sums.rows.copy_(of_distinct)
        for inverse, gradient in zip(expanded_in(request), of_features, strict=True):
            sums.rows.index_add_(0, inverse, gradient)
        with named("output exchange"):
            mine = tables.exchange.swap(sums, request.num_sent, request.received)()
        with named("optimizer"):
            if tables._env.world_size > 1:
                # The loss is the mean over ranks, and each rank's backward began with its own loss alone.
                # TorchRec's exchange divides in the same way.
                mine.div_(tables._env.world_size)
            learn(tables.layout, request, mine)
        # The tables have learned already; there is no gradient left for an optimizer to take.
        return None, None, None


class CpuTablesSharder(EmbeddingCollectionSharder):
    """Makes `CpuTables` of the tables of a model.

    rule: their optimizer; timeout: seconds that a rank waits for another one; dynamic: the tables that take
    ids in.
    """

    def __init__(self, fused_params: dict[str, Any], rule: TableRule, timeout: float, dynamic: Specs) -> None:
        # The kernel learns nothing and is to keep nothing: of all optimizers this one has no state.
        super().__init__(fused_params={**fused_params, "optimizer": EmbOptimType.EXACT_SGD})
        self.rule, self.timeout, self.dynamic = rule, timeout, dynamic

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> CpuTables:
        """The sharded tables. Collective: every rank."""
        return CpuTables(self, module, params, env, self.fused_params, device, module_fqn=module_fqn)

    @property
    def sharded_module_type(self) -> type[CpuTables]:
        """What `shard` makes."""
        return CpuTables
