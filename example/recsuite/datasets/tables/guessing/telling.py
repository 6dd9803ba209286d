"""How much a column of a sample of the events says about which item an event is of."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from recsuite.datasets.tables.guessing.contents import NUMBER, is_text, present
from recsuite.datasets.tables.guessing.roles import codes_of
from recsuite.datasets.telling import Telling, telling


def telling_of(events: pa.Table, column: str, item: str, is_number: bool) -> Telling:
    """What a column says of the items, see `datasets.telling`; as numbers or as categories."""
    values = _numbers(events[column]) if is_number else codes_of(events[column])
    codes = codes_of(events[item])
    known = pc.and_(pc.is_valid(values), pc.is_valid(codes))
    found, items = (each.filter(known).to_numpy(zero_copy_only=False) for each in (values, codes))
    return telling(found, items, is_number)


def _numbers(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks()
    if is_text(array.type):
        array = pc.utf8_ltrim(present(array), "+")
        array = pc.if_else(pc.match_substring_regex(array, NUMBER), array, pa.scalar(None, pa.string()))
    numbers = array.cast(pa.float64(), safe=False)
    return pc.if_else(pc.is_finite(numbers), numbers, pa.scalar(None, pa.float64()))
