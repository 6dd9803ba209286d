"""The table of `./run.sh report`: runs side by side, by validation, and the flags that differ."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.sections import ModelConfig
from recsuite.errors import UserError
from recsuite.extras.reports.compare import find_runs, lower_is_better, main
from recsuite.models.tasks import TASKS
from tests.support.launch import python

REPORT: dict[str, Any] = {
    "config": {"task": "rating", "lr": 0.04, "mlp_dims": [64, 32], "split": "time", "report_dir": "here"},
    "data": {"source": "/somewhere/ml-1m", "num_test": 20_000},
    "events": "ratings",
    "metrics": {"rmse": "RMSE", "mae": "MAE"},
    "main_metric": "rmse",
    "baselines": {"biases": {"rmse": 0.9, "mae": None}, "oracle": {"rmse": 0.5, "mae": 0.4}},
    "epochs": [{"epoch": 1, "validation": {"rmse": 0.9111}}, {"epoch": 2, "validation": {"rmse": 0.8222}}],
    "test": {"rmse": 0.8123},
    "test_epoch": 2,
    "intervals": {"test": {"rmse": [0.8, 0.82]}},
    "time": {"imports": 2.25, "steps": 6.75},
}


def write_run(folder: Path, **changes: Any) -> Path:
    """A run of which some things are different; None leaves them out."""
    report = {**copy.deepcopy(REPORT), **changes}
    folder.mkdir(parents=True, exist_ok=True)
    found = {name: value for name, value in report.items() if value is not None}
    (folder / "metrics.json").write_text(json.dumps(found))
    return folder


def validated(value: float | None) -> dict[str, Any]:
    return {"epochs": [{"epoch": 2, "validation": {"rmse": value}}]}


def shown(capsys: pytest.CaptureFixture[str], *folders: Path) -> list[list[str]]:
    """The cells of each line that is printed."""
    main([*map(str, folders)])
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()
    ]


def test_runs_stand_in_the_order_of_their_validation_with_the_test_its_interval_and_baselines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", **validated(0.8), test={"rmse": 0.6}, intervals=None)
    write_run(tmp_path / "b", **validated(0.7))
    # Null is a metric that is not defined; a run that was resumed after its best epoch does not hold that.
    write_run(tmp_path / "c", **validated(None))
    write_run(tmp_path / "d", **validated(0.1), test_epoch=4)
    (result,), title, _, heading, _, *rows = shown(capsys, tmp_path)
    assert result == "RMSE 0.8123, 9.7% below biases (b)"
    assert title == ["ml-1m, --split time, 20,000 ratings in the test"]
    assert heading == ["run", "validation RMSE", "test RMSE", "95 % interval", "seconds"]
    assert rows == [
        ["b", "0.7000", "0.8123", "0.8000 to 0.8200", "9.0"],
        ["a", "0.8000", "0.6000", "-", "9.0"],
        ["c", "-", "0.8123", "0.8000 to 0.8200", "9.0"],
        ["d", "-", "0.8123", "0.8000 to 0.8200", "9.0"],
        ["biases", "-", "0.9000", "-", "-"],
        ["oracle", "-", "0.5000", "-", "-"],
    ]


def test_a_score_is_told_in_times_of_the_best_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metric = "ndcg_at_10"
    baselines = {"a random order": {metric: 0.01}, "popularity": {metric: 0.025}, "oracle": {metric: 0.5}}
    write_run(
        tmp_path / "a",
        main_metric=metric,
        metrics={metric: "NDCG@10"},
        baselines=baselines,
        epochs=[],
        test={metric: 0.122},
    )
    (result,), *_ = shown(capsys, tmp_path)
    assert result == "NDCG@10 0.1220, 4.9 times popularity (a)"


def test_runs_on_different_tests_are_in_different_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    # Other features are no other test.
    write_run(tmp_path / "b", data={**REPORT["data"], "tables": {"user": 3}, "notes": ["of a feature"]})
    write_run(tmp_path / "c", data={"source": "ml-10m", "num_test": 7})
    write_run(tmp_path / "d", config={**REPORT["config"], "stream": True}, epochs=[])
    rows = shown(capsys, tmp_path)
    assert [row[0] for row in rows if len(row) > 1 and row[0] in "abcd"] == ["a", "b", "c", "d"]
    titles = [row for row in rows if len(row) == 1 and row[0].startswith("ml-")]
    assert titles.count(["ml-1m, --split time, 20,000 ratings in the test"]) == 1
    assert ["ml-1m, --stream"] in rows
    assert ["ml-10m, --split time, 7 ratings in the test"] in rows


def test_flags_that_differ_are_columns_but_for_those_of_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", config={**REPORT["config"], "lr": 0.5, "report_dir": "there"})
    rows = shown(capsys, tmp_path)
    assert rows[3][5:] == ["--lr"]
    assert [row[5:] for row in rows[5:7]] == [["0.04"], ["0.5"]]


def test_segments_of_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run, rmse in (("a", 0.7), ("b", 0.6)):
        segments = {"country": {"DE": {"cases": 12_000, "rmse": rmse}, "FR": {"cases": 8_000, "rmse": None}}}
        write_run(tmp_path / run, segments=segments, config={**REPORT["config"], "by": run})
    write_run(tmp_path / "c", segments={})
    rows = shown(capsys, tmp_path)
    assert rows[-4:][0] == ["test RMSE by country", "number", "a", "b"]
    assert rows[-2:] == [["DE", "12,000", "0.7000", "0.6000"], ["FR", "8,000", "-", "-"]]
    # What is reported is no difference between models.
    assert rows[3][5:] == []


def test_two_models_on_the_same_later_events_are_compared_on_the_same_users(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # Users differ much more than the models do: each user has errors that are smaller by 0.01.
    of_users = np.linspace(0.5, 1.1, 300)
    for run, gain in (("a", 0.0), ("b", 0.01)):
        report = {key: REPORT[key] for key in REPORT if key not in ("epochs", "test_epoch", "time")}
        (tmp_path / run).mkdir()
        (tmp_path / run / "test.json").write_text(json.dumps({**report, "test": {"rmse": 0.82 - gain}}))
        write_groups(tmp_path / run, 4 * np.square(of_users - gain), np.full(300, 4.0))
    # Of other cases, and without any.
    write_groups(write_run(tmp_path / "c", **validated(None)), np.full(301, 4.0), np.full(301, 4.0))
    write_run(tmp_path / "d", **validated(None))
    (_, _, _, heading, _, *rows) = shown(capsys, tmp_path)
    assert heading[4:] == ["better than a (95 %)", "seconds"]
    assert [row[:1] + row[2:3] + row[4:] for row in rows[:4]] == [
        ["a", "0.8200", "-", "-"],
        ["b", "0.8100", "0.0097 to 0.0098", "-"],
        ["c", "0.8123", "-", "9.0"],
        ["d", "0.8123", "-", "9.0"],
    ]


def write_groups(folder: Path, sums: np.ndarray, cases: np.ndarray) -> None:
    padded = [np.pad(values, (0, 512 - len(values))).tolist() for values in (sums, cases)]
    (folder / "groups.json").write_text(json.dumps({"test": padded, "segments": {}}))


def test_a_run_that_is_named_twice_is_one_run(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "runs" / "a")
    (tmp_path / "link").symlink_to(folder)
    assert len(find_runs([tmp_path / "runs", folder, tmp_path / "link"])) == 1


def test_control_characters_of_a_report_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", config={**REPORT["config"], "lr": "\x1b[31m"})
    write_run(tmp_path / "\x1b[32m", baselines={**REPORT["baselines"]})
    main([str(tmp_path)])
    assert "\x1b" not in capsys.readouterr().out


def test_the_table_orders_runs_like_the_tasks() -> None:
    for task in map(TASKS.__getitem__, ModelConfig.flag("task").choices):
        assert lower_is_better(task.main_metric) == task.lower_is_better


@pytest.mark.parametrize(
    "text",
    [
        '{"date": "2026',
        "[]",
        json.dumps({**REPORT, "test": {"rmse": "good"}}),
        json.dumps({**REPORT, "data": {}}),
        *(json.dumps({key: REPORT[key] for key in REPORT if key != name}) for name in ("config", "epochs")),
    ],
)
def test_an_invalid_report_gives_one_message(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(UserError) as refusal:
        main([str(tmp_path)])
    assert str(refusal.value).startswith(f"Cannot read {tmp_path}/metrics.json as the report of a training: ")
    assert str(refusal.value).endswith(". Fix: leave its run out.")
    assert "\n" not in str(refusal.value)


def test_folders_without_a_run_give_one_message_and_status_2(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gone is not a folder; give --report_dir folders of runs"):
        main([str(tmp_path / "gone")])
    result = python("-m", "recsuite.extras.reports.compare", tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"report: {tmp_path} holds no metrics.json or test.json; "
        "give --report_dir folders of runs, or folders that contain them.\n"
    )


def test_a_real_report_is_a_row(watched: tuple[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    main([str(watched[1])])
    output = capsys.readouterr().out
    assert "ratings in the test" in output
    assert f"| {watched[1].name} " in output
