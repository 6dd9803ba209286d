"""From a table of events to a model that scores and recommends, in one call: in a notebook, or on many ranks.

    import recsuite

    model = recsuite.fit(events, epochs=5)            # a pandas.DataFrame, or the path of tables
    model.recommend(["8d1f..."], k=5, event={"device": "phone"})
    model.score(events.head(3))
    model.save("served")                              # a folder that ServedModel.open reads

What it does is what the command line does, with the same flags by the same names; under torchrun every rank
makes the same call.
"""

from __future__ import annotations

import difflib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.config.config import Config, flag_names
from recsuite.errors import UserError, printable
from recsuite.runtime.launch import launch_name, read_launch
from recsuite.tools.script import joined

if TYPE_CHECKING:
    from recsuite.datasets.schema import RawData
    from recsuite.datasets.tables.schema_file import TableSchema
    from recsuite.serving.snapshot import Snapshot
    from recsuite.tools.fitted import FittedModel

# What `fit` decides itself.
DECIDED = (
    "data_path",
    "train",
    "dump",
    "inc_dump",
    "load",
    "compact",
    "resume",
    "doctor",
    "export",
    "recommend",
)


def fit(
    events: Any,
    schema: str | Path | TableSchema | None = None,
    *,
    users: Any = None,
    items: Any = None,
    **flags: Any,
) -> FittedModel:
    """Train a model on tables, and give it with its best weights. Collective: every rank.

    events: a pandas.DataFrame with a row for each event, or the path of tables as --data_path takes it.
    users, items: frames with a row for each, or None. schema: a schema.toml or what it says; None guesses it
    from frames, and finds or guesses it beside a path. flags: those of the command line by their names, such
    as epochs=5. A `save_dir` keeps the checkpoints; several machines need one that all of them see.

    Raises:
        UserError: for a flag that is not known, and whatever a training raises.
    """
    config = _config_of(flags)
    with _data_of(events, users, items, schema) as (path, folder):
        config = config.replaced(
            data_path=path, dump=True, cache_dir=config.data.cache_dir or str(folder / "columns")
        )
        if "save_dir" not in flags:
            config = config.replaced(save_dir=str(folder / "checkpoints"))
        config.validate()
        return _fitted(config, frozenset(flags), folder)


def _config_of(flags: Mapping[str, Any]) -> Config:
    for name in flags:
        if name not in flag_names() or name in DECIDED:
            near = difflib.get_close_matches(name, [*flag_names()], n=1)
            meant = f" (did you mean {near[0]}?)" if near and near[0] not in DECIDED else ""
            raise UserError(f"fit takes no flag {printable(name)}{meant}; see --help for every flag.")
    return Config.of(**flags)


@contextmanager
def _data_of(
    events: Any, users: Any, items: Any, schema: str | Path | TableSchema | None
) -> Iterator[tuple[str, Path]]:
    """The path of the tables, and a folder of this launch, which is removed at the end."""
    launch = read_launch()
    # The same on all ranks of a machine, which cannot tell each other before they have joined.
    folder = Path(tempfile.gettempdir(), f"recsuite-fit-{launch_name()}")
    is_path = isinstance(events, (str, Path))
    if is_path and (users is not None or items is not None or schema is not None):
        raise UserError(
            "Beside the path of tables lie their schema.toml and the tables of users and items; leave out "
            "schema, users and items."
        )
    try:
        (folder / "data").mkdir(parents=True, exist_ok=True)
        if launch.local_rank == 0 and not is_path:
            _write(folder / "data", {"events": events, "users": users, "items": items}, schema)
        yield str(events) if is_path else str(folder / "data"), folder
    except BaseException:
        # Of a training that has ended well the ranks have removed it together.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _write(folder: Path, tables: Mapping[str, Any], schema: str | Path | TableSchema | None) -> None:
    from recsuite.datasets.tables.description.writer import write_schema

    for name, frame in tables.items():
        if frame is None:
            continue
        if not hasattr(frame, "to_parquet"):
            raise UserError(f"{name} takes a pandas.DataFrame, and got {printable(repr(type(frame)))}.")
        frame.to_parquet(folder / f"{name}.parquet", index=False)
    if isinstance(schema, (str, Path)):
        shutil.copyfile(schema, folder / "schema.toml")
    elif schema is not None:
        write_schema(schema, folder / "schema.toml")


def _fitted(config: Config, given: frozenset[str], folder: Path) -> FittedModel:
    from recsuite.checkpoint.session import checkpointing
    from recsuite.datasets.opening import open_data
    from recsuite.datasets.source import locate, read
    from recsuite.datasets.tables.source import OwnTables
    from recsuite.runtime.collectives import raise_on_all
    from recsuite.serving.reader import read_settled
    from recsuite.tools.fitted import FittedModel
    from recsuite.training.trainer import train

    config.validate()
    with joined(config, given) as (config, context):
        with (
            open_data(config, context) as data,
            checkpointing(data.columns, config, context) as checkpointer,
        ):
            run = train(data, config, context, checkpointer)

        def known() -> tuple[Snapshot, RawData, TableSchema]:
            source = locate(config.data, config.runtime.seed)
            if not isinstance(source, OwnTables):
                raise UserError(
                    f"{source.folder} holds files of a known form; train on them with the command line."
                )
            snapshot = read_settled(Path(config.checkpoint.save_dir))
            return snapshot, read(source, config.data), source.table_schema

        # On every rank, for each may be asked. The folder is removed when all have read it, and before any of
        # them makes another one.
        snapshot, raw, tables = raise_on_all(known)
        raise_on_all(lambda: shutil.rmtree(folder) if context.local_rank == 0 else None)
    return FittedModel(snapshot, raw, tables, config.data.history, run.test)
