"""Machines of a launch with MIN:MAX machines and restarts come and go, and the training goes on by itself."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster.machines import Cluster, Command, Machine, launched

TIMED = Path(__file__).with_name("timed_example.py")
BATCH_SIZE, DUMP_EVERY, TIMEOUT, EPOCHS, NUM_TRAIN = 128, 10, 6, 1, 15_840
# As run.sh with MAX_RESTARTS=3 launches, but that the launchers of machines miss each other sooner.
OPTIONS = ("--max_restarts=3", "--rdzv_conf=last_call_timeout=1,keep_alive_interval=1")


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

    def __init__(self, machines: list[Machine], data: Path, folder: Path) -> None:
        self.machines, self.notes = machines, folder / "notes"
        self.flags = [self.notes, "--data_path", data, "--save_dir", folder / "dumps", "--dump", "--resume"]
        self.flags += ["--dump_every", DUMP_EVERY, "--epochs", EPOCHS, "--batch_size", BATCH_SIZE]
        self.flags += ["--timeout", TIMEOUT, "--patience", 0]
        self.commands = [self.start(machine) for machine in machines]

    def start(self, machine: Machine) -> Command:
        """The launcher of a machine."""
        return machine.start(launched(*self.flags, nnodes="1:2", options=OPTIONS, script=TIMED))

    def steps(self) -> list[Step]:
        """What was noted so far."""
        lines = self.notes.read_text().splitlines() if self.notes.exists() else []
        return [Step(float(at), *map(int, counts)) for at, *counts in map(str.split, lines)]

    def wait_until(self, ranks: int, steps: int) -> None:
        """Wait until so many ranks have made so many steps since there are so many."""
        deadline = time.monotonic() + 90
        while True:
            noted = self.steps()
            if [step.ranks for step in noted[-steps:]] == [ranks] * steps:
                return
            assert time.monotonic() < deadline, "\n\n".join(command.text() for command in self.commands)
            assert self.commands[0].poll() is None, self.commands[0].text()
            time.sleep(0.05)

    def interruptions(self) -> list[tuple[float, int]]:
        """Of each time that ranks started again, the seconds without a step and the ratings repeated."""
        noted = self.steps()
        return [
            (after.time - before.time, before.learned + after.ranks * BATCH_SIZE - after.learned)
            for before, after in itertools.pairwise(noted)
            if after.pid != before.pid
        ]


def test_survivors_go_on_from_the_last_checkpoint_after_a_killed_rank_and_a_lost_machine(
    cluster_of: Callable[[int], Cluster], synthetic_folder: Path, tmp_path: Path
) -> None:
    machines = cluster_of(2).machines
    training = Training(machines, synthetic_folder, tmp_path)
    training.wait_until(ranks=2, steps=DUMP_EVERY + 5)
    (rank,) = machines[1].ranks()
    os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + 90
    while not training.interruptions():
        assert time.monotonic() < deadline, training.commands[0].text()
        time.sleep(0.1)
    assert training.steps()[-1].ranks == 2
    machines[1].crash()
    output = training.commands[0].succeeded(90)
    assert f"this model, epoch {EPOCHS}" in output
    assert machines[0].processes() == []
    (killed, again), (lost, repeated) = training.interruptions()
    print(f"rank killed: {killed:.1f} s without a step, {again} ratings repeated")
    print(f"machine lost: {lost:.1f} s without a step (--timeout {TIMEOUT}), {repeated} ratings repeated")
    # A checkpoint is complete before the next step begins.
    assert max(again, repeated) <= DUMP_EVERY * 2 * BATCH_SIZE
    assert training.steps()[-1].learned == EPOCHS * NUM_TRAIN
