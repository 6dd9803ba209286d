"""Output of --recommend: titles that the user has not rated, for any user, and again as the model learns."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas
import pytest
import torch

import recsuite
from example import make_loss, make_model
from recsuite.checkpoint.folder import publish
from recsuite.checkpoint.format import CONFIG, DynamicRecord
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.schema import COUNT, RATING, Events, RawData
from recsuite.errors import UserError
from recsuite.extras.recommend.recommend import (
    DAMPING,
    MOST_SHOWN,
    MOST_USERS,
    Viewer,
    describe_few,
    open_viewer,
    page,
    popular,
)
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import IdTable
from recsuite.serving.training_data import TrainingFeatures, _check_ids, with_data_flags
from tests.support.launch import EXAMPLE, python, read_json, started, succeeded
from tests.support.raw_ids import items_of, users_of
from tests.support.states import FLAGS

# The launch runs within the first test.


@pytest.fixture(scope="module")
def save_dir(trained_folder: Path) -> Path:
    return trained_folder / "dumps"


@pytest.fixture(scope="module")
def model(save_dir: Path) -> ServedModel:
    return ServedModel.open(save_dir, model=make_model)


def viewer_of(model: ServedModel, user: str) -> Viewer:
    data = str(read_json(model.snapshot.trained / CONFIG)["data"]["data_path"])
    return open_viewer(model, Config.of(recommend=True, user=user, data_path=data), ["data_path"])


def rows_of(text: str) -> list[tuple[int, str, float]]:
    """Rank, title and number of each line of the table."""
    found = re.findall(r"^\| +(\d+) \| (.+?) +\| +([\d.]+) \|$", text, re.MULTILINE)
    return [(int(rank), title, float(number)) for rank, title, number in found]


def titles_of(viewer: Viewer, movie_ids: Any) -> list[str]:
    titles = viewer.raw.items.set_index("movie_id")["title"]
    return titles.loc[list(movie_ids)].tolist()


def busiest_user(model: ServedModel) -> str:
    users, counts = np.unique(users_of(viewer_of(model, "1").raw), return_counts=True)
    return str(users[counts.argmax()])


def test_a_user_is_shown_the_best_unrated_items(model: ServedModel) -> None:
    viewer = viewer_of(model, busiest_user(model))
    everything = rows_of(page(model, viewer, 10_000))
    rated = set(viewer.item_ids.tolist())
    ids = [movie for movie in viewer.raw.items["movie_id"].tolist() if model.knows("movie", movie)]
    unrated = [movie for movie in ids if movie not in rated]
    assert 0 < len(unrated) < len(ids)
    # Titles of a synthetic world may repeat.
    assert sorted(title for _, title, _ in everything) == sorted(titles_of(viewer, unrated))
    numbers = [number for _, _, number in everything]
    assert numbers == sorted(numbers, reverse=True)
    assert [rank for rank, _, _ in everything] == list(range(1, len(unrated) + 1))
    assert rows_of(page(model, viewer, 4)) == everything[:4]


def test_a_title_does_nothing_to_a_terminal(model: ServedModel) -> None:
    viewer = viewer_of(model, busiest_user(model))
    viewer.raw.items["title"] = "\x1b[2J\n\x9b31m Mis\xe9rables"
    shown = page(model, viewer, 3)
    assert shown.replace("\n", "").isprintable()
    assert [title for _, title, _ in rows_of(shown)] == ["\\x1b[2J \\x9b31m Mis\xe9rables"] * 3


def test_a_user_given_by_events_gets_the_recommendations_of_that_user(model: ServedModel) -> None:
    viewer = viewer_of(model, "7")
    last = slice(-FLAGS.data.history, None)
    events = list(zip(viewer.item_ids[last].tolist(), viewer.labels[last].tolist(), strict=True))
    user = viewer.raw.users[viewer.raw.users["user_id"] == 7].iloc[0]
    values = {"user": [7], **{name: [user[name]] for name in ("gender", "age", "occupation")}}
    rated = [viewer.item_ids.tolist()]
    (found,) = model.recommend(values, 5, events=[events], exclude=rated)
    shown = [(title, number) for _, title, number in rows_of(page(model, viewer, 5))]
    titles = titles_of(viewer, [movie for movie, _ in found])
    assert shown == [
        (title, pytest.approx(score, abs=6e-4)) for title, (_, score) in zip(titles, found, strict=True)
    ]
    # Somebody of whom nothing but the events is known is another one.
    assert model.recommend(events=[events], k=5, exclude=rated) != [found]


def test_liked_items_are_shown_first(model: ServedModel) -> None:
    viewer = viewer_of(model, busiest_user(model))
    text = page(model, viewer, 3)
    liked = re.findall(r"^  ([\d.]+)  (.+)$", text, re.MULTILINE)
    assert [float(rating) for rating, _ in liked] == sorted(viewer.labels.tolist())[: -MOST_SHOWN - 1 : -1]
    assert {title for _, title in liked} <= set(titles_of(viewer, viewer.item_ids))
    assert f"rated {len(viewer.labels):,} movies" in text
    assert text.startswith(f"step {model.progress.step}, ")


@pytest.mark.parametrize(
    ("user", "number"),
    [
        ("-5", -5),
        ("+7", 7),
        (" 7 ", 7),
        ("007", 7),
        ("0" * 5_000 + "7", 7),
        (str(2**63 - 1), 2**63 - 1),
        (str(-(2**63)), -(2**63)),
        (str(2**63), None),
        ("9" * 5_000, None),
        ("\u0667", None),
        ("1_000", None),
        ("", None),
        # As files have them in which some are missing.
        ("7.0", 7),
        ("-5.00", -5),
        ("7.5", None),
    ],
)
def test_a_user_name_that_is_no_64_bit_number_is_unknown(user: str, number: int | None) -> None:
    ratings = Events(np.array([0, 1, 1]), np.array([0, 1, 2]), np.ones(3, np.float32), np.arange(3))
    movies, users = pandas.DataFrame({"movie_id": [1, 2, 3]}), pandas.DataFrame({"user_id": [-5, 7]})
    raw = RawData(ratings, movies, users)
    viewer = Viewer(raw, SCHEMA, user, TrainingFeatures(raw, SCHEMA, 5))
    assert viewer.id == number
    assert len(viewer.labels) == {-5: 1, 7: 2}.get(number or 0, 0)


def test_a_user_with_a_sign_is_read_from_the_command_line() -> None:
    assert parse_args(["--recommend", "--user", "-5"]).flags["user"] == "-5"
    assert parse_args(["--recommend", "--user=-5"]).flags["user"] == "-5"


@pytest.mark.parametrize("user", ["99999999", "nobody"])
def test_an_unknown_user_gets_popular_movies_and_a_message(model: ServedModel, user: str) -> None:
    viewer = viewer_of(model, user)
    text = page(model, viewer, 5)
    assert f"the model knows no user {user}; these are the popular movies" in text
    events = viewer.raw.events
    mean = float(events.label.mean(dtype=np.float64))
    damped = {
        movie: (float(mine.sum()) + DAMPING * mean) / (len(mine) + DAMPING)
        for movie in np.unique(items_of(viewer.raw)).tolist()
        for mine in [events.label[items_of(viewer.raw) == movie].astype(np.float64)]
    }
    best = sorted(damped, key=lambda movie: -damped[movie])[:5]
    assert [title for _, title, _ in rows_of(text)] == titles_of(viewer, best)


def test_equally_popular_movies_are_sorted_by_id_for_any_order_of_ratings() -> None:
    # Each movie has the same ratings, of which none is a sum of powers of two.
    labels = np.tile(np.array([0.1, 0.2, 0.3, 0.7, 1.1, 2.9, 4.3], np.float32), 20)
    movies = np.repeat(np.arange(20), 7)
    order = np.random.default_rng(0).permutation(len(labels))
    events = Events(np.zeros(140, np.int32), movies[order], labels[order], np.arange(140))
    frame = pandas.DataFrame({"movie_id": range(1, 21)})
    raw = RawData(events, frame, pandas.DataFrame({"user_id": [1]}))
    viewer = Viewer(raw, SCHEMA, "2", TrainingFeatures(raw, SCHEMA, 5))
    everything = Mock(**{"snapshot.known": lambda feature, values: torch.ones(len(values), dtype=torch.bool)})
    found = popular(viewer, everything, 20)
    assert found.items.tolist() == [*range(20)]
    assert len(set(found.numbers.tolist())) == 1


@pytest.mark.parametrize(("evaluation", "first"), [("predictions", 0), ("ranks", 1)])
def test_popular_items_of_a_ranking_have_most_events_and_others_the_best_mean(
    evaluation: str, first: int
) -> None:
    # One excellent rating of the first movie, many poor ones of the second.
    movies, labels = np.array([0, *[1] * 30]), np.array([5.0, *[2.0] * 30], np.float32)
    frame = pandas.DataFrame({"movie_id": [1, 2]})
    events = Events(np.zeros(31, np.int32), movies, labels, np.arange(31))
    raw = RawData(events, frame, pandas.DataFrame({"user_id": [1]}))
    viewer = Viewer(raw, SCHEMA, "2", TrainingFeatures(raw, SCHEMA, 5))
    known = {"snapshot.known": lambda feature, values: torch.ones(len(values), dtype=torch.bool)}
    model = Mock(**{**known, "snapshot.task.evaluation": evaluation})
    assert popular(viewer, model, 1).items.tolist() == [first]


@pytest.mark.parametrize(("least", "names"), [(2, ["2", "3"]), (3, ["3"]), (9, ["3"])])
def test_other_users_have_the_least_items_or_as_many_as_any(least: int, names: list[str]) -> None:
    users = np.repeat(np.arange(3, dtype=np.int32), [1, 2, 3])
    events = Events(users, np.array([0, 0, 1, 0, 1, 2]), np.ones(6, np.float32), np.arange(6))
    items, ids = pandas.DataFrame({"movie_id": [1, 2, 3]}), pandas.DataFrame({"user_id": [1, 2, 3]})
    raw = RawData(events, items, ids)
    viewer = Viewer(raw, SCHEMA, "1", TrainingFeatures(raw, SCHEMA, 5))
    assert [other.name for other in viewer.other_users(10, least)] == names


def test_other_data_than_the_models_are_refused(model: ServedModel, tmp_path: Path) -> None:
    movies = "\n".join(["movieId,title,genres", "1,One (1990),Drama"])
    (tmp_path / "movies.csv").write_text(movies)
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,4.0,5\n")
    with pytest.raises(UserError, match=r"has no user 2,.*--data_path"):
        open_viewer(model, Config.of(recommend=True, user="1", data_path=str(tmp_path)), ["data_path"])


def test_data_with_other_columns_than_the_models_are_refused(model: ServedModel, tmp_path: Path) -> None:
    (tmp_path / "clicks.csv").write_text("customer,article,at\n" + "c,a,1700000000\n" * 20)
    with pytest.raises(UserError, match="has no column user_id, by which the model knows each user; give"):
        open_viewer(model, Config.of(recommend=True, user="1", data_path=str(tmp_path)), ["data_path"])


def test_data_without_any_id_of_a_dynamic_table_are_refused(tmp_path: Path) -> None:
    def known(name: str, ids: list[int]) -> torch.Tensor:
        return torch.tensor([each == 3 for each in ids])

    record = DynamicRecord(1, 16, 16, "hash", 1, "lru", 0, 0, "steps", False, 0, 1)
    one = torch.tensor([1])
    table = IdTable(torch.zeros(2, 1), ids=torch.tensor([3]), rows=one, seen=one, record=record)
    snapshot = Mock(tables={"user": table}, known=known)
    _check_ids(tmp_path, snapshot, "user", [1, 3])
    refused = (
        rf"^{tmp_path} has no user that the model was trained on; give the --data_path of its training\.$"
    )
    with pytest.raises(UserError, match=refused):
        _check_ids(tmp_path, snapshot, "user", [1, 2])


@pytest.mark.parametrize(("given", "duplicates"), [((), "first"), (("duplicates",), "auto")])
def test_a_given_flag_overrides_that_of_the_training_even_with_its_default_value(
    tmp_path: Path, given: tuple[str, ...], duplicates: str
) -> None:
    recorded = {"dataset": "ml-1m", "duplicates": "first"}
    asked = Config.of(recommend=True, user="1")
    assert asked.data.duplicates == "auto"
    snapshot = Mock(trained=tmp_path, config=recorded)
    assert with_data_flags(snapshot, asked, given).data.duplicates == duplicates


def test_an_empty_path_names_no_data(tmp_path: Path) -> None:
    snapshot = Mock(trained=tmp_path, config={"data_path": "/data"})
    with pytest.raises(UserError, match="no path is taken from a checkpoint; give --data_path"):
        with_data_flags(snapshot, Config(), ["data_path"])


def test_the_command_prints_the_folder_of_its_data(
    save_dir: Path, synthetic_folder: Path, tmp_path: Path
) -> None:
    command = [EXAMPLE, "--recommend", "--user", 7, "--top", 3, "--save_dir", save_dir]
    result = python(*command, "--data_path", synthetic_folder, cwd=tmp_path)
    lines = succeeded(result).splitlines()
    assert lines[0] == f"titles and ratings are those of {synthetic_folder}"
    assert re.fullmatch(r"best: epoch 2, validation RMSE \d\.\d{4} \(step 16\), \d+ (s|min) old", lines[1])
    assert len(rows_of(result.stdout)) == 3
    assert result.stderr == ""


def test_follow_prints_again_for_a_newer_checkpoint_and_ends_on_sigint(
    save_dir: Path, synthetic_folder: Path, tmp_path: Path
) -> None:
    copy, ready = tmp_path / "dumps", tmp_path / "ready"
    for name in ("step-000000008", "delta-000000010"):
        shutil.copytree(save_dir / name, ready / name)
    shutil.copytree(save_dir / "delta-000000012", ready / ".making-next")
    command = [
        EXAMPLE,
        "--recommend",
        "--user",
        7,
        "--top",
        2,
        "--follow",
        "--checkpoint",
        "latest",
        "--save_dir",
        copy,
    ]
    command += ["--data_path", synthetic_folder]
    with started([str(part) for part in (sys.executable, *command)]) as process:
        assert process.stdout is not None
        waiting = process.stdout.readline()
        ready.rename(copy)
        first = read_page(process.stdout)
        publish(copy / ".making-next", copy / "delta-000000012", keep=3)
        second = read_page(process.stdout)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
    assert waiting == f"waiting for the first checkpoint in {copy}\n"
    assert first.startswith("titles and ratings")
    assert re.search(r"^latest: step 10, \d+ (s|min) old$", first, re.MULTILINE)
    assert re.search(r"^latest: step 12, \d+ (s|min) old$", second, re.MULTILINE)
    assert rows_of(first) != rows_of(second)
    assert (process.returncode, output, errors) == (0, "", "")


def test_lists_of_few_items_for_many_users_come_with_advice(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    viewer = viewer_of(model, "1")

    def give(shift: int) -> None:
        """Give each user the items of the one before, but for the first ones."""

        def recommend(users: list[int], top: int) -> list[list[tuple[int, float]]]:
            assert 5 <= len(users) <= MOST_USERS
            assert all(model.knows("user", user) for user in users)
            return [[(shift * place + item, 1.0) for item in range(top)] for place in range(len(users))]

        monkeypatch.setattr(model, "recommend", recommend)

    give(0)
    few = describe_few(model, viewer, 5)
    assert " hold 5 of " in few
    assert few.endswith(model.snapshot.task.few_listed)
    give(5)
    assert describe_few(model, viewer, 5) == ""


def read_page(stream: Any) -> str:
    """All lines until the second row of the table."""
    lines: list[str] = []
    while not lines or not lines[-1].startswith("|    2 |"):
        line = stream.readline()
        assert line, "".join(lines)
        lines.append(line)
    return "".join(lines)


@pytest.mark.parametrize(
    ("kind", "expected"), [(COUNT, {"B": 6.0, "A": 4.0, "C": 2.0}), (RATING, {"A": 3.0, "C": 2.0, "B": 1.0})]
)
def test_a_repeated_item_of_a_user_is_shown_once(kind: str, expected: dict[str, float]) -> None:
    schema = dataclasses.replace(SCHEMA, label_kind=kind)
    users, items = pandas.DataFrame({"user_id": [1]}), pandas.DataFrame({"movie_id": [1, 2, 3]})
    item, quantity = np.array([0, 1, 0, 2, 1]), np.array([1, 5, 3, 2, 1], np.float32)
    labels = np.array([schema.learned(each) for each in quantity.tolist()], np.float32)
    events = Events(np.zeros(5, np.int32), item.astype(np.int32), labels, np.arange(5))
    raw = RawData(events, items, users)
    viewer = Viewer(raw, schema, "1", TrainingFeatures(raw, schema, 5))
    shown = viewer.liked()
    found = zip(shown.items.tolist(), shown.numbers.tolist(), strict=True)
    assert [("ABC"[place], pytest.approx(number, abs=1e-5)) for place, number in found] == [*expected.items()]


@pytest.mark.parametrize(
    ("label", "said", "heading"),
    [
        ("bought", r"user u1 was asked about \d+ items, those with a yes first:", "chance of bought"),
        ("plays", r"user u1 had \d+ items, and most often:", "score"),
        ("", r"user u1 had \d+ items, and last:", "score"),
        ("stars", r"user u1 rated \d+ items, and liked most:", "predicted"),
    ],
)
def test_output_for_own_tables_uses_their_names(label: str, said: str, heading: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    values = {"bought": [0, 1], "plays": [1, 2, 3, 50], "stars": [1, 2, 3, 4, 5]}
    columns = {
        "user_id": [f"u{user}" for user in draw.integers(0, 20, 600)],
        "item_id": [f"i{item}" for item in draw.integers(0, 30, 600)],
        "date": pandas.date_range("2026-01-01", periods=600, freq="h"),
        **({label: draw.choice(values[label], 600)} if label else {}),
    }
    pandas.DataFrame(columns).to_parquet(tmp_path / "events.parquet")
    dumps = str(tmp_path / "dumps")
    flags = {"epochs": 1, "batch_size": 128, "embedding_dim": 4, "mlp_dims": (4,), "save_dir": dumps}
    recsuite.fit(tmp_path / "events.parquet", model=make_model, loss=make_loss, **flags)
    config = Config.of(recommend=True, user="u1", data_path=str(tmp_path / "events.parquet"), save_dir=dumps)
    served = ServedModel.open(dumps, model=make_model)
    shown = page(served, open_viewer(served, config, ["data_path"]), 3).splitlines()
    assert re.fullmatch(said, shown[1])
    (head,) = (line for line in shown if line.startswith("| rank"))
    assert head.split("|")[3].strip() == heading
    assert len({len(line) for line in shown if line.startswith("|")}) == 1
