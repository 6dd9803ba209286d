"""Measure how well the defaults learn: every protocol, several seeds, several worlds, 1, 2 and 3 processes.

    python benchmarks/quality.py                                  synthetic worlds
    python benchmarks/quality.py --real FOLDER... [--write]       and the MovieLens sets in these folders
    python benchmarks/quality.py --peers --help                   beside other systems

A folder is known by its name: ml-latest-small, ml-100k, ml-1m, ml-10m. --write puts the tables into
docs/log/benchmarks.md and their values into docs/quality.json. Trains with the defaults alone; nothing is
chosen by what comes out. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import DOCS, EXAMPLE, describe, in_words, torchrun, write_between
from figures import bar, bar_lines, mean, spread
from quality_world import ChoosingWorld

from recsuite.config.config import Config
from recsuite.datasets.movielens.synthetic import World, write_synthetic

PAGE, FIGURES = DOCS / "log" / "benchmarks.md", DOCS / "quality.json"
MARKS = ("<!-- quality: made by benchmarks/quality.py -->", "<!-- end of quality -->")
NUM_RANKS = 2
NUM_SEEDS = 5
# That of two processes: the number of steps is the same on any number.
GLOBAL_BATCH = NUM_RANKS * Config().loader.batch_size
RANDOM = ("--split", "random", "--test_fraction", "0.1")
RANKING = ("--task", "ranking", "--split", "leave_one_out")
OFFICIAL = ("u1", "u2", "u3", "u4", "u5")
# Name, ratings, world: what is not like the default one.
WORLDS = (
    ("default", 1_000_000, World()),
    ("small", 100_000, World()),
    ("sparse", 300_000, World(mean_ratings_per_user=60)),
    ("noisy", 300_000, World(noise_std=1.2)),
    ("quiet", 300_000, World(noise_std=0.6)),
    ("many factors", 300_000, World(factor_stds=(0.25,) * 8)),
    ("choices", 300_000, ChoosingWorld()),
    ("drift and days", 300_000, ChoosingWorld(drift=1.0, day_std=0.2)),
)


@dataclass(frozen=True)
class Case:
    """One training: what it is called in the tables, its flags, seed and number of processes."""

    name: str
    flags: tuple[str, ...]
    seed: int = 0
    num_ranks: int = NUM_RANKS

    @property
    def command(self) -> list[str]:
        """The command line, but for the report's folder."""
        return [*torchrun(self.num_ranks), str(EXAMPLE), *self.flags, "--seed", str(self.seed)]


def main() -> None:
    """Train, write, show."""
    arguments = parse()
    if arguments.peers is not None:
        # Needs packages that nothing else here does.
        from quality_peers import main as compare

        compare(arguments.peers)
        return
    with tempfile.TemporaryDirectory() as folder:
        cases = [*worlds(Path(folder), arguments.share)]
        for real in arguments.real:
            cases += real_cases(real, arguments.seeds, Path(folder) / "columns")
        runs = [measure(case) for case in cases]
    text = render(runs)
    print(f"{text}\n\n{bar_lines(judge(runs))}")
    if arguments.write:
        about = describe()
        found = {**about, "runs": runs, "bars": judge(runs)}
        FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        write_between(PAGE, MARKS, f"{text}\n\n{in_words(about)}")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"of each case (default: {NUM_SEEDS})")
    parser.add_argument("--share", type=float, default=1.0, help="of the worlds' ratings (default: all)")
    parser.add_argument("--write", action="store_true", help="put the figures into docs")
    parser.add_argument(
        "--peers",
        nargs=argparse.REMAINDER,
        help="compare with other systems; behind it come the flags of that",
    )
    arguments = parser.parse_args()
    if arguments.peers is not None and sys.argv[1] != "--peers":
        parser.error("--peers has flags of its own: let all others stand behind it")
    return arguments


def worlds(folder: Path, share: float) -> Iterator[Case]:
    """The synthetic worlds, drawn into a folder."""
    for name, num_ratings, world in WORLDS:
        path = folder / name.replace(" ", "-")
        write_synthetic(path, round(num_ratings * share), seed=0, world=world)
        yield Case(f"world: {name}", ("--data_path", str(path)))


