"""Compare this project's defaults with the best other systems on a panel of sets, in one run.

    python benchmarks/panel.py --real FOLDER... [--write]        folders of ml-latest-small, and others
    python benchmarks/panel.py --sets "shop small" "world"       some sets, by the start of their names
    python benchmarks/panel.py --tasks sequences                 slow, and for that reason not by default
    python benchmarks/panel.py --sets "ml-100k" --also panel.json --report FOLDER     joins earlier results
    python benchmarks/panel.py --only_this --also panel.json     measures this project again, and nothing else

Ratings are compared with the biases, plain_factors.py and myFM, from drawn rows (the default) and from solved
ones, clicks and rankings with popularity, EASE and alternating least squares, sequences with the systems of
sequences.py: see peers.py. All have the same columns. The sets of ratings:

    ml-latest-small, ml-100k    a random tenth as the test, and the newest fifth
    ml-100k, u1 to u5           the official parts
    shop small, wide, dense     planted low rank, a random fifth of the pairs of a user and an item
    shop small, time            the newest fifth: no flag but --data_path
    shop 1 to 6                 the same kind; SEED draws rank, density, noise, popularity and users
    worlds of quality.py        about 100,000 ratings, the newest fifth and a random tenth

A rating in a shop depends on planted factors p of its user and q of its item, and on the price of the item:

    score = MEAN + SIGNAL * (p * q) / sqrt(rank) - PRICE_EFFECT * log(price) + noise

rounded to 1..5. Users choose items by popularity alone, so choices tell nothing about taste. A pair may
repeat; its last event counts.

Every set belongs to a half: defaults are chosen on the validation events of the first one, CHOSEN, and
confirmed on the other. Needs requirements-dev.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pandas as pd
from clicks import SPLIT, write_clicks
from common import (
    DOCS,
    bar,
    comma_separated,
    describe,
    finish,
    make_parser,
    mean,
    measured_before,
    new_figure,
    origin,
    spread,
    table,
    timed,
    training_seconds,
)
from peers import (
    NUM_RANKS,
    RANK,
    PeerCase,
    add_sets,
    compare_ranks,
    compare_ratings,
    data_sets,
    trained_ratings,
)
from quality import OFFICIAL, WORLDS

from recsuite.config.parser import parse_args
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.files import replace_file

OTHERS = ("implicit", "myfm", "recbole")
PAGE = DOCS / "quality.md"
PICTURE = "![Metric of each system over that of the best other one, a row for each set](panel.png)"
ITERATIONS = 300
NUM_RATINGS = 100_000
SHOWN_WORLDS = ("small", "noisy", "many factors", "choices")
RANDOM = ("--split", "random", "--test_fraction", "0.1")
RANDOM_FIFTH = ("--split", "random", "--test_fraction", "0.2")
TIME = ("--split", "time")
SEQUENCE = ("--task", "sequence")
# Of the shops that are drawn.
SEED, NUM_SHOPS = 2026, 6
MEAN, SIGNAL, PRICE_EFFECT = 3.6, 0.6, 0.2
# Start and length of the time of a shop, in seconds.
FIRST_SECOND, SECONDS = 1_700_000_000, 10**7
NUM_CATEGORIES = 17
THIS, SOLVED, BIASES, PLAIN = "this", "this, solved", "biases", "plain factors"
BOTH_SIDES = "myFM, who rated what"
MYFM = ("myFM, ids", BOTH_SIDES)
# Metric and title of each task.
TASKS = {
    "ratings": ("rmse", "RMSE"),
    "rankings": ("ndcg_at_10", "NDCG@10"),
    "sequences": ("ndcg_at_10", "NDCG@10"),
}
CHOSEN = (
    *(f"{name}, {split}" for name in ("ml-latest-small", "ml-100k") for split in ("random", "time")),
    # The parts have the same ratings as the other splits of ml-100k.
    *(f"ml-100k, {part}" for part in OFFICIAL),
    *("shop small", "shop wide", "shop dense", "ml-latest-small, ranking", "ml-latest-small, sequences"),
)
# Bars of solved rows: the largest RMSE over that of myFM, in the middle and at worst, and seconds over those
# of myFM.
MIDDLE, WORST, SLOWEST = 1.01, 1.03, 1.5
# Bars of drawn and of solved rows on the parts of ml-100k: the largest RMSE of the first part and on average.
OF_PARTS = {THIS: (0.91, 0.905), SOLVED: (0.8808, 0.875)}
# Bars: the largest RMSE over that of myFM with both sides.
OVER_BOTH_SIDES = {"ml-100k, random": 0.995, "ml-latest-small, random": 0.97}
# Bar of drawn rows, the default: the largest RMSE over that of plain_factors.py.
OVER_PLAIN = 1.0
# Bars: the least NDCG@10 over that of the best other system, and RMSE under the biases.
AS_GOOD, UNDER = 1.0, {"ml-latest-small, time": 0.02}
MARKERS = {
    THIS: "o",
    SOLVED: "*",
    PLAIN: "+",
    BIASES: "x",
    "popularity": "x",
    MYFM[0]: "<",
    MYFM[1]: ">",
    "EASE": "s",
}


# --- shops with a planted low rank ---


@dataclass(frozen=True)
class Shop:
    """Shop whose ratings have a planted rank.

    events: drawn ones, of which some repeat a pair; tail: exponent of the popularity of items by Zipf's law,
    where the last item stands for all later ones, or None for items of equal popularity; noise: its standard
    deviation, in stars.
    """

    users: int
    items: int
    events: int
    rank: int
    tail: float | None = None
    noise: float = 0.4
    seed: int = 7

    def draw(self) -> tuple[pd.DataFrame, np.ndarray]:
        """Events, and their scores without noise, float64 [events]."""
        rng = np.random.default_rng(self.seed)
        user = rng.integers(0, self.users, self.events)
        if self.tail is None:
            item = rng.integers(0, self.items, self.events)
        else:
            item = np.minimum(rng.zipf(self.tail, self.events), self.items) - 1
        of_users, of_items = (rng.normal(size=(number, self.rank)) for number in (self.users, self.items))
        price = rng.lognormal(3, 1, self.items)
        taste = (of_users[user] * of_items[item]).sum(axis=1) / math.sqrt(self.rank)
        score = MEAN + SIGNAL * taste - PRICE_EFFECT * np.log(price[item])
        noise = self.noise * rng.normal(size=self.events)
        columns = {
            "customer": [f"c{number:06d}" for number in user],
            "product_id": [f"B{number:05d}" for number in item],
            "stars": np.clip(np.rint(score + noise), 1, 5),
            "when": pd.to_datetime(FIRST_SECOND + rng.integers(0, SECONDS, self.events), unit="s"),
            "price": price[item],
            "category": [f"k{number % NUM_CATEGORIES}" for number in item],
        }
        return pd.DataFrame(columns), score

    def write(self, folder: Path) -> None:
        """Write the events into a new folder, as a table of one's own."""
        folder.mkdir(parents=True)
        self.draw()[0].to_parquet(folder / "events.parquet")


