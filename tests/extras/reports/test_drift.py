"""Drift of the newest events: known answers, and a warning for what is far alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.preparation.cache import open_columns
from recsuite.extras.reports.drift import drift_of
from recsuite.extras.retrain import drift_lines

NUMBER = 5_000


def test_drift_is_the_distance_of_the_shares(tmp_path: Path) -> None:
    draw, is_test = np.random.default_rng(0), np.arange(NUMBER) >= NUMBER * 4 // 5
    # A third of the test is of new users; the device changes for half of the events, the country for none.
    user = np.where(
        is_test & (draw.random(NUMBER) < 1 / 3), draw.integers(50, 60, NUMBER), draw.integers(0, 50, NUMBER)
    )
    frame = pandas.DataFrame(
        {
            "user": user,
            "item": draw.integers(0, 200, NUMBER),
            "rating": np.where(is_test, 4.0, 3.0),
            "device": np.where(is_test & (draw.random(NUMBER) < 0.5), "tv", "phone"),
            "country": draw.choice(["DE", "FR"], NUMBER),
            "timestamp": 1_700_000_000 + 60 * np.arange(NUMBER),
        }
    )
    frame.to_parquet(tmp_path / "events.parquet")
    features = "".join(
        f'[features.{name}]\nof = "event"\ncolumn = "{name}"\nkind = "category"\n'
        for name in ("device", "country")
    )
    label = '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 1.0\nhighest = 5.0\n'
    ids = '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
    times = '[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n'
    (tmp_path / "schema.toml").write_text(ids + label + times + features)
    flags = ["--data_path", str(tmp_path), "--cache_dir", str(tmp_path / "c"), "--duplicates", "keep"]
    drift = drift_of(open_columns(parse_args(flags)))
    assert drift["user"] == {"new": pytest.approx(1 / 3, abs=0.05)}
    assert drift["item"] == {"new": 0.0}
    assert drift["country"]["distance"] < 0.05
    # A new value: it has the unknown row, as a missing one.
    assert drift["device"]["new"] == pytest.approx(0.5, abs=0.05)
    assert drift["device"]["distance"] == pytest.approx(0.5, abs=0.05)
    assert drift["mean rating"] == {"training": 3.0, "test": 4.0}
    *table, warning = drift_lines(drift)
    assert len(table) == 2 + len(drift)
    assert warning == "warning: user, device: the newest events differ much from the training"
    assert drift_lines({"country": drift["country"]})[-1].startswith("| country")


def test_the_distance_without_drift_is_that_of_chance(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    columns = {
        name: draw.integers(0, high, NUMBER) for name, high in (("user", 20), ("item", 30), ("city", 40))
    }
    frame = pandas.DataFrame(
        {**columns, "rating": draw.integers(1, 6, NUMBER), "timestamp": np.arange(NUMBER)}
    )
    frame.to_csv(tmp_path / "events.csv", index=False)
    schema = '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n[label]\nkind = "rating"\ncolumn = "rating"\n'
    more = (
        'lowest = 1.0\nhighest = 5.0\n[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n[features.city]\n'
    )
    (tmp_path / "schema.toml").write_text(f'{schema}{more}of = "event"\ncolumn = "city"\nkind = "category"\n')
    flags = ["--data_path", str(tmp_path), "--cache_dir", str(tmp_path / "c"), "--duplicates", "keep"]
    city = drift_of(open_columns(parse_args(flags)))["city"]
    assert city["distance"] == pytest.approx(city["by_chance"], rel=0.3)
