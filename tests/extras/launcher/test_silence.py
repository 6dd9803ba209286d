"""Stops, kills, cut connections and signals at any moment: all processes are gone in time.

An attack meets real launches, in a phase that `silent_ranks.py` holds them in. The short form has a short
--timeout and a launcher of little patience; `./run.sh soak tests/extras/launcher/test_silence.py` makes every
attack on one machine and on two, SOAK_ROUNDS times each (default: 3), SOAK_AT_ONCE at a time (default: 2),
or only those with SOAK_ONLY in "attack, phase", with --timeout 10 and the launcher's own 30 seconds, and
prints the seconds until the last process was gone.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from recsuite.checkpoint.folder import newest_in
from tests.cluster.machines import Cluster, Command, Machine, why_not
from tests.support.launch import LAUNCHER, SUPPORT
from tests.support.place import marked_processes
from tests.support.preloaded import preloaded
from tests.support.silent_ranks import MARK

HASTY = SUPPORT / "hasty_launcher.py"
SCRIPT = SUPPORT / "silent_ranks.py"
ROUNDS = int(os.environ.get("SOAK_ROUNDS", "3"))
AT_ONCE = int(os.environ.get("SOAK_AT_ONCE", "2"))
ONLY = os.environ.get("SOAK_ONLY", "")
START_SECONDS = 600
ENDLESS = ("--epochs", "1000", "--patience", "0", "--batch_size", "64")
DUMPS = ("--dump", "--keep", "1", "--save_dir", "{folder}/dumps")
FLAGS: dict[str, tuple[str, ...]] = {
    # Longer than --timeout, for which ranks wait before they end a launcher that is stopped.
    "start": ENDLESS,
    "preparation": (),
    "training": ENDLESS,
    "training with dumps": (*ENDLESS, *DUMPS),
    "training with dumps and workers": (*ENDLESS, *DUMPS, "--num_workers", "1", "--worker_timeout", "1"),
    "dumps": (*ENDLESS, *DUMPS, "--dump_every", "1"),
    "a long dump": (*ENDLESS, *DUMPS, "--dump_every", "1"),
    "evaluation": (*ENDLESS, *DUMPS),
    "load": ("--load", "{trained}/dumps"),
    "the end": ("--epochs", "1"),
}


@dataclass(frozen=True)
class Limits:
    """timeout: --timeout; patience: the launcher's, after it signals a process to end; in seconds."""

    timeout: int
    patience: int
    slack: int

    @property
    def promised(self) -> int:
        return self.timeout + self.patience + self.slack


SHORT, REAL = Limits(3, 2, slack=9), Limits(10, 30, slack=5)
# For what has to end long before its deadline.
AT_LEISURE = Limits(25, 20, slack=9)


class Launch:
    """Two ranks, on one machine or one on each of two, that have come to a phase."""

    def __init__(self, folder: Path, machines: list[Machine]) -> None:
        self.folder, self.machines = folder, machines
        self.commands: list[Command] = []

    def start(self, command: list[str]) -> None:
        """Start the launcher of each machine."""
        env = {"TEST_MARK": str(self.folder), "TMPDIR": str(self.folder)}
        if self.machines:
            self.commands = [machine.start(command, env) for machine in self.machines]
        else:
            self.commands = [Command(command, self.folder / "output", env, how=preloaded)]

    def processes(self) -> list[int]:
        """All processes of the launch."""
        return marked_processes(str(self.folder))

    def launchers(self) -> list[int]:
        """The launcher of each machine."""
        return [pid for pid in self.processes() if _variable(pid, "RANK") is None and _is_launcher(pid)]

    def rank(self, number: int) -> int:
        """The process of a rank."""
        launchers = self.launchers()
        ranks = [pid for pid in self.processes() if _parent(pid) in launchers]
        return next(pid for pid in ranks if _variable(pid, "RANK") == str(number))

    def worker(self) -> int:
        """The data worker of the last rank."""
        rank = self.rank(1)
        return max(pid for pid in self.processes() if _parent(pid) == rank)

    def text(self) -> str:
        """Output of launchers and ranks."""
        return "\n".join(command.text() for command in self.commands)

    def wait_for_marks(self, count: int) -> None:
        """Until so many ranks have come to the phase."""
        deadline = time.monotonic() + START_SECONDS
        while self.text().count(MARK) < count:
            is_running = any(command.process.poll() is None for command in self.commands)
            assert is_running, f"all ended before the phase: {self.text()}"
            assert time.monotonic() < deadline, f"never came to the phase: {self.text()}"
            time.sleep(0.05)

    def seconds_to_end(self, limit: float) -> float:
        """Wait until the last process is gone; how long that took."""
        start = time.monotonic()
        while left := self.processes():
            assert time.monotonic() < start + limit, (
                f"{[_told(pid) for pid in left]} after {limit} s: {self.text()}"
            )
            time.sleep(0.05)
        return time.monotonic() - start

    def kill(self) -> None:
        """Leave nothing."""
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for command in self.commands:
            command.process.wait()


