"""Training in a process group of the calling program and off the main thread, as under Ray."""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from recsuite.config.config import Config
from recsuite.errors import UserError
from recsuite.runtime.console import install_tag, remove_tag
from recsuite.runtime.process import Launch, cleanup_runtime, init_runtime, read_launch
from tests.support.launch import EXAMPLE, ROOT, SUPPORT, free_port, python, read_json, succeeded, torchrun

SCRIPT = ROOT / "example" / "ray_train.py"
FLAGS = ("--preset", "none", "--epochs", 3, "--batch_size", 512)


def validated(output: str) -> list[tuple[str, str]]:
    return re.findall(r"epoch \d/3: train loss ([\d.]+), validation RMSE ([\d.]+)", output)


def in_group(folder: Path, ranks: int, stop_after: int, *flags: Any) -> tuple[list[Any], str]:
    words = (SUPPORT / "group_ranks.py", folder / "results.json", ranks, stop_after, *flags)
    output = succeeded(python(*words, timeout=170))
    return read_json(folder / "results.json"), output


@pytest.fixture(scope="module")
def of_two(synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str]:
    """Results and output of a training on two ranks of the calling program."""
    folder = tmp_path_factory.mktemp("two")
    flags = ("--data_path", synthetic_folder, *FLAGS, "--num_workers", 1)
    return in_group(folder, 2, 0, *flags, "--save_dir", folder / "dumps")


def test_a_process_group_of_the_calling_program_is_used_and_stays(
    synthetic_folder: Path, tmp_path: Path, of_two: tuple[list[Any], str]
) -> None:
    # One rank with what a preset sets, as on the command line.
    flags = ("--data_path", synthetic_folder, "--epochs", 3, "--num_workers", 1)
    alone = succeeded(python(EXAMPLE, *flags))
    of_one = in_group(tmp_path, 1, 0, *flags, "--save_dir", tmp_path / "dumps")
    for ranks, (results, _) in ((1, of_one), (2, of_two)):
        assert [(found["status"], found["keeps_print"]) for found in results] == [(0, True)] * ranks
        assert all(found["metrics"] == results[0]["metrics"] for found in results)
    # The same losses and metrics as on the command line.
    assert len(validated(alone)) == 3
    assert validated(of_one[1]) == validated(alone)


def test_the_function_trains_under_torchrun_and_where_only_variables_tell_the_ranks(
    synthetic_folder: Path, tmp_path: Path, of_two: tuple[list[Any], str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom ray_train import train_worker\ntrain_worker(sys.argv[1:])\n")
    flags = ("--data_path", synthetic_folder, *FLAGS, "--save_dir")
    path = {"PYTHONPATH": str(EXAMPLE.parent)}
    launched = succeeded(torchrun(2, script, *flags, tmp_path / "launched", env=path))
    # As srun does: each task has its variables, and nothing else is common.
    common = {**path, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": free_port()}

    def task(rank: int) -> str:
        env = {name: str(value) for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        return succeeded(python(script, *flags, tmp_path / "tasks", env=env))

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(task, range(2))
    assert len(validated(launched)) == 3
    assert validated(first) == validated(launched) == validated(of_two[1])


@pytest.fixture
def callers_group(tmp_path: Path) -> Iterator[None]:
    """A process group of the calling program, with one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_are_those_of_the_group_whatever_the_variables_say(
    callers_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Some launchers count machines.
    for name, value in {"RANK": "3", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch()
    for name, value in {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert read_launch() == Launch(launched=True)
    threads = torch.get_num_threads()
    init_runtime(Config())
    cleanup_runtime()
    torch.set_num_threads(threads)
    assert dist.is_initialized()


def test_a_group_of_this_library_is_not_taken_for_one_of_the_caller() -> None:
    threads = torch.get_num_threads()
    init_runtime(Config())
    with pytest.raises(ValueError, match="twice"):
        init_runtime(Config())
    cleanup_runtime()
    torch.set_num_threads(threads)
    assert not dist.is_initialized()


def test_ranks_of_several_machines_need_the_number_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    launch = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}
    for name, value in launch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    with pytest.raises(UserError, match=r"LOCAL_RANK 0 .*RANK 1 .*LOCAL_WORLD_SIZE"):
        read_launch()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((2, "--epochs", "none"), "--epochs"),
        ((), "The first word must be the number of workers, at least 1, got nothing; give 2, say"),
        (("--epochs", 2), "The first word must be the number of workers, at least 1, got --epochs; give 2"),
    ],
)
def test_a_mistake_is_said_before_ray_starts(words: tuple[object, ...], sentence: str) -> None:
    if find_spec("ray") is None:
        pytest.skip("needs the package ray, of requirements-dev.txt")
    result = python(SCRIPT, *words)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_a_thread_ends_with_a_checkpoint_on_request_and_goes_on(
    synthetic_folder: Path, tmp_path: Path, of_two: tuple[list[Any], str]
) -> None:
    flags = ("--data_path", synthetic_folder, *FLAGS, "--save_dir", tmp_path / "dumps")
    stopped, output = in_group(tmp_path, 2, 1, *flags)
    assert [found["status"] for found in stopped] == [143, 143]
    assert "stopped by a signal at step" in output
    assert [len(found["metrics"]) for found in stopped] == [1, 1]
    finished, _ = in_group(tmp_path, 2, 0, *flags)
    assert stopped[0]["metrics"] + finished[0]["metrics"] == of_two[0][0]["metrics"]


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
