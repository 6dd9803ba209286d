"""Items that the training has not seen are known by their features."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import recsuite
import serve
from example import make_loss, make_model
from recsuite.datasets.schema import EXCLUDE, INCLUDE
from recsuite.errors import UserError
from recsuite.extras.chain.cases import cases_of_models
from recsuite.serving.catalogue import UnknownCandidatesWarning
from recsuite.serving.followers import unknown_of
from recsuite.serving.served import Follower, ServedModel
from tests.support.random_model import NAMES, snapshot_of

# Two of the training, and three that it has not seen; the model knows no row of the last one's genre.
DESCRIBED: dict[str, list[Any]] = {
    "movie": [3, 9, 1_000, 2_000, 1_001],
    "year": [1990, 1995, 1995, 1999, None],
    "genres": [["Drama"], ["War"], ["Comedy", "War"], ["Drama"], ["Western"]],
}
NEW = [1_000, 2_000, 1_001]


def model_of(task: str = "ranking", new_items: str = INCLUDE) -> ServedModel:
    model = ServedModel(snapshot_of(task), new_items)
    model.describe_items(DESCRIBED)
    return model


@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_new_items_have_the_scores_of_their_features(task: str) -> None:
    model = model_of(task)
    assert model.items().ids == DESCRIBED["movie"]
    (best,) = model.recommend([1], k=9)
    scores = model.score({"user": [1] * 5, **DESCRIBED})
    assert dict(best) == pytest.approx(dict(zip(DESCRIBED["movie"], scores.tolist(), strict=True)), abs=1e-6)
    # A description tells the rest of an id, also to `score`.
    assert torch.equal(model.score({"user": [1] * 5, "movie": DESCRIBED["movie"]}), scores)
    assert len({*scores.tolist()}) == 5


def test_the_rule_of_the_training_counts_unless_another_one_is_given() -> None:
    snapshot = snapshot_of("ranking")
    including = dataclasses.replace(snapshot, schema=dataclasses.replace(snapshot.schema, new_items=INCLUDE))
    listed = []
    # A checkpoint without a record excludes them.
    for each, given in ((snapshot, []), (including, []), (including, [EXCLUDE]), (snapshot, [INCLUDE])):
        model = ServedModel(each, *given)
        model.describe_items(DESCRIBED)
        listed.append([item for item, _ in model.recommend([1])[0] if item in NEW])
    assert [len(each) for each in listed] == [0, 3, 0, 3]
    with pytest.raises(UserError, match="new_items must be one of as_trained, exclude, include, got 'all'"):
        ServedModel(snapshot, "all")


def test_items_without_other_features_are_not_included(capsys: pytest.CaptureFixture[str]) -> None:
    snapshot = snapshot_of("ranking")
    bare = dataclasses.replace(
        snapshot, features=tuple(each for each in snapshot.features if each.name not in ("year", "genres"))
    )
    model = ServedModel(bare, INCLUDE)
    assert not model.lists_new_items
    assert "--new_items include has no effect" in capsys.readouterr().out


def test_candidates_are_listed_or_named(recwarn: pytest.WarningsRecorder) -> None:
    model = model_of(new_items=EXCLUDE)
    assert model.items().ids == [3, 9]
    assert {item for item, _ in model.recommend([1], candidates=[2_000, 9])[0]} == {2_000, 9}
    assert not [each for each in recwarn if each.category is UnknownCandidatesWarning]
    with pytest.warns(UnknownCandidatesWarning, match="2 of 3 candidates are not listed.*: 6, 77") as said:
        assert [item for item, _ in model.recommend([1], candidates=[6, 77, 9, 9])[0]] == [9]
    assert said[0].filename == __file__
    # 6 has a row, but the description leaves it out.
    assert model.unknown_items([6, 77, 9, 2_000]) == [6, 77]
    found = unknown_of(model, model.snapshot, [1], [77, 2_000, 9])
    assert found == {"user": [], "movie": [77]}


def test_similar_items_of_a_new_item_are_those_of_its_features() -> None:
    included, excluded = model_of(), model_of(new_items=EXCLUDE)
    (best,) = included.similar_items([2_000], k=9)
    assert {item for item, _ in best} == {3, 9, 1_000, 1_001}
    (among_known,) = excluded.similar_items([2_000], k=9)
    assert dict(among_known) == pytest.approx({item: dict(best)[item] for item in (3, 9)})
    with pytest.raises(UserError, match=r"Unknown movie 77: .* not described"):
        included.similar_items([77])
    assert torch.equal(excluded.item_vectors([2_000]), included.item_vectors([2_000]))


def test_items_near_a_new_one_that_the_user_had_are_excluded() -> None:
    model = model_of(new_items=EXCLUDE)
    cosines = dict(model.similar_items([2_000])[0])
    distance = 1 - sum(cosines.values()) / 2
    (best,) = model.recommend(events=[[(2_000, 4.0)]], least_distance=distance)
    assert [item for item, _ in best] == [min(cosines, key=lambda item: cosines[item])]


def test_an_index_finds_new_items_and_keeps_them_where_they_are() -> None:
    pytest.importorskip("faiss")
    model, items = ServedModel(snapshot_of("ranking"), INCLUDE), [*NAMES["movie"]]
    new = [10_000 + number for number in range(120)]

    def describe(ids: list[int]) -> None:
        years = [1990 + item % 10 for item in ids]
        genres = [[("Comedy", "Drama", "War")[item % 3]] for item in ids]
        model.describe_items({"movie": ids, "year": years, "genres": genres})

    describe([*items, *new])
    exact, found = (model.recommend([1, 2, 3], k=400, approximate=way) for way in (False, True))
    assert [dict(mine) for mine in found] == [pytest.approx(dict(mine)) for mine in exact]
    before = model.items().nearest.lists
    # One more item, before the others: no other one moves.
    describe([9_999, *items, *new])
    after = model.items().nearest.lists
    assert after.came - before.came == 1
    assert len(after.keys.unique()) == len(items) + len(new) + 1
    best = model.recommend([1], k=500, approximate=True)[0]
    assert {item for item, _ in best} == {9_999, *items, *new}


def test_items_without_an_id_are_in_no_list() -> None:
    model = ServedModel(snapshot_of("ranking"), INCLUDE)
    model.describe_items({"movie": [3, None, 1_000], "year": [1990, 1991, 1992]})
    assert model.items().ids == [3, 1_000]


# --- from a training to a server ----------------------------------------------------------------------


def write_shop(folder: Path) -> None:
    """Clicks of users who like one colour each, and a table of items, of which a fifth is new in the test."""
    draw, colours = np.random.default_rng(0), np.array(["red", "green", "blue"])
    users, fits, time = draw.integers(0, 60, 2_400), draw.random(2_400) < 0.9, np.arange(2_400)
    kinds = np.where(fits, users % 3, draw.integers(0, 3, 2_400))
    # Items up to 60 at first, up to 75 in the newest fifth.
    items = 3 * draw.integers(0, np.where(time < 1_920, 20, 25)) + kinds
    events = pandas.DataFrame({"user": users, "item": items, "timestamp": 1_600_000_000 + 60 * time})
    events.to_csv(folder / "events.csv", index=False)
    # Without a price, items of one colour would have equal scores.
    table = pandas.DataFrame(
        {"item": np.arange(90), "colour": colours[np.arange(90) % 3], "price": 1 + draw.random(90).round(4)}
    )
    table.to_csv(folder / "items.csv", index=False)
    (folder / "schema.toml").write_text(
        '[files]\nevents = "events.csv"\nitems = "items.csv"\n[user]\ncolumn = "user"\n[item]\n'
        'column = "item"\n[label]\nkind = "clicks"\n[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n'
        '[features.colour]\nof = "item"\ncolumn = "colour"\nkind = "category"\n'
        '[features.price]\nof = "item"\ncolumn = "price"\nkind = "number"\ninput = "dense"\n'
    )


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of the shop and of checkpoints, by rule, and what `fit` returned."""
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder)
    fitted = {
        rule: recsuite.fit(
            folder,
            model=make_model,
            loss=make_loss,
            task="ranking",
            new_items=rule,
            save_dir=folder / rule,
            **{"epochs": 3, "batch_size": 256, "embedding_dim": 8, "mlp_dims": (), "history": 10},
        )
        for rule in (INCLUDE, EXCLUDE)
    }
    return folder, fitted


