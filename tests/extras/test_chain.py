"""Two models as one: candidates of the first, ranked by the sums of both scores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recsuite.errors import UserError
from recsuite.extras.chain.cases import RequestCases, latencies
from recsuite.extras.chain.chain import ModelChain
from recsuite.serving.served import ServedModel
from tests.support.random_model import ITEMS, snapshot_of

USERS: dict[str, list[Any]] = {
    "user": [1, 2, 99],
    "history": [[3, 30], [], [63, 6, 9]],
    "history_ratings": [[4.0, 1.0], [], [5.0, 2.0, 3.0]],
}


@pytest.fixture(scope="module")
def chain() -> ModelChain:
    return ModelChain(
        ServedModel(snapshot_of("sequence")), ServedModel(snapshot_of("ranking", seed=1)), 40, 0.7
    )


def scores_of(model: ServedModel, number: int) -> dict[int, float]:
    """Of all items, one by one."""
    items = [3 * each for each in range(1, ITEMS + 1)]
    values = {name: [column[number]] * len(items) for name, column in USERS.items()}
    return dict(zip(items, model.score({**values, "movie": items}).tolist(), strict=True))


def test_the_best_are_those_of_the_candidates_with_the_highest_sums(chain: ModelChain) -> None:
    answers = chain.recommend(USERS, k=7)
    for number, answer in enumerate(answers):
        first, second = (scores_of(model, number) for model in (chain.retriever, chain.ranker))
        left = [item for item in first if item not in USERS["history"][number]]
        candidates = sorted(left, key=lambda item: -first[item])[:40]
        sums = {item: first[item] + 0.7 * second[item] for item in candidates}
        expected = sorted(sums.values(), reverse=True)[:7]
        assert [score for _, score in answer] == pytest.approx(expected, abs=1e-4)
        assert all(sums[item] == pytest.approx(score, abs=1e-4) for item, score in answer)


def test_with_ranker_weight_0_the_retriever_decides(chain: ModelChain) -> None:
    alone = ModelChain(chain.retriever, chain.ranker, 40, weight=0.0)
    expected = chain.retriever.recommend(USERS, 5)
    assert [[item for item, _ in mine] for mine in alone.recommend(USERS, 5)] == [
        [item for item, _ in mine] for mine in expected
    ]


def test_k_may_exceed_the_number_of_candidates(chain: ModelChain) -> None:
    assert [len(mine) for mine in chain.recommend(USERS, k=60)] == [60, 60, 60]


def test_an_item_that_the_ranker_does_not_know_is_skipped(chain: ModelChain) -> None:
    few = ModelChain(chain.retriever, ServedModel(snapshot_of("ranking", items=50)), num_candidates=ITEMS)
    assert {item for mine in few.recommend(USERS, ITEMS) for item, _ in mine} <= {*range(3, 151, 3)}


@pytest.mark.parametrize(
    ("users", "sentence"),
    [
        ({"user": [1], "hist": [[3]]}, "of age, gender, history, history_ages.*; got hist"),
        ([1, 2], "A chain requires features of users.*got none"),
        ({}, "A chain requires features of users.*got none"),
    ],
)
def test_features_of_no_model_are_refused_with_a_message(
    chain: ModelChain, users: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        chain.recommend(users)


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("weight", float("nan"), "weight must be a number from 0 to 1,000,000, got nan; 1 gives both models"),
        ("weight", float("inf"), "weight must be a number from 0 to 1,000,000, got inf"),
        ("weight", -0.5, "weight must be a number from 0 to 1,000,000, got -0.5"),
        ("weight", "1", "weight must be a number from 0 to 1,000,000, got '1'"),
        ("num_candidates", 0, "num_candidates must be a whole number of at least 1, got 0"),
        ("num_candidates", 2.5, "num_candidates must be a whole number of at least 1, got 2.5"),
    ],
)
def test_a_number_that_no_chain_can_have_is_refused_at_once_and_when_it_is_set_later(
    chain: ModelChain, name: str, value: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        ModelChain(chain.retriever, chain.ranker, **{name: value})
    later = ModelChain(chain.retriever, chain.ranker)
    setattr(later, name, value)
    with pytest.raises(UserError, match=sentence):
        later.recommend(USERS)


def test_a_model_that_predicts_labels_is_no_part_of_a_chain(chain: ModelChain) -> None:
    with pytest.raises(UserError, match=r"The ranker .*--task ranking or sequence; none"):
        ModelChain(chain.retriever, ServedModel(snapshot_of("rating")))


def test_metrics_use_the_rank_among_ten() -> None:
    def first_two(
        values: dict[str, list[int]], k: int, exclude: list[list[int]]
    ) -> list[list[tuple[int, float]]]:
        assert k == 10
        return [[(1, 2.0), (2, 1.0)] for _ in values["user"]]

    cases = RequestCases({"user": [7, 8, 9]}, [[], [], []], [1, 2, 3])
    found = cases.metrics(first_two)
    assert found["hr_at_10"] == pytest.approx(2 / 3)
    assert found["ndcg_at_10"] == pytest.approx((1 + 1 / torch.tensor(3.0).log2().item()) / 3)


def test_an_error_for_a_client_is_raised() -> None:
    def fails(values: Any, k: int, exclude: Any) -> Any:
        raise UserError("nobody is there.")

    with pytest.raises(UserError, match="nobody is there"):
        latencies(RequestCases({"user": [1]}, [[]], [1]), fails, clients=2, answers=1)
