"""The benchmark of events of several types, in its short form, and the shop that it draws."""

from __future__ import annotations

from pathlib import Path

import pandas

from tests.support.benchmarks import benchmark, measured


def test_the_ways_are_trained_on_the_same_purchases(tmp_path: Path) -> None:
    found, output = measured("event_types", tmp_path, "--seeds", 1, "--users", 150, "--ranks", 1)
    (shop,) = found["shops"]
    assert shop["ndcg"].keys() == benchmark("event_types").WAYS.keys()
    assert all(0 <= value <= 1 for value in shop["ndcg"].values())
    # What knows more is better: the oracles say what there is to find.
    oracle = shop["oracle"]
    assert oracle["all"] > oracle["without_context"] > oracle["nothing"]
    assert oracle["all"] > oracle["excluded"]
    assert output.count("share of the planted difference") == 2


def test_a_week_is_the_same_for_any_number_of_weeks(tmp_path: Path) -> None:
    write = benchmark("shop_weeks").write_weeks
    write(tmp_path / "two", 2, num_users=60, num_items=40)
    write(tmp_path / "bad", 2, is_bad=True, num_users=60, num_items=40)
    write(tmp_path / "one", 1, num_users=60, num_items=40)
    first = (tmp_path / "two" / "week-1.parquet").read_bytes()
    assert first == (tmp_path / "one" / "week-1.parquet").read_bytes()
    assert first == (tmp_path / "bad" / "week-1.parquet").read_bytes()
    good, bad = (pandas.read_parquet(tmp_path / name / "week-2.parquet") for name in ("two", "bad"))
    # The same events, of other users.
    assert good["product_id"].equals(bad["product_id"])
    assert not good["user_id"].equals(bad["user_id"])
    items = pandas.read_parquet(tmp_path / "two" / "items.parquet").set_index("product_id")
    week = pandas.read_parquet(tmp_path / "one" / "week-1.parquet")
    # New items come later.
    assert week["product_id"].nunique() < len(items) * 0.6
