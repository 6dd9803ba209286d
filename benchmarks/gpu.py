"""Measure one GPU, in one command of less than nine minutes.

    python benchmarks/gpu.py --report FOLDER            FOLDER/gpu.json grows with each result
    python benchmarks/gpu.py --only steps lookup        some sections, also ranks, lookup and disk
    python benchmarks/gpu.py --small                    the miniature, which runs on a CPU too
    python benchmarks/gpu.py --figures gpu.json --write results of another machine, into the documents

A section is a process of its own with a time of its own: one that fails leaves its error beside its results,
and one that is ended early leaves its results. Needs no network; uses up to 16 GB of memory and 64 GB on the
disk of --folder.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any

from common import DOCS, Result, bar, describe, finish, make_parser, new_figure, origin, ratio, table
from gpu_sections import EAGER, HERE, LIMIT, SectionSettings

from recsuite.files import replace_file

PAGE = DOCS / "performance.md"
# A command with a limit of ten minutes has to end by itself.
SECONDS = 520.0
# Seconds for a section to end by itself.
MARGIN = 2.0
# Script and seconds of each section, the most important first.
SECTIONS = {
    "machine": ("gpu_sections.py", 30),
    "tests": ("gpu_commands.py", 150),
    "steps": ("gpu_sections.py", 60),
    "training": ("gpu_sections.py", 140),
    "ncf": ("gpu_sections.py", 40),
    "dlrm": ("gpu_sections.py", 40),
    "whole": ("gpu_commands.py", 60),
    "ranks": ("gpu_commands.py", 480),
    "lookup": ("gpu_sections.py", 40),
    "disk": ("gpu_sections.py", 90),
}
# Measured only when they are named: together with the others they take longer than a run may.
NAMED_ONLY = ("ranks", "lookup", "disk")
# Always measured: it names the device.
FIRST = "machine"
# Least time of a section: the import of TorchRec alone takes as long.
FEWEST_SECONDS = 10.0
# Last characters of the errors of a failed section that are kept.
LAST_CHARACTERS = 2_000
# Titles of the sections with tests.
TESTS = {"tests": "tests of one rank on a GPU", "ranks": "tests of several ranks on a GPU"}
# Bars, see `judge`.
MOST_WAITED, LEAST_HIDDEN = 0.02, 0.9
# Of a whole run to the training alone, and of the evaluation of an event to its training.
MOST_OF_TRAINING, MOST_OF_EVALUATION = 1.5, 1.0
# By the numbers in a row and the rows, and then by the batch.
LEAST_OF_PLAIN = {
    (64, 1_100_000): {4096: 3.0, 32_768: 2.0, 262_144: 0.75},
    (64, 11_000_000): {4096: 5.0, 32_768: 4.0, 262_144: 1.0},
    (32, 1_100_000): {2048: 2.0, 32_768: 1.4},
}
LEAST_OF_LIMIT, LEAST_BUSY, LARGE_BATCH = 0.7, 0.7, 32_768
LEAST_NCF, LEAST_OF_COPY, LEAST_OF_DISK = 40e6, 0.6, 0.7


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    names = [name for name in SECTIONS if name != FIRST]
    default = [name for name in names if name not in NAMED_ONLY]
    parser.add_argument("--only", nargs="+", choices=names, default=default, help="these sections alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit (default: 520)")
    parser.add_argument("--small", action="store_true", help="the miniature: its results mean nothing")
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: the temporary one)")
    flags = parser.parse_args()
    if flags.write and flags.small:
        parser.error("--write requires a run without --small, whose results mean nothing")
    if flags.figures:
        shown = json.loads(flags.figures.read_text())
        if flags.write and (shown["small"] or kind_of(shown) != "cuda"):
            sys.exit("gpu.py: --write requires results of a GPU without --small")
    else:
        flags.report = flags.report or Path(".")
    finish("gpu", flags, measure, judge, render, PAGE, draw)


def measure(flags: argparse.Namespace) -> Result:
    """All results of a run; each one is in the JSON of --report at once."""
    end = time.monotonic() + flags.seconds
    result: Result = {**describe(), "small": flags.small, "sections": {}, "bars": []}
    flags.report.mkdir(parents=True, exist_ok=True)
    keep = partial(_keep, result, flags.report / "gpu.json")
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=flags.folder) as folder:
        sections = [_section(name, Path(folder), flags.small) for name in (FIRST, *flags.only)]
        run_sections(sections[:1], flags.seconds, keep)
        if kind_of(result) == "cpu" and not flags.small:
            sys.exit("gpu.py: torch sees no GPU; give --small for the miniature, which runs on a CPU too")
        run_sections(sections[1:], end - time.monotonic(), keep)
    return result


def _section(name: str, folder: Path, small: bool) -> GpuSection:
    script, seconds = SECTIONS[name]

    def command(left: float) -> Sequence[str]:
        mine = folder / name
        mine.mkdir()
        settings = SectionSettings(name, str(mine), left - MARGIN, small)
        path = Path(__file__).parent / script
        return [sys.executable, str(path), json.dumps(dataclasses.asdict(settings))]

    return GpuSection(name, command, seconds)


def _keep(result: dict[str, Any], path: Path, name: str, found: dict[str, Any]) -> None:
    """Write all results so far, in one rename: a run that is killed later leaves them."""
    result["sections"][name] = found
    result["bars"] = judge(result)
    replace_file(path, f"{json.dumps(result, indent=1)}\n".encode())
    if "seconds" in found or not found["results"]:
        print(f"{name}: {found.get('error', 'all of it')}, {found.get('seconds', 0)} s", flush=True)
    else:
        print(f"{name}: {json.dumps(found['results'][-1])}", flush=True)


def kind_of(result: dict[str, Any]) -> str:
    """Kind of the measured device; "unknown" where that failed."""
    machine = result["sections"].get(FIRST, {"results": []})
    return str(next((each["device"]["kind"] for each in machine["results"] if "device" in each), "unknown"))


# --- sections ---


@dataclass(frozen=True)
class GpuSection:
    """Part of a measurement.

    command: of a process that prints results in lines of JSON, from the seconds left; seconds: time limit.
    """

    name: str
    command: Callable[[float], Sequence[str]]
    seconds: float


def run_sections(
    sections: Sequence[GpuSection],
    seconds: float,
    keep: Callable[[str, dict[str, Any]], None],
    fewest_seconds: float = FEWEST_SECONDS,
) -> None:
    """Run sections one after the other; one that fails, crashes or takes too long leaves its error.

    Args:
        seconds: for all of them.
        keep: gets the name of a section and its results, after each one and, with its seconds, at its end.
        fewest_seconds: a section with less time is skipped.
    """
    end = time.monotonic() + seconds
    for section in sections:
        left = min(section.seconds, end - time.monotonic())
        if left < min(fewest_seconds, section.seconds):
            keep(section.name, {"results": [], "error": f"not begun: the {seconds:.0f} s were used up"})
            continue
        _run(section, left, keep)


def _run(section: GpuSection, seconds: float, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Run a section."""
    found: dict[str, Any] = {"results": []}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            section.command(seconds),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # All that it starts ends with it.
            start_new_session=True,
        )
        try:
            for line in _lines(process, began + seconds):
                result = _parsed(line)
                if "error" in result:
                    found["error"] = result["error"]
                else:
                    found["results"].append(result)
                keep(section.name, found)
            status = process.poll() if process.poll() is not None else _waited(process)
            if status is None:
                found["error"] = f"ended after {seconds:.0f} s, its time"
            elif status != 0:
                found.setdefault("error", f"status {status}")
                found["output"] = _last(errors)
        finally:
            _kill(process)
    found["seconds"] = round(time.monotonic() - began, 1)
    keep(section.name, found)


