"""Interface of embedding tables outside the training step: export and import of rows.

A table has one of two storages. `StaticTable`: rows by number, which a vocabulary gives to values before the
training. `DynamicTable` in `dynamic.py`: rows by 64-bit id, inserted and evicted during the training. The
steps of a training run on one of two backends, our CPU kernels (`cpu_tables.py`) or TorchRec's; both keep the
rows in the same tensors. Checkpoints, deltas, checks and copies know only `EmbeddingTable`.

n: rows; D: numbers in a row.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder, ShardedEmbeddingCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from recsuite.errors import UserError
from recsuite.sharding.storage import RowsOnDisk, TableRows

# Values of n rows by the name of the slot: "weight", float32 or float16 [n, D]; the state of the optimizer by
# the names of its rule, float32 [n] or [n, D]; and what tells which rows they are.
RowSlots = dict[str, torch.Tensor]
# Those of `IdCounters` since the beginning of the training.
SINCE_BEGINNING = ("admitted", "evicted", "expired", "unplaced", "unadmitted")


class RowSource(Protocol):
    """Rows of all tables in a checkpoint; `checkpoint.shards.RowReader` is one."""

    def fill_rows(self, table: str, slots: Mapping[str, torch.Tensor], first: int = 0) -> None:
        """Fill tensors with the rows of a table by number, from number `first` on."""

    def rows_of_ids(
        self, table: str, is_wanted: Callable[[torch.Tensor], torch.Tensor] = ..., slots: Sequence[str] = ...
    ) -> Iterator[RowSlots]:
        """Yield rows of a table by id, in parts without common ids.

        is_wanted: ids to a mask, bool [n], by default all; slots: those to read, by default all.
        """

    def unknown_row(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of unknown ids and its optimizer state, float32 [D] and []."""

    def record(self, table: str) -> Any:
        """Return what `EmbeddingTable.record` returned when the rows were written, as attributes."""


@dataclass(frozen=True)
class IdCounters:
    """Counters of ids.

    Rows now, and ids that wait; since the beginning: rows given, rows evicted from live ids and from expired
    ones; and, step by step, ids without a place and ids not seen often enough.
    """

    live: int
    waiting: int
    admitted: int
    evicted: int
    expired: int
    unplaced: int
    unadmitted: int


class EmbeddingTable(ABC):
    """This rank's share of one embedding table.

    prefix: the first word of the names of its tensors in files; exports_copies: True if a full export never
    has the table's own tensors; name: of the table; rows: their storage; tensors: the whole table by slot, if
    its rows have numbers. Only `end_step` is collective.
    """

    prefix: ClassVar[str]
    exports_copies: ClassVar[bool] = False
    name: str
    rows: TableRows
    tensors: Mapping[str, ShardedTensor] = MappingProxyType({})

    @property
    def first(self) -> int:
        """Number of this rank's first row in the whole table; 0 if rows have no numbers."""
        return 0

    @abstractmethod
    def begin_step(self, step: int, seconds: int = 0, scale: float = 1.0) -> None:
        """Set the time of the next training step, if rows have an age.

        step, seconds: in steps and in event time; scale: the row scale.
        """

    @abstractmethod
    def end_step(self) -> None:
        """Complete a training step, after its backward. Collective: every rank."""

    @abstractmethod
    def export(self, changed: bool = False) -> RowSlots:
        """Return all rows, or those that changed since `clear_changes`.

        The tensors may be the table's own, see `exports_copies`.
        """

    def ids(self) -> torch.Tensor:
        """Return the ids of this rank's rows, int64 [n]; only for a dynamic table."""
        raise NotImplementedError

    @abstractmethod
    def load(self, source: RowSource, scale: float) -> int:
        """Replace all rows by those of a checkpoint; return the number of rows without a place.

        scale: a row is its weights times this.
        """

    def set_rows(self, rows: torch.Tensor) -> None:
        """Replace the first numbers of all rows. rows: of the whole table, float32 [n, at most D].

        Raises:
            UserError: when its rows have no numbers.
        """
        raise UserError(
            f"The initial rows of the table {self.name} cannot be given, because it is dynamic. Fix: give "
            "--initial_rows random, or --vocabulary fixed."
        )

    def subtract(self, rows: torch.Tensor) -> None:
        """Subtract numbers from all rows of this rank, float32 [n, D]; only for rows with numbers."""
        raise NotImplementedError

    @abstractmethod
    def multiply(self, factor: float) -> None:
        """Multiply all rows of this rank by a number."""

    @abstractmethod
    def clear_changes(self) -> None:
        """Forget which rows changed."""

    @abstractmethod
    def largest(self, changed: bool = False) -> dict[str, float]:
        """Return the largest magnitude of each slot, NaN if any is NaN. changed: as for `export`."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of memory for a copy of this rank."""

    @abstractmethod
    def copy(self) -> RowSlots:
        """Return a copy of what predictions need, in the memory of the host."""

    @abstractmethod
    def restore(self, copy: RowSlots) -> None:
        """Replace all rows by a copy from `copy`."""

    @abstractmethod
    def check(self, source: RowSource, folder: Path) -> None:
        """Refuse a checkpoint whose rows do not fit, beyond a check of shapes. folder: its name in messages.

        Raises:
            UserError: names both sides.
        """

    def record(self) -> dict[str, Any] | None:
        """Return what a checkpoint has to record besides the rows; None if nothing."""
        return None

    def counts(self) -> IdCounters | None:
        """Return the counters of this rank; None if the ids of the table are fixed."""
        return None


