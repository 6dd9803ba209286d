"""Samples a second in training, beside plain PyTorch on the same device: two sections of benchmarks/gpu.py.

What trains here is benchmarks/train_here.py, what is plain benchmarks/train_plain.py, in one process.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from gpu_device import Deadline, Emit, Settings, release, rows_drawn_on_device, run_section, synchronize
from train_here import Here
from train_models import Model, columns_of, make_columns
from train_team import COMPILED, MLP_DIMS, Trained

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.runtime.host import allowed_memory
from recsuite.runtime.process import RuntimeContext, init_runtime

HERE, READY, TF32 = "here", "here, batches ready", "here, batches ready, TF32"
DENSE, SPARSE = "plain, dense Adam", "plain, sparse Adagrad"
# Steps between two variants that are in no figure: some of the batches of the one before are on their way.
WARM_UP_STEPS = 5
ROUNDS = 3
# Of one measurement.
SECONDS = 0.15
# Batches that wait in page-locked memory.
NUM_READY = 8
# How often a table is in memory: its rows with what an optimizer keeps of them and what it makes in a step.
TIMES = {HERE: 1.1, DENSE: 5.0, SPARSE: 2.2}
# What batches, layers and libraries take beside the tables.
REST = 4 * 2**30
NCF_MLP = (256, 256, 128, 64)


@dataclass(frozen=True)
class Case:
    """A model with tables of one size; compiled: the batch at which torch.compile is measured too, 0 for
    none.
    """

    users: int
    items: int
    model: Model
    batches: Sequence[int]
    compiled: int = 0

    @property
    def about(self) -> dict[str, Any]:
        """What it is, beside its figures."""
        return {"dim": self.model.dim, "users": self.users, "items": self.items}

    @property
    def table_bytes(self) -> int:
        """Of the rows alone."""
        return 4 * self.model.dim * (self.users + self.items + 2)


def two_tables(dim: int, mlp_dims: tuple[int, ...], batch: int, num_ratings: int) -> Model:
    """User and movie alone."""
    return Model("two_tables", "", dim, batch, batch, 0, num_ratings, (1.0, 1.0, 1.5), mlp_dims)


def cases(small: bool) -> list[Case]:
    """Tables of all sizes, what is wanted most first."""
    if small:
        return [Case(2000, 1000, two_tables(16, (8,), 256, 20_000), (256, 512), compiled=256)]
    sizes = {"1m": (1_000_000, 100_000), "10m": (10_000_000, 1_000_000), "ml-1m": (6040, 3952)}
    batches, ratings = (4096, 32_768, 262_144), 2**21
    models = {dim: two_tables(dim, MLP_DIMS, batches[-1], ratings) for dim in (64, 128)}
    found = [Case(*size, models[64], batches, compiled=32_768) for size in sizes.values()]
    largest = (100_000_000, 1_000_000)
    found.append(Case(*largest, models[64], batches[1:]))
    found += [Case(*size, models[128], batches) for size in sizes.values()]
    return [*found, Case(*largest, models[128], batches[-1:])]


def ncf(small: bool) -> Case:
    """NCF's shape on ml-20m's sizes."""
    if small:
        return Case(2000, 1000, two_tables(16, (16, 8), 512, 20_000), (512,))
    batches = (65_536, 262_144, 1_048_576)
    return Case(138_493, 26_744, two_tables(64, NCF_MLP, batches[-1], 4_194_304), batches)


class HereAt(Here):
    """The example's training, also on batches that are made already; each kind has batches of its own."""

    def __init__(self, columns: Columns, context: RuntimeContext, config: Config) -> None:
        with rows_drawn_on_device():
            super().__init__(columns, context, config)
        self.kinds: dict[tuple[str, int], Iterator[Any]] = {}

    def steps_of(self, kind: str, batch_size: int, number: int) -> float:
        """Train for some steps on batches of a kind; the last loss."""
        key = (READY if kind.startswith(READY) else kind, batch_size)
        if key not in self.kinds:
            batches = self._batches(batch_size)
            if key[0] == READY:
                batches = itertools.cycle(list(itertools.islice(batches, NUM_READY)))
            self.kinds[key] = batches
        self.feeds[batch_size] = self.kinds[key]
        with products_of(kind):
            return self.steps(number, batch_size)


