"""Several ranks on the GPUs of this machine, beside one: trainings, checkpoints, and ranks that fail.

`./run.sh smoke` runs these tests: on GPUs over nccl, or over gloo where nccl fails; without a GPU on the CPU
over gloo. With fewer GPUs than ranks, ranks share them, see `SHARE_GPUS`: that shows that they exchange the
right numbers, and not how fast.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.errors import counted
from recsuite.runtime.process import SHARE_GPUS
from tests.conftest import NUM_GPUS
from tests.support.dump_ranks import CASES, KINDS, SEED, SIZES
from tests.support.launch import (
    EXAMPLE,
    GPUS,
    PATIENCE,
    SUPPORT,
    family,
    is_alive,
    read_json,
    started,
    succeeded,
    torchrun,
    wait_for,
)
from tests.support.ranks import losses_of
from tests.support.silent_ranks import MARK

pytestmark = pytest.mark.multi_gpu

# Of a launch, in seconds on a machine that is not busy.
DEADLINE = 24
# Rounding, and what a training makes of it, relative to a loss.
ROUNDING = 2e-3
# Seconds that ranks wait for one that hangs, and that the launcher then waits for ranks.
TIMEOUT, LEFT = 20, 5


class Site(NamedTuple):
    """Place of the ranks, the backend that they exchange over, and the options of a launch there."""

    where: str
    backend: str
    options: dict[str, Any]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    """Try which backend three ranks can exchange over, in a launch: so all ranks of later ones agree."""
    path = tmp_path_factory.mktemp("site") / "joined.json"
    for backend in ("nccl", "gloo") if NUM_GPUS else ("",):
        # A fork has no GPU.
        options = {"env": {**GPUS, SHARE_GPUS: backend}, "real": True} if backend else {}
        try:
            succeeded(torchrun(3, SUPPORT / "joined_ranks.py", path, timeout=DEADLINE, **options))
        except AssertionError as error:
            warnings.warn(f"three ranks cannot exchange over {backend or 'gloo'}: {error}", stacklevel=1)
            continue
        joined = read_json(path)
        names = ", ".join(sorted({*joined["devices"].values()}))
        where = f"{counted(NUM_GPUS, 'GPU')} ({names})" if NUM_GPUS else "the CPU"
        used = joined["backend"].rpartition(":")[2] + " (nccl failed)" * (backend == "gloo")
        return Site(where, used, options)
    raise AssertionError("three ranks cannot exchange; the warnings name the reasons")


@pytest.fixture(autouse=True)
def _recorded(site: Site, record_property: Callable[[str, object], None]) -> None:
    """Kept for the last line of a run."""
    record_property("ranks", f"1, 2 and 3 ranks on {site.where} over {site.backend}")


Launch = Callable[..., str]


@pytest.fixture(scope="module")
def launch(site: Site) -> Launch:
    """Launch a script on a number of ranks, and return its output."""
    return lambda ranks, *words: succeeded(torchrun(ranks, *words, timeout=DEADLINE, **site.options))


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """5,000 ratings."""
    folder = tmp_path_factory.mktemp("data") / "ratings"
    write_synthetic(folder, 5_000, seed=0)
    return folder


@pytest.fixture(scope="module")
def found(launch: Launch, ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """Results of `ranks.py`, by number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    for ranks in (1, 2, 3):
        launch(ranks, SUPPORT / "ranks.py", folder / f"{ranks}.json", ratings, 900)
    return {ranks: read_json(folder / f"{ranks}.json") for ranks in (1, 2, 3)}


@pytest.mark.parametrize("ranks", [2, 3])
def test_metrics_of_the_same_weights_are_those_of_one_rank(found: dict[int, Any], ranks: int) -> None:
    assert found[ranks]["metrics"]["0"] == pytest.approx(found[1]["metrics"]["0"], abs=1e-5, nan_ok=True)
    # Of equal scores, so that no rounding changes a place.
    assert found[ranks]["tied"] == {**found[1]["tied"], "vectors": {}}


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_training_has_the_losses_of_one_rank(found: dict[int, Any], ranks: int) -> None:
    expected = losses_of(found[1])
    for name, losses in losses_of(found[ranks]).items():
        np.testing.assert_allclose(losses, expected[name], rtol=ROUNDING, err_msg=name)
    assert len(expected) == 14


@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_tables_add_up_to_those_of_one_rank(found: dict[int, Any], ranks: int) -> None:
    # Adagrad divides a factor away, so losses alone do not show it.
    one, several = found[1], found[ranks]
    pairs = [(several["sums"], one["sums"])]
    pairs += [(several["rules"][rule][1], sums) for rule, (_, sums) in one["rules"].items()]
    for sums, expected in pairs:
        assert sums == pytest.approx(expected, rel=5 * ROUNDING, abs=1e-5)


