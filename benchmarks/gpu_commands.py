"""The example's own commands on one GPU, beside the same commands on the CPU: two sections of
benchmarks/gpu.py, the doctor's page and a life of checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from environment import EXAMPLE, ROOT, torchrun
from gpu_device import Deadline, Emit, Settings, run_section

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.host import allowed_cores

RATINGS, SMALL_RATINGS = 200_000, 3_000
# Cores for one command: a rank on the CPU uses all that it may.
CORES_OF_A_COMMAND = 4
# Of what a command wrote to its errors before it failed.
LAST_CHARACTERS = 1_500
TERMINATED = 128 + signal.SIGTERM


class CommandError(Exception):
    """A command of the example ended otherwise than it should."""


@dataclass(frozen=True)
class Runner:
    """Runs the example on some synthetic ratings, on the GPU or hidden from it."""

    folder: Path
    ratings: int
    deadline: Deadline

    @property
    def data(self) -> tuple[str, ...]:
        """The flags that name the ratings."""
        return (
            *("--dataset", "synthetic", "--synthetic_ratings", str(self.ratings)),
            *("--data_path", str(self.folder / "ratings")),
        )

    def __call__(self, where: str, *flags: str, launched: bool = False) -> str:
        """What a command prints. where: "gpu", which is the CPU where there is none, or "cpu"."""
        with tempfile.TemporaryFile("w+") as errors:
            process = self.start(where, *flags, launched=launched, errors=errors)
            try:
                output, _ = process.communicate(timeout=max(1.0, self.deadline.left))
            except subprocess.TimeoutExpired:
                process.kill()
                raise CommandError(f"no time was left for {' '.join(flags)} on {where}") from None
            check(process.returncode, 0, flags, output, errors)
        return output

    def start(self, where: str, *flags: str, errors: Any, launched: bool = False) -> subprocess.Popen[str]:
        """A command that runs."""
        env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {})}
        command = [*(torchrun(1) if launched else [sys.executable]), str(EXAMPLE), *self.data, *flags]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)

    def train(self, where: str, name: str, *flags: str, launched: bool = False) -> dict[str, Any]:
        """The test metrics of a training, and the device that it names."""
        report = self.folder / f"report-{name}-{where}"
        self(where, *flags, "--report_dir", str(report), launched=launched)
        found = json.loads((report / "metrics.json").read_text())
        return {"device": found["device"], "test": found["test"]}

    def dumps(self, name: str, where: str) -> Path:
        """A folder of checkpoints."""
        return self.folder / f"dumps-{name}-{where}"


def check(status: int, expected: int, flags: Iterable[str], output: str, errors: Any) -> None:
    """Refuse another exit status than was to come.

    Raises:
        CommandError: with what the command said last.
    """
    if status != expected:
        errors.seek(0)
        last = (output + errors.read())[-LAST_CHARACTERS:]
        raise CommandError(f"{' '.join(flags)}: status {status}, not {expected}: {last}")


def doctor(settings: Settings, emit: Emit) -> None:
    """The page of the doctor, and how many faults are on it."""
    result = subprocess.run([sys.executable, str(EXAMPLE), "--doctor"], capture_output=True, text=True)
    page = result.stdout.replace(str(ROOT), ".").splitlines()
    faults = sum(line.startswith("fault") for line in page)
    emit({"status": result.returncode, "faults": faults, "page": page, "errors": result.stderr[-1000:]})


def commands(settings: Settings, emit: Emit) -> None:
    """All checks, several at a time; what one finds is told when it ends, and one that fails is told of."""
    folder, deadline = Path(settings.folder), Deadline(settings.seconds)
    run = Runner(folder, settings.small_or(SMALL_RATINGS, RATINGS), deadline)
    # Made before: the commands only map the columns.
    for split in ("time", "random"):
        open_columns(
            Config.of(
                dataset="synthetic",
                synthetic_ratings=run.ratings,
                data_path=str(folder / "ratings"),
                split=split,
            )
        )
    with ThreadPoolExecutor(max(1, allowed_cores() // CORES_OF_A_COMMAND)) as pool:
        began = time.monotonic()
        emit({"checks": len(CHECKS)})
        started = {pool.submit(action, run): name for name, action in CHECKS.items()}
        for future in as_completed(started):
            try:
                found = future.result()
            # Of any kind: the other checks are still to be told of.
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"}
            emit({"check": started[future], "after": round(time.monotonic() - began, 1), **found})


def compared(name: str, *flags: str, launched: bool = False) -> Callable[[Runner], dict[str, Any]]:
    """A check that trains on both devices, with the same flags."""

    def run_both(run: Runner) -> dict[str, Any]:
        both = {
            where: run.train(where, name, *flags, *saving(run, name, where, flags), launched=launched)
            for where in ("cpu", "gpu")
        }
        return beside(both)

    return run_both


def saving(run: Runner, name: str, where: str, flags: Iterable[str]) -> tuple[str, ...]:
    """Where checkpoints go, if there are to be any."""
    return ("--save_dir", str(run.dumps(name, where))) if "--dump" in flags else ()


def beside(both: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """What was found on both devices, and by how much it differs at most."""
    return {**both, "difference": difference(both["cpu"]["test"], both["gpu"]["test"])}


def difference(some: Mapping[str, float | None], others: Mapping[str, float | None]) -> float:
    """The largest difference of two sets of metrics; infinite where one has what the other has not."""
    if some.keys() != others.keys():
        return float("inf")
    pairs = [(some[name], others[name]) for name in some]
    if any((one is None) != (other is None) for one, other in pairs):
        return float("inf")
    both = ((one, other) for one, other in pairs if one is not None and other is not None)
    return max((abs(one - other) for one, other in both), default=0.0)


def asynchronous(run: Runner) -> dict[str, Any]:
    """Dumps beside the training: it learns what it learns without them, and a CPU reads what was written."""
    flags = ("--epochs", "1", "--dump")
    both = {
        "cpu": run.train("gpu", "beside-not", *flags, "--save_dir", str(run.dumps("beside-not", "gpu"))),
        "gpu": run.train(
            "gpu", "beside", *flags, "--async_dump", "--save_dir", str(run.dumps("beside", "gpu"))
        ),
    }
    run("cpu", "--load", str(run.dumps("beside", "gpu")))
    return {"difference": difference(both["cpu"]["test"], both["gpu"]["test"])}


def resumed(run: Runner) -> dict[str, Any]:
    """Deltas, and a training that goes on from them."""
    both = {}
    for where in ("cpu", "gpu"):
        flags = ("--inc_dump", "--dump_every", "20", "--save_dir", str(run.dumps("resumed", where)))
        run(where, *flags, "--epochs", "1")
        both[where] = run.train(where, "resumed", *flags, "--resume", "--epochs", "2")
    return beside(both)


def there_and_back(run: Runner) -> dict[str, Any]:
    """Deltas of either device, merged by both: each gives the same tensors, and the CPU reads what the GPU
    has merged.
    """
    found: dict[str, Any] = {}
    for wrote in ("cpu", "gpu"):
        source = run.dumps("merged", wrote)
        run(wrote, "--inc_dump", "--dump_every", "20", "--epochs", "1", "--save_dir", str(source))
        merged = {}
        for where in ("cpu", "gpu"):
            merged[where] = run.dumps(f"merged-{wrote}", where)
            # The best one is a link to another.
            shutil.copytree(source, merged[where], symlinks=True)
            run(where, "--compact", "--save_dir", str(merged[where]))
        found[f"written on {wrote}, bit for bit"] = same_tensors(merged["cpu"], merged["gpu"])
        found[f"written on {wrote}, read on cpu"] = "this model" in run("cpu", "--load", str(merged["gpu"]))
        found[f"written on {wrote}, read on gpu"] = "this model" in run("gpu", "--load", str(merged["cpu"]))
    return found


def same_tensors(folder: Path, other: Path) -> int:
    """How many tensors the newest full checkpoints of two folders have, all the same bit for bit.

    Raises:
        CommandError: when one differs, or is in one of them alone.
    """
    mine, theirs = (_tensors(each) for each in (folder, other))
    different = sorted(mine.keys() ^ theirs.keys())
    different += [name for name in mine.keys() & theirs.keys() if not _is_same(mine[name], theirs[name])]
    if different or not mine:
        raise CommandError(f"{', '.join(different) or 'all tensors'} of {folder} and {other} differ")
    return len(mine)


def _is_same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def _tensors(folder: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    newest = max(folder.glob("step-*"))
    return {name: value for path in newest.glob("*.safetensors") for name, value in load_file(path).items()}


def terminated(run: Runner) -> dict[str, Any]:
    """A SIGTERM in the middle of a training: a checkpoint, the exit status that says so, and it is read."""
    save_dir = run.dumps("terminated", "gpu")
    flags = ("--dump", "--epochs", "1000", "--patience", "0", "--save_dir", str(save_dir))
    with tempfile.TemporaryFile("w+") as errors:
        process = run.start("gpu", *flags, errors=errors)
        # A training that steps has written one after its first epoch.
        while not list(save_dir.glob("step-*")) and process.poll() is None and run.deadline.left > 0:
            time.sleep(0.05)
        process.terminate()
        began = time.monotonic()
        try:
            output, _ = process.communicate(timeout=max(1.0, run.deadline.left))
        except subprocess.TimeoutExpired:
            process.kill()
            raise CommandError("a training that was told to end did not") from None
        seconds = time.monotonic() - began
        check(process.returncode, TERMINATED, flags, output, errors)
    run("cpu", "--load", "--checkpoint", "latest", "--save_dir", str(save_dir))
    return {"status": TERMINATED, "seconds to end": seconds}


# In the order of how much each tells.
CHECKS: dict[str, Callable[[Runner], dict[str, Any]]] = {
    "rating": compared("rating", "--epochs", "2", "--dump", launched=True),
    "checkpoints there and back": there_and_back,
    "ranking": compared("ranking", "--task", "ranking", "--epochs", "1"),
    "two-sided": compared("two-sided", "--split", "random", "--epochs", "2"),
    "SIGTERM": terminated,
    "deltas and resume": resumed,
    "dumps beside the training": asynchronous,
}


if __name__ == "__main__":
    run_section({"doctor": doctor, "commands": commands})
