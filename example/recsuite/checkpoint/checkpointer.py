"""When a training writes which checkpoint, where it begins, and what is kept of it."""

from __future__ import annotations

import math
import shutil
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from recsuite.checkpoint.delta import TouchedRows, Vocabulary, write_delta
from recsuite.checkpoint.full import OPTIMIZER, FullWriter, features_of, shapes_of, tensors_of
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.storage.chain import CheckpointChain, chain_at
from recsuite.checkpoint.storage.directory import best_in, delta_name, full_name, making_name, new_attempt
from recsuite.checkpoint.storage.manifest import (
    VOCABULARY,
    Manifest,
    ParentLink,
    Progress,
    link_after,
    read_manifest,
)
from recsuite.checkpoint.storage.writer import publish
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError
from recsuite.files import digest_of, reason_of
from recsuite.runtime.collectives import all_gather_object, broadcast_from_rank0
from recsuite.runtime.ending.termination import Termination, status_of
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.versions import installed_versions
from recsuite.sharding.plan import describe_plan
from recsuite.training.callbacks import Epoch, Step
from recsuite.training.state import TrainState
from recsuite.training.weights import check_finite, check_sound, unsound

# Bytes a second of the slowest disk that ranks wait for.
SLOWEST_DISK = 5 * 10**6


