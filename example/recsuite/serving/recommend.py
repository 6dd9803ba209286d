"""Recommendations for one user on the command line, with titles; --follow prints them for newer checkpoints.

An item is recommended if it was in the training and, unless --seen allows it, the user has not had it; see
`display.Viewer`.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from recsuite.checkpoint.chain import asked_for, describe_choice
from recsuite.checkpoint.recorded import checked_flags, data_flags_of, merged
from recsuite.config.config import Config
from recsuite.config.sections import NEWEST, DataConfig
from recsuite.datasets.schema import (
    AUDIENCE,
    CLICKS,
    COUNT,
    ENTITIES,
    HISTORY,
    RATING,
    USER,
    YES_NO,
    RawData,
)
from recsuite.datasets.source import locate, look, read
from recsuite.errors import UserError, counted, duration, printable
from recsuite.models.tasks import ModelMaker
from recsuite.runtime.console import say
from recsuite.serving.display import DAMPING, HAPPENINGS, Listing, Told, Viewer, best_for, popular
from recsuite.serving.followers import follow, wait_for_first
from recsuite.serving.served import Follower, ServedModel

# Words for a user's items by the kind of the label: what the user did, and which come first, see
# `Viewer.liked`.
PAST = {
    RATING: ("rated", "and liked most"),
    YES_NO: ("was asked about", "those with a yes first"),
    CLICKS: ("had", "and last"),
    COUNT: ("had", "and most often"),
}


def recommend(config: Config, given: Collection[str], maker: ModelMaker | None = None) -> None:
    """Print the recommendations to --user; with --follow again after every newer checkpoint, until SIGINT.

    given: the flags of the command line, which take precedence over those in the checkpoint. maker: see
    `ServedModel.open`.

    Raises:
        UserError: when there is no model or no data, or they do not belong together.
    """
    save_dir, follows = Path(config.checkpoint.save_dir), config.serving.follow
    checkpoint = config.checkpoint.checkpoint
    # A `Follower` refuses a folder without a trained checkpoint.
    if follows:
        wait_for_first(save_dir)
    follower = Follower(save_dir, checkpoint=checkpoint, model=maker) if follows else None
    model = follower.model if follower else ServedModel.open(save_dir, checkpoint, model=maker)
    # Before the data are read, so that files that come meanwhile are read again.
    seen = _seen(model, config, given) if follower else None
    viewer = open_viewer(model, config, given)
    for line in page(model, viewer, config.serving.top, asked_for(save_dir, checkpoint)).split("\n"):
        say(line)
    if follower:
        _follow(follower, viewer, seen, config, given)


def open_viewer(model: ServedModel, config: Config, given: Collection[str]) -> Viewer:
    """Read the data of a model's training, give them to the model, and return the user in them.

    Prints the folder of the data.

    given: see `recommend`.

    Raises:
        UserError: when the data cannot be had, or are not those of the model.
    """
    recorded = checked_flags(model.snapshot.trained, model.snapshot.config)
    config = _data_of(model, config, given)
    schema = model.snapshot.schema
    source = locate(config.data, config.runtime.seed)
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
    told = Told(raw, schema, _longest(config.data, recorded))
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


def _longest(data: DataConfig, recorded: Mapping[str, Any]) -> dict[str, int | None]:
    """Return the maximum length of the histories of a training, by their names; None for no maximum.

    An export does not record them: there the flags count, and a user history has no maximum by default.
    """
    history, item_history, number = (
        int(recorded.get(name, getattr(data, name))) for name in ("history", "item_history", "co_occurrence")
    )
    found: dict[str, int | None] = {HISTORY: history, AUDIENCE: item_history}
    if number:
        found = {HISTORY: number if history else 0, AUDIENCE: number}
    return found if recorded or found[AUDIENCE] else {**found, AUDIENCE: None}


def _data_of(model: ServedModel, config: Config, given: Collection[str]) -> Config:
    """Return the configuration with the data flags of a model's training."""
    written = model.snapshot.trained
    return _with_data_of(written, checked_flags(written, model.snapshot.config), config, given)


def _check_ids(folder: Path, model: ServedModel, name: str, ids: list[Any]) -> None:
    """Refuse data that cannot be those of the training. ids: of all users or all items; name: their name."""
    trained, dynamic = model.snapshot.vocabulary.get(name, {}), model.snapshot.dynamic.get(name, ())
    # In one direction only: data that have grown since the training still have all ids of the training.
    strange = trained.keys() - set(ids)
    if strange:
        raise UserError(
            f"{folder} has no {name} {printable(min(strange))}, and the model was trained on one; give the "
            "--data_path of its training."
        )
    # Some ids with a row in a dynamic table may no longer be in the data, but not all of them.
    if dynamic and not bool(model.snapshot.known(name, ids).any()):
        raise UserError(
            f"{folder} has no {name} that the model was trained on; give the --data_path of its training."
        )


def _with_data_of(written: Path, recorded: dict[str, Any], config: Config, given: Collection[str]) -> Config:
    if not (recorded or config.data.dataset or config.data.data_path):
        raise UserError(
            f"--save_dir {config.checkpoint.save_dir} does not say which data its model was trained on; give "
            "--data_path."
        )
    # An empty path, as from a variable that is not set, counts as not given.
    named = {name for name in given if config.flags[name] != ""}
    return merged(written, config, data_flags_of(written, recorded, named))


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
    lines = [f"{choice}, {duration(model.age)} old"]
    is_happening = schema.label_kind in HAPPENINGS
    if len(viewer.labels):
        verb, which = PAST[schema.label_kind]
        # A model that reads the order goes by the newest items, so these are shown.
        reads_order = model.snapshot.task.reads_order
        which, shown = ("and last", viewer.latest()) if reads_order else (which, viewer.liked())
        number = counted(len({*viewer.items.tolist()}), schema.item)
        lines.append(f"user {printable(viewer.name)} {verb} {number}, {which}:")
        stars = zip(shown.numbers, titles[shown.items], strict=True)
        lines += [f"  {rating:.1f}  {title}" for rating, title in stars]
    if not known:
        mean = f"the mean of their {schema.labels} damped by {DAMPING} at the mean of all"
        how = f"the number of their {schema.labels}" if is_happening else mean
        unknown = f"the model knows no user {printable(viewer.name)}"
        lines.append(f"{unknown}; these are the popular {schema.items}, by {how}")
    score = model.snapshot.task.score_label.format(answer=schema.answer)
    heading = score if known else "events" if is_happening else "mean"
    return "\n".join([*lines, _table(found, titles[found.items].tolist(), heading)])


def _table(found: Listing, titles: Sequence[str], heading: str) -> str:
    """Return a table with one item a line: rank, title and number."""
    width, wide = max(map(len, ["title", *titles])), max(9, len(heading))
    lines = [
        f"| rank | {'title':<{width}} | {heading:>{wide}} |",
        f"|-----:|{'-' * (width + 2)}|{'-' * (wide + 1)}:|",
    ]
    for rank, (title, number) in enumerate(zip(titles, found.numbers, strict=True), start=1):
        lines.append(f"| {rank:>4} | {title:<{width}} | {number:{wide}.3f} |")
    return "\n".join(lines)
