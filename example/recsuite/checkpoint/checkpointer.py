"""Checkpoints of a training: the only writer of its folder, the moments of writing, and compaction.

A training begins anew or continues from the newest checkpoint. Compaction replaces deltas by one full
checkpoint: it is faster to read, and a training continues from it.
"""

from __future__ import annotations

import contextlib
import signal
import uuid
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from recsuite.checkpoint.chain import CheckpointChain, chain_at, with_suggestion
from recsuite.checkpoint.earlier import begin
from recsuite.checkpoint.folder import (
    BEST,
    LATEST,
    LOCK,
    best_in,
    deltas_in,
    full_checkpoints_in,
    full_name,
    newest_in,
    prune,
    remove_checkpoint,
    set_link,
    step_of,
    tidying,
    writing,
)
from recsuite.checkpoint.format import CONFIG, Manifest, read_manifest
from recsuite.checkpoint.recorded import LEARNING_FLAGS, TABLE_FLAGS, read_recorded
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.writer import CheckpointWriter
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.stream_reader import StreamReader
from recsuite.errors import UserError, counted
from recsuite.hooks import extra
from recsuite.models.tasks import TASKS
from recsuite.places import folder_at
from recsuite.runtime.ending import Termination, exit_status_of_signal
from recsuite.runtime.process import RuntimeContext, all_gather_object, broadcast_from_rank0, raise_on_all
from recsuite.training.callbacks import Epoch, Step
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel
from recsuite.training.stream import check_window
from recsuite.training.weights import check_finite, check_no_invalid_weights, describe_invalid_weights


