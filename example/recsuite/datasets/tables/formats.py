"""The rows of a file, batch by batch, whatever its format: only the wanted columns, in bounded memory."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

from recsuite.datasets.tables.sources.batch import Batch, Source, check_names
from recsuite.datasets.tables.sources.delimited import Delimited
from recsuite.datasets.tables.sources.file import MISSING_PARTITION, File
from recsuite.datasets.tables.sources.json_lines import JsonLines
from recsuite.datasets.tables.sources.typed import Arrow, Parquet
from recsuite.errors import UserError, printable

if TYPE_CHECKING:
    import pyarrow

SOURCES: dict[str, type[Source]] = {
    "csv": Delimited,
    "tsv": Delimited,
    "jsonl": JsonLines,
    "parquet": Parquet,
    "arrow": Arrow,
}
# Batches that are read while one is looked at: enough for both cores, and few in memory.
AHEAD = 2
# Files of a table that are looked at to tell its columns: the first, the last and some between.
MOST_SAMPLED = 10
T = TypeVar("T")


@contextlib.contextmanager
def opened(file: File) -> Iterator[Source]:
    """A file to be read.

    Raises:
        UserError: for a file that cannot be read, is damaged, or is not what its name says.
    """
    source = SOURCES[file.format](file)
    try:
        yield source
    finally:
        source.close()


def names_of(source: Source) -> list[str]:
    """The columns of a file and of the folders that it lies in; the file's own come first."""
    partitions = [name for name, _ in source.file.partitions if name not in {*source.names}]
    check_names(source.file, partitions)
    return [*source.names, *partitions]


def batches(source: Source, columns: Sequence[str], optional: Collection[str] = ()) -> Iterator[Batch]:
    """The rows of a file, with these columns, in this order; those of partitions are the same in each row.

    optional: columns that are null where the file does not have them, which is noted.

    Raises:
        UserError: for another column that is missing, and a damaged file.
    """
    known = {*names_of(source)}
    missing = [column for column in columns if column not in known]
    needed = [column for column in missing if column not in optional]
    if needed:
        has = printable(", ".join(names_of(source)[:20]))
        raise UserError(f"{source.file} has no column {needed[0]!r}; it has {has}.")
    source.notes += [f"{source.file} has no column {column}: it is missing in its rows" for column in missing]
    of_file = {*source.names}
    own = [column for column in columns if column in of_file]
    # Of a file without one of the columns, the rows are still to be counted.
    for batch in source.batches(own or source.names[:1]):
        yield Batch(_completed(batch.columns, source, columns), batch.first, batch.num_bad, batch.lines)


def ahead(items: Iterator[T]) -> Iterator[T]:
    """The same, made by a thread of its own while they are looked at; its failures are raised here."""
    made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(AHEAD)
    ended = threading.Event()

    def offer(item: T | None, error: BaseException | None = None) -> None:
        while not ended.is_set():
            with contextlib.suppress(queue.Full):
                made.put((item, error), timeout=0.1)
                return

    def run() -> None:
        try:
            for item in items:
                offer(item)
                if ended.is_set():
                    return
            offer(None)
        except BaseException as error:
            offer(None, error)

    thread = threading.Thread(target=run, name="reading", daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        ended.set()
        thread.join()


def names_in(files: Sequence[File]) -> list[str]:
    """The columns of up to `MOST_SAMPLED` files of a table, in the order in which they appear. Reads no rows.

    Raises:
        UserError: for a file that cannot be read, or names a column twice.
    """
    names: dict[str, None] = {}
    for file in _sampled(files):
        with opened(file) as source:
            names.update(dict.fromkeys(names_of(source)))
    return [*names]


def _sampled(files: Sequence[File]) -> list[File]:
    """The files that tell what a table holds: the first, the last and some between."""
    places = {len(files) * number // MOST_SAMPLED for number in range(MOST_SAMPLED)} | {len(files) - 1}
    return [files[place] for place in sorted(places)]


def first_rows(files: Sequence[File], rows: int) -> pyarrow.Table:
    """First rows of up to `MOST_SAMPLED` files of a table, as many of each as there are, `rows` together.

    All columns of these files are there; a value is null where its file has no such column. A column of
    several types holds texts.

    Raises:
        UserError: for a file that cannot be read.
    """
    import pyarrow

    found = [_first_rows_of(file, rows) for file in _sampled(files)]
    left = rows
    # What small files do not fill is left to the large ones.
    order = sorted(range(len(found)), key=lambda place: found[place].num_rows)
    for number, place in enumerate(order):
        found[place] = found[place].slice(0, -(-left // (len(found) - number)))
        left -= found[place].num_rows
    filled = [table for table in found if table.num_rows] or found[:1]
    try:
        return pyarrow.concat_tables(filled, promote_options="permissive")
    except pyarrow.ArrowException:
        return pyarrow.concat_tables([_as_texts(table) for table in filled], promote_options="permissive")


def _first_rows_of(file: File, rows: int) -> pyarrow.Table:
    import pyarrow

    with opened(file) as source:
        names, found, left = names_of(source), [], rows
        for batch in batches(source, names):
            found.append(_without_codes(batch.columns).slice(0, left))
            left -= found[-1].num_rows
            if left <= 0:
                break
    if not found:
        return pyarrow.table({name: pyarrow.array([], pyarrow.string()) for name in names})
    if all(batch.schema.equals(found[0].schema) for batch in found):
        return pyarrow.Table.from_batches(found).combine_chunks()
    tables = [pyarrow.Table.from_batches([batch]) for batch in found]
    return pyarrow.concat_tables(tables, promote_options="permissive").combine_chunks()


def _as_texts(table: pyarrow.Table) -> pyarrow.Table:
    import pyarrow
    from pyarrow import types

    columns = [
        column if types.is_nested(column.type) else column.cast(pyarrow.string()) for column in table.columns
    ]
    return pyarrow.table(columns, names=table.column_names)


def _without_codes(batch: pyarrow.RecordBatch) -> pyarrow.RecordBatch:
    """Rows as they are meant: that a file has codes for its values is no matter of theirs."""
    import pyarrow
    from pyarrow import types

    if not any(types.is_dictionary(field.type) for field in batch.schema):
        return batch
    columns = [
        column.dictionary_decode() if types.is_dictionary(column.type) else column for column in batch.columns
    ]
    return pyarrow.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _completed(batch: pyarrow.RecordBatch, source: Source, columns: Sequence[str]) -> pyarrow.RecordBatch:
    """A batch with all columns: those of partitions, and nulls for those that the file does not have."""
    import pyarrow

    if batch.schema.names == list(columns):
        return batch
    values, places = dict(source.file.partitions), {name: k for k, name in enumerate(batch.schema.names)}
    # By place: by name each of thousands of columns would be looked for among all.
    arrays = [
        batch.column(places[column])
        if column in places
        else pyarrow.repeat(pyarrow.scalar(_partition(values.get(column)), pyarrow.string()), batch.num_rows)
        for column in columns
    ]
    return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns))


def _partition(value: str | None) -> str | None:
    return None if value == MISSING_PARTITION else value
