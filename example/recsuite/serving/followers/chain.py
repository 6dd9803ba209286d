"""Two models served as one: the first finds some candidates for a user, and both together rank them.

    chain = Chain(ServedModel.open("retriever"), ServedModel.open("ranker"))
    chain.recommend({"user": [42], "history": [[1, 3]], "history_ratings": [[4.0, 5.0]]}, k=10)

The scores of a model of choices are logarithms of probabilities, but for a number that all items of a user
have in common, so two models speak together by the sum of their scores. Either may be replaced or changed by
deltas at any time: an answer is of each at one moment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from recsuite.datasets.schema import EVENT, HISTORY, USER
from recsuite.errors import UserError, printable
from recsuite.serving.request import AS_TRAINED, check_k
from recsuite.serving.served import ServedModel

# How many items are ranked, and how much the score of the ranker counts beside that of the retriever.
CANDIDATES, WEIGHT = 300, 1.0


class Chain:
    """See the module. num_candidates: of each user; weight: see `WEIGHT`.

    Raises:
        UserError: when a model predicts labels: a sum of a label and a score says nothing.
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
                    f"The {name} {model.snapshot.folder} predicts labels, and a chain ranks by scores; give "
                    "one of --task ranking or sequence."
                )
        self.retriever, self.ranker = retriever, ranker
        self.num_candidates, self.weight = num_candidates, weight

    @torch.inference_mode()
    def recommend(
        self,
        users: Mapping[str, Sequence[Any]],
        k: int = 10,
        *,
        exclude: str | Sequence[Any] | None = AS_TRAINED,
        approximate: bool = False,
    ) -> list[list[tuple[Any, float]]]:
        """For each of U users the k of the candidates with the highest sums of scores; fewer where there are
        fewer.

        users: the values of their features and histories, see `ServedModel.score`: each model takes of them
        what it has. exclude, approximate: see `ServedModel.recommend`, of the candidates. A candidate of
        which the ranker has no row is left out.
        """
        check_k(k, self.retriever.snapshot.schema)
        self._check(users)
        number = max(k, self.num_candidates)
        found = self.retriever.recommend(
            told(self.retriever, users), number, exclude=exclude, approximate=approximate
        )
        vectors, items = self.ranker.vectors_of(told(self.ranker, users))
        answers = []
        for vector, candidates in zip(vectors, found, strict=True):
            known = [(items.places[item], item, score) for item, score in candidates if item in items.places]
            places = torch.tensor([place for place, _, _ in known], dtype=torch.int64)
            of_retriever = torch.tensor([score for _, _, score in known])
            of_ranker = items.head.score_pairs(vector.expand(len(places), -1), items.vectors[places])
            sums = of_retriever + self.weight * of_ranker
            # Stable: of equal sums the one comes first that the retriever has first.
            order = sums.sort(descending=True, stable=True).indices[:k]
            answers.append([(known[each][1], float(sums[each])) for each in order.tolist()])
        return answers

    def _check(self, users: Mapping[str, Sequence[Any]]) -> None:
        """Refuse what neither model takes."""
        names = {name for model in (self.retriever, self.ranker) for name in names_of(model)}
        if not isinstance(users, Mapping) or not users or not users.keys() <= names:
            odd = ", ".join(sorted(map(str, users.keys() - names))) if isinstance(users, Mapping) else ""
            raise UserError(
                f"A chain takes the values of users by their names, and got {printable(odd) or 'none'}; its "
                f"models have {', '.join(sorted(names))}."
            )


def names_of(model: ServedModel) -> list[str]:
    """What a model may be told of users."""
    return model.snapshot.names_of((USER, EVENT, HISTORY))


def told(model: ServedModel, users: Mapping[str, Sequence[Any]]) -> dict[str, Sequence[Any]]:
    """Of what is known of users that which a model takes."""
    names = names_of(model)
    return {name: values for name, values in users.items() if name in names}
