"""Machines of a launch with MIN:MAX machines and restarts come and go, and a training continues by itself."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, Command, Machine, launched

pytestmark = pytest.mark.soak
TIMED = Path(__file__).with_name("timed_example.py")
BATCH_SIZE, DUMP_EVERY, TIMEOUT, NUM_TRAIN = 512, 10, 5, 15_200
# As run.sh with MAX_RESTARTS=3 launches, but that the launchers of machines miss each other sooner.
OPTIONS = ("--max_restarts=3", "--rdzv_conf=last_call_timeout=3,keep_alive_interval=1")


@dataclass(frozen=True)
class Step:
    """A step that rank 0 noted: when, by which process, among how many ranks, and how many ratings were
    learned from.
    """

    time: float
    pid: int
    ranks: int
    learned: int


class Training:
    """A training on two machines, of which one may be missing."""

    def __init__(
        self, machines: list[Machine], data: Path, folder: Path, options: Sequence[str], epochs: int
    ) -> None:
        self.machines, self.notes, self.options = machines, folder / "notes", options
        self.flags = [self.notes, "--data_path", data, "--save_dir", folder / "dumps", "--dump", "--resume"]
        self.flags += ["--dump_every", DUMP_EVERY, "--epochs", epochs, "--batch_size", BATCH_SIZE]
        self.flags += ["--timeout", TIMEOUT, "--patience", 0]
        self.commands = [self.start(machine) for machine in machines]

    def start(self, machine: Machine) -> Command:
        """The launcher of a machine."""
        return machine.start(self.command())

    def command(self) -> list[str]:
        """Command of each machine."""
        return launched(*self.flags, nnodes="1:2", options=self.options, script=TIMED)

    def steps(self) -> list[Step]:
        """Steps recorded so far."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [Step(float(at), *map(int, counts)) for at, *counts in map(str.split, lines)]

    def wait_until(self, ranks: int, steps: int) -> None:
        """Wait until so many ranks have made so many steps since there are so many."""
        self._wait(lambda: [step.ranks for step in self.steps()[-steps:]] == [ranks] * steps)

    def wait_for_interruptions(self, count: int) -> None:
        """Wait until ranks have started again so many times, and made a step."""
        self._wait(lambda: len(self.interruptions()) >= count)

    def _wait(self, is_over: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 750
        while not is_over():
            assert time.monotonic() < deadline, "\n\n".join(command.text() for command in self.commands)
            assert self.commands[0].poll() is None, self.commands[0].text()
            time.sleep(0.05)

    def interruptions(self) -> list[tuple[float, int]]:
        """Of each time that ranks started again, the seconds without a step and the ratings repeated."""
        noted = self.steps()
        return [
            (after.time - before.time, before.learned + BATCH_SIZE - after.learned)
            for before, after in itertools.pairwise(noted)
            if after.pid != before.pid
        ]


@pytest.fixture
def begin(
    cluster_of: Callable[[int], Cluster], synthetic_folder: Path, tmp_path: Path
) -> Callable[..., Training]:
    """Begins a training on two machines, and waits until it is under way."""

    def begin(options: Sequence[str] = OPTIONS, epochs: int = 1) -> Training:
        training = Training(cluster_of(2).machines, synthetic_folder, tmp_path, options, epochs)
        training.wait_until(ranks=2, steps=DUMP_EVERY + 5)
        return training

    return begin


def test_remaining_machines_continue_from_the_last_checkpoint(
    begin: Callable[..., Training],
) -> None:
    training = begin()
    machines = training.machines
    (rank,) = machines[1].ranks()
    os.kill(rank, signal.SIGKILL)
    training.wait_for_interruptions(1)
    assert training.steps()[-1].ranks == 2
    machines[1].crash()
    output = training.commands[0].succeeded(150)
    for said in ("2 ranks on 2 machines", "1 rank on 1 machine"):
        started = rf"launcher: restarting the ranks: attempt [2-9] .*, with {said} of --nnodes 1:2\n"
        assert re.search(started, output), output
    assert "this model, " in output
    assert machines[0].processes() == []
    (killed, again), (lost, repeated) = training.interruptions()
    print(f"rank killed: {killed:.1f} s without a step, {again} ratings repeated")
    print(f"machine lost: {lost:.1f} s without a step (--timeout {TIMEOUT}), {repeated} ratings repeated")
    # A checkpoint is complete before the next step begins.
    assert max(again, repeated) <= DUMP_EVERY * BATCH_SIZE
    assert training.steps()[-1].learned == NUM_TRAIN


def test_a_returning_machine_rejoins_the_training(begin: Callable[..., Training]) -> None:
    # As torchrun waits by default.
    training = begin(options=("--max_restarts=3",), epochs=10)
    machines = training.machines
    machines[1].crash()
    training.wait_for_interruptions(1)
    assert training.steps()[-1].ranks == 1
    machines[1].fix()
    training.commands.append(training.start(machines[1]))
    training.wait_for_interruptions(2)
    assert training.steps()[-1].ranks == 2
    (rank,) = machines[0].ranks()
    os.kill(rank, signal.SIGKILL)
    training.wait_for_interruptions(3)
    for (seconds, ratings), what in zip(
        training.interruptions(), ("lost", "back", "rank 0 killed"), strict=True
    ):
        print(f"{what}: {seconds:.1f} s without a step (--timeout {TIMEOUT}), {ratings} ratings repeated")


def test_a_machine_that_a_signal_ends_writes_a_checkpoint_from_which_the_other_continues(
    begin: Callable[..., Training],
) -> None:
    training = begin(epochs=100)
    training.commands[1].signal(signal.SIGTERM)
    assert training.commands[1].wait(60) == 128 + signal.SIGTERM
    training.wait_for_interruptions(1)
    assert training.steps()[-1].ranks == 1
    ((_, repeated),) = training.interruptions()
    # The step in which they agreed is in the checkpoint, and was not noted.
    assert repeated <= 0
    training.commands[0].signal(signal.SIGTERM)
    assert training.commands[0].wait(60) == 128 + signal.SIGTERM


def test_without_the_machine_of_the_rendezvous_all_ranks_end_in_time_and_the_training_resumes_elsewhere(
    begin: Callable[..., Training],
) -> None:
    training = begin()
    machines = training.machines
    machines[0].crash()
    start = time.monotonic()
    assert training.commands[1].wait(200) != 0
    output = training.commands[1].text()
    print(f"all ended after {time.monotonic() - start:.1f} s (--timeout {TIMEOUT}):\n{output[-3000:]}")
    assert "rank 0 on node-0 cannot be reached" in output
    assert machines[1].processes() == []
    assert time.monotonic() - start < TIMEOUT + 35
    elsewhere = [word.replace("node-0:", "node-1:") for word in training.command()]
    again = machines[1].start(elsewhere)
    assert "this model, " in again.succeeded(90)
