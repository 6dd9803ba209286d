"""Folders of partitions: those that are there, those that a rank reads, and the schemas of their files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet, types

from recsuite.datasets.schema import USER
from recsuite.datasets.tables.files import File, Tables
from recsuite.datasets.tables.formats import explained_damage
from recsuite.datasets.tables.sections import TableSchema
from recsuite.datasets.tables.values import ID, ColumnSpec, typed
from recsuite.errors import UserError, counted, printable
from recsuite.extras.partitions.exchange import PartitionExchange
from recsuite.places import is_remote, open_raw

# Name of a partition's folder, before its number.
PART = "part"
# Table of users of a rank whose partitions have none.
NO_USERS = "no_users.parquet"
# Missing partitions that a message names.
MOST_NAMED = 5


def number_of(name: str) -> int | None:
    """Return the number of the partition of a file by its path; None for a file of no partition."""
    values = [part.partition("=")[2] for part in name.split("/") if part.startswith(f"{PART}=")]
    return int(values[0]) if values and values[0].isdecimal() else None


def tables_of_rank(tables: Tables, number: int, rank: int, size: int, own_folder: Path) -> Tables:
    """Return the tables with the partitions of a rank alone. number: of all partitions.

    own_folder: gets an empty table of users if no partition of the rank has some.

    Raises:
        UserError: when partitions are missing, doubled or too many, or the rank has no file.
    """
    known, folders = _folders_of(tables, tables.events, "events")
    _check_number(number, known, folders)
    if any(number_of(tables.name_of(file)) is not None for file in tables.users):
        for partition, name in _folders_of(tables, tables.users, "users")[1].items():
            if partition >= number:
                raise UserError(
                    f"The partition {name} of users is none of the events, which are 0 to {number - 1}; "
                    "remove it, or write the partitions of users anew."
                )

    def own(files: Iterable[File]) -> tuple[File, ...]:
        numbers = ((file, number_of(tables.name_of(file))) for file in files)
        return tuple(file for file, number in numbers if number is None or number in mine)

    mine = range(rank, number, size)
    of_rank = dataclasses.replace(tables, events=own(tables.events), users=own(tables.users))
    if not of_rank.events:
        raise UserError(
            f"Rank {rank} has no events: its {counted(len(mine), 'partition')} of {number} "
            f"({', '.join(map(str, mine[:MOST_NAMED]))}) are empty; start fewer processes."
        )
    if tables.users and not of_rank.users:
        path = own_folder / NO_USERS
        parquet.write_table(_read_schema(tables.users[0]).empty_table(), path)
        none = File(str(path), "parquet", size=path.stat().st_size)
        of_rank = dataclasses.replace(of_rank, users=(none,))
    return of_rank


def _folders_of(tables: Tables, files: Iterable[File], role: str) -> tuple[str, dict[int, str]]:
    """Return the folder with the partitions of a role, and the name of each there by its number."""
    folders: dict[int, str] = {}
    root, names = tables.root.rstrip("/"), [tables.name_of(file) for file in files]
    for file, name in zip(files, names, strict=True):
        partition = number_of(name)
        if partition is None or file.format != "parquet":
            raise UserError(
                f"--partitions requires Parquet files in folders {role}/{PART}=0 and so on, and {name} is "
                f"none; move it, or name the folder of the {role} under [files] of schema.toml."
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
    return parent or root, folders


def _check_number(number: int, parent: str, folders: Mapping[int, str]) -> None:
    """Refuse partitions that are missing or too many. folders: name of each by its number."""
    known = f"{parent} has {counted(len(folders), 'partition')}"
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
    return tuple(sorted((field.name, str(_plain(field.type))) for field in _read_schema(file)))


def _read_schema(file: File) -> pyarrow.Schema:
    with explained_damage(file):
        return parquet.read_schema(pyarrow.PythonFile(open_raw(file.path), "r"))


def ids_of_users(tables: Tables, schema: TableSchema) -> dict[int, list[Any]]:
    """Return the ids of the rows of users, by the number of their partition. Empty without partitions."""
    wanted = typed(ColumnSpec(schema.user.own_column, ID, USER), schema)
    ids: dict[int, list[Any]] = {}
    for file in tables.users:
        if (partition := number_of(tables.name_of(file))) is not None:
            with explained_damage(file):
                opened = parquet.ParquetFile(pyarrow.PythonFile(open_raw(file.path), "r"))
                columns = [batch.column(0) for batch in opened.iter_batches(columns=[wanted.column])]
            for column in columns:
                values = wanted.parse(column).values.drop_null()
                plain = values.dictionary_decode() if types.is_dictionary(values.type) else values
                ids.setdefault(partition, []).append(plain.to_numpy(zero_copy_only=False))
    return ids


def _plain(kind: pyarrow.DataType) -> pyarrow.DataType:
    # Codes of texts are texts.
    return kind.value_type if types.is_dictionary(kind) else kind
