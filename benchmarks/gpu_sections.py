"""Sections of benchmarks/gpu.py: device, training steps, training, tables and disk.

    gpu_sections.py SETTINGS    JSON, see `SectionSettings`

A section is a process of its own: it shares neither memory of the device nor a crash with another one. It
prints each result at once as a line of JSON. Imports no torch at its top.

"steps" shows waits of training steps of the default model, with the loop, the loader and the profiler of the
example. "training", "ncf" and "dlrm" train beside plain PyTorch in one process. "lookup" measures the kernels
of FBGEMM with the optimizer of the example, and the sharded tables of the example, which also exchange ids
and look a row up once. "disk" writes and loads a full checkpoint of tables that fit disk, memory and time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
from checkpoint import MOST_AT_ONCE, PlainRead, forget
from common import in_turns
from teams import Variant, arguments, take_answers
from train_here import COMPILED, DEFAULT, MLP_DIMS, Model, columns_of, make_columns
from typing_extensions import override

from recsuite.checkpoint.format import VOCABULARY
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import SCHEMA_FILE
from recsuite.extras.doctor.doctor import DRIVER
from recsuite.runtime.host import allowed_memory, available_memory, die_with_parent
from recsuite.runtime.process import RuntimeContext, init_runtime

# --- the device, a clock, and answers ---

if TYPE_CHECKING:
    import torch

# Of a copy on the device: far more than its caches hold, and little of its memory.
BYTES_COPIED = 2**31
COPIES = 10

Emit = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class SectionSettings:
    """Settings of a section.

    part: its name; folder: for its files; seconds: until it is ended; small: true in the miniature.
    """

    part: str
    folder: str
    seconds: float
    small: bool

    def small_or(self, small: Any, full: Any) -> Any:
        """First value in the miniature, else the second."""
        return small if self.small else full


class Deadline:
    """Time left in a section."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds, below 0 after the end."""
        return self._end - time.monotonic()


