"""Numbers for the distinct values of a column that is read in batches, in the order in which they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import pyarrow

# Of batches whose codes wait: rows, and distinct values where there are few so far.
WAITING_ROWS = 2**23
WAITING_VALUES = 2**20


class Coder:
    """Writes the codes of a column to a file, int32, -1 where a value is missing.

    A batch knows its own distinct values; those of several batches are brought together when there are as
    many of them as were known before. So each is looked up a few times, and memory holds them about twice.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._known: pyarrow.Array | None = None
        self._waiting: list[tuple[np.ndarray, pyarrow.Array]] = []
        self._rows = self._values = 0

    def add(self, values: pyarrow.Array) -> None:
        """The next values: texts or int64."""
        coded = values.dictionary_encode()
        codes = coded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
        self._waiting.append((codes, coded.dictionary))
        self._rows += len(codes)
        self._values += len(coded.dictionary)
        known = 0 if self._known is None else len(self._known)
        if self._rows >= WAITING_ROWS or self._values >= max(WAITING_VALUES, known):
            self._write()

    def end(self) -> pyarrow.Array:
        """Write what is left; the distinct values, of which the codes are positions."""
        import pyarrow

        self._write()
        return pyarrow.array([], pyarrow.string()) if self._known is None else self._known

    def _write(self) -> None:
        before = [] if self._known is None else [self._known]
        dictionaries = same_type([*before, *(values for _, values in self._waiting)])
        if not dictionaries:
            return
        # The values that were known come first and so keep their codes.
        self._known, places = together(dictionaries)
        for (codes, _), place in zip(self._waiting, places[len(before) :], strict=True):
            self._file.write(place[codes].astype("<i4").tobytes())
        self._waiting, self._rows, self._values = [], 0, 0


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
