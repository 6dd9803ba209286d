"""A worker started for nothing but its report on itself: what it sees, and how long its start took.

A worker imports this file, so it imports what workers may: no torch, no TorchRec, no pandas.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from recsuite.config.sections.data import LoaderConfig
from recsuite.tools.examination.findings import Finding, judge
from recsuite.workers.failure import WorkerSilentError

# What a start may take, in seconds; a machine on which it takes longer has a fault.
WORKER_DEADLINE = 30.0
SLOW_START_SECONDS = 5.0


@dataclass(frozen=True)
class Report:
    """What a worker says of itself. Times are those of `time.time`."""

    start_method: str
    has_torch: bool
    cuda_touched: bool
    sharing_strategy: str
    threads: dict[str, str | None]
    # When its imports were done; 0 in one that imported nothing, as it was forked.
    imported: float
    made: float


class Probe:
    """A data set whose only batch is a worker's report on itself."""

    batch_bytes = 64 * 1024

    def __init__(self, batches: type) -> None:
        # Pickled by name: the worker imports what it would import for the real data set.
        self.batches = batches
        self.imported = 0.0

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Unpickling needs the imports first, so this is the moment when they are done.
        self.__dict__.update(state)
        self.imported = time.time()

    def make(self, request: Any, empty: Callable[..., Any] | None = None) -> Sequence[Any]:
        """The report, as JSON."""
        import numpy as np

        from recsuite.workers.worker import THREAD_VARIABLES

        torch = sys.modules.get("torch")
        report = Report(
            # `get_start_method` would tell what this process starts others with.
            getattr(multiprocessing.current_process(), "_start_method", "unknown"),
            has_torch=torch is not None,
            cuda_touched=torch is not None and torch.cuda.is_initialized(),
            sharing_strategy=torch.multiprocessing.get_sharing_strategy() if torch else "",
            threads={name: os.environ.get(name) for name in THREAD_VARIABLES},
            imported=self.imported,
            made=time.time(),
        )
        return [np.frombuffer(json.dumps(report.__dict__, allow_nan=False).encode(), np.uint8)]


def time_interpreter() -> float:
    """Seconds until a Python that imports nothing runs a line: the best of three, as one may be cold."""
    # By the wall clock: of Python's other clocks the zero may differ between two processes.
    command = [sys.executable, "-c", "import time; print(time.time())"]
    tries = []
    for _ in range(3):
        begin = time.time()
        printed = subprocess.run(command, capture_output=True, check=True, timeout=WORKER_DEADLINE).stdout
        tries.append(float(printed) - begin)
    return min(tries)


def probe_worker(probe: type[Probe], config: LoaderConfig) -> Report:
    """What a worker reports that is started as a run would start it.

    Raises:
        UserError: when it may not be started.
        WorkerError: when it dies, or does not answer within `WORKER_DEADLINE`.
    """
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import check_start_method
    from recsuite.workers.pool import WorkerPool

    check_start_method(config.mp_context)
    pool = WorkerPool(
        probe(EventBatches),
        num_workers=1,
        prefetch_factor=1,
        timeout=WORKER_DEADLINE,
        mp_context=config.mp_context,
    )
    try:
        # The request stands in the sentence about a worker that fails, after "with".
        (report,) = next(pool.batches(["its report"]))
        return Report(**json.loads(bytes(report)))
    finally:
        pool.close()


def check_worker(config: LoaderConfig) -> list[Finding]:
    """Start a worker, ask it what it sees, and time its start."""
    interpreter = time_interpreter()
    begin = time.time()
    try:
        report = probe_worker(Probe, config)
    except WorkerSilentError as error:
        remedy = "find out what its start waits for: a disk, or a module that it imports"
        return [Finding("worker", "fault", str(error).partition("\nWhat to do: ")[0], remedy)]
    return [judge_worker(report, config.mp_context), judge_start(report, begin, interpreter)]


def judge_worker(report: Report, mp_context: str) -> Finding:
    """Whether a worker is what was asked for: started so, without torch, CUDA untouched, one thread."""
    seen = "no torch in it, so CUDA untouched and no sharing strategy"
    if report.has_torch:
        cuda = "touched" if report.cuda_touched else "untouched"
        seen = f"torch in it, CUDA {cuda}, sharing strategy {report.sharing_strategy}"
    threads = {name: value for name, value in report.threads.items() if value != "1"}
    text = f"start method {report.start_method}; {seen}; batches pass as a memfd descriptor; "
    return judge(
        "worker",
        text + (f"threads not 1 but {threads}" if threads else "1 thread"),
        (report.cuda_touched, "fault", "use CUDA in no module that a worker imports, nor before a fork"),
        (report.start_method != mp_context, "fault", f"--mp_context {mp_context} was asked for: report this"),
        (report.has_torch and mp_context == "fork", "warning", "a fork inherits torch: --mp_context spawn"),
        (report.has_torch, "fault", "import torch inside functions, in every module that a worker imports"),
        (threads, "warning", "let no sitecustomize and no module set variables of threads"),
    )


def judge_start(report: Report, begin: float, interpreter: float) -> Finding:
    """The time from asking for a worker to its first batch, and what it went to."""
    total = report.made - begin
    imports, unpickling = report.imported - begin - interpreter, report.made - report.imported
    text = (
        f"{_ms(total)} from the call to a worker's first batch: interpreter {_ms(interpreter)} (a bare one, "
        f"timed before), imports {_ms(imports)} (from there to its last module), unpickling "
        f"{_ms(unpickling)} (and all that follows)"
    )
    if not report.imported:
        text = (
            f"{_ms(total)} from the call to a worker's first batch: forked, it imports and unpickles nothing"
        )
    remedy = "put .venv on a local disk, or end what else runs; a second start reads from memory"
    return judge("start", text, (total > SLOW_START_SECONDS, "warning", remedy))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
