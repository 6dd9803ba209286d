"""How the page compares runs: by validation, on one scale of time, and by the flags that differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from recsuite.config.sections.model import ModelConfig
from recsuite.models.tasks.task import task_named
from recsuite.monitoring.runs import OLDER_METRICS, RunReport, find_runs, lower_is_better
from tests.support.reports import REPORT, page, text_of, write_run

DOWN, UP = "\N{DOWNWARDS ARROW}", "\N{UPWARDS ARROW}"
STAR = "\N{BLACK STAR}"


def validated(*validations: Mapping[str, float | None]) -> list[dict[str, Any]]:
    """Epochs with these metrics on the validation."""
    return [{"epoch": place, "validation": found} for place, found in enumerate(validations, start=1)]


def quality(html: str) -> str:
    """What a reader sees of the tables of quality."""
    part = html[html.index("<h2>Quality") : html.index("<h2>Flags")]
    return text_of("<body>" + part.replace("&#9733;", STAR))


def bold(html: str) -> list[str]:
    return re.findall(r'class="best">([\d.]+)<', html)


def test_the_star_stands_at_the_best_validation_and_not_at_the_best_test(tmp_path: Path) -> None:
    bounds = {"biases": {"rmse": 0.9}, "oracle": {"rmse": 0.5}}
    write_run(tmp_path / "a", epochs=validated({"rmse": 0.80}), test={"rmse": 0.60}, baselines=bounds)
    write_run(tmp_path / "b", epochs=validated({"rmse": 0.70}), test={"rmse": 0.90}, baselines=bounds)
    html = page(tmp_path)
    # The best one comes first, and the oracle's 0.5 and the best test are of no account.
    assert f"b {STAR} 0.7000 0.9000 a 0.8000 0.6000 biases 0.9000 oracle, a bound 0.5000" in quality(html)
    assert bold(html) == ["0.7000"]
    assert f"{STAR} best validation RMSE" in quality(html)


def test_each_metric_has_a_direction_an_arrow_and_a_name_for_people(tmp_path: Path) -> None:
    first, second = {"log_loss": 0.5, "auc": 0.7}, {"log_loss": 0.6, "auc": 0.8}
    for name, metrics in (("a", first), ("b", second)):
        write_run(
            tmp_path / name, epochs=validated(metrics), test=metrics, main_metric="log_loss", baselines={}
        )
    html = page(tmp_path)
    assert bold(html) == ["0.5000", "0.8000"]
    assert f"log loss {DOWN} validation test AUC {UP} validation test" in quality(html)
    assert "log_loss" not in html


def test_a_report_names_its_metrics_and_what_it_was_trained_on(tmp_path: Path) -> None:
    new = {"metrics": {"hr@10": "hits"}, "main_metric": "hr@10", "events": "clicks"}
    write_run(tmp_path / "a", epochs=validated({"rmse": 0.7, "hr@10": 0.1}), **new)
    write_run(tmp_path / "b", epochs=validated({"rmse": 0.8, "hr@10": 0.2}), **new)
    shown = quality(page(tmp_path))
    assert f"RMSE {DOWN} validation test hits {UP} validation test b {STAR} 0.8000" in shown
    assert "20,000 clicks in the test" in shown


def test_validation_is_that_of_the_epoch_whose_weights_were_tested(tmp_path: Path) -> None:
    epochs = validated({"rmse": 0.9}, {"rmse": 0.7}, {"rmse": 0.8})

    def read(name: str, **changes: Any) -> RunReport:
        return find_runs([write_run(tmp_path / name, epochs=epochs, **changes)])[0]

    assert read("best", test_epoch=2).validation == {"rmse": 0.7}
    assert read("older").validation == {"rmse": 0.8}
    # A run that was resumed after its best epoch says nothing of that.
    assert read("resumed", test_epoch=4).validation == {}


@pytest.mark.parametrize("validation", [{}, {"rmse": None}])
def test_a_run_without_validation_comes_last_and_has_no_star(
    tmp_path: Path, validation: dict[str, float | None]
) -> None:
    write_run(tmp_path / "a", epochs=validated(validation), test={"rmse": 0.1})
    write_run(tmp_path / "b", epochs=validated({"rmse": 0.9}), test={"rmse": 0.9})
    shown = quality(page(tmp_path))
    assert shown.index(" b ") < shown.index(" a ")
    # Of one value nothing can be said to be the best.
    assert STAR not in shown


def test_runs_on_different_tests_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", data={"source": "ml-10m", "num_test": 7}, epochs=validated({"rmse": 0.1}))
    html = page(tmp_path)
    # The first two are as good as each other, and the third has no rival.
    assert bold(html) == ["0.8222", "0.8222"]
    assert "ml-10m, --split time, 7 events in the test" in html


def test_the_page_judges_as_the_tasks_do() -> None:
    labels = {
        name: label
        for task in [task_named(name) for name in ModelConfig.CHOICES["task"]]
        for name, label in task.metrics.items()
    }
    assert OLDER_METRICS.items() <= labels.items()
    for task in [task_named(name) for name in ModelConfig.CHOICES["task"]]:
        assert lower_is_better(task.main_metric) == task.lower_is_better
        older = RunReport("a", 0, {**REPORT, "test": dict.fromkeys(task.metrics)})
        assert older.main_metric == task.main_metric


def test_flags_that_differ_come_first_and_the_others_are_folded(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", config={**REPORT["config"], "lr": 0.5, "report_dir": "there"})
    html = page(tmp_path)
    part = html[html.index("<h2>Flags") : html.index("<h2>Curves")]
    open_part, folded = part.split("<details>")
    assert text_of("<body>" + open_part) == "Flags --lr a 0.04 b 0.5"
    assert text_of("<body>" + folded) == (
        "The other 5 flags --task ranking --epochs 2 --mlp_dims 64,32 --split time --report_dir here, there"
    )


def test_the_flags_of_one_run_are_all_folded(tmp_path: Path) -> None:
    html = page(write_run(tmp_path / "a"))
    part = html[html.index("<h2>Flags") : html.index("<h2>Curves")]
    assert text_of("<body>" + part).startswith("Flags 6 flags --task ranking")


def test_runs_with_equal_flags_are_said_to_have_them(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    assert "Flags None differs. 6 flags --task" in text_of(page(tmp_path))


def test_the_bars_of_time_have_one_scale(tmp_path: Path) -> None:
    write_run(tmp_path / "a", time={"imports": 2.0, "steps": 6.0})
    write_run(tmp_path / "b", time={"imports": 1.0, "steps": 1.0})
    html = page(tmp_path)
    bars = re.findall(r'<div class="bar parts">(.*?)</div>', html, flags=re.DOTALL)
    # Of the 8 seconds of the longer run.
    widths = [re.findall(r"width: ([\d.]+)%", bar) for bar in bars]
    assert widths == [["25.000", "75.000"], ["12.500", "12.500"]]
    # Shares are of the run's own time.
    assert "a 2.00 s 25.0 % 6.00 s 75.0 %" in text_of(html)
    assert "b 1.00 s 50.0 % 1.00 s 50.0 %" in text_of(html)


def test_the_speed_of_a_profiled_run_is_marked(tmp_path: Path) -> None:
    epochs = [{"epoch": 1, "ratings_per_second": 1000.0}]
    write_run(tmp_path / "a", epochs=epochs, config={"profile": 20}, events="ratings")
    write_run(tmp_path / "b", epochs=epochs, config={"profile": 0})
    text = text_of(page(tmp_path))
    assert "1,000 ratings/s profiled" in text
    assert text.count("1,000 events/s") == 1
    assert "1,000 events/s profiled" not in text
    assert "profiled" not in page(tmp_path / "b")


def test_a_real_report_says_what_the_page_needs(watched: tuple[str, Path]) -> None:
    (run,) = find_runs([watched[1]])
    assert (run.main_metric, run.events) == ("rmse", "ratings")
    assert set(run.validation) == set(run.test)
    assert len(run.clock) == 2
    text = text_of(page(watched[1]))
    assert f"RMSE {DOWN} validation test MAE {DOWN} validation test AUC {UP}" in text
    assert "ratings/s profiled" in text
