"""TensorBoard's files of a training hold the numbers of its report, step by step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.monitoring.report import EventLog, numbers
from recsuite.sharding.table_rules import RowWiseAdagrad
from recsuite.training.callbacks import Step
from tests.support.event_files import scalars
from tests.support.launch import EXAMPLE, python, read_json

STEPS_OF_AN_EPOCH = 8


def test_tensorboard_shows_the_numbers_of_the_report(watched: tuple[str, Path]) -> None:
    report = read_json(watched[1] / "metrics.json")
    shown = scalars(watched[1] / "tensorboard")
    for number, epoch in enumerate(report["epochs"], start=1):
        for name, value in numbers(epoch):
            assert shown[name][number - 1] == (STEPS_OF_AN_EPOCH * number, pytest.approx(value)), name
    assert {"train_loss", "ratings_per_second", "data_wait"} <= set(shown)


def test_tensorboard_shows_every_step_with_its_loss_and_rates(watched: tuple[str, Path]) -> None:
    report = read_json(watched[1] / "metrics.json")
    shown = scalars(watched[1] / "tensorboard")
    losses = shown["loss"]
    assert [step for step, _ in losses] == list(range(1, 2 * STEPS_OF_AN_EPOCH + 1))
    first = [loss for _, loss in losses[:STEPS_OF_AN_EPOCH]]
    # All global batches of the 15,840 training ratings but the last have 2,048 of them.
    weights = [2048] * 7 + [15_840 - 7 * 2048]
    mean = sum(loss * weight for loss, weight in zip(first, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(report["epochs"][0]["train_loss"])
    config = Config.of(batch_size=1024)
    for name, first_rate in (
        ("tables", RowWiseAdagrad(config.optimizer.lr).rate(2 * config.loader.batch_size)),
        ("dense", config.optimizer.dense_lr),
    ):
        rates = [rate for _, rate in shown[f"learning_rate/{name}"]]
        assert len(rates) == 2 * STEPS_OF_AN_EPOCH
        assert rates[0] == pytest.approx(first_rate)
        assert rates == sorted(rates, reverse=True)


def test_tensorboard_shows_the_configuration(watched: tuple[str, Path]) -> None:
    accumulator = EventAccumulator(str(watched[1] / "tensorboard"))
    accumulator.Reload()
    (text,) = accumulator.Tensors("config/text_summary")
    assert b"| --batch_size | `1024` |" in text.tensor_proto.string_val[0]


def write_log(folder: Path, first_step: int, loss: float, test: dict[str, float]) -> None:
    """One epoch of two steps."""
    log = EventLog(folder, Config().flags)
    rates = {"tables": 0.5, "dense": 0.5}
    for number in (first_step, first_step + 1):
        log.on_step(Step(Progress(number), torch.tensor(loss), rates))
    metrics = SimpleNamespace(rmse=0.9, mae=0.7, auc=0.5)
    epoch: Any = SimpleNamespace(losses=[loss, loss])
    with pytest.MonkeyPatch.context() as patch:
        report_of = "recsuite.monitoring.report.epoch_report"
        patch.setattr(report_of, lambda epoch: {"validation": vars(metrics)})
        log.on_epoch(epoch)
    run: Any = SimpleNamespace(test=test)
    log.on_end(run)
    log.close()


def test_a_final_test_is_shown_at_the_last_step(tmp_path: Path) -> None:
    write_log(tmp_path, 1, 0.5, {"hr@10": 0.25, "auc": float("nan")})
    shown = scalars(tmp_path)
    assert shown["test/hr@10"] == [(2, 0.25)]
    assert shown["validation/rmse"] == [(2, pytest.approx(0.9))]
    assert "test/auc" not in shown


def test_a_resumed_training_goes_on_with_its_curves_and_another_has_its_own(tmp_path: Path) -> None:
    for first_step, loss in ((1, 0.5), (3, 0.25), (3, 0.125)):
        write_log(tmp_path, first_step, loss, {})
    assert scalars(tmp_path)["loss"] == [(1, 0.5), (2, 0.5), (3, 0.125), (4, 0.125)]
    write_log(tmp_path, 1, 0.75, {})
    assert scalars(tmp_path)["loss"] == [(1, 0.75), (2, 0.75)]


def test_tensorboard_without_its_package_is_one_sentence_before_training(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tensorboard.py").write_text("raise ModuleNotFoundError(name='tensorboard')")
    flags = ("--data_path", synthetic_folder, "--report_dir", tmp_path / "report", "--tensorboard")
    result = python(EXAMPLE, *flags, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert result.stderr == (
        "example.py: --tensorboard needs the package tensorboard, which is not installed; run ./run.sh "
        "setup.\n"
    )
