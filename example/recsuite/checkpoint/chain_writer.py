"""Writer of the checkpoints of one training: full checkpoints, and deltas that build on the one before."""

from __future__ import annotations

import dataclasses
import math
import shutil
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from recsuite.checkpoint.delta import TouchedRows, Vocabulary, write_delta
from recsuite.checkpoint.dynamic import add_texts
from recsuite.checkpoint.full import (
    FullWriter,
    digest_of_vocabulary,
    dynamic_of,
    features_of,
    shapes_of,
    tensors_of,
)
from recsuite.checkpoint.storage.chain import CheckpointChain
from recsuite.checkpoint.storage.directory import delta_name, full_name, making_name, new_attempt
from recsuite.checkpoint.storage.manifest import VOCABULARY, Manifest, ParentLink, link_after
from recsuite.checkpoint.storage.writer import publish
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError
from recsuite.files import reason_of
from recsuite.runtime.host import installed_versions
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, raise_on_all
from recsuite.sharding.plan import describe_plan
from recsuite.training.progress import Progress
from recsuite.training.state import ShardedModel

# Bytes per second of the slowest disk that ranks wait for.
SLOWEST_DISK = 5 * 10**6


class ChainWriter:
    """Writer of checkpoints into --save_dir, from the tensors of a train state.

    If a checkpoint fails because of space or permissions, one line is printed and the training continues; the
    next checkpoint tries again. chain: the checkpoint that the train state was restored from, if any; the
    first delta builds on it. Collective: every rank.
    """

    def __init__(
        self,
        train_state: ShardedModel,
        run: str,
        chain: CheckpointChain | None,
        columns: Columns,
        config: Config,
        context: RuntimeContext,
    ) -> None:
        self.run = run
        self.columns = columns
        self.config = config
        self.context = context
        self.save_dir = Path(config.checkpoint.save_dir)
        # The reason why the last checkpoint could not be written; empty if it was written.
        self.failure = ""
        # Collected once for the whole training: training and restoring change these tensors in place.
        self.tensors = tensors_of(train_state)
        self.dynamic = dynamic_of(train_state)
        self.optimizer = train_state.optimizer_name
        raise_on_all(lambda: add_texts(self.dynamic, columns, chain))
        self.shapes = shapes_of(self.tensors)
        self.plan = describe_plan(train_state.model, columns)
        # Looked up once: this takes as long as writing a small delta.
        self.versions = installed_versions()
        self.vocabulary_digest = digest_of_vocabulary(columns)
        # A rank on another machine can outlive its attempt. Its late writes must not get into a folder of
        # this attempt, so the names of unfinished folders contain the attempt, which all ranks must share.
        self.attempt: str = broadcast_from_rank0(new_attempt)
        # A separate group: an --async_dump uses it in a thread while the training uses the other groups. Its
        # timeout is longer, because one rank may have everything to write. On gloo, because torch requires a
        # CPU backend to write in a thread.
        self.group = dist.new_group(backend="gloo", timeout=self._writing_deadline())
        # The parent of the next delta; None if there is none, and the next checkpoint must be full.
        self.link: ParentLink | None = None
        # The full checkpoint that is being written, and the future of its writing.
        self._under_way: tuple[Path, Any] | None = None
        if config.checkpoint.inc_dump:
            # Only if deltas are written: the marks take a byte for each row, and are set in every lookup.
            self.touched = TouchedRows(train_state.model, self.tensors)
            self.raw_values = Vocabulary(Path(columns.folder) / VOCABULARY, columns.schema)
            self.link = None if chain is None else link_after(chain.folder)

    def take_up(self, columns: Columns) -> None:
        """Continue with data that have grown; static tables have the same rows as before. Collective.

        Raises:
            UserError: when two texts have the same id.
        """
        # A checkpoint under way may still copy files of the old data.
        self.finish()
        self.columns = columns
        raise_on_all(lambda: self.dynamic.add_texts(columns))

    @property
    def next_is_delta(self) -> bool:
        """True if the next checkpoint is a delta; call `finish` before."""
        return self.config.checkpoint.inc_dump and self.link is not None

    def write(self, progress: Progress, in_full: bool = False) -> None:
        """Write a delta if deltas are asked for and there is a parent, else a full checkpoint."""
        if self.next_is_delta and not in_full:
            self.write_delta(progress)
        else:
            self.write_full(progress)

    def write_full(self, progress: Progress) -> None:
        """Write a full checkpoint; with --async_dump it may not be complete before `finish`."""
        final = self.save_dir / full_name(progress.step)
        making = self._making(final)
        writer = FullWriter(
            making,
            self._describe(progress, link=None),
            # A copy of the current state, also for a checkpoint that is written in a thread.
            self.dynamic.arrays(is_delta=False),
            Path(self.columns.folder),
            self.config,
            lambda: publish(making, final, self.config.checkpoint.keep),
        )
        # The asynchronous save returns when it has copied the tensors, so the next step may change them while
        # a thread writes the copy.
        save = dcp.async_save if self.config.checkpoint.async_dump else dcp.save
        # If this one fails, the next one must be full again: a delta holds the rows that changed since the
        # last checkpoint, and their marks are cleared below, before it is known whether this one succeeds.
        self.link = None
        self._under_way = (final, None)
        try:
            response = save(self.tensors, storage_writer=writer, process_group=self.group)
            self._under_way = (final, response)
        except CheckpointException as error:
            self._note_failure(final, _reason(error))
        if self.config.checkpoint.inc_dump:
            # Changes from here on, while the copy is written, are not in it.
            self.touched.clear()
            self.dynamic.clear_changes()
        if not self.config.checkpoint.async_dump:
            self.finish()

    def write_delta(self, progress: Progress) -> None:
        """Write a delta: the rows that changed since the last checkpoint, and the dense part."""
        assert self.link is not None
        final = self.save_dir / delta_name(progress.step)
        making = self._making(final)
        try:
            write_delta(
                making,
                self.touched.get_unique_ids(),
                self.tensors,
                self.dynamic,
                self._describe(progress, self.link),
                self.raw_values,
                self.config,
                lambda: publish(making, final, self.config.checkpoint.keep),
                self.group,
            )
        except UserError as error:
            self._note_failure(final, str(error))
            return
        # Only after success: the changes of a delta that failed belong to the next one.
        self.touched.clear()
        self.dynamic.clear_changes()
        self.link = self.link.after(progress.step)
        self._note_success(final)

    def finish(self) -> None:
        """Wait for the checkpoint that is under way, and print whether it was written."""
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
            # Only after the write: the link holds the digest of the manifest, which is written last.
            self.link = link_after(final)
        self._note_success(final)

    def close(self) -> None:
        """Wait for the last checkpoint.

        Raises:
            UserError: when it failed. An earlier one may have: what it held is in those after it.
        """
        self.finish()
        if self.failure:
            raise UserError(self.failure)

    def _making(self, final: Path) -> Path:
        return final.with_name(making_name(final, self.attempt))

    def _writing_deadline(self) -> timedelta:
        """Return the time that a rank waits for shard files of the others; one rank may write all bytes."""
        # A weight has 4 bytes.
        num_bytes = 4 * sum(math.prod(shape) for shape, _ in self.shapes.values())
        return timedelta(seconds=self.config.runtime.timeout + num_bytes / SLOWEST_DISK)

    def _describe(self, progress: Progress, link: ParentLink | None) -> Manifest:
        """Return the manifest without its files. Collective if there are dynamic tables."""
        return Manifest(
            run=self.run,
            progress=progress,
            tensors=self.shapes,
            # Added when the files are written.
            files=(),
            vocabulary=self.vocabulary_digest,
            optimizer=self.optimizer,
            about={"plan": self.plan.splitlines(), "versions": self.versions, "model": self._model()},
            link=link,
            features=features_of(self.columns),
            ratings=self.columns.digest,
            # A resume needs it to compute the previous global batch, on which the tables' learning rate
            # depends.
            world_size=self.context.world_size,
            dynamic=self.dynamic.records(self.group),
        )

    def _model(self) -> dict[str, Any]:
        """Return the flags from which a server makes the model, with the length of a history."""
        return {**dataclasses.asdict(self.config.model), "history": self.config.data.history}

    def _note_success(self, final: Path) -> None:
        self.failure = ""
        self.context.say(f"dumped {final}")

    def _note_failure(self, final: Path, reason: str) -> None:
        self._under_way = None
        # The next checkpoint may need the space.
        if self.context.rank == 0:
            shutil.rmtree(self._making(final), ignore_errors=True)
        self.failure = (
            f"{final} could not be written ({reason}); the checkpoints before it are whole; make room, or "
            "give a --save_dir that can be written, and --resume."
        )
        self.context.say(self.failure)


def _reason(error: CheckpointException) -> str:
    """Return the reason why a checkpoint could not be written; re-raise an error of the program itself."""
    failures = [wrapped[0] for wrapped in error.failures.values()]
    # torch raises this on every rank with the failures of all, so all ranks decide alike. A failure that is
    # not an OSError is a bug of the program, and keeps its traceback.
    of_the_system = [failure for failure in failures if isinstance(failure, OSError)]
    if len(of_the_system) < len(failures):
        raise error
    return reason_of(of_the_system[0])
