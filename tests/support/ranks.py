"""Program of each rank of a launch in `test_ranks.py` and `test_ranks_on_gpus.py`.

python ranks.py RESULTS DATA GLOBAL_BATCH_SIZE
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, end_process, init_runtime
from tests.support.trainings import feed_of

EPOCHS = 3


def main() -> None:
    """Evaluate and train in several ways; rank 0 writes what came of it."""
    results, data, global_batch_size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    context = init_runtime(Config())
    config = Config.of(data_path=data, batch_size=global_batch_size, epochs=EPOCHS)
    found = collect(config, context)
    cleanup_runtime()
    if context.rank == 0:
        results.write_text(json.dumps(found))


def collect(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """Metrics of fixed weights, losses of both loops, and what the pool gave.

    Each worker is a Python that starts. So one rank alone combines each loop with and without a pool; others
    take the two combinations that have nothing in common.
    """
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.runtime.process import once_per_node
    from recsuite.sharding import plan as sharding

    once_per_node(context, lambda: open_columns(config), deadline=60)
    columns = open_columns(config)
    found: dict[str, Any] = {name: {} for name in ("metrics", "losses", "tests")}
    found["world_size"] = context.world_size
    # Far from the mean, so that the metrics would show a row in the wrong place.
    sharding.INIT_STD, small = 0.4, sharding.INIT_STD
    alone = context.world_size == 1
    for num_workers in (0, 2) if alone else (0,):
        metrics = evaluate_fresh(columns, config.replaced(num_workers=num_workers), context)
        found["metrics"][str(num_workers)] = metrics
    sharding.INIT_STD = small
    others = (("plain", 1), ("sparse_dist", 0)) if alone else ()
    for pipeline, num_workers in (("plain", 0), ("sparse_dist", 1), *others):
        chosen = config.replaced(pipeline=pipeline, num_workers=num_workers)
        losses, metrics, sums = train_all(columns, chosen, context)
        found["losses"][f"{pipeline} {num_workers}"] = losses
        found["tests"][f"{pipeline} {num_workers}"] = metrics
        found["sums"] = sums
    found["rules"] = train_rules(columns, config.replaced(epochs=1), context)
    found["widths"] = train_widths(config, context)
    found["learned weights"] = train_learned_weights(columns, config, context)
    found["sequences"] = {ids: train_sequence(config, ids, context) for ids in ("fixed", "dynamic")}
    found["ranking"] = rank_all(columns, config, context, std=0.4)
    found["tied"] = rank_all(columns, config, context, std=0)
    found["pipelined_modules"] = count_pipelined_modules(columns, config, context)
    return found


def train_rules(columns: Any, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """The losses, and `sums_of`, by optimizer of tables of several widths."""
    from recsuite.sharding.table_rules import SGD, Adagrad, Adam, RowWiseAdam
    from tests.support.several_widths import several_widths

    # As large as they can be: after few steps a wrong sum over the ranks must show.
    rules = (SGD(4.0), Adagrad(0.1), Adam(0.05), RowWiseAdam(0.05))
    return {
        rule.name: train_all(columns, config, context, rule, several_widths, False)[::2] for rule in rules
    }


def train_widths(config: Config, context: RuntimeContext) -> dict[str, Any]:
    """The losses and `sums_of`, by whose step it is, of static and of dynamic tables of several widths."""
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.runtime.process import once_per_node
    from tests.support.several_widths import several_widths

    found: dict[str, Any] = {}
    for ids in ("fixed", "dynamic"):
        of_ids = config.replaced(epochs=1, lr=0.1, vocabulary=ids, pipeline="sparse_dist")
        columns = once_per_node(context, partial(open_columns, of_ids), deadline=60)[context.rank]
        found[ids] = {}
        for tables in ("vectorised", "torchrec"):
            chosen = of_ids.replaced(cpu_tables=tables)
            (losses,), _, sums = train_all(columns, chosen, context, None, several_widths, False)
            found[ids][tables] = {"losses": losses, "sums": sums}
    return found


def train_learned_weights(columns: Any, config: Config, context: RuntimeContext) -> dict[str, Any]:
    """The losses, and `sums_of`, by pipeline, of a ranking that learns weights of a history."""
    from recsuite.config import sections

    # Of 480 events: a group has events of two ranks, whether there are two or three.
    in_batch_negatives, sections.IN_BATCH_NEGATIVES = sections.IN_BATCH_NEGATIVES, 96
    flags = {"history_weights": "learned", "mlp_dims": (), "batch_size": 480}
    config, found = config.replaced(task="ranking", epochs=1, **flags), {}
    for pipeline in ("plain", "sparse_dist"):
        chosen = config.replaced(pipeline=pipeline)
        losses, _, sums = train_all(columns, chosen, context, evaluates=False)
        found[pipeline] = {"losses": losses, "sums": sums}
    sections.IN_BATCH_NEGATIVES = in_batch_negatives
    return found


def train_sequence(config: Config, ids: str, context: RuntimeContext) -> dict[str, Any]:
    """The losses and metrics of a model of sequences, plain, and with TorchRec's pipeline and tables."""
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.runtime.process import once_per_node

    flags = {"history": 10, "negatives": 64, "embedding_dim": 8, "split": "leave_one_out", "vocabulary": ids}
    config = config.replaced(task="sequence", epochs=1, **flags)
    columns = once_per_node(context, lambda: open_columns(config), deadline=60)[context.rank]
    of_torchrec = config.replaced(cpu_tables="torchrec", pipeline="sparse_dist")
    return {
        name: dict(zip(("losses", "metrics"), train_all(columns, chosen, context), strict=False))
        for name, chosen in (("plain", config.replaced(pipeline="plain")), ("torchrec", of_torchrec))
    }


