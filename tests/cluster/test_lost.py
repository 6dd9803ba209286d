"""Machines and ranks that are lost: all that is left ends in time, says what is missing, and can continue."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from recsuite.checkpoint.folder import newest_in, step_of
from tests.cluster.machines import Command, Machine
from tests.cluster.ranks import launch

TIMEOUT = 5
# From when all is silent to the end of the last process.
PROMISED = TIMEOUT + 35
ENDLESS = ("--epochs", 1000, "--patience", 0, "--batch_size", 64, "--timeout", TIMEOUT)


class Training:
    """An endless training, once it has begun."""

    def __init__(self, machines: list[Machine], nprocs: list[int], data: Path, save_dir: Path) -> None:
        self.flags = (*ENDLESS, "--data_path", data, "--save_dir", save_dir, "--dump", "--dump_every", 20)
        self.ranks = launch(machines, nprocs, self.flags)
        self.ranks[0].wait_for("dumped ")

    def ends(self, survivors: list[Command], machine: Machine) -> float:
        """Wait for the end of ranks; the seconds that it took."""
        begin = time.monotonic()
        for rank in survivors:
            assert rank.wait(PROMISED) != 0
        assert machine.processes() == []
        return time.monotonic() - begin


@pytest.mark.parametrize(
    ("fault", "nprocs", "said"),
    [
        ("cut", [1, 1], "rank 1 on node-1 cannot be reached; seen by rank 0 on node-0"),
        pytest.param(
            *("crash", [1, 2], "ranks 1, 2 on node-1 cannot be reached; seen by rank 0 on node-0"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("rank killed", [2, 1], "rank 2 on node-1 has ended; seen by rank [01] on node-0"),
            marks=pytest.mark.soak,
        ),
        pytest.param(
            *("rank stopped", [1, 1], "rank 1 on node-1 does not answer; seen by rank 0 on node-0"),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_survivors_end_in_time_name_the_lost_rank_and_can_continue(
    machines: list[Machine],
    synthetic_folder: Path,
    tmp_path: Path,
    fault: str,
    nprocs: list[int],
    said: str,
) -> None:
    training = Training(machines, nprocs, synthetic_folder, tmp_path / "dumps")
    faults: dict[str, Callable[[], None]] = {
        "cut": machines[1].cut,
        "crash": machines[1].crash,
        "rank killed": lambda: training.ranks[-1].signal(signal.SIGKILL),
        "rank stopped": lambda: training.ranks[-1].signal(signal.SIGSTOP),
    }
    faults[fault]()
    survivors = training.ranks[: nprocs[0]]
    seconds = training.ends(survivors, machines[0])
    print(f"{fault}: the survivors ended after {seconds:.1f} s, with --timeout {TIMEOUT}")
    kept = newest_in(tmp_path / "dumps")
    way_on = (
        "What to do: start again on the machines that are left, with their number as NNODES and one of them "
        f"in RDZV_ENDPOINT; --resume continues from the last checkpoint in {tmp_path / 'dumps'}, "
        "if there is one."
    )
    for rank in survivors:
        *_, sentence = rank.text().splitlines()
        assert sentence.startswith("example.py: "), rank.text()
        assert re.search(said, sentence), rank.text()
        assert sentence.endswith(way_on), rank.text()
        # It is nobody's programming error.
        assert not re.search("Traceback|Ending this rank", rank.text()), rank.text()
    if fault == "cut":
        # Who is cut off ends too, and says whom it misses.
        training.ends(training.ranks[1:], machines[1])
        assert "rank 0 on node-0 cannot be reached; seen by rank 1 on node-1" in training.ranks[1].text()
        return
    assert kept is not None
    more = (*training.flags, "--resume", "--epochs", 1)
    (alone,) = launch(machines[:1], [1], more)
    assert f"loaded {kept}" in alone.succeeded(60)
    after = newest_in(tmp_path / "dumps")
    assert after is not None
    assert step_of(after) > step_of(kept)


def test_a_link_that_is_repaired_in_time_only_costs_time(
    machines: list[Machine], synthetic_folder: Path, tmp_path: Path
) -> None:
    flags = ("--epochs", 3, "--batch_size", 256, "--timeout", 100, "--data_path", synthetic_folder)
    ranks = launch(machines, [1, 1], flags)
    ranks[0].wait_for("epoch 1/3")
    machines[1].cut()
    time.sleep(2)
    machines[1].fix()
    assert "this model, " in ranks[0].succeeded(60)
    assert ranks[1].wait(20) == 0


def test_a_late_machine_is_waited_for_until_the_timeout_and_named_then(
    machines: list[Machine], synthetic_folder: Path
) -> None:
    flags = ("--epochs", 1, "--batch_size", 2048, "--timeout", TIMEOUT, "--data_path", synthetic_folder)
    start = time.monotonic()
    ranks = launch(machines, [1, 1], flags, late=2 * TIMEOUT)
    statuses = [rank.wait(PROMISED + 2 * TIMEOUT) for rank in ranks]
    assert statuses[0] == 1
    assert f"rank 1 of 2 did not connect: rank 0 on node-0 waited {TIMEOUT} s" in ranks[0].text()
    assert re.search(
        "rank 0 at node-0:[0-9]+ did not answer: rank 1 on node-1 waited|"
        "joining the other ranks at node-0:[0-9]+ took longer than --timeout",
        ranks[1].text(),
    )
    assert time.monotonic() - start < PROMISED + 2 * TIMEOUT


@pytest.mark.soak
def test_clocks_that_are_an_hour_apart_change_nothing(
    machines: list[Machine], synthetic_folder: Path, tmp_path: Path, clock: Path | None
) -> None:
    if clock is None:
        pytest.skip("needs gcc, for a wrong clock")
    # With a clock of its own a rank is no fork, and imports TorchRec: minutes on a busy machine.
    flags = ["--epochs", 1, "--batch_size", 512, "--timeout", 600, "--data_path", synthetic_folder]
    flags += ["--save_dir", tmp_path / "dumps", "--dump", "--inc_dump", "--dump_every", 5, "--load"]
    tables: list[list[str]] = []
    for offset in (3600, -3600):
        texts = [rank.succeeded(120) for rank in launch(machines, [1, 1], flags, clock=(clock, offset))]
        tables.append([line for line in texts[0].splitlines() if line.startswith("| this model")])
        flags.append("--resume")
    # As trained, as loaded, and the same twice by who had nothing left to train.
    assert len({line.split("|", 2)[2] for lines in tables for line in lines}) == 1
    assert [len(lines) for lines in tables] == [2, 2]