class Checkpointer:
    """Writer of checkpoints of validated initial rows, after every epoch, every --dump_every steps, and on
    SIGTERM.

    With --inc_dump the first one is full, and the others are deltas: changes since the one before. With
    --dump too, the end of an epoch gets a full one. It implements `callbacks.CheckpointerProtocol`. resumed:
    the checkpoint that the training continues from, if any; run: the name that all checkpoints of the
    training share. Collective: every rank.
    """

    phase = "dumps"
    stream_reader: StreamReader | None = None

    def __init__(
        self,
        resumed: CheckpointChain | None,
        run: str,
        columns: Columns,
        config: Config,
        context: RuntimeContext,
    ) -> None:
        self.resumed = resumed
        self.is_resumed = resumed is not None or bool(config.checkpoint.warm_start)
        # Known before `begin`: from here on the workers make batches while the trainer builds the model that
        # `begin` restores.
        self.start = Progress()
        if resumed is not None:
            manifest, flags = read_manifest(resumed.folder), read_recorded(resumed.folder)
            steps = context.world_size, config.global_batch(columns.num_train, context.world_size)
            is_same = steps == (manifest.world_size, flags.get("batch_size"))
            self.start = columns.continued(manifest.progress, is_same, config.training.epochs)
        # The step of the last call of `on_step` or `on_epoch`.
        self.seen = self.start.step
        self.run = run
        self.columns = columns
        self.config = config
        self.context = context
        deadline = timedelta(seconds=config.runtime.timeout)
        self.termination = Termination(deadline)
        # Ranks agree on the CPU, whatever device they compute on.
        self.group = dist.new_group(backend="gloo", timeout=deadline)

    @property
    def dense(self) -> Mapping[str, torch.Tensor]:
        """Dense tensors that are written, see `callbacks.CheckpointerProtocol`."""
        return self.writer.dense

    @property
    def saves_changes(self) -> bool:
        """True if the next checkpoint is a delta, see `callbacks.CheckpointerProtocol`."""
        # Only changed rows are in a delta, and checking all rows of large tables costs far more.
        return self.writer.next_is_delta

    def begin(self, train_state: ShardedModel, progress: Progress) -> None:
        """Restore the resumed checkpoint or that of --warm_start, or write a full one of initial rows or for
        deltas to build on.
        """
        self.rates = train_state.rates
        if self.resumed is not None:
            restore(self.resumed, train_state, self.columns, self.context)
        elif folder := self.config.checkpoint.warm_start:
            task = TASKS[self.config.model.task]
            extra("warm").start_from(folder_at(folder), train_state, self.columns, task, self.context)
        self.writer = CheckpointWriter(
            train_state, self.run, self.resumed, self.columns, self.config, self.context, self.stream_reader
        )
        # Any delta needs a full checkpoint to build on. A resumed training has one, and continues its chain:
        # a server that follows it need not notice that the trainer was restarted.
        if self.resumed is None and (self.config.checkpoint.inc_dump or progress.is_best):
            self.writer.write_full(progress)

    def on_step(self, step: Step) -> None:
        """Write a checkpoint if one is due; after a signal on any rank, write one and raise SystemExit.

        Raises:
            UserError: on every rank, instead of writing a model whose loss is not a number or whose weights
                are too large for a trained one: it would push out the good ones.
        """
        # All ranks vote in every step: a signal reaches them at different steps, and ranks that wrote at
        # different steps would wait for each other.
        stop, every = self.termination.vote(), self.config.checkpoint.dump_every
        # Steps that only accumulate gradients do not call this, so the comparison is not with every step.
        is_due = every and step.progress.step // every > self.seen // every
        self.seen = step.progress.step
        if stop or is_due:
            # First, because a delta can only build on a checkpoint that was written.
            self.writer.finish()
            self._check(step)
            self.writer.write(step.progress)
        self._end_if(stop, step.progress)

    def on_epoch(self, epoch: Epoch) -> None:
        """Write a checkpoint at the end of an epoch; end the process like `on_step`.

        The trainer checked the weights before the validation, so they are not checked again.
        """
        stop, self.seen = self.termination.vote(), epoch.progress.step
        self.writer.finish()
        self.writer.write(epoch.progress, in_full=self.config.checkpoint.dump)
        self._end_if(stop, epoch.progress)

    def on_wait(self, progress: Progress) -> None:
        """End the process if any rank received a signal to end; everything is in a checkpoint already."""
        self._end_if(self.termination.vote(), progress)

    def on_rescale(self) -> None:
        """Write the next checkpoint in full."""
        self.writer.finish()
        self.writer.link = None

    def on_growth(self, columns: Columns) -> None:
        """Write checkpoints of these columns from now on."""
        self.columns = columns
        self.writer.continue_with(columns)

    def _check(self, step: Step) -> None:
        """Refuse weights of a training that diverged. Collective."""
        # The loss alone is not enough: it is computed before this step's update of the weights.
        dense, tables, changed = self.dense, self.writer.tables, self.saves_changes
        everyones = all_gather_object(
            lambda: (float(step.loss), describe_invalid_weights(dense, tables, changed)), self.group
        )
        losses, faults = zip(*everyones, strict=True)
        check_finite(np.array(losses).max(keepdims=True), step.progress.step - 1, self.rates)
        check_no_invalid_weights(faults, step.progress.step, self.rates)

    def _end_if(self, stop: int, progress: Progress) -> None:
        """End the process if the ranks agreed to, after the last checkpoint is on the disk."""
        if stop:
            self.writer.close()
            self.context.say(f"stopped by a signal at step {progress.step:,}; --resume continues from there")
            raise SystemExit(exit_status_of_signal(stop))

    def request_stop(self) -> None:
        """End the training with a checkpoint and a SystemExit, see `callbacks.CheckpointerProtocol`."""
        self.termination.asked = self.termination.asked or signal.SIGTERM

    def restore_best(self, train_state: ShardedModel) -> Progress | None:
        """Restore the best checkpoint and return its progress; None if there is none.

        It may not have been written, or have been removed.
        """
        # The best one may still be under way.
        self.writer.finish()
        # One rank looks: on a network file system ranks see a folder change at different moments.
        best = broadcast_from_rank0(lambda: best_in(folder_at(self.config.checkpoint.save_dir)))
        if best is None:
            return None
        chain = broadcast_from_rank0(lambda: chain_at(best))
        return restore(chain, train_state, self.columns, self.context).progress

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: when it failed.
            SystemExit: when the process received SIGTERM or SIGINT.
        """
        self.writer.close()
        # A signal came after the last vote: everything is written, and the exit status must show the signal.
        if self.termination.asked:
            raise SystemExit(exit_status_of_signal(self.termination.asked))


# --- the only writer of a folder ---


@contextlib.contextmanager
def checkpointing(columns: Columns, config: Config, context: RuntimeContext) -> Iterator[Checkpointer]:
    """Yield the checkpointer of a training as the only writer of --save_dir. Collective: every rank.

    Raises:
        UserError: when another training writes there, when the ranks do not share the folder, and when the
            last checkpoint failed.
    """
    save_dir = folder_at(config.checkpoint.save_dir)
    with writing_on_all(save_dir, context):
        # With the lock: from here on no other process writes here, so checkpoints can be moved or chosen.
        raise_on_all(lambda: begin(config.checkpoint) if context.rank == 0 else None)
        # By one rank: on a network file system ranks see the newest checkpoint at different times, and each
        # would draw another name for a new run.
        resumed, run = broadcast_from_rank0(lambda: _find_start(save_dir))
        if resumed is not None:
            raise_on_all(lambda: _check_continues(resumed, columns, config, context))
        checkpointer = Checkpointer(resumed, run, columns, config, context)
        # From here on a signal is recorded and voted on. Before, it ends the process at once, because there
        # is nothing to write. `close` is inside, because the last checkpoint may still be under way.
        with checkpointer.termination.handling_signals():
            yield checkpointer
            checkpointer.close()


@contextlib.contextmanager
def writing_on_all(save_dir: Path, context: RuntimeContext) -> Iterator[None]:
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
            f"--save_dir requires a folder that all machines share; rank {context.rank} does not see the "
            f"files of rank 0 in {save_dir}."
        )


def _find_start(save_dir: Path) -> tuple[CheckpointChain | None, str]:
    """Return the checkpoint to continue from, if any, and the name of the run."""
    newest = newest_in(save_dir)
    if newest is None:
        return None, uuid.uuid4().hex
    return with_suggestion(newest, lambda: chain_at(newest)), read_manifest(newest).run


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
    config = config.with_global_batch(columns.num_train, context.world_size)
    _say_changes(chain, config, context)


def _check_kind(chain: CheckpointChain, progress: Progress, config: Config) -> None:
    # Before its first window a stream has no progress yet.
    is_stream = progress.stream is not None or (
        progress.step == 0 and progress.best is None and bool(config.stream.stream)
    )
    if is_stream != bool(config.stream.stream):
        was, given = ("a stream", "without") if is_stream else ("epochs", "with")
        raise UserError(
            f"{chain.folder} is of a training in {was}, and cannot continue {given} --stream; give "
            "--move_aside instead of --resume to train again."
        )


def _check_stream(chain: CheckpointChain, progress: Progress, columns: Columns) -> None:
    """Refuse data in which the events learned so far have changed; new events after them are fine."""
    stream = progress.stream
    assert stream is not None
    segment = columns.segment
    assert segment is not None
    if segment.first != stream.begin:
        raise UserError(f"{chain.folder.parent} got another checkpoint meanwhile. Fix: start again.")
    check_window(stream, columns)
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
            f"--resume continues with the {columns.schema.labels} of {chain.folder}, and those of "
            f"{columns.source} differ from them, or another version prepared them{shown}; give the "
            f"--data_path that its {CONFIG} names, with the files as they were, or train again on all files "
            "with --move_aside instead of --resume; only a training with --stream continues with new files."
        )
    used = manifest.progress.samples
    # Only a manifest that no training wrote has this: the number of steps left would be 0 or negative.
    if used >= columns.num_train:
        raise UserError(
            f"{chain.folder} says that {used:,} {columns.schema.labels} of its epoch are used, and an epoch "
            f"has {columns.num_train:,}; resume from another checkpoint."
        )


def _say_changes(chain: CheckpointChain, config: Config, context: RuntimeContext) -> None:
    before = read_recorded(chain.folder)
    changed = [
        f"--{name} {config.flags[name]} (was {before.get(name)})"
        for name in (*LEARNING_FLAGS, *TABLE_FLAGS, "seed")
        if config.flags[name] != before.get(name)
    ]
    if changed:
        context.say(f"continues with other flags than before: {', '.join(changed)}")


# --- compaction ---


def compact(
    train_state: ShardedModel,
    columns: Columns,
    config: Config,
    context: RuntimeContext,
    stream_reader: StreamReader | None = None,
) -> None:
    """Replace the newest deltas with a full checkpoint, and remove these deltas. Collective: every rank.

    Raises:
        UserError: when there is no checkpoint, when it is not complete, or when the new one cannot be
            written.
    """
    save_dir = folder_at(config.checkpoint.save_dir)
    find = partial(with_suggestion, save_dir, lambda: chain_at(save_dir))
    # Before `writing_on_all` makes the folder for its lock: a mistyped --save_dir creates no folder.
    broadcast_from_rank0(find)
    with writing_on_all(save_dir, context):
        # Found again, now that no other process writes here.
        chain = broadcast_from_rank0(find)
        # Also if there is no delta to merge because a compaction was interrupted: the deltas that the full
        # checkpoint replaces are removed only if it is whole.
        manifest = restore(chain, train_state, columns, context)
        if chain.deltas:
            writer = CheckpointWriter(
                train_state, manifest.run, chain, columns, config, context, stream_reader
            )
            # It has the step of the last delta, and of equal steps the full checkpoint is the newest. So the
            # folder is not ambiguous if this process is killed before the deltas are removed.
            writer.write_full(manifest.progress)
            writer.close()
        removed = broadcast_from_rank0(lambda: _retire_compacted(save_dir, config.checkpoint.keep))
    context.say(f"{save_dir / full_name(step_of(chain.folder))} replaces {counted(removed, 'delta')}")


def _retire_compacted(save_dir: Path, keep: int) -> int:
    """Remove the deltas up to the newest full checkpoint and the bases of only them; return their number."""
    newest = full_checkpoints_in(save_dir)[-1]
    run = read_manifest(newest).run
    older = [path for path in deltas_in(save_dir) if step_of(path) <= step_of(newest)]
    # The folders of the best checkpoint are kept.
    best = best_in(save_dir)
    needed = chain_at(best).folders if best else ()
    merged = [path for path in older if read_manifest(path).run == run and path not in needed]
    with tidying(save_dir):
        # If a compaction was interrupted, the links still name a delta.
        if step_of(newest) > 0:
            set_link(newest, LATEST)
        if best:
            set_link(best, BEST)
        # The newest first: if this is interrupted, the rest of the chain has no gap.
        for delta in reversed(merged):
            remove_checkpoint(delta)
        prune(save_dir, keep)
    return len(merged)
