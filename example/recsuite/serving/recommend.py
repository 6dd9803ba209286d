"""Recommendations for one user on the command line, with titles; --follow prints them for newer checkpoints.

The features and histories of users and items come from the data of the training. An item is recommended if it
was in the training and, unless --seen allows it, the user has not had it.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.checkpoint.chain import describe_choice, requested_kind
from recsuite.checkpoint.recorded import checked_flags, data_flags_of, merged
from recsuite.config.config import Config
from recsuite.config.sections import NEWEST
from recsuite.datasets.schema import (
    CLICKS,
    COUNT,
    ENTITIES,
    HISTORY,
    ITEM,
    RATING,
    USER,
    YES_NO,
    RawData,
    Schema,
)
from recsuite.datasets.source import locate, look, read
from recsuite.errors import UserError, counted, format_duration, printable
from recsuite.files import digest_of_bytes
from recsuite.models.tasks import ModelMaker
from recsuite.remote import folder_at
from recsuite.runtime.console import say
from recsuite.serving.followers import follow, retried, wait_for_first
from recsuite.serving.request import HISTORY_AGES, HISTORY_RATINGS, type_of
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import Snapshot

if TYPE_CHECKING:
    import pandas


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
        self, place: int, longest: int | None = None, before: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return positions of items, labels and times of the last events of a user, at most `longest`.

        place: position of the user; -1 for an unknown one, without events. before: keep only events strictly
        before this time, in seconds since 1970.
        """
        first, end = self._ends[place : place + 2] if place >= 0 else (0, 0)
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
    """Features of users or items from the tables of the data."""

    def __init__(self, frame: pandas.DataFrame, schema: Schema, entity: str) -> None:
        self.name = schema.name_of(entity)
        self.values = {
            feature.name: [None if _is_missing(value) else value for value in frame[feature.column].tolist()]
            for feature in schema.features
            if feature.entity == entity and feature.column in frame
        }
        self.ids: list[Any] = self.values[self.name]
        self.places = {each: place for place, each in enumerate(self.ids)}

    def of(self, ids: Sequence[Any]) -> dict[str, Any]:
        """Return the features of some ids; only the id for an id that is not in the data."""
        places, found = [self.places.get(each) for each in ids], dict[str, Any]()
        for name, values in self.values.items():
            nothing: Any = [] if isinstance(next(iter(values), None), list) else None
            found[name] = [nothing if place is None else values[place] for place in places]
        return {**found, self.name: [*ids]}


def _is_missing(value: Any) -> bool:
    return isinstance(value, float) and np.isnan(value)


class TrainingFeatures:
    """Features of users and items, and histories of users, from the data of a training.

    longest: maximum length of a history.
    """

    def __init__(self, raw: RawData, schema: Schema, longest: int) -> None:
        self.longest, self._shown, self._has_types = longest, schema.shown, bool(schema.event_types)
        self.users = KnownFeatures(raw.users, schema, USER)
        self.items = KnownFeatures(raw.items, schema, ITEM)
        self._events = UserEvents(raw)

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
        found = [
            self._events.of(self.users.places.get(user, -1), self.longest, end)
            for user, end in zip(users, ends, strict=True)
        ]
        values[HISTORY] = [[ids[place] for place in places.tolist()] for places, _, _ in found]
        values[HISTORY_RATINGS] = [
            [self._shown(label) for label in labels.tolist()] for _, labels, _ in found
        ]
        if snapshot.takes_ages:
            values[HISTORY_AGES] = [
                ages_in(times, end) for (_, _, times), end in zip(found, ends, strict=True)
            ]
        return values

    def seen_items(self, users: Sequence[Any]) -> list[list[Any]]:
        """Return all items of each user, also more than a history takes."""
        return [[self.items.ids[place] for place in self.events(user)[0].tolist()] for user in users]

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


DAMPING = 20
MOST_SHOWN = 5
# Labels that say that something happened, or how often, but not how it was rated.
EVENT_VERBS = (CLICKS, COUNT)


@dataclass(frozen=True)
class OrderedItems:
    """Items in an order: positions in `RawData.items`, int64 [n], and a number for each, [n]."""

    items: np.ndarray
    numbers: np.ndarray