@contextlib.contextmanager
def products_of(kind: str) -> Iterator[None]:
    """Within this, products of matrices round as a variant's name says."""
    import torch

    torch.set_float32_matmul_precision("high" if kind == TF32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def training(settings: Settings, emit: Emit) -> None:
    """All cases, as far as the time goes."""
    _measure(cases(settings.small), (HERE, READY), Run(settings, emit))


def ncf_shape(settings: Settings, emit: Emit) -> None:
    """The one case, also with products in TF32, and with workers that make its batches."""
    run = Run(settings, emit)
    _measure([ncf(settings.small)], (HERE, READY, TF32), run)
    _measure([ncf(settings.small)], (HERE,), run, num_workers=settings.small_or(1, 4))


class Run:
    """What all measurements of a section have in common; a process joins the ranks once."""

    def __init__(self, settings: Settings, emit: Emit) -> None:
        self.settings, self.emit = settings, emit
        self.deadline = Deadline(settings.seconds)
        self.context = init_runtime(Config())


def _measure(all_cases: Sequence[Case], kinds: Sequence[str], run: Run, num_workers: int = 0) -> None:
    settings, context, emit = run.settings, run.context, run.emit
    for case in all_cases:
        # What is begun and cut off leaves nothing.
        if run.deadline.left < settings.small_or(1, 12):
            emit({**case.about, "skipped": "no time was left for it"})
            continue
        folder = Path(settings.folder) / "columns"
        folder.mkdir()
        make_columns(folder, case.users, case.items, case.model.num_ratings, case.model)
        plain = () if num_workers else (DENSE, SPARSE)
        for found in measure_case(case, folder, (*kinds, *plain), context, settings, num_workers):
            emit(found)
        shutil.rmtree(folder)


def measure_case(
    case: Case,
    folder: Path,
    names: Sequence[str],
    context: RuntimeContext,
    settings: Settings,
    num_workers: int,
) -> Iterator[dict[str, Any]]:
    """Samples a second of each variant, round by round, for each batch."""
    import torch

    memory = _memory(context)
    groups = groups_of(names, case.table_bytes, memory)
    missing = [name for name in names if not any(name in group for group in groups)]
    if missing:
        yield {**case.about, "skipped": f"no room for {', '.join(missing)}"}
    for group in groups:
        try:
            yield from _measure_group(case, group, folder, context, settings, num_workers)
        except torch.OutOfMemoryError as error:
            yield {**case.about, "skipped": f"{', '.join(group)}: {str(error).splitlines()[0]}"}
        release(context.device)


def _measure_group(
    case: Case,
    group: Sequence[str],
    folder: Path,
    context: RuntimeContext,
    settings: Settings,
    num_workers: int,
) -> Iterator[dict[str, Any]]:
    """Of variants that are in memory at once; nothing of them is left when this ends."""
    columns = columns_of(folder, case.model)
    config = case.model.config.replaced(batch_size=case.batches[0], num_workers=num_workers)
    variants = Variants(case, group, columns, context, config)
    for batch in case.batches:
        rates = _rates(variants.at(batch), batch, settings, context)
        if num_workers:
            # A rate of its own, not another measurement of the same.
            rates = {f"{name}, {num_workers} workers": values for name, values in rates.items()}
        yield {**case.about, "batch": batch, "samples a second": rates}


def groups_of(names: Sequence[str], table_bytes: int, memory: int) -> list[list[str]]:
    """The variants that are in memory at once, to take turns: all of them, or those of each model by itself
    where that is too much; without those for which there is no room at all.
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


class Variants:
    """Those of a group, made."""

    def __init__(
        self, case: Case, group: Sequence[str], columns: Columns, context: RuntimeContext, config: Config
    ) -> None:
        from train_plain import Compiled, Plain

        self.case = case
        self.here_names = [name for name in group if name.startswith(HERE)]
        self.here = HereAt(columns, context, config) if self.here_names else None
        self.plain: dict[str, Any] = {
            name: Plain(name.removeprefix("plain, "), columns, case.model, context.device)
            for name in group
            if not name.startswith(HERE)
        }
        self.compiled = {f"{name}{COMPILED}": Compiled(each) for name, each in self.plain.items()}

    def at(self, batch: int) -> dict[str, Callable[[int], float]]:
        """What trains for a number of steps on batches of a size, by its name."""
        found: dict[str, Callable[[int], float]] = {}
        for name in self.here_names:
            assert self.here is not None
            found[name] = partial(self.here.steps_of, name, batch)
        trained = {**self.plain, **(self.compiled if batch == self.case.compiled else {})}
        return found | {name: partial(_steps, each, batch) for name, each in trained.items()}


def _steps(trained: Trained, batch: int, number: int) -> float:
    return trained.steps(number, batch)


def _rates(
    variants: dict[str, Callable[[int], float]], batch: int, settings: Settings, context: RuntimeContext
) -> dict[str, list[float]]:
    """Samples a second of each, in turns; without those that cannot be compiled here."""

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
            # A compiler, which a machine may lack, is needed for these alone.
            if not name.endswith(COMPILED):
                raise
            print(f"{name} at {batch}: {type(error).__name__}: {error}", file=sys.stderr)
            del variants[name]
            continue
        numbers[name] = max(3, round(aim * WARM_UP_STEPS / seconds(name, WARM_UP_STEPS)))
    found: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(settings.small_or(1, ROUNDS)):
        for name in list(variants)[:: 1 if number % 2 else -1]:
            variants[name](WARM_UP_STEPS)
            found[name].append(batch * numbers[name] / seconds(name, numbers[name]))
    return found


if __name__ == "__main__":
    run_section({"training": training, "ncf": ncf_shape})