class StaticTable(EmbeddingTable):
    """Table whose rows have numbers.

    tensors: by slot, split by rows over the ranks or whole on one of them; a rank without rows has only the
    weight; rows: those of its group on this rank, None for TorchRec's. marks: True for changed rows of this
    rank, bool [n], once `track_changes` was called.
    """

    prefix = "tables"

    def __init__(
        self, name: str, tensors: Mapping[str, ShardedTensor], rows: TableRows | None = None
    ) -> None:
        self.name, self.tensors = name, tensors
        # Without any, its tensors are up to date at any time.
        self.rows = rows or TableRows(torch.empty(0), {})
        self.marks: torch.Tensor | None = None

    @property
    def shards(self) -> dict[str, Shard]:
        """This rank's part of each slot; none if it has no rows."""
        return {slot: shard for slot, value in self.tensors.items() for shard in value.local_shards()}

    @property
    @override
    def first(self) -> int:
        return next((shard.metadata.shard_offsets[0] for shard in self.shards.values()), 0)

    def begin_step(self, step: int, seconds: int = 0, scale: float = 1.0) -> None:
        """No-op: rows have no age."""

    def end_step(self) -> None:
        """No-op: the backward has updated the rows."""

    def changed_rows(self) -> torch.Tensor:
        """Return the changed ones among this rank's rows, int64, counted from 0."""
        if self.marks is None:
            return torch.zeros(0, dtype=torch.int64)
        return self.marks.nonzero().view(-1)

    @override
    def export(self, changed: bool = False) -> RowSlots:
        self.rows.flush()
        held = self._held()
        if not changed:
            return held
        # Numbers of changed rows, int64 [n], ascending.
        rows = self.changed_rows()
        taken = {slot: self.rows.taken(value, rows) for slot, value in held.items()}
        return {"rows": rows + self.first, **taken}

    def _held(self) -> RowSlots:
        return {slot: shard.tensor.detach() for slot, shard in self.shards.items()}

    def check(self, source: RowSource, folder: Path) -> None:
        """No-op: a checkpoint of the same shapes has the same rows."""

    @override
    def load(self, source: RowSource, scale: float) -> int:
        self.rows.forget()
        source.fill_rows(self.name, self._held(), self.first)
        weight = self._weight
        # Rows that fp32 had divided by a small row scale.
        if weight is not None and weight.dtype == torch.float16 and not math.isfinite(largest_of(weight)):
            raise UserError(
                f"Rows of the table {self.name} are beyond the range of --row_precision fp16. Fix: give fp32."
            )
        return 0

    @override
    def set_rows(self, rows: torch.Tensor) -> None:
        self.rows.forget()
        # None if this rank has no row.
        if self._weight is not None:
            mine = rows[self.first : self.first + len(self._weight)]
            self._weight[:, : mine.size(1)] = mine.to(self._weight)

    @override
    def subtract(self, rows: torch.Tensor) -> None:
        self.rows.forget()
        if self._weight is not None:
            self._weight.sub_(rows)
            self.mark(torch.arange(len(rows), device=rows.device))

    @override
    def multiply(self, factor: float) -> None:
        self.rows.forget()
        if self._weight is not None:
            self._weight.mul_(factor)

    def track_changes(self) -> None:
        """Mark changed rows from now on, a byte for each row."""
        if self._weight is not None:
            self.marks = torch.zeros(len(self._weight), dtype=torch.bool, device=self._weight.device)

    def mark(self, rows: torch.Tensor) -> None:
        """Mark some of this rank's rows, int64, counted from 0, in any order and also repeated."""
        if self.marks is not None:
            self.marks.index_fill_(0, rows, True)

    @override
    def clear_changes(self) -> None:
        if self.marks is not None:
            self.marks.zero_()

    @property
    @override
    def nbytes(self) -> int:
        return 0 if self._weight is None or self.rows.on_disk else self._weight.nbytes

    @override
    def copy(self) -> RowSlots:
        self.rows.flush()
        return {} if self._weight is None else {"weight": self.rows.copied(self._weight)}

    @override
    def restore(self, copy: RowSlots) -> None:
        self.rows.forget()
        if self._weight is not None:
            self._weight.copy_(copy["weight"])

    @property
    def _weight(self) -> torch.Tensor | None:
        """Weights of this rank, float32 [n, D]; None if it has no rows."""
        return self._held().get("weight")

    @override
    def largest(self, changed: bool = False) -> dict[str, float]:
        held = self.export(changed)
        return {slot: largest_of(value) for slot, value in held.items() if slot != "rows"}


