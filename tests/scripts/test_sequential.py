"""The script of sequences: it trains, shows what somebody had and what comes next, and leaves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import ROOT, environment, python, succeeded, torchrun

SEQUENTIAL = ROOT / "example" / "sequential.py"
SMALL = ("--epochs", 1, "--embedding_dim", 8, "--history", 6, "--batch_size", 600, "--negatives", 64)


def check_end(output: str) -> None:
    """Last items of a user, and ten titles of predicted next items."""
    lines = [line.removeprefix("[RANK 0] ") for line in output.splitlines()]
    begin = next(
        place for place, line in enumerate(lines) if re.match(r"user \d+ rated \d+ movies, and last:", line)
    )
    had = [line for line in lines[begin + 1 :] if re.match(r"  \d\.\d  .+ \(\d{4}\)$", line)]
    assert 1 <= len(had) <= 5
    table = lines[begin + 1 + len(had) :]
    assert table[0].startswith("| rank | title")
    assert all(re.match(rf"\| +{rank} \| .+ \(\d{{4}}\) +\|", table[1 + rank]) for rank in range(1, 11))
    assert len(table) == 12


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_it_ends_with_a_user_history_and_the_predicted_next_items(
    synthetic_folder: Path, tmp_path: Path, num_ranks: int
) -> None:
    env = environment(tmp_path)
    flags = (*SMALL, "--data_path", synthetic_folder, "--block", "hstu" if num_ranks == 2 else "sas")
    output = succeeded(torchrun(num_ranks, SEQUENTIAL, *flags, env=env, cwd=tmp_path))
    assert "| this model, epoch 1" in output
    check_end(output)
    assert (tmp_path / "dumps").is_dir()


@pytest.mark.parametrize("ids", ["fixed", "dynamic"])
def test_three_ranks_load_a_checkpoint_of_two_with_the_same_metrics(
    synthetic_folder: Path, tmp_path: Path, ids: str
) -> None:
    data = ("--data_path", synthetic_folder, "--save_dir", tmp_path / "dumps")
    said = succeeded(
        torchrun(2, SEQUENTIAL, *SMALL, "--inc_dump", "--dump_every", 10, "--vocabulary", ids, *data)
    )
    check_end(said)
    assert [*(tmp_path / "dumps").iterdir()]
    last = next(line for line in said.splitlines() if line.startswith("| this model, epoch"))
    loaded = succeeded(torchrun(3, SEQUENTIAL, "--load", *data))
    again = next(line for line in loaded.splitlines() if line.startswith("| this model, step"))
    assert again.split("|")[2:4] == last.split("|")[2:4]
    check_end(loaded)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--history", 0), "--task sequence requires --history above 0"),
        (("--stream",), "--stream is not a flag of this script. Fix: leave it out"),
        (
            ("--num_heads", 3, "--embedding_dim", 8),
            "--embedding_dim must be a multiple of --num_heads 3, got 8",
        ),
        (("--dropout", 1), "--dropout must be at least 0 and below 1, got 1.0"),
    ],
)
def test_impossible_flags_are_refused_with_one_message(flags: tuple[object, ...], sentence: str) -> None:
    ended = python(SEQUENTIAL, *flags)
    assert ended.returncode == 2
    assert ended.stderr.count(f"sequential.py: {sentence}") == 1, ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
