"""Items that a model may recommend: their ids, and their vectors in the current model.

Shapes: N items, D numbers in a vector, U users, E pairs of a user and an excluded item.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from recsuite.datasets.schema import HISTORY, ITEM, Schema
from recsuite.errors import UserError, printable
from recsuite.hooks import extra
from recsuite.models.heads import TwoSided
from recsuite.models.inputs import Inputs, Members
from recsuite.models.retrieval import NOTHING_ADDED, Added, Caps, mask_excluded, sum_of_pairs
from recsuite.models.rows import FeatureRows
from recsuite.models.tasks import first_label
from recsuite.serving.request import check_ids, length_of, members_of, values_at
from recsuite.serving.snapshot import FoundKeys, ServedRows, Snapshot

# Unknown candidates that a warning names.
MOST_SHOWN = 5
# Inputs of a model without vectors for users, or for items.
Side = tuple[FeatureRows, Inputs]
# More than any number of items in a list.
NO_LIMIT = 2**62


@dataclass(frozen=True)
class Pairs:
    """Scores of pairs of users and items, by the forward of a model without vectors, see `retrieval.Scorer`.

    Users and items are given by their positions, int64.
    """

    snapshot: Snapshot
    users: Side
    items: Side

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return the score of each pair, float32 [B]. users, items: positions, [B]."""
        if not len(users):
            return torch.zeros(0)
        gathered: dict[str, Any] = {}
        for (rows, _), positions in ((self.users, users), (self.items, items)):
            for name, feature_rows in rows.found.items():
                gathered[name] = ServedRows(feature_rows.values(), feature_rows.lengths()).at(positions)
        (rows, told), described = self.users, self.items[1]
        lengths = rows.found[HISTORY].lengths() if HISTORY in rows.found else users[:0]
        parts = (ServedRows(part, lengths).at(users).rows if len(part) else part for part in told.members)
        # The numbers of the items are NaN on the users' side, and the other way round.
        numbers = torch.where(told.numbers[users].isnan(), described.numbers[items], told.numbers[users])
        inputs = Inputs(Members(*parts), numbers)
        return first_label(self.snapshot.predict(FeatureRows(gathered, rows.scale, rows.lists), inputs))

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return scores of all users with all items, float32 [U, N]. users, items: positions, [U], [N]."""
        pairs = users.repeat_interleave(len(items)), items.repeat(len(users))
        return self.score_pairs(*pairs).view(len(users), len(items))


class IndexCache:
    """Index of the newest model that was asked for one; the extra `index` makes the next one from it.

    lists: of an index, as written with a model; None for none.
    """

    def __init__(self, lists: Any = None) -> None:
        self._lists = lists
        self._newest: Any = None
        self._lock = threading.Lock()
        self._numbers: dict[Any, int] = {}

    def numbers_of(self, ids: Sequence[Any]) -> list[int]:
        """Return a number for each id, from 0 on: the same one whenever it is asked for."""
        # An item that keeps its key and its vector need not be moved in the index.
        with self._lock:
            return [self._numbers.setdefault(each, len(self._numbers)) for each in ids]

    def of(self, keys: torch.Tensor, vectors: torch.Tensor) -> Any:
        """Return the index of these items, a `NearestItems` of the extra `index`."""
        # If several threads ask for the first index of a model, one makes it and the others wait.
        with self._lock:
            self._newest = extra("index").updated(self._newest, self._lists, keys, vectors)
            return self._newest


@dataclass(frozen=True)
class Items:
    """Items in the order in which equal scores are listed.

    ids: raw ids; keys: of the items, int64 [N], no two the same; vectors: float32 [N, D], of `head`, or
    positions, int64 [N], see `Pairs`; has_row: True for the items of the training, bool [N]; kind: type of
    the raw ids in the training; kept: the index, shared with other models; None if these are candidates and
    not all items; side: inputs of a model without vectors; categories: by feature, see `categories_of`,
    computed when first asked for.
    """

    head: Any
    schema: Schema
    ids: list[Any]
    keys: torch.Tensor
    vectors: torch.Tensor
    has_row: torch.Tensor
    kind: type[Any] | None
    kept: IndexCache | None
    side: Side | None = None
    categories: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    def with_users(self, snapshot: Snapshot, users: Side) -> Items:
        """Return the items of a model without vectors, with a head that scores them for some users."""
        assert self.side is not None
        return dataclasses.replace(self, head=Pairs(snapshot, users, self.side))

    @functools.cached_property
    def positions(self) -> dict[Any, int]:
        """Raw id to position."""
        return {item: position for position, item in enumerate(self.ids)}

    @functools.cached_property
    def directions(self) -> torch.Tensor:
        """Factors of the vectors, scaled to length 1, float32 [N, D - 1]; zeros stay zeros.

        Raises:
            UserError: when the model has no vectors.
        """
        self.require_vectors("similar_items")
        return torch.nn.functional.normalize(self.vectors[:, 1:], dim=1)

    @functools.cached_property
    def nearest(self) -> Any:
        """Index of faiss, see `IndexCache.of`; made, or updated to this model, at the first access.

        Raises:
            UserError: when faiss is not installed, the scores are more than products of vectors, or these are
                candidates.
        """
        if self.kept is None:
            raise UserError("approximate and candidates exclude each other; give one of them.")
        if not getattr(self.head, "scores_are_products", False):
            raise UserError(
                "An approximate search requires scores that are products of vectors, as those of --task "
                "ranking; leave approximate out."
            )
        # All vectors share the scale by which rows decay. Without it, the vector of an item that was not
        # looked up stays the same, so the index need not move it.
        return self.kept.of(self.keys, self.vectors / self.head.row_scale)

    def require_vectors(self, method: str) -> None:
        """Check that the model has vectors.

        Raises:
            UserError: when it has none; names the method that requires them.
        """
        if self.side is not None:
            raise UserError(
                f"{method} requires vectors of users and items, and this model has none. Fix: make it a "
                "subclass of recsuite.TwoSided."
            )

    def only(self, candidates: Any) -> Items:
        """Return the candidates that are here, each once, in the order of the items; warn of the others."""
        wanted = set(given := check_ids("candidates", candidates, self.kind, self.schema))
        unknown = [item for item in dict.fromkeys(given) if item not in self.positions]
        if unknown:
            warnings.warn(UnknownCandidatesWarning(unknown, len(wanted), self.schema.items), stacklevel=5)
        positions = sorted(self.positions[item] for item in wanted & self.positions.keys())
        ids = [self.ids[position] for position in positions]
        which = torch.tensor(positions, dtype=torch.int64)
        parts = {name: getattr(self, name)[which] for name in ("keys", "vectors", "has_row")}
        categories = {name: numbers[which] for name, numbers in self.categories.items()}
        return dataclasses.replace(self, ids=ids, kept=None, categories=categories, **parts)

    def categorize(self, name: str, value_of: Callable[[str], Mapping[Any, Any]]) -> None:
        """Compute the categories of a feature. value_of: returns raw id to value; may lack items."""
        if name not in self.categories:
            values = value_of(name)
            self.categories[name] = categories_of(name, [values.get(item) for item in self.ids])

    def pairs(self, lists: Sequence[Any], name: str) -> torch.Tensor:
        """Return positions of users and items, int64 [2, E], from a list of raw ids for each user.

        Unknown ids are skipped.
        """
        positions = [
            (user, self.positions[item])
            for user, ids in enumerate(lists)
            for item in dict.fromkeys(check_ids(name, ids, self.kind, self.schema))
            if item in self.positions
        ]
        return torch.tensor(positions, dtype=torch.int64).view(-1, 2).t()

    def added(self, lists: Sequence[Any], numbers: torch.Tensor) -> Added:
        """Return what items of histories add to their own scores. numbers: of each item, float32 [V].

        lists: a list of raw ids for each user. Ids without a row are skipped, as in an evaluation.
        """
        if not len(numbers):
            return NOTHING_ADDED
        positions = [self.positions.get(item, -1) for ids in lists for item in ids]
        users = [user for user, ids in enumerate(lists) for _ in ids]
        pairs = torch.tensor([users, positions], dtype=torch.int64)
        is_there = pairs[1] >= 0
        is_there[is_there.clone()] = self.has_row[pairs[1, is_there]]
        return sum_of_pairs(pairs[:, is_there], numbers[is_there])

    def positions_of(self, ids: Any, method: str = "similar_items") -> torch.Tensor:
        """Return the positions of raw ids, int64 [number of ids]. method: takes them, for messages.

        Raises:
            UserError: when one is not here, or is of another type than in training.
        """
        wanted = check_ids(method, ids, self.kind, self.schema)
        for item in wanted:
            if item not in self.positions:
                raise UserError(
                    f"Unknown {self.schema.item} {printable(item)}: the training has not seen it, and it is "
                    "not described. Fix: add it to the table of --data_path (in Python: describe_items), or "
                    "give another."
                )
        return torch.tensor([self.positions[item] for item in wanted], dtype=torch.int64)

    def near(
        self,
        users: torch.Tensor,
        k: int,
        left_out: torch.Tensor,
        breadth: int | None = None,
        added: Added = NOTHING_ADDED,
    ) -> torch.Tensor:
        """Return positions of at least k items for users by the index; -1 for excluded items.

        users: float32 [U, D]; left_out: see `pairs`; breadth: see `NearestItems.search`; added: see `added`.

        Raises:
            UserError: see `nearest`.
        """
        # Plus the largest number of excluded items of a user: these may be the best. The index does not
        # know additions, so items with one are always scored.
        apart = torch.cat([left_out, added.pairs], dim=1)
        more = int(apart[0].bincount().max()) if apart.numel() else 0
        positions = mask_excluded(self.nearest.search(users, k + more, breadth), apart)
        return torch.cat([positions, mask_excluded(added.places(len(users)), left_out)], dim=1)

    def named(self, positions: torch.Tensor, scores: torch.Tensor) -> list[list[tuple[Any, float]]]:
        """Return raw ids with their scores. positions, scores: [U, k]; position -1 is skipped."""
        return [
            [(self.ids[position], score) for position, score in zip(*mine, strict=True) if position >= 0]
            for mine in zip(positions.tolist(), scores.tolist(), strict=True)
        ]


def categories_of(name: str, values: Sequence[Any]) -> torch.Tensor:
    """Return the numbers of the categories of each item, int64 [N, W], with -1 where an item has fewer.

    values: of a feature; each is a category, a list is several, and None or an empty list is none.

    Raises:
        UserError: for values that are vectors; names the feature.
    """
    numbers, lists = dict[Any, int](), list[list[int]]()
    for value in values:
        if isinstance(value, np.ndarray):
            raise UserError(f"at_most takes features with categories, and {name} has vectors; name another.")
        entries = value if isinstance(value, list | tuple) else [value]
        # NaN is missing too.
        own = {
            numbers.setdefault(each, len(numbers)) for each in entries if each is not None and each == each
        }
        lists.append([*own])
    lengths = torch.tensor([*map(len, lists)], dtype=torch.int64)
    table = torch.full((len(lists), max(map(len, lists), default=0)), -1)
    table[torch.arange(table.shape[1]) < lengths.unsqueeze(1)] = torch.tensor(
        [*itertools.chain(*lists)], dtype=torch.int64
    )
    return table


def caps_of(categories: Mapping[str, torch.Tensor], at_most: Mapping[str, int]) -> Caps | None:
    """Return limits on the categories of some features; None without one. categories: see `categories_of`."""
    parts, most = list[torch.Tensor](), list[int]()
    for name, limit in at_most.items():
        numbers = categories[name]
        parts.append(numbers.where(numbers < 0, numbers + len(most)))
        most += [limit] * (int(numbers.max()) + 1 if numbers.numel() else 0)
    if not parts:
        return None
    numbers = torch.cat(parts, dim=1)
    return Caps(numbers.where(numbers >= 0, len(most)), torch.tensor([*most, NO_LIMIT]))


class UnknownCandidatesWarning(UserWarning):
    """Candidates that are not listed, which the training has not seen and which are not described."""

    def __init__(self, unknown: Sequence[Any], number: int, items: str) -> None:
        shown = printable(", ".join(map(str, unknown[:MOST_SHOWN]))) + ", ..." * (len(unknown) > MOST_SHOWN)
        super().__init__(
            f"{len(unknown):,} of {number:,} candidates are not listed, because the training has not seen "
            f"them and they are not described: {shown}. Fix: give the features of these {items} to "
            "describe_items, or leave them out."
        )


@dataclass(frozen=True)
class LocatedItems:
    """Items with the keys of their rows, by feature, and dense numbers, float32 [N, numbers].

    holder: the object that these were computed from; if it is still the same object, they are up to date.
    """

    holder: object
    ids: list[Any]
    keys: dict[str, FoundKeys]
    numbers: torch.Tensor

    def only(self, which: torch.Tensor, holder: object) -> LocatedItems:
        """Return some of the items. which: bool [N]."""
        ids = [self.ids[position] for position in which.nonzero().view(-1).tolist()]
        keys = {name: each.only(which) for name, each in self.keys.items()}
        return LocatedItems(holder, ids, keys, self.numbers[which])


class Catalogue:
    """Descriptions of items, independent of the model that is served.

    values: a feature's name to raw values, as `ServedModel.describe_items` takes them; without them each item
    of the training, with only its id. item: name of the feature with the ids. kept: the index of the items,
    also of earlier descriptions. shown: more values of the described items, for `shown_values` alone.
    """

    def __init__(
        self,
        kept: IndexCache,
        values: Mapping[str, Sequence[Any]] | None = None,
        shown: Mapping[str, Sequence[Any]] | None = None,
        item: str = "",
    ) -> None:
        self.kept = kept
        self._values, self._item = values, item
        # Under the same name, what is for people comes first: a title as a text, and not its words.
        self.shown: Mapping[str, Sequence[Any]] = {**(values or {}), **(shown or {})}
        # All described items, and by True or False those that `items` returns.
        self._described: LocatedItems | None = None
        self._located: dict[bool, LocatedItems] = {}
        self._items: dict[bool, Items] = {}

    def shown_values(self, items: Sequence[Any], names: Any) -> list[dict[str, Any]]:
        """Return values of items, None for those that are not described.

        Raises:
            UserError: see `ServedModel.item_values`.
        """
        if not self.shown:
            raise UserError(
                "features requires a description of the items, and there is none. Fix: give --data_path (in "
                "Python: ServedModel.open(..., data_path=...)), or call describe_items."
            )
        if isinstance(names, str) or not isinstance(names, Sequence):
            raise UserError(f"features takes a list of names, got {printable(repr(names))}.")
        for name in names:
            if not isinstance(name, str) or name not in self.shown:
                raise UserError(
                    f"There is no feature {printable(name)} of an item; there are {', '.join(self.shown)}."
                )
        places = [self._places.get(each) for each in items]
        return [
            {name: None if place is None else self.shown[name][place] for name in names} for place in places
        ]

    def items(self, snapshot: Snapshot, with_new: bool) -> Items:
        """Return the items with their vectors in a model. Computed once for each model; hold its lock.

        with_new: True for all described items, False for those with a row.
        """
        if with_new and len(self._locate(snapshot, True).ids) == len(self._locate(snapshot, False).ids):
            # None is new: one set of vectors is enough.
            with_new = False
        # Every delta that changes rows also has a new head.
        if with_new not in self._items or self._items[with_new].head is not snapshot.head:
            located = self._locate(snapshot, with_new)
            inputs = Inputs(members_of({}, snapshot.schema), located.numbers)
            head, item, rows = snapshot.head, snapshot.schema.item, snapshot.rows_of(located.keys)
            has_vectors = isinstance(head, TwoSided)
            vectors = head.item_vectors(rows, inputs) if has_vectors else torch.arange(len(located.ids))
            side = None if has_vectors else (rows, inputs)
            kind, keys = snapshot.kind_of(item), located.keys[item].keys
            has_row = snapshot.is_known(item, keys)
            # Of a dynamic table the keys are the ids. Of a fixed one all new items have the same row.
            if snapshot.item_table.record is None and not bool(has_row.all()):
                new = [located.ids[position] for position in (~has_row).nonzero().view(-1).tolist()]
                keys = keys.clone()
                keys[~has_row] = torch.tensor(self.kept.numbers_of(new)) + snapshot.item_table.num_values + 1
            self._items[with_new] = Items(
                head, snapshot.schema, located.ids, keys, vectors, has_row, kind, self.kept, side
            )
        return self._items[with_new]

    def features_of(self, ids: Sequence[Any], snapshot: Snapshot) -> dict[str, list[Any]]:
        """Return the described features of some items that a model takes; none if no items are described."""
        names, places = snapshot.names_of((ITEM,)), [self._places.get(each) for each in ids]
        described = {
            name: values_at(values, places) for name, values in (self._values or {}).items() if name in names
        }
        return {**described, snapshot.schema.item: [*ids]}

    def known_among(self, ids: Sequence[Any], snapshot: Snapshot) -> list[Any]:
        """Return the ids that are described or, if no items are, that have a row, each once."""
        distinct = [*dict.fromkeys(ids)]
        if self._values is not None:
            return [item for item in distinct if item in self._places]
        known = snapshot.known(snapshot.schema.item, distinct).tolist()
        return [item for item, is_known in zip(distinct, known, strict=True) if is_known]

    @functools.cached_property
    def _places(self) -> dict[Any, int]:
        """Described id to its place."""
        ids = self._values[self._item] if self._values else ()
        return {item: place for place, item in enumerate(ids)}

    def _locate(self, snapshot: Snapshot, with_new: bool) -> LocatedItems:
        known = snapshot.item_table.identity
        if with_new not in self._located or self._located[with_new].holder is not known:
            described, item = self._describe(snapshot), snapshot.schema.item
            which = snapshot.is_known(item, described.keys[item].keys)
            if with_new:
                # A missing id is no item.
                which |= torch.tensor([not _is_missing(each) for each in described.ids], dtype=torch.bool)
            self._located[with_new] = described.only(which, known)
        return self._located[with_new]

    def _describe(self, snapshot: Snapshot) -> LocatedItems:
        """Return the described items; kept for one vocabulary, while ids in dynamic tables come and go."""
        values, item = self._values, snapshot.schema.item
        if values is not None and self._described and self._described.holder is snapshot.vocabulary:
            return self._described
        if values is None:
            values = {item: snapshot.item_table.raw_values()}
        # Another training may have had other features.
        names = snapshot.names_of((ITEM,))
        values = {name: given for name, given in values.items() if name in names}
        keys, numbers = snapshot.find(values, (ITEM,)), snapshot.numbers_of(values)
        ids = snapshot.item_table.originals(values[item], keys[item].keys)
        self._described = LocatedItems(snapshot.vocabulary, ids, keys, numbers)
        return self._described


def _is_missing(item: Any) -> bool:
    """True for None and NaN."""
    return item is None or item != item


def described(
    values: Mapping[str, Sequence[Any]],
    snapshot: Snapshot,
    kept: IndexCache,
    shown: Mapping[str, Sequence[Any]] | None = None,
) -> Catalogue:
    """Return the catalogue of items that a caller describes, after a check. kept, shown: see `Catalogue`.

    Raises:
        UserError: see `ServedModel.describe_items`.
    """
    snapshot.find(values, (ITEM,))
    schema = snapshot.schema
    snapshot.numbers_of(values)
    if schema.item not in values:
        raise UserError(
            f"A description of {schema.items} requires the feature {schema.item} itself; give it too."
        )
    ids = [*values[schema.item]]
    twice = [item for item, times in collections.Counter(ids).items() if times > 1]
    if twice:
        raise UserError(f"The {schema.item} {printable(twice[0])} is described twice; describe it once.")
    for name, given in (shown or {}).items():
        if length_of(name, given, schema) != len(ids):
            raise UserError(
                f"{printable(name)} has {len(given)} values for {len(ids)} {schema.items}; give one for each."
            )
    # Copied: the caller may change the lists.
    values, shown = ({name: [*given] for name, given in each.items()} for each in (values, shown or {}))
    return Catalogue(kept, values, shown, schema.item)
