"""Serving of a trained model in one process: it scores raw values, and loads newer checkpoints of a trainer.

    model = ServedModel.open("dumps/example", model=make_model)   # or a checkpoint, a delta, or an export
    model.score({"user": [42, 42], "year": [1994, 1995], "genres": [["Drama"], ["Comedy", "War"]]})
    model.recommend([42, 43], k=5)              # for each user the best items with their scores
    model.recommend(events=[[(1, 4.5), (3, 2.0)]])        # for a user of whom nothing else is known
    model.similar_items([1])
    follower = Follower("dumps/example", model=make_model)        # or also start="exported"
    follower.refresh()                          # True if follower.model has become newer

It only reads, and needs no process group and no TorchRec. Each file is compared with its digest before it is
used. Files are read while other threads score. A delta is applied under a lock, so no thread sees half of it.
Shapes: B ratings, U users, D numbers in a table row.
"""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from recsuite.checkpoint.chain import chain_at, check_chain, retrying_if_moved
from recsuite.checkpoint.folder import BEST, best_in, newest_in, seen_in
from recsuite.checkpoint.format import digest_of_manifest
from recsuite.checkpoint.origin import ORIGIN, check_origin
from recsuite.datasets.schema import EVENT, EXCLUDE, HISTORY, INCLUDE, USER
from recsuite.errors import UserError, printable, require
from recsuite.files import resolved
from recsuite.models.heads import TwoSided
from recsuite.models.inputs import Inputs
from recsuite.models.retrieval import InnerProduct, Near, Rules, on_device, ranked, top_items
from recsuite.models.tasks import ModelMaker
from recsuite.places import folder_at
from recsuite.runtime.console import say
from recsuite.serving.catalogue import Catalogue, IndexCache, Items, caps_of, described
from recsuite.serving.reader import put, read_change, read_settled, read_snapshot
from recsuite.serving.request import (
    AS_TRAINED,
    HISTORY_AGES,
    HISTORY_RATINGS,
    SEEN,
    check_caps,
    check_distance,
    check_items,
    check_k,
    check_values,
    each_list,
    is_own_of,
    length_of,
    lists_of,
    members_of,
    rule_of,
    values_of_users,
    vectors_of,
)
from recsuite.serving.snapshot import Snapshot
from recsuite.serving.training_data import TrainingFeatures, data_at
from recsuite.training.progress import Progress

LABELLED_HISTORY = {HISTORY, HISTORY_RATINGS, HISTORY_AGES}
NO_HISTORY_WARNING = (
    "The model takes the history of a user, and gets none, so scores are worse and what it recommends may be "
    "what the user had; give --data_path (in Python: ServedModel.open(..., data_path=...)), or events."
)


