"""Vectors, words of titles and levels of categories as features of items: columns, new items, and serving."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

import recsuite
from example import make_loss, make_model
from recsuite.config.parser import parse_args
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.opening import open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.extras.gaussian import gaussian_rows
from recsuite.extras.guess.guessing import guess
from recsuite.metrics import finite
from recsuite.runtime.process import RuntimeContext
from recsuite.training import loop
from recsuite.training.weights import project_rows
from tests.support.launch import EXAMPLE, read_json, succeeded, torchrun

LENGTH, NUM_USERS, NUM_ITEMS = 4, 100, 60
SCHEMA = """
[user]
column = "user"
[item]
column = "item"
title = "title"
[label]
kind = "rating"
column = "stars"
lowest = 1.0
highest = 5.0
[timestamp]
column = "time"
format = "unix"
[features.picture]
of = "item"
column = "picture"
kind = "vector"
length = 4
[features.word]
of = "item"
column = "words(title)"
kind = "list"
[features.level]
of = "item"
column = "levels(category)"
kind = "list"
"""


def items() -> pandas.DataFrame:
    """Item 0 has no picture, no title and no category."""
    drawn = np.random.default_rng(1).standard_normal((NUM_ITEMS, LENGTH)).astype(np.float32)
    # Vectors of models are often nearly collinear.
    drawn[:, 3] = drawn[:, 2]
    pictures = [*drawn]
    titles = [
        f"The {'red' if item % 2 else 'blue'} Set, no {item % 3}: the best" for item in range(NUM_ITEMS)
    ]
    paths = [f"Home > {'Bath' if item % 4 else 'Kitchen > Tea'}" for item in range(NUM_ITEMS)]
    columns: dict[str, list[Any]] = {"picture": pictures, "title": titles, "category": paths}
    for values in columns.values():
        values[0] = None
    return pandas.DataFrame({"item": [f"i{item:02d}" for item in range(NUM_ITEMS)], **columns})


def events() -> pandas.DataFrame:
    """The stars depend on the first two numbers of the picture; the last fifth has items of its own."""
    draw, known = np.random.default_rng(0), NUM_ITEMS * 3 // 4
    pairs = [(user, item) for user in range(NUM_USERS) for item in range(NUM_ITEMS)]
    old, new = ([pair for pair in pairs if (pair[1] < known) == is_old] for is_old in (True, False))
    user, item = np.concatenate([draw.permutation(old)[:2_400], draw.permutation(new)[:600]]).T
    pictures = np.stack([np.zeros(LENGTH) if each is None else each for each in items()["picture"]])[item]
    stars = 3 + 0.8 * pictures[:, 0] - 0.5 * pictures[:, 1] + 0.2 * draw.standard_normal(len(item))
    columns = {
        "user": user,
        "item": [f"i{each:02d}" for each in item],
        "time": 1_700_000_000 + np.arange(len(item)),
    }
    return pandas.DataFrame({**columns, "stars": stars.clip(1, 5)})


def write(folder: Path, table: pandas.DataFrame, schema: str = SCHEMA) -> list[str]:
    folder.mkdir(exist_ok=True)
    events().to_parquet(folder / "events.parquet")
    table.to_parquet(folder / "items.parquet")
    (folder / "schema.toml").write_text(schema)
    return ["--data_path", str(folder), "--cache_dir", str(folder / "columns"), "--num_workers", "0"]


def numbers_of(flags: list[str]) -> np.ndarray:
    """The dense numbers of the test events, [events, numbers]."""
    config = parse_args([*flags, "--batch_size", "2048"])
    batches = EventBatches(open_columns(config), config, 0, 1)
    assert batches.batch_bytes > 4 * LENGTH * batches.batch_size
    return batches[Request("test", 0, 0)].numbers.numpy()[: batches.step_sizes("test")[0]]


def test_a_batch_has_vectors_on_one_scale(tmp_path: Path) -> None:
    flags = write(tmp_path, items())
    columns = open_columns(parse_args(flags))
    pictures = np.stack(items()["picture"].tolist()[1:])
    wanted = np.stack(items()["picture"].tolist()[1:])[
        columns.column("rows")["item"][columns.num_train :] - 1
    ]
    wanted = wanted[columns.num_validation :]
    np.testing.assert_allclose(numbers_of(flags), (wanted - pictures.mean()) / pictures.std(), rtol=1e-5)
    assert "picture: 1 of 60 items have no vector" in columns.notes
    # Of an item without a vector every number is missing.
    own = columns.column("item_features")["numbers"]
    assert np.isnan(own[0]).all()
    assert not np.isnan(own[1:]).any()


def test_texts_of_vectors_are_the_same_vectors(tmp_path: Path) -> None:
    texts = [
        None if each is None else f"[{', '.join(map(repr, each.tolist()))}]" for each in items()["picture"]
    ]
    given = numbers_of(write(tmp_path / "lists", items()))
    np.testing.assert_array_equal(
        given, numbers_of(write(tmp_path / "texts", items().assign(picture=pandas.Series(texts))))
    )


@pytest.mark.parametrize("wrong", [[1.0, 2.0], [1.0, 2.0, 3.0, float("inf")], [1.0, 2.0, 3.0, None]])
def test_a_vector_of_another_length_or_without_a_number_is_a_bad_row(
    wrong: list[Any], tmp_path: Path
) -> None:
    table = items()
    table["picture"] = pandas.Series([*table["picture"][:7], wrong, *table["picture"][8:]])
    with pytest.raises(
        UserError, match=r"picture .* is not a list of finite numbers of the length that schema.toml says, 4"
    ):
        open_columns(parse_args(write(tmp_path, table)))


WRONG = {
    "length = 4": ("length = 1", "length = 1 is not between 2 and 16,384"),
    'kind = "vector"\nlength = 4': ('kind = "vector"', "has no length; write one"),
    'of = "item"\ncolumn = "picture"': ('of = "event"\ncolumn = "picture"', "is for users and items"),
    '"words(title)"\nkind = "list"': ('"words(title)"\nkind = "category"', 'must have kind = "list"'),
    "words(title)": ("words(heading)", "heading"),
    '"words(title)"': ('"words(picture)"', "is of a column that is the vector"),
}


@pytest.mark.parametrize("right", WRONG)
def test_wrong_sections_are_refused(right: str, tmp_path: Path) -> None:
    wrong, message = WRONG[right]
    with pytest.raises(UserError, match=message):
        open_columns(parse_args(write(tmp_path, items(), SCHEMA.replace(right, wrong))))


def test_words_and_levels_are_lists_of_known_parts(tmp_path: Path) -> None:
    import json

    columns = open_columns(parse_args(write(tmp_path, items())))
    known = json.loads((Path(columns.folder) / "vocabulary.json").read_text())
    assert known["word"] == ["0", "1", "2", "best", "blue", "no", "red", "set", "the"]
    assert known["level"] == ["Home", "Home > Bath", "Home > Kitchen", "Home > Kitchen > Tea"]
    lists = columns.column("item_features")["lists"]
    for feature, item, wanted in (
        ("word", 5, ["the", "red", "set", "no", "2", "best"]),
        ("level", 4, ["Home", "Home > Kitchen", "Home > Kitchen > Tea"]),
    ):
        place = ["word", "level"].index(feature)
        start, count = lists[item, place]
        rows = columns.column(f"{feature}_values")[start : start + count]
        assert [known[feature][row - 1] for row in rows] == wanted
        # A missing text has the unknown row.
        assert columns.column(f"{feature}_values")[lists[0, place, 0]] == 0


def test_vectors_and_paths_are_guessed() -> None:
    tables = {"events": events(), "items": items()[1:]}
    found = guess({role: pyarrow.Table.from_pandas(table) for role, table in tables.items()}).schema.features
    assert (found["picture"].kind, found["picture"].length) == ("vector", LENGTH)
    (levels,) = [feature for feature in found.values() if feature.column == "levels(category)"]
    assert (levels.of, levels.kind) == ("item", "list")
    uneven = [[0.5] * (2 + item % 2) for item in range(NUM_ITEMS)]
    tables["items"] = items().assign(picture=pandas.Series(uneven))
    left = guess({role: pyarrow.Table.from_pandas(table) for role, table in tables.items()}).left_out
    assert ("picture", "its lists of numbers have several lengths") in [
        (each.name, each.why) for each in left
    ]


def test_new_items_are_rated_by_their_vectors_and_served_alike(tmp_path: Path) -> None:
    write(tmp_path, items())
    flags: dict[str, Any] = {"embedding_dim": 8, "batch_size": 256, "num_workers": 0, "epochs": 6}
    # A name that a dictionary of modules has itself.
    (tmp_path / "schema.toml").write_text(SCHEMA.replace("[features.picture]", "[features.values]"))
    model = recsuite.fit(
        events(), model=make_model, loss=make_loss, items=items(), schema=tmp_path / "schema.toml", **flags
    )
    # The noise is 0.2. The spread of the stars is 0.9, and nothing but the vectors tells it of new items.
    assert model.metrics["rmse"] < 0.45
    some = {name: events().tail(50)[name].tolist() for name in ("user", "item")}
    pictures = items().set_index("item")["picture"]
    given = [pictures[item].tolist() for item in some["item"]]
    scores = model.score(some)
    np.testing.assert_allclose(model.score({**some, "values": given}).numpy(), scores.numpy(), atol=1e-6)
    assert not np.allclose(model.score({**some, "values": [None] * 50}).numpy(), scores.numpy(), atol=0.1)
    for wrong in ([1.0, 2.0], "1 2 3 4", 5.0):
        with pytest.raises(UserError, match="values takes lists of 4 numbers"):
            model.score({**some, "values": [wrong] * 50})


def test_a_projection_changes_predictions_of_new_items_alone(
    tmp_path: Path, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = parse_args([*write(tmp_path, items()), "--epochs", "1", "--batch_size", "256"])
    with monkeypatch.context() as without:
        without.setattr(loop, "project_rows", lambda *_: None)
        with open_data(config, context) as data, loop.Training(data, config, context) as training:
            model = training.shard(make_model, initial_rows=gaussian_rows)
            evaluate = training.evaluator.validate, training.evaluator.test
            before = [each(model.model, 0)["rmse"] for each in evaluate]
            project_rows(model, training.columns)
            after = [each(model.model, 0)["rmse"] for each in evaluate]
    assert after[0] == pytest.approx(before[0], abs=1e-5)
    # The spread of the stars, and little more than their noise.
    assert before[1] > 0.9
    assert after[1] < 0.45


def test_ranks_train_the_same_projection(tmp_path: Path, context: RuntimeContext) -> None:
    flags = [*write(tmp_path, items()), "--preset", "none", "--epochs", "2", "--batch_size", "240"]
    config = parse_args(flags)
    with open_data(config, context) as data:
        alone = loop.Training(data, config, context).run(make_model, make_loss)
    # Three do not divide the items.
    succeeded(torchrun(3, EXAMPLE, *flags, "--report_dir", tmp_path))
    found = read_json(tmp_path / "metrics.json")["test"]
    assert found == pytest.approx(finite(alone.test.values), abs=1e-4)
