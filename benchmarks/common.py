"""Shared parts of the benchmarks: command line, reports of trainings, ratios, tables, figures, drawn events.

A data worker imports the script that started it, and so this module: it imports no torch at its top.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, TypeVar

import numpy as np

from recsuite.errors import counted
from recsuite.files import replace_file
from recsuite.runtime.host import allowed_cores, available_memory, installed_versions

T = TypeVar("T")
Result = dict[str, Any]

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "example" / "example.py"
# Has the packages that only benchmarks and tests require.
DEVELOPMENT = ROOT / "requirements-dev.txt"
CPUINFO = Path("/proc/cpuinfo")
BLOCK_EVENTS = 2**20
# The start of 2023.
FIRST_TIME = 1_672_531_200
DAY, YEAR = 86_400, 365 * 86_400
# Columns of drawn events with stars, and their schema.toml.
STAR_COLUMNS = ("user_id", "item_id", "stars", "time")
STAR_SCHEMA = """\
[user]
column = "user_id"
[item]
column = "item_id"
[label]
kind = "rating"
column = "stars"
lowest = 1.0
highest = 5.0
liked = 4.0
[timestamp]
column = "time"
format = "unix"
"""
# Of such events.
EVENTS_PER_USER, EVENTS_PER_ITEM = 100, 500


# --- command line and results ---


class Parser(argparse.ArgumentParser):
    """Parser of a benchmark that requires packages beyond those of `./run.sh setup`, and knows its size."""

    packages: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, check the packages, and set `short`: a sentence if the run is smaller than the default."""
        flags, others = super().parse_known_args(args, namespace)
        if not flags.figures:
            require(*self.packages)
        less = [
            name
            for name, value in vars(flags).items()
            if (name in SHORT_FORMS and value) or _amount(value) < _amount(self.get_default(name))
        ]
        flags.short = f"a short form, see {', '.join(f'--{name}' for name in less)}" if less else ""
        return flags, others


# Flags that choose a miniature.
SHORT_FORMS = ("quick", "small")


def _amount(value: Any) -> float:
    """A number, or the sum of several; 0 of anything else."""
    if isinstance(value, (list, tuple)):
        return sum(map(_amount, value))
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else 0


