"""How messages are shown."""

from __future__ import annotations

import pytest

from recsuite.errors import signed


@pytest.mark.parametrize(
    ("argument", "name"),
    [
        ("/suite/example/example.py", "example.py"),
        ("online.py", "online.py"),
        # What run.sh calls to check a command line before anything is started.
        ("/suite/example/recsuite/config/__main__.py", "example.py"),
        ("-c", "example.py"),
    ],
)
def test_a_message_begins_with_the_script_that_runs(
    argument: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", [argument, "--epochs", "1"])
    assert signed("no data.") == f"{name}: no data."
