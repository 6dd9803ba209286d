"""The page of `./run.sh report`: it shows every figure of every run, as text, and loads nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recsuite.errors import UserError
from recsuite.monitoring.page import main
from recsuite.monitoring.runs import find_runs
from tests.support.launch import python
from tests.support.reports import REPORT, page, text_of, write_run


def test_the_page_holds_the_figures_of_every_run(tmp_path: Path) -> None:
    write_run(tmp_path / "first")
    write_run(tmp_path / "second", test={"rmse": 0.7777, "hr@10": None}, plan=["another plan"])
    text = text_of(page(tmp_path))
    for shown in ("first", "second", "0.8123", "0.2345", "0.7777", "0.9000", "another plan", "torch 2.13.0"):
        assert shown in text, shown
    assert "first 2.25 s 25.0 % 6.75 s 75.0 % 0.00 s 0.0 %" in text
    assert "2026-11-21 10:00, ranking, 2 ranks on cpu, 1 thread each, 2 epochs" in text
    assert "first, epoch 2: 0.8222" in text
    assert "ml-1m, --split time, 20,000 events in the test" in text


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
        (json.dumps({**REPORT, "data": {"num_test": "many"}}), "its number of test events is 'many'"),
        (json.dumps({**REPORT, "epochs": [{"seconds": 1}]}), "an epoch of it is {'seconds': 1}"),
        (json.dumps({**REPORT, "epochs": [{"epoch": 1, "x": float("inf")}]}), "its epoch 1 has a number"),
        (json.dumps({**REPORT, "metrics": {"rmse": 3}}), "its name for 'rmse' is 3"),
        (json.dumps({**REPORT, "main_metric": None}), "its 'main_metric' is None"),
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
