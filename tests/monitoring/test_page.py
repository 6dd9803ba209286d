"""The page of `./run.sh report`: it shows every figure of every run, as text, and loads nothing."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from recsuite.errors import UserError
from recsuite.monitoring.charts import tick_texts, ticks
from recsuite.monitoring.page import draw, main
from recsuite.monitoring.runs import find_runs
from tests.support.launch import python

REPORT: dict[str, Any] = {
    "date": "2026-11-21T10:00:00+00:00",
    "config": {
        "task": "ranking",
        "lr": 0.04,
        "epochs": 2,
        "mlp_dims": [64, 32],
        "split": "time",
        "report_dir": "here",
    },
    "versions": {"torch": "2.13.0"},
    "world_size": 2,
    "device": "cpu",
    "threads_per_rank": 1,
    "data": {"source": "/somewhere/ml-1m", "num_test": 20_000},
    "plan": ["table  rows", "movie  1,234"],
    "baselines": {"biases": {"rmse": 0.9, "hr@10": None}, "oracle": {"rmse": 0.5, "hr@10": 0.9}},
    "epochs": [
        {"epoch": 1, "train_loss": 0.95, "validation": {"rmse": 0.9111, "hr@10": 0.1}, "data_wait": 0.011},
        {"epoch": 2, "train_loss": 0.85, "validation": {"rmse": 0.8222, "hr@10": None}, "data_wait": 0.02},
    ],
    "test": {"rmse": 0.8123, "hr@10": 0.2345},
    "time": {"imports": 2.25, "steps": 6.75, "other": 0.0},
}


def write_run(folder: Path, **changes: Any) -> Path:
    """A run of which some things are different; None leaves them out."""
    report = {**copy.deepcopy(REPORT), **changes}
    folder.mkdir(parents=True)
    found = {name: value for name, value in report.items() if value is not None}
    (folder / "metrics.json").write_text(json.dumps(found))
    return folder


def page(*folders: Path) -> str:
    return draw(find_runs(folders))


def text_of(html: str) -> str:
    """What a reader sees, without what is inside the head."""
    return " ".join(re.sub(r"<[^>]*>", " ", html[html.index("<body>") :]).split())


def test_the_page_holds_the_figures_of_every_run(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    write_run(tmp_path / "second", test={"rmse": 0.7777, "hr@10": None}, plan=["another plan"])
    text = text_of(page(tmp_path))
    for shown in ("first", "second", "0.8123", "0.2345", "0.7777", "0.9000", "another plan", "torch 2.13.0"):
        assert shown in text, shown
    assert "steps 6.75 s, 75.0 %" in text
    assert "2026-11-21 10:00, ranking, 2 ranks on cpu, 1 thread each, 2 epochs" in text
    assert "first, epoch 2: 0.8222" in text
    assert "ml-1m, --split time, 20,000 ratings in the test" in text


def test_every_number_of_an_epoch_has_a_chart_whatever_its_name(tmp_path: Path) -> None:
    epochs = [{"epoch": 1, "steps": 9, "validation": {"ndcg@10": 0.25}, "novelty": 3}]
    html = page(write_run(tmp_path / "a", epochs=epochs))
    assert re.findall(r"<figcaption>(.*?)</figcaption>", html) == ["validation ndcg@10", "novelty"]


def test_the_best_of_runs_and_baselines_is_marked_by_the_direction_of_the_metric(tmp_path: Path) -> None:
    runs = {"a": {"rmse": 0.7, "hr@10": 0.2}, "b": {"rmse": 0.8, "hr@10": 0.3}, "c": {"rmse": 0.95}}
    for name, test in runs.items():
        write_run(tmp_path / name, test={"hr@10": None, **test})
    # The oracle has better ones, but it is a bound that no model can beat.
    assert re.findall(r'score best">([\d.]+)<', page(tmp_path)) == ["0.7000", "0.3000"]


def test_runs_on_different_tests_are_not_compared(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", data={"source": "ml-10m", "num_test": 7}, test={"rmse": 0.99})
    html = page(tmp_path)
    assert html.count('score best">0.8123') == 1
    assert "ml-10m, --split time, 7 ratings in the test" in html


def test_only_flags_that_differ_are_said_to_differ(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", config={**REPORT["config"], "lr": 0.5, "report_dir": "there"})
    html = page(tmp_path)
    differs = text_of("<body>" + html[html.index("What differs") : html.index("<h2>Each run")])
    assert differs == "What differs between the runs flag a b --lr 0.04 0.5"
    assert "What differs" not in page(tmp_path / "a")


def test_a_ninth_run_is_told_from_the_first_that_has_its_color(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(number)) for number in range(9)]
    html = page(*runs)
    assert html.count('<g class="c0">') == html.count('<g class="c0 again">') > 0


def test_what_a_report_says_is_text_and_never_markup(tmp_path: Path) -> None:
    hostile = "</td><script>alert('x')</script>"
    write_run(tmp_path / "<b>bold", config={"lr": hostile, hostile: 1}, plan=[hostile], date=hostile)
    write_run(
        tmp_path / "b", baselines={hostile: {hostile: 0.5}}, versions={hostile: hostile}, device=hostile
    )
    html = page(tmp_path)
    assert "<script" not in html
    assert "<b>" not in html
    assert html.count("&lt;script&gt;") >= 8


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    html = page(write_run(tmp_path / "a"))
    assert not re.search(r"https?:|//|src=|href=|url\(|@import", html)
    assert "default-src 'none'" in html


def test_a_run_without_epochs_or_metrics_has_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "a", epochs=[], test={}, baselines={}, time={"other": 0.0})
    assert "No run has an epoch." in page(tmp_path)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('{"date": "2026', "is damaged: it is not JSON (Unterminated string"),
        ("[]", "is not the report of a training: it is not a mapping"),
        (json.dumps({**REPORT, "plan": 3}), "its 'plan' is 3"),
        (json.dumps({**REPORT, "time": None}), "its 'time' is None"),
        (json.dumps({**REPORT, "test": {"rmse": "good"}}), "its 'test' is {'rmse': 'good'}"),
        (json.dumps({**REPORT, "test": {"rmse": float("nan")}}), "its 'test' is {'rmse': nan}"),
        (json.dumps({**REPORT, "baselines": {"biases": 3}}), "its 'biases' is 3"),
        (json.dumps({**REPORT, "data": {"num_test": "many"}}), "its number of test ratings is 'many'"),
        (json.dumps({**REPORT, "epochs": [{"seconds": 1}]}), "an epoch of it is {'seconds': 1}"),
        (json.dumps({**REPORT, "epochs": [{"epoch": 1, "x": float("inf")}]}), "its epoch 1 has a number"),
        *(
            (json.dumps({key: REPORT[key] for key in REPORT if key != name}), f"it has no {name!r}")
            for name in ("config", "epochs", "baselines", "versions")
        ),
    ],
)
def test_a_report_that_is_none_is_one_sentence(tmp_path: Path, text: str, fault: str) -> None:
    (tmp_path / "metrics.json").write_text(text)
    with pytest.raises(UserError) as refusal:
        find_runs([tmp_path])
    assert str(refusal.value).startswith(f"{tmp_path}/metrics.json is ")
    assert fault in str(refusal.value)
    assert str(refusal.value).endswith("; leave its run out.")
    assert "\n" not in str(refusal.value)


def test_the_command_writes_the_page_in_one_rename_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b")
    output = tmp_path / "page.html"
    output.write_text("old")
    held = output.open()
    main([str(tmp_path / "runs"), str(tmp_path / "runs" / "a"), "--output", str(output)])
    assert capsys.readouterr().out == f"{output} shows 2 runs\n"
    assert output.read_text().startswith("<!DOCTYPE html>")
    # Whoever reads the old one reads it to its end.
    assert held.read() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "runs"]


@pytest.mark.parametrize("output", ["runs", "missing/page.html", "file/page.html"])
def test_an_output_that_cannot_be_written_is_one_sentence(tmp_path: Path, output: str) -> None:
    write_run(tmp_path / "runs")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"^--output {tmp_path}/{output} cannot be written"):
        main([str(tmp_path / "runs"), "--output", str(tmp_path / output)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]


def test_a_mistake_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    for arguments, sentence in (
        ([tmp_path], f"report: {tmp_path} holds no metrics.json; give folders"),
        ([tmp_path / "gone"], f"report: {tmp_path}/gone is not a folder; give folders"),
        ([], "report: The following arguments are required: RUN; see --help.\n"),
    ):
        result = python("-m", "recsuite.monitoring.page", *arguments)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr.startswith(sentence)
        assert result.stderr.count("\n") == 1


def test_neither_torch_nor_numpy_is_needed_to_draw(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    code = (
        "import sys; from recsuite.monitoring import page;"
        "page.main([sys.argv[1], '--output', sys.argv[1] + '/page.html']);"
        "sys.exit(len({'torch', 'numpy', 'matplotlib'} & {*sys.modules}))"
    )
    assert python("-c", code, tmp_path).returncode == 0


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
        (20_000, 110_000, ["20k", "40k", "60k", "80k", "100k", "120k"]),
    ],
)
def test_ticks_are_round_and_reach_around_the_values(low: float, high: float, shown: list[str]) -> None:
    assert tick_texts(ticks(low, high)) == shown


def test_epochs_are_whole_on_their_axis() -> None:
    assert ticks(1, 2, whole=True) == [1, 2]
    assert ticks(1, 1, whole=True) == [1, 2]
    assert tick_texts(ticks(1, 8, whole=True)) == ["0", "2", "4", "6", "8"]
