"""The cluster of a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.machines import Cluster, why_not


@pytest.fixture
def cluster_of(tmp_path: Path) -> Iterator[Callable[[int], Cluster]]:
    """Makes a cluster of so many machines, which ends with the test."""
    if reason := why_not():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:
        yield lambda count: stack.enter_context(Cluster(tmp_path / "cluster", count))
