"""The doctor's page: its lines, each with a fault faked for it, and its exit status."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import example
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.movielens import source as movielens
from recsuite.errors import UserError
from recsuite.extras.doctor import doctor
from recsuite.extras.doctor.doctor import check_data, examined
from recsuite.runtime.process import Launch
from tests.support.launch import EXAMPLE, python, succeeded

NAMES = ["versions", "device", "step", "memory", "data"]


def states_of(output: str) -> dict[str, str]:
    """The state of each line of a page by its name."""
    lines = [line.split() for line in output.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("ok", "fault")}


def test_this_machine_has_no_fault_and_nothing_is_written(synthetic_folder: Path, tmp_path: Path) -> None:
    before = sorted(synthetic_folder.iterdir())
    result = python(EXAMPLE, "--doctor", "--data_path", synthetic_folder, cwd=tmp_path)
    states = states_of(succeeded(result))
    assert [*states] == NAMES
    assert {*states.values()} == {"ok"}
    assert result.stderr == ""
    assert sorted(synthetic_folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_status_1_and_the_other_lines_are_still_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], synthetic_folder: Path
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0" if name == "torchrec" else real(name))
    assert example.main(["--doctor", "--data_path", str(synthetic_folder)]) == 1
    output = capsys.readouterr().out
    states = states_of(output)
    assert [*states] == NAMES
    assert [name for name, state in states.items() if state == "fault"] == ["versions"]
    assert "fix it with: " in output
    assert "1 fault" in output.splitlines()[-1]


def test_doctor_and_train_exclude_each_other_and_the_doctor_is_no_mode() -> None:
    with pytest.raises(UserError, match="--doctor and --train cannot be used together"):
        parse_args(["--doctor", "--train"])
    assert parse_args(["--doctor"]).modes == ("train",)


def test_a_package_that_breaks_on_import_is_a_fault_of_its_line() -> None:
    def broken() -> str:
        raise OSError("libtorch.so: undefined symbol")

    text, is_fault = examined(broken)
    assert is_fault
    assert text.startswith("OSError: libtorch.so: undefined symbol. Fix: ")
    assert "./run.sh setup" in text


def test_a_driver_that_torch_does_not_use_is_said_unless_the_gpus_were_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    monkeypatch.setattr(doctor, "DRIVER", driver)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "VARIANT=cuda" not in doctor.check_device(Launch())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert doctor.check_device(Launch()).endswith("torch sees no GPU: try VARIANT=cuda ./run.sh setup")


@pytest.mark.parametrize(
    ("flags", "gpu", "found"),
    [
        (
            {},
            False,
            r"fp32; .* on the host, because there is no GPU; steps are eager, because there is no GPU",
        ),
        ({}, True, r"fp32; .* on the GPU where .*; steps are captured where data and model allow it"),
        ({"capture": "off", "precision": "bf16"}, True, "bf16; .* on the GPU .* eager, because --capture is"),
        ({"num_workers": 2}, True, "on the host, because --num_workers is 2; .* eager, because batches are"),
    ],
)
def test_what_a_training_does_with_the_flags_of_a_step_is_said(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], gpu: bool, found: str
) -> None:
    with_a_gpu(monkeypatch, gpu)
    assert re.search(found, doctor.check_step(Config.of(**flags), Launch()))


@pytest.mark.parametrize(
    ("flags", "gpu", "fault"),
    [
        ({"precision": "tf32"}, False, "--precision tf32 requires a GPU"),
        ({"data_device": "cuda"}, False, "--data_device cuda cannot be used, because there is no GPU"),
        ({"capture": "on"}, False, "--capture on: steps cannot be captured, because there is no GPU"),
        ({"capture": "on", "data_device": "cpu"}, True, "made on the host: --data_device is cpu"),
        ({"capture": "on", "storage": "uvm"}, True, "because --storage is uvm"),
        ({"storage": "uvm"}, False, "--storage uvm requires a GPU"),
        ({"row_precision": "fp16"}, False, "--row_precision fp16 requires a GPU"),
        ({"row_precision": "fp16", "vocabulary": "dynamic"}, True, "does not support dynamic tables"),
    ],
)
def test_flags_of_a_step_that_a_training_refuses_are_a_fault(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], gpu: bool, fault: str
) -> None:
    with_a_gpu(monkeypatch, gpu)
    with pytest.raises(UserError, match=fault):
        doctor.check_step(Config.of(**flags), Launch())


def with_a_gpu(monkeypatch: pytest.MonkeyPatch, is_there: bool) -> None:
    """Have the doctor find a GPU, or none."""
    device = torch.device("cuda" if is_there else "cpu")
    monkeypatch.setattr(doctor, "choose_device", lambda launch: device)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))


def test_missing_data_are_neither_drawn_nor_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(movielens, "DATA_ROOT", tmp_path)
    name = "synthetic-1000000-seed0-stationary"
    assert check_data(Config()) == f"{tmp_path / name}: not there yet, drawn at the first start"
    found = check_data(Config.of(dataset="ml-1m"))
    assert found == f"{tmp_path / 'ml-1m'}: not there yet, downloaded at the first start"
    assert list(tmp_path.iterdir()) == []


def test_data_are_named_with_their_size_and_a_folder_without_them_is_a_fault(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    found = check_data(Config.of(data_path=str(synthetic_folder)))
    assert found.startswith(f"{synthetic_folder}: 5 files, 6")
    for path, dataset, fault in (
        (tmp_path, "", "holds no table of events"),
        (synthetic_folder, "ml-32m", "does not hold ml-32m but ratings.dat"),
    ):
        config = Config.of(data_path=str(path), dataset=dataset)
        with pytest.raises(UserError, match=fault):
            check_data(config)


def test_a_file_that_cannot_be_read_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, synthetic_folder: Path
) -> None:
    real = Path.open

    # Root may read anything, so a mode would not do.
    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "ratings.dat":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    text, is_fault = examined(lambda: check_data(Config.of(data_path=str(synthetic_folder))))
    assert is_fault
    assert text.startswith(f"Cannot read {synthetic_folder / 'ratings.dat'}: Permission denied. Fix: ")
