"""Session of a training as the only writer of its folder; it begins anew or with the newest checkpoint."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from recsuite.checkpoint.checkpointer import Checkpointer
from recsuite.checkpoint.storage.chain import CheckpointChain, chain_at
from recsuite.checkpoint.storage.choice import suggesting
from recsuite.checkpoint.storage.directory import newest_in
from recsuite.checkpoint.storage.manifest import CONFIG, Manifest, read_manifest
from recsuite.checkpoint.storage.recorded import LEARNING_FLAGS, TABLE_FLAGS, read_recorded
from recsuite.checkpoint.storage.writer import LOCK, set_aside, writing
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.streams import check_prefix
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, raise_on_all
from recsuite.training.progress import Progress


@contextlib.contextmanager
def checkpointing(columns: Columns, config: Config, context: RuntimeContext) -> Iterator[Checkpointer]:
    """Yield the checkpointer of a training as the only writer of --save_dir. Collective: every rank.

    Raises:
        UserError: when another training writes there, when the ranks do not share the folder, and when the
            last checkpoint failed.
    """
    save_dir = Path(config.checkpoint.save_dir)
    with writing_together(save_dir, context):
        # With the lock: from here on no other process writes here, so checkpoints can be moved or chosen.
        if not config.checkpoint.resume:
            raise_on_all(lambda: _begin_afresh(save_dir, context) if context.rank == 0 else None)
        # By one rank: on a network file system ranks see the newest checkpoint at different times, and each
        # would draw another name for a new run.
        resumed, run = broadcast_from_rank0(lambda: _find_start(save_dir))
        if resumed is not None:
            raise_on_all(lambda: _check_continues(resumed, columns, config, context))
        checkpointer = Checkpointer(resumed, run, columns, config, context)
        # From here on a signal is recorded and voted on. Before, it ends the process at once, because there
        # is nothing to write. `close` is inside, because the last checkpoint may still be under way.
        with checkpointer.termination.obeyed():
            yield checkpointer
            checkpointer.close()


@contextlib.contextmanager
def writing_together(save_dir: Path, context: RuntimeContext) -> Iterator[None]:
    """Enter `writing` on rank 0 for all ranks. Collective: every rank.

    Raises:
        UserError: as `writing`, and when the ranks do not share the folder.
    """
    with contextlib.ExitStack() as stack:
        raise_on_all(lambda: stack.enter_context(writing(save_dir)) if context.rank == 0 else None)
        raise_on_all(lambda: _check_shared(save_dir, context))
        yield


def _check_shared(save_dir: Path, context: RuntimeContext) -> None:
    # On a machine with a local folder of this name, a rank would write shard files that the others never see,
    # and rank 0 would publish checkpoints without them.
    if not (save_dir / LOCK).exists():
        raise UserError(
            f"Rank {context.rank} does not see what rank 0 wrote to --save_dir {save_dir}; give a folder "
            "that all machines share."
        )


def _begin_afresh(save_dir: Path, context: RuntimeContext) -> None:
    newest = newest_in(save_dir)
    if newest is not None:
        context.say(
            f"{save_dir} held {newest.name} of an earlier training, and all of that is now in "
            f"{set_aside(save_dir)}; --resume would have continued from it"
        )


def _find_start(save_dir: Path) -> tuple[CheckpointChain | None, str]:
    """Return the checkpoint to continue from, if any, and the name of the run."""
    newest = newest_in(save_dir)
    if newest is None:
        return None, uuid.uuid4().hex
    return suggesting(newest, lambda: chain_at(newest)), read_manifest(newest).run


def _check_continues(
    chain: CheckpointChain, columns: Columns, config: Config, context: RuntimeContext
) -> None:
    """Refuse ratings other than those of the checkpoint, and print the flags that have changed."""
    manifest = read_manifest(chain.folder)
    _check_kind(chain, manifest.progress, config)
    if manifest.progress.stream is not None:
        _check_stream(chain, manifest.progress, columns)
    else:
        _check_ratings(chain, manifest, columns)
    _say_changes(chain, manifest, config, context)


def _check_kind(chain: CheckpointChain, progress: Progress, config: Config) -> None:
    # Before its first window a stream has no progress yet.
    is_stream = progress.stream is not None or (progress.step == 0 and config.stream.stream)
    if is_stream != config.stream.stream:
        was, given = ("a stream", "without") if is_stream else ("epochs", "with")
        raise UserError(
            f"{chain.folder} is of a training in {was}, and cannot go on {given} --stream; leave out "
            "--resume to train anew."
        )


def _check_stream(chain: CheckpointChain, progress: Progress, columns: Columns) -> None:
    """Refuse data in which the events learned so far have changed; new events after them are fine."""
    stream = progress.stream
    assert stream is not None
    check_prefix(columns.column("keys"), stream.end, stream.digest, columns.source)
    if not (stream.begin <= stream.end and progress.samples <= stream.end - stream.begin):
        raise UserError(
            f"{chain.folder} says that {progress.samples:,} {columns.schema.labels} of its window are used, "
            f"and the window has {stream.end - stream.begin:,}; resume from another checkpoint."
        )


def _check_ratings(chain: CheckpointChain, manifest: Manifest, columns: Columns) -> None:
    # The progress is a position in the order of the ratings: with other ratings, some would be trained on
    # twice, and others skipped.
    theirs = manifest.ratings
    if theirs != columns.digest:
        # The digests end with the numbers for training and validation.
        numbers = [digest.split("-")[1:2] for digest in (theirs, columns.digest)]
        shown = f" ({numbers[0][0]} for training then, {numbers[1][0]} now)" if all(numbers) else ""
        raise UserError(
            f"--resume goes on with the {columns.schema.labels} of {chain.folder}, and those of "
            f"{columns.source} are others{shown}; give the --data_path that its {CONFIG} names, with the "
            "files as they were, or train anew on all files without --resume; a training with --stream goes "
            "on with new files."
        )
    used = manifest.progress.samples
    # Only a manifest that no training wrote has this: the number of steps left would be 0 or negative.
    if used >= columns.num_train:
        raise UserError(
            f"{chain.folder} says that {used:,} {columns.schema.labels} of its epoch are used, and an epoch "
            f"has {columns.num_train:,}; resume from another checkpoint."
        )


def _say_changes(chain: CheckpointChain, manifest: Manifest, config: Config, context: RuntimeContext) -> None:
    before = read_recorded(chain.folder)
    changed = [
        f"--{name} {config.flags[name]} (was {before.get(name)})"
        for name in (*LEARNING_FLAGS, *TABLE_FLAGS, "seed")
        if config.flags[name] != before.get(name)
    ]
    # The product counts: half as many ranks with twice the --batch_size make the same steps.
    batch = config.loader.batch_size * context.world_size
    batch_before = before.get("batch_size", 0) * manifest.world_size
    if batch != batch_before:
        changed.append(f"a global batch of {batch:,} (was {batch_before:,})")
    if changed:
        context.say(f"continues with other flags than before: {', '.join(changed)}")
