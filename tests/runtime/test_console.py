"""The lines of a program: who says them, and what becomes of it when nobody reads them or limits are low."""

from __future__ import annotations

import builtins
import io
import logging
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from recsuite.runtime import console
from recsuite.runtime.console import install_tag, remove_tag, say
from tests.support.launch import EXAMPLE, LAUNCHER, PATIENCE, SUPPORT, python, run_command, started

# Prints until it is ended; "dump" has a handler of SIGTERM, which is called instead. A line is one write, or
# that of another rank could come before its end: a launcher starts ranks without buffers.
TALKER = """
import signal, sys
from recsuite.runtime.console import end_when_pipe_closes
end_when_pipe_closes(checkpoint_first=True)
noted = []
if "dump" in sys.argv:
    signal.signal(signal.SIGTERM, lambda number, frame: noted.append(number))
while not noted:
    print("a line\\n", end="", flush=True)
print("and one that nobody reads")
sys.stdout.flush()
open(sys.argv[1], "w").write(str(noted))
sys.exit(128 + noted[0])
"""


def head(command: list[str], lines: int) -> tuple[int, str, str]:
    """The status, as a shell has it, of a program of which some lines are read, those, and its errors."""
    with started(command) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = "".join(process.stdout.readline() for _ in range(lines))
        process.stdout.close()
        status = process.wait(30 * PATIENCE)
        return status if status >= 0 else 128 - status, output, process.stderr.read()


@pytest.fixture
def talker(tmp_path: Path) -> list[str]:
    script = tmp_path / "talker.py"
    script.write_text(TALKER)
    return [str(script), str(tmp_path / "end")]


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
def test_a_program_whose_output_has_no_reader_ends_quietly(talker: list[str], unbuffered: list[str]) -> None:
    assert head([sys.executable, *unbuffered, *talker], 3) == (141, "a line\n" * 3, "")
    assert not Path(talker[1]).exists()


def test_a_training_with_checkpoints_whose_output_has_no_reader_ends_as_by_a_signal(
    talker: list[str],
) -> None:
    assert head([sys.executable, *talker, "dump"], 3) == (141, "a line\n" * 3, "")
    assert Path(talker[1]).read_text() == "[13]"


def test_a_launch_whose_output_has_no_reader_ends_quietly(talker: list[str]) -> None:
    launcher = [sys.executable, "-u", *LAUNCHER, "--standalone"]
    status, output, errors = head([*launcher, "--nproc_per_node=2", *talker], 3)
    assert (status, output) == (141, "a line\n" * 3)
    assert "Traceback" not in errors


def test_closed_standard_streams_are_replaced(tmp_path: Path) -> None:
    talk = (
        "from recsuite.runtime.console import end_when_pipe_closes; end_when_pipe_closes(); print(1, "
        "flush=True); sys.stderr.write('2')"
    )
    code = f"import sys; {talk}; sys.exit(sys.stderr.isatty())"
    result = run_command(["bash", "-c", f'"{sys.executable}" -c "$0" >&- 2>&-', code], cwd=tmp_path)
    assert result.returncode == 0


@pytest.mark.parametrize(
    "command",
    [
        [EXAMPLE, "--epochs", "1"],
        ["-m", "recsuite.extras.reports.compare", "runs"],
        [*LAUNCHER, "--standalone", "--nproc_per_node=2", EXAMPLE],
    ],
)
def test_24_file_descriptors_gives_one_message(command: list[object], tmp_path: Path) -> None:
    result = python(SUPPORT / "limited.py", 24, *command, cwd=tmp_path)
    assert result.returncode == 2
    assert re.search(r"ulimit -n\) .* 64, got 24; call `ulimit -n 1024`", result.stderr)
    assert result.stderr.count("\n") == 1


def test_print_is_tagged_and_restored(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    original = builtins.print
    install_tag("RANK 3")
    try:
        print("one", 2, sep="-")
        print("two\nlines")
        with (tmp_path / "file").open("w") as file:
            print("plain", file=file)
    finally:
        remove_tag()
    assert builtins.print is original
    assert capsys.readouterr().out == "[RANK 3] one-2\n[RANK 3] two\n[RANK 3] lines\n"
    assert (tmp_path / "file").read_text() == "plain\n"


def test_a_line_is_written_in_one_piece_where_output_is_not_buffered(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []

    class Terminal(io.RawIOBase):
        def writable(self) -> bool:
            return True

        def write(self, data: Any) -> int:
            written.append(bytes(data))
            return len(data)

    terminal: Any = Terminal()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(terminal, write_through=True))
    install_tag("RANK 0")
    try:
        print("three", "words", 1)
        say("the program's own")
        print("no end", end="")
    finally:
        remove_tag()
    own = b"[RANK 0] the program's own\n"
    assert [data for data in written if data] == [b"[RANK 0] three words 1\n", own, b"[RANK 0] no end"]


def test_the_programs_own_lines_are_tagged_like_print_and_sent_to_logging(
    capsys: pytest.CaptureFixture[str],
) -> None:
    kept: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: kept.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("recsuite").addHandler(handler)
    try:
        say("before 100%")
        install_tag("RANK 3")
        say("one\ntwo")
        say("a\ntable", tagged=False)
    finally:
        remove_tag()
        logging.getLogger("recsuite").removeHandler(handler)
    say("after")
    assert capsys.readouterr().out == "before 100%\n[RANK 3] one\\ntwo\na\ntable\nafter\n"
    assert kept == ["before 100%", "one\\ntwo", "a\ntable"]


def test_installing_print_twice_and_restoring_twice_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    original = builtins.print
    install_tag("RANK 0")
    install_tag("RANK 1")
    print("once")
    remove_tag()
    remove_tag()
    assert builtins.print is original
    assert capsys.readouterr().out == "[RANK 1] once\n"


def test_the_message_of_fbgemm_on_a_torch_that_its_table_lacks_is_filtered() -> None:
    text = (
        "\n            \033[33m\n            _fbgemm_torch_compat_table has no entry for 1.6.0 of FBGEMM;\n"
    )
    noise, other = (
        logging.LogRecord("root", logging.WARNING, "", 0, words, None, None) for words in (text, "disk full")
    )
    assert not console._is_relevant(noise)
    assert console._is_relevant(other)