def real_cases(folder: Path, num_seeds: int, cache: Path) -> Iterator[Case]:
    """All that is known to be comparable of a MovieLens set."""
    name = folder.resolve().name
    data = ("--data_path", str(folder), "--cache_dir", str(cache / name))
    if name == "ml-100k":
        yield from (Case(f"{name} {split}", (*data, "--split", split)) for split in OFFICIAL)
    for seed in range(num_seeds):
        yield Case(f"{name} random 90/10", (*data, *RANDOM), seed)
        yield Case(f"{name} time 80/20", (*data, "--split", "time"), seed)
        yield Case(f"{name} leave one out", (*data, *RANKING), seed)
        for num_ranks in (1, 3) if name == "ml-latest-small" else ():
            # The same global batch on any number of processes: else it would be another training, and not the
            # same one on other ranks.
            batch = ("--batch_size", str(-(-GLOBAL_BATCH // num_ranks)))
            case = f"{name} random 90/10, {num_ranks} process{'es' * (num_ranks > 1)}"
            yield Case(case, (*data, *RANDOM, *batch), seed, num_ranks)


def measure(case: Case) -> dict[str, Any]:
    """Train, and keep of the report what the tables need."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*case.command, "--report_dir", folder], check=True, stdout=subprocess.DEVNULL)
        report = json.loads((Path(folder) / "metrics.json").read_text())
    return {
        "name": case.name,
        "seed": case.seed,
        "num_ranks": case.num_ranks,
        "task": report["config"]["task"],
        "num_train": report["data"]["num_train"],
        "epochs": len(report["epochs"]),
        "test": report["test"],
        "baselines": report["baselines"],
    }


def render(runs: Sequence[dict[str, Any]]) -> str:
    """The tables: ratings of real sets, ranks of real sets, worlds."""
    real = [run for run in runs if not run["name"].startswith("world")]
    tables = [
        rating_table([run for run in real if run["task"] == "rating"]),
        ranking_table([run for run in real if run["task"] == "ranking"]),
        world_table([run for run in runs if run["name"].startswith("world")]),
    ]
    return "\n\n".join(table for table in tables if table)


def judge(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each bar beside what was measured, where it was."""
    cases = by_name(runs)
    bars = []
    if same := cases.get("ml-latest-small random 90/10"):
        rmse = mean(run["test"]["rmse"] for run in same)
        bars.append(bar("random 90/10, RMSE", rmse, 0.85, f"{rmse:.4f}", "0.85", at_most=True))
    for split, least in (("random 90/10", 0.02), ("time 80/20", 0.015)):
        if same := cases.get(f"ml-latest-small {split}"):
            under = mean(run["baselines"]["biases"]["rmse"] - run["test"]["rmse"] for run in same)
            bars.append(bar(f"{split}, RMSE under the biases", under, least, f"{under:.4f}", f"{least}"))
    if same := cases.get("ml-latest-small leave one out"):
        gain = mean(run["test"]["hr_at_10"] / run["baselines"]["popularity"]["hr_at_10"] for run in same)
        bars.append(bar("leave one out, HR@10 / popularity", gain, 1.5, f"{gain:.2f}", "1.5"))
    if same := cases.get("world: default"):
        ratio = mean(run["test"]["rmse"] / run["baselines"]["oracle"]["rmse"] for run in same)
        bars.append(bar("default world, RMSE / oracle", ratio, 1.02, f"{ratio:.4f}", "1.02", at_most=True))
    return bars


def by_name(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ in nothing but the seed."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return found


def rating_table(runs: Sequence[dict[str, Any]]) -> str:
    """RMSE beside the biases, and the other metrics of ratings."""
    lines = [
        "| ratings | seeds | biases, RMSE | this, RMSE | under the biases | MAE | AUC | log loss |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, same in by_name(runs).items():
        under = [run["baselines"]["biases"]["rmse"] - run["test"]["rmse"] for run in same]
        tests = {metric: [run["test"][metric] for run in same] for metric in same[0]["test"]}
        lines.append(
            f"| {name} | {len(same)} | {mean(run['baselines']['biases']['rmse'] for run in same):.4f} | "
            f"**{spread(tests['rmse'])}** | {spread(under)} | {mean(tests['mae']):.4f} | "
            f"{mean(tests['auc']):.4f} | {mean(tests['log_loss']):.4f} |"
        )
    return "\n".join(lines) if runs else ""


def ranking_table(runs: Sequence[dict[str, Any]]) -> str:
    """HR@10 and NDCG@10 beside popularity."""
    lines = [
        "| ranks among all movies | seeds | popularity, HR@10 | this, HR@10 | popularity, NDCG@10 | "
        "this, NDCG@10 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, same in by_name(runs).items():
        cells = []
        for metric in ("hr_at_10", "ndcg_at_10"):
            cells.append(f"{mean(run['baselines']['popularity'][metric] for run in same):.4f}")
            cells.append(f"**{spread([run['test'][metric] for run in same])}**")
        lines.append(f"| {name} | {len(same)} | {' | '.join(cells)} |")
    return "\n".join(lines) if runs else ""


def world_table(runs: Sequence[dict[str, Any]]) -> str:
    """RMSE between the biases and the oracle."""
    lines = [
        "| synthetic world | training ratings | biases, RMSE | this, RMSE | oracle, RMSE | this / oracle |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for run in runs:
        name, oracle = run["name"].removeprefix("world: "), run["baselines"]["oracle"]["rmse"]
        biases, test = run["baselines"]["biases"]["rmse"], run["test"]["rmse"]
        cells = (name, f"{run['num_train']:,}", f"{biases:.4f}", f"**{test:.4f}**", f"{oracle:.4f}")
        lines.append(f"| {' | '.join(cells)} | {test / oracle:.4f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
