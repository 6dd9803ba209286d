"""A schema.toml that is written beside tables which have none, and the table of it that a person is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from recsuite.datasets.tables.description.overview import describe
from recsuite.datasets.tables.description.writer import write_schema
from recsuite.datasets.tables.files import Tables, find_tables, sample
from recsuite.datasets.tables.guessing.features import LeftOut
from recsuite.datasets.tables.guessing.folder import files_of
from recsuite.datasets.tables.guessing.guess import guess
from recsuite.datasets.tables.schema_file import Files, LabelColumn, TableSchema, schema_path
from recsuite.datasets.tables.sources.remote import is_remote
from recsuite.errors import UserError, printable
from recsuite.runtime.console import say

# Enough for what is rare in a column, and read in a moment.
SAMPLED_ROWS = 10_000
# So many of the columns that could be the label are named.
MOST_LABELS = 5


@dataclass(frozen=True)
class Proposal:
    """A schema that was guessed and written: where, the columns that were left out, the table to show, the
    files that are neither events, users nor items, and what else could be the label.
    """

    path: Path
    schema: TableSchema
    left_out: list[LeftOut]
    overview: str
    unused: tuple[str, ...] = ()
    other_labels: tuple[LabelColumn, ...] = ()
    notes: tuple[str, ...] = ()

    def show(self) -> None:
        """Print the table, what was left out and why, and where all of it can be corrected."""
        say(self.overview, tagged=False)
        for note in self.notes:
            say(note)
        if self.other_labels:
            say(_of_labels(self.other_labels))
        for omission in self.left_out:
            say(str(omission))
        for name in self.unused:
            say(f"the file {name} is left out: it is neither the events nor a table of users or items")
        say(f"wrote {printable(self.path)} from the first rows; correct there what is wrong")


def _of_labels(labels: Sequence[LabelColumn]) -> str:
    shown = [f"{printable(label.column[:40])} ({label.kind})" for label in labels[:MOST_LABELS]]
    them = "it" if len(shown) == 1 else "one"
    return f"{' and '.join(shown)} could be the label too; name {them} in [label]"


def propose(path: str | Path) -> Proposal:
    """Guess the schema of the tables of a folder, a file or a URL, and write it where `schema_path` says.

    Raises:
        UserError: when there is a schema already, there are no tables, one cannot be read, or it does not say
            who its users and items are.
    """
    written = schema_path(path)
    if written.exists():
        raise UserError(
            f"{printable(written)} is there already, perhaps with corrections; remove it to have "
            "another one guessed."
        )
    tables = find_tables(path)
    files, notes = _files(path, tables)
    chosen = find_tables(path, files)
    samples = sample(chosen, SAMPLED_ROWS)
    schema, left_out, other_labels = guess(samples)
    schema = dataclasses.replace(schema, files=files)
    write_schema(schema, written, left_out)
    read = {file.name for file in chosen.files}
    unused = [name for name in (*tables.ignored, *(file.name for file in tables.files)) if name not in read]
    return Proposal(
        written, schema, left_out, describe(schema, samples), tuple(unused), other_labels, tuple(notes)
    )


def _files(path: str | Path, tables: Tables) -> tuple[Files, list[str]]:
    """The section that finds what the path stands for, from the folder of the schema."""
    if is_remote(str(path)):
        return Files(events=str(path)), []
    # What is in a folder is found again, and so is what comes into it later.
    return files_of(tables) if Path(path).is_dir() else (Files(events=Path(path).name), [])
