"""Machines of a cluster, made of Linux namespaces: what is true of several machines holds in CI too.

    with Cluster(tmp_path, 2) as cluster:
        first, second = cluster.machines
        commands = [machine.start([sys.executable, "-u", script]) for machine in cluster.machines]
        commands[0].wait_for("epoch 1/3")
        second.cut()
        assert commands[0].wait(60) == 1
        assert "node-1" in commands[0].text()
        assert first.processes() == []

Each machine has its own network (an interface at a switch that all share, and a loopback), host name, hosts
file, processes, /proc, /dev/shm and boot id. So no rank sees the processes, the shared memory or the open
files of another machine's rank. Folders, the clock and the cores are those of this machine: `bind` gives a
machine a folder of its own.

    machine.run / machine.start     a command, in a session of its own, with its output in a file
    machine.processes()             the pids, as this machine numbers them, of all that runs there
    machine.ranks()                 those of the ranks alone
    machine.signal(SIGSTOP)         to all that runs there; machine.kill() is SIGKILL, and waits
    machine.cut(), machine.fix()   packets vanish in the switch: no reset, and the carrier stays
    machine.crash()                 cut and then kill: the others get no farewell
    machine.call_itself("127.0.1.1")    a name that is the machine's loopback to itself
    machine.received()              bytes that have come in by the network
    launched("--dump", ...)          the command that launches ranks of the example on each of some machines

Needs root, or unprivileged user namespaces; `why_not()` says in a sentence what is missing, and the fixture
`cluster_of` of `conftest.py` skips with it. Nothing has a global name, so any number of clusters may live
side by side, and the kernel removes all of one when the process that made it has ended, however it ended.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

from tests.support.launch import EXAMPLE, LAUNCH_VARIABLES, LAUNCHER, NO_GPUS, PATIENCE, ROOT
from tests.support.preloaded import preloaded
from tests.support.starting import is_quick

NETWORK = "10.77.0"
RENDEZVOUS_PORT = 29400
SECONDS = 100
# Ends when its standard input does, so with the process that holds the other end. Its orphans, who are all
# that end on its machine, are not waited for: the kernel removes them.
SWITCH = """set -e
echo 1 >/proc/sys/net/ipv6/conf/default/disable_ipv6
ip link add switch type bridge mcast_snooping 0
ip link set switch up
echo ready
exec cat
"""
MACHINE = """set -e
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
mount --bind "$HOSTS" /etc/hosts
mount --bind "$BOOT_ID" /proc/sys/kernel/random/boot_id
echo "$NAME" >/proc/sys/kernel/hostname
ip link set lo up
echo ready
trap '' CHLD
exec cat
"""
SPACES = ("--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child")


@functools.cache
def own_user_namespace() -> tuple[str, ...] | None:
    """Further arguments of `unshare` to make namespaces here; None if it cannot."""
    for more in ((), ("--user", "--map-root-user")):
        command = ["unshare", *more, *SPACES, "sh", "-c", "mount -t proc proc /proc && ip link set lo up"]
        if shutil.which("unshare") and subprocess.run(command, capture_output=True).returncode == 0:
            return more
    return None


def why_not() -> str:
    """Return the reason why no cluster can be made here, or an empty text."""
    missing = [name for name in ("ip", "unshare", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"a cluster needs {', '.join(missing)} (packages iproute2 and util-linux)"
    if own_user_namespace() is None:
        return "a cluster needs root, or user namespaces for everyone; here unshare is refused"
    return ""


class Cluster:
    """Machines node-0, node-1 ... at one switch, from `with` to its end; folder: for their files."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.names = [f"node-{number}" for number in range(count)]
        self.machines: list[Machine] = []
        self._user = own_user_namespace() or ()
        self._switch: subprocess.Popen[str] | None = None

    def __enter__(self) -> Cluster:
        try:
            self._switch = _holder(["unshare", *self._user, "--net", "sh", "-c", SWITCH], {})
            for number in range(len(self.names)):
                self.machines.append(Machine(self, number))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all that runs on the machines, and the machines."""
        for machine in self.machines:
            machine.close()
        if self._switch is not None:
            _end(self._switch)

    def ip(self, *arguments: str) -> str:
        """Return the output of the command `ip` in the switch."""
        assert self._switch is not None
        return _checked([*self.enter(self._switch.pid, "--net"), "ip", *arguments])

    def enter(self, pid: int, *spaces: str) -> list[str]:
        """Return the prefix of a command that runs it in the namespaces of a process."""
        user = ["--user", "--preserve-credentials"] if self._user else []
        return ["nsenter", "--target", str(pid), *user, *spaces, "--"]

    def hosts(self, own: Mapping[int, str] = MappingProxyType({})) -> str:
        """A hosts file with all machines, some of them with other addresses than theirs."""
        addresses = [own.get(number, f"{NETWORK}.{number + 1}") for number in range(len(self.names))]
        lines = [f"{address} {name}" for address, name in zip(addresses, self.names, strict=True)]
        return "\n".join(["127.0.0.1 localhost", *lines, ""])

    def make(self, number: int, folder: Path) -> subprocess.Popen[str]:
        """The process that holds a machine's namespaces."""
        assert self._switch is not None
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(self.hosts())
        (folder / "boot_id").write_text(f"{uuid.uuid4()}\n")
        named = {"NAME": self.names[number], "HOSTS": folder / "hosts", "BOOT_ID": folder / "boot_id"}
        entered = self.enter(self._switch.pid, "--net")
        holder = _holder([*entered, "unshare", *SPACES, "sh", "-c", MACHINE], named)
        try:
            cable = ("link", "add", f"port{number}", "type", "veth", "peer", "name", "eth0")
            self.ip(*cable, "netns", str(_child(holder.pid)))
        except BaseException:
            _end(holder)
            raise
        return holder


