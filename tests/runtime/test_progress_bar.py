"""Progress of long work: a line at least every interval, and none for short work."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens import synthetic
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.tables import formats
from recsuite.runtime.console import Stage, install_tag, remove_tag, showing_progress, stage
from tests.support.launch import PATIENCE


def test_a_line_has_amount_rate_and_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    work = Stage("drawing", 20_000_000, "ratings", done=1_000_000)
    now[0] = 110.0
    assert str(work) == "drawing: 10 s so far"
    work.reached(5_000_000)
    assert str(work) == ("drawing: 5,000,000 of 20,000,000 ratings, 400,000 ratings/s, about 38 s left")
    now[0] = 200.0
    assert str(work).endswith("40,000 ratings/s, about 6 min left")


def printed(capsys: pytest.CaptureFixture[str], count: int) -> list[str]:
    """The lines that appear until there are this many, which take a busy machine longer."""
    lines: list[str] = []
    deadline = time.monotonic() + PATIENCE
    while len(lines) < count and time.monotonic() < deadline:
        time.sleep(0.05)
        lines += capsys.readouterr().out.splitlines()
    return lines


def test_one_long_call_prints_progress(capsys: pytest.CaptureFixture[str]) -> None:
    start = time.monotonic()
    with showing_progress(interval=0.05), stage("sorting"):
        lines = printed(capsys, 3)
        seconds = time.monotonic() - start
    assert 3 <= len(lines) <= seconds / 0.05
    assert all(re.fullmatch(r"sorting: (begun just now|\d+ s so far)", line) for line in lines)


def test_a_chain_of_short_stages_is_not_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_progress(interval=0.1):
        for number in range(10):
            with stage(f"stage {number}"):
                time.sleep(0.06)
    assert len(capsys.readouterr().out.splitlines()) >= 3


def test_the_innermost_stage_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_progress(interval=0.05), stage("outer"), stage("inner", 10, "steps") as reached:
        reached(5)
        (line, *_) = printed(capsys, 1)
    assert re.fullmatch(r"inner: 5 of 10 steps, [\d.,]+ steps/s, about \d s left", line)


def test_other_output_delays_progress_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A clock of its own, for on a busy machine every pause is long.
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    install_tag("RANK 0")
    try:
        with showing_progress(interval=0.5), stage("epoch 1/8"):
            for _ in range(8):
                print("something")
                now[0] += 0.4
                time.sleep(0.1)
    finally:
        remove_tag()
    assert set(capsys.readouterr().out.splitlines()) == {"[RANK 0] something"}


def test_quiet_short_and_hidden_stages_print_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with stage("nobody asked") as reached:
        reached(1)
    with showing_progress(interval=0.02):
        with stage("quiet", quiet=True):
            time.sleep(0.1)
        time.sleep(0.1)
    with showing_progress(), stage("short"):
        time.sleep(0.1)
    assert capsys.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_instead_of_lines(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with showing_progress(interval=0.05), stage("epoch 1/8", 100, "ratings") as reached:
        reached(50)
        time.sleep(0.2)
    output, errors = capsys.readouterr()
    assert output == ""
    # With the rate and the time that is left.
    assert re.search(
        r"epoch 1/8:  50%\|[^|]*\| 50\.?0?/100 \[\d\d:\d\d<\d\d:\d\d, +[\d.k]+ ?ratings/s\]", errors
    )


def test_drawing_reading_and_columns_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # More than one block, of which the first is not yet the last.
    monkeypatch.setattr(synthetic, "USERS_PER_BLOCK", 128)
    monkeypatch.setattr(formats, "CSV_BLOCK_BYTES", 100_000)
    with showing_progress(interval=0.001):
        write_synthetic(tmp_path / "data", 100_000, seed=0)
        open_columns(Config.of(data_path=str(tmp_path / "data")))
    output = capsys.readouterr().out
    assert re.search(r"^drawing .*: [\d,]+ of 100,000 ratings, [\d,]+ ratings/s, about", output, re.M)
    assert re.search(r"^reading the tables: [\d,]+ of [\d,]+ bytes, [\d,]+ bytes/s, about", output, re.M)
    assert re.search(r"^making columns: \d+ of 100 percent, [\d.,]+ percent/s, about", output, re.M)