class ServedModel:
    """Model for serving: threads may score with it while another thread applies a delta. Not collective.

    Args:
        snapshot: The weights and tables; `ServedModel.open` reads them from a folder.
        new_items: See `ServedModel.open`.

    Raises:
        UserError: From its methods, for values of a wrong type and for features that the model lacks.

    Example:
        model = rs.ServedModel.open("dumps/example", model=make_model)
        model.score({"user": [42, 42], "item": [1, 3]})      # float32 [2]
        model.recommend([42], k=10)                           # [[(item, score), ...]]
    """

    def __init__(self, snapshot: Snapshot, new_items: str = AS_TRAINED) -> None:
        require(
            new_items in (AS_TRAINED, EXCLUDE, INCLUDE),
            f"new_items must be one of {AS_TRAINED}, {EXCLUDE}, {INCLUDE}, got {printable(repr(new_items))}",
        )
        self._snapshot, self._new_items = snapshot, new_items
        if new_items == INCLUDE and not self.lists_new_items:
            say(
                f"--new_items include has no effect: the model takes no feature of {snapshot.schema.items} "
                "besides their ids"
            )
        self._catalogue = Catalogue(IndexCache(snapshot.lists))
        self._lock = threading.Lock()
        self._data: TrainingFeatures | None = None
        # Head and vectors of the items that were found on a device last, and the same there.
        self._placed: tuple[Any, torch.Tensor, Any, torch.Tensor] | None = None

    @classmethod
    def open(
        cls,
        folder: Path | str,
        checkpoint: str = BEST,
        data_path: Path | str = "",
        model: ModelMaker | None = None,
        accept_changed_model: bool = False,
        new_items: str = AS_TRAINED,
    ) -> ServedModel:
        """Open an export, a checkpoint, a delta with all before it, or the best or latest one of a folder.

        Args:
            folder: The export, checkpoint, delta, or folder of checkpoints.
            checkpoint: The one of a folder of checkpoints: "best" by validation, or "latest".
            data_path: The data of the training. Features and histories of users and items given by ids come
                from there.
            model: Makes the model, as given to the training, such as `make_model` of example.py; required.
            accept_changed_model: True to use it although its source has changed since the training.
            new_items: "include" to list items that the training has not seen, by their features; "exclude"
                for none of them; or "as_trained", the rule of the training (--new_items).

        Returns:
            The model. Each file that it reads is compared with its digest first.

        Raises:
            UserError: When anything that it needs is missing, damaged, or of another run, or if another model
                wrote it.

        Example:
            model = rs.ServedModel.open("dumps/example", data_path="data/ml-1m", model=make_model)
        """
        snapshot = read_settled(folder_at(folder), checkpoint, model, accept_changed_model)
        served = ServedModel(snapshot, new_items)
        if data_path:
            served.tell(data_at(served.snapshot, str(data_path), str(folder)).features)
        return served

    @property
    def snapshot(self) -> Snapshot:
        """Snapshot that is served now. Its tables change with the next delta."""
        return self._snapshot

    @property
    def run(self) -> str:
        """Name of the training run of the model."""
        return self._snapshot.manifest.run

    @property
    def progress(self) -> Progress:
        """Progress of that training at the checkpoint."""
        return self._snapshot.manifest.progress

    @property
    def age(self) -> float:
        """Seconds since the checkpoint was written."""
        return self._snapshot.age

    @property
    def data(self) -> TrainingFeatures | None:
        """Data that features and histories come from, see `tell`; None for none."""
        return self._data

    @property
    def lists_new_items(self) -> bool:
        """True if items that the training has not seen are listed, by their features, see `open`."""
        schema = self._snapshot.schema
        rule = schema.new_items if self._new_items == AS_TRAINED else self._new_items
        return rule == INCLUDE and schema.describes_items(self._snapshot.features)

    @property
    def longest_history(self) -> int:
        """Maximum number of items in a history that the data add to one pair, see `score`."""
        return self._data.longest if self._data else 0

    def knows(self, feature: str, value: Any) -> bool:
        """Return True if a raw value was in the training and still has a row.

        Args:
            feature: Name of a categorical feature.
            value: Raw value, as in the data of the training.

        Raises:
            UserError: When the model has no such feature, or it has values of another type.

        Example:
            model.knows("user", 42)
        """
        return bool(self._snapshot.known(feature, [value]))

    @torch.inference_mode()
    def score(self, values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        """Return predicted ratings, probabilities of a yes, or ranking scores of B pairs of user and item.

        Args:
            values: A feature's name to B raw values, or to B lists for a feature with lists.
                "history_ratings": the ratings of "history", list by list. "history_ages", for a model that
                uses ages: seconds before the event, list by list; without it all ages are 0. Features that
                are not given, and values that were not in the training, are unknown. For users and items
                given by ids, the data (see `open`) or `describe_items` add the rest.

        Returns:
            The scores, float32 [B], of one snapshot; of a model of L labels float32 [B, L].

        Raises:
            UserError: When a name is unknown, lengths differ, a value has another type, or no item is given.

        Example:
            model.score({"user": [42, 42], "year": [1994, 1995], "genres": [["Drama"], ["Comedy", "War"]]})
        """
        return self._score(self._completed(values))

    def _score(self, values: Mapping[str, Sequence[Any]]) -> torch.Tensor:
        # Rows are copied under the lock, because a delta changes them in place. A delta replaces the dense
        # part as a whole, so the one in this snapshot does not change, and the computation needs no lock.
        with self._lock:
            snapshot = self._snapshot
            looked_up = snapshot.look_up(values)
        members = members_of(values, snapshot.schema)
        check_items(values, snapshot.features, snapshot.schema)
        inputs = Inputs(members, snapshot.numbers_of(values), is_own_of(values, snapshot.schema))
        return snapshot.predict(looked_up, inputs)

    def describe_items(
        self, values: Mapping[str, Sequence[Any]], shown: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Set the items to recommend from now on, and their features; a model itself knows only ids of items.

        Args:
            values: The items' features as `score` takes them: the ids, and any other item features of the
                model. Features that are not given are unknown. Items that were not in the training are
                listed by their features if `open` or the training says so, and as `candidates`. Items with
                equal scores are listed in this order.
            shown: Other values of the items, one for each, that only `item_values` returns, such as titles.

        Raises:
            UserError: As `score`; also without ids, when one stands twice, or for other numbers of values.

        Example:
            model.describe_items({"item": [1, 3], "year": [1995, 1999]})
        """
        catalogue = described(values, self._snapshot, self._catalogue.kept, shown)
        with self._lock:
            self._catalogue = catalogue

    def tell(self, data: TrainingFeatures) -> None:
        """Set the data that features and histories of users and items given by ids come from.

        Args:
            data: The data of the training.

        Raises:
            UserError: When the items do not fit the model.
        """
        self.describe_items(data.of_items(self._snapshot), {**data.items.values, **data.items.others})
        self._data = data

    @property
    def item_names(self) -> list[str]:
        """Names that `item_values` takes; none before a description of the items."""
        return [*self._catalogue.shown]

    def item_values(self, items: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
        """Return values of items as they were described, such as titles.

        Args:
            items: Raw ids.
            names: Features of items; "title" too, if the data of `open` describe them; see `item_names`.

        Returns:
            For each item its raw values by their names; None for an item that is not described.

        Raises:
            UserError: For a name that no description has, and without any description.

        Example:
            model.item_values([1], ["title", "genres"])           # [{"title": ..., "genres": [...]}]
        """
        return self._catalogue.shown_values(items, names)

    @torch.inference_mode()
    def items(self, with_new: bool | None = None) -> Items:
        """Return the items of the current snapshot that lists may have, with their vectors.

        Args:
            with_new: True for those that `candidates` may name: the described items that are new, too.
        """
        with self._lock:
            return self._catalogue.items(
                self._snapshot, self.lists_new_items if with_new is None else with_new
            )

    def unknown_items(self, ids: Sequence[Any]) -> list[Any]:
        """Return the raw ids of items that are not described or, if no items are, have no row, each once."""
        known = {*self._catalogue.known_among(ids, self._snapshot)}
        return [item for item in dict.fromkeys(ids) if item not in known]

    def reload_items(self) -> bool:
        """Read the items' table of the data again if its files have changed, and return True if so.

        Raises:
            UserError: When it cannot be read, or does not fit the model; the items stay as they were, and the
                next call reads it again.
        """
        before = self._data
        if before is None or (newer := before.renewed()) is None:
            return False
        self.tell(newer)
        number, items = len(newer.items.ids), self._snapshot.schema.items
        say(f"read the table of {items} again: {number:,} {items}, {number - len(before.items.ids):,} more")
        return True

    def recommend(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        k: int = 10,
        *,
        events: Sequence[Sequence[Any]] | None = None,
        exclude: str | Sequence[Any] | None = AS_TRAINED,
        candidates: Sequence[Any] | None = None,
        approximate: bool = False,
        also_exclude: Sequence[Any] | None = None,
        at_most: Mapping[str, int] | None = None,
        least_distance: float | None = None,
    ) -> list[list[tuple[Any, float]]]:
        """Return for each of U users the k items with the highest scores, best first.

        Args:
            users: U raw ids, or users' features as `score` takes them, also a history and features of the
                coming event. A user who was not in the training is unknown. For users given by ids, the data
                add the rest (see `open`).
            k: Maximum number of items for each user, 1 or more.
            events: For each user pairs of item and label (or type of the event), the oldest first: another
                form of a history, which is enough without users. Where each event of the training is a mere
                click, the items alone. As in `score`, all of it counts, even if longer than the --history
                of training.
            exclude: "seen" for the items that each user had, None for no items, a list of raw ids for each
                user, or "as_trained": "seen" unless the training allowed such items (--seen). Ids that were
                not in the training are ignored.
            candidates: Raw ids of the only items that may be recommended, for all users; without it all
                items. Also items that were not in the training, if they are described; a warning names
                the others, which are not listed.
            approximate: Search an index of faiss instead of all items, see `recall`; deltas update it.
            also_exclude: A list of raw ids for each user, beside those of `exclude`.
            at_most: Feature of items, see `item_names`, to the largest number of items of each of its
                categories in a list. An item counts in each category of a list, and in none without a
                value. From the highest score on, an item is taken if all its categories have room.
            least_distance: Excludes items that are nearer to one that the user had, as "seen" has them; from
                0 to 2, 1 minus the cosine of `similar_items`.

        Returns:
            U lists of pairs of raw id and score, shorter than k if fewer items are left, all of one snapshot.
            The scores are those of `score` for the same values, to 1e-6; with several labels, of the first.
            Items with equal scores are in the order of `describe_items`, or else of the vocabulary.

        Raises:
            UserError: As `score`; for a k below 1, for lists that are not one for each user, for a feature
                that is not known, for a distance without vectors or without items that users had, and for an
                approximate search with candidates, `at_most` or `least_distance`, of a model that is not for
                ranking, or without faiss.

        Example:
            model.recommend(events=[[(1, 4.5), (3, 2.0)]], k=5)      # [[(item, score), ...]]
        """
        items, positions, scores = self.best(
            users,
            k,
            events=events,
            exclude=exclude,
            candidates=candidates,
            approximate=approximate,
            also_exclude=also_exclude,
            at_most=at_most,
            least_distance=least_distance,
        )
        return items.named(positions, scores)

    @torch.inference_mode()
    def best(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None,
        k: int,
        *,
        events: Sequence[Sequence[Any]] | None = None,
        exclude: str | Sequence[Any] | None = AS_TRAINED,
        candidates: Sequence[Any] | None = None,
        approximate: bool = False,
        also_exclude: Sequence[Any] | None = None,
        at_most: Mapping[str, int] | None = None,
        least_distance: float | None = None,
        device: torch.device | None = None,
    ) -> tuple[Items, torch.Tensor, torch.Tensor]:
        """Return what `recommend` does as tensors; the other arguments and errors are those of `recommend`.

        device: Where the items are found, if the model has vectors and the search is exact; all else is
        computed on the CPU. For one thread.

        Returns:
            The items; positions in `Items.ids`, int64 [U, K], where K is at most k, -1 where fewer items are
            left; and scores, float32 [U, K].
        """
        schema = self._snapshot.schema
        check_k(k)
        check_caps(at_most := {} if at_most is None else at_most)
        check_distance(least_distance := 0 if least_distance is None else least_distance)
        if approximate and (at_most or least_distance):
            raise UserError("approximate excludes at_most and least_distance; give one of them.")
        if not isinstance(users, Mapping):
            users = {} if users is None else {schema.user: users}
        values = values_of_users(self._completed(users, events), events, schema)
        data, had = self._data, users.get(HISTORY, events)
        # The history of a model may be shorter than all the user's items.
        is_known = data is not None and had is None and schema.user in users
        seen: Any = data.seen_items(users[schema.user]) if data and is_known else SEEN
        vectors, items, of_history, described = self._parts_of(
            values, candidates is not None, bool(least_distance)
        )
        for name in at_most:
            items.categorize(name, self.values_of_items)
        near = None
        if least_distance:
            if not is_known and HISTORY not in values:
                raise UserError(
                    f"least_distance requires the {schema.items} that each {schema.user} had. Fix: give "
                    "events, or --data_path (in Python: ServedModel.open(..., data_path=...))."
                )
            items.require_vectors("least_distance")
            # A user may have had an item that is new, also where no list has such items.
            pairs = described.pairs(lists_of(seen, values, len(vectors), schema), HISTORY)
            near = Near(pairs, described.directions, items.directions, 1 - least_distance)
        if candidates is not None:
            items = items.only(candidates)
            near = near and near._replace(of_items=items.directions)
        added = items.added(values.get(HISTORY, ()), of_history)
        rule = rule_of(exclude, schema)
        lists = lists_of(seen if rule == SEEN else rule, values, len(vectors), schema)
        left_out = items.pairs(lists, "exclude")
        if also_exclude is not None:
            lists = each_list("also_exclude", also_exclude, len(vectors), schema)
            left_out = torch.cat([left_out, items.pairs(lists, "also_exclude")], dim=1)
        rules = Rules(near, caps_of(items.categories, at_most))
        head, of_items = items.head, items.vectors
        # Scores of a model without vectors need its tables, which are on the host, as an index is.
        if device is not None and items.side is None and not approximate:
            head, of_items = self._on_device(items, device)
            vectors, left_out = vectors.to(device), left_out.to(device)
            added, rules = on_device(added, device), on_device(rules, device)
        if approximate:
            positions = items.near(vectors, k, left_out, added=added)
        else:
            positions = top_items(head, vectors, of_items, k, left_out, added, rules)
        positions, scores = ranked(head, vectors, of_items, positions, added)
        return items, positions[:, :k].cpu(), scores[:, :k].cpu()

    def _on_device(self, items: Items, device: torch.device) -> tuple[Any, torch.Tensor]:
        """Return the head and the vectors of items on a device. For one thread."""
        held = self._placed
        if held is None or held[0] is not items.head or held[1] is not items.vectors:
            head = copy.deepcopy(items.head).to(device)
            held = self._placed = items.head, items.vectors, head, items.vectors.to(device)
        return held[2], held[3]

    def values_of_items(self, name: str) -> dict[Any, Any]:
        """Return the values of a feature of items, or of a column of their table.

        Args:
            name: Of a feature of items, or a column of their table.

        Returns:
            Raw id to value; None for an item without one.

        Raises:
            UserError: When there is no such feature or column.
        """
        schema, shown = self._snapshot.schema, self._catalogue.shown
        if name not in shown:
            names = printable(", ".join(sorted({*shown} - {schema.item}))) or "none"
            raise UserError(
                f"The {schema.items} have no feature or column {printable(name)}; they have {names}. Fix: "
                "name one of these, or give --data_path (in Python also: describe_items)."
            )
        return dict(zip(shown[schema.item], shown[name], strict=True))

    def _completed(self, values: Any, events: Any = None) -> Any:
        """Return values with what the data add for users and items given by ids; given values come first."""
        if not isinstance(values, Mapping):
            return values
        snapshot, data, had = self._snapshot, self._data, values.get(HISTORY, events)
        schema, ids = snapshot.schema, dict[str, list[Any]]()
        for name in (schema.user, schema.item):
            if name in values:
                length_of(name, values[name], schema)
                ids[name] = [*values[name]]
                check_values(name, ids[name], snapshot.kind_of(name))
        if data is None and schema.user in ids and snapshot.takes_history and had is None:
            warnings.warn(NO_HISTORY_WARNING, stacklevel=5)
        told = data.of_users(ids[schema.user], snapshot) if data and schema.user in ids else {}
        if had is not None:
            told = {name: told[name] for name in told.keys() - LABELLED_HISTORY}
        if schema.item in ids:
            told |= self._catalogue.features_of(ids[schema.item], snapshot)
        return {**values, **{name: given for name, given in told.items() if name not in values}, **ids}

    @torch.inference_mode()
    def vectors_of(self, values: Mapping[str, Sequence[Any]]) -> tuple[torch.Tensor, Items]:
        """Return the vectors of users and the items, both of one snapshot.

        Args:
            values: Features of U users, as for `score`.

        Returns:
            The vectors, float32 [U, D], and the items. A model without vectors returns positions of the
            users, int64 [U], see `Pairs`.

        Raises:
            UserError: As `score`.
        """
        return self._parts_of(values)[:2]

    @torch.inference_mode()
    def _parts_of(
        self, values: Mapping[str, Sequence[Any]], with_new: bool = False, with_described: bool = False
    ) -> tuple[torch.Tensor, Items, torch.Tensor, Items]:
        """Return what `vectors_of` does, what histories add, float32 [V] or [0], and more items, see below.

        with_new: True for the described items that are new, whether or not they are listed. with_described:
        True if the last items include these, False if they are the first items.
        """
        with self._lock:
            snapshot = self._snapshot
            looked_up = snapshot.look_up(values, (USER, EVENT, HISTORY))
            items = self._catalogue.items(snapshot, with_new or self.lists_new_items)
            described = self._catalogue.items(snapshot, with_new=True) if with_described else items
        members = members_of(values, snapshot.schema)
        inputs = Inputs(members, snapshot.numbers_of(values))
        if not isinstance(snapshot.head, TwoSided):
            users = torch.arange(len(inputs.numbers))
            return users, items.with_users(snapshot, (looked_up, inputs)), torch.zeros(0), described
        own_items = getattr(snapshot.head, "own_items", None)
        added = torch.zeros(0) if own_items is None else own_items(members)
        return snapshot.head.user_vectors(looked_up, inputs), items, added, described

    @torch.inference_mode()
    def user_vectors(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        *,
        events: Sequence[Sequence[Any]] | None = None,
    ) -> torch.Tensor:
        """Return the vectors of users, which `search` takes; they fit the same run alone.

        Args:
            users: As for `recommend`.
            events: As for `recommend`.

        Returns:
            The vectors, float32 [U, D].

        Raises:
            UserError: As `recommend`; for a model without vectors.

        Example:
            model.search(model.user_vectors([42]).mean(dim=0, keepdim=True), k=5)
        """
        schema = self._snapshot.schema
        given = users if isinstance(users, Mapping) else {} if users is None else {schema.user: users}
        values = values_of_users(self._completed(given, events), events, schema)
        vectors, items = self.vectors_of(values)
        items.require_vectors("user_vectors")
        return vectors

    @torch.inference_mode()
    def item_vectors(self, items: Sequence[Any]) -> torch.Tensor:
        """Return the vectors of items, of which scores are made with those of users.

        Args:
            items: Raw ids, also of described items that the training has not seen.

        Returns:
            The vectors, float32 [number of items, D]. Number 0 is the bias, unless the model is your own.

        Raises:
            UserError: As `similar_items`.

        Example:
            model.item_vectors([1, 3])                            # float32 [2, D]
        """
        known = self.items(with_new=True)
        known.require_vectors("item_vectors")
        return known.vectors[known.positions_of(items, "item_vectors")]

    @torch.inference_mode()
    def search(
        self, vectors: torch.Tensor | Sequence[Sequence[float]], k: int = 10, *, approximate: bool = False
    ) -> list[list[tuple[Any, float]]]:
        """Return for each vector the k items with the highest scores, as for a user with that vector.

        Args:
            vectors: n vectors in the space of users, see `user_vectors`: float32 [n, D], or lists.
            k: Maximum number of items for each vector, 1 or more.
            approximate: As for `recommend`.

        Returns:
            n lists of pairs of raw id and score, best first: those of `recommend` with exclude=None, without
            what a model adds to the items of a history.

        Raises:
            UserError: For vectors of another width than D, for a k below 1, for a model without vectors, and
                as `recommend` for an approximate search.

        Example:
            model.search(model.user_vectors([42]), k=5)           # [[(item, score), ...]]
        """
        check_k(k)
        if not isinstance(approximate, bool):
            raise UserError(f"approximate must be true or false, got {printable(repr(approximate))}.")
        items = self.items()
        items.require_vectors("search")
        given, nothing = vectors_of(vectors, items.vectors.shape[1]), torch.zeros(2, 0, dtype=torch.int64)
        if approximate:
            positions = items.near(given, k, nothing)
        else:
            positions = top_items(items.head, given, items.vectors, k, nothing)
        positions, scores = ranked(items.head, given, items.vectors, positions)
        return items.named(positions[:, :k], scores[:, :k])

    def recall(self, users: Any = None, k: int = 10, **others: Any) -> float:
        """Return the share of the items of `recommend` that an approximate search also finds.

        Args:
            users: As for `recommend`.
            k: As for `recommend`.
            others: Other arguments of `recommend`, except `approximate`.

        Returns:
            The share, from 0 to 1; NaN without items.

        Raises:
            UserError: As `recommend`.

        Example:
            model.recall([42, 43], k=100)
        """
        exact, near = (
            [{item for item, _ in mine} for mine in self.recommend(users, k, **others, approximate=search)]
            for search in (False, True)
        )
        num_found = sum(len(wanted & mine) for wanted, mine in zip(exact, near, strict=True))
        total = sum(map(len, exact))
        return num_found / total if total else float("nan")

    @torch.inference_mode()
    def similar_items(self, items: Sequence[Any], k: int = 10) -> list[list[tuple[Any, float]]]:
        """Return for each item the k others with the highest cosines, best first.

        The cosine is between the items' factors, D - 1 numbers each: the sums over all their features, see
        `describe_items`. The bias is not used: it is popularity, not similarity.

        Args:
            items: Raw ids, also of described items that the training has not seen.
            k: Maximum number of others for each item, 1 or more.

        Returns:
            For each item a list of pairs of raw id and cosine. Ties as in `recommend`.

        Raises:
            UserError: When the training has not seen an item that is not described either; for a k below 1,
                for ids of another type than in training, and for a model without vectors.

        Example:
            model.similar_items([1], k=5)                         # [[(item, cosine), ...]]
        """
        check_k(k)
        with self._lock:
            described = self._catalogue.items(self._snapshot, with_new=True)
            known = self._catalogue.items(self._snapshot, self.lists_new_items)
        own = described.directions[described.positions_of(items)]
        left_out = known.pairs([[item] for item in items], "similar_items")
        best = top_items(InnerProduct(), own, known.directions, k, left_out)
        return known.named(*ranked(InnerProduct(), own, known.directions, best))

    def apply(self, delta: Path | str) -> bool:
        """Put the next delta into the model in place.

        Args:
            delta: Its folder.

        Returns:
            False if the model holds that delta already.

        Raises:
            UserError: When it is not the next one of its chain, damaged, or of another model; this model is
                as it was.

        Example:
            model.apply("dumps/example/delta-000000098")
        """
        delta = folder_at(delta)
        # Read and checked without the lock, while other threads score: this takes longer than applying it.
        while (change := read_change(delta, before := self._snapshot)) is not None:
            # A training may have been resumed with another source of its model.
            if change.manifest.about.get(ORIGIN) != before.manifest.about.get(ORIGIN):
                check_origin(delta, change.manifest, change.head, before.accepts_changed)
            with self._lock:
                # Another thread may have changed the model first; then read the change again.
                if self._snapshot is before:
                    self._snapshot = put(before, delta, change)
                    return True
        return False

    def replace(self, snapshot: Snapshot) -> None:
        """Serve another checkpoint from now on.

        Args:
            snapshot: The model of that checkpoint.
        """
        # `score` reads the snapshot twice under this lock, and must get the same one.
        with self._lock:
            self._snapshot = snapshot


class Follower:
    """Model that follows a folder of checkpoints while a trainer writes them, see `refresh`. Not collective.

    Args:
        save_dir: The folder of checkpoints.
        start: An export or a checkpoint to begin with; None for the checkpoint of the folder.
        checkpoint: "best" by validation (the latest one if there is no best one yet), or "latest".
        model: As for `ServedModel.open`.
        accept_changed_model: As for `ServedModel.open`.
        data_path: As for `ServedModel.open`; read once, except the table of items, which is read again
            when its files have changed.
        new_items: As for `ServedModel.open`.

    Raises:
        UserError: When the first checkpoint is missing or damaged.

    Example:
        follower = rs.Follower("dumps/example", checkpoint="latest", model=make_model)
        if follower.refresh():
            print(follower.model.progress.step)
    """

    def __init__(
        self,
        save_dir: Path | str,
        start: Path | str | None = None,
        checkpoint: str = BEST,
        model: ModelMaker | None = None,
        accept_changed_model: bool = False,
        data_path: Path | str = "",
        new_items: str = AS_TRAINED,
    ) -> None:
        self.save_dir = folder_at(save_dir)
        self.checkpoint = checkpoint
        opened = start or self.save_dir
        self.model = ServedModel.open(opened, checkpoint, data_path, model, accept_changed_model, new_items)
        self._has_own_data, self._is_newer = bool(data_path), False
        # Held while the model may change: a thread that holds it always gets the same model.
        self.changing = threading.Lock()
        self._seen: set[tuple[str, int | str]] = set()
        # Set by `followers.follow`: the current failure, and the monotonic time of the last look without one.
        self.failure, self.looked = "", time.monotonic()

    def refresh(self) -> bool:
        """Load newer checkpoints, and return True if there were any. Call it from one thread.

        Deltas are applied in place. A new base is loaded as a whole. A new run is loaded as a whole once its
        first epoch ended, or if its validated initial rows are the best and the best is followed. With
        `data_path`, a table of items that has changed is read again.

        Raises:
            UserError: When what is newer cannot be read; the model stays at the last checkpoint that could,
                and the items stay as they were.
        """
        try:
            self._is_newer |= self._refresh_model()
        finally:
            # Also beside a checkpoint that cannot be read.
            if self._has_own_data:
                self.model.reload_items()
        # A newer checkpoint beside a table that cannot be read is reported by the next call.
        is_newer, self._is_newer = self._is_newer, False
        return is_newer

    def _refresh_model(self) -> bool:
        # Listing a folder is cheap, so `refresh` can be called every second; manifests are read only if the
        # listing has changed.
        seen = seen_in(self.save_dir)
        if seen == self._seen:
            return False
        before = self.model.snapshot
        with self.changing:
            retrying_if_moved(self.save_dir, self._take_newer)
        # The listing from before the reading, and only if that succeeded: the next call sees checkpoints that
        # came meanwhile, and retries those that could not be read.
        self._seen = seen
        return self.model.snapshot is not before

    def _take_newer(self) -> None:
        # It may be a link to a folder of checkpoints; in an object store only `resolve` follows one.
        save_dir = resolved(self.save_dir)
        best = best_in(save_dir) if self.checkpoint == BEST else None
        wanted = best or newest_in(save_dir)
        if wanted is None:
            # Between two runs.
            return
        chain = chain_at(wanted)
        newest, before = check_chain(chain)[-1], self.model.snapshot
        follows = before.follows
        # The same base: apply the deltas that the model does not have yet.
        if digest_of_manifest(chain.base) == follows.base_digest:
            # The sequence of deltas is counted from 1.
            for delta in chain.deltas[follows.sequence - 1 :]:
                self.model.apply(delta)
        elif newest.run != self.model.run:
            # Before its first validation a new training is worse than the model that is served.
            if newest.progress.epoch > 0 or (newest.progress.is_best and self.checkpoint == BEST):
                self.model.replace(read_snapshot(chain, before.maker, before.accepts_changed))
        # Never an older one: the model may have started from a newer export.
        elif newest.progress.step >= self.model.progress.step:
            self.model.replace(read_snapshot(chain, before.maker, before.accepts_changed))
