"""Score all users, or pairs of a user and an item, on any number of processes.

    ./run.sh score --data_path shop --users all --k 50 --output recs.parquet
    ./run.sh score --data_path shop --users some.csv --output recs.parquet
    ./run.sh score --data_path shop --pairs pairs.parquet --output scored.parquet
    ./run.sh score --data_path shop --users all --in_stock stock --at_most brand=2 --output recs.parquet

A file has the columns of ids that the data have, and is Parquet, CSV, Arrow or JSON lines. --output becomes a
folder of Parquet files, which pandas, DuckDB or Spark read as one table. The scores are those of serve.py, on
a GPU up to rounding. A run that was interrupted continues with the files that are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recsuite as rs
from recsuite.config.config import Config
from recsuite.datasets.schema import ITEM
from recsuite.errors import UserError, printable
from recsuite.files import local
from recsuite.places import folder_at
from recsuite.runtime.console import LOGGER, showing_progress, stage
from recsuite.runtime.process import RuntimeContext, all_gather_object, once_per_node, raise_on_all

if TYPE_CHECKING:
    from recsuite.extras.scoring import BatchScoring
    from recsuite.models.tasks import ModelMaker

NEW_ITEMS = ("as_trained", "exclude", "include")
# That ranks wait for each other: one may have far more files to write.
LONGEST = timedelta(days=2)
# Flags of `scoring.ListRules`.
RULES = ("candidates", "in_stock", "exclude", "at_most", "least_distance")


def main(argv: list[str] | None = None, model: ModelMaker | None = None) -> int:
    """Score, and return the exit status: 2 for a user's mistake. Collective: every rank.

    model: makes a model of your own, as for the training; without it, `make_model` of example.py.
    """

    def start() -> int:
        flags = parse(argv)
        if model is not None:
            return score(flags, model)
        # After the flags are checked: it imports torch.
        from example import make_model

        return score(flags, make_model)

    return rs.exit_status(start)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags of the command line."""
    kind = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=kind, allow_abbrev=False)
    parser.add_argument(
        "--save_dir",
        type=folder_at,
        default=Path("dumps/example"),
        help="where the training wrote: dumps/example",
    )
    parser.add_argument("--checkpoint", choices=("best", "latest"), default="best", help="which one: best")
    parser.add_argument("--data_path", default="", help="the data of the training, if they were your own")
    help_text = "use a model whose source has changed since"
    parser.add_argument("--accept_changed_model", action="store_true", help=help_text)
    help_text = "items that the training has not seen: exclude, include, or as_trained (default)"
    parser.add_argument("--new_items", choices=NEW_ITEMS, default=NEW_ITEMS[0], help=help_text)
    rows = parser.add_mutually_exclusive_group(required=True)
    rows.add_argument("--users", help='"all" those of the data, or a file with the column of their ids')
    rows.add_argument("--pairs", type=local, help="a file with the columns of users and items")
    parser.add_argument("--k", type=int, help="items for each user: 50")
    lists = parser.add_argument_group("rules of the lists of --users, before the best k items are taken")
    help_text = "a file with the column of the only items to list"
    lists.add_argument("--candidates", type=local, help=help_text)
    help_text = "a column of the items' table, yes or above 0 where an item may be listed"
    lists.add_argument("--in_stock", default="", metavar="COLUMN", help=help_text)
    help_text = "a file with columns of users and items, pairs that are not listed"
    lists.add_argument("--exclude", type=local, help=help_text)
    help_text = "such as brand=2,category=5: most items of a brand, and of a category, in a list"
    lists.add_argument("--at_most", action="append", default=[], metavar="FEATURE=N", help=help_text)
    help_text = "from 0 to 2: least 1 - cosine of an item and each that the user had"
    lists.add_argument("--least_distance", type=float, help=help_text)
    parser.add_argument("--output", type=local, required=True, help="the folder to write")
    flags = parser.parse_args(argv)
    if flags.pairs and flags.k is not None:
        raise UserError(f"--k {flags.k} is for --users; leave it out with --pairs.")
    if flags.pairs and (given := [name for name in RULES if getattr(flags, name) not in (None, "", [])]):
        raise UserError(f"--{given[0]} is for --users; leave it out with --pairs.")
    flags.at_most = caps_of(flags.at_most)
    return flags


