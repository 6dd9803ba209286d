"""What benchmarks/gpu.py found as bars and tables. Computes from its JSON alone, of which much may be
missing: a run that was cut off shows what it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from figures import bar, origin, ratio, table

Result = dict[str, Any]

# As benchmarks/gpu_training.py calls them.
HERE, READY = "here", "here, batches ready"
# What is asked for, see `judge`.
MOST_DIFFERENCE, MOST_WAITED, LEAST_HIDDEN = 1e-3, 0.02, 0.9
LEAST_OF_PLAIN, LEAST_OF_PLAIN_LARGE, LARGE = 1.0, 1.5, 10_000_000
LEAST_NCF, LEAST_OF_COPY, LEAST_OF_DISK = 20e6, 0.6, 0.7


def judge(result: Result) -> list[dict[str, Any]]:
    """Each bar beside what was measured, of what was."""
    return [
        each
        for find in (_doctor, _commands, _steps, _training, _ncf, _lookup, _disk)
        for each in find(result)
    ]


def results(result: Result, name: str) -> list[Result]:
    """What a section found."""
    found: list[Result] = result["sections"].get(name, {}).get("results", [])
    return found


def _doctor(result: Result) -> Iterator[Result]:
    for found in results(result, "doctor"):
        # A doctor that died has written no fault.
        yield none("faults on the doctor's page", found["faults"] or int(found["status"] != 0))


def none(name: str, number: int) -> Result:
    """A bar of what is not to be there at all."""
    return bar(name, number, 0, str(number), "0", at_most=True)


def _commands(result: Result) -> Iterator[Result]:
    checks = results(result, "commands")
    for found in checks:
        if "difference" in found:
            name = f"{found['check']}, largest difference of a metric between GPU and CPU"
            measured = found["difference"]
            yield bar(
                name, measured, MOST_DIFFERENCE, f"{measured:.1e}", f"{MOST_DIFFERENCE:g}", at_most=True
            )
    if checks:
        passed = sum("failed" not in found for found in checks if "check" in found)
        number = next(found["checks"] for found in checks if "checks" in found)
        yield none("commands of the example that failed or did not end", number - passed)


def _steps(result: Result) -> Iterator[Result]:
    found = results(result, "steps")
    profiles = [each for each in found if "workers" in each]
    for each in profiles:
        name = f"the default model, {each['workers']} workers"
        yield none(f"{name}, waits for the device in {each['steps']} steps", sum(each["waits"].values()))
        hidden = each["share hidden"]
        if hidden is not None:
            limit = f"{LEAST_HIDDEN:.0%}"
            yield bar(f"{name}, copies hidden under kernels", hidden, LEAST_HIDDEN, f"{hidden:.1%}", limit)
        strangers = len(set(each["processes"]["open"])) - each["processes"]["ranks"]
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
        found = [value for rates in batches.values() if (value := of_best_plain(rates)) is not None]
        if found:
            limit = LEAST_OF_PLAIN_LARGE if users + items >= LARGE else LEAST_OF_PLAIN
            name = (
                f"dimension {dim}, {users:,} + {items:,} rows, here / the best plain one, at the worst batch"
            )
            yield bar(name, min(found), limit, f"{min(found):.2f}", f"{limit}")


def _by_size(found: list[Result]) -> dict[tuple[int, int, int], dict[int, dict[str, list[float]]]]:
    """Dimension, users and items to batch to rates: variants that took turns in memory are told of apart."""
    sizes: dict[tuple[int, int, int], dict[int, dict[str, list[float]]]] = {}
    for each in found:
        if "batch" in each:
            batches = sizes.setdefault((each["dim"], each["users"], each["items"]), {})
            batches.setdefault(each["batch"], {}).update(each["samples a second"])
    return sizes


def of_best_plain(rates: dict[str, list[float]]) -> float | None:
    """Of one batch; None where either side is missing."""
    plain = [values for name, values in rates.items() if name.startswith("plain")]
    return ratio(rates[HERE], max(plain, key=median)) if plain and HERE in rates else None


def _ncf(result: Result) -> Iterator[Result]:
    found = [
        median(values)
        for each in results(result, "ncf")
        for name, values in each.get("samples a second", {}).items()
        # With batches that are ready it is no training that anybody runs.
        if name.startswith(HERE) and not name.startswith(READY)
    ]
    if found:
        name = "NCF's shape on ml-20m's sizes, million samples a second"
        yield bar(name, max(found), LEAST_NCF, f"{max(found) / 1e6:.1f}", f"{LEAST_NCF / 1e6:.0f}")


def of_copy(found: Result) -> float:
    """Bytes a second that a lookup and an update have to move, of those of a copy."""
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
    """The tables, what went wrong, and where figures come from."""
    blocks = [block for show in TABLES for block in show(result)]
    for name, section in result["sections"].items():
        skipped = [each["skipped"] for each in section["results"] if "skipped" in each]
        if "error" in section:
            blocks.append(f"The section {name} did not end: {section['error'].splitlines()[0]}")
        blocks += [f"The section {name} left out: {each}." for each in dict.fromkeys(skipped)]
    return "\n\n".join([*blocks, f"{describe_origin(result)}."])


def describe_origin(result: Result) -> str:
    """Device, machine, versions and date, in a line."""
    machine = {key: value for each in results(result, "machine") for key, value in each.items()}
    device = machine.get("device", {"kind": "unknown"})
    named = device["kind"]
    if named == "cuda":
        named = (
            f"one {device['name']}, driver {device['driver']}, CUDA {device['cuda']}, nccl {device['nccl']}"
        )
    copied = machine.get("copy bytes a second")
    copies = f", which copies {copied / 1e9:,.0f} GB/s within itself (read and written)" if copied else ""
    fbgemm = result["versions"]["fbgemm"]
    return f"{named[0].upper()}{named[1:]}{copies}; {origin(result)}; {fbgemm}"


def _command_table(result: Result) -> Iterator[str]:
    lines = []
    for found in results(result, "commands"):
        said = [
            f"{key}: {value}" for key, value in found.items() if key not in ("check", "after", "cpu", "gpu")
        ]
        main = [_main_metric(found[where]["test"]) if where in found else "-" for where in ("cpu", "gpu")]
        lines.append([found["check"], *main, "; ".join(said).replace("\n", " ")[:200]])
    if lines:
        yield table([["command", "CPU", "GPU", "found"], ["---", "---:", "---:", "---"], *lines])


def _main_metric(metrics: dict[str, float]) -> str:
    name, value = next(iter(metrics.items()))
    return f"{name} {value:.4f}"


def _step_table(result: Result) -> Iterator[str]:
    found = [each for each in results(result, "steps") if "workers" in each]
    shown: dict[str, Callable[[Result], str]] = {
        "samples a second": lambda each: f"{each['samples a second']:,.0f}",
        "waiting for batches": lambda each: f"{each['share waited']:.1%}",
        "ms of a step, recorded": lambda each: f"{each['ms of a step']:.2f}",
        "the device works": lambda each: f"{each['share that the device works'] or 0:.0%} of it",
        "copies hidden under kernels": lambda each: (
            "-" if each["share hidden"] is None else f"{each['share hidden']:.1%}"
        ),
        "waits for the device": lambda each: f"{sum(each['waits'].values())} in {each['steps']} steps",
        "numbers read from it": lambda each: f"{each['reads that wait']}",
        "processes on it": lambda each: f"{len(each['processes']['open'])}",
    }
    if found:
        titles = ["a step of the default model", *(f"{each['workers']} workers" for each in found)]
        lines = [[name, *map(show, found)] for name, show in shown.items()]
        yield table([titles, ["---", *("---:" for _ in found)], *lines])


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
            lines.append([f"{dim}, {users:,} + {items:,}, {batch:,}", *cells, of_plain])
    if lines:
        titles = [title, *names, "here / best plain"]
        yield table([titles, ["---", *("---:" for _ in titles[1:])], *lines])


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
        yield table([["tables alone", "moved", "of a copy"], ["---", "---:", "---:"], *lines])


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
        yield table([["checkpoints", "GB/s"], ["---", "---:"], *lines])


TABLES: tuple[Callable[[Result], Iterator[str]], ...] = (
    _command_table,
    _step_table,
    lambda result: _training_table(result, "training", "million samples a second: dimension, rows, batch"),
    lambda result: _training_table(result, "ncf", "NCF's shape: dimension, rows, batch"),
    _lookup_table,
    _disk_table,
)
