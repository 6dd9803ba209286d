"""The example as a user runs it, from the command line to the report."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recsuite.config.sections import TrainingConfig
from recsuite.errors import counted
from recsuite.runtime import host
from recsuite.training.results import describe_no_epochs_left
from tests.support.launch import (
    EXAMPLE,
    ROOT,
    family,
    is_alive,
    python,
    read_json,
    started,
    succeeded,
    torchrun,
)

SHORT = ("--epochs", "1", "--batch_size", "1024")


def table(output: str) -> dict[str, list[float]]:
    """The rows of the results table: name -> RMSE, MAE, AUC and, if it is defined, log loss."""
    rows = re.findall(r"^\| (.+?) +\|((?: +[\d.]+ \|)+)(?: +- \|)?$", output, re.MULTILINE)
    return {name: [float(value) for value in re.findall(r"[\d.]+", values)] for name, values in rows}


def refused(result: subprocess.CompletedProcess[str], sentence: str) -> None:
    """One process exits with 2, a launch with another status than 0; the sentence comes once."""
    assert result.returncode != 0
    assert result.stderr.count(f"example.py: {sentence}") == 1, result.stderr


def test_plain_python_trains_as_one_process(synthetic_folder: Path) -> None:
    # A Python of its own: what the packages print as they are imported would be in its output.
    result = python("example.py", "--data_path", synthetic_folder, *SHORT, cwd=EXAMPLE.parent, real=True)
    rows = table(succeeded(result))
    assert [*rows] == [
        "global mean",
        "biases",
        "this model, epoch 1",
        "its validation",
        "oracle (knows the true parameters)",
    ]
    assert "[RANK 0] ranks: 1 on cpu" in result.stdout
    assert result.stderr == ""


@pytest.fixture(scope="module")
def runs(
    synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[subprocess.CompletedProcess[str]]:
    """One training twice: from the example's folder, as a user types it, and from the root with one worker.

    Each leaves its report in the folder that comes last in its arguments.
    """
    folder = tmp_path_factory.mktemp("reports")
    flags = ("--epochs", 2, "--seed", 4, "--batch_size", 4096)
    arguments = ("--data_path", synthetic_folder, *flags, "--report_dir")
    inside = torchrun(2, "example.py", "--num_workers", 2, *arguments, folder / "inside", cwd=EXAMPLE.parent)
    outside = torchrun(2, "example/example.py", "--num_workers", 1, *arguments, folder / "outside", cwd=ROOT)
    assert succeeded(inside)
    assert succeeded(outside)
    return [inside, outside]


def report_of(run: subprocess.CompletedProcess[str]) -> Any:
    """Report of a run."""
    return read_json(Path(run.args[-1]) / "metrics.json")


def test_torchrun_trains_from_the_folder_and_from_the_root(
    runs: list[subprocess.CompletedProcess[str]],
) -> None:
    inside, outside = (table(run.stdout) for run in runs)
    assert inside == outside != {}


def test_output_is_lines_of_the_run_and_nothing_else(runs: list[subprocess.CompletedProcess[str]]) -> None:
    lines = runs[0].stdout.splitlines()
    assert all(line.startswith(("[RANK 0] ", "|")) for line in lines)
    assert any("4 data workers on this machine share" in line for line in lines)
    # A slow epoch also says how far it is.
    epochs = [line for line in lines if "epoch 1/2: train" in line]
    assert len(epochs) == 1
    assert re.search(
        r"train loss [\d.]+, validation RMSE [\d.]+, [\d.]+ s, [\d,]+ ratings/s, data wait [\d.]+%", epochs[0]
    )
    assert runs[0].stderr == ""


def test_a_report_holds_configuration_versions_and_every_epoch(
    runs: list[subprocess.CompletedProcess[str]],
) -> None:
    report = report_of(runs[0])
    assert report["world_size"] == 2
    assert report["config"]["seed"] == 4
    assert report["versions"]["torch"].startswith("2.")
    assert [epoch["epoch"] for epoch in report["epochs"]] == [1, 2]
    # Epoch 0 has the biases.
    errors = [report["initial"]["rmse"], *(epoch["validation"]["rmse"] for epoch in report["epochs"])]
    best = int(np.argmin(errors))
    assert report["test_epoch"] == best
    shown = table(runs[0].stdout)[f"this model, epoch {best}" if best else "this model, initial rows"]
    names = ["rmse", "mae", "auc", "log_loss"]
    assert shown == pytest.approx([report["test"][name] for name in names], abs=1e-4)
    assert [sorted(epoch["validation"]) for epoch in report["epochs"]] == [sorted(names)] * 2
    assert report["stopped_early"] is False
    assert report["baselines"]["oracle"]["rmse"] < report["baselines"]["biases"]["rmse"]
    time = report["time"]
    assert time["steps"] + time["feed"] >= 0.9 * sum(epoch["seconds"] for epoch in report["epochs"])
    assert min(time["imports"], time["data"], time["model"], time["evaluation"]) > 0 == time["dumps"]
    folder = Path(runs[0].args[-1])
    assert sorted(path.name for path in folder.iterdir()) == ["groups.json", "metrics.json"]


def test_the_same_seed_gives_the_same_losses(runs: list[subprocess.CompletedProcess[str]]) -> None:
    first, second = (report_of(run) for run in runs)
    assert first["test"] == second["test"]
    for one, other in zip(first["epochs"], second["epochs"], strict=True):
        assert one["train_loss"] == other["train_loss"]
        assert one["validation"] == other["validation"]


def test_without_data_the_first_line_is_that_ratings_are_synthetic(tmp_path: Path) -> None:
    arguments = (
        "--dataset",
        "synthetic",
        "--synthetic_ratings",
        2000,
        "--data_path",
        tmp_path / "new",
        *SHORT,
    )
    first, *_ = succeeded(python(EXAMPLE, *arguments)).splitlines()
    assert first.startswith("The ratings are synthetic")
    assert "--dataset ml-1m" in first
    assert (tmp_path / "new" / "ratings.dat").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--num_workers", "-1"], "--num_workers must be between 0 and 1,024, or auto, got -1"),
        (["--nonsense"], "Unrecognized arguments: --nonsense"),
        (["--data_path", "/nowhere"], "Cannot read --data_path /nowhere: no such file or folder"),
    ],
)
def test_a_users_mistake_gives_one_message_and_status_2(arguments: list[str], sentence: str) -> None:
    result = python(EXAMPLE, *arguments)
    refused(result, sentence)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--batch_size", "0"], "--batch_size must be between 1 and 16,777,216, or auto, got 0"),
        (["--data_path", str(ROOT / "deploy")], f"{ROOT / 'deploy'} holds no table of events"),
    ],
)
def test_one_of_many_ranks_prints_a_mistake_and_torchrun_ends_with_it(
    arguments: list[str], sentence: str
) -> None:
    start = time.monotonic()
    result = torchrun(3, EXAMPLE, *arguments)
    refused(result, sentence)
    assert time.monotonic() - start < 150
    last = result.stderr[result.stderr.rindex("Root Cause") :]
    assert sentence in last
    assert "Traceback" not in last


def test_help_is_printed_once() -> None:
    output = succeeded(torchrun(2, EXAMPLE, "--help"))
    assert output.count("Train a sharded recommender on MovieLens, or on tables of your own.") == 1


def test_training_that_diverges_is_refused(synthetic_folder: Path) -> None:
    wild = ("--lr", "1e30", "--weight_decay", "0")
    refused(
        python(EXAMPLE, "--data_path", synthetic_folder, *wild, *SHORT),
        "The loss is nan at step 2",
    )


def test_weights_that_only_a_diverged_training_has_are_refused(synthetic_folder: Path) -> None:
    result = python(EXAMPLE, "--data_path", synthetic_folder, "--lr", "1e7", *SHORT)
    refused(result, "After step 15 the table ")
    assert result.returncode == 2
    assert "the training diverged with learning rates of 10000000.0 (tables)" in result.stderr
    assert "this model" not in result.stdout


def test_a_model_worse_than_the_mean_has_a_line_below_its_table(synthetic_folder: Path) -> None:
    # Without validation the last weights count.
    wild = ("--initial_rows", "random", "--lr", "50", "--validation_fraction", "0")
    output = succeeded(python(EXAMPLE, "--data_path", synthetic_folder, *wild, *SHORT))
    _, _, below = output.rpartition("| oracle")
    assert re.search(
        r"^\[RANK 0\] this model is worse than the mean of all ratings \([\d.]+\) and biases \([\d.]+\): its "
        r"test RMSE is [\d.]+$",
        below,
        re.MULTILINE,
    )


def test_a_number_agrees_with_its_noun() -> None:
    found = [counted(number, "row") for number in (0, 1, 2, 2_000)]
    assert found == ["0 rows", "1 row", "2 rows", "2,000 rows"]
    assert [counted(number, "worker needs", "workers need") for number in (1, 2)] == [
        "1 worker needs",
        "2 workers need",
    ]


def test_a_resume_with_fewer_epochs_than_are_done_prints_a_line() -> None:
    said = []
    for done, stopped in ((6, False), (2, False), (1, True)):
        result: Any = SimpleNamespace(num_epochs=done, stopped_early=stopped)
        said.append(describe_no_epochs_left(result, TrainingConfig(epochs=2)))
    assert said == [
        "nothing left to train: the checkpoint has 6 epochs, and --epochs is 2; give a larger --epochs",
        "nothing left to train: 2 of 2 epochs are done",
        "nothing left to train: 1 of 2 epochs are done, stopped early by --patience",
    ]


def test_a_report_dir_that_cannot_be_written_is_refused_before_training(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    result = python(EXAMPLE, "--data_path", synthetic_folder, "--report_dir", tmp_path / "file" / "report")
    refused(result, f"Cannot write to --report_dir {tmp_path}/file/report: Not a directory. Fix: ")
    assert "epoch 1" not in result.stdout


def test_an_installation_that_does_not_fit_is_refused_before_anything_is_imported(tmp_path: Path) -> None:
    # A copy of the metadata is all the check reads, so a false version in front of the real one is enough.
    fake = tmp_path / "torchrec-1.3.0.dist-info"
    fake.mkdir()
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: torchrec\nVersion: 1.3.0\n")
    result = python(EXAMPLE, env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    assert "torchrec 1.3.0" in result.stderr
    torch, torchrec, _ = host.STACKS[".".join(metadata.version("torch").split(".")[:2])]
    flags = "" if host.has_cuda_kernels() else "--no-deps "
    assert f"pip install {flags}torch=={torch} torchrec=={torchrec} " in result.stderr
    assert result.stderr.count("\n") == 1


def test_no_process_outlives_a_launcher_that_is_killed(synthetic_folder: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(EXAMPLE), "--data_path", str(synthetic_folder), "--num_workers", "1"]
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with started([*command, "--epochs", "1000", "--patience", "0"], **quiet) as process:
        deadline = time.monotonic() + 450
        while len(workers := [pid for pid in family(process.pid) if "spawn_main" in command_of(pid)]) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        members = family(process.pid)
        process.kill()
        assert process.wait(timeout=200) != 0
        assert set(workers) < set(members)
        deadline = time.monotonic() + 75
        while left := [command_of(pid) for pid in members if is_alive(pid)]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def test_an_interrupt_ends_it_without_a_traceback(synthetic_folder: Path) -> None:
    command = [
        sys.executable,
        str(EXAMPLE),
        "--data_path",
        str(synthetic_folder),
        "--epochs",
        "1000",
        "--patience",
        "0",
    ]
    with started(command) as process:
        assert process.stdout is not None
        assert any("epoch 1/1000" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=150)
    assert (process.returncode, errors) == (128 + signal.SIGINT, "example.py: ended by Ctrl-C\n")


@pytest.mark.real_data
@pytest.mark.parametrize(
    ("split", "epochs", "margin"),
    [("random", 4, 0.02), pytest.param("time", 8, 0.015, marks=pytest.mark.soak)],
)
def test_real_movielens_beats_the_bias_baseline(
    real_folder: Path, tmp_path: Path, split: str, epochs: int, margin: float
) -> None:
    terms = ["--split", split, *(["--test_fraction", 0.1] if split == "random" else [])]
    arguments: list[Any] = ["--data_path", real_folder, *terms, "--cache_dir", tmp_path, "--epochs", epochs]
    rows = table(succeeded(torchrun(2, EXAMPLE, *arguments)))
    model = next(values for name, values in rows.items() if name.startswith("this model"))
    assert model[0] <= rows["biases"][0] - margin
    assert model[2] > 0.5
