"""The doctor: one page about this machine, each line ok, warning or fault with its remedy.

It looks at what a run of the same flags and ranks would meet; it joins no process group, obtains no data and
writes nothing. What may be broken is imported where it is looked at: the page must come out all the same.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from recsuite.config.config import Config
from recsuite.errors import UserError, counted
from recsuite.runtime.host import (
    allowed_cores,
    available_memory,
    cgroup_memory,
    descriptor_limit,
    shared_memory,
    spare_cores,
)
from recsuite.runtime.process import Launch, choose_device, read_launch
from recsuite.runtime.versions import check_stack, stack_versions
from recsuite.tools.probe import Probe, Report, probe_worker, time_interpreter
from recsuite.workers.crash_log import NEARLY_FULL, WorkerError, WorkerSilentError, gib, mib

if TYPE_CHECKING:
    from recsuite.datasets.columns import Columns

State = Literal["ok", "warning", "fault"]

PAGE_WIDTH = 110
DRIVER = Path("/proc/driver/nvidia/version")
LITTLE_MEMORY = 2**30
# What columns take beside ratings.
LITTLE_DISK = 10 * 2**20
# Bytes of "1,1,4.0,123456789" and its end: no file has more ratings than lines of that.
SHORTEST_LINE = 18
# What Docker gives a container that asks for nothing.
SMALL_SHARED_MEMORY = 64 * 2**20
# A rank's own files, libraries and sockets.
DESCRIPTORS_OF_A_RANK = 64
FEW_DESCRIPTORS = 1024
SLOW_START_SECONDS = 5.0
# The most genres of a movie in any MovieLens set, for batches whose columns are not made yet.
MOST_GENRES = 10


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    name: str
    state: State
    text: str
    remedy: str = ""


@dataclass(frozen=True)
class Need:
    """The shared memory of all workers of this machine, at its fullest."""

    num_bytes: int
    words: str


def examine(config: Config) -> list[Finding]:
    """All lines of the page, for the ranks of this launch on this machine. Not collective."""
    launch, num_cores = read_launch(), allowed_cores()
    num_ranks = launch.local_world_size
    spare = spare_cores(num_ranks, num_cores)
    num_workers = spare if config.loader.num_workers == "auto" else int(config.loader.num_workers)
    omp = os.environ.get("OMP_NUM_THREADS", "")
    # The device comes before the worker: in a run, too, the rank has it by then.
    checks: dict[str, Callable[[], list[Finding]]] = {
        "trio": lambda: [check_trio()],
        "device": lambda: [check_device(launch)],
        "cores": lambda: [check_cores(config.loader.num_workers, num_ranks, num_cores)],
        "threads": lambda: [check_threads(omp, num_ranks, num_cores)],
        "memory": lambda: [check_memory(ring_need(config, num_ranks, num_workers))],
        "/dev/shm": lambda: [check_shared_memory(ring_need(config, num_ranks, num_workers))],
        "descriptors": lambda: [check_descriptors(descriptor_limit(), num_workers)],
        "worker": lambda: check_worker(config),
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
    except Exception as error:
        remedy = "if a package is broken or missing, delete .venv and run ./run.sh setup"
        return [Finding(name, "fault", f"{type(error).__name__}: {error}", remedy)]


def has_fault(findings: Sequence[Finding]) -> bool:
    """Whether a run would fail."""
    return any(finding.state == "fault" for finding in findings)


def page(findings: Sequence[Finding]) -> str:
    """The findings as text, states first; a remedy stays one line, as it may be a command to copy."""
    width = max(len(finding.name) for finding in findings)
    indent = " " * (len("warning") + width + 4)
    fold = textwrap.TextWrapper(PAGE_WIDTH - len(indent), break_long_words=False, break_on_hyphens=False)
    lines = []
    for finding in findings:
        texts = [part for line in finding.text.splitlines() for part in fold.wrap(line)]
        texts += [f"-> {finding.remedy}"] if finding.remedy else []
        lines.append(f"{finding.state:<7}  {finding.name:<{width}}  " + f"\n{indent}".join(texts))
    states = [finding.state for finding in findings]
    counts = [counted(states.count(state), state) for state in ("fault", "warning") if state in states]
    return "\n".join([*lines, " and ".join(counts) or "All is well."])


def check_trio() -> Finding:
    """The versions of the packages, and whether they belong together."""
    check_stack()
    versions = stack_versions()
    named = [text if text.startswith(name) else f"{name} {text}" for name, text in versions.items()]
    missing = "missing" in versions.values()
    text = f"{', '.join(named)}{'' if missing else '; they belong together'}"
    return _judge("trio", text, (missing, "fault", "./run.sh setup"))


def check_device(launch: Launch) -> Finding:
    """The device that a run would choose, and that it answers."""
    import torch

    device, ranks = choose_device(launch), counted(launch.local_world_size, "rank")
    found = re.search(r"\s(\d+(\.\d+)+)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    driver = found[1] if found else "unknown"
    if device.type == "cpu":
        unseen = found and os.environ.get("CUDA_VISIBLE_DEVICES") is None
        text = f"CPU for {ranks}, with gloo"
        text += f"; torch {torch.__version__} sees no GPU, but there is driver {driver}" if unseen else ""
        remedy = "VARIANT=cuda ./run.sh setup, or a newer driver; CUDA_VISIBLE_DEVICES= if the CPU is meant"
        return _judge("device", text, (unseen, "warning", remedy))
    free, total = torch.cuda.mem_get_info(device)
    text = (
        f"{torch.cuda.get_device_name(device)}, {gib(free)} of {gib(total)} free, the first of "
        f"{torch.cuda.device_count()} for {ranks}; driver {driver}, CUDA {torch.version.cuda}, nccl "
    )
    return Finding("device", "ok", text + ".".join(map(str, torch.cuda.nccl.version())))


def check_cores(num_workers: int | str, num_ranks: int, num_cores: int) -> Finding:
    """The cores allowed, against ranks and workers."""
    spare, auto = spare_cores(num_ranks, num_cores), num_workers == "auto"
    text = (
        f"{counted(num_cores, 'core')} allowed; {counted(num_ranks, 'rank')} with --num_workers {num_workers}"
    )
    text += f", at most {spare} for each" if auto else ""
    return _judge(
        "cores",
        text,
        (num_ranks > num_cores, "warning", f"start at most {counted(num_cores, 'rank')}, as NPROC says"),
        (
            not auto and num_ranks * (1 + int(num_workers)) > num_cores,
            "warning",
            f"give --num_workers {spare}, or auto",
        ),
    )


def check_threads(omp: str, num_ranks: int, num_cores: int) -> Finding:
    """The threads of a rank and of a worker, and what OMP_NUM_THREADS says."""
    own = max(1, num_cores // num_ranks)
    text = f"a rank sets {own}, its share of the cores, and a worker 1; OMP_NUM_THREADS is {omp or 'not set'}"
    # "4,2" names the threads of nested levels.
    first = omp.split(",")[0]
    crowd = first.isdigit() and int(first) * num_ranks > num_cores
    text += f": {num_ranks} x {first} threads of libraries that follow it are too many" if crowd else ""
    return _judge(
        "threads",
        text,
        (omp and not first.isdigit(), "warning", f"it is no number: unset it, or set it to {own}"),
        (crowd, "warning", f"unset OMP_NUM_THREADS, or set it to {own}"),
    )


def check_memory(need: Need) -> Finding:
    """The memory of the machine and of the cgroup, against what the workers' batches need."""
    available, total = available_memory()
    limited = cgroup_memory()
    usage, limit = limited or (0, total)
    cgroup = (
        f"the cgroup uses {gib(usage)} of its limit of {gib(limit)}" if limited else "no cgroup limits it"
    )
    text = f"{gib(available)} of {gib(total)} available, {cgroup}; the workers' batches take {need.words}"
    less = "give a smaller --batch_size, --prefetch_factor or --num_workers"
    little = need.num_bytes + LITTLE_MEMORY > min(available, limit - usage)
    return _judge(
        "memory",
        text,
        (need.num_bytes > min(available, limit), "fault", less),
        (little, "warning", f"{less}, or end other programs"),
    )