def _told(pid: int) -> str:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return f"{pid} {state} rank {_variable(pid, 'RANK')}"
    return str(pid)


def _variable(pid: int, name: str) -> str | None:
    variables = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    return next((line.partition("=")[2] for line in variables if line.startswith(f"{name}=")), None)


def _is_launcher(pid: int) -> bool:
    return not {LAUNCHER[-1], str(HASTY)}.isdisjoint(Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# --- attacks ---


def to_rank(number: signal.Signals) -> Callable[[Launch], None]:
    return lambda launch: os.kill(launch.rank(1), number)


def to_first_rank(number: signal.Signals) -> Callable[[Launch], None]:
    return lambda launch: os.kill(launch.rank(0), number)


def to_launcher(number: signal.Signals) -> Callable[[Launch], None]:
    return lambda launch: os.kill(_parent(launch.rank(0)), number)


def to_worker(launch: Launch) -> None:
    os.kill(launch.worker(), signal.SIGKILL)


def cut(launch: Launch) -> None:
    launch.machines[-1].cut()


ATTACKS: dict[str, Callable[[Launch], None]] = {
    "STOP of a rank": to_rank(signal.SIGSTOP),
    "STOP of rank 0": to_first_rank(signal.SIGSTOP),
    "KILL of a rank": to_rank(signal.SIGKILL),
    "STOP of the launcher": to_launcher(signal.SIGSTOP),
    "KILL of the launcher": to_launcher(signal.SIGKILL),
    "death of a data worker": to_worker,
    "Ctrl-C": to_launcher(signal.SIGINT),
    "SIGTERM": to_launcher(signal.SIGTERM),
    "link cut": cut,
}
ALWAYS = ("STOP of a rank", "STOP of rank 0", "KILL of a rank", "STOP of the launcher", "Ctrl-C", "SIGTERM")
# The ranks end before --timeout; then no process is left that could end a launcher that is stopped.
OF_NO_RANKS = ("STOP of the launcher", "the end")
PAIRS = [
    *(
        (attack, phase)
        for phase in FLAGS
        for attack in (*ALWAYS, "link cut")
        if "workers" not in phase and (attack, phase) != OF_NO_RANKS
    ),
    ("KILL of the launcher", "training with dumps"),
    ("death of a data worker", "training with dumps and workers"),
]


def command(
    name: str, phase: str, limits: Limits, folder: Path, trained: Path, num_machines: int
) -> list[str]:
    where = ["--standalone", "--nproc_per_node=2"]
    if num_machines > 1:
        endpoint = "--rdzv_endpoint=node-0:29400"
        where = [f"--nnodes={num_machines}", "--rdzv_backend=c10d", endpoint, "--nproc_per_node=1"]
    flags = [flag.format(folder=folder, trained=trained) for flag in FLAGS[phase]]
    flags += ["--data_path", str(trained / "data")]
    launcher = [*LAUNCHER] if limits is REAL else [str(HASTY), str(limits.patience)]
    script = [str(SCRIPT), phase.partition(" with")[0], "0" if "rank 0" in name else "1"]
    return [sys.executable, "-u", *launcher, *where, *script, *flags, "--timeout", str(limits.timeout)]


@contextlib.contextmanager
def launched(
    name: str, phase: str, limits: Limits, folder: Path, trained: Path, num_machines: int
) -> Iterator[Launch]:
    """A launch in a phase, of which nothing is left afterwards."""
    folder.mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        machines: list[Machine] = []
        if num_machines > 1:
            machines = stack.enter_context(Cluster(folder / "cluster", num_machines)).machines
        launch = Launch(folder, machines)
        stack.callback(launch.kill)
        launch.start(command(name, phase, limits, folder, trained, num_machines))
        launch.wait_for_marks(2)
        yield launch


def attack(
    name: str, phase: str, limits: Limits, folder: Path, trained: Path, num_machines: int = 1
) -> tuple[float, Launch]:
    """Make one attack; the seconds until the last process was gone, and what was attacked."""
    with launched(name, phase, limits, folder, trained, num_machines) as launch:
        time.sleep(0.3)
        ATTACKS[name](launch)
        return launch.seconds_to_end(limits.promised), launch


@pytest.fixture(scope="session")
def trained(synthetic_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data; in the whole attack with checkpoints of them, too."""
    folder = tmp_path_factory.mktemp("silence")
    (folder / "data").symlink_to(synthetic_folder)
    return folder


# --- the short form ---


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("STOP of a rank", "training with dumps"),
        ("STOP of a rank", "preparation"),
    ],
)
def test_a_stopped_process_ends_the_launch_within_the_timeout(
    name: str, phase: str, trained: Path, tmp_path: Path
) -> None:
    _, launch = attack(name, phase, SHORT, tmp_path / "launch", trained)
    assert launch.commands[0].process.returncode != 0


def test_machines_that_are_cut_off_from_each_other_end_their_launchers_too(
    trained: Path, tmp_path: Path
) -> None:
    if reason := why_not():
        pytest.skip(reason)
    phase = "training with dumps"
    _, launch = attack("link cut", phase, SHORT, tmp_path / "launch", trained, num_machines=2)
    assert all(command.process.returncode != 0 for command in launch.commands)


def test_a_killed_rank_ends_the_launch_at_once(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "launch"
    taken, launch = attack("KILL of a rank", "training with dumps", AT_LEISURE, folder, trained)
    assert taken < AT_LEISURE.patience, launch.text()
    assert launch.commands[0].process.returncode != 0


def test_ctrl_c_writes_a_checkpoint_first_and_sets_the_exit_status(trained: Path, tmp_path: Path) -> None:
    _, launch = attack("Ctrl-C", "training with dumps", REAL, tmp_path / "launch", trained)
    assert launch.commands[0].process.returncode == 128 + signal.SIGINT, launch.text()
    assert "stopped by a signal at step" in launch.text()
    assert newest_in(tmp_path / "launch" / "dumps") is not None


# --- the whole attack ---


@pytest.mark.soak
@pytest.mark.parametrize("num_machines", [1, 2])
def test_stopped_and_killed_ranks_end_every_launch_in_time(
    num_machines: int,
    trained: Path,
    trained_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if num_machines > 1 and (reason := why_not()):
        pytest.skip(reason)
    if not (trained / "dumps").exists():
        (trained / "dumps").symlink_to(trained_folder / "dumps")
    pairs = [pair for pair in PAIRS if num_machines > 1 or pair[0] != "link cut"]
    pairs = [pair for pair in pairs if ONLY in ", ".join(pair)]
    jobs = [(pair, number) for number in range(ROUNDS) for pair in pairs]

    def once(job: tuple[tuple[str, str], int]) -> float:
        (name, phase), number = job
        folder = tmp_path / f"{name} {phase} {number}".replace(" ", "-")
        seconds, fault = float("inf"), ""
        try:
            seconds, _ = attack(name, phase, REAL, folder, trained, num_machines)
            shutil.rmtree(folder)
        except AssertionError as error:
            fault = f"; {error}"
        with capsys.disabled():
            print(
                f"{name}, {phase}, on {num_machines}, round {number + 1}: {seconds:.1f} s{fault}", flush=True
            )
        return seconds

    with ThreadPoolExecutor(AT_ONCE) as pool:
        taken = list(pool.map(once, jobs))
    by_pair = {pair: [t for job, t in zip(jobs, taken, strict=True) if job[0] == pair] for pair in pairs}
    with capsys.disabled():
        print(table(by_pair, num_machines), flush=True)
    assert max(taken) < REAL.promised


def table(seconds: dict[tuple[str, str], list[float]], num_machines: int) -> str:
    """Seconds until the last process was gone, in Markdown."""
    lines = [
        f"\n| on {num_machines}: attack | during | rounds | median | worst |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (name, phase), found in seconds.items():
        median, worst = statistics.median(found), max(found)
        lines.append(f"| {name} | {phase} | {len(found)} | {median:.1f} | {worst:.1f} |")
    return "\n".join(lines)
