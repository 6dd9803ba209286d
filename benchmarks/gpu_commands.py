"""Commands of the example on one GPU, beside the same commands on the CPU.

gpu_commands.py SETTINGS    a section of benchmarks/gpu.py: "doctor" or "commands"
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
from common import EXAMPLE, ROOT, torchrun
from gpu_sections import Deadline, Emit, SectionSettings, run_section

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.host import allowed_cores

RATINGS, SMALL_RATINGS = 200_000, 3_000
# Cores for one command.
CORES_OF_A_COMMAND = 4
# Last characters of the output of a failed command that are kept.
LAST_CHARACTERS = 1_500
TERMINATED = 128 + signal.SIGTERM


class CommandError(Exception):
    """A command of the example ended with another status than expected."""


@dataclass(frozen=True)
class Runner:
    """Commands of the example on synthetic ratings, on the GPU or hidden from it."""

    folder: Path
    ratings: int
    deadline: Deadline

    @property
    def data(self) -> tuple[str, ...]:
        """Flags that name the ratings."""
        return (
            *("--dataset", "synthetic", "--synthetic_ratings", str(self.ratings)),
            *("--data_path", str(self.folder / "ratings")),
        )

    def __call__(self, where: str, *flags: str, launched: bool = False) -> str:
        """Run a command and return its output. where: "cpu", or "gpu", which is the CPU if there is none."""
        with tempfile.TemporaryFile("w+") as errors:
            process = self.start(where, *flags, launched=launched, errors=errors)
            try:
                output, _ = process.communicate(timeout=max(1.0, self.deadline.left))
            except subprocess.TimeoutExpired:
                process.kill()
                raise CommandError(f"no time left for {' '.join(flags)} on {where}") from None
            check(process.returncode, 0, flags, output, errors)
        return output

    def start(self, where: str, *flags: str, errors: Any, launched: bool = False) -> subprocess.Popen[str]:
        """Start a command."""
        env = {**os.environ, **({"CUDA_VISIBLE_DEVICES": ""} if where == "cpu" else {})}
        command = [*(torchrun(1) if launched else [sys.executable]), str(EXAMPLE), *self.data, *flags]
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=errors, text=True)

    def train(self, where: str, name: str, *flags: str, launched: bool = False) -> dict[str, Any]:
        """Train, and return the test metrics and the name of the device."""
        report = self.folder / f"report-{name}-{where}"
        self(where, *flags, "--report_dir", str(report), launched=launched)
        found = json.loads((report / "metrics.json").read_text())
        return {"device": found["device"], "test": found["test"]}

    def dumps(self, name: str, where: str) -> Path:
        """Folder of checkpoints."""
        return self.folder / f"dumps-{name}-{where}"


def check(status: int, expected: int, flags: Iterable[str], output: str, errors: Any) -> None:
    """Check the exit status of a command.

    Raises:
        CommandError: with the end of its output.
    """
    if status != expected:
        errors.seek(0)
        last = (output + errors.read())[-LAST_CHARACTERS:]
        raise CommandError(f"{' '.join(flags)}: status {status}, not {expected}: {last}")


def doctor(settings: SectionSettings, emit: Emit) -> None:
    """Section "doctor": its page, and the number of faults on it."""
    result = subprocess.run([sys.executable, str(EXAMPLE), "--doctor"], capture_output=True, text=True)
    page = result.stdout.replace(str(ROOT), ".").splitlines()
    faults = sum(line.startswith("fault") for line in page)
    emit({"status": result.returncode, "faults": faults, "page": page, "errors": result.stderr[-1000:]})


def commands(settings: SectionSettings, emit: Emit) -> None:
    """Section "commands": all checks, several at a time; each result is emitted when it ends."""
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
            # Of any kind: the other checks go on.
            except Exception as error:
                found = {"failed": f"{type(error).__name__}: {error}"}
            emit({"check": started[future], "after": round(time.monotonic() - began, 1), **found})


def compared(name: str, *flags: str, launched: bool = False) -> Callable[[Runner], dict[str, Any]]:
    """Return a check that trains on both devices with the same flags."""

    def run_both(run: Runner) -> dict[str, Any]:
        both = {
            where: run.train(where, name, *flags, *saving(run, name, where, flags), launched=launched)
            for where in ("cpu", "gpu")
        }
        return beside(both)

    return run_both


def saving(run: Runner, name: str, where: str, flags: Iterable[str]) -> tuple[str, ...]:
    """Flags of the folder of checkpoints, if the command writes any."""
    return ("--save_dir", str(run.dumps(name, where))) if "--dump" in flags else ()


def beside(both: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Results of both devices, and their largest difference."""
    return {**both, "difference": difference(both["cpu"]["test"], both["gpu"]["test"])}


