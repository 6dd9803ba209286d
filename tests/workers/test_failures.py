"""A launch after the failure of a data worker: one message, a status, an end in time, no leftovers."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import (
    EXAMPLE,
    PATIENCE,
    SUPPORT,
    cores,
    family,
    python,
    started,
    succeeded,
    torchrun,
    wait_for,
)
from tests.support.place import END_SECONDS, Place

FAULTS, LIMITED = SUPPORT / "faults.py", SUPPORT / "limited.py"
SHORT = ("--epochs", 3, "--batch_size", 512)


@pytest.fixture
def place(synthetic_folder: Path, tmp_path: Path) -> Place:
    return Place(synthetic_folder, tmp_path)


def launch(place: Place, num_ranks: int, fault: str, *flags: object) -> subprocess.CompletedProcess[str]:
    """The example with a fault, under torchrun where there are several ranks."""
    arguments = (FAULTS, fault, "--data_path", place.data, *SHORT, *flags)
    options: dict[str, Any] = {"env": place.env, "timeout": END_SECONDS + 30}
    result = python(*arguments, **options) if num_ranks == 1 else torchrun(num_ranks, *arguments, **options)
    place.check_nothing_is_left()
    return result


@pytest.mark.parametrize(
    ("num_ranks", "fault", "words"),
    [
        pytest.param(2, "raise", ["NeedsTwoError: 7: seven is too many"], marks=pytest.mark.soak),
        (3, "kill 9", ["It was killed by signal 9 (SIGKILL)", "Memory now:"]),
        pytest.param(
            *(1, "bus error", ["It was killed by signal 7 (SIGBUS)", "Memory now:", "on each rank"]),
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_failing_worker_ends_all_ranks_with_its_screen(
    place: Place, num_ranks: int, fault: str, words: list[str]
) -> None:
    start = time.monotonic()
    result = launch(place, num_ranks, fault, "--num_workers", 2)
    assert time.monotonic() - start < END_SECONDS + 20
    assert result.returncode != 0
    who = f"data worker 1 of rank {num_ranks - 1} (pid "
    assert who in result.stderr
    # The sixth step is the second worker's; torchrun's own report repeats the screen once.
    assert "with step 6 of epoch 2 over the train ratings" in result.stderr
    for word in words:
        assert word in result.stderr
    # No traceback of the trainer's: there is nothing in it.
    assert "train_epoch" not in result.stderr


@pytest.mark.soak
def test_a_silent_worker_ends_all_ranks_with_its_stack(place: Place) -> None:
    result = launch(place, 2, "sleep", "--num_workers", 1, "--worker_timeout", 4)
    assert result.returncode != 0
    assert "Nothing for 4 s from data worker 0 of rank 1" in result.stderr
    assert "sources.py" in result.stderr


@pytest.mark.parametrize("num_workers", [pytest.param(0, marks=pytest.mark.soak), 2])
def test_columns_that_are_cut_during_an_epoch_are_named(place: Place, num_workers: int) -> None:
    result = launch(place, 1, "cut", "--num_workers", num_workers)
    assert result.returncode == 2
    assert (
        "rows.npy had 560,320 bytes when it was opened and has 1,000 now; leave the columns" in result.stderr
    )
    # Each worker looks before it makes a batch, so the one that did not cut them may be the first.
    assert ("Found by data worker" in result.stderr) == (num_workers == 2)
    assert "Traceback" not in result.stderr
    if num_workers == 0:
        return
    # The next start makes them again.
    again = python(EXAMPLE, "--data_path", place.data, "--epochs", 1, env=place.env)
    assert "are damaged and are made again" in succeeded(again)


@pytest.mark.soak
def test_columns_may_be_removed_while_they_are_used(place: Place) -> None:
    flags = ("--data_path", place.data, "--epochs", 3, "--batch_size", 512, "--num_workers")
    expected = succeeded(python(EXAMPLE, *flags, 0, env=place.env)).splitlines()[-6:]
    with started([sys.executable, "-u", str(EXAMPLE), *map(str, flags), "1"], env=place.env) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line.rstrip("\n"))
            if "epoch 1/3" in line and place.data.exists():
                shutil.rmtree(place.data)
        assert process.wait(30 * PATIENCE) == 0
    assert lines[-6:] == expected


@contextlib.contextmanager
def tiny_shared_memory() -> Iterator[int | None]:
    """A process with 64 KiB of /dev/shm, in namespaces of its own; None where a user may make none."""
    mount = "mount -t tmpfs -o size=64k tmpfs /dev/shm && echo ready && exec cat"
    command = ["unshare", "--mount", "--map-root-user", "--user", "sh", "-c", mount]
    with started(command, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.pid if process.stdout.readline() == "ready\n" else None


def test_four_workers_train_on_one_core_with_64_descriptors_and_a_tiny_shared_memory(place: Place) -> None:
    # Batches of 6 MB, 40 slots.
    flags = ["--data_path", place.data, "--epochs", 2, "--num_workers", 4, "--batch_size", 65_536]
    with tiny_shared_memory() as within, cores(1):
        output = succeeded(python(LIMITED, 64, EXAMPLE, *flags, env=place.env, within=within))
    assert "4 data workers on this machine share 1 core with the ranks" in output
    assert "this model, epoch " in output
    place.check_nothing_is_left()


def test_more_workers_than_descriptors_gives_one_message(place: Place) -> None:
    flags = ["--data_path", place.data, "--epochs", 1, "--num_workers", 16]
    result = python(LIMITED, 64, EXAMPLE, *flags, env=place.env)
    assert result.returncode == 2
    assert "Cannot start 16 data workers: a process may have 64 files open" in result.stderr
    assert "Traceback" not in result.stderr
    place.check_nothing_is_left()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGTERM])
def test_an_interrupt_ends_the_example_and_its_workers_within_3_seconds(
    place: Place, number: signal.Signals
) -> None:
    flags = ["--data_path", str(place.data), "--epochs", "1000", "--patience", "0", "--num_workers", "2"]
    with started([sys.executable, "-u", str(EXAMPLE), *flags], env=place.env) as process:
        wait_for(process, "epoch 1/1000")
        start = time.monotonic()
        # As a terminal and a batch system do it: to the workers too.
        for pid in family(process.pid):
            os.kill(pid, number)
        assert process.wait(3 * PATIENCE) == -number
        while place.processes():
            assert time.monotonic() - start < 3 * PATIENCE
            time.sleep(0.05)
    place.check_nothing_is_left()


def test_nothing_is_left_after_every_rank_was_killed(place: Place) -> None:
    launcher = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    flags = ["--data_path", str(place.data), "--epochs", "1000", "--patience", "0", "--num_workers", "2"]
    with started([*launcher, str(EXAMPLE), *flags], env=place.env) as process:
        wait_for(process, "epoch 1/1000")
        ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(ranks) == 2
        # The launcher, its ranks and their workers, at least.
        assert len(place.processes()) >= 1 + 2 + 2 * 2
        for rank in ranks:
            os.kill(int(rank), signal.SIGKILL)
        process.wait(40 * PATIENCE)
    place.check_nothing_is_left()


def test_a_worker_that_is_busy_dies_with_its_killed_trainer(place: Place) -> None:
    flags = ["--data_path", str(place.data), *map(str, SHORT), "--num_workers", "2"]
    command = [sys.executable, "-u", str(FAULTS), "sleep", *flags]
    with started(command, env=place.env) as process:
        wait_for(process, "epoch 1/3")
        # Until the worker sleeps: nothing but the kernel could wake it.
        time.sleep(2)
        process.kill()
        process.wait()
    place.check_nothing_is_left()


ENDINGS = """
import sys
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader

