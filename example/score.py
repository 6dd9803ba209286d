"""Score all users, or pairs of a user and an item, on any number of processes.

    ./run.sh score --data_path shop --users all --k 50 --output recs.parquet
    ./run.sh score --data_path shop --users some.csv --output recs.parquet
    ./run.sh score --data_path shop --pairs pairs.parquet --output scored.parquet

A file has the columns of ids that the data have, and is Parquet, CSV, Arrow or JSON lines. --output becomes a
folder of Parquet files, which pandas, DuckDB or Spark read as one table. The scores are those of serve.py. A
run that was interrupted continues with the files that are missing.
"""

from __future__ import annotations

import argparse
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING

import recsuite as rs
from recsuite.config.config import Config
from recsuite.files import local
from recsuite.runtime.console import LOGGER, showing_progress, stage
from recsuite.runtime.process import all_gather_object, raise_on_all

if TYPE_CHECKING:
    from recsuite.models.tasks import ModelMaker
    from recsuite.serving.scoring import BatchScoring


def main(argv: list[str] | None = None, model: ModelMaker | None = None) -> int:
    """Score, and return the exit status: 2 for a user's mistake. Collective: every rank.

    model: makes a model of your own, as for the training.
    """
    return rs.exit_status(lambda: score(parse(argv), model))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--save_dir", type=local, default=Path("dumps"), help="where the training wrote: dumps"
    )
    parser.add_argument("--checkpoint", choices=("best", "latest"), default="best", help="which one: best")
    parser.add_argument("--data_path", default="", help="the data of the training, if they were your own")
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--users", help='"all" those of the data, or a file with the column of their ids')
    rows.add_argument("--pairs", type=local, help="a file with the columns of users and items")
    parser.add_argument("--k", type=int, default=50, help="items for each user: 50")
    parser.add_argument("--output", type=local, required=True, help="the folder to write")
    return parser.parse_args(argv)


def score(flags: argparse.Namespace, model: ModelMaker | None = None) -> int:
    """Score this rank's share, and wait for the other ranks."""
    from recsuite.serving import scoring

    context = rs.init_runtime(Config.of())
    if context.rank:
        # Every rank reads the data; one of them says so.
        logging.getLogger(LOGGER).setLevel(logging.WARNING)
    try:
        with showing_progress():
            # First: the model and the data may take long to read.
            raise_on_all(lambda: scoring.check_free(flags.output))
            batch = raise_on_all(lambda: opened(flags, model))
            if line := batch.describe_inputs():
                context.say(line)
            partial = all_gather_object(
                lambda: None if context.rank else scoring.begin(flags.output, batch.job())
            )[0]
            if partial is None:
                context.say(f"{flags.output} is complete already: nothing was scored")
                return 0
            begun = time.monotonic()
            with stage("scoring", batch.count(), batch.noun, quiet=context.rank != 0) as done:
                batch.write(partial, context.rank, context.world_size, done)
            counts = all_gather_object(lambda: batch.counts)
            raise_on_all(lambda: None if context.rank else scoring.end(partial, flags.output))
        context.say(scoring.described(counts, flags.output, time.monotonic() - begun, batch.noun))
    finally:
        rs.cleanup_runtime()
    return 0


def opened(flags: argparse.Namespace, model: ModelMaker | None) -> BatchScoring:
    """Return the model with the data of its training, and the rows to score. Not collective."""
    from recsuite.serving.recommend import tell
    from recsuite.serving.scoring import BatchScoring

    served = rs.ServedModel.open(flags.save_dir, flags.checkpoint, model=model)
    tell(served, flags.data_path, str(flags.save_dir))
    if flags.pairs:
        return BatchScoring(served, flags.pairs, None)
    return BatchScoring(served, None if flags.users == "all" else local(flags.users), flags.k)


if __name__ == "__main__":
    rs.run_script(main)
