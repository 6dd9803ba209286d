"""Make the picture and the table of docs/quality.md.

    python benchmarks/results.py [--write]                                    synthetic ratings
    python benchmarks/results.py --real FOLDER_OF_ML_LATEST_SMALL [--write]   and real ones

Trains with the defaults, two processes a run; with --write it writes docs/results.json, docs/curves.png and
the part of docs/quality.md between the result marks.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import DOCS, describe_machine, finish, make_parser, origin, table, train, training_seconds

NUM_RANKS = 2
PAGE = DOCS / "quality.md"


def main() -> None:
    """Train and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, help="folder that holds ml-latest-small")
    finish("results", parser.parse_args(), measure, None, render, PAGE, draw, picture="curves")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Return the reports of all trainings."""
    runs = {"synthetic, newest 20 %": report_of("--dataset", "synthetic")}
    if flags.real:
        data = ("--data_path", flags.real)
        random = ("--split", "random", "--test_fraction", "0.1")
        runs["ml-latest-small, newest 20 %"] = report_of(*data)
        runs["ml-latest-small, random 10 %"] = report_of(*data, *random)
    return runs


def draw(runs: dict[str, Any], path: Path) -> None:
    """Write the curve of the validation RMSE of the first run, with the test and the baselines."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot, which looks for a display and keeps every figure until it is closed.
    report = next(iter(runs.values()))
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    name = report["main_metric"]
    # The initial rows are epoch 0.
    points = [(0, report["initial"])] * bool(report["initial"])
    points += [(each["epoch"], each["validation"]) for each in report["epochs"]]
    numbers, values = zip(*((epoch, metrics[name]) for epoch, metrics in points), strict=True)
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


def report_of(*flags: object) -> dict[str, Any]:
    """Report of one training, without paths of this machine."""
    report: dict[str, Any] = train(*flags, ranks=NUM_RANKS)
    report["data"]["source"] = Path(report["data"]["source"]).name
    for name in ("data_path", "report_dir", "cache_dir"):
        del report["config"][name]
    report["machine"] = describe_machine()
    return report


def render(runs: dict[str, Any]) -> str:
    """Table and origin."""
    lines = []
    for name, run in runs.items():
        baselines = run["baselines"]
        cells = [f"{baselines[of]['rmse']:.4f}" for of in ("global mean", "biases")]
        oracle = f"{baselines['oracle']['rmse']:.4f}" if "oracle" in baselines else "not known"
        training = f"{training_seconds(run):.0f} s"
        lines.append([name, *cells, f"**{run['test']['rmse']:.4f}**", oracle, training])
    heads = ["test ratings", "global mean", "biases", "this model", "oracle", "training"]
    epochs = ", ".join(str(len(run["epochs"])) for run in runs.values())
    run = next(iter(runs.values()))
    about = (
        f"RMSE in stars, {epochs} epochs, {run['world_size']} processes on {run['device']}, seed "
        f"{run['config']['seed']}; {origin(run, fbgemm=True)}."
    )
    return f"{table(heads, lines)}\n\n{about}"


if __name__ == "__main__":
    main()
