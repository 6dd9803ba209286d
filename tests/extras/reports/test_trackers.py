"""Trackers get the flags, the numbers of the report step by step, and the end of a training."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as PluginEventAccumulator,
)
from tensorboard.plugins.hparams import metadata

from recsuite.config.config import Config
from recsuite.config.presets import PRESETS
from recsuite.errors import UserError
from recsuite.extras.reports import trackers
from recsuite.extras.reports.trackers import (
    FileTracker,
    MLflowTracker,
    TensorBoardTracker,
    Tracker,
    Tracking,
    numbers,
    tag_of,
)
from recsuite.metrics import Measured
from recsuite.sharding.table_rules import RowWiseAdagrad
from recsuite.training.callbacks import Epoch, Step
from recsuite.training.observers import observing
from recsuite.training.progress import Progress
from tests.support.event_files import only_run, scalars
from tests.support.launch import read_json

STEPS_OF_AN_EPOCH = 8


def test_tensorboard_shows_the_numbers_of_the_report(watched: tuple[str, Path]) -> None:
    report = read_json(watched[1] / "metrics.json")
    shown = scalars(watched[1] / "tensorboard")
    for number, epoch in enumerate(report["epochs"], start=1):
        for name, value in numbers(epoch):
            if tag := tag_of(name):
                assert shown[tag][number - 1] == (STEPS_OF_AN_EPOCH * number, pytest.approx(value)), name
    assert {"metrics/train_loss", "time/ratings_per_second", "time/data_wait"} <= set(shown)


def test_tensorboard_opens_with_validation_and_loss(watched: tuple[str, Path]) -> None:
    names = sorted(scalars(watched[1] / "tensorboard"))
    # It opens the first two groups. No plot is of the number of the epoch.
    assert [*dict.fromkeys(name.partition("/")[0] for name in names)] == ["metrics", "steps", "test", "time"]
    assert names[0] == "metrics/train_loss"
    assert all(
        name.startswith("metrics/validation/") for name in names[1 : names.index("steps/learning_rate/dense")]
    )
    assert [name for name in names if name.startswith("steps/")][-1] == "steps/loss"
    assert not [name for name in names if "epoch" in name]


def test_tensorboard_has_the_flags_as_hyperparameters_of_each_training(tmp_path: Path) -> None:
    for run, rate, error in (("a", 0.25, None), ("b", 0.5, RuntimeError), ("a", 0.25, None)):
        tracking = Tracking(TensorBoardTracker(tmp_path), Config.of(lr=rate).flags, print)
        tracking.on_begin(Progress(0), run)
        give(tracking, 1, 0.5)
        tracking.close(error)
    found = {path.name: of_hyperparameters(path) for path in tmp_path.iterdir()}
    assert {name: start["lr"].number_value for name, (start, _) in found.items()} == {"a": 0.25, "b": 0.5}
    start, is_finished = found["a"]
    assert start.keys() == Config().flags.keys()
    assert (start["batch_size"].string_value, start["stream"].string_value) == ("auto", "False")
    assert (is_finished, found["b"][1]) == (True, False)


def of_hyperparameters(folder: Path) -> tuple[Mapping[str, Any], bool]:
    """The hyperparameters of a training, and True if it has finished."""
    accumulator = PluginEventAccumulator(str(folder))
    accumulator.Reload()
    found = accumulator.PluginTagToContent(metadata.PLUGIN_NAME)
    # Without this TensorBoard shows those of all trainings.
    assert metadata.EXPERIMENT_TAG not in found
    start = metadata.parse_session_start_info_plugin_data(found[metadata.SESSION_START_INFO_TAG])
    return start.hparams, metadata.SESSION_END_INFO_TAG in found


def test_tensorboard_shows_every_step_with_its_loss_and_rates(watched: tuple[str, Path]) -> None:
    report = read_json(watched[1] / "metrics.json")
    shown = scalars(watched[1] / "tensorboard")
    losses = shown["steps/loss"]
    assert [step for step, _ in losses] == list(range(1, 2 * STEPS_OF_AN_EPOCH + 1))
    first = [loss for _, loss in losses[:STEPS_OF_AN_EPOCH]]
    # All global batches of the 15,840 training ratings but the last have 2,048 of them.
    weights = [2048] * 7 + [15_200 - 7 * 2048]
    mean = sum(loss * weight for loss, weight in zip(first, weights, strict=True)) / sum(weights)
    assert mean == pytest.approx(report["epochs"][0]["train_loss"])
    config = Config.of(**PRESETS["rating"][1])
    for name, first_rate in (
        # The batch of 50 steps an epoch; the rate of one below 512 is that of 512.
        ("tables", RowWiseAdagrad(config.optimizer.lr).rate(15_200 // 50)),
        ("dense", config.optimizer.dense_lr),
    ):
        rates = [rate for _, rate in shown[f"steps/learning_rate/{name}"]]
        assert len(rates) == 2 * STEPS_OF_AN_EPOCH
        assert rates[0] == pytest.approx(first_rate)
        assert rates == sorted(rates, reverse=True)


def test_tensorboard_shows_the_configuration(watched: tuple[str, Path]) -> None:
    (text,) = only_run(watched[1] / "tensorboard").Tensors("config/text_summary")
    assert b"| --batch_size | `2048` |" in text.tensor_proto.string_val[0]


def track(
    tracker: Tracker, first_step: int = 1, loss: float = 0.5, run: str = "a", say: Any = print, **test: Any
) -> Tracking:
    """Begin, and give one epoch of two steps and a test."""
    tracking = Tracking(tracker, Config().flags, say)
    tracking.on_begin(Progress(first_step - 1), run)
    give(tracking, first_step, loss)
    tracking.on_end(SimpleNamespace(test=Measured(test), epochs=[1]))  # type: ignore[arg-type]
    return tracking


def give(tracking: Tracking, first_step: int, loss: float) -> None:
    rates = {"tables": 0.5, "dense": 0.25}
    for number in (first_step, first_step + 1):
        tracking.on_step(Step(Progress(number), torch.tensor(loss), rates))
    validation = Measured({"rmse": 0.9, "mae": 0.7, "hr@10": 0.25, "auc": float("nan")})
    progress = Progress(first_step + 1, 1)
    tracking.on_epoch(Epoch(progress, np.full(2, loss), loss, validation, 1.0, 100.0, 0.5))


def write_log(folder: Path, first_step: int, loss: float, test: dict[str, Any]) -> None:
    track(TensorBoardTracker(folder), first_step, loss, **test).close(None)


def test_a_final_test_is_shown_at_the_last_step(tmp_path: Path) -> None:
    write_log(tmp_path, 1, 0.5, {"hr@10": 0.25, "auc": float("nan")})
    shown = scalars(tmp_path)
    assert shown["test/hr@10"] == [(2, 0.25)]
    assert shown["metrics/validation/rmse"] == [(2, pytest.approx(0.9))]
    assert "test/auc" not in shown


def test_a_resumed_training_continues_its_curves(tmp_path: Path) -> None:
    for first_step, loss in ((1, 0.5), (3, 0.25), (3, 0.125)):
        write_log(tmp_path, first_step, loss, {})
    assert scalars(tmp_path)["steps/loss"] == [(1, 0.5), (2, 0.5), (3, 0.125), (4, 0.125)]


@pytest.mark.parametrize(
    ("module", "package", "make"),
    [
        ("tensorboard", "tensorboard", lambda: TensorBoardTracker("runs")),
        ("mlflow", "mlflow-skinny", lambda: MLflowTracker()),
    ],
)
def test_a_tracker_without_its_package_gives_one_message_when_it_is_made(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, make: Callable[[], Tracker]
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"requires {package}, .* not installed. Fix: pip install {package}"):
        make()


class Kept(Tracker):
    """Keeps what it is given; `refuses` says how many times it takes no metrics."""

    def __init__(self, refuses: int = 0) -> None:
        self.refuses, self.calls = refuses, list[Any]()

    def begin(self, params: Mapping[str, Any], run: str, step: int) -> None:
        self.calls.append(("begin", params["epochs"], run, step))

    def log(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        self.refuses -= 1
        if self.refuses >= 0:
            raise ConnectionError("no\nserver")
        self.calls.append([*metrics])

    def end(self, status: str) -> None:
        self.calls.append(status)


def test_metrics_that_a_tracker_refuses_are_given_again_and_the_training_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "PAUSE_AFTER_FAILURE", 0.0)
    said, tracker = list[str](), Kept(refuses=1)
    tracking = track(tracker, say=said.append)
    assert tracker.calls == [("begin", 8, "a", 1)]
    (sentence,) = said
    assert sentence.startswith("Kept did not take the metrics of 2 steps (ConnectionError: no server); they ")
    monkeypatch.setattr(tracking, "_paused_until", 0.0)
    give(tracking, 3, 0.5)
    tracking.close(None)
    assert tracker.calls[1:] == [[1, 2, 3, 4], "finished"]
    assert len(said) == 1


def test_a_tracker_that_failed_is_paused_and_its_missing_metrics_are_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trackers, "MOST_WAITING", 3)
    said, tracker = list[str](), Kept(refuses=100)
    tracking = track(tracker, say=said.append)
    give(tracking, 3, 0.5)
    assert tracker.refuses == 99
    tracking.close(None)
    assert tracker.refuses == 98
    assert said[-1] == "Kept has no metrics of 4 steps"
    assert tracker.calls[-1] == "finished"


@pytest.mark.parametrize(
    ("error", "status"), [(None, "finished"), (RuntimeError(), "failed"), (SystemExit(143), "stopped")]
)
def test_a_tracker_ends_with_the_status_of_the_training_on_rank_0_alone(
    error: BaseException | None, status: str
) -> None:
    kept = [Kept(), Kept()]
    for rank, tracker in enumerate(kept):
        context: Any = SimpleNamespace(rank=rank, say=print)
        with (
            contextlib.suppress(RuntimeError, SystemExit),
            observing(Config(), context, trackers=[tracker]) as observers,
        ):
            for callback in observers.callbacks:
                callback.on_begin(Progress(), "a")
            if error:
                raise error
    assert kept[0].calls == [("begin", 8, "a", 1), status]
    assert kept[1].calls == []


def test_a_file_holds_whole_lines_also_after_a_crash_and_on_a_full_disk(tmp_path: Path) -> None:
    path, said = tmp_path / "new" / "track.jsonl", list[str]()
    track(FileTracker(path), rmse=0.5).close(None)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    tracking = track(FileTracker(path), first_step=3, say=said.append)
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, limits[1]))
    try:
        tracking._paused_until = 0.0
        give(tracking, 5, 0.25)
        assert "FileTracker did not take the metrics of 3 steps (OSError" in said[0]
        assert path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    tracking.close(RuntimeError)
    lines = [*map(json.loads, path.read_text().splitlines())]
    begins = [line for line in lines if "begin" in line]
    assert [(line["begin"], line["step"], line["params"]["epochs"]) for line in begins] == [
        ("a", 1, 8),
        ("a", 3, 8),
    ]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    assert lines[2]["validation/rmse"] == 0.9
    assert "validation/auc" not in lines[2]
    assert [line["end"] for line in lines if "end" in line] == ["finished", "failed"]
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"Cannot write metrics to .*file/track.jsonl"):
        FileTracker(tmp_path / "file" / "track.jsonl").begin({}, "a", 1)


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a file store in a folder."""
    # Before it is imported: nothing of a test goes to the network.
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    module = pytest.importorskip("mlflow.tracking", reason="needs mlflow-skinny, of requirements-dev.txt")
    return module.MlflowClient((tmp_path / "mlruns").as_uri())


