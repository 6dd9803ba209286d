"""Measure a chain that retrieves by one model and ranks by two, beside each of them, and its latency.

    python benchmarks/chained.py --real FOLDER... [--write]     ml-100k too; docs/pipeline.json

Runs `example/pipeline.py` as a user does, with its defaults, and reads its output: HR@10 and NDCG@10 of the
newest rating of each user, and milliseconds under its clients.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import DOCS, EXAMPLE, bar, describe, finish, make_parser, mean, origin, spread, table
from peers import add_sets, data_sets

PIPELINE = EXAMPLE.with_name("pipeline.py")
PAGE = DOCS / "extras" / "pipeline.md"
PARTS = ("retriever", "ranker", "chain")
GAIN = 1.05


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    add_sets(parser, seeds=3)
    parser.add_argument(
        "--train", nargs="*", default=[], help="flags for both trainings, without their dashes"
    )
    finish("pipeline", parser.parse_args(), measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    given = [f"--{word}" if number % 2 == 0 else word for number, word in enumerate(flags.train)]
    runs = []
    with tempfile.TemporaryDirectory() as folder:
        for data in data_sets(flags, Path(folder)):
            for seed in range(flags.seeds):
                cache = Path(folder) / "columns" / data.name
                command = [
                    sys.executable,
                    PIPELINE,
                    "--data_path",
                    data,
                    "--cache_dir",
                    cache,
                    "--seed",
                    seed,
                ]
                done = subprocess.run(
                    [*map(str, command), *given], capture_output=True, text=True, check=True
                )
                runs.append({"data": data.name, "seed": seed, **read(done.stdout)})
    return {**describe(), "runs": runs}


def read(output: str) -> dict[str, Any]:
    """Figures in the output of a run, by their names."""
    rows = re.findall(
        r"^\| (retriever|ranker|chain)\b[^|]*\| ([\d.]+) \| +([\d.]+) \|$", output, re.MULTILINE
    )
    found: dict[str, Any] = {
        name: {"hr_at_10": float(hr), "ndcg_at_10": float(ndcg)} for name, hr, ndcg in rows
    }
    p50, p99 = re.findall(r"p50 ([\d.]+) ms, p99 ([\d.]+) ms", output)[0]
    return {**found, "p50_ms": float(p50), "p99_ms": float(p99)}


def gain_of(runs: list[dict[str, Any]]) -> float:
    """NDCG@10 of the chain over that of the better of its parts, of means over seeds."""
    *alone, chain = (mean(run[name]["ndcg_at_10"] for run in runs) for name in PARTS)
    return chain / max(alone)


def by_set(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs by the name of their set."""
    return {
        name: [run for run in runs if run["data"] == name] for name in dict.fromkeys(r["data"] for r in runs)
    }


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Gain of each set beside its bar."""
    gains = {name: gain_of(some) for name, some in by_set(result["runs"]).items()}
    return [
        bar(f"{name}, chain / better part", gain, GAIN, f"{gain:.3f}", f"{GAIN:g}")
        for name, gain in gains.items()
    ]


def render(result: dict[str, Any]) -> str:
    """Table and origin."""
    parts = [f"{name}, NDCG@10" for name in PARTS]
    heads = ["ratings", "seeds", *parts, "chain / better part", "p50, p99 of 8 clients"]
    lines = []
    for name, runs in by_set(result["runs"]).items():
        values = [spread([run[part]["ndcg_at_10"] for run in runs]) for part in PARTS]
        times = " / ".join(f"{mean(run[p] for run in runs):.0f} ms" for p in ("p50_ms", "p99_ms"))
        lines.append([name, str(len(runs)), *values, f"{gain_of(runs):.3f}", times])
    return f"{table(heads, lines)}\n\n{origin(result)}"


if __name__ == "__main__":
    main()