@pytest.fixture(scope="module")
def dumped(launch: Launch, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Models as 2 ranks wrote them, in full and in deltas, and as 3 ranks loaded them."""
    folder, script = tmp_path_factory.mktemp("dumps"), SUPPORT / "dump_ranks.py"
    for num_ratings in SIZES:
        write_synthetic(folder / str(num_ratings), num_ratings, seed=SEED)
    launch(2, script, folder, folder, "write_cases")
    launch(3, script, folder, folder, "read_cases")
    return read_json(folder / "write_cases-2.json"), read_json(folder / "read_cases-3.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_2_ranks_is_restored_bit_for_bit_on_3(
    dumped: tuple[Any, Any], case: str, kind: str
) -> None:
    before, after = dumped[0][case], dumped[1][case][kind]
    assert after["states"] == before["states"]
    assert len(before["increments"]) >= 3
    # Scores that differ by rounding may change places.
    assert after["metrics"] == pytest.approx(before["metrics"], abs=1e-2)
    np.testing.assert_allclose(after["losses"], before["losses"], rtol=ROUNDING)


def test_dynamic_tables_of_2_ranks_are_those_of_one_and_load_on_3(
    launch: Launch, ratings: Path, tmp_path: Path
) -> None:
    # Rows are inserted and evicted in most steps.
    capacity = "user=160,movie=512,history=512"
    tight = ("--vocabulary", "dynamic", "--capacity", capacity, "--max_load_factor", 0)
    flags = ("--data_path", ratings, "--num_workers", 0)
    for ranks in (1, 2):
        trained = (*flags, *tight, "--epochs", 1, "--batch_size", 600, "--inc_dump", "--dump_every", 2)
        where = ("--save_dir", tmp_path / f"dumps-{ranks}", "--report_dir", tmp_path / f"trained-{ranks}")
        assert f"ranks: {ranks} " in launch(ranks, EXAMPLE, *trained, *where)
    where = ("--save_dir", tmp_path / "dumps-2", "--report_dir", tmp_path / "loaded")
    assert "ranks: 3 " in launch(3, EXAMPLE, *flags, "--load", *where)
    assert list((tmp_path / "dumps-2").glob("delta-*"))
    one, two = (read_json(tmp_path / f"trained-{ranks}" / "metrics.json")["test"] for ranks in (1, 2))
    assert two == pytest.approx(one, abs=1e-2)
    assert read_json(tmp_path / "loaded" / "test.json")["test"] == pytest.approx(two, abs=1e-4)


@pytest.mark.parametrize(
    ("number", "fault"),
    [
        (signal.SIGKILL, r"rank 1 \(pid \d+\) was killed by signal 9"),
        (signal.SIGSTOP, rf"rank 1 on {re.escape(socket.gethostname())} does not answer"),
    ],
    ids=["killed", "hangs"],
)
def test_a_rank_that_fails_ends_the_launch_and_is_named(
    site: Site, ratings: Path, number: signal.Signals, fault: str
) -> None:
    launcher = [sys.executable, "-u", SUPPORT / "hasty_launcher.py", LEFT, "--standalone"]
    script = ["--nproc_per_node=2", SUPPORT / "silent_ranks.py", "training", 1, "--data_path", ratings]
    flags = ["--epochs", 1000, "--patience", 0, "--batch_size", 64, "--num_workers", 0, "--timeout", TIMEOUT]
    command = [str(word) for word in (*launcher, *script, *flags)]
    with started(command, stderr=subprocess.STDOUT, **site.options) as process:
        # The ranks end with it, and with them the output.
        deadline = threading.Timer(DEADLINE * PATIENCE, process.kill)
        deadline.daemon = True
        deadline.start()
        wait_for(process, MARK, 2)
        members = family(process.pid)
        os.kill(next(pid for pid in members if is_rank(pid, 1)), number)
        output, _ = process.communicate()
        deadline.cancel()
    assert process.returncode > 0, output
    assert re.search(fault, output), output
    until = time.monotonic() + LEFT
    while any(map(is_alive, members)):
        assert time.monotonic() < until, [pid for pid in members if is_alive(pid)]
        time.sleep(0.1)


def is_rank(pid: int, number: int) -> bool:
    """True for the process of a rank, and what it started."""
    return f"\0RANK={number}\0" in Path(f"/proc/{pid}/environ").read_text(errors="replace")
