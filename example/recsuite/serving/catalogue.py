"""The items that a model may recommend: their ids, and their vectors in the model of the moment.

Shapes: N items, D numbers in a vector, U users, E pairs of a user and an item that are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from recsuite.datasets.schema import AUDIENCE, HISTORY, ITEM, Schema
from recsuite.errors import UserError, printable
from recsuite.models.heads import TwoSided
from recsuite.models.layers import Members
from recsuite.models.retrieval import without
from recsuite.models.rows import FeatureRows, Inputs
from recsuite.models.tasks import first_label
from recsuite.serving.index import KeptIndex, NearestItems
from recsuite.serving.request import check_ids, members_of
from recsuite.serving.snapshot import Found, Rows, Snapshot

# Whose features say what an item is.
OF_ITEMS = (ITEM, AUDIENCE)
# What a model without vectors is told of users, or of items.
Side = tuple[FeatureRows, Inputs]


@dataclass(frozen=True)
class Pairs:
    """Scores of users with items by the forward of a model without vectors, see `retrieval.Scorer`. Users and
    items are given by their places, int64.
    """

    snapshot: Snapshot
    users: Side
    items: Side

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the score of each pair, float32 [B], of places [B] both."""
        if not len(users):
            return torch.zeros(0)
        found: dict[str, Any] = {}
        for (rows, _), places in ((self.users, users), (self.items, items)):
            for name, each in rows.found.items():
                found[name] = Rows(each.values(), each.lengths()).at(places)
        (rows, told), described = self.users, self.items[1]
        lengths = rows.found[HISTORY].lengths() if HISTORY in rows.found else users[:0]
        parts = (Rows(each, lengths).at(users).found if len(each) else each for each in told.members)
        # Of the other side's numbers there is none.
        numbers = torch.where(told.numbers[users].isnan(), described.numbers[items], told.numbers[users])
        inputs = Inputs(Members(*parts), numbers)
        return first_label(self.snapshot.predict(FeatureRows(found, rows.scale, rows.lists), inputs))

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the score of each user with each item, float32 [U, N], of places [U] and [N]."""
        pairs = users.repeat_interleave(len(items)), items.repeat(len(users))
        return self.score_pairs(*pairs).view(len(users), len(items))


@dataclass(frozen=True)
class Items:
    """Items in the order in which equal scores are listed.

    ids: raw; keys: theirs, int64 [N], see `Found`; vectors: float32 [N, D], of `head`, or places, int64 [N],
    see `Pairs`; kind: the type of the raw ids that the training has seen; kept: the index, of other models
    too; None where these are candidates, and not all items; side: of a model without vectors.
    """

    head: Any
    schema: Schema
    ids: list[Any]
    keys: torch.Tensor
    vectors: torch.Tensor
    kind: type[Any] | None
    kept: KeptIndex | None
    side: Side | None = None

    def with_users(self, snapshot: Snapshot, users: Side) -> Items:
        """Return the items with what scores them for some users; of a model without vectors."""
        assert self.side is not None
        return dataclasses.replace(self, head=Pairs(snapshot, users, self.side))

    @functools.cached_property
    def places(self) -> dict[Any, int]:
        """Raw id to place."""
        return {item: place for place, item in enumerate(self.ids)}

    @functools.cached_property
    def directions(self) -> torch.Tensor:
        """The factors of the vectors with the length 1, float32 [N, D - 1]; without them 0.

        Raises:
            UserError: when the model has no vectors.
        """
        if self.side is not None:
            raise UserError(
                "similar_items requires vectors of items, and this model has none. Fix: make it a "
                "subclass of recsuite.TwoSided."
            )
        return torch.nn.functional.normalize(self.vectors[:, 1:], dim=1)

    @functools.cached_property
    def nearest(self) -> NearestItems:
        """The index of faiss; made, or brought to this model, when it is first asked for.

        Raises:
            UserError: when faiss is not installed, the scores are more than products of vectors, or these are
                candidates.
        """
        if self.kept is None:
            raise UserError("An approximate search is one of all items; leave out approximate or candidates.")
        if not getattr(self.head, "scores_are_products", False):
            raise UserError(
                "An approximate search needs scores that are products of vectors, as those of --task "
                "ranking; leave approximate out."
            )
        try:
            # The tables of a training decay by one number that all vectors have in common: what nobody
            # looked up is the same without it.
            return self.kept.of(self.keys, self.vectors / self.head.row_scale)
        except ImportError:
            raise UserError(
                "An approximate search needs faiss, which is not installed; run pip install faiss-cpu, or "
                "leave approximate out."
            ) from None

    def only(self, candidates: Any) -> Items:
        """Those of the candidates that the training has seen, each once and in this order."""
        wanted = set(check_ids("candidates", candidates, self.kind, self.schema))
        places = sorted(self.places[item] for item in wanted & self.places.keys())
        ids, which = [self.ids[place] for place in places], torch.tensor(places, dtype=torch.int64)
        return dataclasses.replace(
            self, ids=ids, keys=self.keys[which], vectors=self.vectors[which], kept=None
        )

    def pairs(self, lists: Sequence[Any], name: str) -> torch.Tensor:
        """Numbers of users and places of items, int64 [2, E], of a list of raw ids for each user.

        Unknown ids have no place.
        """
        found = [
            (user, self.places[item])
            for user, ids in enumerate(lists)
            for item in dict.fromkeys(check_ids(name, ids, self.kind, self.schema))
            if item in self.places
        ]
        return torch.tensor(found, dtype=torch.int64).view(-1, 2).t()

    def places_of(self, ids: Any) -> torch.Tensor:
        """The places of raw ids, int64 [their number].

        Raises:
            UserError: when one is not here, or is of another type than in training.
        """
        wanted = check_ids("similar_items", ids, self.kind, self.schema)
        for item in wanted:
            if item not in self.places:
                raise UserError(
                    f"The model knows no {self.schema.item} {printable(item)}; ask for one that its training "
                    "has seen."
                )
        return torch.tensor([self.places[item] for item in wanted], dtype=torch.int64)

    def near(
        self, users: torch.Tensor, k: int, left_out: torch.Tensor, breadth: int | None = None
    ) -> torch.Tensor:
        """Places of at least k items for users, float32 [U, D], by the index; -1 for those that are left out.

        left_out: see `pairs`; breadth: see `NearestItems.search`.

        Raises:
            UserError: see `nearest`.
        """
        # As many more as the user with the most has: they may be the best.
        more = int(left_out[0].bincount().max()) if left_out.numel() else 0
        return without(self.nearest.search(users, k + more, breadth), left_out)

    def named(self, places: torch.Tensor, scores: torch.Tensor) -> list[list[tuple[Any, float]]]:
        """Raw ids with their scores, for places and scores [U, k]; -1 is none."""
        return [
            [(self.ids[place], score) for place, score in zip(*mine, strict=True) if place >= 0]
            for mine in zip(places.tolist(), scores.tolist(), strict=True)
        ]


@dataclass(frozen=True)
class Located:
    """Items by what their rows are found by: ids, by features, and dense numbers, float32 [N, numbers].

    holder: the object whose others they are, by which it is seen that they still are.
    """

    holder: object
    ids: list[Any]
    found: dict[str, Found]
    numbers: torch.Tensor

    def only(self, which: torch.Tensor, holder: object) -> Located:
        """Some of them. which: bool [N]."""
        ids = [self.ids[place] for place in which.nonzero().view(-1).tolist()]
        found = {name: each.only(which) for name, each in self.found.items()}
        return Located(holder, ids, found, self.numbers[which])


class Catalogue:
    """What a server knows of the items, whichever model it serves.

    values: a feature's name to raw values, as `ServedModel.describe_items` takes them; without them each item
    of the training, with its id alone. kept: the index of the items, however they were described before.
    """

    def __init__(self, kept: KeptIndex, values: Mapping[str, Sequence[Any]] | None = None) -> None:
        self.kept = kept
        self._values = values
        # All that are described, and those of them that the training has seen.
        self._described: Located | None = None
        self._located: Located | None = None
        self._items: Items | None = None

    def items(self, snapshot: Snapshot) -> Items:
        """The items with their vectors in a model. Computed once for each model; hold the model's lock."""
        # Every delta brings another head with the rows that it changes.
        if self._items is None or self._items.head is not snapshot.head:
            located = self._locate(snapshot)
            inputs = Inputs(members_of({}, snapshot.schema), located.numbers)
            head, item, rows = snapshot.head, snapshot.schema.item, snapshot.rows_of(located.found)
            has_vectors = isinstance(head, TwoSided)
            vectors = head.item_vectors(rows, inputs) if has_vectors else torch.arange(len(located.ids))
            side = None if has_vectors else (rows, inputs)
            keys, kind = located.found[item].keys, snapshot.kind_of(item)
            self._items = Items(head, snapshot.schema, located.ids, keys, vectors, kind, self.kept, side)
        return self._items

    def _locate(self, snapshot: Snapshot) -> Located:
        known = snapshot.known_items
        if self._located is None or self._located.holder is not known:
            described, item = self._describe(snapshot), snapshot.schema.item
            # Of any other item the model has no row that it learned.
            self._located = described.only(snapshot.is_known(item, described.found[item].keys), known)
        return self._located

    def _describe(self, snapshot: Snapshot) -> Located:
        """What is described; the same while the vocabulary is, whoever comes and goes in dynamic tables."""
        values, item = self._values, snapshot.schema.item
        if values is not None and self._described and self._described.holder is snapshot.vocabulary:
            return self._described
        if values is None:
            values = {item: snapshot.items()}
        # Another training may have had other features.
        names = snapshot.names_of(OF_ITEMS)
        values = {name: given for name, given in values.items() if name in names}
        found, numbers = snapshot.find(values, OF_ITEMS), snapshot.numbers_of(values)
        ids = snapshot.originals(values[item], found[item].keys)
        self._described = Located(snapshot.vocabulary, ids, found, numbers)
        return self._described


def described(values: Mapping[str, Sequence[Any]], snapshot: Snapshot, kept: KeptIndex) -> Catalogue:
    """The catalogue of items that a caller describes, held against a model. kept: see `Catalogue`.

    Raises:
        UserError: see `ServedModel.describe_items`.
    """
    snapshot.find(values, OF_ITEMS)
    schema = snapshot.schema
    snapshot.numbers_of(values)
    if schema.item not in values:
        raise UserError(
            f"A description of {schema.items} needs the feature {schema.item} itself; give it too."
        )
    ids = [*values[schema.item]]
    twice = [item for item, times in collections.Counter(ids).items() if times > 1]
    if twice:
        raise UserError(f"The {schema.item} {printable(twice[0])} is described twice; describe it once.")
    # Copied: the caller may change the lists.
    return Catalogue(kept, {name: [*given] for name, given in values.items()})
