"""The cluster of a test."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster.forked_ranks import ForkServer
from tests.cluster.machines import Cluster, why_not


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
def lasting_servers(
    tmp_path_factory: pytest.TempPathFactory, clock: Path | None
) -> Iterator[list[ForkServer]]:
    """Two machines that fork ranks, for all tests."""
    if reason := why_not():
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("cluster") / "machines", 2) as cluster:
        yield [ForkServer(machine, clock) for machine in cluster.machines]


@pytest.fixture
def servers(lasting_servers: list[ForkServer], clock: Path | None) -> Iterator[list[ForkServer]]:
    """Two machines that fork ranks, whole and with no rank on them."""
    yield lasting_servers
    for number, server in enumerate(lasting_servers):
        server.machine.mend()
        server.machine.call_itself()
        server.env = {}
        for rank in server.ranks:
            if rank.poll() is None and server.is_running:
                rank.signal(signal.SIGKILL)
                rank.wait(20)
        server.ranks = []
        if not server.is_running:
            lasting_servers[number] = ForkServer(server.machine, clock)
