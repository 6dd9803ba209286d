"""Numbers for the distinct values of a column that is read in batches, in the order in which they come."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import pyarrow

# Of the values that wait to be looked up together.
WAITING_BYTES = 2**26
# Whole numbers below it are not looked up: which of them there are takes a byte for each.
SMALL = 2**26


class Coder:
    """Writes the codes of a column to a file, int32, -1 where a value is missing.

    Small whole numbers are codes of themselves. Other values wait until there are as many of them as are
    known already, and are looked up with those by a thread of the pool while the next are read: each once,
    or twice where the known ones are counted in. Memory holds them about three times.
    """

    def __init__(self, file: BinaryIO, pool: Executor) -> None:
        self._file, self._pool = file, pool
        # Which small numbers there are, bool.
        self._seen = np.zeros(0, bool)
        self._all_small = True
        self._known: pyarrow.Array | None = None
        self._waiting: list[pyarrow.Array] = []
        self._bytes = 0
        self._writing: Future[None] | None = None

    def add(self, values: pyarrow.Array) -> None:
        """The next values: texts or int64, or codes of such."""
        self._all_small = self._all_small and self._add_small(values)
        if self._all_small or not len(values):
            return
        self._waiting.append(values)
        self._bytes += values.nbytes
        known = 0 if self._known is None else self._known.nbytes
        if self._bytes >= max(WAITING_BYTES, known):
            self._write()

    def end(self) -> pyarrow.RecordBatch:
        """Write what is left; the distinct values and their codes, int32. A value may have two."""
        import pyarrow

        self._write()
        self._wait()
        small = np.flatnonzero(self._seen)
        known = pyarrow.array([], pyarrow.string()) if self._known is None else self._known
        values = pyarrow.concat_arrays(same_type([pyarrow.array(small, pyarrow.int64()), known]))
        codes = np.concatenate([small, len(self._seen) + np.arange(len(known))]).astype(np.int32)
        return pyarrow.record_batch([values, pyarrow.array(codes)], names=["value", "code"])

    def _add_small(self, values: pyarrow.Array) -> bool:
        """Write values as they are, if all are small whole numbers."""
        import pyarrow
        import pyarrow.compute as pc

        if values.type != pyarrow.int64():
            return False
        ends = pc.min_max(values).as_py()
        if not 0 <= (ends["min"] or 0) <= (ends["max"] or 0) < SMALL:
            return False
        if (ends["max"] or 0) >= len(self._seen):
            # Doubled each time, so that it is copied a few times.
            grown = np.zeros(min(SMALL, max(2**12, 2 * ((ends["max"] or 0) + 1))), bool)
            grown[: len(self._seen)] = self._seen
            self._seen = grown
        codes = values.fill_null(-1).to_numpy(zero_copy_only=False)
        self._seen[codes[codes >= 0] if values.null_count else codes] = True
        self._file.write(codes.astype("<i4").tobytes())
        return True

    def _write(self) -> None:
        """Write what waits, in a thread of the pool; of one column not two at once, as the order counts."""
        self._wait()
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            self._writing = self._pool.submit(self._write_codes, waiting)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()

    def _write_codes(self, waiting: list[pyarrow.Array]) -> None:
        coded = [_without_unused(values) if _is_coded(values) else values for values in waiting]
        before = [] if self._known is None else [self._known]
        values = same_type([*before, *(each.dictionary if _is_coded(each) else each for each in coded)])
        # The values that were known come first and so keep their codes.
        self._known, places = together(values)
        for each, place in zip(coded, places[len(before) :], strict=True):
            # A missing value stays -1.
            codes = np.where(place < 0, place, place + np.int32(len(self._seen)))
            if _is_coded(each):
                codes = np.append(codes, np.int32(-1))[_indices(each)]
            self._file.write(codes.astype("<i4", copy=False).data)


def _is_coded(values: pyarrow.Array) -> bool:
    import pyarrow

    return bool(pyarrow.types.is_dictionary(values.type))


def _indices(coded: pyarrow.Array) -> np.ndarray:
    """The codes, int32, -1 where a value is missing."""
    found: np.ndarray = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    return found


def _without_unused(coded: pyarrow.Array) -> pyarrow.Array:
    """Codes of such values alone as some row has: a file's own may count others."""
    import pyarrow

    codes = _indices(coded)
    is_used = np.zeros(len(coded.dictionary) + 1, bool)
    is_used[codes] = True
    places = (np.cumsum(is_used) - 1).astype(np.int32)
    return pyarrow.DictionaryArray.from_arrays(
        pyarrow.array(places[codes], mask=codes < 0),
        coded.dictionary.filter(pyarrow.array(is_used[:-1])),
    )


def same_type(arrays: list[pyarrow.Array]) -> list[pyarrow.Array]:
    """Values of one type: as texts where some are texts and some whole numbers."""
    import pyarrow

    # Those of nothing but missing values have the type of texts by chance.
    filled = {each.type for each in arrays if len(each) > each.null_count}
    if len(filled) == 1 and len({each.type for each in arrays}) == 1:
        return arrays
    kind = pyarrow.int64() if filled == {pyarrow.int64()} else pyarrow.string()
    return [each.cast(kind) for each in arrays]


def together(arrays: list[pyarrow.Array]) -> tuple[pyarrow.Array, list[np.ndarray]]:
    """The distinct values of arrays of one type, in the order in which they come; and for each array the
    places of its values among those, int32, -1 where one is missing.
    """
    import pyarrow

    # Arrow leaves out arrays without values.
    encoded = pyarrow.chunked_array([each for each in arrays if len(each)], arrays[0].type)
    chunks = iter(encoded.dictionary_encode().chunks)
    places, known = [], arrays[0][:0]
    for each in arrays:
        chunk = next(chunks) if len(each) else None
        places.append(np.empty(0, np.int32) if chunk is None else _indices(chunk))
        known = known if chunk is None else chunk.dictionary
    return known, places
