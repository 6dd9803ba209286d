"""Kills at random instants and before every system call: what has the name of a checkpoint stays whole.

`killed_ranks.py` and `killed_writer.py` say how so many kills cost so little. The page cache outlives a
killed process, so what these tests cannot show is what a machine that loses its power keeps.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recsuite.checkpoint.chain import CheckpointChain, chain_at, check_whole
from recsuite.checkpoint.folder import step_of
from recsuite.checkpoint.format import read_manifest
from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.event_files import scalars
from tests.support.launch import (
    EXAMPLE,
    LAUNCHER,
    SUPPORT,
    Answering,
    family,
    read_json,
    run_command,
    started,
    succeeded,
    wait_for,
)
from tests.support.place import Place

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
TARGETS = ("rank 0", "rank 1", "all ranks", "launcher")
INSTANTS = ("half written", "written", "any")
MODES = (
    "dump",
    "async dump",
    "delta",
    "compaction",
    "retention",
    "dynamic delta",
    "dynamic compaction",
    "sequence delta",
)
# The kills of modes that between them write all kinds of files, of static, dynamic and shared tables; `soak`
# has all modes, and many more. Each mode has one after a later step, and each target is hit twice.
KILLS = {
    "async dump": (("rank 0", "half written"), ("rank 1", "written")),
    "compaction": (("all ranks", "written"), ("launcher", "half written")),
    "dynamic delta": (("rank 1", "written"), ("all ranks", "half written")),
    "sequence delta": (("launcher", "written"), ("rank 0", "any")),
}
# Tables with fewer places than there are ids, so that in most steps some come and others leave.
TIGHT = (
    "--vocabulary",
    "dynamic",
    "--capacity",
    "user=48,movie=64,history=64",
    "--admission_threshold",
    2,
    "--max_load_factor",
    0,
)
# What SIGTERM leaves a training to end.
END_SECONDS = 150


# --- many kills ---


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answering]:
    work = tmp_path_factory.mktemp("killed")
    command = [sys.executable, str(SUPPORT / "killed_ranks.py"), str(work)]
    with started(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        yield Answering(process)


@pytest.fixture(scope="module")
def killed(zygote: Answering) -> dict[str, dict[str, Any]]:
    """Findings after the kills, by mode."""
    return {
        mode: zygote.ask(150, name=mode, mode=mode, kills=kills, seed=MODES.index(mode))
        for mode, kills in KILLS.items()
    }


@pytest.mark.parametrize("mode", KILLS)
def test_a_kill_at_any_instant_leaves_the_newest_checkpoint_whole(
    killed: dict[str, dict[str, Any]], mode: str
) -> None:
    found = killed[mode]
    assert found["faults"] == []
    assert found["kills"] == {target: 1 for target, _ in KILLS[mode]}


def test_steps_continue_despite_kills(killed: dict[str, dict[str, Any]]) -> None:
    assert all(found["step"] >= 1 for found in killed.values())


def test_kills_hit_processes_that_are_writing(killed: dict[str, dict[str, Any]]) -> None:
    # Three come when something is half written. A survivor may finish it.
    assert sum(found["left"] for found in killed.values()) >= 2


@pytest.mark.soak
def test_repeated_kills_leave_a_whole_checkpoint(zygote: Answering) -> None:
    deadline, number = time.monotonic() + SECONDS, 0
    kills = [(TARGETS[count % len(TARGETS)], INSTANTS[count % len(INSTANTS)]) for count in range(40)]
    while number == 0 or time.monotonic() < deadline:
        mode = MODES[number % len(MODES)]
        found = zygote.ask(600, name=f"soak {number}", mode=mode, kills=kills, seed=1000 + number)
        assert found["faults"] == []
        assert found["kills"] == dict.fromkeys(TARGETS, 40 // len(TARGETS))
        number += 1


@pytest.mark.parametrize(
    ("action", "least"),
    [
        ("publish a dump", 15),
        ("publish an increment", 15),
        ("set aside", 4),
        pytest.param("fold", 20, marks=pytest.mark.soak),
        pytest.param("begin", 20, marks=pytest.mark.soak),
    ],
)
def test_a_kill_before_any_system_call_keeps_all_existing_files(
    zygote: Answering, action: str, least: int
) -> None:
    found = zygote.ask(60, name=action, mode=action)
    assert found["faults"] == []
    # Files are written, renamed, pointed at and removed: there are more calls than these on any system.
    assert found["kills"] >= least


# --- the real launcher ---


@pytest.fixture(scope="module")
def few_ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A synthetic data set, of which 3,960 ratings are trained on."""
    folder = tmp_path_factory.mktemp("data") / "few"
    write_synthetic(folder, 5_000, seed=0)
    return folder