def check_shared_memory(need: Need) -> Finding:
    """The size of /dev/shm, beside the need: none, as batches lie in anonymous memory."""
    used, size = shared_memory()
    room = f"{_size(used)} of {_size(size)} in use" if size else "there is none"
    text = f"{room}; batches need 0 of it: they lie in anonymous memory, which takes {need.words}"
    larger = "docker run --shm-size=1g, or --ipc=host: nccl, or a torch DataLoader of your own, needs more"
    return _judge(
        "/dev/shm",
        text,
        (size <= SMALL_SHARED_MEMORY, "warning", larger),
        (used > NEARLY_FULL * size, "warning", "remove from /dev/shm what dead programs left there"),
    )


def check_descriptors(limit: int, num_workers: int) -> Finding:
    """`ulimit -n`, against what a rank and its workers need."""
    from recsuite.workers.pool import DESCRIPTORS_PER_WORKER

    need = DESCRIPTORS_OF_A_RANK + DESCRIPTORS_PER_WORKER * num_workers
    text = f"ulimit -n is {limit}; a rank with {counted(num_workers, 'worker')} needs about {need}"
    more = f"ulimit -n {max(4096, 2 * need)}"
    return _judge(
        "descriptors", text, (limit < need, "fault", more), (limit < FEW_DESCRIPTORS, "warning", more)
    )


def check_worker(config: Config) -> list[Finding]:
    """Start a worker, ask it what it sees, and time its start."""
    interpreter = time_interpreter()
    begin = time.time()
    try:
        report = probe_worker(Probe, config)
    except WorkerSilentError as error:
        remedy = "find out what its start waits for: a disk, or a module that it imports"
        return [Finding("worker", "fault", str(error).partition("\nWhat to do: ")[0], remedy)]
    return [judge_worker(report, config.loader.mp_context), judge_start(report, begin, interpreter)]


