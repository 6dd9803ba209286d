"""A trained model in one process: it scores raw values, and takes each newer checkpoint of a trainer.

    model = ServedModel.open(Path("dumps"))     # the best in a folder, a checkpoint, a delta, or an export
    model.score({"user": [42, 42], "year": [1994, 1995], "genres": [["Drama"], ["Comedy", "War"]]})
    follower = Follower(Path("dumps"))          # or Follower(Path("dumps"), start=Path("exported"))
    follower.refresh()                          # True if follower.model has become newer

Only reads, needs no process group and no TorchRec, and believes no file before it was held against its
digest. Files are read while others score; what was read gets into the model under a lock, at once, so nobody
sees half a delta. Shapes: B ratings, D numbers in a table row.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.storage.chain import chain_at, check_chain, check_whole
from recsuite.checkpoint.storage.choice import chosen_chain, settled, suggesting
from recsuite.checkpoint.storage.directory import BEST, LATEST, newest_in, seen_in
from recsuite.checkpoint.storage.manifest import Progress, digest_of_manifest
from recsuite.datasets.source import SCHEMA
from recsuite.errors import UserError, printable
from recsuite.serving.change import put, read_change
from recsuite.serving.reader import read_snapshot
from recsuite.serving.request import check_values, flat_ratings
from recsuite.serving.snapshot import Snapshot


class ServedModel:
    """A model that threads may score with while another one puts deltas into it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._lock = threading.Lock()

    @classmethod
    def open(cls, folder: Path | str, checkpoint: str = BEST) -> ServedModel:
        """The model of an export, a checkpoint, a delta with all before it, or a folder's best or latest one.

        Raises:
            UserError: when anything that it needs is missing, damaged, or of another run.
        """
        return cls(read_settled(Path(folder), checkpoint))

    @property
    def snapshot(self) -> Snapshot:
        """What is served now. Its tables change with the next delta."""
        return self._snapshot

    @property
    def run(self) -> str:
        """The training that the model is of."""
        return self._snapshot.manifest.run

    @property
    def progress(self) -> Progress:
        """How far that training was."""
        return self._snapshot.manifest.progress

    @property
    def age(self) -> float:
        """Seconds since the checkpoint was written."""
        written = datetime.fromisoformat(self._snapshot.manifest.time)
        return (datetime.now(timezone.utc) - written).total_seconds()

    def knows(self, feature: str, value: Any) -> bool:
        """Whether a raw value was there in the training.

        Raises:
            UserError: when the model has no such feature, or it has values of another type.
        """
        is_name = isinstance(feature, str)
        rows = self._snapshot.vocabulary.get(SCHEMA.vocabulary_of(feature)) if is_name else None
        if rows is None:
            raise UserError(
                f"There is no feature {printable(feature)}; the model has {', '.join(self._snapshot.tables)}."
            )
        check_values(feature, [value], rows)
        return value in rows

    @torch.inference_mode()
    def score(self, values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        """Predicted ratings, or scores of a model for ranking, float32 [B], by the model at one moment.

        values: a feature's name to B raw values, lists of them for one with lists; "history_ratings" to the
        ratings of "history", list by list. What is not given, or was not there in the training, counts as
        unknown.

        Raises:
            UserError: when a name is unknown, lengths differ, or a value is of another type than in training.
        """
        # Rows are copied under the lock, because a delta changes them in place. The dense part is replaced as
        # a whole, so what is held of it stays as it is, and the arithmetic needs no lock.
        with self._lock:
            looked_up = self._snapshot.look_up(values)
            head = self._snapshot.head
        return head.predict(looked_up, flat_ratings(values))

    def apply(self, delta: Path | str) -> bool:
        """Put the next delta into the model in place; False if it holds that delta already.

        Raises:
            UserError: when it is not the next one of its chain, or damaged; the model is as it was.
        """
        delta = Path(delta)
        # Read and checked without the lock, while others score: that takes longer than to put it in place.
        while (change := read_change(delta, before := self._snapshot)) is not None:
            with self._lock:
                # Another thread may have been faster; then look again.
                if self._snapshot is before:
                    self._snapshot = put(before, delta, change)
                    return True
        return False

    def replace(self, snapshot: Snapshot) -> None:
        """Serve another checkpoint from now on."""
        # `score` reads the snapshot twice under this lock, and has to find the same one.
        with self._lock:
            self._snapshot = snapshot


class Follower:
    """Keeps a model as new as a folder of checkpoints in which a trainer continues, see `refresh`.

    It follows the latest checkpoint, not the best one: deltas have an order, and the last one counts.
    """

    def __init__(self, save_dir: Path | str, start: Path | str | None = None) -> None:
        """Begin with the newest checkpoint of the folder, or with `start`, such as an export.

        Raises:
            UserError: see `ServedModel.open`.
        """
        self.save_dir = Path(save_dir)
        self.model = ServedModel.open(start or self.save_dir, LATEST)
        self._seen: set[tuple[str, int]] = set()

    def refresh(self) -> bool:
        """Take what is newer: deltas in place, another base as a whole, and so another run once its first
        epoch was validated; whether there was any. Call it from one thread.

        Raises:
            UserError: when what is newer cannot be read; the model stays at the last checkpoint that could.
        """
        # To list a folder costs little, so `refresh` can be called every second; manifests are read only
        # where something has changed.
        seen = seen_in(self.save_dir)
        if seen == self._seen:
            return False
        before = self.model.snapshot
        settled(self.save_dir, self._take_newer)
        # What was listed before the reading, and only where that succeeded: the next call looks at what came
        # meanwhile, and again at what could not be read.
        self._seen = seen
        return self.model.snapshot is not before

    def _take_newer(self) -> None:
        if newest_in(self.save_dir) is None:
            # Between two runs.
            return
        chain = chain_at(self.save_dir)
        newest, follows = check_chain(chain)[-1], self.model.snapshot.follows
        # The same base: all it takes are the deltas that the model does not have yet.
        if digest_of_manifest(chain.base) == follows.base_digest:
            # The sequence of deltas is counted from 1.
            for delta in chain.deltas[follows.sequence - 1 :]:
                self.model.apply(delta)
        elif newest.run != self.model.run:
            # The first checkpoints of a new training are worse than what is served.
            if newest.progress.epoch > 0:
                self.model.replace(read_snapshot(chain))
        # Not one that is older: the model may have begun with an export of what comes later.
        elif newest.progress.step >= self.model.progress.step:
            self.model.replace(read_snapshot(chain))


def read_settled(folder: Path, checkpoint: str = BEST) -> Snapshot:
    """`read_snapshot` of what a folder stands for, also while a trainer continues there."""

    def read() -> Snapshot:
        return read_snapshot(chosen_chain(folder, checkpoint))

    # No other rank waits here, so a checkpoint is suggested only after every byte of it was checked.
    return suggesting(folder, lambda: settled(folder, read), lambda other: check_whole(chain_at(other)))
