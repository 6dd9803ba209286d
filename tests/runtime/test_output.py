"""Programs whose lines nobody reads any more, and programs that the system gives too little."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.launch import EXAMPLE, LAUNCHER, run_command

# Prints until it is ended; "dump" has a handler of SIGTERM, which is called instead.
TALKER = """
import signal, sys
from recsuite.runtime.console import end_when_unread
end_when_unread(dumps_first=True)
noted = []
if "dump" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
while not noted:
    print("a line", flush=True)
print("and one that nobody reads")
sys.stdout.flush()
open(sys.argv[1], "w").write(str(noted))
sys.exit(128 + noted[0])
"""


def head(command: list[str], lines: int, **options: object) -> tuple[int, str, str]:
    """The status of a program of which somebody reads some lines, those, and its errors."""
    text = " ".join(f"'{word}'" for word in command)
    script = f'{text} | head -{lines}; exit "${{PIPESTATUS[0]}}"'
    result = run_command(["bash", "-c", script], **options)  # type: ignore[arg-type]
    return result.returncode, result.stdout, result.stderr


@pytest.fixture
def talker(tmp_path: Path) -> list[str]:
    script = tmp_path / "talker.py"
    script.write_text(TALKER)
    return [str(script), str(tmp_path / "end")]


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_a_program_that_nobody_reads_ends_quietly_like_yes(talker: list[str], unbuffered: list[str]) -> None:
    assert head([sys.executable, *unbuffered, *talker], 3) == (141, "a line\n" * 3, "")
    assert not Path(talker[1]).exists()


def test_a_program_that_dumps_first_is_told_as_by_a_signal(talker: list[str]) -> None:
    assert head([sys.executable, *talker, "dump"], 3) == (141, "a line\n" * 3, "")
    assert Path(talker[1]).read_text() == "[13]"


def test_a_launch_that_nobody_reads_ends_quietly(talker: list[str]) -> None:
    launcher = [sys.executable, "-u", *LAUNCHER, "--standalone"]
    status, output, errors = head([*launcher, "--nproc_per_node=2", *talker], 3, timeout=90)
    assert (status, output) == (141, "a line\n" * 3)
    assert "Traceback" not in errors


def test_streams_that_were_closed_before_it_began_take_everything(tmp_path: Path) -> None:
    talk = (
        "from recsuite.runtime.console import end_when_unread; end_when_unread(); print(1, flush=True); "
        "sys.stderr.write('2')"
    )
    code = f"import sys; {talk}; sys.exit(sys.stderr.isatty())"
    result = run_command(["bash", "-c", f'"{sys.executable}" -c "$0" >&- 2>&-', code], cwd=tmp_path)
    assert result.returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        [EXAMPLE, "--epochs", "1"],
        [EXAMPLE, "--recommend", "--user", "1"],
        ["-m", "recsuite.monitoring.page", "runs"],
        [*LAUNCHER, "--standalone", "--nproc_per_node=2", EXAMPLE],
    ],
)
def test_24_file_descriptors_are_one_sentence(command: list[object], tmp_path: Path) -> None:
    words = " ".join(f"'{word}'" for word in (sys.executable, *command))
    result = run_command(["bash", "-c", f"ulimit -n 24; {words}"], cwd=tmp_path)
    assert result.returncode == 2
    assert (
        "This process may open 24 files (ulimit -n), and needs 64 at least; call `ulimit -n 1024` first"
        in result.stderr
    )
    assert result.stderr.count("\n") == 1
