"""The script of the chain: two trainings, what is served of both, and what it is worth."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import ROOT, python, succeeded, torchrun
from tests.support.learned import share_in

PIPELINE = ROOT / "example" / "pipeline.py"


# Three Pythons import all by themselves.
@pytest.mark.soak
def test_two_trainings_are_served_while_they_continue_and_compared(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "ratings", 30_000, seed=0)
    flags = ("--data_path", tmp_path / "ratings", "--save_dir", tmp_path / "models", "--candidates", 50)
    output = succeeded(python(PIPELINE, *flags, "--epochs", 2, "--batch_size", 200))
    assert output.count("epoch 2/2: train loss") == 2
    assert re.search(
        r"serving the (retriever|ranker) after epoch 2, the (retriever|ranker) after epoch 2", output
    )
    rows = re.findall(
        r"^\| (retriever|ranker|chain)\b[^|]*\| ([\d.]+) \| +([\d.]+) \|$", output, re.MULTILINE
    )
    assert [name for name, _, _ in rows] == ["retriever", "ranker", "chain"]
    assert "| best possible " in output
    assert share_in(output) > 0.6
    assert re.search(r"8 clients at once, 50 candidates: p50 [\d.]+ ms, p99 [\d.]+ ms", output)
    assert {path.name for path in (tmp_path / "models").iterdir()} == {"retriever", "ranker"}


def test_too_few_candidates_are_refused_with_one_message() -> None:
    ended = python(PIPELINE, "--candidates", 3)
    assert ended.returncode == 2
    assert ended.stderr == "pipeline.py: --candidates must be at least 10, got 3.\n"


def test_ranks_of_a_launch_are_refused_with_one_message() -> None:
    ended = torchrun(2, PIPELINE)
    assert ended.returncode != 0
    assert "pipeline.py: pipeline.py starts trainings of its own" in ended.stderr
