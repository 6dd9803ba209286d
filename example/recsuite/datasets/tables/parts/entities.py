"""Properties of users or items from the rows of a table: the value of most rows counts, else the newest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recsuite.datasets.tables.parts.blocks import spans
from recsuite.datasets.tables.parts.joining import WHOLE, Joined, joined
from recsuite.datasets.tables.parts.part import Part
from recsuite.datasets.tables.parts.wanted import Wanted
from recsuite.datasets.tables.schema_file import LIST
from recsuite.datasets.tables.values import ENTRY


@dataclass(frozen=True)
class Property:
    """A column of users or items: of each its value, or the place of it among `joined`; of how many of them
    several values were found, and how many rows have another than counts.
    """

    newest: np.ndarray
    num_varied: int
    num_others: int
    joined: Joined | None = None
    # Whether entries of lists may be meant as numbers.
    is_untyped: bool = False

    def values(self, wanted: Wanted) -> np.ndarray:
        """Numbers, float64 with NaN; categories, objects with None; or lists of those."""
        if self.joined is None:
            return self.newest
        known: list[Any] = self.joined.to_list()
        if wanted.kind == LIST:
            return _lists(known, self.is_untyped)[self.newest]
        table = np.empty(len(known) + 1, object)
        table[:-1] = known
        if len(known) and self.newest.min(initial=0) >= 0 and isinstance(known[0], int):
            return np.array(known, np.int64)[self.newest]
        return table[self.newest]


def property_of(
    wanted: Wanted,
    parts: Sequence[Part],
    entity: Sequence[np.ndarray],
    key: Wanted,
    number: int,
    time: Wanted | None = None,
) -> Property:
    """A column of so many users or items, from all parts that have it.

    Of several values of one of them that of more than half of its rows counts; if there is none, the newest.

    entity: of each part, which of them a code of the column `key` is, int32, with -1 at the end. time: the
    times of the rows; of one time, and without times, the last row is the newest.
    """
    values = joined([(part, wanted) for part in parts]) if wanted.is_coded else None
    missing = -1 if values else np.nan
    first = np.full(number, missing, np.int32 if values else np.float64)
    taken = _Taken(first, first.copy(), np.full(number, np.iinfo(np.int64).min), np.zeros(number, bool))

    def blocks() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Of the rows with a value: whose they are, the value and the time."""
        for order, part in enumerate(parts):
            for begin, rows in spans(part.num_rows):
                places = entity[order][part.column(key, begin, rows)]
                found = part.column(wanted, begin, rows)
                found = values.places[order][found] if values else found
                is_there = found != -1 if values else ~np.isnan(found)
                times = part.column(time, begin, rows) if time else np.zeros(rows, np.int64)
                yield places[is_there], found[is_there], times[is_there]

    for block in blocks():
        taken.add(*block)
    num_others = _settle(taken, blocks()) if taken.varied.any() else 0
    untyped = all(part.is_untyped(wanted) for part in parts)
    return Property(taken.newest, int(taken.varied.sum()), num_others, values, untyped)


def _settle(taken: _Taken, blocks: Iterator[tuple[np.ndarray, ...]]) -> int:
    """Give those with several values that of more than half of their rows; return how many have another."""
    pairs = []
    for places, found, _ in blocks:
        is_varied = taken.varied[places]
        if is_varied.any():
            pairs.append(_counted(places[is_varied], found[is_varied], np.ones(is_varied.sum(), np.int64)))
    owners, values, counts = _counted(*map(np.concatenate, zip(*pairs, strict=True)))
    totals = np.zeros(len(taken.newest), np.int64)
    np.add.at(totals, owners, counts)
    is_most = 2 * counts > totals[owners]
    taken.newest[owners[is_most]] = values[is_most]
    return int(counts[taken.newest[owners] != values].sum())


def _counted(places: np.ndarray, values: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, ...]:
    """Each pair of an owner and a value once, with the sum of its counts."""
    order = np.lexsort((values, places))
    places, values = places[order], values[order]
    is_new = np.append(True, (np.diff(places) != 0) | (np.diff(values) != 0))
    return places[is_new], values[is_new], np.add.reduceat(counts[order], np.flatnonzero(is_new))


@dataclass(frozen=True)
class _Taken:
    """Of each user or item: the first value and the newest, the time of that, and whether others differ."""

    first: np.ndarray
    newest: np.ndarray
    time: np.ndarray
    varied: np.ndarray

    def add(self, places: np.ndarray, found: np.ndarray, times: np.ndarray) -> None:
        """Take in some values. Of several assignments to one place NumPy keeps the last."""
        known = self.first[places]
        is_new = known == -1 if known.dtype == np.int32 else np.isnan(known)
        self.first[places[is_new][::-1]] = found[is_new][::-1]
        self.varied[places[self.first[places] != found]] = True
        np.maximum.at(self.time, places, times)
        is_newest = times == self.time[places]
        self.newest[places[is_newest]] = found[is_newest]


def _lists(known: list[Any], is_untyped: bool) -> np.ndarray:
    """The lists that texts stand for, and [] at the end: of whole numbers where all entries are."""
    split: list[list[Any]] = [
        [entry for part in str(text).split(ENTRY) if (entry := part.strip())] for text in known
    ]
    if is_untyped and all(re.fullmatch(WHOLE, entry) for entries in split for entry in entries):
        split = [[int(entry.partition(".")[0]) for entry in entries] for entries in split]
    table = np.empty(len(known) + 1, object)
    for place, entries in enumerate([*split, []]):
        table[place] = entries
    return table
