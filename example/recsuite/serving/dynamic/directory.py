"""Which ids of a dynamic table have a row, and where that lies in memory; a delta makes another one of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from recsuite.checkpoint.storage.dynamic.record import DynamicRecord
from recsuite.checkpoint.storage.dynamic.texts import Texts
from recsuite.datasets.schema import UNKNOWN_ROW


@dataclass(frozen=True)
class Directory:
    """The ids of a dynamic table that have a row, after one checkpoint.

    ids: int64 [n], ascending; rows: where their rows lie in memory, int64 [n], never UNKNOWN_ROW, where the
    learned row of the unknown lies; seen: when each was last seen, int64 [n], in the unit of `record`; texts:
    what ids stand for, of the table whose ids people are shown, else None.
    """

    ids: torch.Tensor
    rows: torch.Tensor
    seen: torch.Tensor
    record: DynamicRecord
    texts: Texts | None = None

    def __len__(self) -> int:
        """How many ids have a row."""
        return len(self.ids)

    @property
    def kind(self) -> type[Any] | None:
        """The type of the raw values; None where nobody has seen one."""
        return str if self.record.has_texts else int if len(self) else None

    def find(self, ids: torch.Tensor) -> torch.Tensor:
        """Where the rows of ids lie, int64 [m], of those without one UNKNOWN_ROW. ids: int64 [m]."""
        places, is_there = self.places_of(ids)
        found = torch.full_like(ids, UNKNOWN_ROW)
        found[is_there] = self.rows[places]
        return found

    def places_of(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Where those of some ids are that are here, int64 [their number]; and which they are, bool [m]."""
        places = torch.searchsorted(self.ids, ids)
        is_there = places < len(self)
        is_there[is_there.clone()] = self.ids[places[is_there]] == ids[is_there]
        return places[is_there], is_there

    def raw_values(self) -> list[Any]:
        """The raw values of all ids, in the order of the ids, without those whose text is not known."""
        if self.texts is None:
            found: list[Any] = self.ids.tolist()
            return found
        known = self.texts.of_ids(self.ids.numpy())
        return [text.decode("utf-8", "surrogatepass") for text in known.texts]

    def without_expired(self) -> Directory:
        """The same without ids whose time to live has passed."""
        horizon = self.record.now - self.record.ttl
        return self.only(self.seen >= horizon) if self.record.ttl else self

    def only(self, which: torch.Tensor) -> Directory:
        """Some of the ids. which: bool [n]."""
        # The same tensors where all of them stay: by these a catalogue sees that nobody came or left.
        if bool(which.all()):
            return self
        return dataclasses.replace(self, ids=self.ids[which], rows=self.rows[which], seen=self.seen[which])

    def free_rows(self, size: int) -> torch.Tensor:
        """The rows of a memory of `size` that no id has, int64."""
        is_free = torch.ones(size, dtype=torch.bool)
        is_free[UNKNOWN_ROW] = False
        is_free[self.rows] = False
        return is_free.nonzero().view(-1)

    def with_others(self, ids: torch.Tensor, rows: torch.Tensor, seen: torch.Tensor) -> Directory:
        """With ids that are not here. ids: int64 [m], ascending; rows, seen: theirs, int64 [m]."""
        if not len(ids):
            return self
        # Merged, not sorted: a delta has few of them, and the table may have many.
        is_new = torch.zeros(len(self) + len(ids), dtype=torch.bool)
        is_new[torch.searchsorted(self.ids, ids) + torch.arange(len(ids))] = True

        def merged(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
            both = torch.empty(len(is_new), dtype=torch.int64)
            both[is_new], both[~is_new] = theirs, ours
            return both

        return dataclasses.replace(
            self, ids=merged(self.ids, ids), rows=merged(self.rows, rows), seen=merged(self.seen, seen)
        )