def drawn_shops(number: int = NUM_SHOPS, seed: int = SEED) -> dict[str, Shop]:
    """Shops of all kinds, by name.

    Each parameter takes values that divide its range evenly, in a random order.
    """
    rng = np.random.default_rng(seed)

    def spaced(low: float, high: float) -> np.ndarray:
        return low + (high - low) * (rng.permutation(number) + 0.5) / number

    # Numbers that differ by a factor are spaced by their logarithms.
    users, items, events = (
        np.exp(spaced(math.log(low), math.log(high))).round().astype(int)
        for low, high in ((300, 8000), (200, 4000), (20_000, 200_000))
    )
    ranks, noises, tails = spaced(1.5, 12.5).round().astype(int), spaced(0.2, 0.8), spaced(1.0, 1.6)
    shops = {}
    for place in range(number):
        shops[str(place + 1)] = Shop(
            users=int(users[place]),
            items=int(items[place]),
            # At most half as many as there are pairs.
            events=int(min(events[place], users[place] * items[place] // 2)),
            rank=int(ranks[place]),
            # Half of the shops have items of equal popularity.
            tail=round(float(tails[place]), 2) if tails[place] > 1.3 else None,
            noise=round(float(noises[place]), 2),
            seed=seed + place,
        )
    return shops


SHOPS = {
    "small": Shop(1500, 400, 40_000, rank=4, tail=1.3),
    "wide": Shop(4000, 3000, 120_000, rank=6, tail=1.15),
    "dense": Shop(600, 300, 60_000, rank=8),
    **drawn_shops(),
}


# --- the panel ---


@dataclass(frozen=True)
class PanelSet:
    """Set of the panel: its name and task in the tables, flags of this project, and folder.

    write: writes the folder, None where it exists; factors: of myFM.
    """

    name: str
    task: str
    flags: tuple[str, ...]
    data: Path
    write: Callable[[Path], object] | None = None
    factors: int = RANK


def main() -> None:
    """Train all and show, and write if that is asked for."""
    parser = make_parser(__doc__, *OTHERS, "scipy", "threadpoolctl")
    add_sets(parser)
    parser.add_argument(
        "--tasks",
        type=comma_separated(str),
        default=["ratings", "rankings"],
        help=f"of {','.join(TASKS)} (default: ratings,rankings)",
    )
    parser.add_argument("--sets", nargs="+", default=[], help="starts of names (default: all)")
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, help=f"draws of myFM (default: {ITERATIONS})"
    )
    parser.add_argument(
        "--ranks", type=int, default=NUM_RANKS, help=f"processes of this project (default: {NUM_RANKS})"
    )
    parser.add_argument("--also", type=Path, nargs="+", default=[], help="files of --report, to be joined")
    parser.add_argument(
        "--only_this",
        action="store_true",
        help="skip the others, whose results and seconds are those of --also",
    )
    # Of SASRec, as in sequences.py.
    parser.set_defaults(epochs=50, patience=5)
    finish("panel", parser.parse_args(), measure, judge, render, PAGE, draw)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run, joined with those of --also."""
    shops = {name: asdict(shop) for name, shop in SHOPS.items()}
    about = {**describe(), "iterations": flags.iterations, "ranks": flags.ranks, "shops": shops}
    about["versions"] |= {name: version(name) for name in OTHERS}
    runs = [run for file in flags.also for run in measured_before(file, about)]
    check_systems(runs)
    result = {**about, "runs": latest(runs)}
    with tempfile.TemporaryDirectory() as folder:
        sets = [*selected(panel_sets(flags, Path(folder)), flags.tasks, flags.sets)]
        if flags.only_this and (missing := {each.name for each in sets} - {run["data"] for run in runs}):
            raise ValueError(f"--only_this requires results of {', '.join(sorted(missing))} in --also")
        for each in sets:
            seconds, found = timed(compared, each, flags, Path(folder))
            print(f"{each.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
            result["runs"] = latest([*result["runs"], *found])
            if flags.report:
                # All sets take hours. After an interruption --also goes on from here.
                flags.report.mkdir(parents=True, exist_ok=True)
                replace_file(flags.report / "panel.json", json.dumps(result).encode())
    return result


def check_systems(runs: Sequence[dict[str, Any]]) -> None:
    """Refuse earlier results of ratings without all systems of today.

    Raises:
        ValueError: names the set and the systems.
    """
    for name in {run["data"] for run in runs if run["task"] == "ratings"}:
        measured = {run["system"] for run in runs if run["data"] == name}
        if missing := [each for each in (THIS, SOLVED, BIASES, PLAIN, *MYFM) if each not in measured]:
            raise ValueError(f"{name} was measured without {', '.join(missing)}; measure it again")


def latest(runs: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs without those that were measured again later."""
    return [*{(run["data"], run["system"], run["seed"]): run for run in runs}.values()]


def panel_sets(flags: argparse.Namespace, folder: Path) -> Iterator[PanelSet]:
    """Every set of the panel; folder: of those that are written."""
    for data in data_sets(flags, folder):
        name = data.resolve().name
        yield PanelSet(f"{name}, random", "ratings", RANDOM, data)
        yield PanelSet(f"{name}, time", "ratings", TIME, data)
        for part in OFFICIAL if (data / f"{OFFICIAL[0]}.base").exists() else ():
            yield PanelSet(f"{name}, {part}", "ratings", ("--split", part), data)
        yield PanelSet(f"{name}, ranking", "rankings", SPLIT, data)
        write = partial(write_clicks, data)
        yield PanelSet(f"{name}, clicks", "rankings", SPLIT, folder / "clicks" / name, write)
        yield PanelSet(f"{name}, sequences", "sequences", (*SEQUENCE, "--split", "leave_one_out"), data)
    for name, shop in SHOPS.items():
        splits = {f"shop {name}": RANDOM_FIFTH, **({"shop small, time": ()} if name == "small" else {})}
        for shown, split in splits.items():
            # Fewer factors than planted ones would be a handicap.
            factors = max(RANK, shop.rank)
            yield PanelSet(shown, "ratings", split, folder / f"shop-{name}", shop.write, factors)
    for name, _, world in WORLDS:
        write = partial(write_synthetic, num_ratings=NUM_RATINGS, seed=0, world=world)
        for shown, split in (("random", RANDOM), ("time", ())) if name in SHOWN_WORLDS else ():
            place = folder / f"world-{name.replace(' ', '-')}"
            yield PanelSet(f"world {name}, {shown}", "ratings", split, place, write)


def selected(sets: Iterable[PanelSet], tasks: Sequence[str], starts: Sequence[str]) -> Iterator[PanelSet]:
    """Sets of some tasks whose names begin with one of the starts; all of them if there are none.

    Raises:
        ValueError: for an unknown task, and for a start that no name has.
    """
    if not set(tasks) <= TASKS.keys():
        raise ValueError(f"--tasks requires some of {', '.join(TASKS)}, got {', '.join(tasks)}")
    known = [each for each in sets if each.task in tasks]
    for start in starts:
        if not any(each.name.startswith(start) for each in known):
            names = "; ".join(each.name for each in known)
            raise ValueError(f"--sets requires the start of one of these names: {names}. Got {start}")
    yield from (each for each in known if not starts or each.name.startswith(tuple(starts)))


def compared(each: PanelSet, flags: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Results of every system on a set, for each seed."""
    if each.write is not None and not each.data.exists():
        each.write(each.data)
    task = "rating" if each.task == "ratings" else "ranking"
    seeds = range(flags.seeds)
    cases = [PeerCase(each.data, task, seed, folder, each.flags, flags.ranks) for seed in seeds]
    if flags.only_this and each.task == "ratings":
        found = [trained_ratings(case) for case in cases]
    elif flags.only_this and each.task == "rankings":
        reports = [(case, case.report(case.columns)) for case in cases]
        found = [[case.run(THIS, report["test"], training_seconds(report))] for case, report in reports]
    elif each.task == "ratings":
        found = [compare_ratings(case, flags.iterations, each.factors) for case in cases]
    elif each.task == "rankings":
        found = [compare_ranks(case) for case in cases]
    else:
        # It imports torch.
        from sequences import SequenceCase, compared

        places = (each.data, "leave_one_out")
        of_seeds = [SequenceCase(*places, seed, folder, each.flags, flags.ranks) for seed in seeds]
        found = [[*compared(of_seeds, flags)]]
    split, num_train = parse_args(cases[0].command).data.split, cases[0].columns.num_train
    about = {"data": each.name, "task": each.task, "split": split, "num_train": num_train}
    return [{**run, **about} for runs in found for run in runs]


# --- results of a set; computed from the JSON alone ---


@dataclass(frozen=True)
class SetResult:
    """Results of a set: its runs by system, in the order of the JSON."""

    name: str
    systems: dict[str, list[dict[str, Any]]]

    @property
    def first(self) -> dict[str, Any]:
        """Any run of this project."""
        return self.systems[THIS][0]

    @property
    def half(self) -> str:
        """Half of the panel: "chosen" or "confirmed"."""
        return "chosen" if self.name in CHOSEN else "confirmed"

    def values(self, system: str) -> list[float]:
        """Metric of the task for each seed."""
        metric, _ = TASKS[self.first["task"]]
        return [run["metrics"][metric] for run in self.systems[system]]

    def seconds(self, system: str) -> float:
        """Mean seconds of a training."""
        return mean(run["seconds"] for run in self.systems[system])

    @property
    def rival(self) -> str:
        """Best other system by the mean over seeds; for ratings the better one of myFM's two."""
        if self.first["task"] == "ratings":
            return min(MYFM, key=lambda name: mean(self.values(name)))
        others = (name for name in self.systems if name not in (THIS, SOLVED))
        return max(others, key=lambda name: mean(self.values(name)))

    def ratio(self, system: str = THIS, other: str = "") -> float:
        """Metric of a system over that of another one, by default the rival."""
        return mean(self.values(system)) / mean(self.values(other or self.rival))

    @property
    def slowness(self) -> float:
        """Seconds of solved rows over those of the rival."""
        return self.seconds(SOLVED) / self.seconds(self.rival)

    @property
    def under_biases(self) -> float:
        """Distance of the RMSE to that of the biases, positive where this project is better."""
        return mean(self.values(BIASES)) - mean(self.values(THIS))


def results_of(result: dict[str, Any], task: str) -> list[SetResult]:
    """Results of the sets of a task, those of the first half before the others."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for run in result["runs"]:
        if run["task"] == task:
            found.setdefault(run["data"], {}).setdefault(run["system"], []).append(run)
    sets = [SetResult(name, systems) for name, systems in found.items()]
    return sorted(sets, key=lambda each: each.half)


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure, if that was measured."""
    ratings = results_of(result, "ratings")
    bars = []
    if at_random := [each for each in ratings if each.first["split"] == "random"]:
        middle = median(each.ratio(SOLVED) for each in at_random)
        name = "random splits, RMSE of solved rows / better myFM"
        bars.append(bar(f"{name}, median", middle, MIDDLE, f"{middle:.4f}", f"{MIDDLE}", at_most=True))
        worst = max(at_random, key=lambda each: each.ratio(SOLVED))
        shown = f"{worst.ratio(SOLVED):.4f} on {worst.name}"
        bars.append(bar(f"{name}, worst", worst.ratio(SOLVED), WORST, shown, f"{WORST}", at_most=True))
    if ratings:
        slow = max(ratings, key=lambda each: each.slowness)
        shown = f"{slow.slowness:.2f} on {slow.name}"
        name = "ratings, seconds of solved rows / better myFM, worst"
        bars.append(bar(name, slow.slowness, SLOWEST, shown, f"{SLOWEST}", at_most=True))
        far = max(ratings, key=lambda each: each.ratio(other=PLAIN))
        shown = f"{far.ratio(other=PLAIN):.4f} on {far.name}"
        name = "ratings, RMSE / plain factors, worst"
        bars.append(bar(name, far.ratio(other=PLAIN), OVER_PLAIN, shown, f"{OVER_PLAIN}", at_most=True))
    of_parts = [each for each in ratings if each.first["split"] in OFFICIAL]
    for system, (first, average) in OF_PARTS.items() if of_parts else ():
        of = " of solved rows" if system == SOLVED else ""
        errors = [mean(each.values(system)) for each in of_parts]
        name = f"{of_parts[0].name}, RMSE{of}"
        bars.append(bar(name, errors[0], first, f"{errors[0]:.4f}", f"{first}", at_most=True))
        name = f"{of_parts[0].name} to {of_parts[-1].first['split']}, mean RMSE{of}"
        bars.append(bar(name, mean(errors), average, f"{mean(errors):.4f}", f"{average}", at_most=True))
    for each in ratings:
        if each.name in OVER_BOTH_SIDES:
            found, most = each.ratio(SOLVED, BOTH_SIDES), OVER_BOTH_SIDES[each.name]
            name = f"{each.name}, RMSE of solved rows / {BOTH_SIDES}"
            bars.append(bar(name, found, most, f"{found:.4f}", f"{most}", at_most=True))
        if each.first["split"] == "time":
            found, least = each.under_biases, UNDER.get(each.name, 0.0)
            bars.append(bar(f"{each.name}, RMSE under the biases", found, least, f"{found:.4f}", f"{least}"))
    for each in (each for task in ("rankings", "sequences") for each in results_of(result, task)):
        name = f"{each.name}, NDCG@10 / {each.rival}"
        bars.append(bar(name, each.ratio(), AS_GOOD, f"{each.ratio():.3f}", f"{AS_GOOD}"))
    return bars


# --- tables and picture ---


def render(result: dict[str, Any]) -> str:
    """Picture, a table for each task, and origin."""
    tables = [table_of(task, sets) for task in TASKS if (sets := results_of(result, task))]
    seeds = sorted({len(each.systems[THIS]) for task in TASKS for each in results_of(result, task)})
    shown = f"{' or '.join(map(str, seeds))} seed{'s' * (seeds != [1])}"
    about = f"{shown}; {result['iterations']} draws of myFM. {origin(result)}."
    return "\n\n".join([PICTURE, *tables, about])


def table_of(task: str, sets: Sequence[SetResult]) -> str:
    """Table with a row for each set: the metric of every system, and this project beside the best of them."""
    _, shown = TASKS[task]
    systems = dict.fromkeys(name for each in sets for name in each.systems)
    peers = [name for name in systems if name not in (THIS, SOLVED)]
    # System, and what it is compared with.
    ours = [(THIS, PLAIN), (SOLVED, "better myFM")] if task == "ratings" else [(THIS, "best other")]
    heads = [f"{task}, {shown}", "half", "training events", *peers]
    for name, other in ours:
        heads += [name, f"/ {other}", "seconds"]
    lines = []
    for each in sets:
        cells = [f"{mean(each.values(name)):.4f}" if name in each.systems else "-" for name in peers]
        for name, other in ours:
            ratio = each.ratio(name, PLAIN if other == PLAIN else "")
            cells += [f"**{spread(each.values(name))}**", f"{ratio:.3f}", f"{each.seconds(name):.1f}"]
        lines.append([each.name, each.half, f"{each.first['num_train']:,}", *cells])
    if task == "ratings":
        heads.append("/ better myFM")
        for line, each in zip(lines, sets, strict=True):
            line.append(f"{each.slowness:.2f}")
    return table(heads, lines, left=(0, 1))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the metric of each system over that of the best other one: a panel a task, a row a set."""
    panels = {task: sets for task in TASKS if (sets := results_of(result, task))}
    heights = [len(sets) + 3 for sets in panels.values()]
    figure = new_figure(9, 0.3 * sum(heights))
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (task, sets) in zip(all_axes, panels.items(), strict=True):
        draw_panel(axes, task, sets)
    figure.suptitle(origin(result), fontsize="xx-small")
    figure.savefig(path)


def draw_panel(axes: Any, task: str, sets: Sequence[SetResult]) -> None:
    """Draw one panel; seeds of this project are small points."""
    names = list(dict.fromkeys(name for each in sets for name in each.systems if name not in (THIS, SOLVED)))
    ours = [name for name in (SOLVED, THIS) if name in sets[0].systems]
    for name in (*names, *ours):
        rows = [row for row, each in enumerate(sets) if name in each.systems]
        found = [sets[row].ratio(name) for row in rows]
        style = {"color": "C0", "zorder": 3} if name in ours else {"color": f"C{1 + names.index(name)}"}
        axes.plot(found, rows, linestyle="", marker=MARKERS.get(name, "d"), label=name, **style)
    for row, each in enumerate(sets):
        rival = mean(each.values(each.rival))
        seeds = [value / rival for value in each.values(THIS)]
        axes.plot(seeds, [row] * len(seeds), linestyle="", marker=".", markersize=3, color="C0")
    axes.axvline(1, color="0.5", linewidth=0.8)
    axes.set_yticks(range(len(sets)), [f"{each.name} ({each.half})" for each in sets], fontsize="small")
    _, shown = TASKS[task]
    other = "better one of myFM's two" if task == "ratings" else "best other system"
    better = "lower" if task == "ratings" else "higher"
    axes.set(title=task, xlabel=f"{shown} / {other}; {better} is better")
    axes.set_ylim(len(sets) - 0.5, -0.5)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


if __name__ == "__main__":
    main()