def run_section(parts: dict[str, Callable[[SectionSettings, Emit], None]]) -> None:
    """Run the section of the command line and end this process.

    An exception is its last answer, with the status 1.
    """
    # The parent may be killed.
    die_with_parent()
    (given,) = arguments(sys.modules["__main__"].__doc__, "SETTINGS")
    answers = take_answers()

    def emit(found: dict[str, Any]) -> None:
        answers.write(f"{json.dumps(found)}\n")
        answers.flush()

    settings = SectionSettings(**json.loads(given))
    try:
        parts[settings.part](settings, emit)
    # Of any kind: the other sections go on.
    except BaseException as error:
        traceback.print_exc()
        emit({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    # Without the destructors of libraries, as the example ends.
    os._exit(0)


def choose_device() -> torch.device:
    """Return the GPU if there is one, made the current one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)


def describe_device(device: torch.device) -> dict[str, Any]:
    """Kind of the device and, of a GPU, name, memory, driver and libraries."""
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
    """Wait until the device has done its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release(device: torch.device) -> None:
    """Free unused memory of the device."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


class DeviceMoments:
    """Seconds between moments on the device, or of the host where that computes.

    On a GPU they are events among its work, so that nothing waits until they are asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark a moment."""
        import torch

        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Seconds from each moment to the next; waits for the device."""
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
        """Start the work."""
        for _ in range(self.copies):
            self.target.copy_(self.source)


def copy_rate(device: torch.device, num_bytes: int) -> float:
    """Bytes a second that a copy within the device reads and writes, median of several."""
    import torch

    # Random bits: zeros may be copied faster.
    source = torch.randn(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    moments = DeviceMoments(device)
    for _ in range(COPIES):
        moments.mark()
        target.copy_(source)
    moments.mark()
    return 2 * num_bytes / statistics.median(moments.seconds())


@contextlib.contextmanager
def rows_drawn_on_device() -> Iterator[None]:
    """Within this the initial rows of a model come from the generator of the device.

    The example draws them on the host, so that they are the same anywhere: minutes for tables of 25 GB.
    """
    with mock.patch("recsuite.sharding.plan.fill_tables", _fill_on_device):
        yield


def _fill_on_device(model: Any, seed: int, specs: Any = (), equal: Any = ()) -> None:
    from torch.distributed._shard.sharded_tensor import ShardedTensor

    from recsuite.sharding.plan import INIT_STD

    for value in model.state_dict().values():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                shard.tensor.detach().normal_(std=INIT_STD)


def processes_on_device() -> dict[str, list[int] | None]:
    """Processes on a GPU by nvidia-smi, None without it; and descendants of this process with one open."""
    command = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        listed: list[int] | None = sorted(int(line) for line in text.split() if line.isdigit())
    except (OSError, subprocess.SubprocessError):
        listed = None
    return {"nvidia-smi": listed, "open": sorted(filter(_has_gpu_open, below(os.getpid())))}


def below(pid: int) -> list[int]:
    """A process and its descendants."""
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


def machine(settings: SectionSettings, emit: Emit) -> None:
    """Section "machine": the device, and its rate of copies within itself."""
    device = choose_device()
    emit({"device": describe_device(device)})
    if device.type == "cuda" or settings.small:
        emit({"copy bytes a second": copy_rate(device, settings.small_or(2**24, BYTES_COPIED))})


# --- waiting in a training step of the default model ---

RECORDED_STEPS = 50
USERS, MOVIES = 6040, 3952
# Batch size and workers; 0 workers and a GPU make batches on the device, in captured steps.
WAYS = ((2048, 0), (32_768, 0))


def measure_steps(settings: SectionSettings, emit: Emit) -> None:
    """Section "steps": rates, waits and a profile, without and with workers."""
    context = init_runtime(Config())
    folder = Path(settings.folder) / "columns"
    folder.mkdir()
    make_columns(folder, USERS, MOVIES, settings.small_or(60_000, 2**22), DEFAULT)
    for batch, number in settings.small_or(((2048, 0),), WAYS):
        config = DEFAULT.config.replaced(num_workers=number, batch_size=batch)
        emit(measure_workers(folder, config, context, settings))
    if context.device.type == "cuda":
        emit({"fork is refused": fork_is_refused()})


def measure_workers(
    folder: Path, config: Config, context: RuntimeContext, settings: SectionSettings
) -> dict[str, Any]:
    """Rate and share of waiting with a number of workers, then the profile."""
    from example import make_loss, make_model
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.extras.reports.profiler import Profile
    from recsuite.training.progress import Progress
    from recsuite.training.state import Schedule, build_train_state
    from recsuite.training.steps import BatchFeed, Pass, learn

    columns = columns_of(folder, DEFAULT)
    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        is_made_there = context.device.type == "cuda" and config.loader.num_workers == 0
        state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
        inputs = inputs_on_device(state, columns, config, context) if is_made_there else BatchFeed(loader)
        step = captured_step(state, context, not is_made_there)
        schedule = Schedule(columns.num_train, EPOCHS)

        def epoch(number: int, on_step: Any = lambda step: None) -> float:
            """Seconds of an epoch, which ends when its losses are on the host."""
            began = time.perf_counter()
            part = Pass(state, inputs, Progress(epoch=number), schedule, config.training, context, on_step)
            learn(part, step)
            return time.perf_counter() - began

        epoch(0)
        seconds = epoch(1)
        found = {
            "batch": config.loader.batch_size,
            "workers": config.loader.num_workers,
            "samples a second": columns.num_train / seconds,
            "share waited": inputs.seconds_waited / seconds,
            "processes": {"ranks": context.world_size, **processes_on_device()},
        }
        profile = Profile(settings.small_or(10, RECORDED_STEPS), Path(settings.folder), context)
        with profile.epoch():
            epoch(2, profile.on_step)
    trace = json.loads(profile.path.read_text())
    return {**found, **describe_trace(trace["traceEvents"])}


def fork_is_refused() -> bool:
    """True if workers that would inherit a CUDA context are refused."""
    from recsuite.datasets.loader import check_start_method
    from recsuite.errors import UserError

    try:
        check_start_method("fork")
    except UserError:
        return True
    return False


# --- a trace of the profiler; times are microseconds of its clock ---

Event = dict[str, Any]
Span = tuple[float, float]

STEP = "ProfilerStep#"
# Calls in which the host waits for the device; some libraries call the driver directly.
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
)
# Reads of a number, of a tensor of the device or of the host.
READS = ("aten::item", "aten::_local_scalar_dense")
TO_DEVICE, FROM_DEVICE = "Memcpy HtoD", "Memcpy DtoH"
PAGEABLE = "Pageable"
# Categories that name a place in the program.
AROUND = ("cpu_op", "user_annotation")
NUM_COSTLIEST = 12


def describe_trace(events: Sequence[Event]) -> dict[str, Any]:
    """Describe the recorded steps; numbers are those of all steps together."""
    steps = steps_of(events)
    within = [event for event in events if _is_span(event) and _starts_in(event, steps)]
    waits = [event for event in within if event["name"] in WAITS]
    reads = [event for event in within if event["name"] in READS]
    copies = [event for event in events if _is_copy(event) and _starts_in(event, steps)]
    kernels = _spans(event for event in events if event.get("cat") == "kernel")
    to_device = [event for event in copies if event["name"].startswith(TO_DEVICE)]
    busy = merged([*kernels, *_spans(copies)])
    seconds = sum(end - begin for begin, end in steps)
    return {
        "steps": len(steps),
        "ms of a step": seconds / max(1, len(steps)) / 1e3,
        "waits": _counted(event["name"] for event in waits),
        "reads": _counted(event["name"] for event in reads),
        "places of waits": _counted(places_of(waits, events)),
        "reads that wait": sum(_holds_any(read, waits) for read in reads),
        "copies to the device": len(to_device),
        "MB to the device": sum(event.get("args", {}).get("bytes", 0) for event in to_device) / 1e6,
        "share hidden": share_within(_spans(to_device), kernels),
        "pageable copies": sum(PAGEABLE in event["name"] for event in copies),
        "copies from the device": sum(event["name"].startswith(FROM_DEVICE) for event in copies),
        "share that the device works": share_within(steps, busy),
        "costliest kernels, ms of a step": _costliest(events, steps),
    }


def steps_of(events: Iterable[Event]) -> list[Span]:
    """Spans of the recorded steps on the host, in the order of time."""
    return sorted(
        _span(event)
        for event in events
        if event.get("cat") == "user_annotation" and str(event.get("name", "")).startswith(STEP)
    )


def merged(spans: Iterable[Span]) -> list[Span]:
    """The same times as spans that do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def share_within(spans: Iterable[Span], others: Iterable[Span]) -> float | None:
    """Share of the time of spans that lies in others; None without any span."""
    spans, others = merged(spans), merged(others)
    whole = sum(end - begin for begin, end in spans)
    both, place = 0.0, 0
    for begin, end in spans:
        while place < len(others) and others[place][1] <= begin:
            place += 1
        beside = place
        while beside < len(others) and others[beside][0] < end:
            both += min(end, others[beside][1]) - max(begin, others[beside][0])
            beside += 1
    return both / whole if whole else None


def places_of(waits: Sequence[Event], events: Iterable[Event]) -> list[str]:
    """Place of each wait: the ranges and operations around it on its thread, the outermost first."""
    of_thread: dict[Any, list[Event]] = defaultdict(list)
    for event in (*(event for event in events if event.get("cat") in AROUND and _is_span(event)), *waits):
        of_thread[event.get("tid")].append(event)
    found = []
    for members in of_thread.values():
        around: list[Event] = []
        # Of two that begin together the longer one is around the other.
        for event in sorted(members, key=lambda event: (event["ts"], -event["dur"])):
            while around and _span(around[-1])[1] <= event["ts"]:
                around.pop()
            if event["name"] in WAITS:
                names = [each["name"] for each in around if not each["name"].startswith(STEP)]
                # Shortened: the name in the loop, and the last calls.
                found.append(" > ".join([*names[:1], *names[1:][-2:], event["name"]]))
            else:
                around.append(event)
    return found


def _holds_any(event: Event, others: Iterable[Event]) -> bool:
    begin, end = _span(event)
    same = (other for other in others if other.get("tid") == event.get("tid"))
    return any(begin <= first and last <= end for first, last in map(_span, same))


def _costliest(events: Iterable[Event], steps: Sequence[Span]) -> dict[str, float]:
    """Milliseconds a step of the costliest kernels and copies, by name."""
    spent: Counter[str] = Counter()
    for event in events:
        if (event.get("cat") == "kernel" or _is_copy(event)) and _starts_in(event, steps):
            spent[event["name"][:100]] += event["dur"]
    return {name: time / len(steps) / 1e3 for name, time in spent.most_common(NUM_COSTLIEST)}


def _is_span(event: Event) -> bool:
    return event.get("ph") == "X" and "ts" in event and "dur" in event


def _is_copy(event: Event) -> bool:
    return event.get("cat") == "gpu_memcpy"


def _starts_in(event: Event, steps: Sequence[Span]) -> bool:
    place = bisect_right(steps, (event["ts"], float("inf"))) - 1
    return place >= 0 and event["ts"] < steps[place][1]


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _spans(events: Iterable[Event]) -> list[Span]:
    return [_span(event) for event in events]


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(Counter(names).most_common(20))


# --- training beside plain PyTorch on the same device ---

HERE, EAGER, TF32, BF16 = "here", "here, eager", "here, TF32", "here, bf16"
DENSE, SPARSE, CAPTURED = "plain, dense Adam", "plain, sparse Adagrad", "plain, dense Adam, captured"
LIMIT = "limit"
# Steps after a change of variant that do not count: batches of the previous one are still in flight.
WARM_UP_STEPS = 5
ROUNDS = 3
# Of one measurement.
SECONDS = 0.15
# Of the schedule: more than a measurement makes.
EPOCHS = 1000
# Memory as multiples of the rows of a table: with optimizer states and temporaries of a step.
TIMES = {HERE: 1.1, LIMIT: 1.1, DENSE: 5.0, SPARSE: 2.2, CAPTURED: 5.0}
# Memory of batches, layers and libraries.
REST = 4 * 2**30
NCF_MLP = (256, 256, 128, 64)


@dataclass(frozen=True)
class TableCase:
    """Model with tables of one size; compiled: batches at which torch.compile is measured too."""

    users: int
    items: int
    model: Model
    batches: Sequence[int]
    compiled: Sequence[int] = ()

    @property
    def about(self) -> dict[str, Any]:
        """Description of the case."""
        return {"dim": self.model.dim, "users": self.users, "items": self.items}

    @property
    def table_bytes(self) -> int:
        """Bytes of the rows."""
        return 4 * self.model.dim * (self.users + self.items + 2)

    @property
    def config(self) -> Config:
        """Flags of the training here."""
        return self.model.config.replaced(local_batch_size=self.batches[0])

    def make(self, folder: Path) -> Columns:
        """Return the columns, written into a folder."""
        make_columns(folder, self.users, self.items, self.model.num_ratings, self.model)
        return columns_of(folder, self.model)

    def here(self, columns: Columns, context: RuntimeContext) -> HereAt:
        """Return the training here."""
        from example import make_loss, make_model

        return HereAt(columns, context, self.config, make_model, make_loss(columns, self.config))

    def plain(self, name: str, columns: Columns, device: torch.device, capturable: bool = False) -> Any:
        """Return the training of plain PyTorch with an optimizer."""
        from train_plain import Plain

        return Plain(name, columns, self.model, device, capturable)

    def limit(self, columns: Columns, device: torch.device) -> Any:
        """Return the training of FBGEMM's tables alone."""
        from train_limit import Limit

        return Limit(columns, self.model, device)


@dataclass(frozen=True)
class ClickCase(TableCase):
    """DLRM's shape, see `train_clicks`. sizes: values of each category, whose sum is `items`."""

    sizes: Sequence[int] = ()

    @property
    @override
    def config(self) -> Config:
        return self.model.config.replaced(local_batch_size=self.batches[0], task="response")

    @override
    def make(self, folder: Path) -> Columns:
        from train_clicks import make_columns

        return make_columns(folder, self.sizes, self.model.num_ratings)

    @override
    def here(self, columns: Columns, context: RuntimeContext) -> HereAt:
        from ctr import DLRM, ClickLoss

        return HereAt(columns, context, self.config, DLRM, ClickLoss())

    @override
    def plain(self, name: str, columns: Columns, device: torch.device, capturable: bool = False) -> Any:
        from train_clicks import PlainClicks
        from train_plain import Plain

        return Plain(name, columns, self.model, device, capturable, PlainClicks)

    @override
    def limit(self, columns: Columns, device: torch.device) -> Any:
        from train_clicks import ClickLimit

        return ClickLimit(columns, self.model, device)


def two_tables(dim: int, mlp_dims: tuple[int, ...], batch: int, num_ratings: int) -> Model:
    """Model of users and movies alone."""
    return Model("two_tables", "", dim, batch, batch, 0, num_ratings, (1.0, 1.0, 1.5), mlp_dims)


def cases(small: bool) -> list[TableCase]:
    """Tables of all sizes, the most important first."""
    if small:
        return [TableCase(2000, 1000, two_tables(16, (8,), 256, 20_000), (256, 512), compiled=(256,))]
    batches, ratings = (4096, 32_768, 262_144), 2**22
    model = two_tables(64, MLP_DIMS, batches[-1], ratings)
    default = dataclasses.replace(DEFAULT, num_ratings=2**21)
    return [
        TableCase(1_000_000, 100_000, model, batches, compiled=batches[2:]),
        TableCase(1_000_000, 100_000, default, (2048, 32_768)),
        TableCase(10_000_000, 1_000_000, model, batches),
        TableCase(100_000_000, 1_000_000, model, batches),
    ]


def ncf(small: bool) -> TableCase:
    """Shape of NCF with the sizes of ml-20m."""
    if small:
        return TableCase(2000, 1000, two_tables(16, (16, 8), 512, 20_000), (512,))
    batches = (65_536, 262_144, 1_048_576)
    return TableCase(138_493, 26_744, two_tables(64, NCF_MLP, batches[-1], 4_194_304), batches)


class HereAt:
    """Training of the example, with batches made on the device."""

    def __init__(
        self, columns: Columns, context: RuntimeContext, config: Config, maker: Any, loss: torch.nn.Module
    ) -> None:
        from recsuite.training.state import build_train_state

        self.columns, self.context, self.config = columns, context, config
        with rows_drawn_on_device():
            self.state = build_train_state(columns, config, context, maker, loss)
        self.kinds: dict[tuple[str, int], Iterator[None]] = {}

    def steps_of(self, kind: str, batch_size: int, number: int) -> float:
        """Train for some steps of a kind and return the last loss."""
        if (kind, batch_size) not in self.kinds:
            self.kinds[kind, batch_size] = self._endless(kind, batch_size)
        self.state.model.module.recommender.is_bf16 = kind == BF16
        with products_of(kind):
            for _ in range(number):
                next(self.kinds[kind, batch_size])
        assert self.state.loss is not None
        return float(self.state.loss)

    def _endless(self, kind: str, batch_size: int) -> Iterator[None]:
        """Make a step for each request, in passes as the example makes them."""
        from recsuite.training.progress import Progress
        from recsuite.training.state import Schedule
        from recsuite.training.steps import Pass

        config = self.config.replaced(local_batch_size=batch_size)
        inputs = inputs_on_device(self.state, self.columns, config, self.context)
        step = captured_step(self.state, self.context, kind == EAGER)
        schedule = Schedule(self.columns.num_train, EPOCHS)
        for epoch in itertools.count():
            progress = Progress(epoch=epoch % EPOCHS)
            for batch in Pass(self.state, inputs, progress, schedule, config.training, self.context):
                step(batch)
                # Kept for the loss of the pass, which takes it after the step.
                loss = self.state.loss
                yield
                self.state.loss = loss


def inputs_on_device(state: Any, columns: Columns, config: Config, context: RuntimeContext) -> Any:
    """Return the batches of a training, made on the device as in `recsuite.training.steps.place_batches`."""
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.sharding.torchrec_tables import OneRankTables
    from recsuite.training.device_batches import DeviceBatches
    from recsuite.training.steps import BatchFeed

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    inputs = BatchFeed(build_dataloader(dataset, EpochSampler(dataset), config))
    tables = [module for module in state.model.modules() if isinstance(module, OneRankTables)]
    order = [name for module in tables for name in module.feature_names]
    inputs.on_device = DeviceBatches(dataset, context.device, order)
    return inputs


def captured_step(state: Any, context: RuntimeContext, is_eager: bool = False) -> Any:
    """Return the step of a training, captured on a GPU."""
    from recsuite.training.captured import TrainingStep

    if is_eager or context.device.type != "cuda":
        return state.train_on
    return TrainingStep(state.train_on, state, context, None, is_required=True)


@contextlib.contextmanager
def products_of(kind: str) -> Iterator[None]:
    """Within this matrix products round as the name of a variant says."""
    import torch

    torch.set_float32_matmul_precision("high" if kind == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def clicks(small: bool) -> ClickCase:
    """Shape of DLRM with the sizes of Criteo's open log."""
    from train_clicks import SIZES

    sizes = [min(each, 2000) for each in SIZES] if small else SIZES
    dim, mlp_dims, batches, number = (
        (16, (16, 8), (256,), 20_000) if small else (64, (512, 256), (4096, 32_768), 2**20)
    )
    return ClickCase(0, sum(sizes), two_tables(dim, mlp_dims, batches[-1], number), batches, sizes=sizes)


def training(settings: SectionSettings, emit: Emit) -> None:
    """Section "training": all cases, until the time ends."""
    TrainingSection(settings, emit).run(cases(settings.small), (HERE, EAGER))


def ncf_shape(settings: SectionSettings, emit: Emit) -> None:
    """Section "ncf": one case, also with products in TF32 and bf16."""
    TrainingSection(settings, emit).run([ncf(settings.small)], (HERE, EAGER, TF32, BF16))


def dlrm_shape(settings: SectionSettings, emit: Emit) -> None:
    """Section "dlrm": one case, also with products in bf16."""
    TrainingSection(settings, emit).run([clicks(settings.small)], (HERE, EAGER, BF16))


class TrainingSection:
    """Measurements of training; a process joins the ranks once."""

    def __init__(self, settings: SectionSettings, emit: Emit) -> None:
        self.settings, self.emit = settings, emit
        self.deadline = Deadline(settings.seconds)
        self.context = init_runtime(Config())
        self.folder = Path(settings.folder) / "columns"

    def run(self, all_cases: Sequence[TableCase], kinds: Sequence[str]) -> None:
        """Emit samples a second of each variant, round by round, for each case and batch size.

        Variants are `kinds`, plain PyTorch, and FBGEMM's tables alone in a captured step, as the limit.
        """
        is_gpu = self.context.device.type == "cuda"
        names = (*kinds, DENSE, SPARSE, *((LIMIT, CAPTURED) if is_gpu else ()))
        for case in all_cases:
            # A case that is cut off leaves no result.
            if self.deadline.left < self.settings.small_or(1, 12):
                return
            self.folder.mkdir()
            self._measure_case(case, case.make(self.folder), names)
            shutil.rmtree(self.folder)

    def _measure_case(self, case: TableCase, columns: Columns, names: Sequence[str]) -> None:
        import torch

        groups = groups_of(names, case.table_bytes, _memory(self.context))
        missing = [name for name in names if not any(name in group for group in groups)]
        if missing:
            self.emit({**case.about, "skipped": f"no room for {'; '.join(missing)}"})
        for group in groups:
            try:
                self._measure_group(case, columns, group)
            except torch.OutOfMemoryError as error:
                self.emit({**case.about, "skipped": f"{', '.join(group)}: {str(error).splitlines()[0]}"})
            release(self.context.device)

    def _measure_group(self, case: TableCase, columns: Columns, group: Sequence[str]) -> None:
        """Measure variants that are in memory at once, and free them."""
        variants = VariantGroup(case, group, columns, self.context)
        for batch in case.batches:
            rates = _rates(variants.at(batch), batch, self.settings, self.context)
            self.emit({**case.about, "batch": batch, "samples a second": rates})


def groups_of(names: Sequence[str], table_bytes: int, memory: int) -> list[list[str]]:
    """Groups of variants that are in memory at once, to take turns.

    All of them if they fit, else those of each model; variants that do not fit alone are left out.
    """
    models: dict[str, list[str]] = {}
    for name in names:
        models.setdefault(HERE if name.startswith(HERE) else name, []).append(name)
    takes = {model: TIMES[model] * table_bytes + REST for model in models}
    fitting = {model: members for model, members in models.items() if takes[model] <= memory}
    if sum(takes[model] for model in fitting) <= memory:
        return [[name for members in fitting.values() for name in members]] if fitting else []
    return list(fitting.values())


def _memory(context: RuntimeContext) -> int:
    import torch

    if context.device.type == "cuda":
        return torch.cuda.mem_get_info(context.device)[0]
    return allowed_memory()


class VariantGroup:
    """VariantGroup of a group in memory."""

    def __init__(
        self, case: TableCase, group: Sequence[str], columns: Columns, context: RuntimeContext
    ) -> None:
        from train_plain import Captured, CompiledModel

        self.case, device = case, context.device
        self.here_names = [name for name in group if name.startswith(HERE)]
        self.here = case.here(columns, context) if self.here_names else None
        self.plain: dict[str, Any] = {
            name: case.plain(name.removeprefix("plain, "), columns, device)
            for name in group
            if name in (DENSE, SPARSE)
        }
        self.compiled = {
            f"{name}{COMPILED}": CompiledModel(each) for name, each in self.plain.items() if name == DENSE
        }
        if CAPTURED in group:
            plain = case.plain(DENSE.removeprefix("plain, "), columns, device, capturable=True)
            self.plain[CAPTURED] = Captured(plain, device)
        if LIMIT in group:
            self.plain[LIMIT] = case.limit(columns, device)

    def at(self, batch: int) -> dict[str, Callable[[int], float]]:
        """Functions that train for a number of steps with a batch size, by the name of the variant."""
        found: dict[str, Callable[[int], float]] = {}
        for name in self.here_names:
            assert self.here is not None
            found[name] = partial(self.here.steps_of, name, batch)
        trained = {**self.plain, **(self.compiled if batch in self.case.compiled else {})}
        return found | {name: partial(_steps, each, batch) for name, each in trained.items()}


def _steps(trained: Variant, batch: int, number: int) -> float:
    return trained.steps(number, batch)


def _rates(
    variants: dict[str, Callable[[int], float]],
    batch: int,
    settings: SectionSettings,
    context: RuntimeContext,
) -> dict[str, list[float]]:
    """Samples a second of each variant, in turns, without those that cannot be compiled here."""

    def seconds(name: str, number: int) -> float:
        synchronize(context.device)
        began = time.perf_counter()
        variants[name](number)
        synchronize(context.device)
        return time.perf_counter() - began

    aim = settings.small_or(0.02, SECONDS)
    numbers = {}
    for name in list(variants):
        # Twice: the first steps also compile and allocate.
        try:
            seconds(name, WARM_UP_STEPS)
        except Exception as error:
            # A machine may lack a compiler.
            if not name.endswith(COMPILED):
                raise
            print(f"{name} at {batch}: {type(error).__name__}: {error}", file=sys.stderr)
            del variants[name]
            continue
        numbers[name] = max(3, round(aim * WARM_UP_STEPS / seconds(name, WARM_UP_STEPS)))

    def rate(name: str) -> float:
        variants[name](WARM_UP_STEPS)
        return batch * numbers[name] / seconds(name, numbers[name])

    return in_turns({name: partial(rate, name) for name in variants}, settings.small_or(1, ROUNDS))


# --- lookup and update of tables alone, beside a copy on the same device ---

if TYPE_CHECKING:
    import torch

DIMS = (64, 128)
# Distinct ids of a lookup, so that the bytes to move are known. Several sets, more than caches hold.
IDS, SETS, LOOKUP_ROUNDS = 2**22, 4, 10
LOOKUP_ROWS = 10_000_000
WARM_UP_ROUNDS = 3


def measure_lookup(settings: SectionSettings, emit: Emit) -> None:
    """Section "lookup": bytes a second of lookups and updates, and of a copy, for each dimension."""
    context = init_runtime(Config())
    for dim in settings.small_or(DIMS[:1], DIMS):
        copied = copy_rate(context.device, settings.small_or(2**24, BYTES_COPIED))
        release(context.device)
        about = {"dim": dim, "copy bytes a second": copied}
        emit({**about, **measure_kernels(dim, context, settings)})
        release(context.device)
        emit({**about, **measure_sharded(dim, context, settings)})
        release(context.device)


def measure_kernels(dim: int, context: RuntimeContext, settings: SectionSettings) -> dict[str, Any]:
    """Kernels of FBGEMM with the settings that TorchRec gives them for the example."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    device = context.device
    rows, number = settings.small_or((20_000, 2**10), (LOOKUP_ROWS, IDS))
    is_cuda = device.type == "cuda"
    place = EmbeddingLocation.DEVICE if is_cuda else EmbeddingLocation.HOST
    table = SplitTableBatchedEmbeddingBagsCodegen(
        embedding_specs=[(rows, dim, place, ComputeDevice.CUDA if is_cuda else ComputeDevice.CPU)],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=0.01,
        pooling_mode=PoolingMode.NONE,
        bounds_check_mode=BoundsCheckMode.FATAL,
        device=device,
    )
    for weights in table.split_embedding_weights():
        weights.normal_(std=0.025)
    ids = [torch.randperm(rows, device=device)[:number].contiguous() for _ in range(SETS)]
    offsets = torch.arange(number + 1, device=device)
    gradient = torch.randn(number, dim, device=device)
    lookups, updates = [], []
    head_start = HeadStart(device)
    for round_number in range(-WARM_UP_ROUNDS, LOOKUP_ROUNDS):
        moments = DeviceMoments(device)
        head_start()
        moments.mark()
        found = table(ids[round_number % SETS], offsets)
        moments.mark()
        found.backward(gradient)
        moments.mark()
        # Read in each round: it waits for the device.
        lookup, update = moments.seconds()
        if round_number >= 0:
            lookups.append(lookup)
            updates.append(update)
    row = 4 * dim
    return {
        "of": "kernels",
        "rows": rows,
        "ids": number,
        "lookup": {
            # Each row read and written, and its id read.
            "bytes": number * (2 * row + 8),
            "seconds": statistics.median(lookups),
        },
        "update": {
            # Gradient and row read, row written, and optimizer state read and written.
            "bytes": number * (3 * row + 2 * 4 + 8),
            "seconds": statistics.median(updates),
        },
    }


def measure_sharded(dim: int, context: RuntimeContext, settings: SectionSettings) -> dict[str, Any]:
    """Sharded tables of the example, as its model calls them."""
    from example import make_model
    from recsuite.sharding.plan import build_model
    from recsuite.sharding.table_rules import RowWiseAdagrad

    rows, number = settings.small_or((20_000, 2**10), (LOOKUP_ROWS, IDS // 4))
    model = two_tables(dim, MLP_DIMS, number, SETS * number)
    config = model.config.replaced(local_batch_size=number)
    folder = Path(settings.folder) / f"columns-{dim}"
    folder.mkdir()
    make_columns(folder, rows, rows // 10, model.num_ratings, model)
    columns = columns_of(folder, model)
    with rows_drawn_on_device():
        built = build_model(columns, config, context, RowWiseAdagrad(config.optimizer.lr), make_model)
    # DistributedModelParallel wraps the model.
    (tables,) = built.module.recommender.embeddings
    batches = _features(columns, config, context)
    distinct = statistics.fmean(
        sum(part.unique().numel() for part in batch.values().split(number)) for batch in batches
    )
    whole = []
    head_start = HeadStart(context.device)
    for round_number in range(-WARM_UP_ROUNDS, LOOKUP_ROUNDS):
        moments = DeviceMoments(context.device)
        head_start()
        moments.mark()
        _look_up_and_update(tables, batches[round_number % SETS])
        moments.mark()
        if round_number >= 0:
            whole += moments.seconds()
        else:
            moments.seconds()
    row = 4 * dim
    return {
        "of": "the example's tables",
        "rows": sum(table.rows for table in columns.tables),
        "ids": 2 * number,
        "distinct": distinct,
        # A row read and written for each id; a gradient read for each, its row read and written once.
        "whole": {
            "bytes": 2 * number * (2 * row + 8) + distinct * (3 * row + 2 * 4),
            "seconds": statistics.median(whole),
        },
    }


def _features(columns: Any, config: Config, context: RuntimeContext) -> list[Any]:
    """Batches of ids, on the device."""
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.training.steps import BatchFeed

    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        found = [batch.features.to(context.device) for batch in BatchFeed(loader).batches("train", 0)]
    assert len(found) == SETS
    return found


def _look_up_and_update(tables: torch.nn.Module, features: Any) -> None:
    import torch

    found = [each.values() for each in tables(features).values()]
    # The rows as gradients: no arithmetic of its own.
    torch.autograd.backward(found, [each.detach() for each in found])


# --- writing and loading of large checkpoints, beside plain writing and reading of the disk ---

DISK_DIM = 64
DISK_ROWS, SMALL_DISK_ROWS = 100_000_000, 20_000
DISK_ITEMS = 1_000
# Of the file by which the rates of the disk are measured.
PLAIN_BYTES, SMALL_PLAIN_BYTES = 2**32, 2**22
# A checkpoint is written, and read twice: for its digests, and for its rows. Shares of time, disk and memory
# that this may take.
SHARE_OF_TIME, SHARE_OF_DISK, SHARE_OF_MEMORY = 0.6, 0.8, 0.4


def measure_disk(settings: SectionSettings, emit: Emit) -> None:
    """Section "disk": rates of the disk, then of a full checkpoint."""
    deadline = Deadline(settings.seconds)
    context = init_runtime(Config())
    folder = Path(settings.folder)
    plain = plain_rates(folder, settings.small_or(SMALL_PLAIN_BYTES, PLAIN_BYTES), context)
    emit({"of": "plain", **plain})
    rows = rows_that_fit(
        settings.small_or(SMALL_DISK_ROWS, DISK_ROWS),
        shutil.disk_usage(folder).free,
        available_memory()[0],
        deadline.left,
        plain["write bytes a second"],
        plain["read bytes a second"],
    )
    for found in checkpoint_rates(rows, folder, context):
        emit({"of": "checkpoint", "rows": rows, **found})


def rows_that_fit(
    rows: int, disk: int, memory: int, seconds: float, write_rate: float, read_rate: float
) -> int:
    """Rows, at most `rows`, that fit the free bytes of disk and memory, and seconds at some rates."""
    row = 4 * (DISK_DIM + 1)
    in_time = SHARE_OF_TIME * seconds / (1 / write_rate + 2 / read_rate)
    return max(
        1, min(rows, *(int(each / row) for each in (SHARE_OF_DISK * disk, SHARE_OF_MEMORY * memory, in_time)))
    )


def plain_rates(folder: Path, num_bytes: int, context: RuntimeContext) -> dict[str, float]:
    """Bytes a second to and from the disk, without the page cache, in one file."""
    # Random bytes: a disk may not store zeros.
    block = np.random.default_rng(0).bytes(min(num_bytes, MOST_AT_ONCE))
    path = folder / "plain"
    path.mkdir()
    began = time.perf_counter()
    with open(path / "file", "wb", buffering=0) as file:
        for _ in range(num_bytes // len(block)):
            assert file.write(block) == len(block)
        os.fsync(file.fileno())
    writing = time.perf_counter() - began
    forget(path, context)
    # Its memory is touched before, as that of tables is.
    read = PlainRead([path / "file"], context)
    began = time.perf_counter()
    read()
    reading = time.perf_counter() - began
    shutil.rmtree(path)
    return {
        "bytes": num_bytes,
        "write bytes a second": num_bytes / writing,
        "read bytes a second": num_bytes / reading,
    }


def checkpoint_rates(rows: int, folder: Path, context: RuntimeContext) -> Any:
    """Bytes a second of writing a full checkpoint, and of loading it from the disk."""
    from example import make_loss, make_model
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.checkpointer import Checkpointer
    from recsuite.checkpoint.restore import restore
    from recsuite.training.state import build_train_state

    model = two_tables(DISK_DIM, MLP_DIMS, 4096, 100_000)
    config = model.config.replaced(dump=True, save_dir=str(folder / "dumps"))
    made = folder / "columns"
    made.mkdir()
    make_columns(made, rows, DISK_ITEMS, model.num_ratings, model)
    for name in (VOCABULARY, SCHEMA_FILE):
        # A checkpoint copies them; there are no raw values.
        (made / name).write_text("{}")
    columns = columns_of(made, model)
    with rows_drawn_on_device():
        state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    Path(config.checkpoint.save_dir).mkdir()
    checkpointer.begin(state, checkpointer.start)
    synchronize(context.device)
    began = time.perf_counter()
    checkpointer.writer.write_full(checkpointer.start)
    checkpointer.close()
    seconds = time.perf_counter() - began
    chain = chain_at(Path(config.checkpoint.save_dir))
    num_bytes = sum(path.stat().st_size for path in chain.base.iterdir())
    yield {"what": "dump", "bytes": num_bytes, "seconds": seconds, "bytes a second": num_bytes / seconds}
    forget(chain.base, context)
    began = time.perf_counter()
    restore(chain, state, columns, context)
    synchronize(context.device)
    seconds = time.perf_counter() - began
    yield {"what": "load", "bytes": num_bytes, "seconds": seconds, "bytes a second": num_bytes / seconds}


if __name__ == "__main__":
    run_section(
        {
            "machine": machine,
            "steps": measure_steps,
            "training": training,
            "ncf": ncf_shape,
            "dlrm": dlrm_shape,
            "lookup": measure_lookup,
            "disk": measure_disk,
        }
    )
