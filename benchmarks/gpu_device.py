"""What the sections of benchmarks/gpu.py share: the device and its copy rate, a clock, and how they answer.

A section is a process of its own: what it leaves in the memory of the device, or a crash, is no other's. It
says what it found in lines of JSON on its output, as soon as it has it. Imports no torch at its top.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from train_team import take_answers

from recsuite.runtime.host import die_with_parent
from recsuite.tools.doctor import DRIVER

if TYPE_CHECKING:
    import torch

# Of a copy on the device: far more than its caches have, and little beside its memory.
BYTES_COPIED = 2**31
COPIES = 10

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """What a section is told: part: its name; folder: for what it writes; seconds: it is ended after so many;
    small: whether it is the miniature.
    """

    part: str
    folder: str
    seconds: float
    small: bool

    def small_or(self, small: Any, full: Any) -> Any:
        """The one of two values that is for this run."""
        return small if self.small else full


class Deadline:
    """How much of a section's time is left since it began."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, below 0 when it is over."""
        return self._end - time.monotonic()


def run_section(parts: dict[str, Callable[[Settings, Emit], None]]) -> None:
    """Run the section that the command line describes, a JSON of `Settings`, and end this process.

    What it raises is its last answer, and the status is 1 then.
    """
    # The parent may be killed, and nothing is to compute for nobody.
    die_with_parent()
    answers = take_answers()

    def emit(found: dict[str, Any]) -> None:
        answers.write(f"{json.dumps(found)}\n")
        answers.flush()

    settings = Settings(**json.loads(sys.argv[1]))
    try:
        parts[settings.part](settings, emit)
    # Of any kind: it is told, and the other sections go on.
    except BaseException as error:
        traceback.print_exc()
        emit({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    # Without the destructors of libraries, as the example ends.
    os._exit(0)


def choose_device() -> torch.device:
    """The GPU if there is one, made the current one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Its kind and, of a GPU, its name, memory, driver and libraries."""
    import torch

    if device.type == "cpu":
        return {"kind": "cpu", "number": 0}
    found = re.search(r"\s(\d+(\.\d+)+)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "cuda",
        "number": torch.cuda.device_count(),
        "name": properties.name,
        "bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
        "driver": found[1] if found else "unknown",
        "cuda": str(torch.version.cuda),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Give the device what nothing holds any more."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Moments:
    """Seconds between moments on the device, or of the host where that computes.

    On a GPU they are events among its work, so that nothing waits until they are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """This is one."""
        import torch

        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """From each to the next; waits for the device."""
        synchronize(self.device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type == "cuda":
            return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
        return [end - begin for begin, end in pairs]


class HeadStart:
    """Work for a GPU that lets the host run ahead, so that no moment waits for a kernel to be launched."""

    def __init__(self, device: torch.device, num_bytes: int = 2**30, copies: int = 4) -> None:
        import torch

        self.copies = copies if device.type == "cuda" else 0
        self.source = torch.zeros(num_bytes if self.copies else 0, dtype=torch.uint8, device=device)
        self.target = torch.empty_like(self.source)

    def __call__(self) -> None:
        """Give it to the device."""
        for _ in range(self.copies):
            self.target.copy_(self.source)


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a copy of so many within the device reads and writes, the median of some."""
    import torch

    # Of random bits: zeros may be copied faster than anything else.
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    moments = Moments(device)
    for _ in range(COPIES):
        moments.mark()
        target.copy_(source)
    moments.mark()
    return 2 * num_bytes / statistics.median(moments.seconds())


@contextlib.contextmanager
def rows_drawn_on_device() -> Iterator[None]:
    """Within this a model's initial rows come from the device's generator.

    The example draws them on the host, so that they are the same anywhere: minutes for tables of 25 GB, of
    which no figure here depends.
    """
    with mock.patch("recsuite.sharding.plan.fill_tables", _fill_on_device):
        yield


def _fill_on_device(model: Any, seed: int, specs: Any = ()) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from recsuite.sharding.plan import INIT_STD

    for value in model.state_dict().values():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                shard.tensor.detach().normal_(std=INIT_STD)


def processes_on_device() -> dict[str, list[int] | None]:
    """The processes that use a GPU, by nvidia-smi, and those of this one and all below it that have one open;
    None where it cannot be known.
    """
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        listed: list[int] | None = sorted(int(line) for line in text.split() if line.isdigit())
    except (OSError, subprocess.SubprocessError):
        listed = None
    return {"nvidia-smi": listed, "open": sorted(filter(_has_gpu_open, below(os.getpid())))}


def below(pid: int) -> list[int]:
    """A process and all that it and those below it started."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        # A thread may end meanwhile.
        with contextlib.suppress(OSError):
            found += [each for child in children.read_text().split() for each in below(int(child))]
    return found


def _has_gpu_open(pid: int) -> bool:
    try:
        links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return any(re.fullmatch(r"/dev/nvidia\d+", link) for link in links)


def machine(settings: Settings, emit: Emit) -> None:
    """What the device is, and how fast it copies within itself."""
    device = choose_device()
    emit({"device": describe_device(device)})
    if device.type == "cuda" or settings.small:
        emit({"copy bytes a second": copy_rate(device, settings.small_or(2**24, BYTES_COPIED))})


if __name__ == "__main__":
    run_section({"machine": machine})