@pytest.mark.parametrize("rule", [INCLUDE, EXCLUDE])
def test_metrics_with_new_items_are_those_of_the_served_lists(rule: str, shop: Any) -> None:
    folder, fitted = shop
    model = ServedModel.open(folder / rule, model=make_model)
    assert model.snapshot.schema.new_items == rule
    _, test = cases_of_models([model], str(folder))
    assert test.metrics(model.recommend) == pytest.approx(dict(fitted[rule].metrics), abs=1e-12)
    trained = ServedModel.open(folder / EXCLUDE, model=make_model).items().ids
    hits = [
        item
        for item, mine in zip(test.items, model.recommend(test.values, 10, exclude=test.seen), strict=True)
        if item not in trained and item in dict(mine)
    ]
    assert bool(hits) == (rule == INCLUDE)


def test_a_changed_table_of_items_is_read_again_and_a_damaged_one_is_not_used(
    shop: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = shop
    table = folder / "items.csv"
    before = table.read_text()
    follower = Follower(folder / INCLUDE, model=make_model, data_path=folder)
    assert len(follower.model.items().ids) == 90
    assert follower.model.data is not None
    had = follower.model.data.seen_items([1, 2])
    try:
        follower.refresh()
        # Item 0 is gone from the table, and a new one comes first.
        header, _, rest = before.partition("\n")
        table.write_text(f"{header}\n500,blue,1.5\n500,red,1.5\n{rest.partition(chr(10))[2]}")
        follower.refresh()
        said = capsys.readouterr().out
        assert "91 items, 1 more" in said
        assert "colour varies within 1 item" in said
        assert {500, 0} < {*follower.model.items().ids}
        assert [item for item, _ in follower.model.recommend([2], candidates=[500])[0]] == [500]
        # The positions of events are those of before.
        assert follower.model.data is not None
        assert follower.model.data.seen_items([1, 2]) == had
        table.write_bytes(b"\xff\x00")
        for _ in range(2):
            with pytest.raises(UserError, match=r"Cannot read .*items\.csv"):
                follower.refresh()
        assert 500 in follower.model.items().ids
        table.unlink()
        with pytest.raises(UserError, match=r"Cannot read .*items\.csv"):
            follower.refresh()
    finally:
        table.write_text(before)
        os.utime(table)
    follower.refresh()
    assert len(follower.model.items().ids) == 91


def test_http_names_candidates_that_nobody_described(shop: Any) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    folder, _ = shop
    follower = Follower(folder / INCLUDE, model=make_model, data_path=folder)
    client = testclient.TestClient(serve.service(follower))
    with pytest.warns(UnknownCandidatesWarning):
        answer = client.post("/recommend", json={"users": [1], "candidates": [3, 89, 700]}).json()
    assert {item for item, _ in answer["items"][0]} == {3, 89}
    assert answer["unknown"] == {"user": [], "item": [700]}


def test_cosines_with_histories_of_the_data_are_limited(shop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    testclient = pytest.importorskip("fastapi.testclient")
    folder, _ = shop
    follower = Follower(folder / INCLUDE, model=make_model, data_path=folder)
    assert follower.model.data is not None
    had = max(len(mine) for mine in follower.model.data.seen_items([1, 2]))
    client = testclient.TestClient(serve.service(follower))
    for users in ([1, 2], {"user": [1, 2]}):
        for most, status in ((2 * 90 * had, 200), (2 * 90 * had - 1, 400)):
            monkeypatch.setattr(serve, "MOST_COSINES", most)
            reply = client.post("/recommend", json={"users": users, "k": 2, "least_distance": 0.2})
            assert reply.status_code == status, reply.text