class Viewer:
    """One user, in the data or not, and the user's events. told: features and histories of the data."""

    def __init__(self, raw: RawData, schema: Schema, user: str, told: TrainingFeatures) -> None:
        self.raw = raw
        self.schema = schema
        self.name = user
        self.features = told
        # If the ids of the data set are texts, any name is an id.
        self.id = user if type_of(told.users.ids) is str else _id_of(user)
        # The oldest first: positions in `RawData.items`.
        self.items, self.labels, self.times = told.events(self.id)
        self._shown = np.array([schema.shown(label) for label in self.labels.tolist()])

    def other_users(self, number: int, least: int) -> list[Viewer]:
        """Return up to `number` users from across the same data, each with at least `least` items.

        Where no user has so many, they have as many as any.
        """
        counts = np.bincount(self.raw.events.user, minlength=len(self.features.users.ids))
        found = np.flatnonzero(counts >= min(least, counts.max()))
        some = found[np.linspace(0, len(found) - 1, min(number, len(found))).astype(np.int64)]
        names = [str(self.features.users.ids[place]) for place in some]
        return [Viewer(self.raw, self.schema, name, self.features) for name in names]

    @property
    def item_ids(self) -> np.ndarray:
        """Raw ids of the user's items, the oldest first."""
        return self.raw.items[self.schema.column_of(ITEM)].to_numpy()[self.items]

    def liked(self) -> OrderedItems:
        """Return the items with the highest labels, each with its newest label or the sum of its counts.

        Of equal labels the newest comes first.
        """
        items, newest, which = np.unique(self.items[::-1], return_index=True, return_inverse=True)
        numbers = self._shown[::-1]
        totals = np.bincount(which, numbers) if self.schema.label_kind == COUNT else numbers[newest]
        best = np.lexsort([newest, -totals])[:MOST_SHOWN]
        return OrderedItems(items[best], totals[best])

    def latest(self) -> OrderedItems:
        """Return the newest items, the newest first."""
        return OrderedItems(self.items[::-1][:MOST_SHOWN], self._shown[::-1][:MOST_SHOWN])

    def is_known_to(self, model: ServedModel) -> bool:
        """Return True if the user was in a model's training, or has a history that the model takes."""
        return model.knows(self.schema.user, self.id) or (
            model.snapshot.takes_history and self.features.has_history(self.id)
        )

    def unseen(self, model: ServedModel) -> np.ndarray:
        """Return the items that may be shown, int64 [n]: in the training, and not seen by the user."""
        # The model has no trained row for any other item.
        trained = model.snapshot.known(self.schema.item, self.features.items.ids).numpy()
        trained[self.items] &= not self.schema.excludes_seen
        return np.flatnonzero(trained)

    def values(self, snapshot: Snapshot) -> dict[str, list[Any]]:
        """Return the features and the history of this user for a model."""
        return self.features.of_users([self.id], snapshot)


def _id_of(user: str) -> int | None:
    """Return the id in a user's name, a 64-bit integer, as 5 or 5.0; None for other names."""
    # At most 19 digits: Python refuses to parse an integer of some thousand digits.
    found = re.fullmatch(r"([+-]?)0*(\d{1,19})(?:\.0+)?", user.strip(), re.ASCII)
    number = int(found[1] + found[2]) if found else 2**63
    return number if -(2**63) <= number < 2**63 else None


def best_for(viewer: Viewer, model: ServedModel, top: int, approximate: bool = False) -> OrderedItems:
    """Return the items with the highest predictions for a user of the data that the model uses.

    approximate: see `ServedModel.recommend`.
    """
    (found,) = model.recommend([viewer.id], top, approximate=approximate)
    places = np.array([viewer.features.items.places[item] for item, _ in found], np.int64)
    scores = np.array([score for _, score in found], np.float32)
    schema = model.snapshot.schema
    if schema.label_kind == RATING and model.snapshot.task.evaluation == "predictions":
        # Ranked by the predictions; only the numbers shown are clipped to the range of labels.
        scores = scores.clip(schema.lowest_label, schema.highest_label)
    return OrderedItems(places, scores)


def popular(viewer: Viewer, model: ServedModel, top: int) -> OrderedItems:
    """Return the items with the highest damped mean, or with the most events, see `popular_by_count`.

    Only items that may be shown to the user are returned.
    """
    events, number = viewer.raw.events, len(viewer.raw.items)
    counts = np.bincount(events.item, minlength=number)
    unseen = viewer.unseen(model)
    if popular_by_count(model, viewer.schema):
        return _highest(unseen, counts[unseen], top)
    sums = np.bincount(events.item, weights=events.label, minlength=number)
    mean = events.label.mean(dtype=np.float64)
    return _highest(unseen, ((sums + DAMPING * mean) / (counts + DAMPING))[unseen], top)


