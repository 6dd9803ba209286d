"""Where the time of a training step goes: named ranges, a recording of some steps, and how they split.

The ranges are few: those of `PARTS` that the loop and the model name, and TorchRec's own around each lookup
and each exchange. The innermost one counts, so the parts of a step add up to the step.
"""

from __future__ import annotations

import contextlib
import math
import os
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, schedule

from recsuite.errors import UserError, counted
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.ranges import PARTS, STEP

# What of a step is in no part.
OTHER = "other"
# Ranges by how their names begin, and the part in which they count: ours, and those of TorchRec.
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
# The profiler's first steps are slow, as the training's are.
WARM_UP_STEPS = 3
NUM_COSTLIEST = 10
TRACE = "trace.json"


@dataclass(frozen=True)
class Segment:
    """A time, in microseconds of the recording's clock, that belongs to one part of a step."""

    start: float
    end: float
    part: str


@dataclass(frozen=True)
class Cost:
    """What all calls of one name took by themselves, without what they called, in ms and as share of all."""

    name: str
    calls: int
    milliseconds: float
    share: float


def segments(events: Sequence[Any]) -> list[Segment]:
    """The recorded steps cut into their parts, in the order of time; the events are a profiler's.

    Ranges nest by time, on whatever thread they are: CUDA's backward runs on one of its own while the loop
    waits.
    """
    marks = [
        Segment(event.time_range.start, event.time_range.end, part)
        for event in events
        if (part := _part_of(event)) is not None
    ]
    marks.sort(key=lambda mark: (mark.start, -mark.end))
    found: list[Segment] = []
    around: list[Segment] = []
    now = 0.0
    # One after all others closes what is open.
    for mark in [*marks, Segment(math.inf, math.inf, OTHER)]:
        while around and around[-1].end <= mark.start:
            found.append(Segment(now, around[-1].end, around[-1].part))
            now = around.pop().end
        if around:
            found.append(Segment(now, mark.start, around[-1].part))
            mark = replace(mark, end=min(mark.end, around[-1].end))
        # What is outside of a step is none of ours.
        if around or mark.part == OTHER:
            around.append(mark)
            now = mark.start
    return found


def _part_of(event: Any) -> str | None:
    # The device's copies of ranges lie on the device's clock.
    if event.device_type != DeviceType.CPU:
        return None
    return next((part for name, part in RANGES.items() if event.name.startswith(name)), None)


def split_steps(events: Sequence[Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of each of `PARTS`, and of "other", over all recorded steps.

    On the CPU they are the host's and add up to the steps. On CUDA they are those of the kernels that each
    part launched, and add up to what the device worked.
    """
    spent = dict.fromkeys((*PARTS, OTHER), 0.0)
    if device.type == "cuda":
        for event, part in _inside_steps(events, device):
            spent[part] += event.self_device_time_total / 1e3
    else:
        for segment in segments(events):
            spent[segment.part] += (segment.end - segment.start) / 1e3
    return spent


def costliest(events: Sequence[Any], device: torch.device, number: int = NUM_COSTLIEST) -> list[Cost]:
    """The names that took most of the recorded steps by themselves; on CUDA, of the device's time."""
    attribute = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    calls: dict[str, list[float]] = {}
    for event, _ in _inside_steps(events, device):
        calls.setdefault(event.name, []).append(getattr(event, attribute) / 1e3)
    # Nothing at all where the device's driver lets nobody look.
    whole = sum(map(sum, calls.values())) or math.nan
    costs = [Cost(name, len(each), sum(each), sum(each) / whole) for name, each in calls.items()]
    return sorted(costs, key=lambda cost: -cost.milliseconds)[:number]


def _inside_steps(events: Sequence[Any], device: torch.device) -> Iterator[tuple[Any, str]]:
    """What began on the host in a step, and in which part."""
    parts = segments(events)
    starts = [segment.start for segment in parts]
    # The threads of gloo work beside the step, whose time is not theirs.
    threads = {event.thread for event in events if _part_of(event) is not None}
    for event in events:
        began = event.time_range.start
        place = bisect_right(starts, began) - 1
        counts = device.type == "cuda" or event.thread in threads
        if event.device_type == DeviceType.CPU and counts and place >= 0 and began < parts[place].end:
            yield event, parts[place].part


def describe_profile(events: Sequence[Any], num_steps: int, device: torch.device) -> str:
    """The costliest names of the recorded steps as a table, and a line on the parts of a step."""
    split = {part: spent / num_steps for part, spent in split_steps(events, device).items()}
    whose = "the device" if device.type == "cuda" else "the host"
    lines = [
        f"profile of {counted(num_steps, 'step')}: {sum(split.values()):.2f} ms of {whose} each; the "
        "costliest, each without what it calls:",
        f"| {'name':<60} |  calls | total ms |  share |",
        f"|{'-' * 62}|-------:|---------:|-------:|",
    ]
    for cost in costliest(events, device):
        name = cost.name if len(cost.name) <= 60 else f"{cost.name[:57]}..."
        lines.append(f"| {name:<60} | {cost.calls:6,} | {cost.milliseconds:8.2f} | {cost.share:6.1%} |")
    parts = ", ".join(f"{part} {spent:.2f}" for part, spent in split.items())
    return "\n".join([*lines, f"ms of a step: {parts}"])


class Profile:
    """Records training steps on this rank, and says and writes what it saw; the other ranks just train.

    A recording ends with its epoch, so that no evaluation is in it, and may have fewer steps than were asked
    for.

    Raises:
        UserError: when the folder of the trace cannot be written.
    """

    def __init__(self, num_steps: int, folder: Path, context: RuntimeContext) -> None:
        if not os.access(folder, os.W_OK):
            raise UserError(
                f"--profile writes {TRACE} to {folder.resolve()}, which cannot be written; give another "
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
        """Around the steps of an epoch: records the first ones after the warm-up, once."""
        if self._recorded:
            yield
            return
        # The profiler itself wants one, too.
        warm_up = max(1, WARM_UP_STEPS - self._seen)
        activities = [ProfilerActivity.CPU]
        if self.context.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        plan = schedule(wait=0, warmup=warm_up, active=self.num_steps, repeat=1)
        before = self._seen
        # Without acc_events torch 2.11 warns of a second recording, and there is none.
        with profile(activities=activities, schedule=plan, acc_events=True) as self._profiler:
            yield
        self._recorded = min(max(0, self._seen - before - warm_up), self.num_steps)
        if self._recorded:
            self._write()
            self.context.say(describe_profile(self._profiler.events(), self._recorded, self.context.device))
            self.context.say(f"{self.path} shows them in time: open it in Perfetto or chrome://tracing")
        self._profiler = None

    def after_step(self) -> None:
        """A step of the epoch is done."""
        self._seen += 1
        if self._profiler:
            self._profiler.step()

    def finish(self) -> None:
        """Say so if there was nothing to record."""
        if not self._recorded:
            self.context.say(f"--profile recorded nothing: {self._seen} steps do not go beyond the warm-up")

    def _write(self) -> None:
        """Write the trace in one rename; the profiler itself does not say when it cannot write."""
        beside = self.path.with_name(f".{os.getpid()}.{TRACE}")
        try:
            assert self._profiler
            self._profiler.export_chrome_trace(str(beside))
            beside.replace(self.path)
        except OSError as error:
            raise UserError(
                f"{self.path} cannot be written ({error.strerror or error}); give another --report_dir."
            ) from error
        finally:
            beside.unlink(missing_ok=True)
