"""The tables of this rank as they lie in FBGEMM's kernels, and how their rows learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from recsuite.sharding.dynamic.rows import DynamicRows


@dataclass(frozen=True)
class TableGroup:
    """Tables of this rank that lie in one kernel: those with the same kind of sharding.

    kernel: FBGEMM's, which holds their rows and the optimizer's state of them; first_key: the key of its
    first row; tables: their names, each with its first row.
    """

    kernel: Any
    first_key: int
    tables: tuple[tuple[str, int], ...]

    @property
    def group(self) -> TableGroup:
        """Itself: where its rows lie."""
        return self

    @property
    def weights(self) -> torch.Tensor:
        """All rows, float32 [rows, D]."""
        # FBGEMM keeps the tables of a group one after the other in one array; all of ours are equally wide.
        return self.kernel.weights_host.detach().view(-1, self.kernel.max_D)

    @property
    def state(self) -> torch.Tensor:
        """The optimizer's number of each row, float32 [rows]."""
        # FBGEMM's own array, so that TorchRec's state of the optimizer and our checkpoints see it.
        state: torch.Tensor = self.kernel.momentum1_host
        return state.detach()

    def learn(self, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        """Row-wise Adagrad of distinct rows, int64 [n], with gradients, float32 [n, D], which it uses up.

        The arithmetic is that of FBGEMM's EXACT_ROWWISE_ADAGRAD, at three times its speed on a CPU.
        """
        state = self.state
        squares = torch.linalg.vector_norm(gradients, dim=1).square_().div_(gradients.size(1))
        sums = squares.add_(state.index_select(0, rows))
        state.index_copy_(0, rows, sums)
        rates = -self.kernel.learning_rate_tensor / sums.sqrt_().add_(self.kernel.optimizer_args.eps)
        # With another alpha than 1, index_add_ adds row by row, in ten times the time.
        self.weights.index_add_(0, rows, gradients.mul_(rates.unsqueeze(1)))


@dataclass(frozen=True)
class DynamicPart:
    """This rank's share of a dynamic table.

    share: which id has which row; group: that in which the rows lie; first_row: of the share in it.
    """

    share: DynamicRows
    group: TableGroup
    first_row: int

    def rows_of(self, ids: torch.Tensor, is_training: bool) -> torch.Tensor:
        """The rows of ids in the group, int64 [n]; NO_ROW for those without one.

        ids: int64 [n], distinct, ascending; the unknown's first, on the rank that has its row. In training
        new ones are taken in.
        """
        has_unknown = self.share.unknown is not None
        known = ids[1:] if has_unknown else ids
        rows = self.share.take_in(known) if is_training else self.share.find(known)
        if has_unknown:
            rows = torch.cat([rows.new_full((1,), len(self.share.weights) - 1), rows])
        return torch.where(rows >= 0, rows + self.first_row, rows) if self.first_row else rows


Part = TableGroup | DynamicPart
