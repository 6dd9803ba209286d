"""The data set that some events are a part of, where each rank prepares the events of its own files alone.

The types of `RawData` and `Schema`, which import this module, are `Any` here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

# For types only: a schema, which imports this file, needs no numpy.
if TYPE_CHECKING:
    import numpy as np


class Whole:
    """The whole data set of some events: here they are all of it.

    An extra has a subclass for the events of one rank, whose methods are collective. is_part: True if other
    ranks have other events; known: the vocabulary of all events, empty to take that of the events here.
    """

    is_part = False
    known: Mapping[str, Any] = MappingProxyType({})

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sum over ranks of numbers, [n]."""
        return numbers

    def joined(self, values: np.ndarray) -> np.ndarray:
        """Return the values of all ranks, rank after rank, of those here, [n, ...]."""
        return values

    def mean(self, values: np.ndarray) -> float:
        """Return the mean over the values of all ranks, of those here, [n]."""
        return float(values.mean(dtype="float64"))

    def num_users(self, raw: Any) -> int:
        """Return the number of users of all ranks."""
        return len(raw.users)

    def write_beside(self, folder: Path, raw: Any, schema: Any) -> None:
        """Write more files of columns."""


# Of events that are all of their data set.
WHOLE = Whole()
