"""What a model recommends to one user, with titles, and again whenever a trainer has written a newer one.

An item is recommended if the training saw it and the user has not rated it. Somebody of whom the model knows
nothing is shown the popular items: the highest means of their ratings, each damped by DAMPING ratings at the
mean of all, so that one enthusiast makes no favourite.
"""

from __future__ import annotations

import dataclasses
import re
import signal
import sys
import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.checkpoint.storage.choice import asked_for, describe_choice
from recsuite.checkpoint.storage.directory import LATEST, newest_in, step_of
from recsuite.checkpoint.storage.recorded import checked_flags, data_flags_of, merged
from recsuite.config.config import Config
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, USER, Feature, RawData, Schema
from recsuite.datasets.source import locate, read
from recsuite.errors import UserError, counted, duration, printable, signed
from recsuite.models.tasks.task import task_of_head
from recsuite.runtime.console import say
from recsuite.serving.request import HISTORY_RATINGS
from recsuite.serving.served import Follower, ServedModel

if TYPE_CHECKING:
    import pandas

DAMPING = 20
MOST_LIKED = 5
POLL_SECONDS = 1.0


@dataclasses.dataclass(frozen=True)
class Listing:
    """Items in their order: positions in `RawData.items`, int64 [n], and a number for each, [n]."""

    items: np.ndarray
    numbers: np.ndarray


def recommend(config: Config, given: Collection[str]) -> None:
    """Print the recommendations to --user; with --follow again after every newer checkpoint, until SIGINT.

    given: the flags of the command line, which go before those that the checkpoint records.

    Raises:
        UserError: when there is no model or no data, or they do not belong together.
    """
    save_dir, follows = Path(config.checkpoint.save_dir), config.serving.follow
    checkpoint = LATEST if follows else config.checkpoint.checkpoint
    # A `Follower` refuses a folder in which nothing was learned yet.
    if follows:
        _wait_for_first(save_dir)
    follower = Follower(save_dir) if follows else None
    model = follower.model if follower else ServedModel.open(save_dir, checkpoint)
    viewer = open_viewer(model, config, given)
    say(page(model, viewer, config.serving.top, asked_for(save_dir, checkpoint)))
    if follower:
        _follow(follower, viewer, config, given)


def open_viewer(model: ServedModel, config: Config, given: Collection[str]) -> Viewer:
    """The user in the data that a model was trained on, from which the model takes what its items are.

    Says which data these are.

    given: see `recommend`.

    Raises:
        UserError: when the data cannot be had, or are not those of the model.
    """
    written = model.snapshot.trained
    recorded = checked_flags(written, model.snapshot.config)
    config = _with_data_of(written, recorded, config, given)
    schema = model.snapshot.schema
    source = locate(config.data, config.runtime.seed)
    raw = read(source, config.data)
    for entity, frame in zip(ENTITIES, (raw.users, raw.items), strict=True):
        name, ids = schema.name_of(entity), frame[schema.column_of(entity)]
        # One way only: data that have grown since the training still have all that it saw.
        strange = model.snapshot.vocabulary.get(name, {}).keys() - set(ids.tolist())
        if strange:
            raise UserError(
                f"{source.folder} has no {name} {min(strange)}, and the model was trained on one; give the "
                "--data_path of its training."
            )
    say(f"titles and {schema.labels} are those of {source.folder}")
    model.describe_items(_values_of(raw.items, model.snapshot.features, ITEM))
    # A history as long as in the training; an export does not record it, and there the flag counts.
    return Viewer(raw, schema, config.serving.user, int(recorded.get("history", config.data.history)))


def _values_of(frame: pandas.DataFrame, features: Sequence[Feature], entity: str) -> dict[str, list[Any]]:
    """What a model takes of users or items: a feature's name to raw values, those that the data have."""
    return {
        feature.name: frame[feature.column].tolist()
        for feature in features
        if feature.entity == entity and feature.column in frame
    }