def difference(some: Mapping[str, float | None], others: Mapping[str, float | None]) -> float:
    """Largest difference of two sets of metrics; infinite if one lacks a metric of the other."""
    if some.keys() != others.keys():
        return float("inf")
    pairs = [(some[name], others[name]) for name in some]
    if any((one is None) != (other is None) for one, other in pairs):
        return float("inf")
    both = ((one, other) for one, other in pairs if one is not None and other is not None)
    return max((abs(one - other) for one, other in both), default=0.0)


def asynchronous(run: Runner) -> dict[str, Any]:
    """Check that --async_dump changes no metric, and that a CPU reads the checkpoint."""
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
    """Check deltas, and a training that resumes from them, on both devices."""
    both = {}
    for where in ("cpu", "gpu"):
        flags = ("--inc_dump", "--dump_every", "20", "--save_dir", str(run.dumps("resumed", where)))
        run(where, *flags, "--epochs", "1")
        both[where] = run.train(where, "resumed", *flags, "--resume", "--epochs", "2")
    return beside(both)


def there_and_back(run: Runner) -> dict[str, Any]:
    """Check that both devices merge the deltas of either one into the same tensors, and read each other's."""
    found: dict[str, Any] = {}
    for wrote in ("cpu", "gpu"):
        source = run.dumps("merged", wrote)
        run(wrote, "--inc_dump", "--dump_every", "20", "--epochs", "1", "--save_dir", str(source))
        merged = {}
        for where in ("cpu", "gpu"):
            merged[where] = run.dumps(f"merged-{wrote}", where)
            # The best checkpoint is a link to another.
            shutil.copytree(source, merged[where], symlinks=True)
            run(where, "--compact", "--save_dir", str(merged[where]))
        found[f"written on {wrote}, bit for bit"] = same_tensors(merged["cpu"], merged["gpu"])
        found[f"written on {wrote}, read on cpu"] = "this model" in run("cpu", "--load", str(merged["gpu"]))
        found[f"written on {wrote}, read on gpu"] = "this model" in run("gpu", "--load", str(merged["cpu"]))
    return found


def same_tensors(folder: Path, other: Path) -> int:
    """Number of tensors in the newest full checkpoints of two folders, which are equal bit for bit.

    Raises:
        CommandError: when a tensor differs, or is missing in one of them.
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
    """Check the checkpoint and the exit status of a training that got SIGTERM."""
    save_dir = run.dumps("terminated", "gpu")
    flags = ("--dump", "--epochs", "1000", "--patience", "0", "--save_dir", str(save_dir))
    with tempfile.TemporaryFile("w+") as errors:
        process = run.start("gpu", *flags, errors=errors)
        # The first checkpoint is that of the first epoch.
        while not list(save_dir.glob("step-*")) and process.poll() is None and run.deadline.left > 0:
            time.sleep(0.05)
        process.terminate()
        began = time.monotonic()
        try:
            output, _ = process.communicate(timeout=max(1.0, run.deadline.left))
        except subprocess.TimeoutExpired:
            process.kill()
            raise CommandError("a training did not end after SIGTERM") from None
        seconds = time.monotonic() - began
        check(process.returncode, TERMINATED, flags, output, errors)
    run("cpu", "--load", "--checkpoint", "latest", "--save_dir", str(save_dir))
    return {"status": TERMINATED, "seconds to end": seconds}


# The most important first.
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
