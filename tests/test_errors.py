"""Output of error messages."""

from __future__ import annotations

import pytest

from recsuite.errors import UserError, format_duration, with_script_name
from recsuite.extras.launcher.__main__ import say as say_of_launcher
from recsuite.runtime.console import say

# Of a folder: a colour of a terminal, a change of direction, a second line, a line of its own, a bell.
EVIL = "red\x1b[31m \u202etxt\nrm\rx\x9b\x07"
HARMLESS = r"red\x1b[31m \u202etxt\nrm\rx\x9b\x07"


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
    assert with_script_name("no data.") == f"{name}: no data."


def test_a_duration_is_printed_in_its_largest_unit() -> None:
    said = [format_duration(seconds) for seconds in (-3, 12.4, 119, 180, 7300, 200_000)]
    assert said == ["0 s", "12 s", "119 s", "3 min", "2 h", "2 d"]


def test_a_name_of_a_folder_does_nothing_to_a_terminal_in_any_message(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert str(UserError(f"{EVIL} is not there.")) == f"{HARMLESS} is not there."
    assert with_script_name(UserError(EVIL)).endswith(f": {HARMLESS}")
    say(f"dumped {EVIL}")
    say_of_launcher(UserError(EVIL))
    out, err = capsys.readouterr()
    assert (out, err) == (f"dumped {HARMLESS}\n", f"launcher: {HARMLESS}\n")
    # Of several lines, such as a table or a traceback, each stays one.
    say(f"a table\nof {EVIL}", tagged=False)
    assert capsys.readouterr().out == f"a table\nof {HARMLESS}\n".replace(r"\n", "\n")
