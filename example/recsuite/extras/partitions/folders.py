"""Folders of partitions: those that are there, those that a rank reads, and the schemas of their files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping

import pyarrow
from pyarrow import parquet, types

from recsuite.datasets.tables.files import File, Tables
from recsuite.datasets.tables.formats import explained_damage
from recsuite.errors import UserError, counted, printable
from recsuite.extras.partitions.exchange import PartitionExchange
from recsuite.places import is_remote, open_raw

# Name of a partition's folder, before its number.
PART = "part"
# Missing partitions that a message names.
MOST_NAMED = 5


def number_of(name: str) -> int | None:
    """Return the number of the partition of a file by its path; None for a file of no partition."""
    values = [part.partition("=")[2] for part in name.split("/") if part.startswith(f"{PART}=")]
    return int(values[0]) if values and values[0].isdecimal() else None


def tables_of_rank(tables: Tables, number: int, rank: int, size: int) -> Tables:
    """Return the tables with the partitions of a rank alone. number: of all partitions.

    Raises:
        UserError: when partitions are missing, doubled or too many, or the rank has no file.
    """
    _check_folders(tables, number)

    def own(files: Iterable[File]) -> tuple[File, ...]:
        numbers = ((file, number_of(tables.name_of(file))) for file in files)
        return tuple(file for file, number in numbers if number is None or number in mine)

    mine = range(rank, number, size)
    for file in tables.users:
        if (number_of(tables.name_of(file)) or 0) >= number:
            raise UserError(
                f"{tables.name_of(file)} is of no partition of the events, which are 0 to {number - 1}; "
                "remove it, or write the partitions of users anew."
            )
    of_rank = dataclasses.replace(tables, events=own(tables.events), users=own(tables.users))
    if not of_rank.events:
        raise UserError(
            f"Rank {rank} has no events: its {counted(len(mine), 'partition')} of {number} "
            f"({', '.join(map(str, mine[:MOST_NAMED]))}) are empty; start fewer processes."
        )
    return of_rank


def _check_folders(tables: Tables, number: int) -> None:
    folders: dict[int, str] = {}
    root, names = tables.root.rstrip("/"), [tables.name_of(file) for file in tables.events]
    for file, name in zip(tables.events, names, strict=True):
        partition = number_of(name)
        if partition is None or file.format != "parquet":
            raise UserError(
                f"--partitions requires Parquet files in folders events/{PART}=0 and so on, and {name} is "
                "none; move it, or name the folder of the events under [files] of schema.toml."
            )
    parents = {name[: name.index(f"{PART}=")] for name in names}
    if len(parents) > 1:
        raise UserError(
            f"--partitions requires all partitions in one folder, and {' and '.join(sorted(parents))} have "
            "some; name one of them under [files] of schema.toml."
        )
    parent = parents.pop()
    # A folder without files is an empty partition; an object store has no such folders.
    if not is_remote(root):
        names += [f"{parent}{entry}/" for entry in sorted(os.listdir(os.path.join(root, parent)))]
    for name in names:
        partition, folder = number_of(name), name[len(parent) :].partition("/")[0]
        if partition is not None and folders.setdefault(partition, folder) != folder:
            raise UserError(
                f"Partition {partition} is there twice, in {parent}{folders[partition]} and "
                f"{parent}{folder}; remove one of them."
            )
    known = f"{parent or root} has {counted(len(folders), 'partition')}"
    missing = [partition for partition in range(number) if partition not in folders]
    if not missing and len(folders) > number:
        last = folders[max(folders)]
        raise UserError(
            f"--partitions must be the number of partitions, got {number}, and {known}, the last {last}."
        )
    if not missing:
        return
    shown = f"{', '.join(map(str, missing[:MOST_NAMED]))}{', ...' * (len(missing) > MOST_NAMED)}"
    raise UserError(
        f"--partitions {number} requires the partitions 0 to {number - 1}, and {shown} is missing: {known}. "
        "An empty partition requires its folder. Fix: write all partitions, or give their number."
    )


def check_schemas(tables: Tables, exchange: PartitionExchange) -> None:
    """Refuse files of a role with other columns, or other types, than the files of another partition.

    Collective: every rank.

    Raises:
        UserError: names a file and a column.
    """
    for files in (tables.events, tables.users):
        # By schema its first file here.
        mine: dict[tuple[tuple[str, str], ...], str] = {}
        for file in files:
            if file.format == "parquet":
                mine.setdefault(_schema_of(file), tables.name_of(file))
        first: dict[tuple[tuple[str, str], ...], str] = {}
        for others in exchange.gathered(mine):
            for schema, name in others.items():
                first.setdefault(schema, name)
        if len(first) > 1:
            _refuse(first)


def _refuse(first: Mapping[tuple[tuple[str, str], ...], str]) -> None:
    """Raise the error of files with several schemas. first: a file of each."""
    (ours, name), (theirs, other), *_ = sorted(first.items(), key=lambda entry: entry[1])
    types_of, types_there = dict(ours), dict(theirs)
    column = min({column for column, _ in {*ours} ^ {*theirs}})
    here, there = types_of.get(column, "missing"), types_there.get(column, "missing")
    raise UserError(
        f"The column {printable(column)} is {there} in {other} and {here} in {name}; write all partitions "
        "with one schema."
    )


def _schema_of(file: File) -> tuple[tuple[str, str], ...]:
    """Return the columns of a file with their types, sorted."""
    with explained_damage(file):
        schema = parquet.read_schema(pyarrow.PythonFile(open_raw(file.path), "r"))
    return tuple(sorted((field.name, str(_plain(field.type))) for field in schema))


def _plain(kind: pyarrow.DataType) -> pyarrow.DataType:
    # Codes of texts are texts.
    return kind.value_type if types.is_dictionary(kind) else kind
