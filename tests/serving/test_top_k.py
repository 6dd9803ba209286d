"""The items with the highest scores: those of a search through all scores, for either head and any block."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from recsuite.config.sections import ModelConfig
from recsuite.datasets.schema import HISTORY
from recsuite.errors import UserError
from recsuite.models import retrieval
from recsuite.serving.catalogue import caps_of, categories_of
from recsuite.serving.request import values_of_users
from recsuite.serving.served import ServedModel
from tests.support.random_model import DIM, GENRES, ITEMS, NAMES, YEARS, snapshot_of

EVENTS = [[(3, 4.5), (30, 1.0), (-8, 3.0)], [], [(63, 2.5)]]


@pytest.fixture(params=["rating", "ranking"])
def model(request: pytest.FixtureRequest) -> ServedModel:
    return ServedModel(snapshot_of(request.param))


def ranking() -> ServedModel:
    return ServedModel(snapshot_of("ranking"))


def all_scores(
    model: ServedModel, user: dict[str, Any], described: dict[str, list[Any]] | None = None
) -> dict[Any, float]:
    """Raw id of each item to its score for one user, by `score`."""
    items = described or {"movie": list(model.snapshot.vocabulary["movie"])}
    number = len(items["movie"])
    scores = model.score({**{name: [value] * number for name, value in user.items()}, **items})
    return dict(zip(items["movie"], scores.tolist(), strict=True))


def assert_best(found: Sequence[tuple[Any, float]], scores: dict[Any, float], k: int) -> None:
    """The k best of some scores, in order, to 1e-6."""
    assert len(found) == len(dict(found)) == min(k, len(scores))
    best = sorted(scores.values(), reverse=True)
    for (item, score), wanted in zip(found, best, strict=False):
        assert score == pytest.approx(scores[item], abs=1e-6)
        assert score == pytest.approx(wanted, abs=1e-6)


def test_of_equal_scores_the_earlier_items_are_the_highest() -> None:
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (50, 40), generator=draw).float()
    scores[0], scores[1] = torch.arange(40.0), -torch.inf
    scores[2, :7], scores[3, 5] = torch.nan, torch.nan
    numbers = torch.arange(100, 140).expand_as(scores)
    for k in (1, 5, 40, 60):
        found, positions = retrieval.highest(scores, numbers, k)
        order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
        assert torch.equal(positions, order + 100)
        assert torch.equal(found.nan_to_num(), scores.gather(1, order).nan_to_num())


# --- recommend ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ModelConfig.flag("task").choices, indirect=True)
@pytest.mark.parametrize(("pairs", "users"), [(97, 3), (2**16, 32)])
def test_the_best_items_are_those_of_all_scores_for_any_block_size(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch, pairs: int, users: int
) -> None:
    monkeypatch.setattr(retrieval, "PAIRS", pairs)
    monkeypatch.setattr(retrieval, "USERS", users)
    asked = [*range(1, 12), -5]
    found = model.recommend(asked, k=13)
    assert len(found) == len(asked)
    for user, mine in zip(asked, found, strict=True):
        assert_best(mine, all_scores(model, {"user": user}), 13)


def test_a_k_above_the_number_of_items_gives_all_of_them_in_order(model: ServedModel) -> None:
    (found,) = model.recommend([4], k=10**15)
    assert_best(found, all_scores(model, {"user": 4}), ITEMS)
    assert model.recommend([], k=3) == []


def test_items_with_equal_scores_keep_the_order_of_the_catalogue(model: ServedModel) -> None:
    for order in ([6, 9], [9, 6]):
        model.describe_items({"movie": [3, *order, 12]})
        for mine in model.recommend([1, 2, 3], k=4):
            places = [item for item, _ in mine]
            assert dict(mine)[6] == dict(mine)[9]
            assert places.index(order[1]) == places.index(order[0]) + 1


@pytest.mark.parametrize("pairs", [8, 24, 2**16])
def test_ties_and_excluded_items_are_the_same_for_any_block(
    pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "PAIRS", pairs)
    generator = torch.Generator().manual_seed(0)
    # Small whole numbers: most scores are equal to others.
    users, items = (torch.randint(-1, 2, (n, 3), generator=generator).float() for n in (8, 60))
    excluded = torch.stack([torch.randint(0, 8, (90,), generator=generator) for _ in range(2)])
    found = retrieval.top_items(retrieval.InnerProduct(), users, items, 7, excluded)
    scores = users @ items.t()
    scores[excluded[0], excluded[1]] = -torch.inf
    wanted = scores.sort(dim=1, descending=True, stable=True).indices[:, :7]
    assert torch.equal(found.sort(dim=1).values, wanted.sort(dim=1).values)


def test_all_items_except_excluded_ones_are_recommended(model: ServedModel) -> None:
    lists: list[Any] = [[3, 6, 3, -1], {9}, []]
    found = model.recommend([1, 2, 3], k=ITEMS, exclude=lists)
    for user, left_out, mine in zip([1, 2, 3], lists, found, strict=True):
        scores = all_scores(model, {"user": user})
        assert_best(mine, {item: score for item, score in scores.items() if item not in left_out}, ITEMS)
    everything = [list(model.snapshot.vocabulary["movie"])]
    assert model.recommend([1], exclude=everything) == [[]]


def test_only_candidates_are_recommended(model: ServedModel) -> None:
    candidates = [33, 3, 3, 9, 6, -1]
    (mine,) = model.recommend([1], k=3, candidates=candidates, exclude=[[9]])
    scores = all_scores(model, {"user": 1})
    assert_best(mine, {item: scores[item] for item in (33, 3, 6)}, 3)
    assert model.recommend([1, 2], candidates=[]) == model.recommend([1, 2], candidates=[-1]) == [[], []]


def test_described_item_features_change_the_scores(model: ServedModel) -> None:
    described: dict[str, list[Any]] = {
        "movie": [9, 3, -1, 300],
        "year": [1995, None, 1990, 1999],
        "genres": [["War", "Drama"], [], ["War"], ["No such genre"]],
    }
    before = model.recommend([1], k=3)
    model.describe_items(described)
    (mine,) = model.recommend({"user": [1], "gender": ["F"]}, k=9)
    scores = all_scores(model, {"user": 1, "gender": "F"}, described)
    del scores[-1]
    assert_best(mine, scores, 9)
    model.describe_items({"movie": NAMES["movie"]})
    assert model.recommend([1], k=3) == before


def test_a_user_given_by_events_is_scored_by_them(model: ServedModel) -> None:
    for user, gender in ((None, None), (7, "F")):
        users: dict[str, list[Any]] | None = {"user": [user] * 3, "gender": [gender] * 3} if user else None
        found = model.recommend(users, k=9, events=EVENTS, exclude=None)
        for events, mine in zip(EVENTS, found, strict=True):
            history = {
                HISTORY: [item for item, _ in events],
                "history_ratings": [label for _, label in events],
            }
            assert_best(mine, all_scores(model, {"user": user, "gender": gender, **history}), 9)


def test_the_items_of_a_history_are_skipped_by_default(model: ServedModel) -> None:
    first, second, third = model.recommend(events=EVENTS, k=ITEMS)
    assert {item for item, _ in first} == {*NAMES["movie"]} - {3, 30}
    assert len(second) == ITEMS
    assert 63 not in dict(third)
    values: dict[str, list[Any]] = {HISTORY: [[63]], "history_ratings": [[2.5]]}
    assert dict(model.recommend(values, k=ITEMS)[0]).keys() == dict(third).keys()
    assert len(model.recommend(values, k=ITEMS, exclude=None)[0]) == ITEMS


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"users": [1], "k": 0}, "k must be a whole number of at least 1, got 0"),
        ({"users": [1], "k": 2.0}, r"k must be a whole number of at least 1, got 2\.0"),
        ({"users": [1], "k": True}, "k must be a whole number of at least 1, got True"),
        ({}, "recommend requires users or events"),
        ({"users": ["42"]}, "user takes values of type int, not '42'"),
        (
            {"users": {"movie": [3]}},
            "There is no feature movie; the model has age, gender, history, history_ra",
        ),
        ({"users": {}}, "recommend requires users or events"),
        ({"users": [1], "exclude": "all"}, 'exclude takes "seen", None, or a list of movies for each user'),
        ({"users": [1], "exclude": [3]}, "exclude takes a list of movies, and got 3"),
        ({"users": [1, 2], "exclude": [[3]]}, "exclude has 1 lists for 2 users; give one for each"),
        ({"users": [1], "exclude": [["a"]]}, "movie takes values of type int, not 'a'"),
        ({"users": [1], "candidates": 3}, "candidates takes a list of movies, and got 3"),
        ({"users": [1], "candidates": ["3"]}, "movie takes values of type int, not '3'"),
        ({"events": [(3, 4.5)]}, "An event must be a pair of a movie and its rating, got 3"),
        ({"events": [[3]]}, "An event must be a pair of a movie and its rating, got 3"),
        ({"events": [[(3, 4.5, 1)]]}, r"An event must be a pair .*, got \(3, 4\.5, 1\)"),
        ({"events": [[(3, 9.0)]]}, r"history_ratings.* 0\.5 and 5.*got 9\.0"),
        ({"users": [1, 2], "events": [[(3, 4.5)]]}, "'user': 2, 'history': 1"),
        ({"users": {"history": [[3]]}, "events": [[(3, 4.5)]]}, "exclude each other; give one of them"),
        ({"users": [1], "approximate": True, "candidates": [3]}, "approximate and candidates"),
        ({"users": [1], "approximate": True, "at_most": {"year": 1}}, "approximate excludes at_most"),
        ({"events": [[]], "approximate": True, "least_distance": 0.2}, "approximate excludes at_most and le"),
        ({"users": [1, 2], "also_exclude": [[3]]}, "also_exclude has 1 lists for 2 users; give one for each"),
        ({"users": [1], "also_exclude": "seen"}, "also_exclude takes a list of movies for each user, and"),
        ({"users": [1], "also_exclude": [["a"]]}, "movie takes values of type int, not 'a'"),
        (
            {"users": [1], "at_most": {"year": 0}},
            "at_most of year must be a whole number of at least 1, got 0",
        ),
        ({"users": [1], "at_most": ["year"]}, r"at_most takes features with numbers, .* got \['year'\]"),
        ({"users": [1], "at_most": {"brand": 1}}, "movies have no feature or column brand; they have none"),
        ({"events": [[]], "least_distance": 2.5}, r"least_distance must be between 0 and 2, got 2\.5"),
        ({"events": [[]], "least_distance": float("nan")}, "must be between 0 and 2, got nan"),
        ({"events": [[]], "least_distance": "1"}, "must be between 0 and 2, got '1'"),
        ({"users": [1], "least_distance": 0.2}, "least_distance requires the movies that each user had"),
    ],
)
def test_an_invalid_request_for_recommendations_is_refused_with_one_message(
    asked: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        ranking().recommend(**asked)


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({"year": [1990]}, "A description of movies requires the feature movie itself"),
        ({"movie": [3, 6, 3]}, "The movie 3 is described twice"),
        ({"movie": [3], "user": [1]}, "There is no feature user; the model has genres, movie, year"),
        ({"movie": [3], "year": [1, 2]}, "'movie': 1, 'year': 2"),
        ({"movie": ["3"]}, "movie takes values of type int"),
    ],
)
def test_a_description_that_is_invalid_is_refused_and_changes_nothing(described: Any, sentence: str) -> None:
    model = ranking()
    before = model.recommend([1])
    with pytest.raises(UserError, match=sentence):
        model.describe_items(described)
    assert model.recommend([1]) == before


# --- rules ----------------------------------------------------------------------------------------------


def greedy(
    ranking: Sequence[Any], categories: Sequence[dict[Any, list[Any]]], most: Sequence[int], k: int
) -> list[Any]:
    """The first k items of a ranking whose categories have room. categories: item to its own, by feature."""
    taken: list[Any] = []
    for item in ranking:
        has_room = all(
            sum(category in of_feature[other] for other in taken) < limit
            for of_feature, limit in zip(categories, most, strict=True)
            for category in of_feature[item]
        )
        if has_room and len(taken) < k:
            taken.append(item)
    return taken


@pytest.mark.parametrize(("pairs", "k"), [(8, 7), (24, 20), (2**16, 7), (2**16, 1), (2**16, 60)])
def test_caps_leave_what_a_greedy_pass_over_all_items_in_order_takes(
    pairs: int, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrieval, "PAIRS", pairs)
    monkeypatch.setattr(retrieval, "USERS", 3)
    generator = torch.Generator().manual_seed(k)
    # Small whole numbers: most scores are equal to others.
    users, items = (torch.randint(-2, 3, (n, 4), generator=generator).float() for n in (8, 60))
    excluded = torch.stack([torch.randint(0, n, (50,), generator=generator) for n in (8, 60)])
    draw = torch.randint(0, 12, (60, 4), generator=generator).tolist()
    # A brand, and up to three tags, or none.
    brand = {item: [min(mine[0], 4)] for item, mine in enumerate(draw)}
    tags = {item: [*{tag for tag in mine[1:] if tag < 6}] for item, mine in enumerate(draw)}
    brands = categories_of("brand", [own[0] for own in brand.values()])
    categories = {"brand": brands, "tags": categories_of("tags", [*tags.values()])}
    for features, most in ((("brand",), (2,)), (("tags",), (3,)), (("brand", "tags"), (3, 2))):
        caps = caps_of(categories, dict(zip(features, most, strict=True)))
        found = retrieval.top_items(
            retrieval.InnerProduct(), users, items, k, excluded, rules=retrieval.Rules(caps=caps)
        )
        scores = users @ items.t()
        scores[excluded[0], excluded[1]] = -torch.inf
        for mine, of_user in zip(found.tolist(), scores, strict=True):
            order = of_user.sort(descending=True, stable=True).indices.tolist()
            ranking = [item for item in order if of_user[item] > -torch.inf]
            wanted = greedy(ranking, [{"brand": brand, "tags": tags}[name] for name in features], most, k)
            assert mine == wanted + [-1] * (k - len(wanted))


def test_a_category_with_most_of_the_best_items_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    # 4,000 items, the best 1,000 of each of four categories in a row.
    items, searched = torch.arange(4000, 0, -1.0).unsqueeze(1), list[int]()
    brands = {"brand": categories_of("brand", [item // 1000 for item in range(4000)])}
    search = retrieval._top_items

    def counted(*given: Any) -> torch.Tensor:
        searched.append(given[-1])
        return search(*given)

    monkeypatch.setattr(retrieval, "_top_items", counted)
    rules = retrieval.Rules(caps=caps_of(brands, {"brand": 1}))
    nothing = torch.empty(2, 0, dtype=torch.int64)
    found = retrieval.top_items(retrieval.InnerProduct(), torch.ones(1, 1), items, 4, nothing, rules=rules)
    assert found.tolist() == [[0, 1000, 2000, 3000]]
    assert searched == [4, 8, 16, 32]


def test_at_most_takes_described_features_and_is_applied_before_the_best_k(model: ServedModel) -> None:
    movies = NAMES["movie"]
    genres = [[name for bit, name in enumerate(GENRES) if number >> bit & 1] for number in range(len(movies))]
    years = [None if number % 7 == 0 else YEARS[number % 10] for number in range(len(movies))]
    model.describe_items({"movie": movies, "genres": genres, "year": years})
    of_genres = dict(zip(movies, genres, strict=True))
    of_years = {movie: [] if year is None else [year] for movie, year in zip(movies, years, strict=True)}
    others = [movie for movie in movies if movie % 2]
    for users, candidates in (([1, 2, 3], None), ([4], others), ([5], None)):
        whole = model.recommend(users, k=ITEMS, candidates=candidates)
        found = model.recommend(users, k=9, candidates=candidates, at_most={"genres": 4, "year": 1})
        for mine, ranking in zip(found, whole, strict=True):
            kept = greedy([item for item, _ in ranking], [of_genres, of_years], [4, 1], 9)
            assert mine == [pair for pair in ranking if pair[0] in kept]
    # Every list has them at most, also where no k are left: an item without a year is in no category.
    (few,) = model.recommend([1], k=ITEMS, at_most={"year": 2})
    assert len(few) == 2 * len(YEARS) + sum(year is None for year in years)


def test_items_near_those_that_a_user_had_are_excluded(model: ServedModel) -> None:
    near = {
        item: {other for other, cosine in mine if cosine > 0.7}
        for item, mine in zip((3, 30), model.similar_items([3, 30], k=ITEMS), strict=True)
    }
    events = [[(3, 4.5), (30, 1.0)], [], [(3, 2.0)]]
    assert len(near[3]) > 0 < len(near[30])
    for candidates in (None, NAMES["movie"][::2]):
        found = model.recommend(events=events, k=ITEMS, least_distance=0.3, candidates=candidates)
        allowed = {*(candidates or NAMES["movie"])}
        assert dict(found[0]).keys() == allowed - near[3] - near[30] - {3, 30}
        assert dict(found[1]).keys() == allowed
        assert dict(found[2]).keys() == allowed - near[3] - {3}
    # Before the best k, and whatever else is excluded.
    assert model.recommend(events=events, k=4, least_distance=0.3, exclude=None) == [
        mine[:4] for mine in model.recommend(events=events, k=ITEMS, least_distance=0.3)
    ]
    assert model.recommend(events=events, least_distance=0.0) == model.recommend(events=events)


def test_also_exclude_adds_to_what_the_rule_excludes(model: ServedModel) -> None:
    more = [[6, 9, -1], [], [3]]
    for rule, had in (("as_trained", [{3, 30}, set(), {63}]), (None, [set(), set(), set()])):
        found = model.recommend(events=EVENTS, k=ITEMS, exclude=rule, also_exclude=more)
        for mine, own, others in zip(found, had, more, strict=True):
            assert dict(mine).keys() == {*NAMES["movie"]} - own - {*others}


# --- similar items --------------------------------------------------------------------------------------


def test_similar_items_are_those_with_the_highest_cosines_of_their_factors(model: ServedModel) -> None:
    tables = {name: table.matrix for name, table in model.snapshot.tables.items()}
    weights = getattr(model.snapshot.head, "weights", {})
    factors = tables["movie"][1:, 1:] + weights.get("year", 1) * tables["year"][0, 1:]
    factors = (factors + weights.get("genres", 1) * tables["genres"][0, 1:]).double()
    for item, mine in zip([6, 633], model.similar_items([6, 633], k=ITEMS), strict=True):
        own = factors[item // 3 - 1]
        cosines = (factors @ own / factors.norm(dim=1) / own.norm()).tolist()
        wanted = dict(zip(NAMES["movie"], cosines, strict=True))
        del wanted[item]
        assert_best(mine, wanted, ITEMS)
    ((best, cosine),) = model.similar_items([6], k=1)[0]
    assert best == 9
    assert cosine == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (([-1],), "movie -1"),
        ((3,), "similar_items takes a list of movies, and got 3"),
        ((["3"],), "movie takes values of type int"),
        (([3], 0), "k must be a whole number of at least 1, got 0"),
    ],
)
def test_an_invalid_request_for_similar_items_is_refused_with_one_message(asked: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ranking().similar_items(*asked)
    assert ranking().similar_items([]) == []


# --- search by vectors ----------------------------------------------------------------------------------


def test_a_search_of_vectors_of_users_lists_what_is_recommended_to_them(model: ServedModel) -> None:
    vectors = model.user_vectors([1, 2], events=EVENTS[:2])
    wanted = model.recommend([1, 2], 7, events=EVENTS[:2], exclude=None)
    assert model.search(vectors, 7) == model.search(vectors.tolist(), 7) == wanted
    assert model.search([], 7) == []
    # Any vector of that width may be given.
    ((best, score),) = model.search(vectors.mean(dim=0, keepdim=True), 1)[0]
    items = model.item_vectors([item for item, _ in model.search(vectors[:1], ITEMS)[0]])
    scores = model.snapshot.head.score_all(vectors.mean(dim=0, keepdim=True), items)
    assert score == pytest.approx(float(scores.max()), abs=1e-6)
    assert torch.equal(model.item_vectors([best])[0], items[int(scores.argmax())])


def test_an_approximate_search_of_vectors_is_that_of_recommend() -> None:
    pytest.importorskip("faiss")
    model = ranking()
    vectors = model.user_vectors([1, 2])
    found = model.search(vectors, 5, approximate=True)
    assert found == model.recommend([1, 2], 5, exclude=None, approximate=True)
    # The index is on the host, whatever the device.
    flags: dict[str, Any] = {"exclude": None, "approximate": True, "device": torch.device("meta")}
    assert found == model.best([1, 2], 5, **flags)[0].named(*model.best([1, 2], 5, **flags)[1:])


@pytest.mark.parametrize(
    ("vectors", "sentence"),
    [
        ([[1.0] * 7], f"vectors must have {DIM} numbers each, as those of the model, got 7"),
        ([[1.0] * DIM, [1.0]], f"a list of lists of {DIM} numbers each, got "),
        ([1.0] * DIM, f"a list of lists of {DIM} numbers each, got other lists"),
        ([["a"] * DIM], "numbers each, got "),
        ([[None] * DIM], "numbers each, got "),
        (3, f"a list of lists of {DIM} numbers each, got other lists"),
        ([[float("nan")] * DIM], "finite numbers of 32 bits"),
        ([[10**400] * DIM], "numbers each, got "),
    ],
)
def test_vectors_of_another_form_are_refused_with_the_width_of_the_model(vectors: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        ranking().search(vectors)


def test_values_of_items_are_those_of_their_description() -> None:
    model = ranking()
    assert model.item_names == []
    with pytest.raises(UserError, match="requires a description of the items"):
        model.item_values([3], ["year"])
    model.describe_items({"movie": [6, 3, -1], "year": [1991, None, 1990]}, {"year": ["B", "A", "C"]})
    assert model.item_names == ["movie", "year"]
    found = model.item_values([3, -1, 6, 9], ["year", "movie"])
    assert found == [
        {"year": "A", "movie": 3},
        {"year": "C", "movie": -1},
        {"year": "B", "movie": 6},
        {"year": None, "movie": None},
    ]
    # The model still learns from the years that it knows.
    described = ranking()
    described.describe_items({"movie": [6, 3, -1], "year": [1991, None, 1990]})
    assert described.recommend([1]) == model.recommend([1])
    with pytest.raises(UserError, match="title has 1 values for 2 movies"):
        model.describe_items({"movie": [3, 6]}, {"title": ["A"]})


# --- newer models ---------------------------------------------------------------------------------------


def test_another_model_brings_its_own_items_and_scores(model: ServedModel) -> None:
    described: dict[str, list[Any]] = {"movie": [900, 3, 6], "year": [1990, 1991, 1992]}
    model.describe_items(described)
    assert {item for item, _ in model.recommend([1])[0]} == {3, 6}
    model.replace(snapshot_of("rating", seed=1, items=400))
    assert_best(model.recommend([1])[0], all_scores(model, {"user": 1}, described), 3)
    # Another training may have had fewer features.
    smaller = snapshot_of("rating", seed=2)
    features = tuple(feature for feature in smaller.features if feature.name != "year")
    smaller.head.items.remove("year")
    model.replace(dataclasses.replace(smaller, features=features))
    assert_best(model.recommend([1])[0], all_scores(model, {"user": 1}, {"movie": [3, 6]}), 3)


def test_a_click_is_given_by_its_item_alone() -> None:
    schema = dataclasses.replace(
        snapshot_of("ranking").schema, label_kind="clicks", lowest_label=0.0, highest_label=1.0
    )
    pairs = values_of_users(None, [[(3, 1.0), (6, 1.0)], []], schema)
    assert values_of_users(None, [[3, 6], []], schema) == pairs
    assert values_of_users(None, [[3, (6, 1.0)], []], schema) == pairs
    with pytest.raises(UserError, match="An event must be a pair"):
        values_of_users(None, [[None]], schema)
