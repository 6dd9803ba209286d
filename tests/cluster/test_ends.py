"""Messages and exit statuses of the launchers of several machines."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.machines import Cluster, launched


def test_a_late_launcher_is_waited_for(cluster_of: Callable[[int], Cluster], synthetic_folder: Path) -> None:
    flags = ("--epochs", 1, "--batch_size", 2048, "--timeout", 5, "--data_path", synthetic_folder)
    first, second = cluster_of(2).machines
    commands = [first.start(launched(*flags))]
    # Longer than --timeout, which is for ranks: launchers may be queued on a machine that others use.
    time.sleep(6)
    commands.append(second.start(launched(*flags)))
    for command in commands:
        command.succeeded(90)


@pytest.mark.soak
def test_a_clean_end_leaves_no_warnings_of_the_store(
    cluster_of: Callable[[int], Cluster], synthetic_folder: Path
) -> None:
    # A rank that is started really imports TorchRec while the other waits for it: minutes on a busy machine.
    flags = ("--epochs", 1, "--batch_size", 2048, "--timeout", 600, "--data_path", synthetic_folder)
    first, second = cluster_of(2).machines
    # The store is the first one's, which may end before the other. Started really: what is said of that is a
    # matter of TORCH_CPP_LOG_LEVEL when torch is imported.
    commands = [first.start(launched(*flags)), second.start(launched(*flags), real=True)]
    for command in commands:
        text = command.succeeded(120)
        assert not re.search("TCPStore|recvValue failed", text), text


def test_a_mistake_that_all_machines_find_is_printed_on_each_with_status_2(
    cluster_of: Callable[[int], Cluster], synthetic_folder: Path
) -> None:
    flags = ("--data_path", synthetic_folder, "--timeout", 300, "--lr")
    machines = cluster_of(2).machines
    commands = [
        machine.start(launched(*flags, lr)) for machine, lr in zip(machines, (0.01, 0.02), strict=True)
    ]
    statuses = [command.wait(60) for command in commands]
    assert statuses == [2, 2], [command.text() for command in commands]
    for command in commands:
        assert command.text().count("example.py: --lr is 0.0") == 1, command.text()


def test_a_rank_that_is_killed_on_another_machine_gives_one_message_and_no_report(
    cluster_of: Callable[[int], Cluster], synthetic_folder: Path, tmp_path: Path
) -> None:
    flags = ["--epochs", 1000, "--patience", 0, "--batch_size", 64, "--timeout", 8]
    flags += ["--data_path", synthetic_folder]
    machines = cluster_of(2).machines
    dumps = ("--dump", "--dump_every", 20, "--save_dir", tmp_path / "dumps")
    commands = [machine.start(launched(*flags, *dumps)) for machine in machines]
    commands[0].wait_for("dumped ", 100)
    (rank,) = machines[1].ranks()
    os.kill(rank, signal.SIGKILL)
    assert [command.wait(60) for command in commands] == [1, 1]
    first, second = (command.text() for command in commands)
    (sentence,) = [line for line in first.splitlines() if line.startswith("example.py: ")]
    assert "rank 1 on node-1 has ended; seen by rank 0 on node-0. What to do: start again on the" in sentence
    folder = tmp_path / "dumps"
    assert f"; --resume continues from the last checkpoint in {folder}, if there is one." in sentence
    assert "rank 1 (pid " in second
    for text in (first, second):
        assert not re.search("Traceback|FAILED|exitcode", text), text
