"""The cluster of a test."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, Machine, why_not


@pytest.fixture
def cluster_of(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """Makes a cluster of so many machines, which ends with the test."""
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(Cluster(tmp_path / "cluster", count))


@pytest.fixture(scope="session")
def clock(tmp_path_factory: pytest.TempPathFactory) -> Path | None:
    """A library that makes clocks wrong; None without a compiler."""
    if shutil.which("gcc") is None:
        return None
    library = tmp_path_factory.mktemp("clock") / "clock.so"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    return library


@pytest.fixture(scope="session")
def lasting_machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Machine]]:
    """Two machines for all tests."""
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster") / "machines", 2) as cluster:
        yield cluster.machines


@pytest.fixture
def machines(lasting_machines: list[Machine]) -> Iterator[list[Machine]]:
    """Two machines, whole and with nothing that runs on them."""
    yield lasting_machines
    for machine in lasting_machines:
        machine.fix()
        machine.call_itself()
        machine.kill()
