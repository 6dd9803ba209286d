"""Measure checkpoints in an object store beside those on a disk, in one run.

    python benchmarks/object_store.py [--write]          with moto's server on this machine
    python benchmarks/object_store.py --url s3://bucket/x    a store of your own

One process writes and loads the tables of a model in turns. moto is a server in Python without a disk, and
slower than this library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from checkpoint import forget
from common import DOCS, Result, describe, finish, make_parser, origin, require, table
from gpu_sections import two_tables
from train_here import MLP_DIMS, columns_of, make_columns

from example import make_model
from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.checkpointer import Checkpointer
from recsuite.checkpoint.folder import writing
from recsuite.checkpoint.format import VOCABULARY
from recsuite.checkpoint.restore import restore
from recsuite.config.config import Config
from recsuite.datasets.schema import SCHEMA_FILE
from recsuite.places import folder_at
from recsuite.runtime.process import init_runtime
from recsuite.training.progress import Progress
from recsuite.training.state import build_train_state

PAGE = DOCS / "extras" / "object_stores.md"
DIM, BUCKET = 64, "bucket"


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__, "s3fs")
    parser.add_argument("--rows", type=int, default=400_000, help="of the larger of two tables")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--url", help="a place in a store; by default moto's server on this machine")
    finish("object_store", parser.parse_args(), measure, None, render, PAGE)


def measure(flags: argparse.Namespace) -> Result:
    """Seconds of each round in each place."""
    if not flags.url:
        require("boto3", "moto")
    context = init_runtime(Config())
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        url = flags.url or stack.enter_context(moto(folder))
        made = folder / "columns"
        made.mkdir()
        model = two_tables(DIM, MLP_DIMS, 4096, 100_000)
        make_columns(made, flags.rows, 1_000, model.num_ratings, model)
        for each in (VOCABULARY, SCHEMA_FILE):
            # A checkpoint copies them; there are no raw values.
            (made / each).write_text("{}")
        columns = columns_of(made, model)
        places = {"disk": str(folder / "dumps"), "store": f"{url.rstrip('/')}/{os.getpid()}"}
        seconds: dict[str, list[float]] = {}
        for step in range(1, flags.rounds + 1):
            for where, place in places.items():
                config = model.config.replaced(dump=True, save_dir=place)
                state = build_train_state(columns, config, context, make_model)
                save_dir = folder_at(place)
                with writing(save_dir):
                    pass
                checkpointer = Checkpointer(None, "benchmark", columns, config, context)
                checkpointer.begin(state, checkpointer.start)
                writer = checkpointer.writer
                progress = Progress(step, 0, step)
                timed(seconds, f"{where}, dump", partial(writer.write_full, progress))
                checkpointer.close()
                chain = chain_at(save_dir)
                num_bytes = sum(path.stat().st_size for path in chain.base.iterdir())
                if where == "disk":
                    forget(chain.base, context)
                timed(seconds, f"{where}, load", partial(restore, chain, state, columns, context))
        folder_at(places["store"]).remove()  # type: ignore[attr-defined]
    return {"about": describe(), "bytes": num_bytes, "store": flags.url or "moto", "seconds": seconds}


def timed(seconds: dict[str, list[float]], name: str, action: Callable[[], Any]) -> None:
    """Add the seconds of an action."""
    began = time.perf_counter()
    action()
    seconds.setdefault(name, []).append(time.perf_counter() - began)


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[str]:
    """moto's server with an empty bucket, which the environment of this process names."""
    import boto3

    log = folder / "moto.txt"
    with log.open("w") as file:
        server = subprocess.Popen([sys.executable, "-m", "moto.server", "-p0"], stdout=file, stderr=file)
    try:
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()
            time.sleep(0.1)
        os.environ |= {
            "AWS_ENDPOINT_URL": found[0],
            "AWS_ACCESS_KEY_ID": "any",
            "AWS_SECRET_ACCESS_KEY": "any",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        yield f"s3://{BUCKET}/run"
    finally:
        server.kill()
        server.wait()


def render(result: Result) -> str:
    """Table and origin."""
    lines = []
    for what in ("dump", "load"):
        rates = [
            result["bytes"] / statistics.median(result["seconds"][f"{where}, {what}"]) / 1e6
            for where in ("disk", "store")
        ]
        lines.append([f"{what} of {result['bytes'] / 1e6:,.0f} MB", *(f"{rate:,.0f}" for rate in rates)])
    about = f"One process, tables of {DIM}; medians of {len(result['seconds']['disk, dump'])} rounds"
    return f"{table(['MB/s', 'disk', result['store']], lines)}\n\n{about}; {origin(result['about'])}."


if __name__ == "__main__":
    main()
