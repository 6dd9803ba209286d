"""Measure exports with a graph: equality with the server, the loss of NDCG by short rows, and time.

    python benchmarks/export.py --data_path FOLDER [--write]      a data set of ratings or clicks: two minutes

Trains a ranking model, exports it to ONNX with rows of each type, and ranks the test with the rounded rows.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from common import DOCS, ROOT, bar, describe, finish, make_parser, origin, table, torchrun

from example import make_model
from recsuite.config.sections import CheckpointConfig
from recsuite.extras.chain.cases import cases_of_models
from recsuite.extras.graph.flags import ROW_TYPES, GraphConfig
from recsuite.serving.export import MODEL, export
from recsuite.serving.served import ServedModel

if TYPE_CHECKING:
    from onnx_client import Client

PAGE = DOCS / "serving.md"
# Of scores, relative to those above 1: sums in another order round differently.
TOLERANCE = 1e-6
# Share of NDCG@10 that rows of int8 may lose.
MOST_LOST = 0.02
SIZES, NUMBERS, SECONDS = (1, 256), ("1 event", "256 events"), 1.0


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__, "onnx", "onnxruntime", "onnxscript")
    parser.add_argument("--data_path", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    finish("export", parser.parse_args(), measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    sys.path.append(str(ROOT / "example"))
    from onnx_client import Client

    with tempfile.TemporaryDirectory() as name:
        folder, data = Path(name), flags.data_path
        training = ("--task", "ranking", "--split", "leave_one_out", "--epochs", flags.epochs, "--dump")
        places = ("--data_path", data, "--save_dir", folder / "dumps", "--cache_dir", folder / "columns")
        command = [*torchrun(1), ROOT / "example" / "example.py", *training, *places]
        subprocess.run([*map(str, command)], check=True, stdout=subprocess.DEVNULL)
        rows = []
        for row_type in ROW_TYPES:
            target = folder / row_type
            wanted = GraphConfig(format="onnx", row_type=row_type)
            export(CheckpointConfig(save_dir=str(folder / "dumps")), target, make_model, extras=[wanted])
            rows.append({"rows": row_type, "bytes": (target / MODEL).stat().st_size})
            model, client = (
                ServedModel.open(folder / "dumps", model=make_model, data_path=data),
                Client(target),
            )
            for table, held in model.snapshot.tables.items():
                rows_of = client.looked_up(table, np.arange(len(held.matrix)))
                held.matrix.copy_(torch.from_numpy(rows_of))
            *_, test = cases_of_models([model], str(data))
            rows[-1] |= {"test": test.metrics(model.recommend)["ndcg_at_10"], "cases": len(test.items)}
            rows[-1] |= compared(model, client, test)
        return {"about": describe(), "data": data.name, "types": rows}


def compared(model: ServedModel, client: Client, test: Any) -> dict[str, Any]:
    """The largest difference of scores between a client and a server with the same rows, and their times."""
    found: dict[str, Any] = {"difference": 0.0, "client_ms": [], "server_ms": []}
    item = model.snapshot.schema.item
    for size in SIZES:
        asked = {**{name: given[:size] for name, given in test.values.items()}, item: test.items[:size]}
        values = {name: [*given] for name, given in model._completed(asked).items()}
        ours, theirs = model.score(values).numpy(), client.score(values)
        differs = np.abs(ours - theirs) / np.maximum(1, np.abs(ours))
        found["difference"] = max(found["difference"], float(differs.max()))
        found["client_ms"].append(milliseconds(client.score, values))
        found["server_ms"].append(milliseconds(model.score, values))
    return found


def milliseconds(work: Callable[..., Any], values: Any) -> float:
    """Median milliseconds of a call."""
    took: list[float] = []
    while sum(took) < SECONDS:
        begin = time.perf_counter()
        work(values)
        took.append(time.perf_counter() - begin)
    return 1000 * sorted(took)[len(took) // 2]


def render(result: dict[str, Any]) -> str:
    """A row for each type."""
    heads = ["rows", "MiB", "test NDCG@10", *(f"onnxruntime, ms for {number}" for number in NUMBERS)]
    heads += [f"ServedModel, ms for {number}" for number in NUMBERS]
    rows = [
        (
            each["rows"],
            f"{each['bytes'] / 2**20:.1f}",
            f"{each['test']:.4f}",
            *(f"{value:.2f}" for value in (*each["client_ms"], *each["server_ms"])),
        )
        for each in result["types"]
    ]
    about = f"{result['data']}, {result['types'][0]['cases']:,} test events, leave one out"
    return f"{table(heads, rows)}\n\n{about}; measured on {origin(result['about'])}."


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The bars: the scores of a server, and the loss by int8."""
    exact, *_, short = result["types"]
    worst = max(each["difference"] for each in result["types"])
    lost = 1 - short["test"] / exact["test"]
    return [
        bar("largest difference", worst, TOLERANCE, f"{worst:.1e}", f"{TOLERANCE:g}", at_most=True),
        bar("NDCG@10 lost by int8", lost, MOST_LOST, f"{lost:.2%}", f"{MOST_LOST:.0%}", at_most=True),
    ]


if __name__ == "__main__":
    main()