def use(how):
    from recsuite.datasets.preparation.cache import open_columns
    config = Config.of(data_path={data!r}, batch_size=64, num_workers=2)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        for number, batch in enumerate(loader):
            if number == 3 and how == "break":
                break
            if number == 3 and how == "exception":
                print("the end begins", flush=True)
                raise ValueError("the loop failed")
        print("the end begins", flush=True)

def forget():
    from recsuite.datasets.preparation.cache import open_columns
    config = Config.of(data_path={data!r}, batch_size=64, num_workers=2)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    global loader
    loader = build_dataloader(dataset, EpochSampler(dataset), config)
    next(iter(loader))
    print("the end begins", flush=True)

if __name__ == "__main__":
    how = sys.argv[1]
    import torch
    forget() if how == "forget" else use(how)
"""


@pytest.mark.parametrize(
    "how", ["exception", "forget", *(pytest.param(how, marks=pytest.mark.soak) for how in ("end", "break"))]
)
def test_a_process_with_workers_ends_within_3_seconds_however_its_loop_ends(
    place: Place, tmp_path: Path, how: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(ENDINGS.format(data=str(place.data)))
    with started([sys.executable, "-u", str(script), how], env=place.env) as process:
        wait_for(process, "the end begins")
        looped = time.monotonic()
        output = process.communicate(timeout=150)
        ended = time.monotonic() - looped
    assert process.returncode == (1 if how == "exception" else 0), output
    # Three seconds on a machine that is not busy.
    assert ended < 3 * PATIENCE
    place.check_nothing_is_left()
