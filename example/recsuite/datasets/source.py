"""The families of data sets that the program reads, and the one that the configuration names.

A family offers a `Source`: its schema, its files and how they are read. Nothing outside of `datasets` knows
which one it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from recsuite.checkout import DATA_ROOT
from recsuite.config.sections.data import DataConfig
from recsuite.config.sections.tables import TablesConfig
from recsuite.datasets.movielens import formats as movielens
from recsuite.datasets.movielens.formats import DATA_DEADLINE, PREPARATION_DEADLINE
from recsuite.datasets.movielens.formats import NUM_RATINGS as NUM_EVENTS
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.datasets.preparation.duplicates import settle
from recsuite.datasets.schema import RawData, Schema
from recsuite.datasets.tables.derived import add_user_days, with_user_day
from recsuite.errors import UserError
from recsuite.files import explained

__all__ = ["DATA_DEADLINE", "NUM_EVENTS", "PREPARATION_DEADLINE"]

# The files of sets of a known form that have their ratings.
RATINGS_FILES = [layout.ratings for layout in movielens.LAYOUTS]
# That of checkpoints which do not bring one: they are older than any other family.
FIRST_SCHEMA = SCHEMA


class SourceFile(Protocol):
    """A file that columns are made from."""

    @property
    def name(self) -> str:
        """What it is called beside the others, the same wherever they lie."""

    @property
    def size(self) -> int:
        """Its bytes."""

    def open(self) -> IO[bytes]:
        """Its bytes: the size of a file can be had without the right to read it."""

    def digest(self) -> str:
        """What changes with its content.

        Raises:
            UserError: when it cannot be read.
        """


class Source(Protocol):
    """A data set where it lies."""

    @property
    def folder(self) -> Path:
        """Where it lies; its columns are stored there."""

    @property
    def schema(self) -> Schema:
        """What it tells of its users, items and events."""

    @property
    def key(self) -> object:
        """All that its columns depend on beside its files, as JSON can have it."""

    @property
    def has_times(self) -> bool:
        """Whether its events have times, by which they can be split."""

    @property
    def files(self) -> Sequence[SourceFile]:
        """What `read` reads, those of the files that are there."""

    def read(self) -> RawData:
        """Read all files, as they are.

        Raises:
            UserError: when a file is missing, damaged, or has rows that --bad_rows does not accept.
        """


def locate(config: DataConfig, seed: int) -> Source:
    """The configured data set, obtained first where a name was given and nothing lies there; the schema of
    own tables is written where they have none.

    Raises:
        UserError: when there is nothing to read, or it cannot be had.
    """
    if not is_own(config):
        return movielens.locate(config, seed)
    from recsuite.datasets.tables import source as tables

    _refuse_near_known(config.data_path)
    return tables.locate(config, DATA_ROOT)


def _refuse_near_known(path: str) -> None:
    """Refuse a file of a set of a known form, and a folder that has such a set in one of its own: read as
    tables of unknown columns, it would lack what the set says elsewhere.
    """
    from recsuite.datasets.tables.schema_file import schema_path

    # Whoever wrote a schema wants what it says.
    if "://" in path or schema_path(path).exists():
        return
    given = Path(path).absolute()
    with explained(f"--data_path {path} cannot be looked at"):
        near = [given.parent] if given.name in RATINGS_FILES else []
        near += sorted(given.iterdir()) if given.is_dir() else []
        known = next((each for each in near if each.is_dir() and movielens.is_known(each)), None)
    if known is not None:
        raise UserError(
            f"--data_path {path} is not the folder of the MovieLens set in {known}; give that folder, or "
            f"write a schema, ./run.sh schema {path}, to have it read as tables of your own."
        )


@dataclass(frozen=True)
class _Changed:
    """A data set with another schema than its files have, see `Source`."""

    source: Source
    schema: Schema
    why: str

    @property
    def folder(self) -> Path:
        """See `Source`."""
        return self.source.folder

    @property
    def key(self) -> object:
        """See `Source`."""
        return [self.source.key, self.why]

    @property
    def has_times(self) -> bool:
        """See `Source`."""
        return self.source.has_times

    @property
    def files(self) -> Sequence[SourceFile]:
        """See `Source`."""
        return self.source.files

    def read(self) -> RawData:
        """See `Source`."""
        return self.source.read()


def as_wanted(source: Source, tables: TablesConfig, data: DataConfig) -> Source:
    """A data set with the ids and the features that flags ask for."""
    ids, days = tables.ids, data.days
    # What asks for what the schema says anyway must not make a second copy of the columns.
    if ids != "schema" and source.schema != (changed := source.schema.with_ids(ids)):
        source = _Changed(source, changed, ids)
    # After the ids: of a day nobody asks for a row before the training has it, so it needs no dynamic table.
    return source if days == "none" else _Changed(source, with_user_day(source.schema), days)


def look(config: DataConfig, seed: int) -> tuple[Path, Source | None]:
    """The folder of the configured data set, and the set if its files lie there now; obtains nothing.

    Raises:
        UserError: when there is nothing to read, and no set to obtain was named.
    """
    if not is_own(config):
        return movielens.look(config, seed)
    from recsuite.datasets.tables import source as tables

    _refuse_near_known(config.data_path)
    found = tables.look(config, DATA_ROOT)
    return (Path(config.data_path), None) if found is None else (found.folder, found)


def is_own(config: DataConfig) -> bool:
    """Whether --data_path names tables of the user's own, and not files of a known form."""
    if config.dataset or not config.data_path:
        return False
    # Not the guessing of schemas: a rank that only trains would hold Arrow for it.
    from recsuite.datasets.tables.schema_file import schema_path

    # Whoever wrote one for files of a known form wants them read by it.
    return schema_path(config.data_path).exists() or not movielens.is_known(Path(config.data_path))


def read(source: Source, config: DataConfig, folder: Path | None = None) -> RawData:
    """Read all files of a set, with what --duplicates leaves of several events of one user and one item.

    folder: for files that are gone at the end; without one memory has all of them.

    Raises:
        UserError: see `Source.read`.
    """
    # Here, so that no family of data sets has to remember it.
    how = config.duplicates_of(source.schema.label_kind)
    raw = settle(source.read(), how, source.schema, folder)
    if config.days != "none" and source.has_times:
        add_user_days(raw, source.schema, folder)
    return raw