def popular_by_count(model: ServedModel, schema: Schema) -> bool:
    """Return True if popular items are those with most events: for clicks, for counts and in a ranking."""
    return schema.label_kind in EVENT_VERBS or model.snapshot.task.evaluation == "ranks"


def _highest(items: np.ndarray, numbers: np.ndarray, top: int) -> OrderedItems:
    # Stable: of equal items the one with the lower id comes first on every machine, as `read` orders them.
    order = np.argsort(-numbers, kind="stable")[:top]
    return OrderedItems(items[order], numbers[order])


# --- pages ---

# Words for a user's items by the kind of the label: what the user did, and which come first, see
# `Viewer.liked`.
PAST_TENSE = {
    RATING: ("rated", "and liked most"),
    YES_NO: ("was asked about", "those with a yes first"),
    CLICKS: ("had", "and last"),
    COUNT: ("had", "and most often"),
}


def recommend(config: Config, given: Collection[str], maker: ModelMaker) -> None:
    """Print the recommendations to --user; with --follow again after every newer checkpoint, until SIGINT.

    given: the flags of the command line, which take precedence over those in the checkpoint. maker: see
    `ServedModel.open`.

    Raises:
        UserError: when there is no model or no data, or they do not belong together.
    """
    save_dir, follows = folder_at(config.checkpoint.save_dir), config.serving.follow
    checkpoint = config.checkpoint.checkpoint
    # A `Follower` refuses a folder without a trained checkpoint.
    if follows:
        wait_for_first(save_dir, checkpoint)
    of_model = (maker, config.checkpoint.accept_changed_model)
    follower = retried(lambda: Follower(save_dir, None, checkpoint, *of_model)) if follows else None
    model = follower.model if follower else ServedModel.open(save_dir, checkpoint, "", *of_model)
    # Before the data are read, so that files that come meanwhile are read again.
    seen = _seen(model, config, given) if follower else None
    viewer = open_viewer(model, config, given)
    for line in page(model, viewer, config.serving.top, requested_kind(save_dir, checkpoint)).split("\n"):
        say(line)
    if follower:
        _follow(follower, viewer, seen, config, given)


def open_viewer(model: ServedModel, config: Config, given: Collection[str]) -> Viewer:
    """Read the data of a model's training, give them to the model, and return the user in them.

    Prints the folder of the data.

    given: see `recommend`.

    Raises:
        UserError: when the data cannot be obtained, or are not those of the model.
    """
    recorded = checked_flags(model.snapshot.trained, model.snapshot.config)
    config = _data_of(model, config, given)
    schema = model.snapshot.schema
    source = locate(config.data, config.runtime.seed)
    if source.schema.event_types != schema.event_types:
        here = ", ".join(source.schema.event_types) or "none"
        there = ", ".join(schema.event_types) or "none"
        raise UserError(
            f"{source.folder} has events of the types {printable(here)}, and the model was trained with "
            f"{printable(there)}; give the --data_path and the schema of its training."
        )
    raw = read(source, config.data)
    for entity, frame in zip(ENTITIES, (raw.users, raw.items), strict=True):
        name, column = schema.name_of(entity), schema.column_of(entity)
        if column not in frame:
            raise UserError(
                f"{source.folder} has no column {column}, by which the model knows each {name}; give the "
                "--data_path of its training."
            )
        _check_ids(source.folder, model, name, frame[column].tolist())
    say(f"titles and {schema.labels} are those of {source.folder}")
    # Without --user, as in the script of a training, take the user of the newest event.
    newest = raw.users[schema.column_of(USER)].iloc[raw.events.user[raw.events.time.argmax()]]
    # An export does not record the length of a history: there the flag counts.
    told = TrainingFeatures(raw, schema, int(recorded.get(HISTORY, config.data.history)))
    model.tell(told)
    return Viewer(raw, schema, config.serving.user or str(newest), told)


def tell(model: ServedModel, data_path: str, save_dir: str) -> RawData:
    """Give a model the features and histories in the data of its training, and return the data.

    See `open_viewer`.
    """
    given = {"data_path": data_path, "save_dir": save_dir}
    config = Config.of(**given, load=NEWEST)
    config.validate()
    return open_viewer(model, config, given).raw


