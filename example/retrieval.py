"""Retrieve items with two towers, and an index of items that follows their checkpoints.

    python retrieval.py                                      one process, synthetic ratings
    torchrun --standalone --nproc_per_node=2 retrieval.py --dataset ml-1m
    python retrieval.py --load                               the index of what was trained before

The flags are those of example.py for ranking, after --preset ranking --negatives 512. If they request no
checkpoint, deltas are written, except with --train alone. One tower makes a vector of a user, the other of an
item, and their product is the score. So an index of vectors finds items without scoring each of them. In
addition to example.py, this script exports the best checkpoint with its index, updates the index from later
deltas, compares it with exact search, and prints recommendations.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import recsuite as rs
from recsuite.errors import UserError, counted
from recsuite.places import is_remote
from recsuite.runtime.console import say

if TYPE_CHECKING:
    from recsuite.extras.recommend.recommend import Viewer
    from recsuite.serving.served import Follower, ServedModel

DEFAULTS = (
    # Sampled negatives are added to those of the batch, in which rare items are rare.
    *("--task", "ranking", "--preset", "ranking", "--negatives", "512"),
    # The test is the next item of each user. So many synthetic ratings take half a minute.
    *("--split", "leave_one_out", "--synthetic_ratings", "100000"),
)
# Flags of other tasks.
UNREAD = ("task", "block", "num_blocks", "num_heads", "dropout", "initial_rows", "l2", "stream")
# Checked before a training whose end would fail.
NEEDS = ("recsuite.extras.index", "recsuite.extras.recommend", "faiss")
# Number of users for the comparison with exact search, the first of which is printed, and the minimum length
# of their histories.
USERS, LEAST = 200, 5


def make_model(data: rs.ModelData, args: rs.ModelConfig) -> nn.Module:
    """Return two towers: a vector of the user, and one of the item."""
    num_places, types = data.history if args.learns_history_weights else 0, data.schema.event_types
    if types and not num_places:
        raise UserError(
            f"Events of several types ({', '.join(types)}) require --history_weights learned, got "
            f"{args.history_weights}."
        )
    # Without other events, all items of a history are excluded where items that a user had are.
    repeats, num_types = len(types) > 1 or not data.schema.excludes_seen, max(1, len(types))
    sizes = args.embedding_dim, args.mlp_dims, num_places, num_types
    hidden = data.schema.item if data.schema.lists_new_items else ""
    return rs.TwoTower(data.features, *sizes, repeats, hidden)


def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Train, validate after each epoch, and test the best weights. Collective: every rank."""
    with rs.session(args, runtime, rs.build_dataloader) as training:
        # A softmax over the items of the batch and those of --negatives.
        model = training.shard(make_model, loss=rs.SampledSoftmax.of(training.columns))

        @training.step
        def step(batch: rs.ModelInput) -> torch.Tensor:
            loss = model(batch)
            loss.backward()
            model.step()
            return loss

        for epoch in training.epochs():
            for batch in epoch:
                step(batch)
            training.save(training.validate())
        result = training.finish()
    training.report(result)


def load(args: rs.Config, runtime: rs.RuntimeContext) -> None:
    """Load a checkpoint, and test it. Collective: every rank."""
    with rs.open_data(args, runtime, rs.build_dataloader) as data:
        model, progress = rs.restore(data, args, runtime, make_model)
        rs.report_test(model, progress, data, args, runtime)


MODES = {"train": train, "load": load}


def retrieve(config: rs.Config, context: rs.RuntimeContext) -> None:
    """Export the best model with its index, follow later checkpoints, measure, and print recommendations.
    Called by every rank; rank 0 does it.
    """
    if context.rank != 0:
        return
    from recsuite.checkpoint.folder import LATEST
    from recsuite.extras.recommend.recommend import open_viewer, page
    from recsuite.serving.served import Follower, ServedModel

    best = ServedModel.open(config.checkpoint.save_dir, config.checkpoint.checkpoint, model=make_model)
    viewer = open_viewer(best, config, config.flags)
    # An export is a folder of this machine.
    save_dir = config.checkpoint.save_dir
    start = export(best, Path() if is_remote(save_dir) else Path(save_dir))
    follower = Follower(config.checkpoint.save_dir, start, LATEST, make_model)
    model = follower.model
    model.tell(viewer.features)
    follow(follower)
    viewers = viewer.other_users(USERS, LEAST)
    measure(model, viewers)
    for line in page(model, viewers[0], config.flags["top"], approximate=True).split("\n"):
        say(line)


def export(model: ServedModel, save_dir: Path) -> Path:
    """Return the folder with a model and its index, which is written unless it exists already."""
    from recsuite.serving.export import write_export

    target = save_dir / f"export-{model.progress.step:09d}-{model.run[:8]}"
    if not target.exists():
        size = write_export(model.snapshot, target, model.items().nearest.lists)
        say(f"exported {model.snapshot.folder}, with its index, to {target}: {size:,} bytes")
    return target


def follow(follower: Follower) -> None:
    """Bring the model and its index to the newest checkpoint, and print the time that it took."""
    before = follower.model.items().nearest.lists
    if not follower.refresh():
        return
    items, begin = follower.model.items(), time.perf_counter()
    after, seconds = items.nearest.lists, time.perf_counter() - begin
    is_kept = after.centres is before.centres
    how = f"{after.came - before.came:,} were reassigned" if is_kept else "made again"
    say(
        f"the index of {counted(len(items.ids), items.schema.item)} follows to step "
        f"{follower.model.progress.step:,}: {how}, in {seconds * 1e3:,.0f} ms"
    )


def measure(model: ServedModel, viewers: Sequence[Viewer]) -> None:
    """Compare the index with exact search, for several numbers of probed lists."""
    from recsuite.extras.index import K, curve_lines, recall_curve

    told = [viewer.values(model.snapshot) for viewer in viewers]
    users, items = model.vectors_of({name: [values[name][0] for values in told] for name in told[0]})
    points = recall_curve(users, items)
    (used,) = [point for point in points if point.is_default]
    say(
        f"the index finds {used.recall:.4f} of the {K} best of {counted(len(items.ids), items.schema.item)}, "
        f"in {used.microseconds:,.0f} us a query:"
    )
    for line in curve_lines(points):
        say(line)


def main(argv: list[str] | None = None) -> int:
    """Train, and retrieve. Return the exit status: 2 for a user's mistake."""
    return rs.exit_status(
        lambda: rs.run_modes(argv, MODES, make_model, DEFAULTS, retrieve, unread=UNREAD, needs=NEEDS)
    )


if __name__ == "__main__":
    rs.run_script(main)
