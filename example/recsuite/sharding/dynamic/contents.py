"""What is in a dynamic table, without a word of where it lies: for checkpoints, deltas and growth.

Ids are int64 and ascend. n: ids; D: numbers in a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Waiting:
    """Ids that were seen, but not often enough for a row.

    ids: int64 [n]; count: sightings, int32 [n]; seen: when last, int64 [n].
    """

    ids: torch.Tensor
    count: torch.Tensor
    seen: torch.Tensor

    def __getitem__(self, which: torch.Tensor) -> Waiting:
        """Those that an index or a mask says."""
        return Waiting(self.ids[which], self.count[which], self.seen[which])

    @staticmethod
    def none(device: torch.device | None = None) -> Waiting:
        """Nobody waits."""
        empty = torch.empty(0, dtype=torch.int64, device=device)
        return Waiting(empty, empty.int(), empty)


@dataclass(frozen=True)
class LiveRows:
    """Ids with their rows, and those that wait for one.

    ids: int64 [n]; weight: float32 [n, D]; state: of the optimizer, float32 [n]; seen: when last, int64 [n];
    count: 256 times the sightings, halved as they age, int32 [n].
    """

    ids: torch.Tensor
    weight: torch.Tensor
    state: torch.Tensor
    seen: torch.Tensor
    count: torch.Tensor
    waiting: Waiting

    def of_rows(self, which: torch.Tensor) -> LiveRows:
        """The rows that an index or a mask says; all that wait."""
        return LiveRows(
            self.ids[which],
            self.weight[which],
            self.state[which],
            self.seen[which],
            self.count[which],
            self.waiting,
        )


@dataclass(frozen=True)
class Changes:
    """What is new since `clear_changes`: rows and waiting ids that changed, and ids that have left."""

    rows: LiveRows
    gone: torch.Tensor
    waiting_gone: torch.Tensor

    @property
    def waiting(self) -> Waiting:
        """Waiting ids that changed."""
        return self.rows.waiting


@dataclass(frozen=True)
class Marks:
    """From which `changes` are made, by id: touched; new since the last ones; left since the last ones."""

    touched: torch.Tensor
    fresh: torch.Tensor
    gone: torch.Tensor


@dataclass(frozen=True)
class Moving:
    """All that a share held, on its way to where it lies in a table of another capacity."""

    live: LiveRows
    marks: Marks
    waiting_marks: Marks


@dataclass(frozen=True)
class Counts:
    """What became of ids: rows there are, ids that wait, and since the beginning: rows given, rows taken from
    the least wanted and from the expired, and, step by step, ids without a place and ids not seen often
    enough.
    """

    live: int
    waiting: int
    admitted: int
    evicted: int
    expired: int
    unplaced: int
    unadmitted: int
