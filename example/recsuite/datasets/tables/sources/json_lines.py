"""JSON lines: one object a line, by Arrow's reader, or by Python's where Arrow would change a value."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.tables.sources.bad_rows import BadRow
from recsuite.datasets.tables.sources.batch import Batch, Source
from recsuite.datasets.tables.sources.text import TextFile, explained_damage
from recsuite.errors import UserError

if TYPE_CHECKING:
    import pyarrow

    from recsuite.datasets.tables.sources.file import File

# Of bytes that are parsed at once; no line may be longer.
BLOCK_BYTES = 2**22
# Arrow's parser ends the process where brackets are nested by the hundred thousand.
DEEPEST = 64
# From here on a float does not tell two whole numbers apart.
EXACT = 2.0**53
# Of a line, in a message.
SHOWN = 200


class JsonLines(Source):
    """A file with a JSON object on each line; what an object does not have is missing."""

    unit = "line"

    def __init__(self, file: File) -> None:
        super().__init__(file)
        self._text = TextFile(file)
        self._names = self._first_names()
        # Texts that look like times are texts, whatever Arrow takes them for.
        self._texts: dict[str, Any] = {}

    @property
    def names(self) -> list[str]:
        """The names in the first lines, in the order in which they appear."""
        return self._names

    @property
    def done(self) -> int:
        """How many of its bytes were read."""
        return self._text.done

    def batches(self, columns: Sequence[str]) -> Iterator[Batch]:
        """The lines that are objects."""
        first, line = 0, 1
        with explained_damage(self.file):
            for block in self._blocks():
                num_lines = block.count(b"\n") + (not block.endswith(b"\n"))
                batch = self._by_arrow(block, columns, num_lines)
                lines = np.arange(line, line + num_lines)
                if batch is None:
                    batch, lines = self._by_python(block, columns, line)
                if batch.num_rows:
                    yield Batch(batch, first, len(self.bad), lines)
                first, line = first + batch.num_rows, line + num_lines

    def _blocks(self) -> Iterator[bytes]:
        """Whole lines; the last one may have no end."""
        rest = b""
        while block := self._text.read(BLOCK_BYTES):
            lines, end, rest = (rest + block).rpartition(b"\n")
            if end:
                yield lines + end
            elif len(rest) > BLOCK_BYTES:
                raise UserError(
                    f"{self.file} has a line of more than {BLOCK_BYTES // 2**20} MiB; it must hold one "
                    "object on each line."
                )
        if rest:
            yield rest

    def _first_names(self) -> list[str]:
        """The names of the columns: of the lines of the first block that are objects."""
        lines = self._text.head.split(b"\n")
        names: dict[str, None] = {}
        for line in lines[:1000]:
            found = _object(line)
            names.update(dict.fromkeys(found if isinstance(found, dict) else ()))
        # The last line of a list is an object too.
        if not names or self._text.head.lstrip().startswith(b"["):
            number, first = next(((k, line) for k, line in enumerate(lines, 1) if line.strip()), (1, b""))
            raise UserError(
                f"{self.file}, line {number}: {_object(first)}: {_shown(first[:60])!r}; write one object on "
                'each line, such as {"user": 1, "item": 2}: jq -c ".[]" FILE makes lines of a list, and '
                'jq -c "." FILE of objects on several lines.'
            )
        return [*names]

    def _by_arrow(self, block: bytes, columns: Sequence[str], num_lines: int) -> pyarrow.RecordBatch | None:
        """The columns of a block; none where Arrow cannot read it, or would change a value."""
        import pyarrow
        from pyarrow import json as arrow_json

        if _depth(block) > DEEPEST:
            return None
        options = arrow_json.ReadOptions(use_threads=False, block_size=len(block) + 1)
        try:
            table = arrow_json.read_json(pyarrow.BufferReader(block), options, self._parsing())
            times = [field.name for field in table.schema if _has_times(field.type)]
            if times:
                self._texts.update({name: _as_text(table.schema.field(name).type) for name in times})
                table = arrow_json.read_json(pyarrow.BufferReader(block), options, self._parsing())
        except (pyarrow.ArrowException, UnicodeDecodeError):
            return None
        # Empty lines are no rows, and would put all others on wrong lines.
        if table.num_rows != num_lines:
            return None
        found = [_column(table, name) for name in columns]
        if any(_is_rounded(column) for column in found):
            return None
        return pyarrow.RecordBatch.from_arrays(found, names=list(columns))

    def _parsing(self) -> Any:
        import pyarrow
        from pyarrow import json as arrow_json

        schema = pyarrow.schema(list(self._texts.items())) if self._texts else None
        return arrow_json.ParseOptions(explicit_schema=schema, newlines_in_values=False)

    def _by_python(
        self, block: bytes, columns: Sequence[str], line: int
    ) -> tuple[pyarrow.RecordBatch, np.ndarray]:
        """The columns of a block, value by value, and the lines of the rows; takes note of the bad ones."""
        import pyarrow

        rows, lines = [], []
        for number, text in enumerate(block.split(b"\n"), start=line):
            if not text.strip():
                continue
            found = _object(text)
            if isinstance(found, dict):
                rows.append(found)
                lines.append(number)
            else:
                self.bad.append(BadRow(number, _shown(text), found))
        self._leave_out_mixed(rows, lines, columns)
        arrays = [_array([row.get(name) for row in rows]) for name in columns]
        return pyarrow.RecordBatch.from_arrays(arrays, names=list(columns)), np.array(lines, np.int64)

    def _leave_out_mixed(self, rows: list[dict[str, Any]], lines: list[int], columns: Sequence[str]) -> None:
        """Take note of rows with a list or an object where the first value is none, or the reverse."""
        for name in columns:
            nested = [isinstance(row[name], list | dict) for row in rows if row.get(name) is not None]
            if len({*nested}) < 2:
                continue
            for place in reversed(range(len(rows))):
                value = rows[place].get(name)
                if value is not None and isinstance(value, list | dict) != nested[0]:
                    found, others = (
                        ("one value", "a list") if nested[0] else ("a list or object", "one value")
                    )
                    reason = f"{name} is {found}, and {others} in rows before"
                    self.bad.append(BadRow(lines[place], _text(value)[:SHOWN], reason))
                    del rows[place], lines[place]
        self.bad.sort()

    def close(self) -> None:
        """End it."""
        self._text.close()


def _object(line: bytes) -> dict[str, Any] | str:
    """The object of a line, or what is wrong with it."""
    try:
        found = json.loads(line)
    except RecursionError:
        return "brackets nested too deeply"
    # Also of a number with thousands of digits.
    except ValueError as error:
        return f"not a JSON object: {str(error)[:80]}"
    return found if isinstance(found, dict) else "not a JSON object"


def _shown(line: bytes) -> str:
    return line[:SHOWN].decode("utf-8", "replace")


def _depth(block: bytes) -> int:
    """How deeply brackets are nested, at most: those within texts count too."""
    content = np.frombuffer(block, np.uint8)
    # Brackets and braces differ in this one bit.
    opening = (content | 32) == ord("{")
    closing = (content | 32) == ord("}")
    steps = (opening.view(np.int8) - closing.view(np.int8))[opening | closing]
    return int(np.cumsum(steps, dtype=np.int64).max(initial=0))


def _has_times(kind: Any) -> bool:
    from pyarrow import types

    return types.is_timestamp(kind) or (types.is_list(kind) and _has_times(kind.value_type))


def _as_text(kind: Any) -> Any:
    import pyarrow

    return pyarrow.list_(_as_text(kind.value_type)) if pyarrow.types.is_list(kind) else pyarrow.string()


def _column(table: pyarrow.Table, name: str) -> pyarrow.Array:
    import pyarrow

    if name not in table.column_names:
        return pyarrow.nulls(table.num_rows)
    return table[name].combine_chunks()


def _is_rounded(column: pyarrow.Array) -> bool:
    """Whether whole numbers may have lost their last digits: they become floats where one of them is one."""
    import pyarrow
    import pyarrow.compute

    if not pyarrow.types.is_floating(column.type) or not len(column):
        return False
    largest = pyarrow.compute.max(pyarrow.compute.abs(column)).as_py()
    return largest is not None and largest >= EXACT


def _array(values: list[Any]) -> pyarrow.Array:
    """Values as a column; as texts where they are of several kinds, or too large for one."""
    import pyarrow

    try:
        array = pyarrow.array(values)
        # Arrow makes numbers of truths.
        if len({type(value) for value in values} - {type(None), int, float}) <= 1:
            return array
    except (pyarrow.ArrowException, OverflowError):
        pass
    return pyarrow.array([value if value is None else _text(value) for value in values], pyarrow.string())


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
