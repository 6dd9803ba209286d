"""The benchmark of one GPU: in miniature on a CPU, cut off, with sections that fail; and what it computes of
traces, metrics and sizes, with known answers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.benchmarks import benchmark, measured
from tests.support.documents import short_form
from tests.support.launch import ROOT, python, read_json, started, wait_for

GPU = ROOT / "benchmarks" / "gpu.py"


# It measures for long; nothing but its own script depends on it.
@pytest.mark.soak
def test_the_small_benchmark_writes_results_of_every_requested_section(tmp_path: Path) -> None:
    # Without "training", which compiles, and "ranks", which have a command of their own.
    only = ("tests", "steps", "ncf", "dlrm", "whole", "lookup", "disk")
    found, printed = measured("gpu", tmp_path, *short_form("gpu"), "--only", *only)
    assert found["sections"].keys() == {"machine", *only}
    assert not [name for name, section in found["sections"].items() if "error" in section]
    (step,) = found["sections"]["steps"]["results"]
    assert (step["steps"], step["waits"], step["share hidden"]) == (10, {}, None)
    (alone,) = (each["samples a second"] for each in found["sections"]["ncf"]["results"])
    assert alone.keys() >= {"here", "here, eager", "here, TF32", "here, bf16", "plain, dense Adam"}
    (clicks,) = (each["samples a second"] for each in found["sections"]["dlrm"]["results"])
    assert clicks.keys() >= {"here", "plain, dense Adam", "plain, sparse Adagrad"}
    (whole,) = found["sections"]["whole"]["results"]
    assert whole["trained"] + whole["evaluated"] > 60_000
    *tests, end = found["sections"]["tests"]["results"]
    assert (len(tests) > 20, end) == (True, {"status": 0})
    kernels, tables = found["sections"]["lookup"]["results"]
    # Each of 1,024 rows of 64 numbers is read and written, with its id.
    assert kernels["lookup"]["bytes"] == 1024 * (2 * 4 * 64 + 8)
    assert 1024 < tables["distinct"] <= 2048
    dump = found["sections"]["disk"]["results"][1]
    assert dump["bytes"] > 4 * 65 * 20_000
    assert any(bar["name"].startswith("lookup and update, kernels") for bar in found["bars"])
    assert "| tables alone | moved | of a copy |" in printed


# --- sections that fail, and runs that are cut off ---


def run_with(tmp_path: Path, sections: dict[str, tuple[str, float]], *flags: str) -> list[str]:
    """The command of a benchmark whose sections are these programs, each with its seconds."""
    scripts = {}
    for name, (text, seconds) in {"machine": ("", 5.0), **sections}.items():
        script = tmp_path / f"{name}.py"
        script.write_text(text)
        scripts[name] = (str(script), seconds)
    program = f"import gpu\ngpu.SECTIONS = {scripts!r}\ngpu.main()\n"
    (tmp_path / "run.py").write_text(program)
    arguments = ["--small", "--report", str(tmp_path), "--folder", str(tmp_path), *flags]
    return [sys.executable, str(tmp_path / "run.py"), *arguments]


def env() -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks"), str(ROOT / "example")])}


def test_a_failed_section_is_recorded_and_the_results_of_other_sections_are_kept(tmp_path: Path) -> None:
    raises = "from gpu_sections import run_section\ndef fail(settings, emit):\n"
    raises += (
        "    emit({'figure': 1})\n    raise ValueError('no such kernel')\nrun_section({'raises': fail})\n"
    )
    sections = {
        "raises": (raises, 60.0),
        "crashes": ("import os\nprint('{\"figure\": 2}', flush=True)\nos.kill(os.getpid(), 11)\n", 60.0),
        "hangs": ("import time\nprint('{\"figure\": 3}', flush=True)\ntime.sleep(600)\n", 3.0),
        "ends": ("print('{\"figure\": 4}')\n", 60.0),
    }
    command = run_with(tmp_path, sections)
    with started(command, env=env(), real=True) as process:
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    found = read_json(tmp_path / "gpu.json")["sections"]
    assert [found[name]["results"] for name in sections] == [[{"figure": number}] for number in (1, 2, 3, 4)]
    assert found["raises"]["error"] == "ValueError: no such kernel"
    # The place where it was raised.
    assert "in fail" in found["raises"]["output"]
    assert found["crashes"]["error"] == "status -11"
    assert found["hangs"]["error"] == "ended after 3 s, its time"
    assert "error" not in found["ends"]
    assert "The section raises did not end: ValueError: no such kernel" in output


def test_a_killed_run_keeps_its_results(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    says = f"import os, pathlib, time\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\n"
    says += "print('{\"figure\": 2}', flush=True)\ntime.sleep(600)\n"
    sections = {"before": ("print('{\"figure\": 1}')\n", 60.0), "during": (says, 600.0)}
    with started(run_with(tmp_path, sections), env=env(), real=True) as process:
        wait_for(process, "during: ")
        process.kill()
        process.wait()
    # No section is the parent's to end any more; a real one ends by itself.
    os.kill(int(pid.read_text()), signal.SIGKILL)
    found = read_json(tmp_path / "gpu.json")
    assert found["sections"]["before"]["results"] == [{"figure": 1}]
    assert found["sections"]["during"]["results"] == [{"figure": 2}]


def test_sections_without_time_left_are_reported() -> None:
    runner, found = benchmark("gpu"), {}
    section = runner.GpuSection("late", lambda left: pytest.fail("was begun"), 60.0)
    runner.run_sections([section], 5.0, lambda name, what: found.update({name: what}))
    assert found == {"late": {"results": [], "error": "not begun: the 5 s were used up"}}


def test_without_a_gpu_only_the_miniature_is_measured(tmp_path: Path) -> None:
    result = python(GPU, "--report", tmp_path)
    assert result.returncode == 1
    assert "torch sees no GPU; give --small" in result.stderr
    assert python(GPU, "--small", "--write").returncode == 2


# --- what is computed ---


def event(kind: str, name: str, begin: float, length: float, thread: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": begin, "dur": length, "tid": thread}


def test_a_trace_gives_overlapped_and_waiting_time() -> None:
    trace = benchmark("gpu_sections")
    events = [
        event("user_annotation", "ProfilerStep#7", 0, 1000),
        event("user_annotation", "ProfilerStep#8", 1000, 1000),
        event("user_annotation", "step", 10, 900),
        event("cpu_op", "aten::item", 100, 50),
        event("cpu_op", "aten::_local_scalar_dense", 101, 48),
        event("cuda_runtime", "cudaStreamSynchronize", 110, 30),
        # Of a tensor on the host: it waits for nothing.
        event("cpu_op", "aten::item", 200, 5),
        event("cuda_runtime", "cudaEventSynchronize", 1500, 10, thread=2),
        # After the last step.
        event("cuda_runtime", "cudaDeviceSynchronize", 2100, 10),
        event("kernel", "gemm", 300, 200, thread=7),
        event("kernel", "gemm", 400, 200, thread=8),
        {**event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 250, 100, 9), "args": {"bytes": 4_000_000}},
        event("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)", 1200, 100, 9),
        {"ph": "i", "name": "nothing"},
    ]
    found = trace.describe_trace(events)
    assert (found["steps"], found["ms of a step"]) == (2, 1.0)
    assert found["waits"] == {"cudaStreamSynchronize": 1, "cudaEventSynchronize": 1}
    assert found["places of waits"] == {
        "step > aten::item > aten::_local_scalar_dense > cudaStreamSynchronize": 1,
        "cudaEventSynchronize": 1,
    }
    assert found["reads"] == {"aten::item": 2, "aten::_local_scalar_dense": 1}
    assert found["reads that wait"] == 2
    # The first copy lies beside kernels from 300 to 350, the second beside none.
    assert found["share hidden"] == 50 / 200
    assert (found["copies to the device"], found["pageable copies"]) == (2, 1)
    assert found["MB to the device"] == 4.0
    # From 250 to 600, and the second copy.
    assert found["share that the device works"] == pytest.approx(450 / 2000)
    assert found["costliest kernels, ms of a step"]["gemm"] == 0.2


def test_a_run_is_the_training_its_evaluations_and_its_checkpoints() -> None:
    report = {
        "data": {"num_train": 1000, "num_validation": 100, "num_test": 300},
        "epochs": [{}, {}],
        "time": {"imports": 5.0, "feed": 1.0, "steps": 3.0, "evaluation": 0.5, "dumps": 1.5, "other": 9.0},
    }
    found = benchmark("gpu_commands").describe_run(report)
    assert found["seconds"] == {"training": 4.0, "evaluation": 0.5, "checkpoints": 1.5}
    # Validated after both epochs and with the test, which is of the best weights.
    assert (found["trained"], found["evaluated"]) == (2000, 600)
    whole, event = benchmark("gpu").judge({"sections": {"whole": {"results": [found]}}})
    assert (whole["measured"], whole["reached"]) == ("1.50", True)
    assert (event["measured"], event["reached"]) == ("0.42", True)


@pytest.mark.parametrize(
    ("outcomes", "status", "failed"),
    [
        (["passed", "skipped"], 0, "0"),
        (["passed", "failed", "error"], 1, "2"),
        (["skipped"], 0, "1"),
        ([], 5, "1"),
    ],
)
def test_tests_that_all_were_skipped_have_not_passed(outcomes: list[str], status: int, failed: str) -> None:
    results = [{"test": "one", "outcome": outcome} for outcome in outcomes]
    (bar,) = benchmark("gpu").judge({"sections": {"ranks": {"results": [*results, {"status": status}]}}})
    assert (bar["measured"], bar["reached"]) == (failed, failed == "0")


def test_variants_alternate_if_they_fit_in_memory_together() -> None:
    training = benchmark("gpu_sections")
    here, eager, dense, sparse = training.HERE, training.EAGER, training.DENSE, training.SPARSE
    names = (here, eager, dense, sparse)
    assert training.groups_of(names, 10**9, 80 * 10**9) == [list(names)]
    # 25.9 GB of rows: dense Adam has no room at all, and the others only one after the other.
    assert training.groups_of(names, 25_900_000_000, 80 * 10**9) == [[here, eager], [sparse]]
    assert training.groups_of(names, 10**12, 80 * 10**9) == []


def test_tables_are_as_large_as_disk_memory_and_time_allow() -> None:
    fit = benchmark("gpu_sections").rows_that_fit
    much, row = 10**15, 4 * 65
    assert fit(100, much, much, 1e9, 1e9, 1e9) == 100
    assert fit(10**9, row * 1000, much, 1e9, 1e9, 1e9) == 800
    assert fit(10**9, much, row * 1000, 1e9, 1e9, 1e9) == 400
    # A byte is written once and read twice, in 0.6 of ten seconds.
    assert fit(10**9, much, much, 10.0, row * 100, row * 100) == pytest.approx(200, abs=1)


def test_a_rank_counts_the_processes_that_use_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    device = benchmark("gpu_sections")
    script = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as child:
        end = time.monotonic() + 60
        while len(device.below(child.pid)) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert {*device.below(child.pid)} < {*device.below(os.getpid())}
        assert child.stdin is not None
        child.stdin.close()
    link = f"/proc/{os.getpid()}/fd/9"
    monkeypatch.setattr(
        os, "readlink", lambda path: "/dev/nvidia0" if str(path).startswith(link[:-1]) else ""
    )
    assert device.processes_on_device()["open"] == [os.getpid()]


def test_a_truncated_run_shows_its_finished_sections() -> None:
    tables = benchmark("gpu")
    device = {"kind": "cuda", "name": "GPU", "driver": "1.2", "cuda": "13.0", "nccl": "2.28"}
    rates = {"here": [3e6, 3e6], "plain, dense Adam": [1e6, 1e6], "plain, sparse Adagrad": [2e6, 2e6]}
    rates["limit"] = [4e6, 4e6]
    size = {"dim": 64, "users": 10_000_000, "items": 1_000_000, "batch": 4096}
    result = {
        **{"date": "2026-01-02T03:04:05+00:00", "machine": "16 cores", "small": False},
        "versions": {"torch": "2.11.0", "fbgemm": "fbgemm-gpu 1.6.0"},
        "sections": {
            "machine": {"results": [{"device": device}, {"copy bytes a second": 3e12}]},
            "tests": {"results": [{"test": "tests/test_one.py::test_one", "outcome": "failed"}]},
            "training": {
                "results": [{**size, "samples a second": rates}, {"dim": 128, "skipped": "no room"}],
                "error": "OutOfMemoryError: all of it",
            },
        },
    }
    failed, *bars = tables.judge(result)
    assert (failed["measured"], failed["reached"]) == ("1", False)
    found = [(bar["measured"], bar["bar"], bar["reached"]) for bar in bars]
    assert found == [("1.50", "at least 5.0", False), ("0.75", "at least 0.7", True)]
    text = tables.render(result)
    assert "| 64, 10,000,000 + 1,000,000, 4,096 | 3.00 | 1.00 | 2.00 | 4.00 | **1.50** | **0.75** |" in text
    assert "1 failed.\ntests/test_one.py::test_one" in text
    assert "The section training did not end: OutOfMemoryError" in text
    assert "One GPU, driver 1.2, CUDA 13.0, nccl 2.28, which copies 3,000 GB/s" in text
    assert json.loads(json.dumps(result)) == result


def test_the_page_shows_the_figures_of_the_committed_run_or_that_none_exist() -> None:
    gpu = benchmark("gpu")
    told = benchmark("common").text_between(gpu.PAGE, "gpu").strip()
    figures = ROOT / "docs" / "gpu.json"
    if not figures.exists():
        assert told.startswith("No figures of a GPU exist yet")
        return
    result = read_json(figures)
    assert not result["small"]
    assert gpu.kind_of(result) == "cuda"
    assert told == gpu.render(result)
    assert gpu.judge(result) == result["bars"]
