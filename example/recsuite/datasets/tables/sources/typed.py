"""Parquet and Arrow: files whose columns have types."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from recsuite.datasets.tables.sources.batch import Batch, Source, check_names
from recsuite.datasets.tables.sources.remote import RemoteFile, is_remote
from recsuite.datasets.tables.sources.text import explained_damage
from recsuite.errors import UserError

if TYPE_CHECKING:
    import pyarrow

    from recsuite.datasets.tables.sources.file import File

BATCH_ROWS = 2**18
# Of a column that is read at once, packed as it is.
BUFFER_BYTES = 2**20
# Of the distinct values of a column, in a group of a Parquet file: it takes about a thousand texts.
FEW_BYTES = 2**14


class Typed(Source):
    """A file whose columns have types, and which is packed by itself where it is packed."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        if file.compression:
            raise UserError(f"{file} is a packed file of a format that is packed by itself; unpack it.")
        self._names: list[str] = []
        self._done = 0

    @property
    def names(self) -> list[str]:
        """The columns; what lies within one is none."""
        return self._names

    @property
    def done(self) -> int:
        """How many of its bytes were read, as far as rows have the same size."""
        return self._done


class Parquet(Typed):
    """A Parquet file, read group by group."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        from pyarrow import parquet, types

        with explained_damage(file):
            schema = parquet.read_schema(_opened(file))
            self._names = [str(name) for name in schema.names]
            metadata = parquet.read_metadata(_opened(file))
            # As codes come texts of which there are few. Where there are many they do not lie so in the file,
            # and would be looked up for each batch alone.
            texts = [
                field.name
                for field in schema
                if types.is_string(field.type) and _largest_dictionary(metadata, field.name) < FEW_BYTES
            ]
            self._parquet = parquet.ParquetFile(
                _opened(file),
                buffer_size=BUFFER_BYTES,
                # It keeps the bytes of all groups that were read until the last one is.
                pre_buffer=False,
                page_checksum_verification=True,
                read_dictionary=texts,
            )
        check_names(file, self._names)

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """The rows; all of them can be read, or the file is damaged."""
        first, num_rows = 0, self._parquet.metadata.num_rows
        with explained_damage(self.file):
            # Two threads, as there are cores for: columns are unpacked side by side.
            for batch in self._parquet.iter_batches(BATCH_ROWS, columns=list(columns)):
                _check(batch)
                if batch.num_rows:
                    yield Batch(batch.select(list(columns)), first)
                first += batch.num_rows
                self._done = max(self.file.size, 0) * first // max(num_rows, 1)

    def close(self) -> None:
        """End it."""
        self._parquet.close(force=True)


class Arrow(Typed):
    """An Arrow file, which Feather is too, or the batches of an Arrow stream."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        import pyarrow
        from pyarrow import ipc

        with explained_damage(file):
            # Mapped: only the columns that are wanted are read.
            self._source = _opened(file) if is_remote(file.path) else pyarrow.memory_map(file.path)
            start = self._source.read(8)
            self._source.seek(0)
            if start.startswith(b"FEA1"):
                raise UserError(f"{file} is Feather of version 1; write it again with a newer library.")
            self._is_file = start.startswith(b"ARROW1")
            opened = ipc.open_file if self._is_file else ipc.open_stream
            self._names = [str(name) for name in opened(self._source).schema.names]
        check_names(file, self._names)

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """The rows; all of them can be read, or the file is damaged."""
        first = 0
        with explained_damage(self.file):
            for share, whole in self._whole_batches(columns):
                for start in range(0, whole.num_rows, BATCH_ROWS):
                    batch = whole.slice(start, BATCH_ROWS)
                    # Nothing in the format itself finds a damaged byte, and a wrong offset ends the process.
                    _check(batch)
                    yield Batch(batch, first + start)
                first += whole.num_rows
                self._done = int(max(self.file.size, 0) * share)

    def _whole_batches(self, columns: Sequence[str]) -> Iterator[tuple[float, pyarrow.RecordBatch]]:
        """The batches as they were written, and which share of the file lies up to their ends."""
        from pyarrow import ipc

        self._source.seek(0)
        places = [self._names.index(name) for name in columns]
        options = ipc.IpcReadOptions(included_fields=places)
        if self._is_file:
            reader = ipc.open_file(self._source, options=options)
            for number in range(reader.num_record_batches):
                yield (number + 1) / reader.num_record_batches, reader.get_batch(number).select(list(columns))
        else:
            for batch in ipc.open_stream(self._source, options=options):
                yield 0.0, batch.select(list(columns))

    def close(self) -> None:
        """End it."""
        self._source.close()


def _largest_dictionary(metadata: Any, name: str) -> float:
    """The most bytes that the distinct values of a column take in a group of a Parquet file, if all of its
    groups have them.
    """
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    places = [place for place in range(metadata.num_columns) if metadata.schema.column(place).path == name]
    chunks = [group.column(place) for group in groups for place in places]
    if not all(chunk.dictionary_page_offset for chunk in chunks):
        return math.inf
    return max((chunk.data_page_offset - chunk.dictionary_page_offset for chunk in chunks), default=math.inf)


def _opened(file: File) -> Any:
    import pyarrow

    return pyarrow.PythonFile(RemoteFile(file.path), mode="r") if is_remote(file.path) else file.path


def _check(batch: pyarrow.RecordBatch) -> None:
    for column in batch.columns:
        column.validate(full=True)