class Checkpointer:
    """Writes checkpoints of a training: at the end of every epoch, every --dump_every steps, and on SIGTERM.

    With --inc_dump the first is full, and the others are deltas: what changed since the one before. Where one
    fails for want of space or permission, that is said in one sentence and the training continues; the next
    one tries again. Collective: every rank.
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
        self.start = Progress() if resumed is None else read_manifest(resumed.folder).progress
        self.run = run
        self.columns = columns
        self.config = config
        self.context = context
        self.save_dir = Path(config.checkpoint.save_dir)
        self.vocabulary = Path(columns.folder) / VOCABULARY
        self.failure = ""
        # Asked for once: that takes as long as to write a small delta.
        self.versions = installed_versions()
        self.vocabulary_digest = digest_of(self.vocabulary)
        # What a rank of an earlier attempt still writes must not come into a folder of this one.
        self.attempt: str = broadcast_from_rank0(new_attempt)
        deadline = timedelta(seconds=config.runtime.timeout)
        self.termination = Termination(deadline)
        # Ranks agree on the CPU, whatever they compute on.
        self.group = dist.new_group(backend="gloo", timeout=deadline)
        # What the next delta builds on.
        self.link: ParentLink | None = None
        self._under_way: tuple[Path, Any] | None = None

    def begin(self, learner: TrainState) -> None:
        """Restore what is resumed, and write what deltas will build on."""
        if self.resumed is not None:
            restore(self.resumed, learner, self.columns, self.context)
        self.tensors = tensors_of(learner)
        self.shapes = shapes_of(self.tensors)
        # For the checkpoints alone, which may be written beside the training, and wait for what others write.
        self.writers = dist.new_group(backend="gloo", timeout=self._writing_deadline())
        self.plan = describe_plan(learner.model, self.columns, self.config.model)
        if self.config.checkpoint.inc_dump:
            self.touched = TouchedRows(learner.model, self.tensors)
            self.raw_values = Vocabulary(self.vocabulary, self.columns.schema)
            if self.resumed is None:
                self.dump(self.start)
            else:
                self.link = link_after(self.resumed.folder)

    def on_step(self, step: Step) -> None:
        """See `callbacks.Checkpointer`."""
        self.after_step(step.progress, step.loss)

    def on_epoch(self, epoch: Epoch) -> None:
        """See `callbacks.Checkpointer`."""
        self.after_step(epoch.progress, float(epoch.losses[-1]))

    def after_step(self, progress: Progress, loss: torch.Tensor | float) -> None:
        """Dump if it is time to, or if any rank was told to end; then this raises SystemExit.

        Raises:
            UserError: on every rank, instead of dumping a model whose loss is not a number or whose weights
                are too large for a trained one: it would push out the good ones.
        """
        every, stop = self.config.checkpoint.dump_every, self.termination.agreed()
        at_end = progress.samples == 0
        if stop or at_end or (every and progress.step % every == 0):
            self._finish()
            is_delta = (
                self.config.checkpoint.inc_dump
                and self.link is not None
                and not (at_end and self.config.checkpoint.dump)
            )
            # At the end of an epoch the trainer did that, before the validation.
            if not at_end:
                self._check(progress, loss, is_delta)
            if is_delta:
                self.dump_delta(progress)
            else:
                self.dump(progress)
        if stop:
            self._finish()
            self._check_last()
            self.context.say(f"told to end, stopped at step {progress.step:,}; --resume continues from there")
            raise SystemExit(status_of(stop))

    def _check(self, progress: Progress, loss: torch.Tensor | float, is_delta: bool) -> None:
        rows = self.touched.get_unique_ids() if is_delta else None
        everyones = all_gather_object(lambda: (float(loss), unsound(self.tensors, rows)), self.group)
        losses, faults = zip(*everyones, strict=True)
        check_finite(np.array(losses).max(keepdims=True), progress.step - 1, self.config)
        check_sound(faults, progress.step, self.config)

    def dump(self, progress: Progress) -> None:
        """Dump everything."""
        final = self.save_dir / full_name(progress.step)
        making = self._making(final)
        describe = self._describe(progress, link=None)
        writer = FullWriter(
            making,
            describe,
            self.vocabulary,
            self.config,
            lambda: publish(making, final, self.config.checkpoint.keep),
        )
        save = dcp.async_save if self.config.checkpoint.async_dump else dcp.save
        # Should this one fail, the next one must be full again.
        self.link = None
        self._under_way = (final, None)
        try:
            response = save(self.tensors, storage_writer=writer, process_group=self.writers)
            self._under_way = (final, response)
        except CheckpointException as error:
            self._note_failure(final, _reason(error))
        if self.config.checkpoint.inc_dump:
            # What changes from here on, while the copy is written, is not in it.
            self.touched.clear()
        if not self.config.checkpoint.async_dump:
            self._finish()

    def restore_best(self, learner: TrainState) -> Progress | None:
        """Put the learner into the best state that was written; where its training was then. None if there is
        no such state: it could not be written, or is not there any more.
        """
        self._finish()
        best = broadcast_from_rank0(lambda: best_in(self.save_dir))
        if best is None:
            return None
        state = broadcast_from_rank0(lambda: chain_at(best))
        return restore(state, learner, self.columns, self.context).progress

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: when it failed.
            SystemExit: when the process was told to end.
        """
        self._finish()
        self._check_last()
        if self.termination.asked:
            raise SystemExit(status_of(self.termination.asked))

    def _check_last(self) -> None:
        if self.failure:
            raise UserError(self.failure)

    def dump_delta(self, progress: Progress) -> None:
        """Dump what changed since the last checkpoint, and the dense part."""
        assert self.link is not None
        final = self.save_dir / delta_name(progress.step)
        making = self._making(final)
        try:
            write_delta(
                making,
                self.touched.get_unique_ids(),
                self.tensors,
                self._describe(progress, self.link),
                self.raw_values,
                self.config,
                lambda: publish(making, final, self.config.checkpoint.keep),
                self.writers,
            )
        except UserError as error:
            self._note_failure(final, str(error))
            return
        # Only now: what a delta failed to hold belongs to the next one.
        self.touched.clear()
        self.link = self.link.after(progress.step)
        self._note_success(final)

    def _making(self, final: Path) -> Path:
        return final.with_name(making_name(final, self.attempt))

    def _writing_deadline(self) -> timedelta:
        """How long a rank waits for the shard files of the others: all may be one rank's."""
        num_bytes = 4 * sum(math.prod(shape) for shape, _ in self.shapes.values())
        return timedelta(seconds=self.config.runtime.timeout + num_bytes / SLOWEST_DISK)

    def _describe(self, progress: Progress, link: ParentLink | None) -> Manifest:
        about = {
            "plan": self.plan.splitlines(),
            "versions": self.versions,
        }
        return Manifest(
            run=self.run,
            progress=progress,
            tensors=self.shapes,
            files=(),
            vocabulary=self.vocabulary_digest,
            optimizer=OPTIMIZER,
            about=about,
            link=link,
            features=features_of(self.columns),
            ratings=self.columns.digest,
            world_size=self.context.world_size,
        )

    def _finish(self) -> None:
        """Wait for the checkpoint that is under way, and say what became of it."""
        if self._under_way is None:
            return
        final, response = self._under_way
        self._under_way = None
        try:
            if isinstance(response, Future):
                response.result()
        except CheckpointException as error:
            self._note_failure(final, _reason(error))
            return
        if self.config.checkpoint.inc_dump:
            self.link = link_after(final)
        self._note_success(final)

    def _note_success(self, final: Path) -> None:
        self.failure = ""
        self.context.say(f"dumped {final}")

    def _note_failure(self, final: Path, reason: str) -> None:
        self._under_way = None
        if self.context.rank == 0:
            shutil.rmtree(self._making(final), ignore_errors=True)
        self.failure = (
            f"{final} could not be written ({reason}); the checkpoints before it are whole; make room, or "
            "give a --save_dir that can be written, and --resume."
        )
        self.context.say(self.failure)


def _reason(error: CheckpointException) -> str:
    """Why a checkpoint could not be written, if the reason lies outside of the program."""
    failures = [wrapped[0] for wrapped in error.failures.values()]
    of_the_system = [failure for failure in failures if isinstance(failure, OSError)]
    if len(of_the_system) < len(failures):
        raise error
    return reason_of(of_the_system[0])
