"""Make the picture and the table of docs/quality.md.

    python benchmarks/results.py                                    the synthetic ratings
    python benchmarks/results.py --real FOLDER_OF_ML_LATEST_SMALL   and real ones

Trains with the defaults, two processes a run, and writes docs/results.json, docs/curves.png and the part of
docs/quality.md between the result marks. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from environment import DOCS, EXAMPLE, describe_machine, in_words, torchrun, write_between

NUM_RANKS = 2
PAGE = DOCS / "quality.md"
MARKS = ("<!-- results: made by benchmarks/results.py -->", "<!-- end of results -->")


def main() -> None:
    """Run, write, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--real", type=Path, help="folder that holds ml-latest-small")
    real = parser.parse_args().real
    runs = {"synthetic, newest 20 %": train(["--dataset", "synthetic"], DOCS / "curves.png")}
    if real:
        runs["ml-latest-small, newest 20 %"] = train(["--data_path", str(real)])
        random = ["--split", "random", "--test_fraction", "0.1"]
        runs["ml-latest-small, random 10 %"] = train(["--data_path", str(real), *random])
    (DOCS / "results.json").write_text(json.dumps(runs, indent=1) + "\n")
    text = render(runs)
    write_between(PAGE, MARKS, text)
    print(text)


def train(flags: list[str], picture: Path | None = None) -> dict[str, Any]:
    """The report of one run, without what is only of interest on the machine that made it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*torchrun(NUM_RANKS), str(EXAMPLE), "--report_dir", folder, *flags]
        # What torchrun sets as well, but with a warning; each rank chooses its number of threads itself.
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        report = json.loads((Path(folder) / "metrics.json").read_text())
    report["data"]["source"] = Path(report["data"]["source"]).name
    if picture:
        draw(report, picture)
    for name in ("data_path", "report_dir", "cache_dir"):
        del report["config"][name]
    report["machine"] = describe_machine()
    return report


def draw(report: dict[str, Any], path: Path) -> None:
    """Write the curve of the validation RMSE, with the test and the baselines, from metrics.json."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which looks for a display and keeps every figure until it is closed.
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    epochs, name = report["epochs"], report["main_metric"]
    numbers, values = zip(*((each["epoch"], each["validation"][name]) for each in epochs), strict=True)
    axes.plot(numbers, values, "o-", color="C0", label="validation, after the epoch")
    best, test = report["test_epoch"], report["test"][name]
    label = f"test, after epoch {best}: {test:.4f}"
    axes.plot([best], [test], "*", color="C1", markersize=12, label=label)
    for (baseline, metrics), style in zip(report["baselines"].items(), (":", "--", "-."), strict=False):
        color = "C2" if baseline == "oracle" else "C3"
        label = f"{baseline}, test: {metrics[name]:.4f}"
        axes.axhline(metrics[name], color=color, linestyle=style, label=label)
    # Values above all baselines would leave little room for the others.
    axes.set_ylim(top=max(metrics[name] for metrics in report["baselines"].values()) * 1.02)
    axes.set(xlabel="epoch", ylabel=f"{report['metrics'][name]} of {report['events']}")
    axes.set_title(report["data"]["source"])
    axes.legend()
    figure.savefig(path)


def render(runs: dict[str, Any]) -> str:
    """The table, and the line that says where it comes from."""
    lines = [
        "| test ratings | global mean | biases | this model | oracle | training |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, run in runs.items():
        baselines, last = run["baselines"], run["test"]
        oracle = f"{baselines['oracle']['rmse']:.4f}" if "oracle" in baselines else "not known"
        seconds = sum(epoch["seconds"] for epoch in run["epochs"])
        lines.append(
            f"| {name} | {baselines['global mean']['rmse']:.4f} | {baselines['biases']['rmse']:.4f} | "
            f"**{last['rmse']:.4f}** | {oracle} | {seconds:.0f} s |"
        )
    epochs = ", ".join(str(len(run["epochs"])) for run in runs.values())
    run = next(iter(runs.values()))
    lines += [
        "",
        f"RMSE in stars, {epochs} epochs, {run['world_size']} processes on {run['device']}, seed "
        f"{run['config']['seed']}; {in_words(run)}",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
