"""Profile of training steps: profiler ranges, a recording of some steps, and their split.

There are few ranges: those of `PARTS` in the loop and the model, and TorchRec's own around each lookup and
each exchange. The innermost one counts, so the parts of a step add up to the step.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule
from typing_extensions import override

from recsuite.errors import UserError, counted
from recsuite.files import explained, replacing
from recsuite.runtime.process import PARTS, STEP, RuntimeContext
from recsuite.training.callbacks import Callback, Run, Step
from recsuite.training.progress import Progress

# The time of a step outside of all parts.
OTHER = "other"
# Prefixes of range names, and their parts: of this library, and of TorchRec.
RANGES = {
    STEP: OTHER,
    **{part: part for part in PARTS},
    "## next_batch": "feed",
    "## copy_batch_to_gpu": "feed",
    "## inplace_copy_batch_to_gpu": "feed",
    "## wait_for_batch": "feed",
    "## start_sparse_data_dist": "input exchange",
    "## wait_sparse_data_dist": "input exchange",
    "[lookup]": "lookup",
    "## forward": "dense",
    "## backward": "backward",
    "[output_dist": "output exchange",
    "## EmbeddingCollectionAwaitable": "output exchange",
    "All2All_Seq_Req": "output exchange",
    "## zero_grad": "optimizer",
    "## optimizer": "optimizer",
}
# The first steps of the profiler are slow, like those of the training.
WARM_UP_STEPS = 3
# Rows of the table, and characters of a name in it.
NUM_COSTLIEST, NAME_WIDTH = 10, 50
TRACE = "trace.json"


@dataclass(frozen=True)
class Segment:
    """A time span of one part of a step, in microseconds of the recording's clock."""

    start: float
    end: float
    part: str


def segments(events: Sequence[Any]) -> list[Segment]:
    """Split the recorded steps into their parts, in the order of time. events: from a profiler.

    Ranges nest by time, on any thread: CUDA's backward runs on a separate thread while the loop waits.
    """
    marks = [
        Segment(event.time_range.start, event.time_range.end, part)
        for event in events
        if (part := _part_of(event)) is not None
    ]
    # Of two that begin together the longer one comes first, because it contains the other.
    marks.sort(key=lambda mark: (mark.start, -mark.end))
    parts: list[Segment] = []
    around: list[Segment] = []
    now = 0.0
    # A final mark closes all open ranges.
    for mark in [*marks, Segment(math.inf, math.inf, OTHER)]:
        while around and around[-1].end <= mark.start:
            parts.append(Segment(now, around[-1].end, around[-1].part))
            now = around.pop().end
        if around:
            parts.append(Segment(now, mark.start, around[-1].part))
            # Cut at the end of the outer range, so that no time counts twice.
            mark = replace(mark, end=min(mark.end, around[-1].end))
        # Time outside of a step is ignored.
        if around or mark.part == OTHER:
            around.append(mark)
            now = mark.start
    return parts


def _part_of(event: Any) -> str | None:
    # The device's copies of ranges use the device's clock.
    if event.device_type != DeviceType.CPU:
        return None
    return next((part for name, part in RANGES.items() if event.name.startswith(name)), None)


