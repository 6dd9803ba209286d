"""Metrics by segment: known answers, the same on any number of processes, and names that cannot be."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from recsuite.extras.reports.segments import HISTORY_LENGTH, segments_of
from tests.support.launch import EXAMPLE, python, read_json, succeeded, torchrun

NUM_USERS, NUM_ITEMS = 40, 30


def events() -> pandas.DataFrame:
    """Each user has number of the user minus 1 events, up to 20, on items whose price is their number."""
    draw = np.random.default_rng(0)
    rows = [
        (user, item, 1 + (user + item) % 5, ("DE", "US", None)[user % 3], float(item))
        for user in range(1, NUM_USERS + 1)
        for item in draw.permutation(NUM_ITEMS)[: min(user, 20)]
    ]
    frame = pandas.DataFrame(rows, columns=["user_id", "item_id", "rating", "country", "price"])
    start = dt.datetime(2026, 1, 1)
    # In the order of a shuffle, so that all users are in the test too.
    minutes = draw.permutation(len(frame))
    return frame.assign(timestamp=[start + dt.timedelta(minutes=int(minute)) for minute in minutes])


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("segments")
    events().to_parquet(folder / "events.parquet")
    return ["--data_path", str(folder / "events.parquet"), "--cache_dir", str(folder / "columns")]


@pytest.fixture(scope="module")
def columns(flags: list[str]) -> Columns:
    return open_columns(parse_args(flags))


def of_test(columns: Columns) -> pandas.DataFrame:
    """The newest fifth, in the order of the columns."""
    frame = events().sort_values("timestamp", kind="stable")
    return frame.tail(columns.num_test).reset_index(drop=True)


def test_segments_are_those_of_the_values(columns: Columns) -> None:
    test = of_test(columns)
    country, price, length = segments_of(columns, "test", ["country", "price", HISTORY_LENGTH])
    for value, mask in country.masks().items():
        wanted = test["country"].isna() if value == "unknown" else test["country"] == value
        np.testing.assert_array_equal(mask, wanted)
    assert {*country.masks()} == {"unknown", "DE", "US"}
    prices = test["price"].to_numpy()
    for value, mask in price.masks().items():
        low, _, high = value.partition(" to ")
        inside = prices >= float(low.removesuffix(" or more")) if not value.startswith("below") else True
        below = prices < float(high or value.removeprefix("below ").removesuffix(" or more"))
        np.testing.assert_array_equal(mask, inside & (True if value.endswith("or more") else below))
    assert len(price.masks()) == 4
    rows = columns.column("rows")[: columns.num_train]
    counts = np.bincount(rows["user"], minlength=NUM_USERS)
    positions = columns.range_of("test")
    of_users = counts[columns.column("rows")[positions.start : positions.stop]["user"]]
    bounds = {"0": (0, 0), "1 to 4": (1, 4), "5 to 19": (5, 19), "20 to 99": (20, 99)}
    for value, mask in length.masks().items():
        least, most = bounds[value]
        np.testing.assert_array_equal(mask, (of_users >= least) & (of_users <= most))
    for each in (country, price, length):
        assert sum(mask.sum() for mask in each.masks().values()) == columns.num_test


def test_the_most_frequent_values_have_segments_of_their_own(columns: Columns) -> None:
    (of_items,) = segments_of(columns, "test", [columns.schema.item])
    *own, others = of_items.masks().items()
    counts = of_test(columns)["item_id"].value_counts()
    assert [int(mask.sum()) for _, mask in own] == counts.iloc[:10].tolist()
    assert others[0] == f"{len(counts) - 10} others"
    assert others[1].sum() == counts.iloc[10:].sum()


@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_any_number_of_processes_measures_the_same_segments(
    flags: list[str], tmp_path: Path, task: str
) -> None:
    train = (*flags, "--task", task, "--epochs", "1", "--dump", "--save_dir", tmp_path / "dumps")
    by: tuple[Any, ...] = ("--by", "country,history_length")
    if task == "ranking":
        by = (*by, "--cutoffs", "5,50")
    trained = succeeded(torchrun(2, EXAMPLE, *train, *by, "--report_dir", tmp_path / "report"))
    load = ("--load", "--save_dir", tmp_path / "dumps", *flags, *by)
    loaded = succeeded(torchrun(3, EXAMPLE, *load))

    def tables(output: str) -> list[list[str]]:
        lines = output[output.index(" by country") :].splitlines()
        return [line.split("|")[1:4] for line in lines if line.startswith("| ")]

    assert tables(trained) == tables(loaded)
    report = read_json(tmp_path / "report" / "metrics.json")
    assert {*report["segments"]} == {"country", "history_length"}
    for of_values in report["segments"].values():
        assert sum(each["cases"] for each in of_values.values()) == report["data"]["num_test"]
    if task == "ranking":
        test = report["test"]
        assert test["hr_at_5"] <= test["hr_at_10"] <= test["hr_at_50"]
        assert 0 < report["lists"]["coverage"] <= 1
        for output in (trained, loaded):
            headings = [line for line in output.splitlines() if line.startswith("| test ratings")]
            assert len(headings) == 3
            for cutoff in (5, 10, 50):
                assert all(f" HR@{cutoff} |" in each and f" NDCG@{cutoff} |" in each for each in headings)
        segments = [*report["segments"]["country"].values()]
        hits = sum(each["cases"] * each["hr_at_5"] for each in segments)
        assert hits == pytest.approx(report["data"]["num_test"] * test["hr_at_5"])
        lists = [line for line in (trained + loaded).splitlines() if "lists of 10 for each" in line]
        assert len({line.partition("]")[2] for line in lists}) == 1
        assert len(lists) == 2
    if task == "rating":
        squares = [each["cases"] * each["rmse"] ** 2 for each in report["segments"]["country"].values()]
        assert sum(squares) == pytest.approx(report["data"]["num_test"] * report["test"]["rmse"] ** 2)


def test_a_name_that_is_no_feature_is_refused_before_the_training(flags: list[str]) -> None:
    result = python(EXAMPLE, *flags, "--by", "country,colour")
    assert result.returncode == 2
    assert "--by colour is no feature with one value; give some of history_length, " in result.stderr
    assert "epoch 1" not in result.stdout
    with pytest.raises(UserError, match="--by cannot be used with --stream"):
        parse_args(["--stream", "--by", "country"])


def test_lengths_of_lists_that_cannot_be_are_refused_before_the_training(flags: list[str]) -> None:
    result = python(EXAMPLE, *flags, "--cutoffs", "5")
    assert result.returncode == 2
    assert "--cutoffs requires a task that ranks, got --task rating" in result.stderr
    assert "epoch 1" not in result.stdout
    with pytest.raises(UserError, match="--cutoffs must be between 1 and 1,000,000, got 0"):
        parse_args(["--task", "ranking", "--cutoffs", "5,0"])
