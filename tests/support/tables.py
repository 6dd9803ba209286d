"""Small tables of events in every format that is read."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.csv
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet

from recsuite.datasets.tables.files import File, find_tables
from recsuite.datasets.tables.formats import BadRow, ahead, batches, names_of, opened
from recsuite.datasets.tables.sections import Files

# The end of a name, by which a file is read.
ENDS = ("csv", "csv.gz", "csv.zst", "tsv", "jsonl", "jsonl.gz", "parquet", "arrow", "stream.arrow")


def encoded(table: pyarrow.Table, end: str) -> bytes:
    """A table as the content of a file whose name has this end; text formats have lists with bars."""
    if end.endswith(".gz"):
        return gzip.compress(encoded(table, end.removesuffix(".gz")), mtime=0)
    if end.endswith(".zst"):
        return bytes(pyarrow.compress(encoded(table, end.removesuffix(".zst")), "zstd", asbytes=True))
    if end == "jsonl":
        return "".join(json.dumps(row, default=str) + "\n" for row in table.to_pylist()).encode()
    sink = pyarrow.BufferOutputStream()
    if end in ("csv", "tsv"):
        delimiter = "," if end == "csv" else "\t"
        pyarrow.csv.write_csv(_flat(table), sink, pyarrow.csv.WriteOptions(delimiter=delimiter))
    elif end == "parquet":
        pyarrow.parquet.write_table(table, sink)
    elif end == "arrow":
        pyarrow.feather.write_feather(table, sink)
    else:
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return bytes(sink.getvalue())


def write(path: Path, table: pyarrow.Table | dict[str, Any]) -> Path:
    """Write a table in the format of the path's name, with the folders around it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table if isinstance(table, pyarrow.Table) else pyarrow.table(table)
    path.write_bytes(encoded(table, path.name.partition(".")[2]))
    return path


def _flat(table: pyarrow.Table) -> pyarrow.Table:
    """A table whose lists are texts."""
    columns = {
        name: pyarrow.array([None if row is None else "|".join(map(str, row)) for row in column.to_pylist()])
        if pyarrow.types.is_list(column.type)
        else column
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    return pyarrow.table(columns)


def file_of(path: Path, content: bytes, **files: Any) -> File:
    path.write_bytes(content)
    return find_tables(path, Files(**files)).events[0]


def rows_of(file: File) -> tuple[list[dict[str, Any]], list[int], list[BadRow]]:
    """The rows, the number that each has in the file, and the bad rows."""
    with ThreadPoolExecutor(1) as pool, opened(file) as source:
        rows, numbers = [], []
        for batch in ahead(batches(source, names_of(source)), pool):
            rows += batch.columns.to_pylist()
            numbers += [source.number_of(batch, place) for place in range(batch.columns.num_rows)]
        return rows, numbers, source.bad
