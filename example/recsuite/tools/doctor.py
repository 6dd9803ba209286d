"""The doctor: one page about this machine, each line ok, warning or fault with its remedy.

It looks at what a run of the same flags and ranks would meet; it joins no process group, obtains no data and
writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from recsuite.config.config import Config
from recsuite.errors import LINES, UserError, harmless
from recsuite.runtime.host import allowed_cores, descriptor_limit, spare_cores
from recsuite.runtime.launch import read_launch
from recsuite.tools.examination.data import check_data, ring_need
from recsuite.tools.examination.findings import Finding, has_fault, page
from recsuite.tools.examination.machine import (
    check_cores,
    check_descriptors,
    check_device,
    check_memory,
    check_shared_memory,
    check_threads,
    check_versions_fit,
)
from recsuite.tools.examination.probe import check_worker
from recsuite.workers.failure import WorkerError


def diagnose(config: Config) -> int:
    """Print the page; returns the exit status, 1 if anything on it is a fault. Not collective."""
    findings = examine(config)
    print(harmless(page(findings), LINES))
    return 1 if has_fault(findings) else 0


def examine(config: Config) -> list[Finding]:
    """All lines of the page, for the ranks of this launch on this machine. Not collective."""
    launch, num_cores = read_launch(), allowed_cores()
    num_ranks = launch.local_world_size
    spare = spare_cores(num_ranks, num_cores)
    num_workers = spare if config.loader.num_workers == "auto" else int(config.loader.num_workers)
    omp = os.environ.get("OMP_NUM_THREADS", "")
    # The device comes before the worker: in a run, too, the rank has it by then. Functions, because a check
    # that breaks must do so where it costs its own line alone.
    checks: dict[str, Callable[[], list[Finding]]] = {
        "versions": lambda: [check_versions_fit()],
        "device": lambda: [check_device(launch)],
        "cores": lambda: [check_cores(config.loader.num_workers, num_ranks, num_cores)],
        "threads": lambda: [check_threads(omp, num_ranks, num_cores)],
        "memory": lambda: [check_memory(ring_need(config, num_ranks, num_workers))],
        "/dev/shm": lambda: [check_shared_memory(ring_need(config, num_ranks, num_workers))],
        "descriptors": lambda: [check_descriptors(descriptor_limit(), num_workers)],
        "worker": lambda: check_worker(config.loader),
        "data": lambda: check_data(config),
    }
    return [finding for name, check in checks.items() for finding in examined(name, check)]


def examined(name: str, check: Callable[[], list[Finding]]) -> list[Finding]:
    """What a check finds; one that breaks is a fault, as a run would break there too."""
    try:
        return check()
    except (UserError, WorkerError) as error:
        # Both say what is wrong and then what to do.
        text, _, remedy = str(error).rpartition("\nWhat to do: " if isinstance(error, WorkerError) else "; ")
        return [Finding(name, "fault", text or remedy, remedy if text else "")]
    # Of any kind: a broken package raises whatever it likes when it is imported, and the other lines must
    # still come out.
    except Exception as error:
        remedy = "if a package is broken or missing, delete .venv and run ./run.sh setup"
        return [Finding(name, "fault", f"{type(error).__name__}: {error}", remedy)]