def build(
    columns: Any, config: Config, context: RuntimeContext, rule: Any = None, maker: Any = None
) -> tuple[Any, Any]:
    """A train state and an input pipeline, as `train` makes them."""
    from example import make_loss, make_model
    from recsuite.training.state import build_train_state

    feed = feed_of(columns, config, context)
    return build_train_state(
        columns, config, context, maker or make_model, make_loss(columns, config), tables=rule
    ), feed


def evaluate_fresh(columns: Any, config: Config, context: RuntimeContext) -> Any:
    """Metrics of the initial weights, and their intervals."""
    from recsuite.training.evaluation import make_evaluator

    train_state, feed = build(columns, config, context)
    with feed.loader:
        found = make_evaluator(feed, columns, config, context).test(train_state.model, 0)
    # The ends of the intervals too.
    ends = {f"{name} {end}": found.intervals[name][end] for name in found.intervals for end in (0, 1)}
    return {**found.values, **ends}


def train_all(
    columns: Any,
    config: Config,
    context: RuntimeContext,
    rule: Any = None,
    maker: Any = None,
    evaluates: bool = True,
) -> tuple[list[list[float]], Any, dict[str, float]]:
    """The loss of every step of every epoch, the metrics of the trained model, and `sums_of`."""
    from recsuite.sharding.table import track_changes
    from recsuite.training.evaluation import make_evaluator
    from recsuite.training.progress import Progress
    from tests.support.steps import train_epoch

    train_state, feed = build(columns, config, context, rule, maker)
    track_changes(train_state.model, train_state.tables)
    losses, metrics = [], None
    with feed.loader:
        for epoch in range(config.training.epochs):
            position = Progress(0, epoch)
            found = train_epoch(train_state, feed, position, config.training, context)
            losses.append(found.tolist())
        if evaluates:
            metrics = make_evaluator(feed, columns, config, context).test(train_state.model, epoch).values
    return losses, metrics, sums_of(train_state)


