"""A user's own tables as a data set: find them, read or guess their schema.toml, and read them."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from typing_extensions import Self

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import ITEM, RawData, Schema
from recsuite.datasets.tables.files import File, Tables, find_tables, schema_path
from recsuite.datasets.tables.schema_file import IncompleteSchemaError, read_schema
from recsuite.datasets.tables.sections import CATEGORY, EVENTS, ITEMS, FeatureColumn, TableSchema
from recsuite.datasets.tables.validation import validate
from recsuite.errors import UserError, printable
from recsuite.files import explained, locked, replace_file
from recsuite.hooks import extra
from recsuite.places import is_remote

if TYPE_CHECKING:
    import pandas

# Guessing a schema takes seconds; a longer wait means that a process hangs.
SCHEMA_DEADLINE = 300.0


@dataclass(frozen=True)
class TableFile:
    """Source file of columns. name: its path relative to the folder of the tables."""

    file: File
    name: str

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.file.size

    def open(self) -> IO[bytes]:
        """Open the file for reading: its size does not show that it is readable."""
        return Path(self.file.path).open("rb")

    def digest(self) -> str:
        """Return a text that changes with its content.

        Raises:
            UserError: when it cannot be read.
        """
        # A copy: a `File` caches its digest, and later changes would not be seen.
        return dataclasses.replace(self.file).digest


@dataclass(frozen=True)
class TableSource:
    """Data set of tables of events, and optionally of users and items.

    folder: of its columns. table_schema: of its tables. schema: of the resulting data set.
    """

    folder: Path
    tables: Tables
    table_schema: TableSchema
    config: DataConfig
    schema: Schema

    @property
    def key(self) -> list[dict[str, Any]]:
        """Everything its columns depend on besides its files, for JSON."""
        # All of schema.toml: it decides what is read of the same files.
        return [dataclasses.asdict(self.table_schema), dataclasses.asdict(self.schema)]

    @property
    def has_times(self) -> bool:
        """True if its events have times."""
        return self.table_schema.timestamp is not None

    @property
    def has_order(self) -> bool:
        """True if its events are in an order, by which they can be split."""
        return self.has_times or self.config.order == "rows"

    @property
    def files(self) -> list[TableFile]:
        """Files that `read` reads."""
        return [TableFile(file, self.tables.name_of(file)) for file in self.tables.files]

    def with_item_columns(self, columns: Sequence[str]) -> Self:
        """Return the tables with further columns of items in `RawData.items`, which are no features.

        Raises:
            UserError: when neither the table of items nor that of events has one of them.
        """
        from recsuite.datasets.tables.formats import columns_of

        features, by_role = dict(self.table_schema.features), columns_of(self.tables)
        known = {*by_role.get(ITEMS, ()), *by_role[EVENTS]}
        taken = {self.schema.title, self.schema.column_of(ITEM)}
        taken |= {each.column for each in features.values() if each.of == ITEM}
        for column in columns:
            if column not in known | taken:
                has = printable(", ".join(by_role.get(ITEMS, by_role[EVENTS])))
                raise UserError(f"The table of items has no column {printable(column)}; it has {has}.")
            if column not in taken:
                # A name that no feature has: it is that of a column.
                features[f"column {column}"] = FeatureColumn(ITEM, column, CATEGORY)
        return replace(self, table_schema=replace(self.table_schema, features=features))

    def state_of_items(self) -> tuple[tuple[str, int, int], ...]:
        """Return size and time of change of each file of the table of items, of those that are not remote.

        Raises:
            UserError: when one is gone.
        """
        states = []
        for file in self.tables.items:
            if not is_remote(file.path):
                with explained(f"Cannot read {file.name}", "put it back"):
                    about = Path(file.path).stat()
                states.append((file.path, about.st_size, about.st_mtime_ns))
        return tuple(states)

    def read_items(self) -> pandas.DataFrame:
        """Read the table of items as it is now; return the columns of `RawData.items` that it has.

        Raises:
            UserError: when a file is missing, damaged, or has rows that --bad_rows does not accept.
        """
        from recsuite.datasets.tables.reading import read_items

        return read_items(self.tables, self.table_schema, self.config)

    def read(self, parts_folder: Path | None = None) -> RawData:
        """Read all files. parts_folder: see `reading.read_tables`.

        Raises:
            UserError: when a file is missing, damaged, or has rows that --bad_rows does not accept.
        """
        # Imported here: a rank with existing columns does not need Arrow in memory.
        from recsuite.datasets.tables.reading import read_tables

        return read_tables(self.tables, self.table_schema, self.config, parts_folder)


def locate(config: DataConfig, root: Path) -> TableSource:
    """Return the tables of --data_path. Missing sections of their schema.toml are guessed, written and shown.

    root: folder for the columns of tables on a server.

    Raises:
        UserError: when there are none, when they cannot be read, or when the schema does not fit them.
    """
    path, written = config.data_path, schema_path(config.data_path)
    # Before writing a file there: the folder may hold no tables.
    if not written.exists():
        find_tables(path)
    ensure_schema(written, lambda: contextlib.nullcontext(path))
    # Imported here: a rank with existing columns does not need Arrow in memory.
    from recsuite.datasets.tables.formats import columns_of

    source = look(config, root)
    assert source is not None
    validate(source.table_schema, columns_of(source.tables), written)
    return source


def ensure_schema(written: Path, tables: Callable[[], contextlib.AbstractContextManager[str | Path]]) -> None:
    """Guess, write and show missing sections of a schema.toml. tables: opens the tables, to guess from.

    Raises:
        UserError: when they do not tell it, or it cannot be written.
    """
    if _is_complete(written):
        return
    lock = written.with_name(f".{written.name}.lock")
    with explained(f"Cannot write {printable(written)}"):
        written.parent.mkdir(parents=True, exist_ok=True)
        # Several launches may start at once.
        with locked(lock, f"writing {written}", SCHEMA_DEADLINE):
            try:
                if not _is_complete(written):
                    with tables() as path:
                        proposal = extra("guess").propose(path)
                        if proposal.path != written:
                            replace_file(written, proposal.path.read_bytes())
                        dataclasses.replace(proposal, path=written).show()
            finally:
                # Only the schema stays beside the tables. A process that takes a new lock meanwhile
                # writes the same schema, in one rename.
                lock.unlink(missing_ok=True)


def _is_complete(path: Path) -> bool:
    """True if there is a schema with all required sections and keys."""
    try:
        return path.exists() and read_schema(path) is not None
    except IncompleteSchemaError:
        return False


def look(config: DataConfig, root: Path) -> TableSource | None:
    """Return the tables of --data_path if they have a complete schema.toml, else None. Writes no files.

    Raises:
        UserError: see `locate`.
    """
    path, written = config.data_path, schema_path(config.data_path)
    if not _is_complete(written):
        find_tables(path)
        return None
    schema = read_schema(written)
    if not is_remote(path) and Path(path).is_file() and schema.files.events != Path(path).name:
        raise UserError(
            f"{printable(written)} is of the events in {printable(schema.files.events) or 'its folder'}, not "
            f"of {printable(path)}. Fix: give --data_path {printable(written.parent)}, or move one of them "
            "into a folder of its own."
        )
    folder = Path(path).absolute()
    if is_remote(path):
        folder = root / "remote" / hashlib.sha256(path.encode()).hexdigest()[:12]
        with explained(f"Cannot make {folder}"):
            folder.mkdir(parents=True, exist_ok=True)
    elif folder.is_file():
        folder = folder.parent
    return TableSource(folder, find_tables(path, schema.files), schema, config, schema.schema())
