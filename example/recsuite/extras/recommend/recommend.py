"""Recommendations for one user on the command line, with titles; --follow prints them for newer checkpoints.

The features and histories of users and items come from the data of the training. An item is recommended if it
was in the training, or if --new_items includes others, and, unless --seen allows it, the user has not had it.
"""

from __future__ import annotations

import functools
import re
import signal
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recsuite.checkpoint.chain import describe_choice, requested_kind
from recsuite.config.config import Config
from recsuite.datasets.schema import (
    CLICKS,
    COUNT,
    ITEM,
    RATING,
    USER,
    YES_NO,
    RawData,
    Schema,
)
from recsuite.datasets.source import look
from recsuite.errors import counted, format_duration, printable
from recsuite.models.tasks import ModelMaker
from recsuite.places import folder_at
from recsuite.runtime.console import say
from recsuite.serving.followers import follow, retried, wait_for_first
from recsuite.serving.request import AS_TRAINED, type_of
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import Snapshot
from recsuite.serving.training_data import TrainingFeatures, read_training_data, with_data_flags

# Users whose lists are compared, at most and at least, and pairs of a user and an item that are scored for
# that at most: a model without item vectors takes seconds for them.
MOST_USERS, LEAST_USERS, MOST_PAIRS = 20, 5, 100_000
# Lists are nearly the same if all together hold fewer items than so many lists.
FEW_LISTS = 2
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
        users = np.flatnonzero(counts >= min(least, counts.max()))
        some = users[np.linspace(0, len(users) - 1, min(number, len(users))).astype(np.int64)]
        names = [str(self.features.users.ids[position]) for position in some]
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
        """Return the items of the training that the user has not seen, int64 [n]."""
        # Others have no events, by which popular items are chosen.
        trained = model.snapshot.known(self.schema.item, self.features.items.ids).numpy()
        trained[self.items] &= not self.schema.excludes_seen
        return np.flatnonzero(trained)

    def values(self, snapshot: Snapshot) -> dict[str, list[Any]]:
        """Return the features and the history of this user for a model."""
        return self.features.of_users([self.id], snapshot)


def _id_of(user: str) -> int | None:
    """Return the id in a user's name, a 64-bit integer, as 5 or 5.0; None for other names."""
    # At most 19 digits: Python refuses to parse an integer of some thousand digits.
    match = re.fullmatch(r"([+-]?)0*(\d{1,19})(?:\.0+)?", user.strip(), re.ASCII)
    number = int(match[1] + match[2]) if match else 2**63
    return number if -(2**63) <= number < 2**63 else None


def best_for(viewer: Viewer, model: ServedModel, top: int, approximate: bool = False) -> OrderedItems:
    """Return the items with the highest predictions for a user of the data that the model uses.

    approximate: see `ServedModel.recommend`.
    """
    (best,) = model.recommend([viewer.id], top, approximate=approximate)
    positions = np.array([viewer.features.items.places[item] for item, _ in best], np.int64)
    scores = np.array([score for _, score in best], np.float32)
    schema = model.snapshot.schema
    if schema.label_kind == RATING and model.snapshot.task.evaluation == "predictions":
        # Ranked by the predictions; only the numbers shown are clipped to the range of labels.
        scores = scores.clip(schema.lowest_label, schema.highest_label)
    return OrderedItems(positions, scores)


def describe_few(model: ServedModel, viewer: Viewer, top: int) -> str:
    """Return a sentence with advice if the lists of some users are nearly the same; else empty.

    Empty too if there are too many items to find that out at once, or hardly more than in a list.
    """
    number = min(MOST_USERS, MOST_PAIRS // max(1, len(viewer.features.items.ids)))
    users = [other.id for other in viewer.other_users(number, least=1) if other.is_known_to(model)]
    ranked = int(model.snapshot.known(viewer.schema.item, viewer.features.items.ids).sum())
    if len(users) < LEAST_USERS or ranked < FEW_LISTS**2 * top:
        return ""
    listed = {item for pairs in model.recommend(users, top) for item, _ in pairs}
    if len(listed) >= FEW_LISTS * top:
        return ""
    items = f"{len(listed):,} of {ranked:,} {viewer.schema.items}"
    return f"the lists of {len(users)} users hold {items} together; {model.snapshot.task.few_listed}"


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
    save_dir, follows = folder_at(config.checkpoint.save_dir), config.flags["follow"]
    checkpoint = config.checkpoint.checkpoint
    # A `Follower` refuses a folder without a trained checkpoint.
    if follows:
        wait_for_first(save_dir, checkpoint)
    of_model = (maker, config.checkpoint.accept_changed_model)
    # Only a rule that is given overrides that of the training.
    rule = config.data.new_items if "new_items" in given else AS_TRAINED
    opened = functools.partial(Follower, save_dir, None, checkpoint, *of_model, new_items=rule)
    follower = retried(opened) if follows else None
    model = follower.model if follower else ServedModel.open(save_dir, checkpoint, "", *of_model, rule)
    # Before the data are read, so that files that come meanwhile are read again.
    seen = _seen(model, config, given) if follower else None
    viewer = open_viewer(model, config, given)
    for line in page(model, viewer, config.flags["top"], requested_kind(save_dir, checkpoint)).split("\n"):
        say(line)
    if few := describe_few(model, viewer, config.flags["top"]):
        say(few)
    if follower:
        _follow(follower, viewer, seen, config, given)


def open_viewer(model: ServedModel, config: Config, given: Collection[str]) -> Viewer:
    """Read the data of a model's training, give them to the model, and return the user in them.

    Prints the folder of the data.

    given: see `recommend`.

    Raises:
        UserError: see `read_training_data`.
    """
    data, schema = read_training_data(model.snapshot, config, given), model.snapshot.schema
    model.tell(data.features)
    # Without --user, as in the script of a training, take the user of the newest event.
    raw, events = data.raw, data.raw.events
    newest = raw.users[schema.column_of(USER)].iloc[events.user[events.time.argmax()]]
    return Viewer(raw, schema, config.flags["user"] or str(newest), data.features)


def _seen(model: ServedModel, config: Config, given: Collection[str]) -> object:
    """Return the run of the model, and the sizes of its data files; see `open_viewer`."""
    data = with_data_flags(model.snapshot, config, given).data
    source = look(data, config.runtime.seed)[1]
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
        for line in ("", *page(follower.model, viewer, config.flags["top"], follower.checkpoint).split("\n")):
            say(line)

    follow(follower, stop, show)


def page(
    model: ServedModel, viewer: Viewer, top: int, checkpoint: str = "", approximate: bool = False
) -> str:
    """Return the text of a page: the checkpoint and its age, items the user liked, and recommendations.

    approximate: see `ServedModel.recommend`.
    """
    known = viewer.is_known_to(model)
    items = best_for(viewer, model, top, approximate) if known else popular(viewer, model, top)
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
    return "\n".join([*lines, _table(items, titles[items.items].tolist(), heading)])


def _table(items: OrderedItems, titles: Sequence[str], heading: str) -> str:
    """Return a table with one item a line: rank, title and number."""
    width, wide = max(map(len, ["title", *titles])), max(9, len(heading))
    lines = [
        f"| rank | {'title':<{width}} | {heading:>{wide}} |",
        f"|-----:|{'-' * (width + 2)}|{'-' * (wide + 1)}:|",
    ]
    for rank, (title, number) in enumerate(zip(titles, items.numbers, strict=True), start=1):
        lines.append(f"| {rank:>4} | {title:<{width}} | {number:{wide}.3f} |")
    return "\n".join(lines)
