"""Tables of JSON lines: one object per line. Arrow reads them, or Python if Arrow would change a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute as pc
from pyarrow import json as arrow_json
from pyarrow import types

from recsuite.datasets.tables.files import JSON_BLOCK_BYTES, File
from recsuite.datasets.tables.formats import (
    BadRow,
    FileBatch,
    TextReader,
    explained_damage,
    has_times,
    text_of,
    whole_lines,
    without_times,
)
from recsuite.datasets.tables.values import EXACT
from recsuite.errors import UserError

# Arrow's parser crashes the process at a hundred thousand nested brackets.
DEEPEST = 64
# Characters of a line in a message.
JSON_SHOWN = 200


class JsonLines(TextReader):
    """File with a JSON object on each line; a value is missing if its object lacks the key."""

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self.names = self._first_names()
        # Texts that look like times stay texts; Arrow would convert them.
        self._texts: dict[str, Any] = {}

    def batches(self, columns: Sequence[str]) -> Iterator[FileBatch]:
        """Yield the lines that are objects."""
        first, line = 0, 1
        with explained_damage(self.file):
            for block in whole_lines(self._text, JSON_BLOCK_BYTES, is_csv=False):
                num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
                batch = self._by_arrow(block, columns, num_lines)
                lines = np.arange(line, line + num_lines)
                if batch is None:
                    batch, lines = self._by_python(block, columns, line)
                if batch.num_rows:
                    yield FileBatch(batch, first, len(self.bad), lines)
                first, line = first + batch.num_rows, line + num_lines

    def number_of(self, batch: FileBatch, place: int) -> int:
        """Return the number of the line at a position of a batch, counted from 1."""
        return super().number_of(batch, place) + self.lines_before

    def _first_names(self) -> list[str]:
        """Return the column names of the objects in the first block."""
        lines = self._text.head.split(b"\n")
        names: dict[str, None] = {}
        for line in lines[:1000]:
            row = _object(line)
            names.update(dict.fromkeys(row if isinstance(row, dict) else ()))
        if self.file.is_more:
            return [*names]
        # The last line of a JSON list may be an object too.
        if not names or self._text.head.lstrip().startswith(b"["):
            number, first = next(((k, line) for k, line in enumerate(lines, 1) if line.strip()), (1, b""))
            raise UserError(
                f"Cannot read {self.file}, line {number}: {_object(first)}: {_shown(first[:60])!r}. Fix: "
                'write one object on each line, such as {"user": 1, "item": 2}: jq -c ".[]" FILE makes lines '
                'of a list, and jq -c "." FILE of objects on several lines.'
            )
        return [*names]

    def _by_arrow(self, block: bytes, columns: Sequence[str], num_lines: int) -> pyarrow.RecordBatch | None:
        """Parse the columns of a block; None if Arrow cannot read it, or would change a value."""
        if _depth(block) > DEEPEST:
            return None
        options = arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        try:
            table = arrow_json.read_json(pyarrow.BufferReader(block), options, self._parsing())
            times = [field.name for field in table.schema if has_times(field.type)]
            if times:
                self._texts.update({name: without_times(table.schema.field(name).type) for name in times})
                table = arrow_json.read_json(pyarrow.BufferReader(block), options, self._parsing())
        except (pyarrow.ArrowException, UnicodeDecodeError):
            return None
        # Empty lines are not rows, and would shift the line numbers of the others.
        if table.num_rows != num_lines:
            return None
        arrays = [_column(table, name) for name in columns]
        if any(_is_rounded(column) for column in arrays):
            return None
        return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns))

    def _parsing(self) -> Any:
        schema = pyarrow.schema(list(self._texts.items())) if self._texts else None
        return arrow_json.ParseOptions(explicit_schema=schema, newlines_in_values=False)

    def _by_python(
        self, block: bytes, columns: Sequence[str], line: int
    ) -> tuple[pyarrow.RecordBatch, np.ndarray]:
        """Parse a block value by value: return its columns and the lines of its rows; record bad rows."""
        rows, lines = [], []
        for number, text in enumerate(block.split(b"\n"), start=line):
            if not text.strip():
                continue
            parsed = _object(text)
            if isinstance(parsed, dict):
                rows.append(parsed)
                lines.append(number)
            else:
                self.bad.append(BadRow(number + self.lines_before, _shown(text), parsed))
        self._leave_out_mixed(rows, lines, columns)
        arrays = [_array([row.get(name) for row in rows]) for name in columns]
        return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns)), np.array(lines, np.int64)

    def _leave_out_mixed(self, rows: list[dict[str, Any]], lines: list[int], columns: Sequence[str]) -> None:
        """Skip rows with a list or an object where the column's first value is neither, or vice versa."""
        for name in columns:
            nested = [isinstance(row[name], list | dict) for row in rows if row.get(name) is not None]
            if len({*nested}) < 2:
                continue
            kind, others = ("one value", "a list") if nested[0] else ("a list or object", "one value")
            for place in reversed(range(len(rows))):
                value = rows[place].get(name)
                if value is not None and isinstance(value, list | dict) != nested[0]:
                    reason = f"{name} is {kind}, and {others} in rows before"
                    line = lines[place] + self.lines_before
                    self.bad.append(BadRow(line, text_of(value)[:JSON_SHOWN], reason))
                    del rows[place], lines[place]
        self.bad.sort()


def _object(line: bytes) -> dict[str, Any] | str:
    """Parse the object of a line, or return the reason why it is bad."""
    try:
        value = json.loads(line)
    except RecursionError:
        return "brackets nested too deeply"
    # Also raised for a number with thousands of digits.
    except ValueError as error:
        return f"not a JSON object: {str(error)[:80]}"
    return value if isinstance(value, dict) else "not a JSON object"


def _shown(line: bytes) -> str:
    return line[:JSON_SHOWN].decode("utf-8", "replace")


def _depth(block: bytes) -> int:
    """Upper bound of the nesting depth of brackets: those within texts count too."""
    content = np.frombuffer(block, np.uint8)
    # Brackets and braces differ in this bit.
    opening = (content | 32) == ord("{")
    closing = (content | 32) == ord("}")
    steps = (opening.view(np.int8) - closing.view(np.int8))[opening | closing]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def _column(table: pyarrow.Table, name: str) -> pyarrow.Array:
    if name not in table.column_names:
        return pyarrow.nulls(table.num_rows)
    return table[name].combine_chunks()


def _is_rounded(column: pyarrow.Array) -> bool:
    """True if whole numbers may have lost digits: all become floats if one value is a float."""
    if not types.is_floating(column.type) or not len(column):
        return False
    largest = pc.max(pc.abs(column)).as_py()
    return largest is not None and largest >= EXACT


def _array(values: list[Any]) -> pyarrow.Array:
    """Return values as a column; as texts if they are of several kinds or too large."""
    try:
        array = pyarrow.array(values)
        # Arrow would convert booleans to numbers.
        if len({type(value) for value in values} - {type(None), int, float}) <= 1:
            return array
    except (pyarrow.ArrowException, OverflowError):
        pass
    return pyarrow.array([value if value is None else text_of(value) for value in values], pyarrow.string())
