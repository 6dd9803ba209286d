"""Inputs of a model: the rows that were looked up for a batch, and the rest of the batch.

Shapes: B events, V values of one feature or items of all histories, D numbers in a row, R distinct rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class LookedUp(Protocol):
    """Rows of one feature for B events, event after event; TorchRec's JaggedTensor is one."""

    def values(self) -> torch.Tensor:
        """Return the rows, float32 [V, D]."""

    def lengths(self) -> torch.Tensor:
        """Return the number of values of each event, [B]."""


class PlainRows(NamedTuple):
    """Rows of one feature that were looked up together with those of another, see `LookedUp`.

    rows: float32 [V, D], or more for unused slots at the end; counts: values of each event, [B].
    """

    rows: torch.Tensor
    counts: torch.Tensor

    def values(self) -> torch.Tensor:
        """Return the rows."""
        return self.rows

    def lengths(self) -> torch.Tensor:
        """Return the number of values of each event, [B]."""
        return self.counts


@dataclass(frozen=True)
class DistinctRows:
    """Distinct rows of one feature for B events, in place of `LookedUp`.

    rows: float32 [R, D], also those of other features; places: the row of each value, int64 [V]; counts:
    values of each event, int32 [B]; is_single: True if each event has one value.
    """

    rows: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    is_single: bool = False

    def values(self) -> torch.Tensor:
        """Return the row of each value, float32 [V, D]."""
        return self.rows.index_select(0, self.places)

    def lengths(self) -> torch.Tensor:
        """Return the number of values of each event, [B]."""
        return self.counts

    def events(self) -> torch.Tensor:
        """Return the event of each value, int32 [V], a new tensor."""
        if self.is_single:
            return torch.arange(len(self.places), dtype=torch.int32, device=self.places.device)
        return torch.repeat_interleave(self.counts.to(torch.int32), output_size=len(self.places))

    def offsets(self) -> torch.Tensor:
        """Return the index of the first value of each event, [B], of the type of `places`."""
        lengths = self.counts.to(self.places.dtype)
        return lengths.cumsum(0, dtype=lengths.dtype) - lengths

    def shares(self) -> torch.Tensor:
        """Return one over the number of values of each event, float32 [B]."""
        return self.counts.clamp(min=1).to(torch.float32).reciprocal()


class Members(NamedTuple):
    """Data of the items of histories, besides their rows.

    labels: float32 [V]; places: the number of items of its history after each, int32 [V]; gaps: the time
    bucket from each to the event, see `time_buckets_of`, int32 [V]; ages: the seconds from each to the last
    event that reads its history, int32 [V]; draws: a random number for each, from which dropout is computed,
    int32 [V]; sources: the event whose history each event reads, int64 [B]; reads: the number of its items
    before each event, int32 [B]. A field that the model does not use is empty; without sources and reads each
    event reads all of its own history.
    """

    labels: torch.Tensor
    places: torch.Tensor
    gaps: torch.Tensor
    ages: torch.Tensor
    draws: torch.Tensor
    sources: torch.Tensor
    reads: torch.Tensor


class Inputs(NamedTuple):
    """Input of a model besides its rows in serving: like a training batch, without labels.

    Args:
        members: Items of the histories, V in all.
        numbers: Dense features, float32 [B, numbers], NaN for a missing one.
        is_own: 1 for an item of a history that is the event's own item, else 0, float32 [V]; for models with
            `own_items`.

    Example:
        def user_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
            ratings = batch.history_labels                    # float32 [V], of the items of all histories
            return rows.sum(["user", "history"], {"history": ratings})
    """

    members: Members
    numbers: torch.Tensor
    is_own: torch.Tensor = torch.zeros(0)

    @property
    def history_labels(self) -> torch.Tensor:
        """Labels of the items of all histories, float32 [V]."""
        return self.members.labels