def sums_of(train_state: Any) -> dict[str, float]:
    """By table, the sum of Adagrad's state, of the squares of all gradients, and the changed rows."""
    import torch
    import torch.distributed as dist

    sums = {}
    for table, share in sorted(train_state.tables.items()):
        # A rank without rows of a table has no state of it.
        mine = sum(
            (value.double().sum() for slot, value in share.export().items() if slot == "momentum1"),
            torch.zeros(()),
        )
        changed = len(next(iter(share.export(changed=True).values())))
        # Where the backend of the ranks adds up; a rank may have no shard that says where that is.
        total = torch.tensor([float(mine), changed], dtype=torch.float64).to(train_state.row_scale.device)
        dist.all_reduce(total)
        sums[table], sums[f"changed {table}"] = total.tolist()
    return sums


def rank_all(columns: Any, config: Config, context: RuntimeContext, std: float) -> dict[str, Any]:
    """Ranks by initial weights of a standard deviation, and the vectors that they come from.

    "listed" is the number of lists with each movie, by split. "vectors" are of one rank alone and, for each
    split, D lists: number d of user, movie, user, movie, and so on.
    """
    import numpy as np
    import torch

    from recsuite.sharding import plan as sharding
    from recsuite.training import evaluation
    from recsuite.training.evaluation import RankingEvaluator

    # Some movies in a block, and some users at once, so that there are many of both.
    config = config.replaced(task="ranking", batch_size=240)
    evaluation.SCORES_AT_ONCE, sharding.INIT_STD, usual = 2**13, std, sharding.INIT_STD
    train_state, feed = build(columns, config, context)
    sharding.INIT_STD = usual
    evaluator = RankingEvaluator(feed, columns, context, evaluation.Users(columns, []))
    listed = {split: np.zeros(columns.num_items, np.int64) for split in ("validation", "test")}
    ranks = {
        split: evaluator.ranks(train_state.model, split, 0, counts).tolist()
        for split, counts in listed.items()
    }
    vectors = {}
    for split in ("validation", "test", "catalogue") if context.world_size == 1 else ():
        with torch.no_grad():
            outputs = [train_state.model(batch.to(context.device)).output for batch in feed.batches(split, 0)]
        numbers = torch.stack(outputs).unbind(dim=-1)
        both = 2 * len(columns.range_of(split))
        vectors[split] = [number.flatten()[:both].tolist() for number in numbers]
    lists = {split: counts.tolist() for split, counts in listed.items()}
    return {"ranks": ranks, "listed": lists, "vectors": vectors}


def count_pipelined_modules(columns: Any, config: Config, context: RuntimeContext) -> int:
    """Number of modules that the pipeline of TorchRec takes over, of tables of three widths."""
    from recsuite.training.steps import Overlap
    from tests.support.several_widths import several_widths
    from tests.support.steps import make_step

    train_state, feed = build(columns, config, context, maker=several_widths)
    overlap = Overlap(train_state.model, train_state.optimizer, context.device)
    train_state.after_forward = overlap.after_forward
    # To the end, for it exchanges the ids of batches ahead.
    for batch in overlap.device_batches(feed.batches("test", epoch=0)):
        make_step(train_state, batch)
    return len(overlap._pipelined_modules)


def losses_of(results: dict[str, Any]) -> dict[str, Any]:
    """All losses of `ranks.py`, by what was trained: pipelines, table rules, static and dynamic tables."""
    losses = {loop: results["losses"][loop] for loop in ("plain 0", "sparse_dist 1")}
    losses |= {rule: of_rule for rule, (of_rule, _) in results["rules"].items()}
    losses |= {f"widths, {ids}": by["torchrec"]["losses"] for ids, by in results["widths"].items()}
    losses |= {f"history, {loop}": by["losses"] for loop, by in results["learned weights"].items()}
    for ids, by_loop in results["sequences"].items():
        losses |= {f"sequence, {ids}, {loop}": by["losses"] for loop, by in by_loop.items()}
    return losses


if __name__ == "__main__":
    main()
    end_process(0)
