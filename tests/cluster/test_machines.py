"""The machines of `machines.py` are as separate as machines are, and go without a trace."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, Command, Machine, why_not
from tests.support.launch import started

PORT = 5000
LISTEN = f"""
import socket
server = socket.create_server(("", {PORT}))
print("listens", flush=True)
connection, _ = server.accept()
while data := connection.recv(100):
    print(data.decode(), flush=True)
print("closed", flush=True)
"""
TALK = f"""
import socket, time
connection = socket.create_connection(("node-0", {PORT}), timeout=5)
number = 0
while True:
    connection.send(b"%d," % (number := number + 1))
    time.sleep(0.05)
"""
# Like torchrun and a rank that hangs: in sessions of their own, and deaf to SIGTERM.
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    print("2 run", flush=True)
time.sleep(99)
"""
FORGETFUL = """
import sys, time
from pathlib import Path
from tests.cluster.machines import Cluster
with Cluster(Path(sys.argv[1]) / "cluster", 1) as cluster:
    (machine,) = cluster.machines
    machine.start([sys.executable, "-c", "import time; time.sleep(99)"])
    while len(machine.processes()) != 1:
        time.sleep(0.1)
    print(*machine.processes(), machine._init, machine._holder.pid, flush=True)
    time.sleep(99)
"""


def say(machine: Machine, expression: str) -> str:
    command = [sys.executable, "-c", f"import os, socket; print({expression})"]
    return machine.run(command, timeout=20).succeeded().strip()


def listen_to(listener: Machine, talker: Machine) -> Command:
    """A command on one machine that hears another one talk, all the time."""
    listening = listener.start([sys.executable, "-c", LISTEN])
    listening.wait_for("listens")
    talker.start([sys.executable, "-c", TALK])
    listening.wait_for("3,")
    return listening


def test_machines_have_names_addresses_processes_and_memory_of_their_own(
    cluster_of: Callable[[int], Cluster],
) -> None:
    first, second = cluster_of(2).machines
    assert [say(machine, "socket.gethostname()") for machine in (first, second)] == ["node-0", "node-1"]
    assert say(first, "socket.gethostbyname('node-1')") == second.address
    boots = {say(machine, "open('/proc/sys/kernel/random/boot_id').read()") for machine in (first, second)}
    assert len(boots) == 2
    Path(f"/dev/shm/{os.getpid()}-cluster").touch()
    try:
        assert say(first, "os.listdir('/dev/shm')") == "[]"
    finally:
        Path(f"/dev/shm/{os.getpid()}-cluster").unlink()
    # Itself and the one that holds the machine.
    assert int(say(first, "sum(map(str.isdigit, os.listdir('/proc')))")) == 2
    assert socket.gethostname() not in ("node-0", "node-1")


def test_a_cut_link_lets_nothing_through_until_it_is_repaired(
    cluster_of: Callable[[int], Cluster],
) -> None:
    first, second = cluster_of(2).machines
    listening = listen_to(first, second)
    second.cut()
    time.sleep(0.3)
    heard, before = listening.text(), first.received()
    link = second.run(["ip", "link", "show", "eth0"], timeout=20).succeeded()
    assert "NO-CARRIER" not in link
    time.sleep(0.3)
    assert (listening.text(), first.received()) == (heard, before)
    second.fix()
    listening.wait_for("20,", timeout=15)
    assert first.received() > before


def test_peers_notice_a_kill_and_not_a_crash(cluster_of: Callable[[int], Cluster]) -> None:
    first, second = cluster_of(2).machines
    for end, is_heard in ((second.kill, True), (second.crash, False)):
        listening = listen_to(first, second)
        end()
        assert second.processes() == []
        time.sleep(0.3)
        assert (listening.process.poll() is not None) == is_heard
        first.kill()


def test_a_cluster_leaves_nothing_behind(cluster_of: Callable[[int], Cluster]) -> None:
    cluster = cluster_of(2)
    for machine in cluster.machines:
        stubborn = machine.start([sys.executable, "-c", STUBBORN])
        stubborn.wait_for("2 run")
        machine.signal(signal.SIGTERM)
    pids = [pid for machine in cluster.machines for pid in machine.processes()]
    assert len(pids) == 4
    cluster.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_cluster_ends_with_the_process_that_made_it(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    script = tmp_path / "script.py"
    script.write_text(FORGETFUL)
    with started([sys.executable, str(script), str(tmp_path)]) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        process.kill()
    deadline = time.monotonic() + 50
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