def caps_of(given: Sequence[str]) -> dict[str, int]:
    """Return the number of each feature. given: values of --at_most.

    Raises:
        UserError: for what is no feature with a number, and for a feature that is there twice.
    """
    caps = dict[str, int]()
    for entry in ",".join(given).split(",") if given else ():
        name, _, number = entry.strip().rpartition("=")
        if not (name and number.isdecimal()):
            raise UserError(f"--at_most takes FEATURE=N, such as brand=2, and got {printable(entry)!r}.")
        if name in caps:
            raise UserError(f"--at_most has {printable(name)} twice; give it once.")
        caps[name] = int(number)
    return caps


def score(flags: argparse.Namespace, model: ModelMaker) -> int:
    """Score this rank's share, and wait for the other ranks."""
    import torch.distributed as dist

    import recsuite.extras.scoring as scoring

    context = rs.init_runtime(Config.of())
    if context.rank:
        # Every rank reads the data; one of them says so.
        logging.getLogger(LOGGER).setLevel(logging.WARNING)
    try:
        with showing_progress(), contextlib.ExitStack() as stack:
            # First: the model and the data may take long to read.
            raise_on_all(lambda: scoring.check_free(flags.output))
            lock = scoring.writing(flags.output)
            raise_on_all(lambda: None if context.rank else stack.enter_context(lock))
            # Ranks may have different amounts of work left.
            group = dist.new_group(backend="gloo", timeout=LONGEST)
            batch = read_on_all(flags, model, context, group)
            for line in (batch.use(context.device), batch.describe_inputs()):
                if line:
                    context.say(line)
            mine = batch.job()
            job = all_gather_object(lambda: mine, group)[0]
            raise_on_all(lambda: check_same(job, mine))
            partial = all_gather_object(lambda: None if context.rank else scoring.begin(flags.output, job))[0]
            if partial is None:
                context.say(f"{flags.output} is complete already: nothing was scored")
                return 0
            begun = time.monotonic()
            with stage("scoring", batch.count(), batch.noun, quiet=context.rank != 0) as done:
                batch.write(partial, context.rank, context.world_size, done)
            counts = all_gather_object(lambda: batch.counts, group)
            raise_on_all(lambda: None if context.rank else scoring.end(partial, flags.output))
        context.say(scoring.described(counts, flags.output, time.monotonic() - begun, batch.noun))
        if not flags.pairs and context.rank == 0:
            candidates = batch.rules.candidates if batch.rules else None
            context.say(scoring.describe_lists(flags.output, batch.model, candidates))
            if line := scoring.describe_short(flags.output, batch):
                context.say(line)
    finally:
        rs.cleanup_runtime()
    return 0


def read_on_all(
    flags: argparse.Namespace, model: ModelMaker, context: RuntimeContext, group: Any
) -> BatchScoring:
    """Return what `opened` does. Collective: every rank. group: all ranks, with a long deadline."""
    opened_here: list[BatchScoring] = []
    # One rank of a machine first: it may have to parse the tables, and writes files that the others read.
    work = "read the model and the data", "start with one process first"
    once_per_node(context, lambda: opened_here.append(opened(flags, model)), LONGEST.total_seconds(), *work)
    batch: BatchScoring = raise_on_all(lambda: opened_here[0] if opened_here else opened(flags, model), group)
    return batch


def check_same(first: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Refuse ranks that have read different models or data.

    Raises:
        UserError: names what differs.
    """
    for name, value in first.items():
        if mine[name] != value:
            raise UserError(f"The {name} changed while the ranks read it. Fix: start again.")


def opened(flags: argparse.Namespace, model: ModelMaker) -> BatchScoring:
    """Return the model with the data of its training, and the rows to score. Not collective."""
    from recsuite.extras.scoring import BatchScoring, ListRules
    from recsuite.serving.training_data import data_at

    accepts = flags.accept_changed_model
    served = rs.ServedModel.open(flags.save_dir, flags.checkpoint, "", model, accepts, flags.new_items)
    rules = ListRules(**{name: getattr(flags, name) for name in RULES})
    known = {feature.name for feature in served.snapshot.schema.features if feature.entity == ITEM}
    columns = [name for name in rules.columns if name not in known]
    served.tell(data_at(served.snapshot, flags.data_path, str(flags.save_dir), columns).features)
    if flags.pairs:
        return BatchScoring(served, flags.pairs, None)
    k = 50 if flags.k is None else flags.k
    return BatchScoring(served, None if flags.users == "all" else local(flags.users), k, rules)


if __name__ == "__main__":
    rs.run_script(main)
