"""Embedding rows of a batch for a model: by the name of the feature, pooled or jagged.

Shapes: B events, V values of a feature, R distinct rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import embedding_bag

from recsuite.errors import require
from recsuite.models.inputs import DistinctRows, LookedUp
from recsuite.models.layers import means, padded_means, scaled, used_slots

# Weight of all values, or of each value, float32 [V].
Weight = float | torch.Tensor


class PaddedListError(RuntimeError):
    """A model reads the single values of a list that is padded. name: of the feature."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"The list {name!r} is padded, so its single values cannot be read. Fix: give --data_device cpu."
        )
        self.name = name


class FeatureRows:
    """Embedding rows of B events by the name of the feature.

    D is --embedding_dim. The attribute `embedding_dims` of the model gives some tables another D, a multiple
    of 4: `embedding_dims = {"genres": 8}`.

    Args:
        found: The looked-up rows by feature.
        scale: Factor of all rows, float32 [].
        lists: Features with lists; all others have one row for each event.
        counts: Of the lists that are padded to one length, the number of values of each event, int32 [B];
            drawn items before the events have no slots in histories.
        joined: Of these, the lists whose values come one list after the other, with all unused slots at the
            end.

    Raises:
        UserError: From `sum` and `stack`, when rows have different widths.

    Example:
        rows["user"]                                # float32 [B, D]: one row an event, or the mean of a list
        rows.sum(["user", "age"])                   # float32 [B, D]: their sum, in one pass over the rows
        rows.stack(["user", "age"])                 # float32 [B, 2, D]: each of them
        rows.sum(["history"], {"history": ratings}) # a list times weights, float32 [V]
        values, lengths = rows.jagged("genres")     # float32 [V, D] and int64 [B]
    """

    def __init__(
        self,
        found: Mapping[str, LookedUp],
        scale: torch.Tensor,
        lists: Collection[str],
        counts: Mapping[str, torch.Tensor] | None = None,
        joined: Collection[str] = (),
    ) -> None:
        self.found, self.scale, self.lists, self.counts = found, scale, lists, counts or {}
        self.joined = joined

    def __contains__(self, name: str) -> bool:
        known = self.found.keys()
        return name in known

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.sum([name])

    def stack(self, names: Sequence[str]) -> torch.Tensor:
        """Return the rows of F features side by side; for a list the mean of its rows.

        Args:
            names: The features.

        Returns:
            float32 [B, F, D].

        Raises:
            UserError: When the rows have different widths.
            KeyError: When a feature has no rows.
        """
        self._check(names)
        shared = self._shared(names)
        if shared is not None and all(shared[name].is_single for name in names):
            index = torch.stack([shared[name].places for name in names], dim=1)
            return scaled(nn.functional.embedding(index, shared.rows), self.scale)
        return torch.stack(_of_one_width(names, [self[name] for name in names]), dim=1)

    def jagged(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each value of a feature, and the lengths of the lists.

        Args:
            name: The feature.

        Returns:
            Rows, float32 [V, D], and lengths, int64 [B].

        Raises:
            PaddedListError: When the list is padded.
            KeyError: When the feature has no rows.
        """
        self._check([name])
        if name in self.counts:
            raise PaddedListError(name)
        return self.slots(name)

    def slots(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `jagged`, with the unused slots of a list that is padded.

        Args:
            name: The feature.

        Returns:
            Rows, float32 [V, D], and lengths, int64 [B].

        Raises:
            PaddedListError: When the lists of a batch have a budget of slots together.
        """
        if name in self.joined:
            raise PaddedListError(name)
        looked_up = self.found[name]
        return scaled(looked_up.values(), self.scale), looked_up.lengths().to(torch.int64)

    def used(self, name: str) -> torch.Tensor | None:
        """Return which slots of a list are used, if it is padded.

        Args:
            name: The feature.

        Returns:
            bool [V], for the rows of `slots`, float32 [V, D]; None if all are used.

        Raises:
            PaddedListError: When the lists of a batch have a budget of slots together.
        """
        if name not in self.counts:
            return None
        if name in self.joined:
            raise PaddedListError(name)
        return used_slots(self.counts[name], len(self.found[name].values())).view(-1)

    def sum(self, names: Sequence[str], weights: Mapping[str, Weight] | None = None) -> torch.Tensor:
        """Return the sum of the rows of features; a list adds the mean of its rows.

        Args:
            names: The features.
            weights: Factors by feature, a number or float32 [V], 1 by default; they get no gradient.

        Returns:
            float32 [B, D].

        Raises:
            UserError: When the rows have different widths.
            KeyError: When a feature has no rows.
        """
        weights = weights or {}
        self._check(names or [""])
        is_plain = all(isinstance(weights.get(name), torch.Tensor | None) for name in names)
        shared = None if self.counts.keys() & {*names} else self._shared(names)
        if shared is not None and is_plain:
            total: torch.Tensor = _FeatureSum.apply(shared.rows, shared, names, dict(weights))
            return scaled(total, self.scale)
        first, *others = _of_one_width(names, [self._pooled(name, weights.get(name)) for name in names])
        # Scales the sum instead of the rows: the result is the same, and the sum has fewer numbers.
        return scaled(sum(others, start=first), self.scale)

    def _check(self, names: Sequence[str]) -> None:
        # Through the keys: reading these waits for TorchRec's result, which does not support `in`.
        known = self.found.keys()
        for name in names:
            if name not in known:
                has = ", ".join(known)
                raise KeyError(
                    f"There is no feature {name!r} with embedding rows. Fix: give one of {has}; a dense "
                    "feature has no rows, but columns of batch.numbers, in the order of the features."
                )

    def _shared(self, names: Sequence[str]) -> SharedRows | None:
        """Return the object with the rows of all of the features in one tensor, or None."""
        parts = self.found.parts if isinstance(self.found, JoinedRows) else [self.found]
        shared = (part for part in parts if isinstance(part, SharedRows))
        return next((part for part in shared if all(name in part for name in names)), None)

    def _pooled(self, name: str, weight: Weight | None) -> torch.Tensor:
        """Return the contribution of one feature, before the scale, float32 [B, D]."""
        looked_up = self.found[name]
        rows = looked_up.values()
        factors = weight if isinstance(weight, torch.Tensor) else None
        # Other features have one row for each event, so the rows are the vectors already.
        if name in self.joined:
            rows = _joined_means(rows, self.counts[name], factors)
        elif name in self.counts:
            memory = getattr(looked_up, "gradient_memory", None)
            rows = padded_means(rows, self.counts[name], factors, len(looked_up.lengths()), memory)
        elif factors is not None or name in self.lists:
            factors_of_rows = torch.ones_like(rows[:, 0]) if factors is None else factors
            rows = means(rows, factors_of_rows, looked_up.lengths())
        return rows if weight is None or factors is not None else weight * rows


def _joined_means(rows: torch.Tensor, counts: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Return the mean of each list of rows, float32 [B, D], zero for an empty list.

    rows: of all lists and then those of unused slots, float32 [V, D]; counts: of the lists, int32 [B];
    weights: see `padded_means`, float32 [V].
    """
    counts = counts.long()
    factors = rows.new_ones(len(rows)) if weights is None else weights.detach()
    total = counts.sum()
    factors = torch.where(torch.arange(len(rows), device=rows.device) < total, factors, 0.0)
    # As a list of its own, which is dropped.
    lengths = torch.cat([counts, (len(rows) - total).view(1)])
    return means(rows, factors, lengths)[:-1]


def _of_one_width(names: Sequence[str], rows: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return rows of features, float32 [B, D] each, if all have the same width."""
    widths = ", ".join(f"{name} {each.size(1)}" for name, each in zip(names, rows, strict=True))
    require(
        len({each.size(1) for each in rows}) == 1,
        f"Rows that are added up or stacked must have one width, got {widths}. Fix: give these features the "
        "same width in embedding_dims, or join their rows by torch.cat",
    )
    return rows


def with_row_scale(model: nn.Module) -> nn.Module:
    """Return the model with a buffer "row_scale", the factor from the contents of the tables to the rows.

    A decay has to shrink every row in every step, also the millions that the step does not look up.
    Multiplying this one number shrinks all of them at once.
    """
    if not hasattr(model, "row_scale"):
        # A buffer: checkpoints hold it and it moves with the model, but no gradient changes it.
        model.register_buffer("row_scale", torch.tensor(1.0))
    return model


class SharedRows(dict[str, DistinctRows]):
    """Looked-up rows of all features for B events by name, in the order of the batch.

    Rows are not copied for each value: a row of many events is read in place, and its gradient is summed
    before it is sent.

    rows: float32 [R, D]; in_order: called only in a backward, returns the values of all features, one feature
    after the other, sorted by row, int32 [their number], and the start of each row's values in that order,
    int32 [R]; given: gradients of the sums that a backward has reached so far.
    """

    def __init__(
        self,
        features: Mapping[str, DistinctRows],
        rows: torch.Tensor,
        in_order: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        super().__init__(features)
        self.in_order = in_order
        self.given: list[GivenGradient] = []
        self.rows: torch.Tensor = _SummedRows.apply(rows, features, in_order, self.given)


class GivenGradient(NamedTuple):
    """Gradient of a sum of features, float32 [B, D], with the names and weights of `FeatureRows.sum`."""

    gradient: torch.Tensor
    names: Sequence[str]
    weights: Mapping[str, torch.Tensor]


class JoinedRows(dict[str, LookedUp]):
    """Rows of all features from tables of several widths. parts: those of each width."""

    def __init__(self, parts: Sequence[Mapping[str, LookedUp]]) -> None:
        super().__init__(item for part in parts for item in part.items())
        self.parts = parts


class _FeatureSum(torch.autograd.Function):
    """Sum of some features over the distinct rows; weights get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        shared: SharedRows,
        names: Sequence[str],
        weights: Mapping[str, torch.Tensor],
    ) -> torch.Tensor:
        ctx.given, ctx.names, ctx.weights = shared.given, names, weights
        single = [shared[name].places for name in names if shared[name].is_single and name not in weights]
        lists = [name for name in names if not shared[name].is_single or name in weights]
        if single:
            total = embedding_bag(torch.stack(single, dim=1), rows, mode="sum")
        else:
            total = rows.new_zeros(len(shared[names[0]].counts), rows.size(1))
        for name in lists:
            feature = shared[name]
            sums = embedding_bag(
                feature.places, rows, feature.offsets(), mode="sum", per_sample_weights=weights.get(name)
            )
            total.addcmul_(sums, feature.shares().unsqueeze(1))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        # The rows get it from `_SummedRows`, whose backward comes after those of all sums.
        ctx.given.append(GivenGradient(gradient, ctx.names, ctx.weights))
        return None, None, None, None


class _SummedRows(torch.autograd.Function):
    """Distinct rows for `_FeatureSum`; the backward adds the gradients of all sums up, row by row."""

    # In the order of the rows, which the exchange of ids knows already. A backward for each sum, or for each
    # feature, would write as many arrays of all rows. So the gradient of a sum is in no result of
    # `torch.autograd.grad` for the rows.

    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        features: Mapping[str, DistinctRows],
        in_order: Callable[[], tuple[torch.Tensor, torch.Tensor]],
        given: list[GivenGradient],
    ) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.features, ctx.in_order, ctx.given = features, in_order, given
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, others: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        total = others
        while ctx.given:
            # A value has one gradient in a pass; a second sum with the same feature waits for the next pass.
            taken: dict[str, GivenGradient] = {}
            later = []
            for given in ctx.given:
                if taken.keys() & {*given.names}:
                    later.append(given)
                else:
                    taken |= dict.fromkeys(given.names, given)
            ctx.given[:] = later
            of_rows = _gradient_of_rows(ctx.features, ctx.in_order, taken)
            total = of_rows if total is None else total + of_rows
        return total, None, None, None


def _gradient_of_rows(
    features: Mapping[str, DistinctRows],
    in_order: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    given: Mapping[str, GivenGradient],
) -> torch.Tensor:
    """Return the gradient of distinct rows, float32 [R, D]. given: gradient of the sum with a feature."""
    blocks = {id(part): part.gradient for part in given.values()}
    firsts = {block: number * len(blocks[block]) for number, block in enumerate(blocks)}
    # For each value of the batch the index of its gradient among those of all sums, and its factor there.
    indices, factors = [], []
    for name, feature in features.items():
        mine = given.get(name)
        if mine is None:
            indices.append(feature.places.new_zeros(len(feature.places), dtype=torch.int32))
            factors.append(feature.rows.new_zeros(len(feature.places)))
            continue
        index, factor = feature.events(), mine.weights.get(name)
        if not feature.is_single:
            share = feature.shares().to(feature.rows.dtype).index_select(0, index)
            factor = share if factor is None else share * factor
        indices.append(index.add_(firsts[id(mine)]))
        factors.append(feature.rows.new_ones(len(index)) if factor is None else factor)
    order, starts = in_order()
    return embedding_bag(
        torch.cat(indices).index_select(0, order),
        torch.cat([*blocks.values()]),
        starts,
        mode="sum",
        per_sample_weights=torch.cat(factors).index_select(0, order),
    )
