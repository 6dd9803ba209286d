"""Train a model on a table of events in one call, to score and recommend: in a notebook, or on many ranks.

    import recsuite

    from example import make_loss, make_model         # or functions of your own

    model = recsuite.fit(events, model=make_model, loss=make_loss)    # a table, or the path of tables
    model.recommend(["8d1f..."], k=5, event={"device": "phone"})
    model.score(events.head(3))
    model.save("served")                              # a folder that ServedModel.open reads

It does the same as the command line, with the same flags and names. Under torchrun every rank makes the same
call.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

import numpy as np
import pandas
import pyarrow
from pyarrow import types

from recsuite.config.config import TRAINING, Config, alone_modes, flag_names, sections
from recsuite.config.fitting import with_preset
from recsuite.config.parser import nearest_flag
from recsuite.datasets.schema import EVENT, ITEM, RATING, USER, Feature, RawData
from recsuite.datasets.tables.derived import (
    AGE_DAYS,
    HOUR,
    USER_DAY,
    age_days,
    dates_name,
    derived,
    hour,
    user_days,
    weekday,
)
from recsuite.datasets.tables.sections import CATEGORY, NUMBER
from recsuite.datasets.tables.values import FAULTS, ID, MISSING, TIME, ColumnSpec, plain, shown_value, typed
from recsuite.errors import UserError, printable
from recsuite.files import LARGEST, local
from recsuite.files import typed as typed_value
from recsuite.hooks import extra
from recsuite.places import folder_at
from recsuite.runtime.console import LOGGER, say
from recsuite.runtime.host import stat_fields
from recsuite.runtime.process import launch_name, read_launch
from recsuite.serving.export import write_export
from recsuite.serving.request import check_values, length_of, type_of
from recsuite.serving.served import ServedModel
from recsuite.serving.snapshot import Snapshot
from recsuite.serving.training_data import TrainingFeatures
from recsuite.tools.script import joined_launch, session

if TYPE_CHECKING:
    import torch
    from typing_extensions import Unpack

    from recsuite.datasets.tables.sections import TableSchema
    from recsuite.extras.flags import Flags
    from recsuite.metrics import Metrics
    from recsuite.models.losses import LossMaker
    from recsuite.models.tasks import ModelMaker


class FittedModel(ServedModel):
    """A `ServedModel` with the tables that it was trained on: features and histories of users and items.

    `fit` returns one.

    Args:
        snapshot: The weights.
        raw: The tables.
        tables: The schema of the tables, which `fit` takes again.
        history: The maximum length of a history.
        metrics: Metrics on the test, by name.

    Raises:
        UserError: From its methods, for values of a wrong type and for features that the model lacks.

    Example:
        model = rs.fit(events, model=make_model, loss=make_loss, epochs=5)
        model.recommend(["8d1f"], k=5)              # [[(item, score), ...]]: 5 pairs for one user
        model.save("served")
    """

    _data: TrainingFeatures

    def __init__(
        self, snapshot: Snapshot, raw: RawData, tables: TableSchema, history: int, metrics: Metrics
    ) -> None:
        super().__init__(snapshot)
        self.tables = tables
        self.metrics = metrics
        self._days = {
            entity: {str(name): frame[name].to_numpy() for name in frame if derived(str(name))}
            for entity, frame in ((USER, raw.users), (ITEM, raw.items))
        }
        self._data = TrainingFeatures(raw, snapshot.schema, history)
        self.tell(self._data)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in self.metrics.items())
        users, items = len(self._data.users.ids), len(self._data.items.ids)
        return f"FittedModel({users:,} users, {items:,} items, test: {shown})"

    def recommend(
        self,
        users: Sequence[Any] | Mapping[str, Sequence[Any]] | None = None,
        k: int = 10,
        *,
        event: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> list[list[tuple[Any, float]]]:
        """As `ServedModel.recommend`. Users given by id get all their features from the tables.

        Args:
            users: U raw ids, or features of users by their names; None with `events`.
            k: Maximum number of items for each user, 1 or more.
            event: Features of the coming event, such as {"device": "phone"}, the same for all users.
            options: Further arguments of `ServedModel.recommend`.

        Returns:
            U lists of pairs of raw id and score, best first.

        Raises:
            UserError: As `ServedModel.recommend`, and for an `event` that is no mapping.
        """
        coming = self._coming(event)
        if users is not None and not isinstance(users, Mapping):
            length_of(self.snapshot.schema.user, users, self.snapshot.schema)
            users = {self.snapshot.schema.user: self._ids([*users], USER)}
        return super().recommend(_with(users, coming, options), k, **options)

    def score(self, values: Any) -> torch.Tensor:
        """As `ServedModel.score`; or of a table of events as `fit` takes it, with its columns.

        Features of users and items come from the tables, those of the event from the frame. If the frame has
        the column of times, a user's history ends strictly before the row's time. Without it, all events of
        the user count, including the row's own event if it is in the tables, and features computed from times
        are missing. The reported metrics use nothing of the test; here the user's earlier test events count.
        Predicted ratings are on the scale of the labels.

        Args:
            values: Values of features by name, or a table of events.

        Returns:
            The scores, float32 [B]; of a model of L labels float32 [B, L].

        Raises:
            UserError: For values of a wrong type, and when a column of ids is missing.
        """
        if isinstance(values, Mapping):
            return super().score(values)
        schema, frame = self.snapshot.schema, frame_of(values, "values")
        users, items = (self._ids(self._column(frame, entity), entity) for entity in (USER, ITEM))
        time = self._times(frame)
        told = self._data.of_users(users, self.snapshot, None if time is None else time.tolist())
        told |= self._data.of_items(self.snapshot, items)
        for feature in schema.features:
            if feature.entity == EVENT and feature.column in frame:
                told[feature.name] = self._event_values(feature, frame[feature.column])
            elif feature.entity == EVENT and time is not None and derived(feature.column):
                told[feature.name] = self._computed(feature, time, {USER: users, ITEM: items})
        scores, is_rated = self._score(told), schema.label_kind == RATING
        return scores.clamp(schema.lowest_label, schema.highest_label) if is_rated else scores

    def _times(self, frame: pandas.DataFrame) -> np.ndarray | None:
        """Return the times of the events, int64 [n] in seconds since 1970; None if the frame has none."""
        timestamp = self.tables.timestamp
        if timestamp is None or timestamp.column not in frame:
            return None
        return parsed(frame[timestamp.column], ColumnSpec(timestamp.column, TIME, EVENT, timestamp.format))

    def _computed(self, feature: Feature, time: np.ndarray, ids: Mapping[str, list[Any]]) -> list[Any]:
        """Return a feature that is computed from the times, users and items of events."""
        call = derived(feature.column)
        assert call is not None
        if feature.column == USER_DAY:
            return list(user_days(ids[USER], time))
        if call.function != AGE_DAYS:
            return list((hour if call.function == HOUR else weekday)(time).tolist())
        known = self._data.users if call.of == USER else self._data.items
        # An id that is not in the tables has no date.
        days = np.append(self._days[call.of][dates_name(call.of, call.column)], np.nan)
        ages = age_days(time, days[[known.places.get(key, -1) for key in ids[call.of]]])
        return [None if np.isnan(age) else age for age in ages.tolist()]

    def _coming(self, event: Any) -> dict[str, Any]:
        """Return the features of the coming event, as the training represents such values."""
        if event is not None and not isinstance(event, Mapping):
            raise UserError(
                'event takes features of the coming event by their names, such as {"device": "phone"}, and '
                f"got {printable(repr(event))}."
            )
        features = {own.name: own for own in self.snapshot.schema.features if own.entity == EVENT}
        return {
            name: self._event_values(features[name], [value])[0] if name in features else value
            for name, value in (event or {}).items()
        }

    def _event_values(self, feature: Feature, values: Any) -> list[Any]:
        kind = NUMBER if feature.number else CATEGORY
        is_held = feature in self.snapshot.features and not feature.number
        known = self.snapshot.kind_of(feature.name) if is_held else None
        return raw_values(values, typed(ColumnSpec(feature.column, kind, EVENT), self.tables), known)

    def save(self, folder: str | Path) -> None:
        """Write the model into a new folder, which `ServedModel.open` reads without the tables.

        Under torchrun rank 0 writes: all ranks have the same model.

        Args:
            folder: The folder, new or empty.

        Raises:
            UserError: When the folder is taken, or cannot be written.
        """
        if os.environ.get("RANK", "0") == "0":
            write_export(self.snapshot, local(folder))

    def _column(self, frame: pandas.DataFrame, entity: str) -> Any:
        column = self.snapshot.schema.column_of(entity)
        if column not in frame:
            raise UserError(f"The events to score have no column {printable(column)}; add it.")
        return frame[column]

    def _ids(self, values: Any, entity: str) -> list[Any]:
        """Return ids as the training represents them."""
        schema, data = self.snapshot.schema, self._data
        known = (data.users if entity == USER else data.items).places
        # Arrow would treat them as a column of lists.
        nested = [value for value in values if isinstance(value, (list, tuple, set, dict))]
        check_values(schema.name_of(entity), nested, type_of(known))
        return raw_values(values, ColumnSpec(schema.column_of(entity), ID, entity), type_of(known))


def _with(
    users: Mapping[str, Sequence[Any]] | None, coming: Mapping[str, Any], options: Mapping[str, Any]
) -> Mapping[str, Sequence[Any]] | None:
    """Return users by their features, or by the `events` of the options, with the coming event."""
    given = next(iter((users or {}).values()), options.get("events"))
    if not coming or given is None:
        return users
    return {**(users or {}), **{name: [value] * len(given) for name, value in coming.items()}}


# A process has one process group, and one folder of its launch.
FITTING = threading.Lock()
# Prefix of the folder before the name of the launch, and the files that it may contain.
PREFIX = "recsuite-fit-"
CONTENT = {"data", "columns", "checkpoints"}
# Flags that `fit` sets itself.
DECIDED = ("data_path", "load", "compact", *TRAINING, *alone_modes())


def fit(
    events: Any,
    schema: str | Path | Mapping[str, Any] | TableSchema | None = None,
    *,
    model: ModelMaker | None = None,
    loss: LossMaker | None = None,
    users: Any = None,
    items: Any = None,
    **flags: Unpack[Flags],
) -> FittedModel:
    """Train a model on tables, and return it with its best weights; prints what the command line prints.
    Works in any thread; a second call waits until the first has ended. Collective: every rank.

    Args:
        events: A table with a row for each event, of pandas, polars, pyarrow, DuckDB or anything else with
            `__arrow_c_stream__`, or the path of tables as for --data_path. With a path the columns are kept
            in `cache_dir` or beside the tables, as on the command line.
        schema: A schema.toml or its content, such as {"label": {"column": "stars"}}. The rest is guessed from
            tables in memory, and found or guessed beside a path.
        model: Makes the model, such as `make_model` of example.py; required.
        loss: Makes the loss from the columns and the flags, such as `make_loss` of example.py; required.
        users: A table with a row for each user, or None.
        items: A table with a row for each item, or None.
        flags: Flags of the command line by their names, such as epochs=5. A `save_dir` keeps the checkpoints;
            several machines need one that all of them share.

    Returns:
        The model with its best weights.

    Raises:
        UserError: For an unknown flag, and whatever a training raises; rows of tables are counted from 1.
        KeyboardInterrupt: On Ctrl-C, in the main thread.

    Example:
        events = pandas.DataFrame({"user": [1, 1, 2], "item": [7, 8, 7], "rating": [4.0, 3.0, 5.0]})
        model = rs.fit(events, model=make_model, loss=make_loss, epochs=5)
        model.score(events)                                   # float32 [3]
    """
    if model is None or loss is None:
        raise UserError(
            "fit requires the functions that make the model and its loss. Fix: from example import "
            "make_loss, make_model, then fit(events, model=make_model, loss=make_loss); example.py is in the "
            "repository, or give both of your own: a loss takes the output of its model."
        )
    config = _config_of(flags)
    is_path = isinstance(events, (str, Path))
    # All checks on every rank, before any of them writes: so all report the same error.
    _check_launch()
    if is_path and not schema is users is items is None:
        raise UserError(
            "A path of tables includes their schema.toml and the tables of users and items. Fix: do not "
            "give schema, users and items."
        )
    tables = {} if is_path else _frames(events, users, items)
    schema = _schema(schema)
    # The folder of frames is made later; the temporary folder stands for it here.
    path = str(events) if is_path else tempfile.gettempdir()
    config = config.replaced(data_path=path, dump=True)
    config = with_preset(config, flags)
    with FITTING:
        try:
            with _folder_of_launch() as folder, ExitStack() as stack:
                if not is_path:
                    stack.enter_context(_of_arguments(folder))
                    _write(folder / "data", tables, schema)
                    columns = config.data.cache_dir or str(folder / "columns")
                    config = config.replaced(data_path=str(folder / "data"), cache_dir=columns)
                if "save_dir" not in flags:
                    config = config.replaced(save_dir=str(folder / "checkpoints"))
                return _fitted(config, frozenset(flags), folder, model, loss)
        finally:
            # The objects of a training have reference cycles with its process groups and mapped columns.
            # Their threads and descriptors would stay until Python's garbage collector runs.
            gc.collect()


def _config_of(flags: Mapping[str, Any]) -> Config:
    for name in flags:
        if name not in flag_names() or name in DECIDED:
            near = nearest_flag(name)
            meant = f" (did you mean {near}?)" if near and near not in DECIDED else ""
            raise UserError(f"fit takes no flag {printable(name)}{meant}; see docs/flags.md for every flag.")
    return Config.of(**{name: _value_of(name, value) for name, value in flags.items()})


def _value_of(name: str, value: Any) -> Any:
    """Return the value of a flag, checked against its type."""
    kind = get_type_hints(sections()[flag_names()[name]])[name]
    # A folder may be a Path, a number may be NumPy's, and widths may be a list.
    given = str(value) if isinstance(value, Path) else value.item() if hasattr(value, "item") else value
    try:
        # The value of a flag may be negative.
        return typed_value(kind, [*given] if isinstance(given, tuple) else given, name, least=-LARGEST)
    except (TypeError, ValueError):
        raise UserError(
            f"fit takes a value of type {getattr(kind, '__name__', kind)} for {name}, and got "
            f"{printable(repr(value))}."
        ) from None


def _check_launch() -> None:
    if read_launch().world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UserError(
            "fit on several ranks requires a common launcher to agree on a folder; start them with torchrun."
        )


def _frames(events: Any, users: Any, items: Any) -> dict[str, pandas.DataFrame]:
    """Return the given tables by name."""
    given = {"events": events, "users": users, "items": items}
    return {
        name: frame_of(table, name) for name, table in given.items() if table is not None or name == "events"
    }


def _schema(schema: Any) -> Path | TableSchema | str | None:
    """Return the schema as the path of a file, the text of one, or whole, after a check."""
    from recsuite.datasets.tables.schema_file import given_in, given_of
    from recsuite.datasets.tables.sections import TableSchema

    if isinstance(schema, Mapping):
        for name, section in schema.items():
            if not isinstance(section, (Mapping, list, tuple)):
                raise UserError(
                    f"The section {printable(name)} of schema must be a mapping, such as "
                    f'{{"column": "NAME"}}, got {printable(repr(section))}.'
                )
        with suppress(AttributeError, TypeError, ValueError), _of_arguments(Path(PREFIX)):
            text = extra("schema").text_of_sections(schema)
            given_of(text, "schema")
            return text
    if isinstance(schema, (str, Path)):
        if not Path(schema).is_file():
            raise UserError(f"The schema {printable(schema)} is not a file; give the path of a schema.toml.")
        given_in(Path(schema))
        return Path(schema)
    if schema is not None and not isinstance(schema, TableSchema):
        raise UserError(
            "schema must be the path of a schema.toml, its sections by their names, or a TableSchema, got "
            f"{printable(repr(schema))}."
        )
    return schema


@contextmanager
def _folder_of_launch() -> Iterator[Path]:
    """Make a folder of this launch. A failed fit removes it; otherwise the ranks remove it together."""
    # The same on all ranks of a machine, which cannot communicate before they have joined.
    folder = Path(tempfile.gettempdir(), f"{PREFIX}{launch_name()}")
    if read_launch().local_rank == 0:
        for leftover in filter(_is_leftover, folder.parent.glob(f"{PREFIX}*")):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


@contextmanager
def _of_arguments(folder: Path) -> Iterator[None]:
    """Name the arguments of `fit` in all lines and errors, in place of its temporary files."""

    def reworded(record: logging.LogRecord) -> bool:
        record.msg, record.args = in_arguments(record.getMessage(), folder), ()
        # The checkpoint becomes the returned model, and its folder is removed.
        return "dumped a temporary folder" not in record.msg

    log = logging.getLogger(LOGGER)
    log.addFilter(reworded)
    try:
        yield
    except UserError as error:
        raise UserError(in_arguments(str(error), folder)) from None
    finally:
        log.removeFilter(reworded)


# Sections of a schema.toml in a message, with and without keys and values.
KEY, DICT_KEY = re.compile(r' (\w+) = ("[^"]*"|\[[^\]]*\])'), r', "\1": \2'
LINE = re.compile(rf"\[(\w+)\](?: and)?((?:{KEY.pattern})+)")
SECTION = re.compile(r"\[(files|user|item|label|weight|timestamp|events|features)(?:\.(\w+))?\]")
TOLD = (
    (r"write (a schema\.toml beside the data with the lines|into schema\.toml[^:]*:) (?={)", "give schema="),
    (r"}}, then {", "}, "),
    (r"( of| is in) schema\.toml", ""),
    (r"schema\.toml", "the argument schema"),
    (r"correct the file", "correct it"),
    (r"--(resume|move_aside)\b", r"\1=True"),
    (r"give --(\w+) (\w+)", r'give \1="\2"'),
)


def in_arguments(text: str, folder: Path) -> str:
    """Return a message on the files of frames in a folder as one on the arguments of `fit`."""
    root = re.escape(str(folder))
    text = re.sub(rf"{root}/data/(\w+)\.parquet", r"the table \1", text)
    text = re.sub(rf"{root}/data(/schema\.toml)?", lambda match: "schema" if match[1] else "the tables", text)
    text = re.sub(rf"{root}[^\s;,]*", "a temporary folder", text)
    text = LINE.sub(lambda line: f'{{"{line[1]}": {{{KEY.sub(DICT_KEY, line[2])[2:]}}}}}', text)
    text = SECTION.sub(lambda match: f'schema["{match[1]}"]' + f'["{match[2]}"]' * bool(match[2]), text)
    for pattern, words in TOLD:
        text = re.sub(pattern, words, text)
    return text


def _is_leftover(path: Path) -> bool:
    """True if a fit of this machine was killed, and could not remove its folder."""
    host, _, process = path.name.removeprefix(PREFIX).rpartition("-")[0].rpartition("-")
    began = path.name.rpartition("-")[2]
    # Another machine may share this folder, and only that machine knows its processes.
    is_of_here = host == socket.gethostname() and process.isdecimal() and began.isdecimal()
    if not is_of_here or path.is_symlink() or not path.is_dir():
        return False
    with suppress(OSError):
        names = {file.name for file in path.iterdir()}
        return names <= CONTENT and stat_fields(int(process))[19:20] != [began]
    return False


def _write(
    folder: Path, tables: Mapping[str, pandas.DataFrame], schema: Path | TableSchema | str | None
) -> None:
    from recsuite.datasets.tables.schema_file import IncompleteSchemaError, read_schema

    if read_launch().local_rank != 0:
        return
    for name, frame in tables.items():
        try:
            # A dictionary helps texts alone, and takes time in each of many columns of numbers.
            texts = [str(column) for column, kind in frame.dtypes.items() if kind.kind not in "biufM"]
            frame.to_parquet(folder / f"{name}.parquet", index=False, use_dictionary=texts)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise UserError(
                f"Cannot write {name} as a table: {printable(error)}. Fix: convert that column to texts, "
                "numbers, truths or times."
            ) from None
    if isinstance(schema, (str, Path)):
        text = schema if isinstance(schema, str) else schema.read_text("utf-8-sig")
        (folder / "schema.toml").write_text(text, "utf-8")
        with contextlib.suppress(IncompleteSchemaError):
            read_schema(folder / "schema.toml")
            return
    elif schema is not None:
        extra("schema").write_schema(schema, folder / "schema.toml")
        return
    proposal = extra("guess").propose(folder)
    say(proposal.overview, tagged=False)
    for note in proposal.notes:
        say(note)
    say(
        "guessed from the first rows; where it is wrong, give schema, such as "
        'schema={"user": {"column": "NAME"}}; the one of the model is its attribute tables'
    )


def _fitted(
    config: Config, given: frozenset[str], folder: Path, model: ModelMaker, loss: LossMaker
) -> FittedModel:
    from recsuite.checkpoint.folder import BEST
    from recsuite.datasets.loader import build_dataloader
    from recsuite.datasets.preparation.reading import read
    from recsuite.datasets.source import locate
    from recsuite.runtime.process import raise_on_all
    from recsuite.serving.reader import read_settled

    with joined_launch(config, given) as (config, context):
        with session(config, context, build_dataloader) as training:
            run = training.run(model, loss)
        # Prints the table of results, and writes the outputs that the flags request.
        raise_on_all(lambda: training.report(run))

        def known() -> tuple[Snapshot, RawData, TableSchema]:
            source = locate(config.data, config.runtime.seed)
            snapshot = read_settled(folder_at(config.checkpoint.save_dir), BEST, model)
            return snapshot, read(source, config.data), source.table_schema

        # On every rank, because each may be asked for scores. The folder is removed after all have read it,
        # and before any of them makes another one.
        snapshot, raw, tables = raise_on_all(known)
        raise_on_all(lambda: shutil.rmtree(folder) if context.local_rank == 0 else None)
    return FittedModel(snapshot, raw, tables, config.data.history, run.test.values)


def frame_of(values: Any, name: str) -> pandas.DataFrame:
    """Return a table in memory as a pandas.DataFrame, with its types unchanged.

    values: a pandas.DataFrame, or any table that offers Arrow's stream of batches, such as those of polars,
    pyarrow and DuckDB.

    Raises:
        UserError: for what is no table, and for columns that a file of tables cannot have.
    """
    if hasattr(values, "__arrow_c_stream__") and not isinstance(values, pandas.DataFrame):
        try:
            # Categories of polars have a text type that Arrow can neither decode nor write.
            values = pyarrow.table(values).to_pandas(
                types_mapper=lambda t: None if types.is_dictionary(t) else pandas.ArrowDtype(t)
            )
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise UserError(
                f"Cannot read {name} as an Arrow table: {printable(error)}. Fix: give another one."
            ) from None
    if not isinstance(values, pandas.DataFrame):
        given = printable(repr(type(values)))
        raise UserError(f"{name} must be a table of pandas, polars, pyarrow or DuckDB, got {given}.")
    odd = [column for column in values.columns if not isinstance(column, str)]
    odd += [*values.columns[values.columns.duplicated()]]
    if odd:
        raise UserError(
            f"{name} has a column {printable(repr(odd[0]))}, and takes columns with one name each, a text; "
            "rename it."
        )
    lost = [each for each in values.index.names if each is not None and each not in values.columns]
    if lost:
        raise UserError(
            f"{name} has an index {printable(repr(lost[0]))}, which is not read; call reset_index() to make "
            "it a column, or reset_index(drop=True) to remove it."
        )
    for column, kind in values.dtypes.items():
        # Columns of plain numbers, booleans and times have a single type.
        if kind.kind not in "biufM":
            column_of(values[column], str(column))
    return values


def column_of(values: Any, name: str) -> pyarrow.Array:
    """Return values of one type as an Arrow array.

    Raises:
        UserError: for values of several types, or of one that no table has.
    """
    try:
        array = pyarrow.array(values, from_pandas=True)
    # Arrow's error depends on the value that it finds first.
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
        raise UserError(
            f"The column {printable(name)} holds values of several types, or of one that no table has; give "
            "texts, numbers, truths or times alone."
        ) from None
    return array.combine_chunks() if isinstance(array, pyarrow.ChunkedArray) else array


def parsed(values: Any, wanted: ColumnSpec) -> Any:
    """Return the values of a column as training reads them: a NumPy or Arrow array. No time may be missing.

    Raises:
        UserError: for what the training would call a bad row, but for an id that is missing.
    """
    column = plain(column_of(values, wanted.column), wanted.column)
    parsed_values, faults = wanted.parse(column)
    is_bad = faults != 0 if wanted.kind == TIME else (faults != 0) & (faults != MISSING)
    if is_bad.any():
        place = int(np.argmax(is_bad))
        shown = shown_value(column, place)
        raise UserError(f"{wanted.column} {shown}{FAULTS[faults[place]]}; fix it.")
    return parsed_values


def raw_values(values: Any, wanted: ColumnSpec, known: type[Any] | None) -> list[Any]:
    """Return ids, categories or numbers as a model receives them, None for a missing one.

    known: their type in the training, or None. It is needed because some values of a column may be whole
    numbers although the column as a whole is one of texts.

    Raises:
        UserError: see `parsed`.
    """
    parsed_values = parsed(values, wanted)
    if isinstance(parsed_values, np.ndarray):
        return [None if np.isnan(each) else each for each in parsed_values.tolist()]
    if known is str:
        parsed_values = parsed_values.cast(pyarrow.string())
    is_number = types.is_floating(plain(column_of(values, wanted.column), wanted.column).type)
    raw: list[Any] = parsed_values.to_pylist()
    if is_number and known is int and types.is_string(parsed_values.type):
        # Values that are not whole are out of vocabulary.
        return [int(each) if each is not None and each.lstrip("-").isdecimal() else None for each in raw]
    return raw