def _lines(process: subprocess.Popen[str], end: float) -> Any:
    """Lines of a process, until it ends or its time is over."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    # In a thread, because a read has no time limit.
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while (line := lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            yield line


def _parsed(line: str) -> dict[str, Any]:
    """Result in a line; a line of another kind is kept as text."""
    try:
        result = json.loads(line)
    except ValueError:
        result = None
    return result if isinstance(result, dict) else {"printed": line.rstrip("\n")}


def _waited(process: subprocess.Popen[str]) -> int | None:
    """Status of a process that closed its output; None if it continues."""
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[str]) -> None:
    # Its session may outlive it.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-LAST_CHARACTERS:]


# --- bars and tables; computed from the JSON alone, which may lack any section ---


def judge(result: Result) -> list[dict[str, Any]]:
    """Each bar beside its figure, if that was measured."""
    return [
        each for find in (_tests, _steps, _training, _ncf, _whole, _lookup, _disk) for each in find(result)
    ]


def results(result: Result, name: str) -> list[Result]:
    """Results of a section."""
    found: list[Result] = result["sections"].get(name, {}).get("results", [])
    return found


def none(name: str, number: int) -> Result:
    """Bar of a number that should be 0."""
    return bar(name, number, 0, str(number), "0", at_most=True)


def _tests(result: Result) -> Iterator[Result]:
    for section, title in TESTS.items():
        found = results(result, section)
        outcomes = [each["outcome"] for each in found if "test" in each]
        # A CPU skips them all.
        if found and kind_of(result) != "cpu":
            failed = sum(outcome in ("failed", "error") for outcome in outcomes)
            # Not of a run that was cut off, or that skipped all of them.
            is_whole = "passed" in outcomes and any(each.get("status") == 0 for each in found)
            yield none(f"{title} that failed", failed or int(not is_whole))


def _steps(result: Result) -> Iterator[Result]:
    found = results(result, "steps")
    profiles = [each for each in found if "workers" in each]
    for each in profiles:
        name = f"the default model, batches of {each['batch']:,}, {each['workers']} workers"
        yield none(f"{name}, waits for the device in {each['steps']} steps", sum(each["waits"].values()))
        hidden = each["share hidden"]
        if hidden is not None:
            limit = f"{LEAST_HIDDEN:.0%}"
            yield bar(f"{name}, copies hidden under kernels", hidden, LEAST_HIDDEN, f"{hidden:.1%}", limit)
        busy = each["share that the device works"]
        if each["batch"] == LARGE_BATCH and busy is not None:
            yield bar(f"{name}, the device works", busy, LEAST_BUSY, f"{busy:.1%}", f"{LEAST_BUSY:.0%}")
        # Some machines hide who has the device open, and then there is nothing to count.
        if users := each["processes"]["open"]:
            strangers = len(set(users)) - each["processes"]["ranks"]
            yield none(f"{name}, processes on the device beside its ranks", max(0, strangers))
    if profiles:
        waited = min(each["share waited"] for each in profiles)
        limit = f"{MOST_WAITED:.0%}"
        yield bar(
            "the default model with the better number of workers, waiting for batches",
            waited,
            MOST_WAITED,
            f"{waited:.1%}",
            limit,
            True,
        )
    for each in found:
        if "fork is refused" in each:
            yield none("workers forked after CUDA was in use", int(not each["fork is refused"]))


def _training(result: Result) -> Iterator[Result]:
    for (dim, users, items), batches in _by_size(results(result, "training")).items():
        for batch, rates in batches.items():
            name = f"dimension {dim}, {users:,} + {items:,} rows, batches of {batch:,}, here"
            least = LEAST_OF_PLAIN.get((dim, users + items), {}).get(batch)
            found = of_best_plain(rates)
            if found is not None and least is not None:
                yield bar(f"{name} / the best plain one", found, least, f"{found:.2f}", f"{least}")
            if HERE in rates and LIMIT in rates:
                found = ratio(rates[HERE], rates[LIMIT])
                yield bar(f"{name} / the limit", found, LEAST_OF_LIMIT, f"{found:.2f}", f"{LEAST_OF_LIMIT}")


def _by_size(found: list[Result]) -> dict[tuple[int, int, int], dict[int, dict[str, list[float]]]]:
    """Rates by dimension, users and items, and then by batch; groups of variants are joined."""
    sizes: dict[tuple[int, int, int], dict[int, dict[str, list[float]]]] = {}
    for each in found:
        if "batch" in each:
            batches = sizes.setdefault((each["dim"], each["users"], each["items"]), {})
            batches.setdefault(each["batch"], {}).update(each["samples a second"])
    return sizes


def of_best_plain(rates: dict[str, list[float]]) -> float | None:
    """Ratio to the best plain variant; None if either side is missing."""
    plain = [values for name, values in rates.items() if name.startswith("plain")]
    return ratio(rates[HERE], max(plain, key=median)) if plain and HERE in rates else None


def _ncf(result: Result) -> Iterator[Result]:
    found = [
        median(each["samples a second"][HERE])
        for each in results(result, "ncf")
        if HERE in each.get("samples a second", {})
    ]
    if found:
        name = "NCF's shape on ml-20m's sizes, million samples a second"
        yield bar(name, max(found), LEAST_NCF, f"{max(found) / 1e6:.1f}", f"{LEAST_NCF / 1e6:.0f}")


def _whole(result: Result) -> Iterator[Result]:
    for each in results(result, "whole"):
        training, name = each["seconds"]["training"], "NCF's shape, one epoch"
        found = sum(each["seconds"].values()) / training
        yield bar(f"{name}, whole run / training", found, MOST_OF_TRAINING, f"{found:.2f}", "1.5", True)
        found = (each["seconds"]["evaluation"] / each["evaluated"]) / (training / each["trained"])
        yield bar(
            f"{name}, evaluation / training of an event", found, MOST_OF_EVALUATION, f"{found:.2f}", "1", True
        )


def of_copy(found: Result) -> float:
    """Bytes a second of a lookup and an update, as a share of a copy."""
    parts = [found[part] for part in ("lookup", "update", "whole") if part in found]
    rate = sum(part["bytes"] for part in parts) / sum(part["seconds"] for part in parts)
    return float(rate / found["copy bytes a second"])


def _lookup(result: Result) -> Iterator[Result]:
    for each in results(result, "lookup"):
        name = f"lookup and update, {each['of']}, dimension {each['dim']}, of a copy's bytes a second"
        yield bar(name, of_copy(each), LEAST_OF_COPY, f"{of_copy(each):.2f}", f"{LEAST_OF_COPY}")


def _disk(result: Result) -> Iterator[Result]:
    found = results(result, "disk")
    plain = next((each for each in found if each["of"] == "plain"), None)
    for each in found:
        if each["of"] == "checkpoint" and plain:
            verb = "write" if each["what"] == "dump" else "read"
            share = each["bytes a second"] / plain[f"{verb} bytes a second"]
            name = f"{each['what']} of {each['bytes'] / 1e9:.1f} GB, of the disk's own bytes a second"
            yield bar(name, share, LEAST_OF_DISK, f"{share:.2f}", f"{LEAST_OF_DISK}")


def render(result: Result) -> str:
    """Tables, errors and origin."""
    blocks = [block for show in TABLES for block in show(result)]
    for name, section in result["sections"].items():
        skipped = [each["skipped"] for each in section["results"] if "skipped" in each]
        if "error" in section:
            blocks.append(f"The section {name} did not end: {section['error'].splitlines()[0]}")
        blocks += [f"The section {name} skipped a part: {each}." for each in dict.fromkeys(skipped)]
    return "\n\n".join([*blocks, f"{describe_origin(result)}."])


def draw(result: Result, path: Path) -> None:
    """Draw the rates of training, one group of bars for each size and batch."""
    groups = [
        (f"{(users + items) / 1e6:.1f} M\n{dim}\n{batch:,}", rates)
        for (dim, users, items), batches in _by_size(results(result, "training")).items()
        for batch, rates in batches.items()
    ]
    shown: dict[str, Callable[[dict[str, list[float]]], float]] = {
        "here, captured": lambda rates: median(rates.get(HERE, [0.0])),
        "here, eager": lambda rates: median(rates.get(EAGER, [0.0])),
        "best plain PyTorch": lambda rates: max(
            (median(values) for name, values in rates.items() if name.startswith("plain")), default=0.0
        ),
        "limit": lambda rates: median(rates.get(LIMIT, [0.0])),
    }
    figure = new_figure(9.0, 3.6)
    axes = figure.subplots()
    for place, (name, find) in enumerate(shown.items()):
        at = [number + 0.2 * place for number in range(len(groups))]
        axes.bar(at, [find(rates) / 1e6 for _, rates in groups], width=0.18, label=name)
    axes.set_xticks([number + 0.3 for number in range(len(groups))], [name for name, _ in groups], fontsize=8)
    axes.set_xlabel("rows, numbers in a row, events of a step")
    axes.set_ylabel("million events a second")
    axes.legend(frameon=False)
    figure.savefig(path)


def describe_origin(result: Result) -> str:
    """Device, machine, versions and date in a line."""
    machine = {key: value for each in results(result, "machine") for key, value in each.items()}
    device = machine.get("device", {"kind": "unknown"})
    named = device["kind"]
    if named == "cuda":
        named = (
            f"one {device['name']}, driver {device['driver']}, CUDA {device['cuda']}, nccl {device['nccl']}"
        )
    copied = machine.get("copy bytes a second")
    copies = f", which copies {copied / 1e9:,.0f} GB/s within itself (read and written)" if copied else ""
    return f"{named[0].upper()}{named[1:]}{copies}; {origin(result)}; {result['versions']['fbgemm']}"


def _test_table(result: Result) -> Iterator[str]:
    for section, title in TESTS.items():
        found = [each for each in results(result, section) if "test" in each]
        if found:
            counts = Counter(each["outcome"] for each in found)
            failed = [each["test"] for each in found if each["outcome"] in ("failed", "error")]
            said = ", ".join(f"{number} {outcome}" for outcome, number in sorted(counts.items()))
            yield "\n".join([f"{title[0].upper()}{title[1:]}: {said}.", *failed])


def _step_table(result: Result) -> Iterator[str]:
    found = [each for each in results(result, "steps") if "workers" in each]
    shown: dict[str, Callable[[Result], str]] = {
        "samples a second": lambda each: f"{each['samples a second']:,.0f}",
        "waiting for batches": lambda each: f"{each['share waited']:.1%}",
        "ms on the host for a step, while recorded": lambda each: f"{each['ms of a step']:.2f}",
        "the device works": lambda each: f"{each['share that the device works'] or 0:.0%} of it",
        "copies hidden under kernels": lambda each: (
            "-" if each["share hidden"] is None else f"{each['share hidden']:.1%}"
        ),
        "waits for the device": lambda each: f"{sum(each['waits'].values())} in {each['steps']} steps",
        "numbers read from it": lambda each: f"{each['reads that wait']}",
        "processes on it": lambda each: f"{len(each['processes']['open']) or '-'}",
    }
    if found:
        titles = ["a step of the default model"]
        titles += [f"{each['batch']:,}, {each['workers']} workers" for each in found]
        lines = [[name, *map(show, found)] for name, show in shown.items()]
        yield table(titles, lines)


def _training_table(result: Result, section: str, title: str) -> Iterator[str]:
    sizes = _by_size(results(result, section))
    names = list(
        dict.fromkeys(name for batches in sizes.values() for rates in batches.values() for name in rates)
    )
    lines = []
    for (dim, users, items), batches in sizes.items():
        for batch, rates in batches.items():
            best = of_best_plain(rates)
            cells = [f"{median(rates[name]) / 1e6:.2f}" if name in rates else "-" for name in names]
            of_plain = "-" if best is None else f"**{best:.2f}**"
            both = HERE in rates and LIMIT in rates
            of_limit = f"**{ratio(rates[HERE], rates[LIMIT]):.2f}**" if both else "-"
            lines.append([f"{dim}, {users:,} + {items:,}, {batch:,}", *cells, of_plain, of_limit])
    if lines:
        titles = [title, *names, "here / best plain", "here / limit"]
        yield table(titles, lines)


def _whole_table(result: Result) -> Iterator[str]:
    lines = [
        [part, f"{seconds:.2f}", f"{seconds / each['seconds']['training']:.2f}"]
        for each in results(result, "whole")
        for part, seconds in each["seconds"].items()
    ]
    if lines:
        yield table(["NCF's shape, one epoch of the example", "seconds", "of the training"], lines)


def _lookup_table(result: Result) -> Iterator[str]:
    lines = []
    for each in results(result, "lookup"):
        shown = [
            f"{part}: {each[part]['bytes'] / each[part]['seconds'] / 1e9:,.0f} GB/s"
            for part in ("lookup", "update", "whole")
            if part in each
        ]
        about = f"{each['of']}, {each['rows']:,} rows of {each['dim']}, {each['ids']:,} ids"
        lines.append([about, "; ".join(shown), f"{of_copy(each):.2f}"])
    if lines:
        yield table(["tables alone", "moved", "of a copy"], lines)


def _disk_table(result: Result) -> Iterator[str]:
    lines = []
    for each in results(result, "disk"):
        if each["of"] == "plain":
            for verb in ("write", "read"):
                rate = each[f"{verb} bytes a second"] / 1e9
                lines.append([f"{verb} of {each['bytes'] / 1e9:.1f} GB, plain", f"{rate:.2f}"])
        else:
            rate = each["bytes a second"] / 1e9
            lines.append([f"{each['what']} of {each['bytes'] / 1e9:.1f} GB of tables", f"{rate:.2f}"])
    if lines:
        yield table(["checkpoints", "GB/s"], lines)


TABLES: tuple[Callable[[Result], Iterator[str]], ...] = (
    _test_table,
    _step_table,
    lambda result: _training_table(result, "training", "million samples a second: dimension, rows, batch"),
    lambda result: _training_table(result, "ncf", "NCF's shape: dimension, rows, batch"),
    lambda result: _training_table(result, "dlrm", "DLRM's shape: dimension, rows, batch"),
    _whole_table,
    _lookup_table,
    _disk_table,
)


if __name__ == "__main__":
    main()
