"""Ranks on several machines give the same results as on one, to the bit."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from recsuite.checkpoint.folder import newest_in
from tests.cluster.machines import Machine
from tests.cluster.ranks import launch
from tests.support.launch import read_json

FLAGS = ("--epochs", 1, "--batch_size", 512, "--timeout", 300, "--worker_timeout", 250)


def found(
    machines: list[Machine], nprocs: list[int], folder: Path, data: Path, flags: Sequence[object]
) -> dict[str, Any]:
    """Results of a training and a load on some machines; "received" has the bytes that node-0 received."""
    argv = [*FLAGS, "--data_path", data, "--report_dir", folder / "report", "--save_dir", folder / "dumps"]
    used, before = machines[: len(nprocs)], machines[0].received()
    ranks = launch(used, nprocs, [*argv, *flags, "--dump", "--load"])
    texts = [rank.succeeded(90) for rank in ranks]
    received = machines[0].received() - before
    trained, loaded = [
        line.split("|")[2:] for line in texts[0].splitlines() if line.startswith("| this model")
    ]
    assert trained == loaded
    report = read_json(folder / "report" / "metrics.json")
    epochs = [[epoch[name] for name in ("train_loss", "validation", "steps")] for epoch in report["epochs"]]
    learned = {"epochs": epochs, "test": report["test"], "tensors": tensors_in(folder / "dumps")}
    return {"learned": learned, "received": received}


def tensors_in(save_dir: Path) -> list[tuple[str, str]]:
    """The name and the digest of every tensor in the newest checkpoint's files, whatever those are called."""
    folder = newest_in(save_dir)
    assert folder is not None
    tensors = []
    for path in folder.glob("*.safetensors"):
        for name, tensor in load_file(path).items():
            tensors.append((name, hashlib.sha256(tensor.tobytes()).hexdigest()))
    assert tensors
    return sorted(tensors)


@pytest.fixture
def data_of(synthetic_folder: Path, tmp_path: Path) -> Callable[[list[Machine], str], Path]:
    """Makes data that machines share, or have a copy of each, with columns of its own."""

    def make(machines: list[Machine], how: str) -> Path:
        data = tmp_path / "data"
        for name in (data.name, *(machine.name for machine in machines[1:] if how == "separate")):
            shutil.copytree(synthetic_folder, tmp_path / name, ignore=shutil.ignore_patterns(".columns"))
        if how == "separate":
            for machine in machines[1:]:
                machine.bind(tmp_path / machine.name, data)
        return data

    return make


@pytest.fixture
def check_same_as_alone(
    machines: list[Machine], data_of: Callable[[list[Machine], str], Path], tmp_path: Path
) -> Callable[..., None]:
    """Checks that ranks of machines learn and keep what as many of one do, and get rows by the network."""

    def check(nprocs: list[int], task: str, how: str, *flags: object) -> None:
        data, flags = data_of(machines, how), ("--task", task, *flags)
        alone = found(machines, [sum(nprocs)], tmp_path / "alone", data, flags)
        together = found(machines, nprocs, tmp_path / "together", data, flags)
        assert together["learned"] == alone["learned"]
        assert together["received"] > 200_000 > alone["received"]

    return check


@pytest.mark.parametrize(
    ("nprocs", "task", "how"),
    [
        ([1, 1], "rating", "shared"),
        pytest.param(*([2, 1], "ranking", "separate"), marks=pytest.mark.soak),
    ],
)
def test_two_machines_train_and_save_the_same_model_as_one(
    check_same_as_alone: Callable[..., None], tmp_path: Path, nprocs: list[int], task: str, how: str
) -> None:
    check_same_as_alone(nprocs, task, how)
    # Of separate data each machine makes columns of its own.
    copies = [folder for folder in tmp_path.glob("*/.columns") if folder.is_dir()]
    assert len(copies) == (2 if how == "separate" else 1)


def test_machines_whose_names_resolve_to_loopback_find_each_other(
    machines: list[Machine], synthetic_folder: Path
) -> None:
    for machine in machines:
        machine.call_itself("127.0.1.1")
    flags = ("--epochs", 1, "--batch_size", 2048, "--timeout", 100, "--data_path", synthetic_folder)
    for rank in launch(machines, [1, 1], flags):
        rank.succeeded(60)


@pytest.mark.soak
@pytest.mark.parametrize("how", ["shared", "separate"])
@pytest.mark.parametrize("task", ["rating", "ranking"])
@pytest.mark.parametrize("nprocs", [[1, 1], [2, 1], [1, 2], [2, 2]])
@pytest.mark.parametrize("flags", [(), ("--num_workers", 1), ("--pipeline", "sparse_dist"), ("--inc_dump",)])
def test_several_machines_train_and_save_the_same_model_in_every_mode(
    check_same_as_alone: Callable[..., None],
    nprocs: list[int],
    task: str,
    how: str,
    flags: tuple[object, ...],
) -> None:
    check_same_as_alone(nprocs, task, how, *flags)
