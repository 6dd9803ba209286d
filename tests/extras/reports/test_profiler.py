"""The profile of a training: the parts of its steps add up to them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from recsuite.extras.reports.profiler import OTHER, PARTS, Profile, segments, split_steps
from recsuite.runtime import process
from recsuite.runtime.process import RuntimeContext
from recsuite.training.progress import Progress
from tests.support.launch import read_json

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def event(name: str, start: float, end: float, thread: int = 1, **more: Any) -> Any:
    """One of a profiler's, with times in ms."""
    span = SimpleNamespace(start=start * 1e3, end=end * 1e3)
    device = {"device_type": torch.autograd.DeviceType.CPU, "self_device_time_total": 0.0}
    return SimpleNamespace(name=name, time_range=span, thread=thread, **{**device, **more})


STEP = [
    event("step", 0, 100),
    event("feed", 0, 10),
    event("dense", 10, 60),
    event("input exchange", 10, 40),
    event("[lookup]_[embeddings]_[row_wise]", 25, 30),
    event("[output_dist]_[embeddings]_[row_wise]", 30, 32),
    event("backward", 60, 90),
    event("optimizer", 90, 95),
]


def test_the_parts_of_a_step_exclude_each_other_and_add_up_to_it() -> None:
    outside = [event("dense", -20, -5), event("lookup", 200, 220), event("aten::mm", 12, 14)]
    split = split_steps([*STEP, *outside], CPU)
    assert split == pytest.approx(
        {
            "feed": 10,
            "input exchange": 23,
            "lookup": 5,
            "dense": 20,
            "backward": 30,
            "output exchange": 2,
            "optimizer": 5,
            "other": 5,
        }
    )
    assert tuple(split) == (*PARTS, OTHER)


def test_the_parts_of_a_step_do_not_overlap() -> None:
    # The second reaches out of what is around it, as two threads' clocks may say.
    crossed = [event("step", 0, 10), event("dense", 1, 5), event("[lookup]", 4, 6), event("step", 20, 21)]
    found = segments(crossed)
    assert all(one.end <= two.start for one, two in itertools.pairwise(found))
    assert split_steps(crossed, CPU) == pytest.approx(
        dict.fromkeys(PARTS, 0) | {"dense": 3, "lookup": 1, "other": 7}
    )


def test_on_cuda_the_kernels_count_for_the_part_that_launched_them_on_any_thread() -> None:
    kernels = [
        event("fbgemm::lookup", 26, 27, self_device_time_total=4e3),
        event("aten::mm", 45, 46, self_device_time_total=20e3),
        event("MmBackward0", 70, 71, thread=9, self_device_time_total=50e3),
        event("aten::mm", 300, 301, self_device_time_total=1e6),
    ]
    split = split_steps([*STEP, *kernels], CUDA)
    assert {part: spent for part, spent in split.items() if spent} == {
        "lookup": 4,
        "dense": 20,
        "backward": 50,
    }


def test_a_profile_shows_the_profilers_table_and_how_a_step_splits(watched: tuple[str, Path]) -> None:
    output, folder = watched
    rows = re.findall(r"^\[RANK 0\] +(\S.*?)((?: +[\d.]+(?:%|us|ms|s)){5}) +(\d+) *$", output, re.M)
    assert len(rows) == 10
    shares = [float(times.split()[0].rstrip("%")) for _, times, _ in rows]
    assert shares == sorted(shares, reverse=True)
    assert "profile of 4 steps:" in output
    whole, parts = re.findall(r"ms of a step: ([\d.]+) of the host, in (.*)", output)[0]
    split = dict(re.findall(r"(\w[\w ]*) ([\d.]+)(?:, |$)", parts))
    assert tuple(split) == (*PARTS, OTHER)
    step = float(whole)
    assert sum(map(float, split.values())) == pytest.approx(step, abs=0.05)
    assert all(float(split[part]) > 0 for part in PARTS)
    # What nobody named is little.
    assert float(split[OTHER]) < 0.3 * step
    assert f"{folder}/trace.json shows them" in output


def test_the_trace_holds_the_steps_and_their_parts(watched: tuple[str, Path]) -> None:
    names = [event.get("name") for event in read_json(watched[1] / "trace.json")["traceEvents"]]
    assert names.count("step") == 4
    assert {"feed", "input exchange", "dense", "backward", "optimizer"} <= set(names)


def test_nothing_else_is_left_in_the_report(watched: tuple[str, Path]) -> None:
    names = sorted(path.name for path in watched[1].iterdir())
    assert names == ["groups.json", "metrics.json", "tensorboard", "trace.json"]


# A profile looks at neither.
NO_STEP: Any = None
NO_RUN: Any = None


class Said(RuntimeContext):
    """A context of one rank that keeps what is said."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__(0, 0, 1, 1, CPU, 1)
        object.__setattr__(self, "lines", lines)

    def say(self, text: str, tagged: bool = True) -> None:
        self.lines.append(text)  # type: ignore[attr-defined]


def run_steps(profile: Profile, epochs: list[int]) -> None:
    for steps in epochs:
        with profile.phase("steps", Progress()):
            for _ in range(steps):
                with process.profiler_range("step"):
                    torch.ones(3).add_(1)
                profile.on_step(NO_STEP)
    profile.on_end(NO_RUN)


@pytest.mark.parametrize(("epochs", "recorded"), [([20], 6), ([5, 20], 2), ([3, 20], 6), ([4], 1)])
def test_a_profile_ends_with_its_epoch_and_prints_its_number_of_steps(
    tmp_path: Path, epochs: list[int], recorded: int
) -> None:
    lines: list[str] = []
    run_steps(Profile(6, tmp_path, Said(lines)), epochs)
    said = f"{recorded} step{'s' * (recorded != 1)}"
    assert re.findall(r"profile of (\d+ \w+)", "".join(lines)) == [said]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [event.get("name") for event in events].count("step") == recorded


@pytest.mark.parametrize("epochs", [[], [1, 2]])
def test_a_training_too_short_for_a_profile_prints_a_line(tmp_path: Path, epochs: list[int]) -> None:
    lines: list[str] = []
    run_steps(Profile(6, tmp_path, Said(lines)), epochs)
    assert lines == [f"--profile recorded nothing: {sum(epochs)} steps do not go beyond the warm-up"]
    assert list(tmp_path.iterdir()) == []


def test_a_range_without_a_recording_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.profiler, "record_function", None)
    with process.profiler_range("step"):
        pass
