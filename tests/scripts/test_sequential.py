"""The script of sequences: it trains, shows what somebody had and what comes next, and leaves nothing."""

from __future__ import annotations

import re
from pathlib import Path

from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import ROOT, environment, python, read_json, succeeded, torchrun
from tests.support.learned import check_learned, share_in

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
    # A line may follow: advice if all users get the same items.
    assert not any(line.startswith("|") for line in table[12:])


def test_it_ends_with_a_user_history_and_the_predicted_next_items(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    flags = (*SMALL, "--data_path", synthetic_folder, "--block", "hstu")
    output = succeeded(python(SEQUENTIAL, *flags, env=environment(tmp_path), cwd=tmp_path))
    assert "| this model, epoch 1" in output
    check_end(output)
    assert (tmp_path / "dumps").is_dir()


def test_two_epochs_learn_the_order_and_the_taste_of_synthetic_users(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "ratings", 15_000, seed=0)
    # The batches are those of the default in proportion to the data.
    flags = ("--data_path", tmp_path / "ratings", "--report_dir", tmp_path, "--batch_size", 300)
    output = succeeded(python(SEQUENTIAL, "--block", "hstu", "--epochs", 2, "--train", *flags))
    report = read_json(tmp_path / "metrics.json")
    check_learned(report, 0.6)
    assert share_in(output) > 0.6


def test_one_process_loads_a_checkpoint_of_two_with_the_same_metrics(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    data = ("--data_path", synthetic_folder, "--save_dir", tmp_path / "dumps")
    said = succeeded(
        torchrun(2, SEQUENTIAL, *SMALL, "--inc_dump", "--dump_every", 10, "--vocabulary", "dynamic", *data)
    )
    check_end(said)
    assert [*(tmp_path / "dumps").iterdir()]
    last = next(line for line in said.splitlines() if line.startswith("| this model, epoch"))
    loaded = succeeded(python(SEQUENTIAL, "--load", *data))
    again = next(line for line in loaded.splitlines() if line.startswith("| this model, step"))
    assert again.split("|")[2:4] == last.split("|")[2:4]
    check_end(loaded)


def test_a_width_that_the_heads_do_not_divide_is_refused_with_one_message(synthetic_folder: Path) -> None:
    ended = python(SEQUENTIAL, "--num_heads", 3, "--embedding_dim", 8, "--data_path", synthetic_folder)
    assert ended.returncode == 2
    assert "sequential.py: --embedding_dim must be a multiple of --num_heads 3, got 8" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
