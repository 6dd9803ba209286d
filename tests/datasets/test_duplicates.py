"""Several ratings of one movie by one user: one of them counts, or the split is said to come between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation import splits, vocabulary
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.preparation.splits import settle
from recsuite.datasets.schema import ITEM, USER, Events, Feature, RawData, Schema
from recsuite.datasets.source import locate
from recsuite.errors import UserError
from tests.support.csv_ratings import Rating, write_ratings
from tests.support.raw_ids import items_of, users_of

# user, movie, rating, time. User 1 rates movie 1 three times, the newest first in the file, and user 2 rates
# movie 3 twice in one second.
RATINGS = [
    (1, 1, 5.0, 300),
    (1, 1, 1.0, 100),
    (2, 1, 2.0, 150),
    (1, 1, 3.0, 200),
    (1, 2, 4.0, 400),
    (2, 3, 0.5, 500),
    (2, 3, 4.5, 500),
    (3, 2, 3.5, 50),
]
FEATURES = (Feature("user", USER, "user_id"), Feature("item", ITEM, "item_id"))
ONCE = [(1, 2, 4.0, 400), (2, 1, 2.0, 150), (3, 2, 3.5, 50)]


def write(folder: Path, ratings: list[Rating]) -> Config:
    write_ratings(folder, ratings)
    return Config.of(data_path=str(folder), validation_fraction=0.0)


def stored(columns: Columns, split: str) -> list[tuple[int, int]]:
    """Positions of user and movie of the ratings of a split."""
    part = columns.range_of(split)
    rows: list[tuple[int, int]] = columns.column("rows")[["user", "item"]][part.start : part.stop].tolist()
    return rows


@pytest.mark.parametrize(
    ("how", "counting", "words"),
    [
        ("last", [(1, 1, 5.0, 300), (2, 3, 4.5, 500)], "the last in time counts"),
        ("first", [(1, 1, 1.0, 100), (2, 3, 0.5, 500)], "the first in time counts"),
        ("mean", [(1, 1, 3.0, 300), (2, 3, 2.5, 500)], "their mean counts, at the time of the last"),
    ],
)
def test_of_several_ratings_one_counts(
    tmp_path: Path, how: str, counting: list[tuple[int, int, float, int]], words: str
) -> None:
    config = write(tmp_path, RATINGS).replaced(duplicates=how)
    raw = read(locate(config.data, config.runtime.seed), config.data)
    found = raw.events
    columns = (users_of(raw), items_of(raw), found.label, found.time)
    assert sorted(zip(*(column.tolist() for column in columns), strict=True)) == sorted(ONCE + counting)
    assert found.label.dtype == np.float32
    assert raw.num_skipped == 3
    assert raw.skipped == [
        "5 ratings are of a movie that the same user rated more than once (2 such pairs): "
        f"{words} (--duplicates {how}; keep counts all)"
    ]
    opened = open_columns(config)
    assert (opened.num_train + opened.num_test, opened.num_skipped) == (5, 3)
    # Without times none is the last in time.
    untimed = dataclasses.replace(
        raw, events=dataclasses.replace(raw.events, time=0 * raw.events.time), skipped=[]
    )
    untimed.events.user[:], untimed.events.item[:] = 0, 1
    (note,) = settle(untimed, how, locate(config.data, config.runtime.seed).schema).skipped
    assert words.replace("in time", "in the files").partition(",")[0] in note
    assert "time" not in note
    assert raw.skipped[0] in opened.notes


@pytest.mark.parametrize(
    ("how", "adds_up"), [("last", True), ("mean", True), ("first", False), ("keep", False)]
)
def test_the_weights_of_clicks_add_up_but_for_those_after_the_first(how: str, adds_up: bool) -> None:
    schema = Schema(FEATURES, "user", "item", "title", "click", 0.0, 1.0, 1.0, label_kind="clicks")
    user, item = (np.array(column, np.int32) for column in ([0, 1, 1, 2, 1, 2], [0, 0, 0, 1, 0, 1]))
    label = np.ones(6, np.float32)
    frame = pandas.DataFrame({"user_id": range(3), "item_id": range(3), "title": "Title"})
    events = Events(user, item, label, np.arange(6))
    raw = settle(RawData(events, frame, frame), how, schema)
    assert (raw.events.label == 1).all()
    assert len(raw.events.label) == len(raw.events.user) == (6 if how == "keep" else 3)
    assert ("with the weight of all" in raw.skipped[0]) == adds_up
    if not adds_up:
        assert raw.events.weight is None
        return
    assert raw.events.weight is not None
    assert (raw.events.weight.dtype, raw.events.weight.tolist()) == (np.float32, [1, 3, 2])
    # Of many events this array lies in a file.
    assert np.shares_memory(raw.events.weight, label)


@pytest.mark.parametrize(
    ("flags", "kind", "how"),
    [
        # The last click would take an item of the test out of the training of a user who had it before.
        ({}, "clicks", "first"),
        ({"split": "leave_one_out"}, "count", "first"),
        ({"split": "random"}, "clicks", "last"),
        ({}, "rating", "last"),
        ({}, "yes_no", "last"),
        ({"duplicates": "mean"}, "count", "mean"),
        ({"duplicates": "keep"}, "clicks", "keep"),
        ({"split": "files"}, "clicks", "keep"),
    ],
)
def test_by_default_the_first_of_repeated_clicks_and_the_last_of_repeated_ratings_count(
    flags: dict[str, Any], kind: str, how: str
) -> None:
    assert DataConfig(**flags).duplicates_of(kind, has_types=False) == how
    assert DataConfig().duplicates_of(kind, has_types=True) == "keep"


def test_events_without_users_and_items_repeat_nothing_and_nothing_is_reported(tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(
        "clicked,hour\n" + "".join(f"{n % 3 // 2},{n % 5}\n" for n in range(40))
    )
    (tmp_path / "schema.toml").write_text(
        '[files]\nevents = "log.csv"\nconstants = ["user=all", "item=all"]\n[user]\ncolumn = "user"\n'
        '[item]\ncolumn = "item"\n[label]\nkind = "yes_no"\ncolumn = "clicked"\n'
        '[features.hour]\nof = "event"\ncolumn = "hour"\nkind = "category"\n'
    )
    for flags in ({}, {"duplicates": "keep"}):
        columns = open_columns(
            Config.of(data_path=str(tmp_path), split="random", validation_fraction=0.1, **flags)
        )
        assert columns.num_train + columns.num_validation + columns.num_test == 40
        assert (columns.num_users, columns.num_items) == (1, 1)
        assert not columns.notes


def test_ratings_without_duplicates_stay_as_they_are_and_nothing_is_reported(tmp_path: Path) -> None:
    for how in ("last", "first", "mean", "keep"):
        config = write(tmp_path, ONCE).replaced(duplicates=how)
        raw = read(locate(config.data, config.runtime.seed), config.data)
        assert raw.events.label.tolist() == [4.0, 2.0, 3.5]
        assert (raw.skipped, raw.num_skipped) == ([], 0)


def test_no_pair_lies_on_both_sides_of_a_random_split_unless_it_is_reported(tmp_path: Path) -> None:
    # Noise, each pair of which is there twice: what was trained on says all of what is tested.
    rng = np.random.default_rng(0)
    pairs = [(user, movie) for user in range(40) for movie in range(20)]
    stars = rng.integers(1, 6, len(pairs)).astype(float)
    ratings = [
        (user, movie, star, time)
        for time in (1, 2)
        for (user, movie), star in zip(pairs, stars.tolist(), strict=True)
    ]
    config = write(tmp_path, ratings).replaced(split="random", validation_fraction=0.1)
    once = open_columns(config)
    known = {*stored(once, "train"), *stored(once, "validation")}
    assert len(known) + once.num_test == len(pairs)
    assert not known & set(stored(once, "test"))
    kept = open_columns(config.replaced(duplicates="keep"))
    assert kept.folder != once.folder
    assert kept.num_train + kept.num_validation + kept.num_test == len(ratings)
    known = {*stored(kept, "train"), *stored(kept, "validation")}
    number = sum(pair in known for pair in stored(kept, "test"))
    assert number > 200
    assert any(
        note.startswith(f"{number} of {kept.num_test} test ratings are of a user and a movie that training")
        for note in kept.notes
    )


def test_more_ratings_or_values_of_lists_than_can_be_counted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path, RATINGS)
    with monkeypatch.context() as patch:
        patch.setattr(splits, "MOST", 7)
        with pytest.raises(UserError, match=r"^There are 8 ratings, and 7 is the limit; give fewer\.$"):
            open_columns(config)
    monkeypatch.setattr(vocabulary, "MOST", 2)
    with pytest.raises(UserError, match=r"^The lists of genres hold 3 values, and 2 is the limit; leave the"):
        open_columns(config)