def test_mlflow_has_flags_metrics_by_step_and_the_status_and_a_resumed_training_continues_its_run(
    mlflow: Any,
) -> None:
    def runs() -> Any:
        (place,) = [each.experiment_id for each in mlflow.search_experiments() if each.name == "films"]
        return mlflow.search_runs([place], order_by=["attributes.start_time ASC"])

    tracker = MLflowTracker(mlflow.tracking_uri, "films")
    tracking = track(tracker)
    (run,) = runs()
    assert run.info.status == "RUNNING"
    assert run.data.params["epochs"] == "8"
    assert run.data.params["batch_size"] == str(Config().loader.batch_size)
    tracking.close(RuntimeError)
    (run,) = runs()
    assert run.info.status == "FAILED"
    # A name without the characters that MLflow refuses.
    assert run.data.metrics["validation/hr_10"] == 0.25
    resumed = Tracking(MLflowTracker(mlflow.tracking_uri, "films"), Config.of(epochs=9).flags, print)
    resumed.on_begin(Progress(2), "a")
    assert runs()[0].info.status == "RUNNING"
    give(resumed, 3, 0.25)
    resumed.close(None)
    (run,) = runs()
    assert (run.info.status, run.data.tags["epochs from step 3"]) == ("FINISHED", "9")
    losses = mlflow.get_metric_history(run.info.run_id, "loss")
    assert [(each.step, each.value) for each in losses] == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25)]
    track(tracker, run="b").close(SystemExit)
    assert sorted(run.info.status for run in runs()) == ["FINISHED", "KILLED"]


def test_more_metrics_than_a_request_of_mlflow_may_have_arrive(mlflow: Any) -> None:
    tracker = MLflowTracker(mlflow.tracking_uri)
    tracker.begin({f"flag {number}": "x" * 7000 for number in range(150)}, "a", 1)
    tracker.log({step: {"loss": 0.5} for step in range(2500)})
    (run,) = mlflow.search_runs([mlflow.get_experiment_by_name("recsuite").experiment_id])
    assert len(run.data.params) == 150
    assert len(mlflow.get_metric_history(run.info.run_id, "loss")) == 2500


def test_an_unreachable_server_gives_one_message_before_the_first_step(
    mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tracker = MLflowTracker(f"http://127.0.0.1:{port}")
    with pytest.raises(UserError, match=rf"Cannot begin a run .*127\.0\.0\.1.*{port}.*refused") as error:
        tracker.begin({}, "a", 1)
    assert "\n" not in str(error.value)