def largest_of(values: torch.Tensor) -> float:
    """Return the largest magnitude of numbers, 0 without any; NaN if any is NaN."""
    # One pass over the numbers for minimum and maximum; aminmax passes a NaN on.
    return max(map(abs, torch.stack(values.aminmax()).tolist())) if values.numel() else 0.0


def describe_storage(tables: Mapping[str, EmbeddingTable]) -> list[str]:
    """Describe the lookups of rows on a disk in lines; none without a disk. Not collective."""
    names: dict[RowsOnDisk, list[str]] = {}
    for name, table in tables.items():
        if (rows := table.rows.on_disk) is not None:
            names.setdefault(rows, []).append(name)
    lines = []
    for rows, of_group in names.items():
        counts = rows.counts
        hits, early = 1 - counts.loaded / max(1, counts.requested), 1 - counts.late / max(1, counts.loaded)
        lines.append(
            f"on disk: {', '.join(of_group)}; {hits:.1%} of {counts.requested:,} requested rows were in "
            f"memory, {early:.1%} of the others were loaded ahead; {counts.written:,} rows written back"
        )
    return lines


def track_changes(model: nn.Module, tables: Mapping[str, EmbeddingTable]) -> None:
    """Mark the rows that training steps look up, which are those that they change, from now on.

    Evaluation changes no row. Not collective.
    """
    # Tables by id mark their changes themselves, while they find rows.
    static = {name: table for name, table in tables.items() if isinstance(table, StaticTable)}
    for table in static.values():
        table.track_changes()

    def mark(
        looked_up: KeyedJaggedTensor, states: torch.Tensor, module: nn.Module, raw_ids: torch.Tensor | None
    ) -> None:
        if module.training:
            # A table has one feature, of the same name. The ids are rows of this rank's shards.
            for name, jagged in looked_up.to_dict().items():
                if name in static:
                    static[name].mark(jagged.values())

    for module in model.modules():
        if isinstance(module, ShardedEmbeddingCollection):
            # TorchRec's own trackers are called here too. They keep all ids of all steps, which grow without
            # a bound and must be sorted in the end.
            module.register_post_lookup_tracker_fn(mark)


class TablesSharder(EmbeddingCollectionSharder):
    """TorchRec's sharder with another class of sharded tables, which a subclass makes."""

    def make(self, *arguments: Any, **options: Any) -> ShardedEmbeddingCollection:
        """Return the sharded tables, from the arguments of TorchRec's class. Collective: every rank."""
        raise NotImplementedError

    def shard(
        self,
        module: EmbeddingCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Return the sharded tables. Collective: every rank."""
        options = {"use_index_dedup": self._use_index_dedup, "module_fqn": module_fqn}
        return self.make(module, params, env, self.fused_params, device, **options)
