"""The benchmarks of a stream, in their short forms: all is measured; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.benchmarks import measured


@pytest.mark.soak
def test_the_served_model_knows_appended_users(tmp_path: Path) -> None:
    short = ("--ratings", 3_000, "--chunk", 128, "--chunks", 3, "--burst", 2, "--night", 2)
    found, printed = measured("online_serving", tmp_path, *short)
    assert len(found["seconds"]) == len(found["errors"]) == 3
    assert all(seconds > 0 for seconds in found["seconds"])
    assert found["events_per_second"] > 0
    first = found["errors"][0]
    # Before anything is appended the served model is the one that never learns again.
    assert first["served online"] == first["never trained again"]
    assert all(0.8 < error["retrained each night"] < 1.6 for error in found["errors"])
    assert "(99 of 100)" in printed


@pytest.mark.soak
def test_all_models_are_judged_by_the_same_ratings(tmp_path: Path) -> None:
    short = ("--sets", "drifting", "--ratings", 12_000)
    found, _ = measured("online_quality", tmp_path, *short)
    (only,) = found["sets"]
    # Spans of 5,120 ratings: the first of them is only learned.
    assert only["spans"] == 2
    assert only["ratings"] == {"all": 12_000, "judged": 12_000 - 5_120}
    assert [online["window"] for online in only["online"]] == ["256", "5120"]
    assert set(only["rmse"]) == {"retrained", "trained once", "biases"}
    errors = [*only["rmse"].values(), *(online["rmse"] for online in only["online"])]
    assert all(0.8 < error < 1.6 for error in errors)
    assert all(seconds > 0 for seconds in (only["cpu_seconds"], only["online"][0]["cpu_seconds"]))


@pytest.mark.soak
def test_a_topic_and_a_file_of_the_same_events_are_measured(tmp_path: Path) -> None:
    pytest.importorskip("confluent_kafka")
    found, printed = measured("kafka", tmp_path, "--events", 20_000, "--chunks", 2)
    assert len(found["throughput"]) == 2
    assert all(seconds > 0 for kind in found["throughput"].values() for seconds in kind.values())
    assert [len(seconds) for seconds in found["delays"].values()] == [2, 2]
    assert "events/s, brokers to columns" in printed


def test_the_costs_after_few_and_many_events_of_a_stream_are_measured(tmp_path: Path) -> None:
    found, printed = measured(
        "stream_cost", tmp_path, "--before", "512,1024", "--chunks", 2, "--lasting", "512,1024"
    )
    assert [(each["before"], len(each["delays"])) for each in found["after"]] == [(512, 2), (1_024, 2)]
    assert all(each["cpu_seconds"] > 0 and each["memory"] > 2**20 for each in found["after"])
    assert "CPU seconds, last over first" in printed