def _with_data_of(written: Path, recorded: dict[str, Any], config: Config, given: Collection[str]) -> Config:
    if not (recorded or config.data.dataset or config.data.data_path):
        raise UserError(
            f"--save_dir {config.checkpoint.save_dir} does not say which data its model was trained on; give "
            "--data_path."
        )
    # A path that is given and empty, as from a variable that is not set, names none.
    named = {name for name in given if config.flags[name] != ""}
    return merged(written, config, data_flags_of(written, recorded, named))


def _wait_for_first(save_dir: Path) -> None:
    """Wait for the first checkpoint of a training that has begun, or will; SIGINT ends it."""
    if not _has_learned(save_dir):
        say(f"waiting for the first checkpoint in {save_dir}")
    while not _has_learned(save_dir):
        time.sleep(POLL_SECONDS)


def _has_learned(save_dir: Path) -> bool:
    """Whether there is a checkpoint after a step."""
    newest = newest_in(save_dir)
    return newest is not None and step_of(newest) > 0


def _follow(follower: Follower, viewer: Viewer, config: Config, given: Collection[str]) -> None:
    """Look for a newer checkpoint every second; SIGINT ends it."""
    # From here on SIGINT ends the wait between two pages, and cuts none of them short.
    stop = threading.Event()
    signal.signal(signal.SIGINT, lambda number, frame: stop.set())
    run, said = follower.model.run, ""
    while not stop.wait(POLL_SECONDS):
        try:
            if follower.refresh():
                # Another training may have had other data.
                if follower.model.run != run:
                    viewer, run = open_viewer(follower.model, config, given), follower.model.run
                say(f"\n{page(follower.model, viewer, config.serving.top, LATEST)}")
            said = ""
        except UserError as error:
            # The model before is still good. Said once, for the fault may stay.
            if str(error) != said:
                print(signed(error), file=sys.stderr, flush=True)
            said = str(error)


class Viewer:
    """One user, in the data or not: what was rated, and what a model is told."""

    def __init__(self, raw: RawData, schema: Schema, user: str, longest_history: int) -> None:
        self.raw = raw
        self.schema = schema
        self.name = user
        self.longest_history = longest_history
        self.id = _id_of(user)
        events = raw.events
        # Nobody has the place -1.
        place = next(iter(np.flatnonzero(self._is_user())), -1)
        mine = np.flatnonzero(events.user == place)
        # Stable, as in the training's histories: of one second the order of the file counts.
        mine = mine[np.argsort(events.time[mine], kind="stable")]
        # The oldest first: positions in `RawData.items`.
        self.items, self.labels = events.item[mine], events.label[mine]

    def _is_user(self) -> np.ndarray:
        """Which of the data's users it is, bool [users]."""
        ids = self.raw.users[self.schema.column_of(USER)].to_numpy()
        return np.asarray(ids == self.id) if self.id is not None else np.zeros(len(ids), bool)

    @property
    def item_ids(self) -> np.ndarray:
        """The raw ids of the user's items, the oldest first."""
        return self.raw.items[self.schema.column_of(ITEM)].to_numpy()[self.items]

    def liked(self) -> Listing:
        """The items with the highest labels, of equal ones the newest first."""
        best = np.lexsort([-np.arange(len(self.labels)), -self.labels])[:MOST_LIKED]
        return Listing(self.items[best], self.labels[best])

    def places(self, item_ids: Sequence[Any]) -> np.ndarray:
        """The positions of raw ids in `RawData.items`, int64 [n]."""
        import pandas

        return pandas.Index(self.raw.items[self.schema.column_of(ITEM)]).get_indexer(item_ids)

    def is_known_to(self, model: ServedModel) -> bool:
        """Whether a model learned of this user, or can be told what the user rated."""
        return model.knows(self.schema.user, self.id) or (
            HISTORY in model.snapshot.tables and len(self.labels) > 0
        )

    def unseen(self, model: ServedModel) -> np.ndarray:
        """The items that the user has not rated and the training has seen, int64 [n]."""
        ids = self.raw.items[self.schema.column_of(ITEM)].to_numpy()
        # Of any other item the model has no row that it learned.
        trained = np.array([model.knows(self.schema.item, item) for item in ids.tolist()], bool)
        trained[self.items] = False
        return np.flatnonzero(trained)

    def values(self, features: Sequence[Feature]) -> dict[str, list[Any]]:
        """What the model is told about this user."""
        of_user = self.raw.users[self._is_user()]
        values = _values_of(of_user, features, USER)
        if HISTORY in [feature.name for feature in features]:
            # Not [-longest:], which takes all of them where the longest is 0.
            last = slice(max(0, len(self.labels) - self.longest_history), None)
            values[HISTORY] = [self.item_ids.tolist()[last]]
            values[HISTORY_RATINGS] = [self.labels[last].tolist()]
        return values


