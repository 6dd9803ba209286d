"""The doctor's page: its lines, each with a fault faked for it, and its exit status."""

from __future__ import annotations

import functools
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import example
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.movielens import source as movielens
from recsuite.errors import UserError
from recsuite.runtime.process import Launch
from recsuite.tools import doctor
from recsuite.tools.doctor import Finding, check_cores, check_data, check_device, check_gloo, examined
from tests.support.launch import EXAMPLE, python, succeeded, torchrun

NAMES = ["versions", "device", "cores", "memory", "gloo", "data"]


def states_of(output: str) -> dict[str, str]:
    """The state of each line of a page by its name."""
    lines = [line.split() for line in output.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("ok", "warning", "fault")}


def test_this_machine_has_no_fault_and_nothing_is_written(synthetic_folder: Path, tmp_path: Path) -> None:
    before = sorted(synthetic_folder.iterdir())
    result = python(EXAMPLE, "--doctor", "--data_path", synthetic_folder, cwd=tmp_path)
    states = states_of(succeeded(result))
    assert [*states] == NAMES
    assert states["versions"] == states["gloo"] == states["data"] == "ok"
    assert result.stderr == ""
    assert sorted(synthetic_folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_rank_0_alone_speaks_for_the_ranks_of_its_machine(synthetic_folder: Path) -> None:
    flags = ("--doctor", "--data_path", synthetic_folder, "--num_workers", "100")
    output = succeeded(torchrun(2, EXAMPLE, *flags))
    assert output.count("versions") == 1
    assert "for 2 ranks, --num_workers 100" in output
    assert states_of(output)["cores"] == "warning"


def test_a_fault_is_status_1_and_the_other_lines_are_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], synthetic_folder: Path
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0" if name == "torchrec" else real(name))
    monkeypatch.setattr(doctor, "check_gloo", lambda: Finding("gloo", "met"))
    assert example.main(["--doctor", "--data_path", str(synthetic_folder)]) == 1
    output = capsys.readouterr().out
    states = states_of(output)
    assert [*states] == NAMES
    assert [name for name, state in states.items() if state == "fault"] == ["versions"]
    assert "mend it with: " in output
    assert "1 fault" in output.splitlines()[-1]


def test_doctor_and_train_exclude_each_other_and_the_doctor_is_no_mode() -> None:
    with pytest.raises(UserError, match="--doctor and --train cannot be used together"):
        parse_args(["--doctor", "--train"])
    assert parse_args(["--doctor"]).modes == ("train",)


def test_a_package_that_breaks_on_import_is_a_fault_of_its_line() -> None:
    def broken() -> Finding:
        raise OSError("libtorch.so: undefined symbol")

    finding = examined("line", broken)
    assert (finding.state, finding.text) == ("fault", "OSError: libtorch.so: undefined symbol")
    assert "./run.sh setup" in finding.remedy


def test_a_driver_without_a_gpu_is_a_warning_unless_the_gpu_was_hidden(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    monkeypatch.setattr(doctor, "DRIVER", driver)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check_device(Launch()).state == "ok"
    # What was loaded without it sees none any more.
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    finding = check_device(Launch())
    assert finding.state == "warning"
    assert finding.text.endswith("sees no GPU, but there is driver 550.54.15")


@pytest.mark.parametrize(
    ("num_workers", "num_ranks", "remedy"),
    [
        ("auto", 4, ""),
        (1, 2, ""),
        (2, 2, "give --num_workers 1, or auto"),
        ("auto", 5, "start at most 4 ranks, as NPROC says"),
    ],
)
def test_more_processes_than_cores_are_a_warning(num_workers: int | str, num_ranks: int, remedy: str) -> None:
    finding = check_cores(num_workers, num_ranks, num_cores=4)
    assert (finding.state, finding.remedy) == ("warning" if remedy else "ok", remedy)


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 2**29)
    assert doctor.check_memory().state == "warning"


def test_processes_that_cannot_meet_are_a_fault_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope")
    finding = check_gloo()
    assert finding.state == "fault"
    assert finding.text.endswith("Unable to find address for: nope")

    def late(*_: object, **options: Any) -> None:
        # A rank of a launch of its own.
        assert "RANK" not in options["env"]
        raise subprocess.TimeoutExpired("launcher", options["timeout"])

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(subprocess, "run", late)
    assert check_gloo().text == "two processes did not meet within 120 s"


def test_data_that_are_not_there_yet_are_neither_drawn_nor_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(movielens, "DATA_ROOT", tmp_path)
    finding = check_data(Config())
    assert finding.state == "ok"
    assert finding.text.endswith("synthetic-1000000-seed0: not there yet, drawn at the first start")
    finding = check_data(Config.of(dataset="ml-1m"))
    assert finding.state == "warning"
    assert finding.text == f"{tmp_path / 'ml-1m'}: not there yet, downloaded at the first start"
    assert "network" in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_data_are_named_with_their_size_and_what_is_no_data_is_a_fault(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    assert check_data(Config.of(data_path=str(synthetic_folder))).text.startswith(
        f"{synthetic_folder}: 4 files, 0."
    )
    for path, dataset, fault in (
        (tmp_path, "", "holds no table of events"),
        (synthetic_folder, "ml-32m", "does not hold ml-32m but ratings.dat"),
    ):
        config = Config.of(data_path=str(path), dataset=dataset)
        finding = examined("data", functools.partial(check_data, config))
        assert finding.state == "fault"
        assert fault in finding.text


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
    finding = check_data(Config.of(data_path=str(synthetic_folder)))
    assert finding.state == "fault"
    assert finding.text == f"{synthetic_folder / 'ratings.dat'} cannot be read (Permission denied)"
