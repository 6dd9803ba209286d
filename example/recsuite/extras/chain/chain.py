"""Chain of two models: one finds candidates, the other ranks them."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recsuite.datasets.schema import EVENT, HISTORY, USER
from recsuite.errors import UserError, printable
from recsuite.serving.request import AS_TRAINED, check_k
from recsuite.serving.served import ServedModel

# Number of items that are ranked, and the weight of the ranker's score; the retriever's has weight 1.
CANDIDATES, WEIGHT = 300, 1.0
# With larger weights sums of float32 say nothing about the retriever.
MOST_WEIGHT = 1e6


class ModelChain:
    """Chain of two models: a retriever finds candidates, and a ranker scores them.

    num_candidates: for each user, 1 or more. weight: see `WEIGHT`, from 0 to `MOST_WEIGHT`. Both may be set
    later.

    Raises:
        UserError: when a model predicts labels: a sum of a label and a score says nothing; also from
            `recommend`, for other numbers.
    """

    def __init__(
        self,
        retriever: ServedModel,
        ranker: ServedModel,
        num_candidates: int = CANDIDATES,
        weight: float = WEIGHT,
    ) -> None:
        for name, model in (("retriever", retriever), ("ranker", ranker)):
            if not getattr(model.snapshot.head, "scores_are_products", False):
                raise UserError(
                    f"The {name} of a chain requires --task ranking or sequence; {model.snapshot.folder} "
                    "predicts labels."
                )
        self.retriever, self.ranker = retriever, ranker
        self.num_candidates, self.weight = num_candidates, weight
        self._check_numbers()

    @torch.inference_mode()
    def recommend(
        self,
        users: Mapping[str, Sequence[Any]],
        k: int = 10,
        *,
        exclude: str | Sequence[Any] | None = AS_TRAINED,
        approximate: bool = False,
    ) -> list[list[tuple[Any, float]]]:
        """Return for each of U users the k candidates with the highest sums of scores, or fewer.

        users: the values of their features and histories, see `ServedModel.score`. Each model takes the
        features that it has. exclude, approximate: for the candidates, see `ServedModel.recommend`. A
        candidate without a row in the ranker is skipped.
        """
        check_k(k)
        self._check_numbers()
        self._check(users)
        number = max(k, self.num_candidates)
        retrieved = self.retriever.recommend(
            accepted_features(self.retriever, users), number, exclude=exclude, approximate=approximate
        )
        values = accepted_features(self.ranker, users)
        # Those of the retriever may be new, whatever the ranker lists.
        vectors, items, of_history, _ = self.ranker._parts_of(values, with_new=True)
        added, answers = items.added(values.get(HISTORY, ()), of_history), []
        for user, (vector, candidates) in enumerate(zip(vectors, retrieved, strict=True)):
            known = [
                (items.positions[item], item, score) for item, score in candidates if item in items.positions
            ]
            positions = torch.tensor([position for position, _, _ in known], dtype=torch.int64)
            of_retriever = torch.tensor([score for _, _, score in known])
            of_ranker = items.head.score_pairs(vector.expand(len(positions), -1), items.vectors[positions])
            (of_ranker,) = added.of_users(user, user + 1).onto(of_ranker.view(1, -1), positions.view(1, -1))
            sums = of_retriever + self.weight * of_ranker
            # Stable: equal sums keep the order of the retriever.
            order = sums.sort(descending=True, stable=True).indices[:k]
            answers.append([(known[index][1], float(sums[index])) for index in order.tolist()])
        return answers

    def _check_numbers(self) -> None:
        check_k(self.num_candidates, "num_candidates")
        weight = self.weight
        # NaN is in no range.
        if not isinstance(weight, numbers.Real) or not 0 <= weight <= MOST_WEIGHT:
            raise UserError(
                f"weight must be a number from 0 to {MOST_WEIGHT:,.0f}, got {printable(repr(weight))}; "
                f"{WEIGHT:g} gives both models the same."
            )

    def _check(self, users: Mapping[str, Sequence[Any]]) -> None:
        """Refuse features that neither model has."""
        names = {name for model in (self.retriever, self.ranker) for name in names_of(model)}
        if not isinstance(users, Mapping) or not users or not users.keys() <= names:
            odd = ", ".join(sorted(map(str, users.keys() - names))) if isinstance(users, Mapping) else ""
            raise UserError(
                f"A chain requires features of users, of {', '.join(sorted(names))}; got "
                f"{printable(odd) or 'none'}."
            )


def names_of(model: ServedModel) -> list[str]:
    """Return the names of the features and histories of users that a model takes."""
    return model.snapshot.names_of((USER, EVENT, HISTORY))


def accepted_features(model: ServedModel, users: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Return the features and histories of users that a model takes."""
    names = names_of(model)
    return {name: values for name, values in users.items() if name in names}
