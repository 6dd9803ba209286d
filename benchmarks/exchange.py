"""Count the bytes that ranks send each other in a step of TorchRec's tables: ids, rows and gradients of rows.

    python benchmarks/exchange.py --write       docs/exchange.json: ten minutes on two cores
    python benchmarks/exchange.py --ranks 2 --ratings 20000 --items 20000 --batch 256 --steps 2

The default model on 2, 3 and 8 ranks of one machine, which exchange through gloo. Data: synthetic ratings,
with as many items as those of MovieLens, by fixed and by dynamic ids; and ratings of a million items, as
popular as the others. What each collective sends to other ranks is counted, with each id of a batch requested
and with distinct ones, and compared with `./run.sh plan`. Not counted are messages with the sizes of others,
below a kilobyte. "Sums of lists" are computed from the batches: bytes if an owner returned its weighted sum
of the rows of a list, and not the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import bar, comma_separated, describe, finish, make_parser
from teams import Job, Team, take_answers, teams
from train_here import DEFAULT, Here, columns_of, make_columns, serve_rank

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import markdown_table
from recsuite.runtime.process import RuntimeContext

MOVIELENS, DYNAMIC, LARGE = "as many items as MovieLens", "the same, dynamic", "a million items"
FLAGS: dict[str, dict[str, Any]] = {
    MOVIELENS: {},
    DYNAMIC: {"vocabulary": "dynamic", "capacity": "10000"},
    LARGE: {},
}
EACH, DISTINCT, SUMS = "each id", "distinct ids", "sums of lists"
KINDS = ("ids", "rows", "gradients")
# Users of the ratings of a million items.
USERS = 100_000
# With each id of a list its weight in the sum.
BYTES_OF_A_LISTED_ID = 8 + 4


def main() -> None:
    """Count and show, and write if that is asked for; or be a rank."""
    if sys.argv[1:2] == ["rank"]:
        serve_counted(*sys.argv[2:])
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=comma_separated(int), default=[2, 3, 8], help="numbers of ranks")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="of each data set")
    parser.add_argument("--items", type=int, default=1_000_000, help="of the largest data set")
    parser.add_argument("--batch", type=int, default=2048, help="ratings of each rank")
    parser.add_argument("--steps", type=int, default=3, help="that are counted")
    finish("exchange", parser.parse_args(), measure, judge, render)


def opened(folder: Path, data: str) -> tuple[Columns, Config]:
    """Return a data set and the flags of its training."""
    if data == LARGE:
        return columns_of(folder, DEFAULT), DEFAULT.config.replaced(cpu_tables="torchrec")
    config = Config.of(data_path=str(folder), cpu_tables="torchrec", **FLAGS[data])
    return open_columns(config), config


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Mean bytes of a rank in a step, by data, number of ranks and what is requested."""
    found: dict[str, Any] = {data: {} for data in FLAGS}
    differences = []
    with tempfile.TemporaryDirectory(prefix="exchange-") as name:
        small, large = Path(name) / "small", Path(name) / "large"
        write_synthetic(small, flags.ratings, seed=0)
        large.mkdir()
        make_columns(large, USERS, flags.items, flags.ratings, replace(DEFAULT, num_ratings=flags.ratings))
        for data, of_data in found.items():
            folder = large if data == LARGE else small
            columns, config = opened(folder, data)
            for ranks in flags.ranks:
                planned, sums = of_plan(
                    columns, config.replaced(local_batch_size=flags.batch), ranks, flags.steps
                )
                sent = {}
                with teams({"": Team("exchange.py", ranks, "rank", str(folder), data)}) as started:
                    for variant in (EACH, DISTINCT):
                        job = Job(variant, flags.batch, steps=flags.steps)
                        sent[variant] = np.array(started[""].ask("parts", job)["sent"])
                differences.append(float(abs(sent[DISTINCT] - planned).max()))
                if data != DYNAMIC:
                    sent[SUMS] = sums()
                of_data[str(ranks)] = {
                    variant: dict(zip(KINDS, one.mean(0).tolist(), strict=True))
                    for variant, one in sent.items()
                }
    return {
        **describe(),
        "batch": flags.batch,
        "bytes": found,
        "largest difference to the plan": max(differences),
    }


def of_plan(
    columns: Columns, config: Config, ranks: int, steps: int
) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
    """Return the bytes of a step by the plan, float64 [ranks, KINDS], and a function for sums of lists."""
    from example import make_model
    from recsuite.config.sections import MAX_EMBEDDING_DIM
    from recsuite.extras import plan
    from recsuite.sharding.table_rules import RowWiseAdagrad

    cluster, _, _ = plan.parse(["--procs_per_host", str(ranks)])
    ids = {table.name: 1.0 for table in columns.tables}
    tables = plan.trained_tables(columns, config, RowWiseAdagrad(1.0), ids, make_model)(
        cluster, MAX_EMBEDDING_DIM
    )
    found = plan.find_plan(tables, cluster, {})
    assert found is not None
    batches = plan.first_batches(columns, config, ranks, steps)
    lists = [table.name for table in columns.tables if table.feature.multi]
    planned = np.mean([plan.sent(tables, found, batch) for batch in batches], axis=0)
    return planned, lambda: np.mean([sent_as_sums(tables, found, batch, lists) for batch in batches], axis=0)


