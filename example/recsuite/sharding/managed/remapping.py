"""From ids to rows on the rank that owns them, in the form that TorchRec's managed collisions call."""

from __future__ import annotations

import torch
from torchrec.modules.mc_modules import ManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.sharding.dynamic.rows import DynamicRows
from recsuite.sharding.dynamic.spec import EMPTY, NO_ROW


class Remapping(ManagedCollisionModule):
    """One table: the share of a dynamic one, or a static one, whose ids are its rows.

    first_rows: of the ranks, and then the number of all rows; share: None of a static table.
    """

    def __init__(
        self, first_rows: list[int], rank: int, share: DynamicRows | None, device: torch.device
    ) -> None:
        super().__init__(device, first_rows)
        self.first_rows, self.rank, self.dynamic = first_rows, rank, share
        # Made once: each step would copy them to the device and wait.
        self._ends = torch.tensor(first_rows[1:-1], dtype=torch.int64, device=device)

    def owner_of(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank of each id, int64 [n]."""
        if self.dynamic is None:
            return torch.bucketize(ids, self._ends, right=True)
        owners = self.dynamic.placement.owner_of(ids)
        # The unknown has its row on rank 0.
        return owners.masked_fill_(ids == EMPTY, 0)

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: torch.Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Ids as rows of the whole table. In training new ids are taken in."""
        return {
            name: JaggedTensor(values=self._rows_of(jagged.values()), lengths=jagged.lengths())
            for name, jagged in features.items()
        }

    def _rows_of(self, ids: torch.Tensor) -> torch.Tensor:
        if self.dynamic is None:
            return ids
        # All that the ranks want in a step, at once: who comes in must not depend on the ranks.
        distinct, inverse = ids.unique(return_inverse=True)
        is_known = distinct != EMPTY
        rows = torch.full_like(distinct, NO_ROW)
        known = distinct[is_known]
        rows[is_known] = self.dynamic.take_in(known) if self.training else self.dynamic.find(known)
        # Those without a row look at the last one, which every rank keeps like that of the unknown.
        rows = torch.where(rows == NO_ROW, len(self.dynamic.weights) - 1, rows)
        return rows[inverse] + self.first_rows[self.rank]

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """The same as `remap`."""
        return self.remap(features)

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Nothing: ids travel as they are."""
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Nothing: who is seen is counted where rows are found."""
        return features

    def evict(self) -> None:
        """Nothing for TorchRec to reset: whoever comes in has a new row at once."""

    def output_size(self) -> int:
        """Rows on all ranks."""
        return self.first_rows[-1]

    def input_size(self) -> int:
        """Only of static tables; the owners of ids are not found by their range."""
        return self.first_rows[-1]

    def buckets(self) -> int:
        """One for each rank, by which TorchRec checks what is split over them."""
        return len(self.first_rows) - 1

    def validate_state(self) -> None:
        """Nothing: no state of it is saved by TorchRec."""

    def open_slots(self) -> torch.Tensor:
        """Places of this rank without an id, int64 []."""
        if self.dynamic is None:
            return torch.tensor(0)
        return torch.tensor(self.dynamic.places.ids.numel() - self.dynamic.places.taken)

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> Remapping:
        """Itself, which is that of a rank already."""
        return self
