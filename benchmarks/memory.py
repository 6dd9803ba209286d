"""Measure the memory of data workers, and train on more ratings than fit into memory. Prints JSON.

    python benchmarks/memory.py workers DATA_PATH RATINGS      PSS of two workers, in MB, part by part
    python benchmarks/memory.py train DATA_PATH BYTES          one epoch in that much memory

The first draws the ratings if there are none. benchmarks/feed.py runs both. A file of its own, because
workers import the script that started them, and its imports count as their memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError

EXAMPLE = Path(__file__).resolve().parent.parent / "example" / "example.py"
NUM_WORKERS = 2
BATCH_SIZE = 8192
EPOCHS, STEPS = 5, 100
# Large, so that a run of a hundred million ratings takes minutes.
TRAINING_BATCH = 65_536
CGROUP = Path("/sys/fs/cgroup")
# Files of the limit and of the peak of a memory cgroup, by version.
CGROUP_FILES = {
    CGROUP / "memory": ("memory.limit_in_bytes", "memory.max_usage_in_bytes"),
    CGROUP: ("memory.max", "memory.peak"),
}


def main() -> None:
    """Measure and print."""
    import argparse

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    measures = {"workers": measure_workers, "train": train_within}
    parser.add_argument("measure", choices=measures, help="one of the two")
    parser.add_argument("data_path", help="folder of the ratings")
    parser.add_argument("number", type=int, help="of ratings, or of the bytes of memory")
    flags = parser.parse_args()
    try:
        found = measures[flags.measure](flags.data_path, flags.number)
    except UserError as error:
        parser.error(str(error))
    print(json.dumps(found))


class FewSteps(EpochSampler):
    """First steps of each pass; they are shuffled, and so touch the whole data set."""

    def __iter__(self) -> Iterator[Request]:
        return itertools.islice(super().__iter__(), STEPS)


def measure_workers(data_path: str, ratings: int) -> dict[str, float]:
    """PSS of the largest worker in MB: the ring, the mapped columns, and its own memory."""
    config = Config.of(
        dataset="synthetic",
        synthetic_ratings=ratings,
        data_path=data_path,
        batch_size=BATCH_SIZE,
        history=0,
        num_workers=NUM_WORKERS,
    )
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    sampler = FewSteps(dataset)
    with build_dataloader(dataset, sampler, config) as loader:
        for epoch in range(EPOCHS):
            sampler.epoch = epoch
            for batch in loader:
                del batch
        assert loader.pool is not None
        workers = [_parts(pid) for pid in loader.pool.pids]
        # Beside the pool: pages of libraries count by how many processes share them.
        only = {f"only {name}": _process_that_imports(name) for name in ("torch", "numpy")}
        ring = loader.pool.ring.num_bytes / 1e6
    # PSS: a shared page counts in parts, so that sums over processes are right.
    return {**max(workers, key=lambda parts: parts["own"]), **only, "ring size": ring}


def _parts(pid: int) -> dict[str, float]:
    """PSS of a process in MB by content; anonymous: the part of its own that no file backs."""
    total = ring = columns = anonymous = 0
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            # A range of addresses, with the file that is mapped there; its sizes follow.
            path = rest[4] if len(rest) == 5 else ""
            continue
        size = int(rest[0]) * 1024 if name in ("Pss:", "Anonymous:") else 0
        if name == "Anonymous:":
            anonymous += size
            continue
        total += size
        if "memfd:batches" in path:
            ring += size
        elif path.removesuffix(" (deleted)").endswith(".npy"):
            columns += size
    sizes = {
        "own": total - ring - columns,
        "anonymous": anonymous,
        "ring": ring,
        "columns": columns,
        "total": total,
    }
    return {name: size / 1e6 for name, size in sizes.items()}


def _process_that_imports(module: str) -> float:
    """PSS of a process that only imported a module, in MB."""
    code = f"import {module}; print(open('/proc/self/smaps_rollup').read())"
    lines = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines.splitlines() if line.startswith("Pss:"))


def train_within(data_path: str, limit: int) -> dict[str, Any]:
    """Train one epoch of example.py in `limit` bytes of memory, page cache included; return rate and peak."""
    columns = Path(open_columns(Config.of(data_path=data_path)).folder)
    for path in columns.iterdir():
        _mask_ids(path)
    with tempfile.TemporaryDirectory() as reports:
        command = [sys.executable, str(EXAMPLE), "--epochs", "1", "--num_workers", "1", "--history", "0"]
        command += ["--data_path", data_path, "--batch_size", str(TRAINING_BATCH), "--report_dir", reports]
        start = time.perf_counter()
        with _limited(limit) as (how, prefix, peak):
            if not how:
                return {"trained": None, "why": "there is no way to limit memory here"}
            status, output = _run([*prefix, *command])
            used = int(peak.read_text()) if peak else None
        seconds = time.perf_counter() - start
        result: dict[str, Any] = {
            "trained": status == 0,
            "limit": limit,
            "limited by": how,
            "columns": sum(path.stat().st_size for path in columns.iterdir()),
            "batch size": TRAINING_BATCH,
            "peak": used,
            "seconds in all": seconds,
        }
        if status != 0:
            return {**result, "status": status, "why": output[-2000:]}
        epoch = json.loads((Path(reports) / "metrics.json").read_text())["epochs"][0]
        return {**result, **{name: epoch[name] for name in ("seconds", "ratings_per_second", "data_wait")}}


def _run(command: list[str]) -> tuple[int, str]:
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    return process.returncode, process.stdout


@contextlib.contextmanager
def _limited(limit: int) -> Iterator[tuple[str, list[str], Path | None]]:
    """Limit memory: yield the method ("" for none), the prefix of a command, and the file of the peak."""
    scope = ["systemd-run", "--scope", "--quiet", "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]
    if _works([*scope, "true"]):
        yield "systemd-run", scope, None
        return
    for root, (limit_file, peak_file) in CGROUP_FILES.items():
        folder = root / f"benchmark-{os.getpid()}"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_cgroup(folder, limit_file, limit))
            except OSError:
                continue
            yield "a memory cgroup", [], folder / peak_file
            return
    yield "", [], None


@contextlib.contextmanager
def _cgroup(folder: Path, limit_file: str, limit: int) -> Iterator[None]:
    """Put this process into a cgroup, so that commands that it starts are counted too."""
    folder.mkdir()
    try:
        (folder / limit_file).write_text(str(limit))
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        deadline = time.monotonic() + 10
        while (folder / "cgroup.procs").read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        folder.rmdir()


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False


def _mask_ids(path: Path) -> None:
    """Drop a file from the page cache: pages that another process has read do not count for the limit."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
