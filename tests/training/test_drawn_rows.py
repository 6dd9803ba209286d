"""Ratings from drawn rows: planted structure is found, and what was trained is loaded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from example import RatingLoss
from recsuite.config.sections import TrainingConfig
from recsuite.models.layers import BIAS_RATE, with_slow_bias
from recsuite.models.losses import WithSquares
from recsuite.training.progress import Progress
from recsuite.training.state import Schedule, stops_early
from tests.support.csv_ratings import write_ratings
from tests.support.launch import EXAMPLE, python, read_json, succeeded, torchrun

NOISE = 0.4


def test_a_bias_gets_a_share_of_its_gradient_and_factors_all_of_it() -> None:
    vectors = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], requires_grad=True)
    slowed = with_slow_bias(vectors)
    assert torch.equal(slowed, vectors)
    slowed.sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.tolist() == [[BIAS_RATE, 1, 1]] * 2


def test_each_event_shrinks_its_own_vectors_in_proportion_to_its_weight() -> None:
    vectors = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    # The prediction of each event is its label, so nothing but the decay has a gradient; the last is padding.
    batch = type("Batch", (), {"labels": torch.zeros(2), "weights": torch.tensor([2.0, 0.0])})()
    loss = RatingLoss(0.5)(WithSquares(torch.zeros(2), vectors.square().sum(1)), batch)
    assert float(loss.detach()) == pytest.approx(0.5 * 2 * (1 + 4) / 2)
    loss.backward()
    assert vectors.grad is not None
    assert vectors.grad.tolist() == [[1, 2], [0, 0]]


@pytest.mark.parametrize(("power", "third"), [(0.0, 0.5), (1.0, 0.5 / 3), (2.0, 0.5 / 9)])
def test_the_decay_of_a_pass_falls_with_its_number_to_a_power(power: float, third: float) -> None:
    schedule = Schedule(num_events=100, epochs=4, decay_power=power)
    assert schedule.decay_left(Progress(0, epoch=0)) == schedule.left(Progress(0, epoch=0)) == 1
    assert schedule.decay_left(Progress(9, epoch=2)) == pytest.approx(third)


def test_drawn_rows_find_planted_factors_on_any_number_of_processes(tmp_path: Path) -> None:
    draw = np.random.default_rng(5)
    users, items, number, rank = 150, 100, 6_000, 3
    pairs = draw.choice(users * items, number, replace=False)
    user, item = np.divmod(pairs, items)
    u, v = draw.normal(size=(users, rank)), draw.normal(size=(items, rank))
    score = 3 + (u[user] * v[item]).sum(axis=1) / rank**0.5 + NOISE * draw.normal(size=number)
    score = score.clip(0.5, 5).round(2)
    ratings = zip(user + 1, item + 1, score, 10**9 + draw.permutation(number), strict=True)
    write_ratings(tmp_path / "ratings", ratings)
    split = ("--split", "random", "--validation_fraction", "0.1")
    flags = ("--data_path", tmp_path / "ratings", *split, "--epochs", "4", "--batch_size", "128")
    reports = []
    for ranks in (1, 3):
        folder = tmp_path / f"report-{ranks}"
        succeeded(torchrun(ranks, EXAMPLE, *flags, "--report_dir", folder, timeout=120))
        reports.append(read_json(folder / "metrics.json"))
    one, three = reports
    assert one["config"]["initial_rows"] == "random"
    errors = [epoch["validation"]["rmse"] for epoch in one["epochs"]]
    assert errors[0] > errors[1] > errors[2]
    # Biases find nothing; the noise is the best possible.
    assert one["baselines"]["biases"]["rmse"] > 0.95
    assert NOISE < one["test"]["rmse"] < 0.72
    assert three["test"]["rmse"] == pytest.approx(one["test"]["rmse"], rel=1e-4)


def test_few_ratings_without_factors_are_predicted_as_by_biases_on_any_number_of_processes(
    tmp_path: Path,
) -> None:
    draw = np.random.default_rng(11)
    users, items, number = 120, 60, 1_500
    user, item = np.divmod(draw.choice(users * items, number, replace=False), items)
    score = 3 + 0.5 * draw.normal(size=users)[user] + 0.5 * draw.normal(size=items)[item]
    score = (score + NOISE * draw.normal(size=number)).clip(0.5, 5).round(2)
    ratings = zip(user + 1, item + 1, score, 10**9 + draw.permutation(number), strict=True)
    write_ratings(tmp_path / "ratings", ratings)
    flags = ("--data_path", tmp_path / "ratings", "--split", "random", "--epochs", "5")
    reports = []
    for ranks in (1, 2):
        folder = tmp_path / f"report-{ranks}"
        printed = succeeded(torchrun(ranks, EXAMPLE, *flags, "--report_dir", folder, timeout=120))
        assert "epoch 0, the initial rows, with biases: validation RMSE" in printed
        reports.append(read_json(folder / "metrics.json"))
    one, two = reports
    assert one["data"]["num_validation"] == 120
    # No epoch is as good: --patience ended the training.
    assert one["test_epoch"] == 0
    assert min(epoch["validation"]["rmse"] for epoch in one["epochs"]) > one["initial"]["rmse"]
    # The baseline has the validation ratings too, a tenth more.
    assert one["test"]["rmse"] < 1.04 * one["baselines"]["biases"]["rmse"]
    assert two["initial"]["rmse"] == pytest.approx(one["initial"]["rmse"], rel=1e-5)
    assert two["test"]["rmse"] == pytest.approx(one["test"]["rmse"], rel=1e-5)
    # A training on all of them begins alike: drawn rows do not know them after one epoch.
    all_of_them = (*flags[:2], "--split", "none", "--epochs", "1", "--report_dir", tmp_path / "report-all")
    succeeded(python(EXAMPLE, *all_of_them))
    report = read_json(tmp_path / "report-all" / "metrics.json")
    assert report["epochs"][0]["train_loss"] < 1.2 * one["epochs"][0]["train_loss"]


@pytest.mark.parametrize(
    ("patience", "epoch", "since_best", "stops"),
    [(3, 5, 5, False), (3, 6, 6, True), (3, 4, 3, True), (1, 1, 1, True), (2, 2, 1, False)],
)
def test_initial_rows_have_twice_the_patience_of_a_later_epoch(
    patience: int, epoch: int, since_best: int, stops: bool
) -> None:
    progress = Progress(10 * epoch, epoch, best=0.8, epochs_since_best=since_best)
    assert stops_early(progress, TrainingConfig(epochs=8, patience=patience)) == stops


def test_load_tests_the_best_trained_checkpoint_with_its_deltas(tmp_path: Path) -> None:
    data = ("--dataset", "synthetic", "--data_path", tmp_path / "ratings", "--synthetic_ratings", "20000")
    dumps = ("--save_dir", tmp_path / "dumps")
    first = ("--dump", "--epochs", "2", "--batch_size", "640")
    succeeded(torchrun(2, EXAMPLE, *first, *data, *dumps, timeout=120))
    more = ("--inc_dump", "--resume", "--epochs", "4", "--dump_every", "7", "--report_dir", tmp_path)
    succeeded(torchrun(2, EXAMPLE, *more, *data, *dumps, timeout=120))
    report = read_json(tmp_path / "metrics.json")
    assert report["test_epoch"] > 2
    loaded = succeeded(torchrun(3, EXAMPLE, "--load", *data, *dumps, timeout=120))
    found = re.search(r"loaded \S+/step-0*([1-9]\d*) and (\d+) deltas after it", loaded)
    assert found is not None, loaded
    # A delta for each 7 steps, and one at the end of each epoch.
    assert int(found[2]) >= 2 * (24 // 7)
    assert f"{report['test']['rmse']:.4f}" in loaded


@pytest.mark.parametrize(
    ("ranks", "ratings", "share", "ratio"),
    [(1, 20_000, 0.4, 1.1), pytest.param(2, 1_000_000, 0.82, 1.02, marks=pytest.mark.soak)],
)
def test_the_first_command_improves_in_its_first_epochs_and_beats_its_baseline(
    ranks: int, ratings: int, share: float, ratio: float, tmp_path: Path
) -> None:
    flags = ("--dataset", "synthetic", "--data_path", tmp_path / "ratings", "--synthetic_ratings", ratings)
    succeeded(torchrun(ranks, EXAMPLE, *flags, "--report_dir", tmp_path, timeout=300))
    report = read_json(tmp_path / "metrics.json")
    assert report["config"]["initial_rows"] == "random"
    errors = [epoch["validation"]["rmse"] for epoch in report["epochs"]]
    assert errors[0] > errors[1] > errors[2]
    test, low, high = (
        metrics["rmse"]
        for metrics in (report["test"], report["baselines"]["biases"], report["baselines"]["oracle"])
    )
    assert (low - test) / (low - high) > share
    assert high < test < ratio * high


def test_a_decay_over_many_epochs_moves_into_the_tables_and_into_a_full_checkpoint(tmp_path: Path) -> None:
    data = ("--dataset", "synthetic", "--data_path", tmp_path / "ratings", "--synthetic_ratings", "2000")
    dumps = ("--save_dir", tmp_path / "dumps")
    # A pass shrinks all rows by up to 2 ** -28, so the scale would become 0 without the move.
    decay = ("--weight_decay", "20", "--epochs", "8", "--patience", "0", "--keep", "100")
    succeeded(python(EXAMPLE, "--inc_dump", *decay, *data, *dumps, "--report_dir", tmp_path, timeout=120))
    report = read_json(tmp_path / "metrics.json")
    full = sorted(int(path.name[5:]) for path in (tmp_path / "dumps").glob("step-*"))
    assert len(full) > 1
    # What was written after a move is what was trained.
    loaded = succeeded(python(EXAMPLE, "--load", *data, *dumps, timeout=120))
    assert f"{report['test']['rmse']:.4f}" in loaded
