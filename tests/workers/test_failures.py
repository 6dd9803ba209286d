"""A launch after the failure of a data worker: one message, a status, an end in time, no leftovers."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
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


def test_a_killed_worker_ends_all_ranks_with_its_screen(place: Place) -> None:
    start = time.monotonic()
    result = launch(place, 2, "kill 9", "--num_workers", 2)
    assert time.monotonic() - start < END_SECONDS + 20
    assert result.returncode != 0
    assert "data worker 1 of rank 1 (pid " in result.stderr
    # The sixth step is the second worker's; torchrun's own report repeats the screen once.
    assert "with step 6 of epoch 2 over the train ratings" in result.stderr
    assert "It was killed by signal 9 (SIGKILL)" in result.stderr
    assert "Memory now:" in result.stderr
    # No traceback of the trainer's: there is nothing in it.
    assert "train_epoch" not in result.stderr


def test_columns_that_are_cut_during_an_epoch_are_named(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    result = launch(place, 1, "cut", "--num_workers", 2)
    assert result.returncode == 2
    sizes = r"rows\.npy had \d{3},\d{3} bytes when it was opened and has 1,000 now; leave the columns"
    assert re.search(sizes, result.stderr)
    # Each worker looks before it makes a batch, so the one that did not cut them may be the first.
    assert "Found by data worker" in result.stderr
    assert "Traceback" not in result.stderr
    # The next start makes them again.
    open_columns(Config.of(data_path=str(place.data)))
    assert "are damaged and are made again" in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_columns_may_be_removed_while_they_are_used(place: Place, task: str) -> None:
    model = ("--task", task, "--preset", "none", "--epochs", 3, "--batch_size", 512)
    flags = ("--data_path", place.data, *model, "--num_workers")
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


def test_four_workers_train_on_one_core_with_64_descriptors_and_a_tiny_shared_memory(
    place: Place,
) -> None:
    # Batches of 6 MB, 40 slots.
    flags = ["--data_path", place.data, "--epochs", 2, "--num_workers", 4, "--batch_size", 65_536]
    with tiny_shared_memory() as within, cores(1):
        output = succeeded(python(LIMITED, 64, EXAMPLE, *flags, env=place.env, within=within))
    assert "4 data workers on this machine share 1 core with the ranks" in output
    assert "this model, " in output
    place.check_nothing_is_left()


def test_a_signal_ends_the_example_and_its_workers_within_3_seconds(place: Place) -> None:
    flags = ["--data_path", str(place.data), "--epochs", "1000", "--patience", "0", "--num_workers", "2"]
    with started([sys.executable, "-u", str(EXAMPLE), *flags], env=place.env) as process:
        wait_for(process, "epoch 1/1000")
        start = time.monotonic()
        # As a terminal and a batch system do it: to the workers too.
        for pid in family(process.pid):
            os.kill(pid, signal.SIGTERM)
        assert process.wait(3 * PATIENCE) == -signal.SIGTERM
        while place.processes():
            assert time.monotonic() - start < 3 * PATIENCE
            time.sleep(0.05)
    place.check_nothing_is_left()


def test_a_worker_that_is_busy_dies_with_its_killed_trainer(place: Place) -> None:
    flags = ["--data_path", str(place.data), *map(str, SHORT), "--num_workers", "2"]
    command = [sys.executable, "-u", str(FAULTS), "sleep", *flags]
    with started(command, env=place.env) as process:
        wait_for(process, "epoch 1/3")
        # Until the worker sleeps: nothing but the kernel could wake it.
        time.sleep(1)
        process.kill()
        process.wait()
    place.check_nothing_is_left()


ENDINGS = """
import sys
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader

if __name__ == "__main__":
    import torch
    from recsuite.datasets.preparation.cache import open_columns
    config = Config.of(data_path={data!r}, batch_size=64, num_workers=2)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    loader = build_dataloader(dataset, EpochSampler(dataset), config)
    next(iter(loader))
    print("the end begins", flush=True)
    if sys.argv[1] == "exception":
        with loader:
            raise ValueError("the loop failed")
"""


@pytest.mark.parametrize("how", ["exception", "never closed"])
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
