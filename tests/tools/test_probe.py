"""The doctor's lines about a worker: what one is asked, and what is said of its answer."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch

from recsuite.config.sections.data import LoaderConfig
from recsuite.tools.doctor import examined
from recsuite.tools.examination import probe as probing
from recsuite.tools.examination.probe import Probe, Report
from recsuite.workers import worker

HEALTHY = Report("spawn", False, False, "", dict.fromkeys(worker.THREAD_VARIABLES, "1"), 2.0, 2.5)


class ExitingProbe(Probe):
    """Its worker is gone before it answers."""

    def make(self, request: Any, empty: Any = None) -> Sequence[Any]:
        sys.exit(3)


class SleepingProbe(Probe):
    """Its worker never answers."""

    def make(self, request: Any, empty: Any = None) -> Sequence[Any]:
        time.sleep(3600)
        return []


class UnpicklableProbe(Probe):
    """Cannot come to life in a worker."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        raise RuntimeError("no life")


@pytest.mark.parametrize("mp_context", ["spawn", "forkserver"])
def test_a_worker_sees_the_start_method_asked_for_and_no_torch(mp_context: str) -> None:
    begin = time.time()
    report = probing.probe_worker(Probe, LoaderConfig(mp_context=mp_context))
    assert probing.judge_worker(report, mp_context).state == "ok"
    assert begin < report.imported <= report.made < time.time()


def test_a_forked_worker_is_a_warning_as_it_inherits_torch() -> None:
    report = probing.probe_worker(Probe, LoaderConfig(mp_context="fork"))
    finding = probing.judge_worker(report, "fork")
    assert finding.state == "warning"
    assert f"sharing strategy {torch.multiprocessing.get_sharing_strategy()}" in finding.text
    assert "forked" in probing.judge_start(report, time.time(), 0.0).text


def test_a_fork_of_a_process_that_uses_cuda_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    (finding,) = examined("worker", lambda: probing.check_worker(LoaderConfig(mp_context="fork")))
    assert finding.state == "fault"
    assert "--mp_context fork cannot be used once CUDA is initialised" in finding.text


class Fault(NamedTuple):
    """What a report says otherwise, and the finding."""

    change: dict[str, Any]
    state: str
    text: str


@pytest.mark.parametrize(
    "fault",
    [
        Fault({"start_method": "fork"}, "fault", "start method fork"),
        Fault({"has_torch": True, "sharing_strategy": "file_system"}, "fault", "strategy file_system"),
        Fault({"has_torch": True, "cuda_touched": True}, "fault", "CUDA touched"),
        Fault({"threads": {"OMP_NUM_THREADS": "8"}}, "warning", "threads not 1 but {'OMP_NUM_THREADS': '8'}"),
        Fault({"threads": {"OMP_NUM_THREADS": None}}, "warning", "threads not 1"),
    ],
    ids=lambda fault: fault.text,
)
def test_a_worker_that_is_not_what_was_asked_for_is_named(fault: Fault) -> None:
    assert probing.judge_worker(HEALTHY, "spawn").state == "ok"
    finding = probing.judge_worker(dataclasses.replace(HEALTHY, **fault.change), "spawn")
    assert finding.state == fault.state
    assert fault.text in finding.text
    assert finding.remedy


@pytest.mark.parametrize(
    ("probe", "text"),
    [
        (ExitingProbe, "It exited with code 3 by itself."),
        (UnpicklableProbe, "It exited with code 1 by itself."),
        (SleepingProbe, "Nothing for 1 s from data worker 0 of rank 0"),
    ],
)
def test_a_worker_that_does_not_answer_is_a_fault_and_no_hang(
    monkeypatch: pytest.MonkeyPatch, probe: type[Probe], text: str
) -> None:
    real = probing.probe_worker
    monkeypatch.setattr(probing, "probe_worker", lambda _, config: real(probe, config))
    # Far off, so that who waits for it is found on a busy machine too.
    # A second is too short for its three starts.
    monkeypatch.setattr(probing, "time_interpreter", lambda: 0.0)
    monkeypatch.setattr(probing, "WORKER_DEADLINE", 1.0 if probe is SleepingProbe else 600.0)
    begin = time.monotonic()
    (finding,) = examined("worker", lambda: probing.check_worker(LoaderConfig()))
    assert finding.state == "fault"
    assert text in finding.text
    assert finding.remedy
    assert "What to do" not in finding.text
    assert "--worker_timeout" not in finding.remedy
    assert time.monotonic() - begin < 300


def test_the_time_of_a_start_is_split_and_a_slow_one_is_a_warning() -> None:
    quick = probing.judge_start(HEALTHY, begin=1.0, interpreter=0.25)
    assert quick.state == "ok"
    for part in (
        "1500.0 ms from the call",
        "interpreter 250.0 ms",
        "imports 750.0 ms",
        "unpickling 500.0 ms",
    ):
        assert part in quick.text
    slow = probing.judge_start(HEALTHY, begin=-3.0, interpreter=0.25)
    assert slow.state == "warning"
    assert ".venv on a local disk" in slow.remedy


def test_the_interpreter_is_timed_up_to_its_first_line() -> None:
    assert 0 < probing.time_interpreter() < 5