def _id_of(user: str) -> int | None:
    """The id that a user's name is: a whole number of 64 bits in every set. Any other name is nobody's."""
    # Python refuses to read a number of some thousand digits.
    found = re.fullmatch(r"([+-]?)0*(\d{1,19})", user.strip(), re.ASCII)
    number = int(found[1] + found[2]) if found else 2**63
    return number if -(2**63) <= number < 2**63 else None


def best_for(viewer: Viewer, model: ServedModel, top: int) -> Listing:
    """The items with the highest predictions for a user, of those that the user has not rated."""
    # All that were rated: the history that the model is told may be shorter.
    rated = [viewer.item_ids.tolist()]
    (found,) = model.recommend(viewer.values(model.snapshot.features), top, exclude=rated)
    places = viewer.places([item for item, _ in found])
    return Listing(places, np.array([score for _, score in found], np.float32))


def popular(viewer: Viewer, model: ServedModel, top: int) -> Listing:
    """The items with the highest damped means, of those that a user has not rated."""
    events, number = viewer.raw.events, len(viewer.raw.items)
    counts = np.bincount(events.item, minlength=number)
    sums = np.bincount(events.item, weights=events.label, minlength=number)
    mean = events.label.mean(dtype=np.float64)
    unseen = viewer.unseen(model)
    return _highest(unseen, ((sums + DAMPING * mean) / (counts + DAMPING))[unseen], top)


def _highest(items: np.ndarray, numbers: np.ndarray, top: int) -> Listing:
    # Stable, so that of equal items the one with the lower id comes first on every machine: `read` orders
    # them so.
    order = np.argsort(-numbers, kind="stable")[:top]
    return Listing(items[order], numbers[order])


def page(model: ServedModel, viewer: Viewer, top: int, checkpoint: str = "") -> str:
    """Which checkpoint it is and its age, what the user liked before, and what is recommended."""
    known = viewer.is_known_to(model)
    found = best_for(viewer, model, top) if known else popular(viewer, model, top)
    schema = viewer.schema
    titles = viewer.raw.items[schema.title].map(printable).to_numpy()
    choice = describe_choice(model.progress, checkpoint, model.snapshot.metric)
    lines = [f"{choice}, {duration(model.age)} old"]
    if len(viewer.labels):
        lines.append(f"user {viewer.name} rated {counted(len(viewer.labels), schema.item)}, and liked most:")
        liked = viewer.liked()
        stars = zip(liked.numbers, titles[liked.items], strict=True)
        lines += [f"  {rating:.1f}  {title}" for rating, title in stars]
    if not known:
        lines.append(
            f"the model knows no user {viewer.name}; these are the popular {schema.items}, by the mean of "
            f"their {schema.labels} damped by {DAMPING} at the mean of all"
        )
    heading = task_of_head(model.snapshot.head).score_label if known else "mean"
    return "\n".join([*lines, _table(found, titles[found.items].tolist(), heading)])


def _table(found: Listing, titles: Sequence[str], heading: str) -> str:
    """Rank, title and number, one item a line."""
    width = max(map(len, ["title", *titles]))
    lines = [f"| rank | {'title':<{width}} | {heading:>9} |", f"|-----:|{'-' * (width + 2)}|----------:|"]
    for rank, (title, number) in enumerate(zip(titles, found.numbers, strict=True), start=1):
        lines.append(f"| {rank:>4} | {title:<{width}} | {number:9.3f} |")
    return "\n".join(lines)
