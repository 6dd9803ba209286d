"""How messages are shown."""

from __future__ import annotations

import pytest

from recsuite.errors import duration, signed


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


def test_a_duration_is_said_in_its_largest_unit() -> None:
    said = [duration(seconds) for seconds in (-3, 12.4, 119, 180, 7300, 200_000)]
    assert said == ["0 s", "12 s", "119 s", "3 min", "2 h", "2 d"]
