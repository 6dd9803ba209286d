"""Callback that writes checkpoints, has the progress where a training begins, and restores the best one."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from recsuite.checkpoint.chain_writer import ChainWriter
from recsuite.checkpoint.full import Tensors
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.storage.chain import CheckpointChain, chain_at
from recsuite.checkpoint.storage.directory import best_in
from recsuite.checkpoint.storage.manifest import read_manifest
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.runtime.ending import Termination, status_of
from recsuite.runtime.process import RuntimeContext, all_gather_object, broadcast_from_rank0
from recsuite.training.callbacks import Epoch, Step
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel
from recsuite.training.weights import check_finite, check_sound, unsound


class Checkpointer:
    """Writer of checkpoints at the end of every epoch, every --dump_every steps, and on SIGTERM.

    With --inc_dump the first one is full, and the others are deltas: changes since the one before. With
    --dump too, the end of an epoch gets a full one. It implements `callbacks.CheckpointerProtocol`. resumed:
    the checkpoint that the training continues from, if any; run: the name that all checkpoints of the
    training share. Collective: every rank.
    """

    phase = "dumps"

    def __init__(
        self,
        resumed: CheckpointChain | None,
        run: str,
        columns: Columns,
        config: Config,
        context: RuntimeContext,
    ) -> None:
        self.resumed = resumed
        # Known before `begin`: from here on the workers make batches while the trainer builds the model that
        # `begin` restores.
        self.start = Progress() if resumed is None else read_manifest(resumed.folder).progress
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
    def tensors(self) -> Tensors:
        """Tensors that are written, see `callbacks.CheckpointerProtocol`."""
        return self.writer.tensors

    @property
    def changed(self) -> dict[str, torch.Tensor] | None:
        """Rows of the next delta, None for all rows, see `callbacks.CheckpointerProtocol`."""
        # Only these rows are in a delta, and checking all rows of large tables costs far more.
        return self.writer.touched.get_unique_ids() if self.writer.next_is_delta else None

    def begin(self, train_state: ShardedModel) -> None:
        """Restore the resumed checkpoint, or write a full checkpoint if deltas need one to build on."""
        if self.resumed is not None:
            restore(self.resumed, train_state, self.columns, self.context)
        self.writer = ChainWriter(
            train_state, self.run, self.resumed, self.columns, self.config, self.context
        )
        # Any delta needs a full checkpoint to build on. A resumed training has one, and continues its chain:
        # a server that follows it need not notice that the trainer was restarted.
        if self.config.checkpoint.inc_dump and self.resumed is None:
            self.writer.write_full(self.start)

    def on_step(self, step: Step) -> None:
        """Write a checkpoint if one is due, or if any rank was told to end; then this raises SystemExit.

        Raises:
            UserError: on every rank, instead of writing a model whose loss is not a number or whose weights
                are too large for a trained one: it would push out the good ones.
        """
        # All ranks vote in every step: a signal reaches them at different steps, and ranks that wrote at
        # different steps would wait for each other.
        stop, every = self.termination.agreed(), self.config.checkpoint.dump_every
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
        stop, self.seen = self.termination.agreed(), epoch.progress.step
        self.writer.finish()
        self.writer.write(epoch.progress, in_full=self.config.checkpoint.dump)
        self._end_if(stop, epoch.progress)

    def on_wait(self, progress: Progress) -> None:
        """End the process if any rank was told to; everything is in a checkpoint already."""
        self._end_if(self.termination.agreed(), progress)

    def on_fold(self) -> None:
        """Write the next checkpoint in full."""
        self.writer.finish()
        self.writer.link = None

    def on_growth(self, columns: Columns) -> None:
        """Write checkpoints of these columns from now on."""
        self.columns = columns
        self.writer.take_up(columns)

    def _check(self, step: Step) -> None:
        """Refuse weights of a training that diverged.

        The loss alone is not enough: it is computed before this step's update of the weights.
        """
        rows, shares = self.changed, self.writer.dynamic.shares
        everyones = all_gather_object(
            lambda: (float(step.loss), unsound(self.tensors, shares, rows)), self.group
        )
        losses, faults = zip(*everyones, strict=True)
        check_finite(np.array(losses).max(keepdims=True), step.progress.step - 1, self.config.optimizer)
        check_sound(faults, step.progress.step, self.config.optimizer)

    def _end_if(self, stop: int, progress: Progress) -> None:
        """End the process if the ranks agreed to, after the last checkpoint is on the disk."""
        if stop:
            self.writer.close()
            self.context.say(f"told to end, stopped at step {progress.step:,}; --resume continues from there")
            raise SystemExit(status_of(stop))

    def restore_best(self, train_state: ShardedModel) -> Progress | None:
        """Restore the best checkpoint and return its progress; None if there is none.

        It may not have been written, or have been removed.
        """
        # The best one may still be under way.
        self.writer.finish()
        # One rank looks: on a network file system ranks see a folder change at different moments.
        best = broadcast_from_rank0(lambda: best_in(Path(self.config.checkpoint.save_dir)))
        if best is None:
            return None
        chain = broadcast_from_rank0(lambda: chain_at(best))
        return restore(chain, train_state, self.columns, self.context).progress

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: when it failed.
            SystemExit: when the process was told to end.
        """
        self.writer.close()
        # A signal came after the last vote: everything is written, and the exit status must show the signal.
        if self.termination.asked:
            raise SystemExit(status_of(self.termination.asked))
