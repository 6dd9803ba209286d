"""The script of day two: a server follows a training, and in the end says what it was worth to continue."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.extras.drifting import DriftingWorld
from tests.support.launch import ROOT, python, succeeded

# Four Pythons import all by themselves.
pytestmark = pytest.mark.soak

ONLINE = ROOT / "example" / "online.py"


def test_a_server_follows_a_stream_and_a_training_that_continues_is_better_than_one_that_ended(
    tmp_path: Path,
) -> None:
    write_synthetic(tmp_path / "ratings", 12_000, seed=0, world=DriftingWorld())
    flags = ("--data_path", tmp_path / "ratings", "--save_dir", tmp_path / "dumps", "--window", "90d")
    output = succeeded(python(ONLINE, *flags))
    ages = re.findall(r"serving the model after window (\d+), (\S+) s old, .* progressive RMSE (\S+)", output)
    assert ages
    assert int(ages[-1][0]) == 12
    assert all(float(age) >= 0 for _, age, _ in ages)
    trained = re.findall(r"without training after window \d+, beside (\S+) with it:", output)
    others = re.findall(r"not trained on, predicted with RMSE (\S+)", output)
    assert len(trained) == 2
    assert len(others) >= 1
    assert float(trained[0]) < float(others[0])


def test_a_training_that_cannot_begin_ends_the_script_too(tmp_path: Path) -> None:
    ended = python(ONLINE, "--data_path", tmp_path, "--save_dir", tmp_path / "dumps")
    assert ended.returncode == 2
    assert "The training ended with status 2; see its output above." in ended.stderr


def test_a_single_window_gives_no_comparison(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "ratings", 1_000, seed=0, world=DriftingWorld())
    ended = python(ONLINE, "--data_path", tmp_path / "ratings", "--window", "9999d")
    assert ended.returncode == 2
    assert (
        "online.py requires at least two windows. Fix: give more ratings, or a smaller --window."
        in ended.stderr
    )


def test_a_server_follows_a_stream_of_a_topic_whose_schema_is_guessed(tmp_path: Path) -> None:
    from tests.support.kafka import MockKafka, as_json, ratings

    (tmp_path / "data").mkdir()
    with contextlib.closing(MockKafka()) as kafka:
        kafka.create("ratings", 2)
        kafka.send("ratings", as_json(ratings(3_000)), 2)
        flags = ("--data_path", tmp_path / "data", "--window", "3d")
        output = succeeded(python(ONLINE, *flags, "--stream", kafka.address("ratings")))
    assert "serving the model after window" in output
    assert len(re.findall(r"without training after window \d+, beside (\S+) with it:", output)) == 2
    assert "[timestamp]" in (tmp_path / "data" / "schema.toml").read_text()
