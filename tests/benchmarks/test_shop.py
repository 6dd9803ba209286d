"""The shop that does not exist: its files, its planted effects, and that its oracles are what they say."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pandas as pd
import pytest

from tests.support.benchmarks import benchmark
from tests.support.launch import ROOT, python, read_json, run_command, succeeded

NUM_EVENTS = 20_000
SCRIPT = ROOT / "benchmarks" / "shop.py"
READERS = ((pd.read_csv, "items.csv.gz"), (pd.read_parquet, "items.parquet"))


@pytest.fixture(scope="module")
def shop() -> Any:
    return benchmark("shop")


@pytest.fixture(scope="module")
def drawn(shop: Any) -> dict[str, Any]:
    """A shop for each kind of label."""
    return {label: shop.draw_shop(NUM_EVENTS, 0, label) for label in shop.LABELS}


def test_the_files_match_the_docstring(tmp_path: Path) -> None:
    printed = succeeded(python(SCRIPT, tmp_path / "shop", "--events", 5_000))
    events = pd.read_parquet(tmp_path / "shop" / "events.parquet")
    items = pd.read_parquet(tmp_path / "shop" / "items.parquet")
    assert [*events] == ["user_id", "product_id", "timestamp", "country", "device", "stars", "referrer"]
    assert [*items] == ["product_id", "name", "price", "categories"]
    assert len(events) == 5_000
    assert {UUID(text).version for text in events["user_id"]} == {4}
    assert events["product_id"].isin(items["product_id"]).all()
    assert items["product_id"].is_unique
    assert set(events["stars"]) <= {1, 2, 3, 4, 5}
    assert events["referrer"].nunique() > 500
    times = pd.to_datetime(events["timestamp"], utc=True)
    assert times.is_monotonic_increasing
    assert times.max() - times.min() > pd.Timedelta(days=40)
    assert events["timestamp"].str.contains(r"T\d\d:\d\d:\d\d[+-]\d\d:\d\d$").all()
    assert 0.05 < items["price"].isna().mean() < 0.2
    assert items["price"].mean() > 1.2 * items["price"].median()
    assert items["categories"].map(len).max() > 1
    assert read_json(tmp_path / "shop" / "oracle.json")["metric"] in printed


@pytest.mark.parametrize(("label", "columns"), [("yes_no", {"bought"}), ("clicks", set())])
def test_csv_holds_the_same_events_and_the_requested_label(
    label: str, columns: set[str], shop: Any, tmp_path: Path
) -> None:
    for file_format in shop.FORMATS:
        shop.write_shop(tmp_path, 1_000, 0, label, file_format)
    events = pd.read_csv(tmp_path / "events.csv.gz", keep_default_na=False)
    pd.testing.assert_frame_equal(events, pd.read_parquet(tmp_path / "events.parquet"))
    assert {"stars", "bought"} & {*events} == columns
    items, same = (read(tmp_path / name) for read, name in READERS)
    assert items["categories"].str.split("|").tolist() == [list(row) for row in same["categories"]]
    assert items["price"].equals(same["price"])


def test_the_same_seed_gives_the_same_bytes_and_another_seed_different_bytes(
    shop: Any, tmp_path: Path
) -> None:
    contents = []
    for number, seed in enumerate((0, 0, 1)):
        shop.write_shop(tmp_path / str(number), 1_000, seed, "stars", "csv.gz")
        contents.append((tmp_path / str(number) / "events.csv.gz").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_too_few_events_are_refused_with_one_message(tmp_path: Path) -> None:
    result = run_command([sys.executable, str(SCRIPT), str(tmp_path / "shop"), "--events", "999"])
    assert result.returncode == 2
    assert "--events must be at least 1,000, got 999" in result.stderr
    assert not (tmp_path / "shop").exists()


def test_known_means_of_the_effects_are_those_of_the_labels(drawn: dict[str, Any], shop: Any) -> None:
    it = drawn["stars"]
    for place, (name, (share, effect)) in enumerate(shop.DEVICES.items()):
        has = it.moments.device == place
        assert has.mean() == pytest.approx(share, abs=0.02), name
        # Clipping takes a little of every effect.
        above = it.label[has].mean() - it.label.mean()
        mean_effect = sum(share * effect for share, effect in shop.DEVICES.values())
        assert above == pytest.approx(effect - mean_effect, abs=0.08), name
    is_weekend = pd.to_datetime(it.moments.time, unit="s").day_of_week >= 5
    assert 0.1 < it.label[is_weekend].mean() - it.label[~is_weekend].mean() < 0.35


def test_the_effect_of_a_price_depends_on_the_country_only(drawn: dict[str, Any], shop: Any) -> None:
    it = drawn["stars"]
    country, price = it.world.users.country[it.moments.user], np.log(it.world.items.price[it.item])
    slopes = {}
    for place, name in enumerate(shop.COUNTRIES):
        has = (country == place) & ~np.isnan(price)
        slopes[name] = np.polyfit(price[has], it.label[has], 1)[0]
    for name, (_, _, effect) in shop.COUNTRIES.items():
        assert np.sign(slopes[name]) == np.sign(effect) or abs(slopes[name]) < 0.2, name
    # Over all users a price means next to nothing, so that a bias of the item does not tell it.
    known = ~np.isnan(price)
    assert abs(np.polyfit(price[known], it.label[known], 1)[0]) < 0.15


def test_the_oracle_is_calibrated_at_every_probability(drawn: dict[str, Any], shop: Any) -> None:
    it = drawn["yes_no"]
    score = shop.total(it.world.effects(it.moments, it.item).values())
    chance = shop.chance_above(score, shop.LIKED_SCORE, shop.NOISE_STD)
    for part in np.array_split(np.argsort(chance), 10):
        assert it.label[part].mean() == pytest.approx(chance[part].mean(), abs=0.05)


def test_expected_stars_are_the_mean_of_drawn_ones(shop: Any) -> None:
    noise = shop.NOISE_STD * np.random.default_rng(0).standard_normal(200_000)
    scores = np.array([-1.0, 1.25, 3.5, 4.75, 7.0])
    drawn = [np.rint(np.clip(score + noise, 1, 5)).mean() for score in scores]
    assert shop.expected_stars(scores, shop.NOISE_STD) == pytest.approx(drawn, abs=0.01)


@pytest.mark.parametrize("label", ["stars", "yes_no"])
def test_without_numbers_and_without_event_features_a_clear_margin_is_lost(
    label: str, drawn: dict[str, Any], shop: Any
) -> None:
    oracle = shop.oracle_of(drawn[label], label)
    for name in ("without_numbers", "without_events"):
        assert oracle["all"] + 0.08 < oracle[name] < oracle["without_both"] - 0.05
    assert oracle["without_both"] < oracle["nothing"] - 0.04


def test_clicks_follow_taste_price_and_hour_and_not_popularity_alone(
    drawn: dict[str, Any], shop: Any
) -> None:
    oracle = shop.oracle_of(drawn["clicks"], "clicks")
    assert oracle["all"] > 1.1 * oracle["without_events"] > 1.1 * 1.3 * oracle["without_numbers"]
    assert oracle["without_numbers"] > 1.1 * oracle["nothing"] > 0
    moments, item = drawn["clicks"].moments, drawn["clicks"].item
    pairs = pd.DataFrame({"user": moments.user, "item": item})
    assert pairs.duplicated().mean() > 0.05


def test_popularity_of_clicks_is_of_first_ones_and_excludes_what_a_user_had(
    drawn: dict[str, Any], shop: Any
) -> None:
    """Apply the rule click by click. A training has the same figure, see `scripts/test_your_data.py`."""
    it = drawn["clicks"]
    pairs = list(dict.fromkeys(zip(it.moments.user.tolist(), it.item.tolist(), strict=True)))
    known, cases = np.split(np.array(pairs), [len(pairs) - round(len(pairs) * shop.TEST_SHARE)])
    clicks = np.bincount(known[:, 1], minlength=len(it.world.items.price))
    gains = []
    for user, item in cases:
        others = clicks.copy()
        others[[item, *known[known[:, 0] == user, 1]]] = -1
        rank = 1 + int((others >= clicks[item]).sum())
        gains.append(1 / np.log2(1 + rank) if rank <= 10 else 0)
    assert shop.oracle_of(it, "clicks")["nothing"] == pytest.approx(np.mean(gains), abs=1e-6)


def test_clicks_are_drawn_by_the_chances_that_the_oracle_ranks_by(drawn: dict[str, Any], shop: Any) -> None:
    it = drawn["clicks"]
    some = slice(0, 2_000)
    chances = np.exp(it.world.choices(it.moments.part(some)))
    chances /= chances.sum(axis=1, keepdims=True)
    # How often each category is clicked, beside how often it is to be expected.
    expected = (chances @ it.world.items.mixture).mean(axis=0)
    assert it.world.items.mixture[it.item[some]].mean(axis=0) == pytest.approx(expected, abs=0.03)
