"""Measure what retrieving by one model and ranking by two is worth beside each of them, and how long it
takes.

    python benchmarks/chained.py --real FOLDER... [--write]     ml-100k too; docs/pipeline.json

Runs `example/pipeline.py` as a user does, with its defaults, and reads what it prints: HR@10 and NDCG@10 of
the newest rating of each user, and milliseconds under its clients. Measures; asserts nothing.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from environment import DOCS, EXAMPLE, describe, finish, make_parser
from figures import bar, mean, origin, spread, table
from movielens_100k import write_movielens_100k

PIPELINE = EXAMPLE.with_name("pipeline.py")
PAGE, MARKS = DOCS / "pipeline.md", ("<!-- pipeline -->", "<!-- end of pipeline -->")
PARTS = ("retriever", "ranker", "chain")
GAIN = 1.05


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--only_real", action="store_true", help="leave ml-100k out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--train", nargs="*", default=[], help="flags for both trainings, without their dashes"
    )
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = list(measure([*flags.real], Path(folder), flags))
    result = {**describe(), "runs": runs, "bars": judge(runs)}
    finish("pipeline", result, render(result), flags, page=PAGE, marks=MARKS)


def measure(sets: list[Path], folder: Path, flags: Any) -> Iterator[dict[str, Any]]:
    """What each run of the script says."""
    if not flags.only_real:
        write_movielens_100k(folder / "ml-100k")
        sets = [*sets, folder / "ml-100k"]
    for data in sets:
        for seed in range(flags.seeds):
            places = ("--data_path", data, "--cache_dir", folder / "columns" / data.name, "--seed", seed)
            given = [f"--{word}" if number % 2 == 0 else word for number, word in enumerate(flags.train)]
            command = [sys.executable, PIPELINE, *places, *given]
            done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True)
            yield {"data": data.name, "seed": seed, **read(done.stdout)}


def read(output: str) -> dict[str, Any]:
    """The figures of a run by their names."""
    rows = re.findall(
        r"^\| (retriever|ranker|chain)\b[^|]*\| ([\d.]+) \| +([\d.]+) \|$", output, re.MULTILINE
    )
    found: dict[str, Any] = {
        name: {"hr_at_10": float(hr), "ndcg_at_10": float(ndcg)} for name, hr, ndcg in rows
    }
    p50, p99 = re.findall(r"p50 ([\d.]+) ms, p99 ([\d.]+) ms", output)[0]
    return {**found, "p50_ms": float(p50), "p99_ms": float(p99)}


def gain_of(runs: list[dict[str, Any]]) -> float:
    """The NDCG@10 of the chain over that of the better of its parts, of the means over seeds."""
    *alone, chain = (mean(run[name]["ndcg_at_10"] for run in runs) for name in PARTS)
    return chain / max(alone)


def by_set(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs by the name of their set."""
    return {
        name: [run for run in runs if run["data"] == name] for name in dict.fromkeys(r["data"] for r in runs)
    }


def judge(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The gain of each set beside what it is to be."""
    gains = {name: gain_of(some) for name, some in by_set(runs).items()}
    return [
        bar(f"{name}, chain / better part", gain, GAIN, f"{gain:.3f}", f"{GAIN:g}")
        for name, gain in gains.items()
    ]


def render(result: dict[str, Any]) -> str:
    """The table of the page."""
    lines = [
        [
            "ratings",
            "seeds",
            *(f"{name}, NDCG@10" for name in PARTS),
            "chain / better part",
            "p50, p99 of 8 clients",
        ]
    ]
    lines.append(["---", *["---:"] * (len(lines[0]) - 1)])
    for name, runs in by_set(result["runs"]).items():
        values = [spread([run[part]["ndcg_at_10"] for run in runs]) for part in PARTS]
        times = " / ".join(f"{mean(run[p] for run in runs):.0f} ms" for p in ("p50_ms", "p99_ms"))
        lines.append([name, str(len(runs)), *values, f"{gain_of(runs):.3f}", times])
    return f"{table(lines)}\n\n{origin(result)}"


if __name__ == "__main__":
    main()
