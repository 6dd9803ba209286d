"""Families of data sets that the program reads, and the choice of one by the configuration.

A family has `locate` and `look`, which return a `tables.source.TableSource`: its schema, its files and their
reader. Code outside of `datasets` does not depend on the family.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.config.sections import DataConfig, TablesConfig
from recsuite.datasets.movielens.source import DATA_DEADLINE, EDITIONS, SCHEMA, is_known
from recsuite.datasets.movielens.source import NUM_RATINGS as NUM_EVENTS
from recsuite.datasets.schema import VOCABULARY
from recsuite.datasets.tables.derived import with_user_day
from recsuite.errors import UserError
from recsuite.files import DATA_ROOT, explained

# For types only: a rank that only trains must not import Arrow.
if TYPE_CHECKING:
    from recsuite.datasets.tables.source import TableSource

__all__ = ["DATA_DEADLINE", "NUM_EVENTS"]

# Four steps in a row: waiting for another launch, a download, waiting for its columns, and parsing.
PREPARATION_DEADLINE = 4 * DATA_DEADLINE
# Schema of checkpoints without one: they are older than any other family.
FIRST_SCHEMA = SCHEMA


def locate(config: DataConfig, seed: int) -> TableSource:
    """Return the configured data set. Obtain a named set that is missing first.

    Writes a schema for the user's own tables if they have none.

    Raises:
        UserError: when there is nothing to read, or it cannot be obtained.
    """
    if not is_user_tables(config):
        from recsuite.datasets.movielens import source as movielens

        return movielens.locate(config, seed)
    from recsuite.datasets.tables import source as tables

    _refuse_near_known(config.data_path)
    return tables.locate(config, DATA_ROOT)


def _refuse_near_known(path: str) -> None:
    """Refuse a file of a set of a known form, and a folder with such a set in a subfolder."""
    # Read as tables of unknown columns, such a file would lack the other files of the set.
    from recsuite.datasets.tables.files import schema_path

    # A schema file overrides the check.
    if "://" in path or schema_path(path).exists():
        return
    given = Path(path).absolute()
    with explained(f"Cannot read --data_path {path}"):
        near = [given.parent] if given.name in {files.events for files in EDITIONS.values()} else []
        near += sorted(given.iterdir()) if given.is_dir() else []
        known = next((each for each in near if each.is_dir() and is_known(each)), None)
    if known is not None:
        raise UserError(
            f"--data_path {path} is not the folder of the MovieLens set in {known}; give that folder, or "
            f"write a schema, ./run.sh schema {path}, to have it read as tables of your own."
        )


def with_flags(source: TableSource, tables: TablesConfig, data: DataConfig) -> TableSource:
    """Return a data set with the ids and the features of the flags."""
    ids = VOCABULARY if tables.vocabulary == "fixed" else tables.vocabulary
    schema = source.schema if ids == "schema" else source.schema.with_ids(ids)
    # After the ids: a day needs no row before the training has it, so it needs no dynamic table.
    return dataclasses.replace(source, schema=schema if data.day_feature == "none" else with_user_day(schema))


def look(config: DataConfig, seed: int) -> tuple[Path, TableSource | None]:
    """Return the folder of the configured data set, and the set if its files are there. Obtains nothing.

    Raises:
        UserError: when there is nothing to read, and no set to obtain was named.
    """
    if not is_user_tables(config):
        from recsuite.datasets.movielens import source as movielens

        return movielens.look(config, seed)
    from recsuite.datasets.tables import source as tables

    _refuse_near_known(config.data_path)
    source = tables.look(config, DATA_ROOT)
    return (Path(config.data_path), None) if source is None else (source.folder, source)


def is_user_tables(config: DataConfig) -> bool:
    """True if --data_path names tables of the user's own, and not files of a known form."""
    if config.dataset or not config.data_path:
        return False
    from recsuite.datasets.tables.files import schema_path

    # A schema for files of a known form makes them own tables.
    return schema_path(config.data_path).exists() or not is_known(Path(config.data_path))