@pytest.fixture
def place(few_ratings: Path, tmp_path: Path) -> Place:
    return Place(few_ratings, tmp_path)


def flags(place: Place, save_dir: Path, *more: object) -> list[str]:
    fixed = ("--data_path", place.data, "--save_dir", save_dir, "--batch_size", 128, "--embedding_dim", 8)
    return [str(flag) for flag in (*fixed, *more)]


def launched(*launch: str) -> list[str]:
    """The example on two ranks."""
    return [sys.executable, "-u", *LAUNCHER, "--standalone", "--nproc_per_node=2", *launch, str(EXAMPLE)]


def whole_state(save_dir: Path) -> CheckpointChain:
    """The newest checkpoint, complete to the byte."""
    state = chain_at(save_dir)
    check_whole(state)
    return state


def wait_until_alone(place: Place, seconds: float = 50) -> None:
    deadline = time.monotonic() + seconds
    while place.processes():
        assert time.monotonic() < deadline, place.processes()
        time.sleep(0.05)


def rank_of(process: subprocess.Popen[str], rank: int) -> int:
    """The process of a rank below a launcher."""
    for pid in family(process.pid)[1:]:
        if f"\0RANK={rank}\0".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            return pid
    raise AssertionError(f"no rank {rank} below {process.pid}")


def test_the_launcher_may_be_killed_while_ranks_write_and_another_continues(
    place: Place, tmp_path: Path
) -> None:
    save_dir, seeded, steps = tmp_path / "dumps", random.Random(0), [0]
    on_disk = ["--storage", "user,movie,history", "--memory_budget", "60kB"]
    for modes in (["--dump", "--async_dump"], ["--inc_dump", *on_disk]):
        more = ("--resume", *modes, "--dump_every", 3, "--keep", 2, "--epochs", 1000, "--patience", 0)
        with started([*launched(), *flags(place, save_dir, *more)], env=place.env) as process:
            if steps[-1]:
                wait_for(process, f"loaded {save_dir / f'step-{steps[-1]:09d}'}: 8 tables")
            wait_for(process, "dumped ")
            time.sleep(seeded.uniform(0.05, 0.5))
            process.kill()
            wait_until_alone(place)
        steps.append(step_of(whole_state(save_dir).folder))
    assert steps == sorted(set(steps))
    place.check_nothing_is_left(killed_launchers=2)


def test_torchrun_restarts_after_a_killed_rank_from_the_newest_checkpoint(
    place: Place, tmp_path: Path
) -> None:
    save_dir = tmp_path / "dumps"
    more = ("--dump", "--resume", "--dump_every", 10, "--epochs", 1)
    torchrun = [sys.executable, "-u", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, "--max-restarts=1", str(EXAMPLE), *flags(place, save_dir, *more)]
    with started(command, env=place.env) as process:
        wait_for(process, "dumped ")
        os.kill(rank_of(process, 1), signal.SIGKILL)
        output, errors = process.communicate(timeout=450)
    assert process.returncode == 0, errors
    assert output.count("loaded ") == 1
    assert "this model, " in output
    # 3,600 training ratings, 128 in a step.
    assert step_of(whole_state(save_dir).folder) == 29
    place.check_nothing_is_left()


# --- SIGTERM ---


