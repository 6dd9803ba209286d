"""Compaction: one full checkpoint replaces deltas. It is faster to read, and a training continues from it."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from recsuite.checkpoint.chain_writer import ChainWriter
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.session import writing_together
from recsuite.checkpoint.storage.chain import chain_at
from recsuite.checkpoint.storage.choice import suggesting
from recsuite.checkpoint.storage.directory import (
    BEST,
    LATEST,
    best_in,
    deltas_in,
    full_checkpoints_in,
    full_name,
    step_of,
)
from recsuite.checkpoint.storage.manifest import read_manifest
from recsuite.checkpoint.storage.writer import point_at, prune, retire, tidying
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.errors import counted
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0
from recsuite.training.state import ShardedModel


def compact(train_state: ShardedModel, columns: Columns, config: Config, context: RuntimeContext) -> None:
    """Replace the newest deltas with a full checkpoint, and remove these deltas. Collective: every rank.

    Raises:
        UserError: when there is no checkpoint, when it is not complete, or when the new one cannot be
            written.
    """
    save_dir = Path(config.checkpoint.save_dir)
    find = partial(suggesting, save_dir, lambda: chain_at(save_dir))
    # Before `writing_together` makes the folder for its lock: a mistyped --save_dir creates no folder.
    broadcast_from_rank0(find)
    with writing_together(save_dir, context):
        # Found again, now that no other process writes here.
        chain = broadcast_from_rank0(find)
        # Also if there is no delta to merge because a compaction was interrupted: the deltas that the full
        # checkpoint replaces are removed only if it is whole.
        manifest = restore(chain, train_state, columns, context)
        if chain.deltas:
            writer = ChainWriter(train_state, manifest.run, chain, columns, config, context)
            # It has the step of the last delta, and of equal steps the full checkpoint is the newest. So the
            # folder is not ambiguous if this process is killed before the deltas are removed.
            writer.write_full(manifest.progress)
            writer.close()
        removed = broadcast_from_rank0(lambda: _retire_compacted(save_dir, config.checkpoint.keep))
    context.say(f"{save_dir / full_name(step_of(chain.folder))} replaces {counted(removed, 'delta')}")


def _retire_compacted(save_dir: Path, keep: int) -> int:
    """Remove the deltas up to the newest full checkpoint, and bases that only they need; return their number.

    The folders of the best checkpoint are kept.
    """
    newest = full_checkpoints_in(save_dir)[-1]
    run = read_manifest(newest).run
    older = [path for path in deltas_in(save_dir) if step_of(path) <= step_of(newest)]
    best = best_in(save_dir)
    needed = chain_at(best).folders if best else ()
    merged = [path for path in older if read_manifest(path).run == run and path not in needed]
    with tidying(save_dir):
        # If a compaction was interrupted, the links still name a delta.
        if step_of(newest) > 0:
            point_at(newest, LATEST)
        if best:
            point_at(best, BEST)
        # The newest first: if this is interrupted, the rest of the chain has no gap.
        for delta in reversed(merged):
            retire(delta)
        prune(save_dir, keep)
    return len(merged)
