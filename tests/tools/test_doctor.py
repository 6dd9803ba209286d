"""The doctor's page: all its lines, its exit status, and what becomes of a check that breaks."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

import example
from recsuite.config.parser import parse_args
from recsuite.errors import UserError
from recsuite.tools.doctor import examined
from recsuite.tools.examination.findings import PAGE_WIDTH, Finding, has_fault, page
from recsuite.workers.failure import WorkerError
from tests.support.launch import EXAMPLE, python, succeeded, torchrun
from tests.support.starting import REAL_WORKERS

NAMES = (
    "versions",
    "device",
    "cores",
    "threads",
    "memory",
    "/dev/shm",
    "descriptors",
    "worker",
    "start",
    "data",
    "cache",
)


def one(check: Callable[[], Finding]) -> Finding:
    """The line of a check as the page shows it, whether it returns or raises."""
    (finding,) = examined("line", lambda: [check()])
    return finding


def lines_of(output: str) -> dict[str, str]:
    """The state of each line of a page by its name."""
    lines = [line.split() for line in output.splitlines()]
    return {line[1]: line[0] for line in lines if line and line[0] in ("ok", "warning", "fault")}


def test_this_machine_has_no_fault(synthetic_folder: Path, tmp_path: Path) -> None:
    before = sorted(synthetic_folder.iterdir())
    flags = ("--data_path", synthetic_folder, "--cache_dir", tmp_path / "cache")
    result = python(EXAMPLE, "--doctor", *flags, env=REAL_WORKERS)
    states = lines_of(succeeded(result))
    assert tuple(states) == NAMES
    assert states["versions"] == states["worker"] == states["data"] == states["cache"] == "ok"
    assert result.stderr == ""
    # It has written nothing.
    assert sorted(synthetic_folder.iterdir()) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_the_page_comes_within_ten_seconds_on_a_machine_with_nothing_else_to_do(
    synthetic_folder: Path,
) -> None:
    begin = time.monotonic()
    succeeded(python(EXAMPLE, "--doctor", "--data_path", synthetic_folder, env=REAL_WORKERS))
    assert time.monotonic() - begin < 10


def test_under_torchrun_rank_0_alone_speaks_for_the_ranks_of_its_machine(synthetic_folder: Path) -> None:
    flags = ("--doctor", "--data_path", synthetic_folder, "--num_workers", "100")
    output = succeeded(torchrun(2, EXAMPLE, *flags, env=REAL_WORKERS))
    assert output.count("versions") == 1
    assert "2 ranks with --num_workers 100" in output
    assert lines_of(output)["cores"] == "warning"


def test_a_fault_is_status_1_and_the_other_lines_are_there_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], synthetic_folder: Path
) -> None:
    real = metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "1.0.0" if name == "torchrec" else real(name))
    assert example.main(["--doctor", "--data_path", str(synthetic_folder)]) == 1
    output = capsys.readouterr().out
    states = lines_of(output)
    assert tuple(states) == NAMES
    assert [name for name, state in states.items() if state == "fault"] == ["versions"]
    assert "\n" + " " * 22 + "-> mend it with: " in output
    assert "1 fault" in output.splitlines()[-1]


def test_a_page_is_aligned_and_counts_what_is_wrong() -> None:
    findings = [
        Finding("versions", "ok", "good"),
        Finding("descriptors", "fault", "word " * 30 + "\nsecond", "one line " * 20),
        Finding("data", "warning", "hm", "do"),
        Finding("cache", "warning", "hm", "do"),
    ]
    lines = page(findings).splitlines()
    assert lines[0] == "ok       versions     good"
    assert lines[1].startswith("fault    descriptors  word word")
    assert {line[:22].strip() for line in lines[2:5]} == {""}
    assert lines[3].strip() == "second"
    assert lines[4].strip() == "-> " + ("one line " * 20).strip()
    assert lines[-1] == "1 fault and 2 warnings"
    assert max(map(len, lines[:4])) <= PAGE_WIDTH
    assert page(findings[:1]).endswith("\nAll is well.")
    assert has_fault(findings)
    assert not has_fault([findings[0], findings[2]])


def test_doctor_and_train_exclude_each_other_and_the_doctor_is_no_mode() -> None:
    with pytest.raises(UserError, match="--doctor and --train exclude each other; give one of them"):
        parse_args(["--doctor", "--train"])
    assert parse_args(["--doctor"]).modes == ("train",)


def test_a_package_that_breaks_on_import_is_a_fault_of_its_line() -> None:
    def broken() -> Finding:
        raise OSError("libtorch.so: undefined symbol")

    finding = one(broken)
    assert (finding.state, finding.text) == ("fault", "OSError: libtorch.so: undefined symbol")
    assert "./run.sh setup" in finding.remedy


def test_a_worker_error_without_advice_is_a_fault_with_its_text() -> None:
    def check() -> Finding:
        raise WorkerError("it is gone")

    assert one(check) == Finding("line", "fault", "it is gone")
