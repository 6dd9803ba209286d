"""Training in a process group of the calling program and off the main thread, as under Ray."""

from __future__ import annotations

import builtins
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recsuite.runtime.console import install_tag, remove_tag
from tests.support.launch import EXAMPLE, ROOT, SUPPORT, python, read_json, succeeded, torchrun

SCRIPT = ROOT / "example" / "ray_train.py"
FLAGS = ("--preset", "none", "--epochs", 3, "--batch_size", 512)


def validated(output: str) -> list[tuple[str, str]]:
    return re.findall(r"epoch \d/3: train loss ([\d.]+), validation RMSE ([\d.]+)", output)


def in_group(folder: Path, ranks: int, stop_after: int, *flags: Any) -> tuple[list[Any], str]:
    words = (SUPPORT / "group_ranks.py", folder / "results.json", ranks, stop_after, *flags)
    output = succeeded(python(*words, timeout=170))
    return read_json(folder / "results.json"), output


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_group_of_the_calling_program_is_used_and_stays(
    synthetic_folder: Path, tmp_path: Path, ranks: int
) -> None:
    flags = ("--data_path", synthetic_folder, *FLAGS)
    alone = succeeded(torchrun(ranks, EXAMPLE, *flags))
    results, output = in_group(tmp_path, ranks, 0, *flags, "--save_dir", tmp_path / "dumps")
    assert [(found["status"], found["keeps_print"]) for found in results] == [(0, True)] * ranks
    assert all(found["metrics"] == results[0]["metrics"] for found in results)
    # The same losses and metrics as under torchrun.
    assert len(validated(alone)) == 3
    assert validated(output) == validated(alone)


def test_a_thread_ends_with_a_checkpoint_on_request_and_goes_on(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    flags = ("--data_path", synthetic_folder, *FLAGS, "--save_dir", tmp_path / "dumps")
    stopped, output = in_group(tmp_path, 2, 1, *flags)
    assert [found["status"] for found in stopped] == [143, 143]
    assert "stopped by a signal at step" in output
    assert [len(found["metrics"]) for found in stopped] == [1, 1]
    finished, _ = in_group(tmp_path, 2, 0, *flags)
    whole, _ = in_group(tmp_path, 2, 0, *flags[:-1], tmp_path / "others")
    assert stopped[0]["metrics"] + finished[0]["metrics"] == whole[0]["metrics"]


def test_print_is_found_by_its_name_whoever_replaced_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def others(*values: object) -> None:
        """Such as that of Ray, without which numba could not be imported."""

    monkeypatch.setattr(builtins, "print", others)
    install_tag("RANK 0")
    try:
        assert (builtins.print.__module__, builtins.print.__name__) == ("builtins", "print")
    finally:
        remove_tag()
    assert builtins.print is others


@pytest.mark.soak
def test_ray_starts_a_killed_worker_again_and_the_training_goes_on(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    if find_spec("ray") is None:
        pytest.skip("needs the package ray, of requirements-dev.txt")
    flags = ("--data_path", synthetic_folder, *FLAGS)
    whole = validated(succeeded(torchrun(2, EXAMPLE, *flags)))
    words = (SUPPORT / "ray_killed.py", tmp_path / "results.jsonl", *flags, "--save_dir", tmp_path / "dumps")
    succeeded(python(*words, env={"RAY_USAGE_STATS_ENABLED": "0"}, timeout=400))
    reports = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    # Another process goes on after the first epoch.
    assert len({process for process, _ in reports}) == 2
    assert [f"{metrics['rmse']:.4f}" for _, metrics in reports] == [rmse for _, rmse in whole]
    # The script itself, on what is complete.
    succeeded(python(SCRIPT, 2, *words[2:], env={"RAY_USAGE_STATS_ENABLED": "0"}, timeout=400))
