"""Data of the training of a served model: features of users and items, and histories of users."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.checkpoint.recorded import checked_flags, data_flags_of, merged
from recsuite.config.config import Config
from recsuite.config.sections import NEWEST
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, USER, RawData, Schema
from recsuite.datasets.source import locate
from recsuite.errors import UserError, printable
from recsuite.files import digest_of_bytes
from recsuite.runtime.console import say
from recsuite.serving.request import HISTORY_AGES, HISTORY_RATINGS, check_values, type_of, values_at
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas


# Name of the titles of items in answers, whatever their column is.
TITLE = "title"


class UserEvents:
    """Events of each user, the oldest first: positions of items, labels and times.

    With several types of events they include the context, and the label is the position of the type.
    """

    def __init__(self, raw: RawData) -> None:
        events, context = raw.events, raw.context
        columns = events.user, events.item, events.label, events.time
        if context is not None:
            more = context.user, context.item, context.label, context.time
            columns = tuple(map(np.concatenate, zip(columns, more, strict=True)))  # type: ignore[assignment]
        user, item, label, time = columns
        order = np.lexsort([time, user])
        self.columns = tuple(column[order] for column in (item, label, time))
        counts = np.bincount(user, minlength=len(raw.users))
        self._ends = np.concatenate([[0], np.cumsum(counts)])

    def of(
        self, user: int, longest: int | None = None, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return positions of items, labels and times of the last events of a user, at most `longest`.

        user: its position; -1 for an unknown one, without events. before: keep only events strictly
        before this time, in seconds since 1970.
        """
        first, end = self._ends[user : user + 2] if user >= 0 else (0, 0)
        items, labels, times = (column[first:end] for column in self.columns)
        number = len(times) if before is None else int(np.searchsorted(times, before))
        last = slice(0 if longest is None else max(0, number - longest), number)
        return items[last], labels[last], times[last]


def ages_in(times: np.ndarray, before: int | None = None) -> list[int]:
    """Return the ages of a user's earlier events, in seconds before an event.

    times: of the earlier events, int64 [n], the oldest first. before: time of the event; None for the time of
    the newest earlier one.
    """
    if before is None:
        before = int(times[-1]) if len(times) else 0
    return (before - times).tolist()


class KnownFeatures:
    """Features of users or items from the tables of the data.

    values: of each feature; others: of each column of the table that no feature is called by, and TITLE. All
    are in the order of the ids, None for a missing one.
    """

    def __init__(self, frame: pandas.DataFrame, schema: Schema, entity: str) -> None:
        self.name = schema.name_of(entity)
        of_features = {
            feature.name: feature.column
            for feature in schema.features
            if feature.entity == entity and feature.column in frame
        }
        of_others = {*map(str, frame.columns)} - of_features.keys() - {schema.column_of(entity), schema.title}
        self.values, self.others = (
            {name: _plain(frame[column].tolist()) for name, column in columns.items()}
            for columns in (of_features, {name: name for name in sorted(of_others)})
        )
        if entity == ITEM and schema.title in frame:
            self.others[TITLE] = _plain(frame[schema.title].tolist())
        self.ids: list[Any] = self.values[self.name]
        self.places = {id_: position for position, id_ in enumerate(self.ids)}

    def of(self, ids: Sequence[Any]) -> dict[str, Any]:
        """Return the features of some ids; only the id for an id that is not in the data."""
        places = [self.places.get(each) for each in ids]
        features = {name: values_at(values, places) for name, values in self.values.items()}
        return {**features, self.name: [*ids]}

    def updated(self, newer: KnownFeatures) -> KnownFeatures:
        """Return these with newer values of some ids, old or new ones; the old ids keep their places."""
        kind = type_of(self.ids)
        if kind is str and type_of(newer.ids) is not str:
            # In one table alone they may all be numbers.
            newer.ids = newer.values[newer.name] = [*map(str, newer.ids)]
            newer.places = {id_: position for position, id_ in enumerate(newer.ids)}
        check_values(self.name, newer.ids, kind)
        merged = copy.copy(self)
        ids = [*self.ids, *(each for each in newer.ids if each not in self.places)]
        merged.places = {each: position for position, each in enumerate(ids)}
        positions = [merged.places[each] for each in newer.ids]
        num_new, merged.values, merged.others = len(ids) - len(self.ids), self.of(ids), {}
        for name, values in self.others.items():
            merged.others[name] = values + [None] * num_new
        for ours, theirs in ((merged.values, newer.values), (merged.others, newer.others)):
            for name in ours.keys() & theirs.keys():
                for position, value in zip(positions, theirs[name], strict=True):
                    ours[name][position] = value
        merged.ids = merged.values[self.name]
        return merged


