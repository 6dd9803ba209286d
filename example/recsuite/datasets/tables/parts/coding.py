"""Numbers for the distinct values of a column that is read in batches, in the order in which they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import pyarrow

# Of batches whose codes wait: rows, and distinct values where there are few so far.
WAITING_ROWS = 2**23
WAITING_VALUES = 2**20
# Whole numbers below it are not looked up: which of them there are takes a byte for each.
SMALL = 2**26


class Coder:
    """Writes the codes of a column to a file, int32, -1 where a value is missing.

    Small whole numbers are codes of themselves. Of other values a batch knows its own distinct ones; those of
    several batches are brought together when there are as many of them as were known before. So each is
    looked up a few times, and memory holds them about twice.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        # Which small numbers there are, bool.
        self._seen = np.zeros(0, bool)
        self._known: pyarrow.Array | None = None
        self._waiting: list[tuple[np.ndarray, pyarrow.Array]] = []
        self._rows = self._values = 0

    def add(self, values: pyarrow.Array) -> None:
        """The next values: texts or int64, or codes of such."""
        if self._known is None and not self._waiting and self._add_small(values):
            return
        codes, distinct = _coded(values)
        self._waiting.append((codes, distinct))
        self._rows += len(codes)
        self._values += len(distinct)
        known = 0 if self._known is None else len(self._known)
        if self._rows >= WAITING_ROWS or self._values >= max(WAITING_VALUES, known):
            self._write()

    def end(self) -> pyarrow.RecordBatch:
        """Write what is left; the distinct values and their codes, int32. A value may have two."""
        import pyarrow

        self._write()
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
        before = [] if self._known is None else [self._known]
        dictionaries = same_type([*before, *(values for _, values in self._waiting)])
        if not dictionaries:
            return
        # The values that were known come first and so keep their codes.
        self._known, places = together(dictionaries)
        for (codes, _), place in zip(self._waiting, places[len(before) :], strict=True):
            place[:-1] += len(self._seen)
            self._file.write(place[codes].astype("<i4").tobytes())
        self._waiting, self._rows, self._values = [], 0, 0


def _coded(values: pyarrow.Array) -> tuple[np.ndarray, pyarrow.Array]:
    """Codes of the distinct values, int32 with -1 where one is missing, and the values."""
    import pyarrow

    is_coded = pyarrow.types.is_dictionary(values.type)
    coded = values if is_coded else values.dictionary_encode()
    codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
    if not is_coded:
        return codes, coded.dictionary
    # A file's own codes may count values that none of these rows has.
    is_used = np.zeros(len(coded.dictionary) + 1, bool)
    is_used[codes] = True
    is_used[-1] = False
    places = np.append(np.cumsum(is_used[:-1]) - 1, -1).astype(np.int32)
    return places[codes], coded.dictionary.filter(pyarrow.array(is_used[:-1]))


def same_type(dictionaries: list[pyarrow.Array]) -> list[pyarrow.Array]:
    """Distinct values of one type: as texts where some are texts and some whole numbers."""
    import pyarrow

    # Those of nothing but missing values have the type of texts by chance.
    filled = {each.type for each in dictionaries if len(each)}
    if len(filled) == 1 and len({each.type for each in dictionaries}) == 1:
        return dictionaries
    kind = pyarrow.int64() if filled == {pyarrow.int64()} else pyarrow.string()
    return [each.cast(kind) for each in dictionaries]


def together(dictionaries: list[pyarrow.Array]) -> tuple[pyarrow.Array, list[np.ndarray]]:
    """Distinct values of one type as one, in the order in which they come; and for each of those that were
    given the places of its values, int32, with -1 at the end.
    """
    import pyarrow

    # Arrow leaves out parts without values.
    encoded = pyarrow.chunked_array([each for each in dictionaries if len(each)], dictionaries[0].type)
    chunks = iter(encoded.dictionary_encode().chunks)
    places, known = [], dictionaries[0][:0]
    for each in dictionaries:
        indices = np.empty(0, np.int32)
        if len(each):
            chunk = next(chunks)
            indices, known = chunk.indices.to_numpy(), chunk.dictionary
        places.append(np.append(indices, np.int32(-1)))
    return known, places
