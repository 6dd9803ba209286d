"""The charts of the page: over epochs and over seconds, named for people, with round ticks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from recsuite.monitoring.charts import EPOCHS, MARGINS, SECONDS, charts, learning_charts, tick_texts, ticks
from recsuite.monitoring.runs import find_runs
from tests.support.reports import page, text_of, write_run

# Two epochs of 2 and 3 seconds.
TIMED: list[dict[str, Any]] = [
    {"epoch": 1, "validation": {"rmse": 0.9, "log_loss": 0.6}, "seconds": 2.0, "data_wait": 0.1},
    {"epoch": 2, "validation": {"rmse": 0.8, "log_loss": 0.5}, "seconds": 3.0, "data_wait": 0.2},
]


def captions(html: str) -> list[str]:
    return re.findall(r"<figcaption>(.*?)</figcaption>", html)


def test_every_number_of_an_epoch_has_a_chart_whatever_its_name(tmp_path: Path) -> None:
    epochs = [{"epoch": 1, "steps": 9, "validation": {"ndcg@10": 0.25}, "novelty": 3}]
    html = page(write_run(tmp_path / "a", epochs=epochs))
    assert captions(html) == ["validation ndcg@10 \N{UPWARDS ARROW}", "novelty"]


def test_a_learning_curve_stands_over_epochs_and_over_seconds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=TIMED)
    over_epochs, over_seconds = learning_charts(find_runs([tmp_path]))
    assert (over_epochs["title"], over_epochs["over"]) == ("validation RMSE \N{DOWNWARDS ARROW}", "epoch")
    assert over_seconds["over"] == "seconds of training"
    ((_, points),) = over_epochs["lines"]
    assert [(said, value) for _, _, said, value in points] == [("epoch 1", "0.9"), ("epoch 2", "0.8")]
    ((_, points),) = over_seconds["lines"]
    # The second epoch ends after both.
    assert [(said, value) for _, _, said, value in points] == [("2.0 s", "0.9"), ("5.0 s", "0.8")]
    html = page(tmp_path)
    assert "a, epoch 2: 0.8" in html
    assert "a, 5.0 s: 0.8" in html
    # Other metrics are drawn over seconds as well; speed is not.
    titles = [name.rstrip(" \N{UPWARDS ARROW}\N{DOWNWARDS ARROW}") for name in captions(html)]
    assert titles == [
        *["validation RMSE"] * 2,
        "validation log loss",
        "waiting for data",
        "validation log loss",
    ]


def test_a_resumed_run_counts_seconds_from_there(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=TIMED[1:])
    assert "a, 3.0 s: 0.8" in page(tmp_path)
    assert "The seconds of a resumed run begin where it was resumed." in page(tmp_path)
    write_run(tmp_path / "whole", epochs=TIMED)
    assert "resumed" not in page(tmp_path / "whole")


def test_epochs_that_were_not_timed_have_no_curve_over_seconds(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=[TIMED[0], {"epoch": 2, "validation": {"rmse": 0.8}}])
    (only,) = learning_charts(find_runs([tmp_path]))
    assert only["over"] == "epoch"


def test_shares_are_percent(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=TIMED)
    (chart,) = charts(find_runs([tmp_path]), EPOCHS, ["data_wait"])
    assert [text for _, text in chart["rows"]] == ["10 %", "12 %", "14 %", "16 %", "18 %", "20 %"]
    ((_, points),) = chart["lines"]
    assert [value for *_, value in points] == ["10.0 %", "20.0 %"]
    # The median epoch waited 15 %.
    assert "waiting for data a 2.25 s 25.0 % 6.75 s 75.0 % 0.00 s 0.0 % \N{EN DASH} 15.0 %" in text_of(
        page(tmp_path)
    )


def test_training_losses_of_different_tasks_share_no_axis(tmp_path: Path) -> None:
    epochs = [{"epoch": 1, "train_loss": 7.0, "data_wait": 0.1}]
    for name, main in (("a", "rmse"), ("b", "hr@10"), ("c", "rmse")):
        write_run(tmp_path / name, epochs=epochs, main_metric=main)
    losses = charts(find_runs([tmp_path]), EPOCHS, ["train_loss"])
    assert [[run.name for run, _ in chart["lines"]] for chart in losses] == [["a", "c"], ["b"]]
    (waits,) = charts(find_runs([tmp_path]), EPOCHS, ["data_wait"])
    assert len(waits["lines"]) == 3


def test_both_axes_are_named(tmp_path: Path) -> None:
    epochs = [{**epoch, "train_loss": 0.7, "ratings_per_second": 100} for epoch in TIMED]
    runs = find_runs([write_run(tmp_path / "a", epochs=epochs, events="ratings")])
    names = ["validation/log_loss", "train_loss", "ratings_per_second", "data_wait"]
    found = charts(runs, EPOCHS, names)
    units = ["log loss", "loss", "ratings per second", "share of the epoch"]
    assert [chart["unit"] for chart in found] == units
    html = page(tmp_path)
    axes = re.findall(r'class="axis"[^>]*>(.*?)<', html)
    assert len(axes) == 2 * html.count("<svg")
    assert {"epoch", "seconds of training", *units} == {*axes} - {"RMSE"}


def test_the_speed_of_runs_on_data_with_other_nouns_is_in_events(tmp_path: Path) -> None:
    epochs = [{**epoch, "ratings_per_second": 100} for epoch in TIMED]
    for name in ("clicks", "ratings"):
        write_run(tmp_path / name, epochs=epochs, events=name)
    (both,) = charts(find_runs([tmp_path]), EPOCHS, ["ratings_per_second"])
    (one,) = charts(find_runs([tmp_path / "clicks"]), EPOCHS, ["ratings_per_second"])
    assert (both["unit"], one["unit"]) == ("events per second", "clicks per second")


def test_the_name_of_an_axis_stands_clear_of_its_numbers(tmp_path: Path) -> None:
    narrow = [{"epoch": epoch, "validation": {"rmse": 0.84195 + epoch / 1e5}} for epoch in range(1, 9)]
    (chart, *_) = learning_charts(find_runs([write_run(tmp_path / "a", epochs=narrow)]))
    longest = max(len(text) for _, text in chart["rows"])
    assert longest == len("0.84195")
    # A digit of 13 pixels is 8.3 wide in a wide font; the name is written upwards, up to 18 from the left.
    assert MARGINS[0] - 6 - 8.3 * longest > 18


def test_runs_that_a_profiler_slowed_are_hollow_where_time_counts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=TIMED, config={"profile": 20})
    write_run(tmp_path / "b", epochs=TIMED, config={"profile": 0})
    html = page(tmp_path)
    # Over seconds: RMSE and log loss; over epochs: the share that waited.
    assert html.count('<g class="c0 hollow">') == 3
    assert html.count('<g class="c0">') == 2
    assert "c1 hollow" not in html
    assert "Hollow points: slowed by the profiler." in html
    assert "Hollow" not in page(tmp_path / "b")


def test_a_ninth_run_is_told_from_the_first_that_has_its_color(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(number)) for number in range(9)]
    html = page(*runs)
    assert html.count('<g class="c0">') == html.count('<g class="c0 again">') > 0


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.8123, 0.9111, ["0.80", "0.82", "0.84", "0.86", "0.88", "0.90", "0.92"]),
        (3.0, 3.0, ["3", "4"]),
        (0.0, 0.0, ["0.0", "0.2"]),
        (-1.0, 1.0, ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
        # Both spans divided by three are no round number, and their logarithm is rounded up to that of one.
        (0.0, 0.3, ["0.0", "0.1", "0.2", "0.3"]),
        (0.1195, 0.4195, ["0.1", "0.2", "0.3", "0.4", "0.5"]),
        (5_000, 110_000, ["0", "20k", "40k", "60k", "80k", "100k", "120k"]),
        (20_000, 110_000, ["20k", "40k", "60k", "80k", "100k", "120k"]),
    ],
)
def test_ticks_are_round_and_reach_around_the_values(low: float, high: float, shown: list[str]) -> None:
    assert tick_texts(ticks(low, high)) == shown


def test_epochs_are_whole_on_their_axis() -> None:
    assert ticks(1, 2, whole=True) == [1, 2]
    assert ticks(1, 1, whole=True) == [1, 2]
    assert tick_texts(ticks(1, 8, whole=True)) == ["0", "2", "4", "6", "8"]


def test_seconds_begin_at_zero(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=TIMED)
    (chart,) = charts(find_runs([tmp_path]), SECONDS, ["validation/rmse"])
    assert [text for _, text in chart["columns"]] == ["0", "1", "2", "3", "4", "5"]
