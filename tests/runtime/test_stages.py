"""Progress of long work: a line at least every interval and none for short work; on a terminal, in place."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens import synthetic
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.tables import formats
from recsuite.runtime import console
from recsuite.runtime.console import ERASE, Stage, install_tag, remove_tag, showing_progress, stage
from tests.support.launch import EXAMPLE, PATIENCE


class Clock:
    """A clock of its own, for on a busy machine every pause is long."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(time, "monotonic", found)
    return found


def test_a_line_has_share_rate_and_remaining_time(clock: Clock) -> None:
    work = Stage("drawing", 20_000_000, "ratings", done=0)
    clock.now += 10
    assert str(work) == "drawing: 0% of 20,000,000 ratings, 10 s so far"
    for done in (1_000_000, 5_000_000):
        work.reached(done)
        clock.now += 10
    # Of the ten seconds between the reports, and as long after the last one as before it.
    assert str(work) == "drawing: 25% of 20,000,000 ratings, 400,000 ratings/s, about 28 s left"
    clock.now += 80
    # The next report is late.
    assert str(work).endswith("80,000 ratings/s, about 2 min left")


def test_work_without_a_unit_has_a_share_and_work_without_a_total_has_its_duration(clock: Clock) -> None:
    shares, call = Stage("making columns", 100, "", done=0), Stage("sorting", 0, "", done=0)
    shares.reached(10)
    clock.now += 20
    shares.reached(30)
    call.reached(30)
    assert str(shares) == "making columns: 30%, about 70 s left"
    assert str(call) == "sorting: 20 s so far"


def seconds_left(work: Stage) -> float:
    known = work.estimate()
    assert known is not None
    return known[1]


def test_the_time_left_never_rises_while_steps_take_the_same_time(clock: Clock) -> None:
    # Many small steps, or few large ones; workers start and code is compiled before the first one.
    for steps, seconds in ((400, 0.01), (8, 60.0)):
        work, shown = Stage("epoch 1/8", 2048 * steps - 1000, "ratings", done=0), list[float]()
        clock.now += 30
        for step in range(1, steps + 1):
            work.reached(min(2048 * step, work.total))
            for _ in range(20):
                clock.now += seconds / 20
                if work.estimate() is not None:
                    shown.append(seconds_left(work))
        assert len(shown) > 100
        assert all(after <= before + 1e-6 for before, after in itertools.pairwise(shown))
        assert shown[0] < steps * seconds
        assert shown[-1] == pytest.approx(0, abs=1e-6)


def test_the_time_left_rises_while_a_report_is_late(clock: Clock) -> None:
    work = Stage("evaluation", 1_000, "ratings", done=0)
    for done in (0, 100, 200):
        work.reached(done)
        clock.now += 10
    # The third 100 are due now: 700 are left, at 10 a second.
    assert seconds_left(work) == pytest.approx(70)
    clock.now += 30
    assert seconds_left(work) == pytest.approx(140)
    work.reached(300)
    assert seconds_left(work) == pytest.approx(140)


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
    assert line == "inner: 50% of 10 steps, begun just now"


def test_a_line_ends_with_the_time_left_of_the_work_around_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "MEASURED_SECONDS", 0.0)
    with showing_progress(interval=0.05), stage("all", 2) as reached:
        reached(0)
        time.sleep(0.01)
        reached(1)
        with stage("inner"):
            (line, *_) = printed(capsys, 1)
    assert re.fullmatch(r"inner: begun just now; all: about \d+ s left", line)


def test_the_work_around_lasts_as_long_as_its_part(clock: Clock) -> None:
    around, inner = Stage("all", 2, "", done=0), Stage("inner", 4, "", done=0)
    for stages, done in (([around], 0), ([around, inner], 1), ([inner], 2)):
        for each in stages:
            each.reached(done)
        clock.now += 10 if inner in stages else 5
    # The first half of all took 5 seconds, and a quarter of the inner part takes 10.
    assert console._line([around, inner]) == "inner: 50%, about 10 s left; all: about 10 s left"


def test_other_output_delays_progress_lines(capsys: pytest.CaptureFixture[str], clock: Clock) -> None:
    install_tag("RANK 0")
    try:
        with showing_progress(interval=0.5), stage("epoch 1/8"):
            for _ in range(8):
                print("something")
                clock.now += 0.4
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


# Three phases with hundreds of reports, each with a line at its end; nothing is shown on another rank.
PHASES = """
import sys, time
from recsuite.runtime.console import install_tag, say, showing_progress, stage
install_tag("RANK " + sys.argv[1])
with showing_progress():
    for name in ("reading", "epoch 1/1", "evaluation"):
        title = name + " of a title that is wider than the terminal"
        with stage(title, 300, "ratings", quiet=sys.argv[1] != "0") as reached:
            for done in range(300):
                reached(done)
                time.sleep(0.002)
            print("printed", end=" ")
            time.sleep(0.3)
            print("within", name)
        say(name + " has ended")
    time.sleep(0.3)
"""
WIDTH = 40


def on_a_terminal(rank: int) -> str:
    """All that a rank writes to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", PHASES, str(rank)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": f"{WIDTH}", "PYTHONPATH": str(EXAMPLE.parent)},
    )
    os.close(theirs)
    found = b""
    # Linux raises an error when the other end is closed.
    with contextlib.suppress(OSError):
        while part := os.read(ours, 4096):
            found += part
    os.close(ours)
    assert process.wait(PATIENCE) == 0
    return found.decode().replace("\r\n", "\n")


def test_a_terminal_has_one_line_in_place_and_only_what_is_printed_scrolls() -> None:
    written = on_a_terminal(rank=0)
    *lines, last = [line.split(ERASE) for line in written.split("\n")]
    # In a line of the terminal the text after the last ERASE is what stays.
    names = ("reading", "epoch 1/1", "evaluation")
    # A `print` without an end is not erased.
    said = [[f"printed [RANK 0] within {name}", f"{name} has ended"] for name in names]
    assert [line[-1] for line in lines] == [f"[RANK 0] {text}" for texts in said for text in texts]
    assert last[-1] == ""
    drawn = [text for line in (*lines, last) for text in line[:-1] if text]
    assert {text.split(" of a title")[0] for text in drawn} == {*names}
    assert all(len(text) < WIDTH for text in drawn)


def test_a_rank_without_stages_leaves_the_line_of_another_one_except_to_print() -> None:
    assert on_a_terminal(rank=1).count(ERASE) == 6


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
    assert re.search(r"^drawing .*: \d+% of 100,000 ratings, begun just now$", output, re.M)
    assert re.search(r"^reading the tables: \d+% of [\d,]+ bytes, begun just now$", output, re.M)
    assert re.search(r"^making columns: \d+%, begun just now$", output, re.M)