def sent_as_sums(tables: Any, found: Any, features: Sequence[Any], lists: Sequence[str]) -> np.ndarray:
    """Return the bytes of a step in which each owner sums the rows of a list, float64 [ranks, KINDS]."""
    import torch

    from recsuite.extras import plan

    positions = [place for place, name in enumerate(features[0].keys()) if name not in lists]
    # With the lengths of all features.
    total = plan.sent(tables, found, [batch.permute(positions) for batch in features])
    for rank, batch in enumerate(features):
        for name in lists:
            shards = found.tables[name].sharding_spec.shards
            first_rows = torch.tensor([shard.shard_offsets[0] for shard in shards[1:]], dtype=torch.int64)
            owners = torch.tensor([shard.placement.rank() for shard in shards])
            owner = owners[torch.bucketize(batch[name].values(), first_rows, right=True)]
            event = torch.arange(batch.stride()).repeat_interleave(batch[name].lengths())
            # Sums of each owner.
            counts = (
                (event * len(total) + owner).unique().remainder(len(total)).bincount(minlength=len(total))
            )
            counts[rank] = 0
            row_bytes = 4 * tables.widths[name]
            total[rank, 0] += BYTES_OF_A_LISTED_ID * int((owner != rank).sum())
            total[:, 1] += row_bytes * counts.numpy()
            total[rank, 2] += row_bytes * int(counts.sum())
    return total


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure."""
    difference = result["largest difference to the plan"]
    return [
        bar(
            "counted bytes and those of the plan",
            float(difference == 0),
            1,
            f"differ by {difference:g}",
            "equal",
        )
    ]


def render(result: dict[str, Any]) -> str:
    """Return a table of megabytes."""
    lines = [["data", "ranks", "requested", *KINDS, "all, MB"]]
    for data, by_ranks in result["bytes"].items():
        for ranks, variants in by_ranks.items():
            for variant, sent in variants.items():
                cells = [f"{size / 1e6:.3f}" for size in (*sent.values(), sum(sent.values()))]
                lines.append([data, ranks, variant, *cells])
    return markdown_table(lines)


class Counted(Here):
    """Training of the example that counts what it sends. variant: `EACH` or `DISTINCT`."""

    def __init__(self, columns: Columns, context: RuntimeContext, config: Config, variant: str) -> None:
        from recsuite.sharding.torchrec_tables import DistinctTables

        super().__init__(columns, context, config)
        for module in self.state.model.modules():
            if isinstance(module, DistinctTables):
                module._use_index_dedup = variant == DISTINCT

    def parts(self, number: int, batch_size: int) -> dict[str, Any]:
        """Return the mean bytes of a step that each rank sends to others, "sent": [ranks, KINDS]."""
        from recsuite.runtime.process import all_gather_object

        with counted(self.context.rank) as sent:
            self.steps(number, batch_size)
        mine = [sent[kind] / number for kind in KINDS]
        return {"sent": all_gather_object(lambda: mine)}


@contextlib.contextmanager
def counted(rank: int) -> Iterator[dict[str, int]]:
    """Count the bytes that a rank sends to others in a block, by kind."""
    import torch
    import torch.distributed as dist

    sent, real = dict.fromkeys(KINDS, 0), dist.all_to_all_single

    def exchange(
        output: Any, input: Any, output_splits: Any = None, input_splits: Any = None, **others: Any
    ) -> Any:
        splits = others.pop("input_split_sizes", input_splits)
        received = others.pop("output_split_sizes", output_splits)
        # Without these it is a message with sizes.
        if splits is not None:
            is_backward = torch._C._current_graph_task_id() != -1
            kind = KINDS[input.is_floating_point() + is_backward]
            row_bytes = input.element_size() * (input[:1].numel() if len(input) else 0)
            sent[kind] += row_bytes * (sum(splits) - splits[rank])
        return real(output, input, received, splits, **others)

    with mock.patch.object(dist, "all_to_all_single", exchange):
        yield sent


def serve_counted(folder: str, data: str) -> None:
    """Serve the jobs of a rank."""
    answers = take_answers()
    columns, config = opened(Path(folder), data)
    serve_rank(answers, config, lambda context, name: Counted(columns, context, config, name))


if __name__ == "__main__":
    main()
