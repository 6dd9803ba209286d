"""Schema.toml of tables that have none, or an incomplete one: guessed, written, and shown as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recsuite.datasets.tables.description.faults import nearest, place_of
from recsuite.datasets.tables.description.overview import describe
from recsuite.datasets.tables.description.reader import IncompleteSchemaError, given_in, parse_schema
from recsuite.datasets.tables.description.validator import validate
from recsuite.datasets.tables.description.writer import completed, text_of
from recsuite.datasets.tables.files import EVENTS, File, Tables, find_tables, sample
from recsuite.datasets.tables.guessing.features import LeftOut
from recsuite.datasets.tables.guessing.folder import files_of
from recsuite.datasets.tables.guessing.guess import guess
from recsuite.datasets.tables.schema_file import Files, TableSchema, schema_path
from recsuite.datasets.tables.sources.remote import is_remote
from recsuite.errors import UserError, printable
from recsuite.files import explained, replace_file
from recsuite.runtime.console import say

# Enough for what is rare in a column, and read in a moment.
SAMPLED_ROWS = 10_000


@dataclass(frozen=True)
class Proposal:
    """A schema that was guessed and written: where, the columns that are left out, the table to show,
    sentences on what is unusual, and the files that are neither events, users nor items.
    """

    path: Path
    schema: TableSchema
    left_out: list[LeftOut]
    overview: str
    notes: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    is_completed: bool = False

    def show(self) -> None:
        """Print the table, what is unusual, and where all of it can be corrected."""
        say(self.overview, tagged=False)
        for note in self.notes:
            say(note)
        for name in self.unused:
            say(f"the file {printable(name)} is left out: it holds neither events, users nor items")
        done, rest = ("completed", "; your lines stay") if self.is_completed else ("wrote", "")
        say(f"{done} {printable(self.path)} from the first rows{rest}; correct there what is wrong")


def propose(path: str | Path) -> Proposal:
    """Guess the schema of the tables of a folder, a file or a URL, and write it where `schema_path` says. One
    that is there and lacks sections is completed: its own lines stay, and count.

    Raises:
        UserError: when there is a whole schema already, there are no tables, one cannot be read, or no name
            says which columns have the users and the items.
    """
    written, text = schema_path(path), ""
    given: dict[str, Any] = {}
    if written.exists():
        text, given = given_in(written)
        with suppress(IncompleteSchemaError):
            parse_schema(text, written)
            raise UserError(
                f"{printable(written)} is there already, perhaps with corrections; remove it to have "
                "another one guessed."
            )
    tables = find_tables(path, Files(**given.get("files", {})))
    others: list[File] = []
    if given.get("files", {}).get("events") and Path(path).is_dir():
        # Users and items may lie beside them.
        named = {file.path for file in tables.files}
        with suppress(UserError):
            others = [file for file in find_tables(path).files if file.path not in named]
    files, notes = _files(path, tables, bool({"user", "item"} & given.keys()), others)
    files = replace(files, **given.get("files", {}))
    chosen = find_tables(path, files)
    samples = sample(chosen, SAMPLED_ROWS)
    _check_given(given, samples[EVENTS].column_names, written)
    schema, left_out, of_columns = guess(samples, given)
    schema = replace(schema, files=files)
    is_begun = bool(text.strip())
    text = completed(text, given, schema, left_out) if is_begun else text_of(schema, left_out)
    # What is written is what its reader makes of it, and fits the files.
    schema = parse_schema(text, written)
    validate(schema, {role: table.column_names for role, table in samples.items()}, written)
    with explained(f"{printable(written)} cannot be written"):
        written.parent.mkdir(parents=True, exist_ok=True)
        replace_file(written, text.encode())
    read = {file.name for file in chosen.files}
    unused = [name for name in (*tables.ignored, *(file.name for file in tables.files)) if name not in read]
    overview = describe(schema, samples, left_out)
    return Proposal(written, schema, left_out, overview, (*notes, *of_columns), tuple(unused), is_begun)


def _check_given(given: Mapping[str, Mapping[str, Any]], columns: Sequence[str], path: Path) -> None:
    """Refuse a column that was written by hand and is not there: nothing can be guessed around it."""
    for name in ("user", "item", "label", "weight", "timestamp"):
        column = given.get(name, {}).get("column", "")
        if column and column not in columns:
            where = f"is not a column of the events; {nearest(column, columns)}"
            raise place_of(path).at(name).wrong("column", column, where)


def _files(
    path: str | Path, tables: Tables, is_named: bool, others: Sequence[File]
) -> tuple[Files, list[str]]:
    """The section that finds what the path stands for, from the folder of the schema."""
    if is_remote(str(path)):
        return Files(events=str(path)), []
    # What is in a folder is found again, and so is what comes into it later.
    return files_of(tables, is_named, others) if Path(path).is_dir() else (Files(events=Path(path).name), [])