def judge_worker(report: Report, mp_context: str) -> Finding:
    """Whether a worker is what was asked for: started so, without torch, CUDA untouched, one thread."""
    seen = "no torch in it, so CUDA untouched and no sharing strategy"
    if report.has_torch:
        cuda = "touched" if report.cuda_touched else "untouched"
        seen = f"torch in it, CUDA {cuda}, sharing strategy {report.sharing_strategy}"
    threads = {name: value for name, value in report.threads.items() if value != "1"}
    text = f"start method {report.start_method}; {seen}; batches pass as a memfd descriptor; "
    return _judge(
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
    return _judge("start", text, (total > SLOW_START_SECONDS, "warning", remedy))


def check_data(config: Config) -> list[Finding]:
    """Where the data and their columns lie, and their size; unlike a run it obtains and makes none."""
    from recsuite.datasets.columns import find_columns
    from recsuite.datasets.movielens.formats import NUM_RATINGS, find_files, locate

    try:
        source, files = find_files(config)
        if files:
            # Refuses files of another set.
            locate(config)
        for path in files:
            path.open("rb").close()
        size = sum(path.stat().st_size for path in files)
        cache, columns = find_columns(config)
    except OSError as error:
        text = f"{error.filename or config.data.data_path} cannot be read ({error.strerror or error})"
        return [Finding("data", "fault", text, "give a --data_path that can be read, or change its mode")]
    how = "drawn" if config.data.is_synthetic else "downloaded"
    there = (
        f"{counted(len(files), 'file')}, {_size(size)}"
        if files
        else f"not there yet, {how} at the first start"
    )
    remedy = "the first start needs the network; or unpack the files there, or give --data_path"
    missing = not files and not config.data.is_synthetic
    data = _judge("data", f"{source}: {there}", (missing, "warning", remedy))
    num_ratings = (
        config.data.synthetic_ratings
        if config.data.is_synthetic
        else NUM_RATINGS.get(config.data.dataset, size // SHORTEST_LINE)
    )
    return [data, check_cache(cache.absolute(), columns, num_ratings)]


def check_cache(cache: Path, columns: Columns | None, num_ratings: int) -> Finding:
    """Where the columns lie and their size, or whether there is room for them."""
    from recsuite.datasets.columns import BYTES_OF_A_RATING

    if columns is not None:
        size = sum(path.stat().st_size for path in Path(columns.folder).iterdir())
        return Finding("cache", "ok", f"{columns.folder}: {_size(size)}")
    parent = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    need = LITTLE_DISK + BYTES_OF_A_RATING * num_ratings
    text = f"{cache}: no columns of these data yet, made at the first start; {_size(free)} free"
    text += f" for up to {_size(need)}"
    return _judge(
        "cache",
        text,
        (not os.access(parent, os.W_OK), "fault", f"{parent} cannot be written: give another --cache_dir"),
        (free < need, "warning", "make room, or give --cache_dir a folder on another disk"),
    )


def ring_need(config: Config, num_ranks: int, num_workers: int) -> Need:
    """What the workers' batches take, from the columns if they are made, else from what MovieLens has."""
    from recsuite.datasets.columns import Columns, find_columns
    from recsuite.datasets.dataloader import RatingBatches
    from recsuite.datasets.features import FEATURES, HISTORY, Table
    from recsuite.workers.pool import SLOTS_BEYOND_PREFETCH

    tables = tuple(Table(feature, 1, MOST_GENRES if feature.multi else 1) for feature in FEATURES)
    tables = (*tables, Table(HISTORY, 1, config.data.history))
    columns = Columns("", "", 0, 0, 0, 0, 0, 0, 0.0, config.data.history, tables, {}, ())
    # Where the data cannot be read, their own line says so.
    with contextlib.suppress(OSError, UserError):
        columns = find_columns(config)[1] or columns
    slot = RatingBatches(columns, config, 0, num_ranks).batch_bytes
    num_slots = config.loader.prefetch_factor + SLOTS_BEYOND_PREFETCH
    num_bytes = num_ranks * num_workers * num_slots * slot
    of = f"{num_slots} slots of {_size(slot)} for each of {num_ranks} x {counted(num_workers, 'worker')}"
    return Need(num_bytes, f"up to {_size(num_bytes)} ({of})" if num_workers else "nothing without workers")


def _judge(name: str, text: str, *ailments: tuple[object, State, str]) -> Finding:
    """The first ailment (whether it is there, how bad it is, its remedy) that is there, or ok."""
    for there, state, remedy in ailments:
        if there:
            return Finding(name, state, text, remedy)
    return Finding(name, "ok", text)


def _size(num_bytes: int) -> str:
    return gib(num_bytes) if num_bytes >= 2**30 else mib(num_bytes)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
