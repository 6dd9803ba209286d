"""First rows of the files of a table, and the columns of files without a line of names."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

import pyarrow
from pyarrow import types

from recsuite.datasets.tables.derived import SECONDS_PER_DAY
from recsuite.datasets.tables.files import File
from recsuite.datasets.tables.formats import (
    Delimited,
    NoHeaderError,
    batches,
    has_times,
    names_of,
    opened,
    sampled,
    text_of,
    without_times,
)
from recsuite.datasets.tables.headers import are_alike
from recsuite.datasets.tables.values import near
from recsuite.errors import UserError


def headed(files: tuple[File, ...]) -> tuple[File, ...]:
    """Return the files of a table; those without a line of names have the columns of the others.

    Only one header has as many columns, of the same kinds. Files are examined as in `names_in`.
    """
    if len(files) < 2 or not files[0].is_text or files[0].columns:
        return files
    headers: dict[tuple[str, ...], list[str]] = {}
    without: dict[File, Sequence[str]] = {}
    for file in sampled(files):
        # Reading the rows of a damaged one refuses it.
        with contextlib.suppress(UserError):
            try:
                with opened(file) as source:
                    if isinstance(source, Delimited):
                        headers[tuple(source.names)] = source.first_row
            except NoHeaderError as error:
                without[file] = error.row
    with_columns = {}
    for file, row in without.items():
        fitting = [names for names, first in headers.items() if are_alike(row, first)]
        with_columns[file] = replace(file, columns=fitting[0]) if len(fitting) == 1 else file
    return tuple(with_columns.get(file, file) for file in files)


def first_rows(files: Sequence[File], rows: int) -> pyarrow.Table:
    """Return the first rows of up to `MOST_SAMPLED` files of a table, evenly from each, `rows` in total.

    The result has all columns of these files; a value is null if its file lacks the column. A column of
    several types becomes texts.

    Raises:
        UserError: for a file that cannot be read.
    """
    samples = [_first_rows_of(file, rows) for file in sampled(files)]
    left = rows
    # Rows that small files lack are taken from large ones.
    order = sorted(range(len(samples)), key=lambda place: samples[place].num_rows)
    for number, place in enumerate(order):
        samples[place] = samples[place].slice(0, -(-left // (len(samples) - number)))
        left -= samples[place].num_rows
    return _together([table for table in samples if table.num_rows] or samples[:1])


def _first_rows_of(file: File, rows: int) -> pyarrow.Table:
    with opened(file) as source:
        names, parts, left = names_of(source), [], rows
        for batch in batches(source, names):
            parts.append(_for_python(batch.columns.slice(0, left)))
            left -= parts[-1].num_rows
            if left <= 0:
                break
        kinds = dict(source.types)
    if not parts:
        return pyarrow.table({name: pyarrow.array([], pyarrow.string()) for name in names})
    table = _together([pyarrow.Table.from_batches([batch]) for batch in parts]).combine_chunks()
    return table.replace_schema_metadata(kinds)


def _together(tables: list[pyarrow.Table]) -> pyarrow.Table:
    """Return the rows of all tables; a column of several types becomes texts."""
    try:
        return pyarrow.concat_tables(tables, promote_options="permissive")
    except pyarrow.ArrowException:
        kinds = {(field.name, field.type) for table in tables for field in table.schema}
        # Missing values have no type.
        names = Counter(name for name, kind in kinds if not types.is_null(kind))
        mixed = {name for name, number in names.items() if number > 1}
        return pyarrow.concat_tables([_as_texts(table, mixed) for table in tables], promote_options="default")


def _as_texts(table: pyarrow.Table, names: Collection[str]) -> pyarrow.Table:
    columns = [
        column
        if name not in names
        else pyarrow.array([None if v is None else text_of(v) for v in column.to_pylist()], "string")
        if types.is_nested(column.type)
        else column.cast(pyarrow.string())
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return pyarrow.table(columns, names=table.column_names)


def _for_python(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Return the rows without codes, and without times of which Python has no value."""
    columns = []
    for column in batch.columns:
        column = column.dictionary_decode() if types.is_dictionary(column.type) else column
        if types.is_nested(column.type) and has_times(column.type):
            column = column.cast(without_times(column.type))
        # A zone moves a time by less than a day.
        columns.append(near(column, SECONDS_PER_DAY))
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)