def split_steps(events: Sequence[Any], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of each of `PARTS`, and of "other", over all recorded steps.

    On the CPU they are the host's and add up to the steps. On CUDA they are those of the kernels that each
    part launched, and add up to the busy time of the device.
    """
    spent = dict.fromkeys((*PARTS, OTHER), 0.0)
    if device.type == "cuda":
        for event, part in _launched_in(events):
            spent[part] += event.self_device_time_total / 1e3
    else:
        for segment in segments(events):
            spent[segment.part] += (segment.end - segment.start) / 1e3
    return spent


def _launched_in(events: Sequence[Any]) -> Iterator[tuple[Any, str]]:
    """Yield the events that began on the host in a step, on any thread, and their parts."""
    parts = segments(events)
    starts = [segment.start for segment in parts]
    for event in events:
        began = event.time_range.start
        place = bisect_right(starts, began) - 1
        if event.device_type == DeviceType.CPU and place >= 0 and began < parts[place].end:
            yield event, parts[place].part


def describe_split(events: Sequence[Any], num_steps: int, device: torch.device) -> str:
    """Return a line on the parts of a step, which add up to it."""
    split = {part: spent / num_steps for part, spent in split_steps(events, device).items()}
    whose = "the device" if device.type == "cuda" else "the host"
    parts = ", ".join(f"{part} {spent:.2f}" for part, spent in split.items())
    return f"ms of a step: {sum(split.values()):.2f} of {whose}, in {parts}"


class Profile(Callback):
    """Record training steps on this rank, and print and write the profile; the other ranks just train.

    A recording ends with its epoch, so that it contains no evaluation, and may have fewer steps than
    requested.

    Raises:
        UserError: when the folder of the trace cannot be written.
    """

    def __init__(self, num_steps: int, folder: Path, context: RuntimeContext) -> None:
        # Checked before the training: a failed write of the trace is noticed only after the recording.
        if not os.access(folder, os.W_OK):
            raise UserError(
                f"Cannot write {TRACE} to {folder.resolve()}, where --profile writes it. Fix: give another "
                "--report_dir."
            )
        self.num_steps = num_steps
        self.path = folder / TRACE
        self.context = context
        self._seen = 0
        self._recorded = 0
        self._profiler: profile | None = None

    @contextlib.contextmanager
    def epoch(self) -> Iterator[None]:
        """Record the first steps of an epoch after the warm-up, once."""
        if self._recorded:
            yield
            return
        # The profiler needs a warm-up, too.
        warm_up = max(1, WARM_UP_STEPS - self._seen)
        activities = [ProfilerActivity.CPU]
        if self.context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=warm_up, active=self.num_steps, repeat=1)
        before = self._seen
        # Without acc_events torch 2.11 warns of a second recording, although there is none.
        with profile(activities=activities, schedule=plan, acc_events=True) as self._profiler:
            yield
        self._recorded = min(max(0, self._seen - before - warm_up), self.num_steps)
        if self._recorded:
            self._write()
            self._say()
            self.context.say(f"{self.path} shows them in time: open it in Perfetto or chrome://tracing")
        self._profiler = None

    @override
    def phase(self, name: str, progress: Progress) -> AbstractContextManager[None]:
        """Record steps only."""
        return self.epoch() if name == "steps" else contextlib.nullcontext()

    @override
    def on_step(self, step: Step) -> None:
        """Count a step of the epoch."""
        self._seen += 1
        if self._profiler:
            self._profiler.step()

    @override
    def on_end(self, run: Run) -> None:
        """Print a line if there was nothing to record."""
        if not self._recorded:
            self.context.say(f"--profile recorded nothing: {self._seen} steps do not go beyond the warm-up")

    def _say(self) -> None:
        """Print the profiler's own table, and the split of a step, which its nested ranges cannot show."""
        assert self._profiler
        device = self.context.device
        table = self._profiler.key_averages().table(
            sort_by="self_device_time_total" if device.type == "cuda" else "self_cpu_time_total",
            row_limit=NUM_COSTLIEST,
            max_name_column_width=NAME_WIDTH,
        )
        for line in (f"profile of {counted(self._recorded, 'step')}:", *table.strip().split("\n")):
            self.context.say(line)
        self.context.say(describe_split(self._profiler.events(), self._recorded, device))

    def _write(self) -> None:
        """Write the trace in one rename; the profiler itself does not report a failed write."""
        assert self._profiler
        # The profiler cannot write to every name of a file.
        can = explained(f"Cannot write {self.path}", "give another --report_dir")
        with can, replacing(self.path) as aside, tempfile.NamedTemporaryFile(suffix=".json") as plain:
            self._profiler.export_chrome_trace(plain.name)
            shutil.copyfile(plain.name, aside)
