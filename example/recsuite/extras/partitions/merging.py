"""Values of all ranks from those of each rank: items, vocabulary, encodings of numbers, checks of users.

All functions are collective: every rank calls them, with the events of its own partitions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas

from recsuite.datasets.arrays import MOST, chunks
from recsuite.datasets.batching import mix_bits
from recsuite.datasets.preparation.vocabulary import MOST_FITTED, fit
from recsuite.datasets.schema import EVENT, ITEM, USER, Codes, Feature, RawData, Schema
from recsuite.datasets.tables.files import split_part
from recsuite.errors import UserError, counted, printable
from recsuite.extras.partitions.exchange import PartitionExchange
from recsuite.extras.partitions.folders import number_of
from recsuite.ids import ids_of

SPLITS = ("train", "validation", "test")
# A user of a table of users, which no partition has.
NO_PARTITION = -1
IN_EVENTS, IN_USERS = 0, 1

# Share of `MOST_FITTED` values that is drawn: a draw has a few more or fewer.
SHARE_FITTED = 0.98


def with_split(raw: RawData, exchange: PartitionExchange) -> RawData:
    """Return the data with marks of the events of validation and test, by the names of their folders."""
    parts = {name: split_part(name) for name in raw.events_per_file}
    if len(raw.events.user) > MOST:
        raise UserError(
            f"Rank {exchange.rank} has {len(raw.events.user):,} events, and {MOST:,} is the limit of a "
            "process; start more processes."
        )
    unknown = [name for name, part in parts.items() if not part]
    if unknown:
        raise UserError(
            f"--partitions requires files in folders split=train, split=validation and split=test, and "
            f"{unknown[0]} is in none of these."
        )
    # Files without rows are none.
    mine = {part for name, part in parts.items() if raw.events_per_file[name]}
    known = {part for others in exchange.gathered(mine) for part in others}
    if missing := [part for part in SPLITS if part not in known]:
        raise UserError(
            f"--partitions requires files in split={missing[0]} of at least one partition, and none has some."
        )
    numbers = [*raw.events_per_file.values()]
    validation, test = (
        np.repeat([part == split for part in parts.values()], numbers) for split in SPLITS[1:]
    )
    if not raw.events.user[~(validation | test)].size:
        raise UserError(
            f"Rank {exchange.rank} has no events for training: its partitions hold none in split=train; "
            "start fewer processes."
        )
    return dataclasses.replace(raw, official_validation=validation, official_test=test)


def _kind_of(values: Any) -> str:
    """Return "texts" or "whole numbers" of values of one kind, "" without values."""
    first = next(iter(values), None)
    return "" if first is None else "texts" if isinstance(first, str) else "whole numbers"


def _check_kinds(column: str, kinds: Sequence[str]) -> None:
    """Refuse a column that is not of one kind on all ranks. kinds: by rank."""
    known = {kind: rank for rank, kind in enumerate(kinds) if kind}
    if len(known) > 1:
        (one, rank), (other, there) = sorted(known.items())[:2]
        raise UserError(
            f"The values of {printable(column)} are {one} in the partitions of rank {rank} and {other} in "
            f"those of rank {there}; write all partitions with one type."
        )


def with_all_items(raw: RawData, schema: Schema, exchange: PartitionExchange) -> RawData:
    """Return the data with the items of all ranks, in the order of their ids, at the same positions."""
    column = schema.column_of(ITEM)
    mine = raw.items[column].to_numpy()
    _check_kinds(column, exchange.gathered(_kind_of(mine)))
    # Mostly all items are in the table that each rank has read, so only the others are sent by each rank.
    ids = exchange.first(mine)
    more = [others for others in exchange.gathered(np.setdiff1d(mine, ids)) if len(others)]
    ids = np.unique(np.concatenate([ids, *more]))
    if len(ids) == len(mine):
        return raw
    places = np.searchsorted(ids, mine).astype(np.int32)
    frame = {
        str(name): _with_gaps(str(name), values.to_numpy(), places, ids, schema)
        for name, values in raw.items.items()
    }
    events = dataclasses.replace(raw.events, item=_at(raw.events.item, places))
    return dataclasses.replace(raw, items=pandas.DataFrame(frame), events=events)


def _at(column: np.ndarray, places: np.ndarray) -> np.ndarray:
    """Return the places of positions, in the memory of the column."""
    column = column if column.flags.writeable else column.copy()
    for part in chunks(len(column), column):
        column[part] = places[column[part]]
    return column


def _with_gaps(name: str, values: np.ndarray, places: np.ndarray, ids: np.ndarray, schema: Schema) -> Any:
    """Return a column of the items here as one of all items, whose others have no value."""
    if name == schema.column_of(ITEM):
        return ids
    if values.dtype.kind == "f":
        column = np.full(len(ids), np.nan)
        column[places] = values
        return column
    features = {feature.column: feature for feature in schema.features if feature.entity == ITEM}
    gaps = np.ones(len(ids), bool)
    gaps[places] = False
    column = np.empty(len(ids), object)
    column[places] = values
    for place in np.flatnonzero(gaps):
        feature = features.get(name)
        if name == schema.title:
            column[place] = str(ids[place])
        elif feature is not None and feature.multi:
            column[place] = []
        elif feature is not None and feature.width > 1:
            column[place] = np.full(feature.width, np.nan, np.float32)
    return list(column)


def check_users(
    raw: RawData, schema: Schema, rows_of: Mapping[int, Sequence[Any]], exchange: PartitionExchange
) -> int:
    """Refuse a user that is in two partitions; return the number of users of all ranks.

    Each rank sends the digests of its users to their owners, so that no rank has those of all users.
    rows_of: by partition the ids in its tables of users.
    """
    ids = raw.users[schema.column_of(USER)].to_numpy()
    _check_kinds(schema.column_of(USER), exchange.gathered(_kind_of(ids)))
    digests = ids_of(ids).view(np.uint64)
    users_of: dict[int, np.ndarray] = {}
    begin = 0
    for name, number in raw.events_per_file.items():
        partition = number_of(name)
        assert partition is not None
        has_events = users_of.setdefault(partition, np.zeros(len(ids), bool))
        has_events[raw.events.user[begin : begin + number]] = True
        begin += number
    is_text = _kind_of(ids) == "texts"
    # Role, partition, and digests.
    groups = [(IN_EVENTS, NO_PARTITION, digests)]
    groups += [(IN_EVENTS, part, digests[has_events]) for part, has_events in users_of.items()]
    for part, of_files in rows_of.items():
        rows = [rows.astype(str).astype(object) if is_text else rows for rows in of_files if len(rows)]
        groups += [(IN_USERS, part, ids_of(each).view(np.uint64)) for each in rows]
    sent = np.concatenate(
        [
            np.stack([of.view(np.int64), *(np.full(len(of), each) for each in at)], axis=1)
            for *at, of in groups
        ]
    )
    owned = exchange.swapped(sent, exchange.owners_of(sent[:, 0].copy()))
    owned = owned[np.lexsort(owned.T[::-1])]
    is_same = owned[1:, 0] == owned[:-1, 0]
    is_twice = is_same & (owned[:-1, 2] != NO_PARTITION) & (owned[1:, 2] != owned[:-1, 2])
    twice = [
        (*owned[place].tolist(), *owned[place + 1, 1:].tolist()) for place in np.flatnonzero(is_twice)[:1]
    ]
    number = len(owned) - int(np.count_nonzero(is_same))
    number_twice = len(np.unique(owned[1:, 0][is_twice]))
    everyones = exchange.gathered((twice, number_twice, number))
    found = sorted(entry for others, *_ in everyones for entry in others)
    if found:
        total = sum(others for _, others, _ in everyones)
        in_all = f" ({counted(total, schema.user)} in all)" if total > 1 else ""
        digest, where, one, there, other = found[0]
        places = np.flatnonzero(digests.view(np.int64) == digest)
        names = exchange.gathered(ids[places[0]] if len(places) else None)
        name, same = names[one % exchange.size], names[other % exchange.size]
        # Two texts may have one digest.
        if name == same and where == there == IN_EVENTS:
            raise UserError(
                f"The {schema.user} {printable(str(name))} is in two partitions, {one} and {other}{in_all}; "
                f"write all events of a {schema.user} into one."
            )
        if name == same:
            roles = [f"{'the users' if of == IN_USERS else 'the events'} of" for of in (where, there)]
            raise UserError(
                f"The {schema.user} {printable(str(name))} is in {roles[0]} partition {one} and in "
                f"{roles[1]} partition {other}{in_all}; write users and events by one hash."
            )
    return sum(number for *_, number in everyones)


def marks_of_training(raw: RawData) -> np.ndarray:
    """Return True for the training events, bool [events]."""
    assert raw.official_test is not None
    assert raw.official_validation is not None
    return ~(raw.official_test | raw.official_validation)


def vocabulary_of(
    raw: RawData,
    schema: Schema,
    min_count: int,
    is_train: np.ndarray,
    counts: dict[str, np.ndarray],
    exchange: PartitionExchange,
) -> tuple[dict[str, Any], list[str]]:
    """Return the vocabulary of the training events of all ranks, in the form of vocabulary.json, and notes.

    min_count: fewest training events of a value with a row of its own; counts: number of training events of
    each user here and of each item of all ranks, int64.
    """
    vocabulary, notes = dict[str, Any](), list[str]()
    for feature in schema.features:
        values = _column(raw, feature)
        if values is None:
            continue
        if feature.number:
            vocabulary[feature.name] = _encoding(values, feature, raw, schema, is_train, counts, exchange)
            continue
        known, numbers = _values(values, feature, is_train, counts)
        least = 0 if feature.is_dynamic else min_count
        # The items are the same on all ranks.
        if feature.entity == ITEM:
            known, number, num_rare = known[numbers >= least], len(known), int((numbers < least).sum())
        else:
            known, number, num_rare = _merged(known, numbers, feature, least, exchange)
        if num_rare:
            notes.append(
                f"--min_count {min_count}: {num_rare:,} of {counted(number, 'value')} of {feature.name} have "
                f"fewer training {schema.labels}, and share the unknown row"
            )
        vocabulary[feature.name] = known.tolist()
    return vocabulary, notes


def _column(raw: RawData, feature: Feature) -> Any:
    """Return the raw values of a feature; None if the files do not have it."""
    if feature.entity == EVENT:
        return raw.events.features.get(feature.column)
    frame = raw.users if feature.entity == USER else raw.items
    return frame.get(feature.column)


def counts_in(column: np.ndarray, is_train: np.ndarray, number: int) -> np.ndarray:
    """Count of each of range(number) among the training events, int64 [number]; below 0 is not counted."""
    counts = np.zeros(number, np.int64)
    for part in chunks(len(column), column):
        trained = column[part][is_train[part]]
        counts += np.bincount(trained[trained >= 0], minlength=number)
    return counts


def _values(
    values: Any, feature: Feature, is_train: np.ndarray, counts: dict[str, np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct values of categories here, sorted, and the number of training events of each.

    Values without a training event are only those of ids.
    """
    if isinstance(values, Codes):
        known, numbers = np.array(values.values), counts_in(values.codes, is_train, len(values.values))
    else:
        owners = counts[feature.entity]
        if feature.multi:
            owners = owners.repeat(values.str.len().clip(lower=1).to_numpy())
            values = values.explode()
        is_there = values.notna().to_numpy()
        known, places = np.unique(values[is_there], return_inverse=True)
        numbers = np.bincount(places, owners[is_there], len(known)).astype(np.int64)
    kept = slice(None) if feature.is_dynamic else numbers > 0
    return known[kept], numbers[kept]


