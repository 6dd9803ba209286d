"""Messages of the launcher before and after the ranks: too many of them, and a killed one."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.metrics.api import prof
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from recsuite.errors import UserError
from recsuite.extras.launcher import __main__ as launcher
from recsuite.extras.launcher.__main__ import RANK_BYTES
from tests.support.launch import EXAMPLE, environment, free_port, launched, run_command, started


def asked(number: int | str) -> argparse.Namespace:
    return argparse.Namespace(nproc_per_node=str(number))


def test_more_processes_than_cores_print_their_cost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launcher, "allowed_cores", lambda: 2)
    monkeypatch.setattr(launcher, "allowed_memory", lambda: 64 * RANK_BYTES)
    launcher._check_processes(asked(2))
    launcher._check_processes(asked("gpu"))
    assert capsys.readouterr().err == ""
    launcher._check_processes(asked(64))
    error = capsys.readouterr().err
    assert error.startswith("launcher: 64 processes share 2 cores: their start takes about 96 s, and")
    assert error.count("\n") == 1
    with pytest.raises(UserError, match=r"65 processes need 19.0 GiB of memory .* give at most 64 \(NPROC"):
        launcher._check_processes(asked(65))


def test_a_killed_rank_is_named_with_the_likely_reason_and_how_to_continue(tmp_path: Path) -> None:
    flags = ["--dump", "--save_dir", str(tmp_path)]
    said = launcher._killed_rank([1], 77, argparse.Namespace(training_script_args=flags))
    reason, memory, advice = said.splitlines()
    assert reason.startswith("rank 1 (pid 77) was killed by signal 9 (SIGKILL), most often by the kernel ")
    assert memory.startswith("Memory now: ")
    assert "a smaller --batch_size" in advice
    continued = f"; start again; --resume continues from the last checkpoint in {tmp_path}, if there is one."
    assert advice.endswith(continued)
    for given, words in ((flags, "--resume continues from"), ([], "with --dump to have something")):
        assert words in launcher._how_to_continue(argparse.Namespace(training_script_args=given))


def test_a_mistake_of_one_rank_is_the_status_although_torchrun_ended_another_at_the_same_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failures = {
        rank: ProcessFailure(rank, 100 + rank, status, "") for rank, status in ((0, 2), (1, -signal.SIGTERM))
    }
    failures[1].timestamp = failures[0].timestamp - 1

    def run(arguments: argparse.Namespace) -> None:
        raise ChildFailedError("script.py", failures)

    monkeypatch.setattr("torch.distributed.run.run", run)
    assert launcher._run(argparse.Namespace()) == 2


def test_a_killed_rank_of_a_launch_is_reported_with_one_message_instead_of_a_table(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    text = script.read_text().replace("    cleanup_runtime()", "    import os\n    os.kill(os.getpid(), 9)")
    script.write_text(text)
    result = run_command(launched(script), env=environment(tmp_path), timeout=90)
    assert result.returncode == 1
    assert "was killed by signal 9 (SIGKILL), " in result.stderr
    assert "Memory now: " in result.stderr
    assert "exitcode" not in result.stderr
    assert [*(tmp_path / "temporary").glob("*elastic*")] == []


def test_a_signal_lost_in_torchs_timer_still_ends_the_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def told_to_end() -> float:
        raise SignalException("Ctrl-C", signal.SIGINT)

    clock = SimpleNamespace(time=told_to_end)
    monkeypatch.setattr("torch.distributed.elastic.metrics.api.time", clock)
    monitored = prof(lambda arguments: None)
    # Once torch fixes its decorator, this is a SignalException, and the launcher need not look for another.
    with pytest.raises(UnboundLocalError):
        monitored(asked(2))
    monkeypatch.setattr("torch.distributed.run.run", monitored)
    assert launcher._run(asked(2)) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "launcher: ended by SIGINT, after the ranks had ended\n"


def test_a_launcher_prints_that_it_waits_for_other_machines_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    where = ["--nnodes=2", "--rdzv_backend=c10d", f"--rdzv_endpoint={endpoint}", "--nproc_per_node=1"]
    command = [sys.executable, "-u", str(launcher.__file__), *where, str(EXAMPLE)]
    with started(command, env=environment(tmp_path)) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        # The server of the meeting begins shortly before the wait.
        deadline = time.monotonic() + 150
        with socket.socket() as probe:
            while probe.connect_ex(("127.0.0.1", port)) != 0:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        time.sleep(5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=300)
    assert first.startswith(f"launcher: meets the other machines at {endpoint} and waits for them, 600 s")
    assert errors.splitlines()[-1] == "launcher: ended by SIGINT, while it waited for the other machines"
    assert "Traceback" not in errors
    assert process.returncode == 128 + signal.SIGINT
