"""From a table of events to a model that scores and recommends, in one call: in a notebook, or on many ranks.

    import recsuite

    model = recsuite.fit(events, epochs=5)            # a table in memory, or the path of tables
    model.recommend(["8d1f..."], k=5, event={"device": "phone"})
    model.score(events.head(3))
    model.save("served")                              # a folder that ServedModel.open reads

What it does is what the command line does, with the same flags by the same names; under torchrun every rank
makes the same call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import re
import shutil
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from recsuite.config.config import ALONE, TRAINING, Config, flag_names, sections
from recsuite.config.parser import nearest_flag
from recsuite.config.presets import with_preset
from recsuite.errors import UserError, printable
from recsuite.files import LARGEST, typed
from recsuite.runtime.host import stat_fields
from recsuite.runtime.process import launch_name, read_launch
from recsuite.tools.script import joined

if TYPE_CHECKING:
    import pandas
    from typing_extensions import Unpack

    from recsuite.datasets.schema import RawData
    from recsuite.datasets.tables.schema_file import TableSchema
    from recsuite.serving.snapshot import Snapshot
    from recsuite.tools.fitted import FittedModel
    from recsuite.tools.flags import Flags

# A process has one process group, and one folder of its launch.
FITTING = threading.Lock()
# Before the name of the launch, and what may be in a folder of this name.
PREFIX = "recsuite-fit-"
CONTENT = {"data", "columns", "checkpoints"}
# What `fit` decides itself.
DECIDED = ("data_path", "load", "compact", *TRAINING, *ALONE)


def fit(
    events: Any,
    schema: str | Path | TableSchema | None = None,
    *,
    users: Any = None,
    items: Any = None,
    **flags: Unpack[Flags],
) -> FittedModel:
    """Train a model on tables, and return it with its best weights; prints what the command line prints.
    Works in any thread; a second call waits until the first has ended. Collective: every rank.

    events: a table with a row for each event, of pandas, polars, pyarrow, DuckDB or anything else with
    `__arrow_c_stream__`, or the path of tables as --data_path takes it. users, items: such tables with a row
    for each, or None. schema: a schema.toml or what it says; None guesses it from tables in memory, and finds
    or guesses it beside a path. flags: those of the command line by their names, such as epochs=5. A
    `save_dir` keeps the checkpoints; several machines need one that all of them see. Of a path the columns
    are kept as the command line keeps them, in `cache_dir` or beside the tables.

    Raises:
        UserError: for a flag that is not known, and whatever a training raises; rows of tables are counted
            from 1.
        KeyboardInterrupt: on Ctrl-C, in the main thread.

        events = pandas.DataFrame({"user": [1, 1, 2], "item": [7, 8, 7], "rating": [4.0, 3.0, 5.0]})
        model = rs.fit(events, epochs=5)
        model.score(events)                                   # float32 [3]
    """
    config = _config_of(flags)
    is_path = isinstance(events, (str, Path))
    # All of it on every rank, before one of them writes anything: so all say the same.
    _check_launch()
    if is_path and not schema is users is items is None:
        raise UserError(
            "Beside the path of tables lie their schema.toml and the tables of users and items; leave out "
            "schema, users and items."
        )
    tables = {} if is_path else _frames(events, users, items)
    _check_schema(schema)
    # Of frames the folder comes later; it is one.
    path = str(events) if is_path else tempfile.gettempdir()
    config = config.replaced(data_path=path, dump=True)
    config = with_preset(config, flags, read_launch().world_size)
    with FITTING:
        try:
            with _folder_of_launch() as folder:
                if not is_path:
                    _write(folder / "data", tables, schema)
                    columns = config.data.cache_dir or str(folder / "columns")
                    config = config.replaced(data_path=str(folder / "data"), cache_dir=columns)
                if "save_dir" not in flags:
                    config = config.replaced(save_dir=str(folder / "checkpoints"))
                return _fitted(config, frozenset(flags), folder)
        finally:
            # What a training leaves refers to itself, with its process groups and its mapped columns: their
            # threads and descriptors would stay until Python looks for such.
            gc.collect()


def _config_of(flags: Mapping[str, Any]) -> Config:
    for name in flags:
        if name not in flag_names() or name in DECIDED:
            near = nearest_flag(name)
            meant = f" (did you mean {near}?)" if near and near not in DECIDED else ""
            raise UserError(f"fit takes no flag {printable(name)}{meant}; see --help for every flag.")
    return Config.of(**{name: _value_of(name, value) for name, value in flags.items()})


def _value_of(name: str, value: Any) -> Any:
    """The value of a flag, held against its type."""
    kind = get_type_hints(sections()[flag_names()[name]])[name]
    # A folder may be a Path, a number one of NumPy's, and widths a list.
    plain = str(value) if isinstance(value, Path) else value.item() if hasattr(value, "item") else value
    try:
        # A flag may be below zero.
        return typed(kind, [*plain] if isinstance(plain, tuple) else plain, name, least=-LARGEST)
    except (TypeError, ValueError):
        raise UserError(
            f"fit takes a value of type {getattr(kind, '__name__', kind)} for {name}, and got "
            f"{printable(repr(value))}."
        ) from None


def _check_launch() -> None:
    if read_launch().world_size > 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        raise UserError(
            "The ranks of this launch have no launcher in common by which they would find one folder; start "
            "them with torchrun."
        )


def _frames(events: Any, users: Any, items: Any) -> dict[str, pandas.DataFrame]:
    """The tables that were given, by their names."""
    from recsuite.datasets.tables.parts import frame_of

    given = {"events": events, "users": users, "items": items}
    return {
        name: frame_of(table, name) for name, table in given.items() if table is not None or name == "events"
    }


def _check_schema(schema: Any) -> None:
    from recsuite.datasets.tables.description import given_in
    from recsuite.datasets.tables.schema_file import TableSchema

    if isinstance(schema, (str, Path)):
        if not Path(schema).is_file():
            raise UserError(f"The schema {printable(schema)} is not a file; give the path of a schema.toml.")
        given_in(Path(schema))
    elif schema is not None and not isinstance(schema, TableSchema):
        raise UserError(
            f"schema takes the path of a schema.toml or what it says, and got {printable(repr(schema))}."
        )


@contextmanager
def _folder_of_launch() -> Iterator[Path]:
    """A folder of this launch; a fit that fails removes it, and of one that ends well the ranks together."""
    # The same on all ranks of a machine, which cannot tell each other before they have joined.
    folder = Path(tempfile.gettempdir(), f"{PREFIX}{launch_name()}")
    if read_launch().local_rank == 0:
        for leftover in filter(_is_leftover, folder.parent.glob(f"{PREFIX}*")):
            shutil.rmtree(leftover, ignore_errors=True)
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        yield folder
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, UserError):
            # The files of tables in memory do not stay.
            said = re.sub(rf"{re.escape(str(folder))}/data/(\w+)\.parquet", r"the table \1", str(error))
            raise UserError(said.replace("mend the file", "mend it")) from None
        raise


def _is_leftover(path: Path) -> bool:
    """Whether a fit of this machine was killed, and could not remove its folder."""
    host, _, process = path.name.removeprefix(PREFIX).rpartition("-")[0].rpartition("-")
    began = path.name.rpartition("-")[2]
    # Another machine may have this folder too, and only that one knows its processes.
    is_of_here = host == socket.gethostname() and process.isdecimal() and began.isdecimal()
    if not is_of_here or path.is_symlink() or not path.is_dir():
        return False
    with suppress(OSError):
        found = {each.name for each in path.iterdir()}
        return found <= CONTENT and stat_fields(int(process))[19:20] != [began]
    return False


def _write(
    folder: Path, tables: Mapping[str, pandas.DataFrame], schema: str | Path | TableSchema | None
) -> None:
    import pyarrow

    from recsuite.datasets.tables.description import IncompleteSchemaError, read_schema, write_schema
    from recsuite.datasets.tables.proposal import propose

    if read_launch().local_rank != 0:
        return
    for name, frame in tables.items():
        try:
            frame.to_parquet(folder / f"{name}.parquet", index=False)
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise UserError(
                f"{name} cannot be written as a table ({printable(error)}); convert that column to texts, "
                "numbers, truths or times."
            ) from None
    if isinstance(schema, (str, Path)):
        shutil.copyfile(schema, folder / "schema.toml")
        with contextlib.suppress(IncompleteSchemaError):
            read_schema(folder / "schema.toml")
            return
    elif schema is not None:
        write_schema(schema, folder / "schema.toml")
        return
    # What is shown names a file that stays: the folder goes.
    proposal = propose(folder)
    kept, path = tempfile.mkstemp("-schema.toml", "recsuite-")
    with open(kept, "wb") as file:
        file.write(proposal.path.read_bytes())
    dataclasses.replace(proposal, path=Path(path)).show()


def _fitted(config: Config, given: frozenset[str], folder: Path) -> FittedModel:
    from recsuite.checkpoint.session import checkpointing
    from recsuite.datasets.opening import open_data
    from recsuite.datasets.source import locate, read
    from recsuite.monitoring.callbacks import observing
    from recsuite.monitoring.report import report_run
    from recsuite.runtime.process import raise_on_all
    from recsuite.serving.reader import read_settled
    from recsuite.tools.fitted import FittedModel
    from recsuite.training.loops import train

    with (
        joined(config, given) as (config, context),
        observing(config, context) as observers,
    ):
        with ExitStack() as stack:
            with observers.part("data"):
                data = stack.enter_context(open_data(config, context))
            checkpointer = stack.enter_context(checkpointing(data.columns, config, context))
            run = train(data, config, context, checkpointer, observers.callbacks)
        # The table of results, and whatever the flags ask for.
        raise_on_all(lambda: report_run(run, observers.split(), config, context))

        def known() -> tuple[Snapshot, RawData, TableSchema]:
            source = locate(config.data, config.runtime.seed)
            snapshot = read_settled(Path(config.checkpoint.save_dir))
            return snapshot, read(source, config.data), source.table_schema

        # On every rank, for each may be asked. The folder is removed when all have read it, and before any of
        # them makes another one.
        snapshot, raw, tables = raise_on_all(known)
        raise_on_all(lambda: shutil.rmtree(folder) if context.local_rank == 0 else None)
    return FittedModel(snapshot, raw, tables, config.data, run.test)