def _merged(
    known: np.ndarray, numbers: np.ndarray, feature: Feature, least: int, exchange: PartitionExchange
) -> tuple[np.ndarray, int, int]:
    """Return the distinct values of all ranks with enough training events, sorted.

    Also returns the number of all distinct values, and of those with fewer than `least`. Rare ones are sent
    as hashes to their owners alone.
    """
    _check_kinds(feature.column, kinds := exchange.gathered(_kind_of(known)))
    # Whole numbers are their own ids, so a dynamic table needs no list of them.
    if feature.is_dynamic and "texts" not in kinds:
        return known, len(known), 0
    totals, owned = exchange.summed(ids_of(known), numbers)
    number, num_rare = exchange.total(np.array([len(owned), (owned < least).sum()])).tolist()
    parts = [part for part in exchange.gathered(known[totals >= least]) if len(part)]
    return np.unique(np.concatenate(parts)) if parts else known[:0], number, num_rare


def _encoding(
    values: Any,
    feature: Feature,
    raw: RawData,
    schema: Schema,
    is_train: np.ndarray,
    counts: dict[str, np.ndarray],
    exchange: PartitionExchange,
) -> dict[str, Any]:
    """Return the encoding of a number, fitted to the training values of all ranks."""
    if feature.entity == EVENT:
        fitted = values[is_train]
    elif feature.width > 1:
        if feature.entity == USER:
            raise UserError(
                f"--partitions does not support vectors of users, and {feature.name} is one; remove it from "
                "schema.toml."
            )
        fitted = np.stack(values.tolist()).reshape(-1)
    else:
        fitted = values.to_numpy(np.float64)[counts[feature.entity] > 0]
    if feature.entity != ITEM:
        number = sum(exchange.gathered(len(fitted)))
        if number > MOST_FITTED:
            # By a hash of the user and the time: the same values on any number of ranks.
            keys = ids_of(raw.users[schema.column_of(USER)].to_numpy())
            owners = keys[counts[USER] > 0]
            if feature.entity == EVENT:
                owners = keys[raw.events.user[is_train]] + raw.events.time[is_train]
            fitted = fitted[mix_bits(owners, ()) < 2**32 * (SHARE_FITTED * MOST_FITTED / number)]
        # Sorted, so that sums do not depend on the number of ranks.
        fitted = np.sort(np.concatenate(exchange.gathered(np.array(fitted))))
    # As read from a file.
    encoding: dict[str, Any] = json.loads(json.dumps(asdict(fit(fitted, feature.number))))
    return encoding