def require(*packages: str) -> None:
    """End with status 2 and one sentence if a package is not installed."""
    missing = [name for name in packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        advice = f"{sys.executable} -m pip install --no-deps -r {shlex.quote(str(DEVELOPMENT))}"
        script = Path(sys.argv[0]).name
        print(f"{script} requires {' and '.join(missing)}; install with: {advice}", file=sys.stderr)
        sys.exit(2)


def make_parser(doc: str | None, *packages: str) -> Parser:
    """Parser that shows the docstring of a benchmark, with the flags that `finish` reads.

    packages: that the benchmark requires beyond those of `./run.sh setup`, unless it only shows results.
    """
    needs = f"Requires {', '.join(packages)}, of requirements-dev.txt." if packages else None
    parser = Parser(description=doc, epilog=needs, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.packages = packages
    parser.add_argument("--report", type=Path, help="folder that gets the JSON and the figure, if any")
    parser.add_argument("--write", action="store_true", help="write into docs/ too, with the tables")
    parser.add_argument("--figures", type=Path, help="show the results in this JSON, and measure nothing")
    return parser


def comma_separated(kind: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Type of a flag with several values, separated by commas."""
    return lambda text: [kind(part) for part in text.split(",")]


def finish(
    name: str,
    flags: argparse.Namespace,
    measure: Callable[[argparse.Namespace], Result],
    judge: Callable[[Result], list[Result]] | None,
    render: Callable[[Result], str],
    page: Path | None = None,
    draw: Callable[[Result, Path], None] | None = None,
    mark: str | None = None,
    picture: str | None = None,
) -> None:
    """Measure, print the tables and the bars, and write the results.

    --report gets NAME.json, and the figure if there is one; --write puts both into docs, and the text between
    the marks of a page. A run that is smaller than the default judges no bar, and --write refuses it.

    Args:
        judge: returns the bars; None where a benchmark has none.
        page: of the tables.
        draw: writes the figure of a result to a path.
        mark: word of the marks, the name of the benchmark by default.
        picture: name of the figure, that of the benchmark by default.
    """
    # Before the measurement, which may take minutes: it would be lost.
    if draw is not None and (flags.report or flags.write):
        require("matplotlib")
    result = json.loads(flags.figures.read_text()) if flags.figures else {}
    short = result.get("short", "") if flags.figures else flags.short
    if flags.write and short:
        print(f"{name}.py: --write requires a run of the default size, got {short}", file=sys.stderr)
        sys.exit(2)
    result = result or measure(flags)
    if short:
        result["short"] = short
    if judge is not None:
        result["bars"] = [{**bar, "reached": None if short else bar["reached"]} for bar in judge(result)]
    text = render(result)
    print(text if judge is None else f"{text}\n\n{bar_lines(result['bars'])}")
    if short and judge is not None:
        print(f"not judged: {short}")
    for folder in (flags.report, DOCS if flags.write else None):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / f"{name}.json", f"{json.dumps(result, indent=1)}\n".encode())
            if draw is not None:
                draw(result, folder / f"{picture or name}.png")
    if flags.write and page:
        write_between(page, mark or name, text)


def _place(mark: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {mark}(?:: [^>]*)? -->\n)(.*)(\n<!-- end of {mark} -->)", re.DOTALL)


def text_between(page: Path, mark: str) -> str:
    """Text between `<!-- MARK -->` and `<!-- end of MARK -->` of a page.

    Raises:
        ValueError: when the page lacks these marks.
    """
    found = _place(mark).search(page.read_text())
    if not found:
        raise ValueError(f"{page.name} requires the marks <!-- {mark} --> and <!-- end of {mark} -->")
    return found[2]


def write_between(page: Path, mark: str, text: str) -> None:
    """Replace the text between the marks of a page; raises as `text_between`."""
    text_between(page, mark)
    # A function: a backslash in a replacement that is a string would be read as a group.
    page.write_text(_place(mark).sub(lambda match: f"{match[1]}{text}{match[3]}", page.read_text()))


def measured_before(file: Path, about: Result) -> list[Result]:
    """Runs in the results of an earlier call, which has the same machine, versions and flags.

    about: of this call, as its results begin.

    Raises:
        ValueError: when any of it differs, except the date.
    """
    found: Result = json.loads(file.read_text())
    odd = [name for name in about if name != "date" and found.get(name) != about[name]]
    if odd:
        raise ValueError(f"{file} differs in {', '.join(odd)}; measure it again")
    runs: list[Result] = found["runs"]
    return runs


# --- origin of results ---


def describe() -> Result:
    """Machine, versions of the stack, and time in UTC."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": installed_versions(),
    }


def describe_machine() -> str:
    """Cores that this process may use, their model, and memory."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    cores = counted(allowed_cores(), "core")
    return f"{cores} of {name}, {available_memory()[1] / 2**30:.0f} GiB, {platform.system()}"


def origin(about: Result, fbgemm: bool = False, without: Sequence[str] = ()) -> str:
    """Origin of results in a line.

    Args:
        about: as `describe` returns it.
        fbgemm: also name the wheel of fbgemm; it matters only where its kernels are measured.
        without: packages to leave out.
    """
    named = {name: version for name, version in about["versions"].items() if name not in ("fbgemm", *without)}
    versions = [f"{name} {version}" for name, version in named.items()]
    versions += [about["versions"]["fbgemm"]] if fbgemm else []
    return f"{about['machine']}; {', '.join(versions)}; {about['date'][:10]}"


# --- trainings ---


def torchrun(num_ranks: int) -> list[str]:
    """Start of a command that launches ranks on this machine."""
    # By its module: the command "torchrun" may belong to another Python.
    module = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}")
    return [sys.executable, *module]


def train(
    *flags: object, ranks: int = 0, script: Path = EXAMPLE, report: Path | None = None, **env: str
) -> Any:
    """Run a training of a script and return its report, the content of metrics.json.

    Args:
        flags: of the script.
        ranks: launched by torchrun; 0 for a single process without it.
        report: folder of the report, by default a temporary one.
        env: variables that are set for the training.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = report or Path(folder)
        launcher = torchrun(ranks) if ranks else [sys.executable]
        command = [*launcher, script, *flags, "--report_dir", report]
        # torchrun sets the same number of threads, with a warning; each rank then chooses its own.
        threads = {"OMP_NUM_THREADS": "1"} if ranks else {}
        environment = {**os.environ, **threads, **env}
        subprocess.run([*map(str, command)], check=True, env=environment, stdout=subprocess.DEVNULL)
        return json.loads((report / "metrics.json").read_text())


def training_seconds(report: dict[str, Any]) -> float:
    """Seconds of the epochs of a training, and of making its initial rows."""
    seconds: float = sum(epoch["seconds"] for epoch in report["epochs"])
    return seconds + report.get("initial_rows_seconds", 0.0)


# --- measuring ---


def in_turns(measures: Mapping[str, Callable[[], T]], rounds: int, warm_up: int = 0) -> dict[str, list[T]]:
    """Results of some measurements, round by round.

    Other programs slow a machine down for seconds at a time, and a measurement may meet leftovers of the one
    before it: all take turns, and every other round is in reverse order.

    Args:
        warm_up: rounds before the first one that counts.
    """
    found: dict[str, list[T]] = {name: [] for name in measures}
    for number in range(-warm_up, rounds):
        for name in list(measures)[:: 1 if number % 2 else -1]:
            value = measures[name]()
            if number >= 0:
                found[name].append(value)
    return found


def timed(work: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Seconds of a call, and its result."""
    start = time.perf_counter()
    result = work(*arguments)
    return time.perf_counter() - start, result


def peak_memory() -> int:
    """Peak resident bytes of this process, mapped files included, since the kernel began to count."""
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def resident_memory() -> int:
    """Resident bytes of this process, without freed memory that the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- showing ---


def bar(
    name: str, measured: float, limit: float, shown: str, shown_limit: str, at_most: bool = False
) -> Result:
    """A figure beside its bar, as the JSON of a benchmark holds it."""
    return {
        "name": name,
        "bar": f"{'at most' if at_most else 'at least'} {shown_limit}",
        "measured": shown,
        "reached": measured <= limit if at_most else measured >= limit,
    }


def bar_lines(bars: list[Result]) -> str:
    """One line for each bar; one that is not judged has no verdict."""
    verdicts = {True: "reached", False: "SHORT  ", None: "       "}
    return "\n".join(
        f"{verdicts[bar['reached']]}  {bar['name']}: {bar['measured']} ({bar['bar']})" for bar in bars
    )


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Ratios of two figures, round by round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Median of the ratios within a round."""
    # Not the ratio of medians: a slow moment of the machine slows both figures of a round.
    return median(ratios(values, others))


def shown_ratio(values: Sequence[float], others: Sequence[float]) -> str:
    """Median of the ratios within a round, and [least, most], which show how noisy the machine was."""
    found = ratios(values, others)
    return f"{median(found):.2f} [{min(found):.2f}, {max(found):.2f}]"


def mean(values: Iterable[float]) -> float:
    """Mean of some numbers."""
    return fmean(values)


def spread(values: Sequence[float]) -> str:
    """Mean, and the standard deviation of several values."""
    deviation = f" +- {stdev(values):.4f}" if len(values) > 1 else ""
    return f"{mean(values):.4f}{deviation}"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Markdown table; left: positions of columns that are aligned to the left."""
    rule = ["---" if place in left else "---:" for place in range(len(heads))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (heads, rule, *rows))


def processes(number: int) -> str:
    """Number of processes in words."""
    return f"{number} process{'es' if number > 1 else ''}"


def new_figure(width: float, height: float) -> Any:
    """Matplotlib figure of a size in inches, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


# --- events that benchmarks draw and write, block by block, so that any number takes little memory ---


def blocks_of(number: int) -> Iterator[range]:
    """Positions of events, block by block."""
    for first in range(0, number, BLOCK_EVENTS):
        yield range(first, min(first + BLOCK_EVENTS, number))


def skewed_ids(
    draw: np.random.Generator, num_users: int, num_items: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of users and of items, int64 [rows] each, some of which are popular."""
    # The square and the cube make them so.
    user = (num_users * draw.random(rows) ** 2).astype(np.int64)
    return user, (num_items * draw.random(rows) ** 3).astype(np.int64)


def read_plainly(path: Path) -> dict[str, float]:
    """Read events with stars by pyarrow, batch by batch, on all cores; return seconds, and rows."""
    from pyarrow import dataset

    start, cpu = time.perf_counter(), time.process_time()
    found = dataset.dataset(path, format="parquet", partitioning="hive")
    rows = sum(batch.num_rows for batch in found.to_batches(columns=list(STAR_COLUMNS)))
    return {"all": time.perf_counter() - start, "cpu": time.process_time() - cpu, "rows": rows}


def write_parquet(path: Path, blocks: Iterable[Mapping[str, Any]]) -> None:
    """Write a table whose columns come block by block."""
    import pyarrow
    from pyarrow import parquet

    with contextlib.ExitStack() as stack:
        writer = None
        for block in map(pyarrow.table, blocks):
            writer = writer or stack.enter_context(parquet.ParquetWriter(path, block.schema))
            writer.write_table(block)
