"""Signals to end: the first is recorded, the second ends at once, as does one without other ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from recsuite.errors import LostPeerError
from recsuite.runtime import ending
from recsuite.runtime.ending import Termination
from tests.support.launch import started, wait_for

# Waits inside a library, where no handler of Python's runs.
WAITING = """
import signal, sys
from datetime import timedelta
import torch.distributed as dist
signal.signal(signal.SIGINT, signal.SIG_DFL)
from recsuite.runtime.ending import Termination
store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
with Termination(timedelta(seconds=60)).handling_signals():
    print("waits", flush=True)
    store.wait(["what nobody sets"], timedelta(seconds=60))
"""


# A script that waits in C++, or has a handler of its own.
SCRIPT = """
import signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from recsuite.tools.script import run_script

def main():
    if "own" in sys.argv:
        signal.signal(signal.SIGINT, lambda number, frame: print("its own", flush=True))
        print("waits", flush=True)
        time.sleep(2)
        return 3
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    print("waits", flush=True)
    store.wait(["what nobody sets"], timedelta(seconds=60))

if __name__ == "__main__":
    run_script(main)
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("script") / "some_script.py"
    path.write_text(SCRIPT)
    return path


def interrupted(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The status and the output of a waiting process after a Ctrl-C."""
    wait_for(process, "waits")
    # Until it is inside.
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    return process.returncode, output, errors


@pytest.mark.parametrize("local_rank", [0, 1])
def test_a_ctrl_c_ends_a_script_with_status_130_and_one_sentence_of_its_first_rank(
    local_rank: int, script: Path
) -> None:
    launched = {"RANK": str(local_rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": "2"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    with started([sys.executable, str(script)], env=launched) as process:
        said = "some_script.py: ended by Ctrl-C\n" * (local_rank == 0)
        assert interrupted(process) == (128 + signal.SIGINT, "", said)


def test_under_torchrun_one_rank_of_a_machine_prints_the_sentence_before_torchrun_ends(script: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    with started([sys.executable, *launcher, str(script)]) as process:
        wait_for(process, "waits")
        status, _, errors = interrupted(process)
    assert errors.count("some_script.py: ended by Ctrl-C\n") == 1
    # torchrun's own, which no rank can prevent.
    assert (status, errors.count("Traceback")) == (1, 1)
    assert "SignalException" in errors.splitlines()[-1]


def test_a_handler_of_the_script_receives_the_ctrl_c(script: Path) -> None:
    with started([sys.executable, str(script), "own"]) as process:
        assert interrupted(process) == (3, "its own\n", "")


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "waiting.py"
    script.write_text(WAITING)
    with started([sys.executable, str(script)]) as process:
        wait_for(process, "waits")
        # Until it is inside.
        time.sleep(0.5)
        yield process


def said_by(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    return process.stderr.readline()


def test_a_second_ctrl_c_ends_a_waiting_process_at_once(
    waiting: subprocess.Popen[str],
) -> None:
    waiting.send_signal(signal.SIGINT)
    assert said_by(waiting) == f"{ending.ANSWER}\n"
    # A shell and a launcher may both pass on the same one.
    waiting.send_signal(signal.SIGINT)
    time.sleep(2 * ending.SAME_SECONDS)
    assert waiting.poll() is None
    waiting.send_signal(signal.SIGINT)
    assert waiting.wait(30) == 128 + signal.SIGINT


def test_a_launchers_signal_after_a_ctrl_c_ends_a_process_too(
    waiting: subprocess.Popen[str],
) -> None:
    waiting.send_signal(signal.SIGINT)
    assert said_by(waiting) == f"{ending.ANSWER}\n"
    time.sleep(2 * ending.SAME_SECONDS)
    waiting.send_signal(signal.SIGTERM)
    assert waiting.wait(30) == 128 + signal.SIGINT


def test_a_sigterm_may_arrive_twice(waiting: subprocess.Popen[str]) -> None:
    for _ in range(2):
        waiting.send_signal(signal.SIGTERM)
        time.sleep(2 * ending.SAME_SECONDS)
        assert waiting.poll() is None


@pytest.fixture
def alone() -> Iterator[Termination]:
    """Vote of a process without peers."""
    from datetime import timedelta

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Termination(timedelta(seconds=60))
    dist.destroy_process_group()


@pytest.mark.parametrize("number", ending.SIGNALS)
def test_the_ranks_agree_on_the_signal_one_step_later(alone: Termination, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with alone.handling_signals():
        assert alone.vote() == 0
        os.kill(os.getpid(), number)
        assert (alone.vote(), alone.vote()) == (0, number)
    assert signal.getsignal(number) is before


def test_a_rank_with_a_signal_to_end_that_lost_a_peer_exits_with_the_status_of_the_signal(
    alone: Termination,
) -> None:
    def lose(error: Exception) -> None:
        with alone.handling_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            raise error

    with pytest.raises(SystemExit) as ended:
        lose(LostPeerError("rank 1 has ended"))
    assert ended.value.code == 128 + signal.SIGTERM
    # A fault of its own is told, whatever else has happened.
    with pytest.raises(ArithmeticError):
        lose(ArithmeticError())