def terminate(process: subprocess.Popen[str], pids: list[int]) -> str:
    """SIGTERM to some processes; what is said until the end, which must come in time, with its status."""
    start = time.monotonic()
    for pid in pids:
        os.kill(pid, signal.SIGTERM)
    output, errors = process.communicate(timeout=END_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert time.monotonic() - start < END_SECONDS
    return output


def resumes(place: Place, save_dir: Path, command: list[str], output: str) -> None:
    """The checkpoint that SIGTERM left is whole, was said, lies inside an epoch, and is continued from."""
    state = whole_state(save_dir)
    progress = read_manifest(state.folder).progress
    *_, dumped, told = output.splitlines()
    assert dumped.endswith(f"dumped {state.folder}")
    assert f"stopped by a signal at step {step_of(state.folder):,}" in told
    assert progress.samples > 0
    more = flags(place, save_dir, "--resume", "--epochs", progress.epoch + 1)
    again = succeeded(run_command([*command, *more], env=place.env))
    assert f"loaded {state.base}" in again
    assert f"; step {progress.step:,}, written by" in again
    end = whole_state(save_dir)
    assert read_manifest(end.folder).progress.epoch == progress.epoch + 1
    place.check_nothing_is_left()


def test_sigterm_to_all_processes_of_a_launch_with_workers_leaves_a_checkpoint_of_the_very_step(
    place: Place, tmp_path: Path
) -> None:
    save_dir = tmp_path / "dumps"
    more = ("--dump", "--epochs", 1000, "--patience", 0, "--num_workers", 1, "--batch_size", 64)
    with started([*launched(), *flags(place, save_dir, *more)], env=place.env) as process:
        wait_for(process, "dumped ")
        processes = family(process.pid)
        # The launcher, two ranks, a worker of each; and their trackers of resources.
        assert len(processes) >= 1 + 2 + 2
        output = terminate(process, processes)
        wait_until_alone(place)
    resumes(place, save_dir, launched(), output)


@pytest.mark.soak
def test_dynamic_tables_continue_after_sigterm_to_a_launcher_bit_for_bit(
    place: Place, tmp_path: Path
) -> None:
    save_dir, whole_dir, epochs = tmp_path / "dumps", tmp_path / "whole", 5
    more = ("--dump", "--inc_dump", "--dump_every", 10, "--epochs", epochs, "--patience", 0, *TIGHT)

    def command(folder: Path, report: str, *others: object) -> list[str]:
        reports = ("--report_dir", tmp_path / report, "--tensorboard")
        return [*launched(), *flags(place, folder, *more, *reports, *others)]

    with started(command(save_dir, "ended"), env=place.env) as process:
        wait_for(process, f"epoch 1/{epochs}")
        wait_for(process, "delta-")
        output = terminate(process, [process.pid])
        wait_until_alone(place)
    ended = whole_state(save_dir)
    progress = read_manifest(ended.folder).progress
    assert progress.samples > 0
    assert f"dumped {ended.folder}" in output
    assert f"stopped by a signal at step {progress.step:,}" in output
    again = succeeded(run_command(command(save_dir, "resumed", "--resume"), env=place.env))
    assert f"; step {progress.step:,}, written by 2 ranks" in again
    succeeded(run_command(command(whole_dir, "whole"), env=place.env))
    reports = [tmp_path / name for name in ("resumed", "whole")]
    resumed, whole = (scalars(report / "tensorboard")["steps/loss"] for report in reports)
    assert resumed == whole[progress.step :]
    assert resumed[0][0] == progress.step + 1
    tests = [read_json(report / "metrics.json")["test"] for report in reports]
    assert tests[0] == tests[1]
    ends = [whole_state(folder) for folder in (save_dir, whole_dir)]
    manifests = [read_manifest(end.folder) for end in ends]
    assert manifests[0].dynamic == manifests[1].dynamic
    assert all(manifests[0].dynamic[name].counts["evicted"] for name in ("user", "movie", "history"))
    parts = [{path.name: path.read_bytes() for path in end.folder.glob("part-*")} for end in ends]
    assert parts[0] == parts[1]
    place.check_nothing_is_left()