def _plain(values: list[Any]) -> list[Any]:
    return [None if _is_missing(value) else value for value in values]


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and np.isnan(value)


class TrainingFeatures:
    """Features of users and items, and histories of users, from the data of a training.

    longest: maximum length of a history; source: a `TableSource`, from which the table of items is read
    again, and the state of its files before the first reading.
    """

    def __init__(
        self, raw: RawData, schema: Schema, longest: int, source: tuple[Any, Any] | None = None
    ) -> None:
        self.longest, self._shown, self._has_types = longest, schema.shown, bool(schema.event_types)
        self._schema, self._source = schema, source
        self.users = KnownFeatures(raw.users, schema, USER)
        self.items = KnownFeatures(raw.items, schema, ITEM)
        self._events = UserEvents(raw)

    def renewed(self) -> TrainingFeatures | None:
        """Return the data with the table of items as it is now; None if its files have not changed.

        Items that are gone from the table stay, as events have them, and new ones follow.

        Raises:
            UserError: when it cannot be read.
        """
        if self._source is None:
            return None
        source, before = self._source
        state = source.state_of_items()
        if state == before:
            return None
        newer = copy.copy(self)
        newer.items = self.items.updated(KnownFeatures(source.read_items(), self._schema, ITEM))
        newer._source = source, state
        return newer

    def digest(self) -> str:
        """Return a digest of all of it."""
        # Vectors are arrays.
        features = json.dumps(
            [self.users.values, self.items.values],
            default=lambda value: digest_of_bytes(value) if isinstance(value, np.ndarray) else str(value),
        ).encode()
        return digest_of_bytes(features, *map(np.ascontiguousarray, self._events.columns))

    def of_users(
        self, users: Sequence[Any], snapshot: Snapshot, ends: Sequence[int | None] | None = None
    ) -> dict[str, Any]:
        """Return the features of users, and their histories if the model takes them.

        ends: the time before which each history ends, in seconds since 1970; None for all of it.
        """
        names = snapshot.names_of((USER,))
        values = {name: given for name, given in self.users.of(users).items() if name in names}
        if not snapshot.takes_history:
            return values
        ends, ids = ends or [None] * len(users), self.items.ids
        histories = [
            self._events.of(self.users.places.get(user, -1), self.longest, end)
            for user, end in zip(users, ends, strict=True)
        ]
        values[HISTORY] = [
            [ids[position] for position in positions.tolist()] for positions, _, _ in histories
        ]
        values[HISTORY_RATINGS] = [
            [self._shown(label) for label in labels.tolist()] for _, labels, _ in histories
        ]
        if snapshot.takes_ages:
            values[HISTORY_AGES] = [
                ages_in(times, end) for (_, _, times), end in zip(histories, ends, strict=True)
            ]
        return values

    def seen_items(self, users: Sequence[Any]) -> list[list[Any]]:
        """Return all items of each user, also more than a history takes."""
        return [[self.items.ids[position] for position in self.events(user)[0].tolist()] for user in users]

    def events(self, user: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return all events of a user without the context, see `UserEvents.of`."""
        items, labels, times = self._events.of(self.users.places.get(user, -1))
        if not self._has_types:
            return items, labels, times
        is_event = labels == 1
        return items[is_event], labels[is_event], times[is_event]

    def has_history(self, user: Any) -> bool:
        """Return True if a user has an event of any type."""
        return len(self._events.of(self.users.places.get(user, -1), 1)[0]) > 0

    def item_counts(self) -> np.ndarray:
        """Return the number of events of each item, without the context, int64 [items]."""
        items, labels, _ = self._events.columns
        return np.bincount(items[labels == 1] if self._has_types else items, minlength=len(self.items.ids))

    def of_items(self, snapshot: Snapshot, items: Sequence[Any] | None = None) -> dict[str, list[Any]]:
        """Return the features of some items, or of all items, that a model takes."""
        names, ids = snapshot.names_of((ITEM,)), self.items.ids if items is None else items
        return {name: given for name, given in self.items.of(ids).items() if name in names}


@dataclass(frozen=True)
class ServedData:
    """Data of a training in memory, and the features and histories in them."""

    raw: RawData
    features: TrainingFeatures


def data_at(
    snapshot: Snapshot, data_path: str, save_dir: str, item_columns: Sequence[str] = ()
) -> ServedData:
    """Return the data of a model's training in a folder or file, see `read_training_data`.

    save_dir: of the model, for messages.
    """
    given = {"data_path": data_path, "save_dir": save_dir}
    config = Config.of(**given, load=NEWEST)
    config.validate()
    return read_training_data(snapshot, config, given, item_columns)


def read_training_data(
    snapshot: Snapshot, config: Config, given: Collection[str], item_columns: Sequence[str] = ()
) -> ServedData:
    """Read the data of a model's training, and print their folder.

    given: the flags of the command line, which take precedence over those in the checkpoint. item_columns:
    columns of the items that are read besides those of features.

    Raises:
        UserError: when the data cannot be obtained, or are not those of the model.
    """
    recorded = checked_flags(snapshot.trained, snapshot.config)
    config = with_data_flags(snapshot, config, given)
    schema = snapshot.schema
    source = locate(config.data, config.runtime.seed)
    if source.schema.event_types != schema.event_types:
        here = ", ".join(source.schema.event_types) or "none"
        there = ", ".join(schema.event_types) or "none"
        raise UserError(
            f"{source.folder} has events of the types {printable(here)}, and the model was trained with "
            f"{printable(there)}; give the --data_path and the schema of its training."
        )
    source = source.with_item_columns(item_columns) if item_columns else source
    # Before the reading: a change meanwhile is read again.
    state = source.state_of_items()
    raw = read(source, config.data)
    for entity, frame in zip(ENTITIES, (raw.users, raw.items), strict=True):
        name, column = schema.name_of(entity), schema.column_of(entity)
        if column not in frame:
            raise UserError(
                f"{source.folder} has no column {column}, by which the model knows each {name}; give the "
                "--data_path of its training."
            )
        _check_ids(source.folder, snapshot, name, frame[column].tolist())
    say(f"titles and {schema.labels} are those of {source.folder}")
    # An export does not record the length of a history: there the flag counts.
    longest = int(recorded.get(HISTORY, config.data.history))
    return ServedData(raw, TrainingFeatures(raw, schema, longest, (source, state)))


def with_data_flags(snapshot: Snapshot, config: Config, given: Collection[str]) -> Config:
    """Return the configuration with the data flags of a model's training."""
    written = snapshot.trained
    recorded = checked_flags(written, snapshot.config)
    if not (recorded or config.data.dataset or config.data.data_path):
        raise UserError(
            f"--save_dir {config.checkpoint.save_dir} does not say which data its model was trained on; give "
            "--data_path."
        )
    # An empty path, as from a variable that is not set, counts as not given.
    named = {name for name in given if config.flags[name] != ""}
    return merged(written, config, data_flags_of(written, recorded, named))


def _check_ids(folder: Path, snapshot: Snapshot, name: str, ids: list[Any]) -> None:
    """Refuse data that cannot be those of the training. ids: of all users or all items; name: their name."""
    table, where = snapshot.tables[name], "give the --data_path of its training"
    # In one direction only: data that have grown since the training still have all ids of the training.
    missing = table.missing_in(ids)
    if missing:
        raise UserError(f"{folder} has no {name} {printable(min(missing))}, which the training had; {where}.")
    if table.num_values and not bool(snapshot.known(name, ids).any()):
        raise UserError(f"{folder} has no {name} that the model was trained on; {where}.")
