"""A trained model in one process: it scores raw values, and takes each newer checkpoint of a trainer.

    model = ServedModel.open(Path("dumps"))     # the best in a folder, a checkpoint, a delta, or an export
    model.score({"user": [42, 42], "year": [1994, 1995], "genres": [["Drama"], ["Comedy", "War"]]})
    model.recommend([42, 43], k=5)              # for each user the best items with their scores
    model.recommend(events=[[(1, 4.5), (3, 2.0)]])        # for somebody of whom nothing else is known
    model.similar_items([1])
    follower = Follower(Path("dumps"))          # or Follower(Path("dumps"), start=Path("exported"))
    follower.refresh()                          # True if follower.model has become newer

Only reads, needs no process group and no TorchRec, and believes no file before it was held against its
digest. Files are read while others score; what was read gets into the model under a lock, at once, so nobody
sees half a delta. Shapes: B ratings, U users, D numbers in a table row.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from recsuite.checkpoint.storage.chain import chain_at, check_chain
from recsuite.checkpoint.storage.choice import settled
from recsuite.checkpoint.storage.directory import BEST, best_in, newest_in, seen_in
from recsuite.checkpoint.storage.manifest import Progress, digest_of_manifest
from recsuite.datasets.schema import EVENT, HISTORY, USER
from recsuite.files import local
from recsuite.models.heads import TwoSided
from recsuite.models.retrieval import InnerProduct, best_places, ranked
from recsuite.models.rows import Inputs
from recsuite.models.tasks import ModelMaker
from recsuite.serving.catalogue import Catalogue, Items, described
from recsuite.serving.index import KeptIndex
from recsuite.serving.model_files import put, read_change
from recsuite.serving.reader import read_settled, read_snapshot
from recsuite.serving.request import (
    AS_TRAINED,
    HISTORY_AGES,
    HISTORY_RATINGS,
    SEEN,
    check_items,
    check_k,
    check_values,
    length_of,
    lists_of,
    members_of,
    rule_of,
    values_of_users,
)
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    from recsuite.serving.display import Told

LABELLED_HISTORY = {HISTORY, HISTORY_RATINGS, HISTORY_AGES}
WITHOUT_HISTORIES = (
    "The model takes the history of a user, and gets none, so scores are worse and what it recommends may be "
    "what the user had; give --data_path (in Python: ServedModel.open(..., data_path=...)), or events."
)


class ServedModel:
    """Model for serving: threads may score with it while another thread applies a delta.

    snapshot: the weights and tables; `ServedModel.open` reads them from a folder.

    Raises:
        UserError: from its methods, for values of a wrong type and for features that the model lacks.

        model = rs.ServedModel.open("dumps")
        model.score({"user": [42, 42], "item": [1, 3]})      # float32 [2]
        model.recommend([42], k=10)                           # [[(item, score), ...]]
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._catalogue = Catalogue(KeptIndex(snapshot.lists))
        self._lock = threading.Lock()
        self._data: Told | None = None

    @classmethod
    def open(
        cls,
        folder: Path | str,
        checkpoint: str = BEST,
        data_path: Path | str = "",
        model: ModelMaker | None = None,
    ) -> ServedModel:
        """The model of an export, a checkpoint, a delta with all before it, or a folder's best or latest one.

        model: makes a model of your own, as it was given to the training; without it that of the task.
        data_path: the data of the training: features and histories of users and items that are given by their
        ids come from there.

        Raises:
            UserError: when anything that it needs is missing, damaged, or of another run.
        """
        served = ServedModel(read_settled(local(folder), checkpoint, model))
        if data_path:
            from recsuite.serving.recommend import tell

            tell(served, str(data_path), str(folder))
        return served

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
        return self._snapshot.age

    @property
    def longest_lists(self) -> int:
        """How many items and users the data give with one pair at most, see `score`."""
        return sum(each or 0 for each in self._data.longest.values()) if self._data else 0

    def knows(self, feature: str, value: Any) -> bool:
        """Whether a raw value was there in the training, and still has a row.

        Raises:
            UserError: when the model has no such feature, or it has values of another type.
        """
        return bool(self._snapshot.known(feature, [value]))

    @torch.inference_mode()
    def score(self, values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        """Predicted ratings, probabilities of a yes, or scores for ranking, float32 [B], of one moment; of a
        model of several labels float32 [B, L]. The first one is what recommendations go by.

        values: a feature's name to B raw values, lists of them for one with lists; "history_ratings" to the
        ratings of "history", list by list; and of a model that counts them by it, "history_ages" to how many
        seconds before the event each of it was; without them all of it was the moment before. What else is
        not given, or was not in the training, is unknown; of users and items by ids the data say the rest,
        where they are given (`open`).

        Raises:
            UserError: when a name is unknown, lengths differ, a value has another type, or no item is given.
        """
        return self._score(self._completed(values))

    def _score(self, values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        # Rows are copied under the lock, because a delta changes them in place. The dense part is replaced as
        # a whole, so what is held of it stays as it is, and the arithmetic needs no lock.
        with self._lock:
            snapshot = self._snapshot
            looked_up = snapshot.look_up(values)
        members = members_of(values, snapshot.schema)
        check_items(values, snapshot.features, snapshot.schema)
        return snapshot.predict(looked_up, Inputs(members, snapshot.numbers_of(values)))

    def describe_items(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Say what the items are that are recommended from now on: a model knows the ids of its own alone.

        values: the items' features as `score` takes them, the ids and whatever else the model has of an item.
        What is not given counts as unknown; items that the training has not seen are left out. Their order is
        that of items with equal scores.

        Raises:
            UserError: as `score`; also without ids, or where one stands twice.
        """
        catalogue = described(values, self._snapshot, self._catalogue.kept)
        with self._lock:
            self._catalogue = catalogue

    def tell(self, data: Told) -> None:
        """Take from data what users and items are that are given by their ids, and what users had."""
        self.describe_items(data.of_items(self._snapshot))
        self._data = data

    @torch.inference_mode()
    def items(self) -> Items:
        """The items of the model at one moment."""
        with self._lock:
            return self._catalogue.items(self._snapshot)

    @torch.inference_mode()
    def recommend(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        k: int = 10,
        *,
        events: Sequence[Sequence[tuple[Any, float]]] | None = None,
        exclude: str | Sequence[Any] | None = AS_TRAINED,
        candidates: Sequence[Any] | None = None,
        approximate: bool = False,
    ) -> list[list[tuple[Any, float]]]:
        """For each of U users the k items with the highest scores: pairs of raw id and score, the best first.

        The scores are those of `score` for the same values, to 1e-6. Of items with equal scores the first in
        the order of `describe_items` comes first; without it that is the order of the vocabulary. There are
        fewer than k where fewer are left. All is of the model at one moment.

        users: U raw ids, or a user's features as `score` takes them, also a history and the coming event's. A
        user whom the training has not seen counts as unknown. events: for each user pairs of item and label,
        the oldest first: a history in another form, which alone is enough. As in `score`, all of it counts,
        also what is longer than the --history of the training.
        Of users by ids the data say the rest, where they are given (`open`).
        exclude: "seen" for the items that each user had, None for nothing, a list of raw ids for each user,
        or "as_trained": "seen" unless the training allowed such items (--seen). candidates: raw ids of the
        only items that may be recommended, to all of the users; without them all. Ids that the training has
        not seen are left out of both.
        approximate: search an index of faiss instead of all items, see `recall`; deltas change it.

        Raises:
            UserError: as `score`; for a k below 1, for lists that are not one for each user, and for an
                approximate search among candidates, of a model that is not for ranking, or without faiss.
        """
        schema = self._snapshot.schema
        check_k(k, schema)
        if not isinstance(users, Mapping):
            users = {} if users is None else {schema.user: users}
        values = values_of_users(self._completed(users, events), events, schema)
        data, had = self._data, users.get(HISTORY, events)
        if data and had is None and schema.user in users and rule_of(exclude, schema) == SEEN:
            # Of these a history may have fewer.
            exclude = data.had(users[schema.user])
        vectors, items = self.vectors_of(values)
        if candidates is not None:
            items = items.only(candidates)
        left_out = items.pairs(lists_of(exclude, values, len(vectors), schema), "exclude")
        if approximate:
            places = items.near(vectors, k, left_out)
        else:
            places = best_places(items.head, vectors, items.vectors, k, left_out)
        places, scores = ranked(items.head, vectors, items.vectors, places)
        return items.named(places[:, :k], scores[:, :k])

    def _completed(self, values: Any, events: Any = None) -> Any:
        """Return values with what the data say of the users and items that they give by ids. What is given
        counts before that, and so do `events`.
        """
        if not isinstance(values, Mapping):
            return values
        snapshot, data, had = self._snapshot, self._data, values.get(HISTORY, events)
        schema, ids = snapshot.schema, dict[str, list[Any]]()
        for name in (schema.user, schema.item):
            if name in values:
                length_of(name, values[name], schema)
                ids[name] = [*values[name]]
                check_values(name, ids[name], snapshot.kind_of(name))
        if data is None:
            if schema.user in ids and snapshot.takes_history and had is None:
                warnings.warn(WITHOUT_HISTORIES, stacklevel=5)
            return {**values, **ids}
        told = data.of_users(ids[schema.user], snapshot) if schema.user in ids else {}
        if had is not None:
            told = {name: told[name] for name in told.keys() - LABELLED_HISTORY}
        if schema.item in ids:
            told |= data.of_items(snapshot, ids[schema.item])
        return {**told, **{name: given for name, given in values.items() if name not in ids}}

    @torch.inference_mode()
    def vectors_of(self, values: Mapping[str, Sequence[Any]]) -> tuple[torch.Tensor, Items]:
        """The vectors of users, as `score` takes them, float32 [U, D], and the items, of one moment. Of a
        model without vectors they are places, int64 [U], see `Pairs`.
        """
        with self._lock:
            snapshot = self._snapshot
            looked_up = snapshot.look_up(values, (USER, EVENT, HISTORY))
            items = self._catalogue.items(snapshot)
        members = members_of(values, snapshot.schema)
        inputs = Inputs(members, snapshot.numbers_of(values))
        if isinstance(snapshot.head, TwoSided):
            return snapshot.head.user_vectors(looked_up, inputs), items
        return torch.arange(len(inputs.numbers)), items.with_users(snapshot, (looked_up, inputs))

    def recall(self, users: Any = None, k: int = 10, **others: Any) -> float:
        """The share of the items of `recommend` that an approximate search finds too, from 0 to 1.

        Takes what `recommend` takes but `approximate`, and raises the same; NaN where there are no items.
        """
        exact, near = (
            [{item for item, _ in mine} for mine in self.recommend(users, k, **others, approximate=search)]
            for search in (False, True)
        )
        found = sum(len(wanted & mine) for wanted, mine in zip(exact, near, strict=True))
        total = sum(map(len, exact))
        return found / total if total else float("nan")

    @torch.inference_mode()
    def similar_items(self, items: Sequence[Any], k: int = 10) -> list[list[tuple[Any, float]]]:
        """For each item the k others with the highest cosines: pairs of raw id and cosine, the best first.

        The cosine is that of the items' factors, D - 1 numbers each, which are the sums of what the model
        learned of all their features, see `describe_items`. The bias is left out: it says how well an item
        does with everybody, not what it is like. Ties as in `recommend`.

        Raises:
            UserError: when the training has not seen an item, or there is no description of it; for a k below
                1, and for ids of another type than in training.
        """
        check_k(k, self._snapshot.schema)
        known = self.items()
        places = known.places_of(items)
        own = known.directions[places]
        left_out = torch.stack([torch.arange(len(places)), places])
        best = best_places(InnerProduct(), own, known.directions, k, left_out)
        return known.named(*ranked(InnerProduct(), own, known.directions, best))

    def apply(self, delta: Path | str) -> bool:
        """Put the next delta into the model in place; False if it holds that delta already.

        Raises:
            UserError: when it is not the next one of its chain, or damaged; the model is as it was.
        """
        delta = local(delta)
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
    """A model that follows a folder of checkpoints while a trainer writes them, see `refresh`.

    save_dir: the folder; start: an export to begin with; checkpoint: "best" by validation or "latest", also
    taken where there is no best one; model: makes a model of your own, as for `ServedModel.open`.

    Raises:
        UserError: when the first checkpoint is missing or damaged.

        follower = rs.Follower("dumps", checkpoint="latest")
        if follower.refresh():
            print(follower.model.progress.step)
    """

    def __init__(
        self,
        save_dir: Path | str,
        start: Path | str | None = None,
        checkpoint: str = BEST,
        model: ModelMaker | None = None,
    ) -> None:
        """Begin with that checkpoint of the folder, or with `start`, such as an export. model: see
        `ServedModel.open`.

        Raises:
            UserError: see `ServedModel.open`.
        """
        self.save_dir = local(save_dir)
        self.checkpoint = checkpoint
        self.model = ServedModel.open(start or self.save_dir, checkpoint, model=model)
        # Held while the model may become another one: whoever holds it asks the same one all the time.
        self.changing = threading.Lock()
        self._seen: set[tuple[str, int]] = set()
        # Of `following.follow`: the failure that lasts, and the monotonic time of the last look without one.
        self.failure, self.looked = "", time.monotonic()

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
        with self.changing:
            settled(self.save_dir, self._take_newer)
        # What was listed before the reading, and only where that succeeded: the next call looks at what came
        # meanwhile, and again at what could not be read.
        self._seen = seen
        return self.model.snapshot is not before

    def _take_newer(self) -> None:
        best = best_in(self.save_dir) if self.checkpoint == BEST else None
        wanted = best or newest_in(self.save_dir)
        if wanted is None:
            # Between two runs.
            return
        chain = chain_at(wanted)
        newest, follows = check_chain(chain)[-1], self.model.snapshot.follows
        # The same base: all it takes are the deltas that the model does not have yet.
        if digest_of_manifest(chain.base) == follows.base_digest:
            # The sequence of deltas is counted from 1.
            for delta in chain.deltas[follows.sequence - 1 :]:
                self.model.apply(delta)
        elif newest.run != self.model.run:
            # The first checkpoints of a new training are worse than what is served.
            if newest.progress.epoch > 0:
                self.model.replace(read_snapshot(chain, self.model.snapshot.maker))
        # Not one that is older: the model may have begun with an export of what comes later.
        elif newest.progress.step >= self.model.progress.step:
            self.model.replace(read_snapshot(chain, self.model.snapshot.maker))