class Machine:
    """One of a cluster."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster, self.number = cluster, number
        self.name, self.address = cluster.names[number], f"{NETWORK}.{number + 1}"
        self.folder = cluster.folder / self.name
        self._port = f"port{number}"
        self._holder = cluster.make(number, self.folder)
        self._init = _child(self._holder.pid)
        self._space = os.readlink(f"/proc/{self._init}/ns/pid")
        self._commands: list[Command] = []
        self._shell(f"ip addr add {self.address}/24 dev eth0 && ip link set eth0 up")
        self.fix()
        self.cluster.ip("link", "set", self._port, "up")

    # --- commands ---

    def start(
        self,
        command: Sequence[object],
        env: Mapping[str, object] | None = None,
        cwd: Path = ROOT,
        library: Path | None = None,
        real: bool = False,
    ) -> Command:
        """Start a command here, in a session of its own; library: what LD_PRELOAD would name; real: whether a
        Python imports what it needs by itself.
        """
        words, path = [*map(str, command)], self.folder / f"output-{len(self._commands)}"
        if is_quick(words) and not real:
            started = Command(words, path, env, cwd, functools.partial(preloaded, self._init, library))
        else:
            started = Command([*self._enter(), "setsid", *words], path, env, cwd)
        self._commands.append(started)
        return started

    def run(
        self,
        command: Sequence[object],
        env: Mapping[str, object] | None = None,
        *,
        cwd: Path = ROOT,
        timeout: float = 120,
    ) -> Command:
        """Run a command here to its end."""
        started = self.start(command, env, cwd)
        started.wait(timeout)
        return started

    def processes(self) -> list[int]:
        """The pids of all that runs here, without who is dead and not yet waited for."""
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_mine(pid)]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all that runs here."""
        for pid in self.processes():
            _signal(pid, number)

    def ranks(self) -> list[int]:
        """The pids of the ranks that torchrun started here, in their order."""
        found = {}
        for pid in self.processes():
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            values = dict(line.split(b"=", 1) for line in environment if b"=" in line)
            # A rank's data workers inherit its variables, not its session.
            if b"LOCAL_RANK" in values and os.getsid(pid) == pid:
                found[int(values[b"LOCAL_RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def kill(self) -> None:
        """Kill all that runs here. The machine itself stays, and its kernel ends the connections."""
        deadline = time.monotonic() + SECONDS
        while self.processes():
            assert time.monotonic() < deadline, f"{self.name}: {self.processes()} cannot be killed"
            self.signal(signal.SIGKILL)
            time.sleep(0.01)

    def crash(self) -> None:
        """Lose power, as the other machines see it."""
        self.cut()
        self.kill()

    def bind(self, source: Path, target: Path) -> None:
        """Show a folder or file at another path, here alone."""
        self._shell(f"mount --bind '{source}' '{target}'")

    def call_itself(self, address: str = "") -> None:
        """Take its own name for another address, as Debian installs machines, or for its own again."""
        # In place: the file is mounted.
        (self.folder / "hosts").write_text(self.cluster.hosts({self.number: address} if address else {}))

    def close(self) -> None:
        """End all that runs here, and the machine."""
        _kill(self._holder)
        # The machine is gone when all its processes have been waited for.
        for command in self._commands:
            command.close()
        self._holder.communicate(timeout=SECONDS)

    # --- the network ---

    def cut(self) -> None:
        """Have packets from and to here vanish, silently."""
        self.cluster.ip("link", "set", self._port, "nomaster")

    def fix(self) -> None:
        """Undo `cut`."""
        self.cluster.ip("link", "set", self._port, "master", "switch")

    def received(self) -> int:
        """The bytes that have come in by the network so far, headers included."""
        found = json.loads(self.cluster.ip("-json", "-stats", "link", "show", self._port))
        return int(found[0]["stats64"]["tx"]["bytes"])

    # --- ---

    def _enter(self) -> list[str]:
        return self.cluster.enter(self._init, "--net", "--uts", "--ipc", "--mount", "--pid")

    def _shell(self, line: str) -> None:
        _checked([*self._enter(), "sh", "-c", line])

    def _is_mine(self, pid: int) -> bool:
        try:
            is_here = pid != self._init and os.readlink(f"/proc/{pid}/ns/pid") == self._space
            return is_here and not re.search(r"\nState:\s+[ZX]", Path(f"/proc/{pid}/status").read_text())
        except OSError:
            return False


class Command:
    """A command in a session of its own, with its output and errors together in a file.

    how: the context in which it is started (`preloaded.py`).
    """

    def __init__(
        self,
        command: list[str],
        path: Path,
        env: Mapping[str, object] | None = None,
        cwd: Path = ROOT,
        how: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self.path = path
        self._is_entered = command[0] == "nsenter"
        inherited = {key: value for key, value in os.environ.items() if key not in LAUNCH_VARIABLES}
        given = {key: str(value) for key, value in (env or {}).items()}
        own = {**NO_GPUS, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLE.parent)}
        env = {**inherited, **own, **given}
        options: dict[str, Any] = {"cwd": cwd, "env": env, "text": True, "start_new_session": True}
        with path.open("wb") as output, how():
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, **options
            )

    def poll(self) -> int | None:
        """The exit status, negative if a signal ended it; None while it runs."""
        return self.process.poll()

    def text(self) -> str:
        """Output so far."""
        return self.path.read_text(errors="replace") if self.path.exists() else ""

    def wait_for(self, words: str, timeout: float = 60) -> None:
        """Wait until it has said some words."""
        timeout *= PATIENCE
        deadline = time.monotonic() + timeout
        while True:
            status = self.poll()
            if words in self.text():
                return
            assert status is None, f"it ended without {words!r}:\n{self.text()}"
            assert time.monotonic() < deadline, f"no {words!r} after {timeout} s:\n{self.text()}"
            time.sleep(0.02)

    def wait(self, timeout: float = 120) -> int:
        """Wait for its end; the exit status, negative if a signal ended it."""
        timeout *= PATIENCE
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            assert time.monotonic() < deadline, f"it still ran after {timeout} s:\n{self.text()}"
            time.sleep(0.01)
        return status

    def succeeded(self, timeout: float = 120) -> str:
        """Output, after a check that it ended without an error."""
        status = self.wait(timeout)
        assert status == 0, f"status {status}\n{self.text()}"
        return self.text()

    def write(self, line: str) -> None:
        """Give it a line to read."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal; not to what it started."""
        pid = self.process.pid
        _signal(_child(pid) if self._is_entered else pid, number)

    def close(self) -> None:
        """Wait for it, when its machine is gone."""
        self.wait(SECONDS)
        assert self.process.stdin is not None
        # What it never read.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()


def launched(
    *arguments: object,
    nnodes: str = "2",
    nproc: int = 1,
    options: Sequence[str] = (),
    script: Path = EXAMPLE,
) -> list[str]:
    """The command that starts ranks of a script on each of some machines; node-0 has the rendezvous."""
    where = [f"--nnodes={nnodes}", "--rdzv_backend=c10d", f"--rdzv_endpoint=node-0:{RENDEZVOUS_PORT}"]
    launcher = [sys.executable, "-u", *LAUNCHER, *where, *options, f"--nproc_per_node={nproc}"]
    return [*launcher, str(script), *map(str, arguments)]


def _holder(command: list[str], named: Mapping[str, object]) -> subprocess.Popen[str]:
    """A process that holds namespaces until its standard input ends."""
    env = {**os.environ, **{key: str(value) for key, value in named.items()}}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    # In a session of its own, so that Ctrl-C does not end it before what runs in it.
    process = subprocess.Popen(command, env=env, text=True, start_new_session=True, **pipes)
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        _, errors = process.communicate(timeout=SECONDS)
        raise RuntimeError(f"{' '.join(command[:4])} ... made no namespaces: {errors}")
    return process


def _end(holder: subprocess.Popen[str]) -> None:
    _kill(holder)
    holder.communicate(timeout=SECONDS)


def _kill(holder: subprocess.Popen[str]) -> None:
    """Kill a holder; the kernel kills all that its namespace of processes holds."""
    for pid in _children(holder.pid) or [holder.pid]:
        _signal(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _child(pid: int) -> int:
    """The process that another one has started, which may be about to."""
    deadline = time.monotonic() + SECONDS
    while not (children := _children(pid)):
        assert time.monotonic() < deadline, f"process {pid} has started nothing"
        time.sleep(0.005)
    return children[0]


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _checked(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert result.returncode == 0, f"{command}: {result.stderr}"
    return result.stdout