def _data_of(model: ServedModel, config: Config, given: Collection[str]) -> Config:
    """Return the configuration with the data flags of a model's training."""
    written = model.snapshot.trained
    recorded = checked_flags(written, model.snapshot.config)
    if not (recorded or config.data.dataset or config.data.data_path):
        raise UserError(
            f"--save_dir {config.checkpoint.save_dir} does not say which data its model was trained on; give "
            "--data_path."
        )
    # An empty path, as from a variable that is not set, counts as not given.
    named = {name for name in given if config.flags[name] != ""}
    return merged(written, config, data_flags_of(written, recorded, named))


def _check_ids(folder: Path, model: ServedModel, name: str, ids: list[Any]) -> None:
    """Refuse data that cannot be those of the training. ids: of all users or all items; name: their name."""
    table, where = model.snapshot.tables[name], "give the --data_path of its training"
    # In one direction only: data that have grown since the training still have all ids of the training.
    missing = table.missing_in(ids)
    if missing:
        raise UserError(
            f"{folder} has no {name} {printable(min(missing))}, and the model was trained on one; {where}."
        )
    if table.num_values and not bool(model.snapshot.known(name, ids).any()):
        raise UserError(f"{folder} has no {name} that the model was trained on; {where}.")


def _seen(model: ServedModel, config: Config, given: Collection[str]) -> object:
    """Return the run of the model, and the sizes of its data files; see `open_viewer`."""
    source = look(_data_of(model, config, given).data, config.runtime.seed)[1]
    return model.run, None if source is None else {file.name: file.size for file in source.files}


def _follow(follower: Follower, viewer: Viewer, seen: object, config: Config, given: Collection[str]) -> None:
    """Look for a newer checkpoint every second; SIGINT ends it."""
    # From here on SIGINT ends the wait between two pages, but does not interrupt a page.
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: stop.set())

    def show() -> None:
        nonlocal viewer, seen
        # Another training may have other data. The same training may have more data than were read: new
        # users, items and events.
        now = _seen(follower.model, config, given)
        if now != seen:
            viewer, seen = open_viewer(follower.model, config, given), now
        for line in ("", *page(follower.model, viewer, config.serving.top, follower.checkpoint).split("\n")):
            say(line)

    follow(follower, stop, show)


def page(
    model: ServedModel, viewer: Viewer, top: int, checkpoint: str = "", approximate: bool = False
) -> str:
    """Return the text of a page: the checkpoint and its age, items the user liked, and recommendations.

    approximate: see `ServedModel.recommend`.
    """
    known = viewer.is_known_to(model)
    found = best_for(viewer, model, top, approximate) if known else popular(viewer, model, top)
    schema = viewer.schema
    titles = viewer.raw.items[schema.title].map(printable).to_numpy()
    choice = describe_choice(model.progress, checkpoint, model.snapshot.metric)
    lines = [f"{choice}, {format_duration(model.age)} old"]
    if len(viewer.labels):
        verb, which = PAST_TENSE[schema.label_kind]
        # A model that reads the order goes by the newest items, so these are shown.
        reads_order = model.snapshot.task.reads_order
        which, shown = ("and last", viewer.latest()) if reads_order else (which, viewer.liked())
        number = counted(len({*viewer.items.tolist()}), schema.item)
        lines.append(f"user {printable(viewer.name)} {verb} {number}, {which}:")
        stars = zip(shown.numbers, titles[shown.items], strict=True)
        lines += [f"  {rating:.1f}  {title}" for rating, title in stars]
    by_number = popular_by_count(model, schema)
    if not known:
        mean = f"the mean of their {schema.labels} damped by {DAMPING} at the mean of all"
        how = f"the number of their {schema.labels}" if by_number else mean
        unknown = f"the model knows no user {printable(viewer.name)}"
        lines.append(f"{unknown}; these are the popular {schema.items}, by {how}")
    score = model.snapshot.task.score_label.format(answer=schema.answer)
    heading = score if known else "events" if by_number else "mean"
    return "\n".join([*lines, _table(found, titles[found.items].tolist(), heading)])


def _table(found: OrderedItems, titles: Sequence[str], heading: str) -> str:
    """Return a table with one item a line: rank, title and number."""
    width, wide = max(map(len, ["title", *titles])), max(9, len(heading))
    lines = [
        f"| rank | {'title':<{width}} | {heading:>{wide}} |",
        f"|-----:|{'-' * (width + 2)}|{'-' * (wide + 1)}:|",
    ]
    for rank, (title, number) in enumerate(zip(titles, found.numbers, strict=True), start=1):
        lines.append(f"| {rank:>4} | {title:<{width}} | {number:{wide}.3f} |")
    return "\n".join(lines)
