"""Calls into libraries without a deadline, and stopped launchers, end in time."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.launch import PATIENCE, python, started, wait_for

HEAD = "import sys, time\n"
CALL = """
from recsuite.runtime import peers
peers.CALL_SECONDS = 0.5
with peers.Heartbeat(1, 0).within("joining the other ranks"):
    print("inside", flush=True)
    time.sleep(60)
"""
STUCK = """
import os, threading
from recsuite.extras.launcher import __main__ as launcher
launcher.PATIENCE = launcher.MEETING_SECONDS = 0.5
launcher.start_watchdog(["--dump", "--timeout", "1"])
{what}
"""
FREE = "for _ in range(30): time.sleep(0.1)\nprint('ended by itself')"
# A lock that is never opened, asked for in a way that Python does not interrupt.
HELD = """
import ctypes
read, write = os.pipe()
ctypes.CDLL(None).read(read, ctypes.create_string_buffer(1), 1)
"""
LAUNCHER = """
import os, subprocess
os.environ["TORCHELASTIC_RUN_ID"] = "1"
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
child.wait()
"""
RANK = """
from recsuite.runtime import host, peers
host.die_with_parent()
peers.Heartbeat(1, 0)
print("lives", flush=True)
time.sleep(60)
"""
SHELL = """
import subprocess
subprocess.Popen([sys.executable, "-c", sys.argv[1]]).wait()
"""
ALONE = """
import os, signal
from recsuite.runtime import peers
heart = peers.Heartbeat(1, 0)
os.kill(os.getppid(), signal.SIGKILL)
time.sleep(3 * peers.BEAT_SECONDS)
heart.stop()
print("continues")
"""
# Orphans become children of this process, which then runs no Python, like an init.
INIT = """
import ctypes, os, subprocess
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
subprocess.run([sys.executable, "-c", *sys.argv[1:]])
for number in (1, 2):
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
os.execvp("sleep", ["sleep", "60"])
"""
KILLED_LAUNCHER = """
import os, subprocess
env = {**os.environ, "TORCHELASTIC_RUN_ID": "1"}
subprocess.Popen([sys.executable, "-c", sys.argv[1]], env=env, start_new_session=True)
os._exit(1)
"""
LATE_RANK = """
import recsuite as rs
time.sleep(1)
rs.init_runtime(rs.parse_args([]))
print("lives", flush=True)
"""
JOINING = """
import recsuite as rs
from recsuite.runtime import peers
peers.CALL_SECONDS = 0.5
rs.init_runtime(rs.parse_args(["--timeout", "1"]))
"""
FAILED = """
import contextlib
from recsuite.runtime import peers
peers.CALL_SECONDS = 0
with contextlib.suppress(ValueError), peers.Heartbeat(1, 0).within("joining the other ranks"):
    raise ValueError
time.sleep(1 + 3 * peers.BEAT_SECONDS)
print("told why")
"""
STOPS = """
import os, signal, subprocess
from recsuite.extras.launcher import __main__ as launcher
launcher.STOPPED_SECONDS = 0.5
launcher.start_watchdog(["--timeout", "1"])
child = subprocess.Popen(["sleep", "60"])
child.send_signal(signal.SIGSTOP)
print(child.wait())
"""
SCRIPTS = {
    "call": (CALL,),
    "failed": (FAILED,),
    "alone": (SHELL, HEAD + ALONE),
    "held": (STUCK.format(what=HELD),),
    "free": (STUCK.format(what=FREE),),
    "stops": (STOPS,),
}

Ended = dict[str, subprocess.CompletedProcess[str]]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def ended() -> Ended:
    """The scripts by name, which ran at the same time: they wait most of theirs."""
    with ThreadPoolExecutor(len(SCRIPTS)) as pool:
        return dict(zip(SCRIPTS, pool.map(lambda words: run(*words), SCRIPTS.values()), strict=True))


def test_a_hanging_call_ends_the_rank_with_a_message_and_its_stack(ended: Ended) -> None:
    result = ended["call"]
    assert result.returncode == 1
    assert result.stderr.endswith("example.py: joining the other ranks took longer than --timeout 1\n")
    assert "line 7, in <module>" in result.stderr


@pytest.mark.parametrize("of_launcher", [True, False])
def test_a_store_that_accepts_and_never_answers_ends_the_rank_with_a_message(
    of_launcher: bool, tmp_path: Path
) -> None:
    """Torch waits without a deadline for the first answer of a store, of torchrun's and of rank 0's."""
    script = tmp_path / "joining.py"
    script.write_text(JOINING)
    env = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    env["TORCHELASTIC_USE_AGENT_STORE"] = str(of_launcher)
    # The kernel accepts connections for it.
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = python(script, env={**env, "MASTER_PORT": str(port)})
    assert result.returncode == 1
    assert f"joining the other ranks at 127.0.0.1:{port} took longer than --timeout 1\n" in result.stderr
    assert "in open_store" in result.stderr


def test_a_rank_with_an_exception_has_time_to_report_it(ended: Ended) -> None:
    result = ended["failed"]
    assert (result.returncode, result.stdout) == (0, "told why\n"), result.stderr


def test_a_rank_that_torchrun_did_not_start_outlives_its_parent(ended: Ended) -> None:
    result = ended["alone"]
    # The pipe is open as long as the rank lives.
    assert result.stdout == "continues\n"


def test_a_rank_whose_launcher_died_before_it_could_ask_ends() -> None:
    command = [sys.executable, "-c", HEAD + INIT, HEAD + KILLED_LAUNCHER, HEAD + LATE_RANK]
    with started(command) as process:
        assert process.stdout is not None
        # Open as long as the rank lives.
        output = process.stdout.read()
    assert "lives" not in output
    assert "its launcher is gone" in output


def test_a_launcher_inside_a_call_that_does_not_return_is_ended(ended: Ended) -> None:
    result = ended["held"]
    assert result.returncode == 1
    assert "for the machine with the rendezvous, which may be cut off; this launcher ends" in result.stderr
    assert "in <module>" in result.stderr


def test_a_launcher_that_polls_is_not_ended(ended: Ended) -> None:
    result = ended["free"]
    assert (result.returncode, result.stdout) == (0, "ended by itself\n"), result.stderr


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_a_launcher_that_is_stopped_for_too_long_is_ended_and_one_that_continues_is_not() -> None:
    with started([sys.executable, "-c", HEAD + LAUNCHER, HEAD + RANK]) as process:
        wait_for(process, "lives")
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        process.send_signal(signal.SIGCONT)
        time.sleep(1.5)
        assert process.poll() is None
        start = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        assert process.wait(10 * PATIENCE) == -signal.SIGKILL
        assert time.monotonic() - start > 0.9
        assert process.stderr is not None
        assert "the launcher was stopped for --timeout 1 seconds" in process.stderr.read()


def test_a_rank_that_is_stopped_for_too_long_is_ended_by_its_launcher(ended: Ended) -> None:
    result = ended["stops"]
    assert result.stdout == f"{-signal.SIGKILL}\n"
    assert "was stopped for --timeout 1 seconds, and is ended" in result.stderr
