"""An object store for the tests of extras."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.store import Store, running


@pytest.fixture(scope="module")
def running_store() -> Iterator[Store]:
    with running() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.env.items():
            patch.setenv(name, value)
        yield store


@pytest.fixture
def store(running_store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The store without faults, and its client in this process."""
    for name, value in running_store.env.items():
        monkeypatch.setenv(name, value)
    yield running_store
    running_store.fault, running_store.hidden, running_store.seconds = None, "", 0.0
