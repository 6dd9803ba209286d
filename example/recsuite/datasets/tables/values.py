"""One column's values, as its role wants them: ids, numbers, times, labels, lists and categories.

Each function takes a column of Arrow's as a file has it, and gives the values with what is wrong with each:
a fault, int8 [n], 0 where nothing is. The values of faulty rows mean nothing.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from recsuite.datasets.schema import CLICKS, COUNT, YES_NO
from recsuite.datasets.tables.schema_file import DROP, LabelColumn
from recsuite.errors import UserError

if TYPE_CHECKING:
    import pyarrow

# What is wrong with a value, behind its column and the value itself; `Wanted.reason` adds what was asked for.
FAULTS = (
    "",
    "is missing",
    "is not a number",
    "is not finite",
    "is not a whole number that a float holds exactly",
    "is not a time of the form",
    "is outside of the years 1 to 9999",
    "is outside of the scale",
    "is below zero",
    "is neither yes nor no",
    "is in another unit than",
    "is no label, as drop says",
    "is not a whole number of up to 18 digits",
)
MISSING, NO_NUMBER, INFINITE, NOT_WHOLE, NO_TIME, FAR_TIME, OFF_SCALE, NEGATIVE, NO_ANSWER = range(1, 10)
OTHER_UNIT, DROPPED, NO_WHOLE = 10, 11, 12
# Texts that say that there is no value, whatever it would be: a number, a category or an id.
NO_VALUE = ("", "NA", "N/A", "null", "NULL", "NaN", "nan", "None", "\\N")
YES, NO = ("1", "true", "yes", "1.0", "t", "y"), ("0", "false", "no", "0.0", "f", "n")
# From here on a float does not tell two whole numbers apart.
EXACT = 2.0**53
# What Arrow casts to a float: what it says must not depend on the values beside one.
DECIMAL = r"^[-+]?((\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|(?i:inf|infinity|nan))$"
WHOLE = r"^-?0*\d{1,18}$"
# What stands between the entries of a list in its one text: no text has it by chance.
ENTRY = "\x1f"


class Parsed(NamedTuple):
    """Values [n], and their faults int8 [n]."""

    values: Any
    faults: np.ndarray


def plain(column: pyarrow.Array, name: str) -> pyarrow.Array:
    """A column as texts, whole numbers, floats, truths, times or lists, whatever its storage.

    Raises:
        UserError: for a column of structures, maps or bytes that are no text.
    """
    import pyarrow
    from pyarrow import types

    kind = column.type
    if isinstance(kind, pyarrow.BaseExtensionType):
        if getattr(kind, "extension_name", "") == "arrow.uuid":
            return pyarrow.array(
                [None if each is None else str(each) for each in column.to_pylist()], "string"
            )
        return plain(column.storage, name)
    if types.is_dictionary(kind):
        return plain(column.dictionary_decode(), name)
    if types.is_null(kind):
        return column.cast(pyarrow.string())
    try:
        if types.is_large_string(kind) or types.is_string_view(kind) or types.is_decimal(kind):
            return column.cast(pyarrow.string() if not types.is_decimal(kind) else pyarrow.float64())
        if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
            return column.cast(pyarrow.binary()).cast(pyarrow.string())
    except pyarrow.ArrowInvalid:
        raise UserError(f"The column {name!r} holds bytes that are no text; write it as text.") from None
    if types.is_struct(kind) or types.is_map(kind) or types.is_union(kind):
        raise UserError(f"The column {name!r} holds values with parts of their own; write each as a column.")
    return column


def categories(column: pyarrow.Array, name: str) -> Parsed:
    """Texts or int64, or codes of such, without faults: floats are whole numbers where all are, and truths
    true or false.
    """
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    num_rows = len(column)
    if types.is_dictionary(column.type):
        return Parsed(
            _recoded(column, categories(column.dictionary, name).values), np.zeros(num_rows, np.int8)
        )
    column = plain(column, name)
    if types.is_list(column.type) or types.is_large_list(column.type):
        raise UserError(f"The column {name!r} holds lists, and is to be one value; name it a list.")
    if beyond_int64(column):
        column = column.cast(pyarrow.string())
    elif types.is_integer(column.type):
        column = column.cast(pyarrow.int64())
    elif types.is_floating(column.type):
        column = _texts_of_floats(column)
    # Of times, and of truths as true and false.
    elif not types.is_string(column.type):
        column = column.cast(pyarrow.string())
    if types.is_string(column.type):
        column = pc.if_else(pc.is_in(column, pyarrow.array(NO_VALUE)), None, column)
    return Parsed(column, np.zeros(num_rows, np.int8))


def beyond_int64(column: pyarrow.Array) -> int:
    """The largest of unsigned numbers, or of what codes stand for, where int64 cannot hold it; else 0."""
    import pyarrow.compute as pc
    from pyarrow import types

    values = column.dictionary if types.is_dictionary(column.type) else column
    if not types.is_unsigned_integer(values.type):
        return 0
    largest: int = pc.max(values).as_py() or 0
    return largest if largest >= 2**63 else 0


def _recoded(column: pyarrow.Array, values: pyarrow.Array) -> pyarrow.Array:
    """Codes of other values, of which some may be missing: those that no row has are left out."""
    import pyarrow
    import pyarrow.compute as pc

    if values.null_count == 0:
        return pyarrow.DictionaryArray.from_arrays(column.indices.cast(pyarrow.int32()), values)
    places = np.cumsum(values.is_valid().to_numpy(zero_copy_only=False)) - 1
    kept = pyarrow.array(places.astype(np.int32), mask=values.is_null().to_numpy(zero_copy_only=False))
    return pyarrow.DictionaryArray.from_arrays(kept.take(column.indices), pc.drop_null(values))


def _texts_of_floats(column: pyarrow.Array) -> pyarrow.Array:
    """Floats as int64 where all are whole; else as texts, each as short as it can be."""
    import pyarrow
    import pyarrow.compute as pc

    numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
    is_whole = (np.floor(numbers) == numbers) & (np.abs(numbers) < EXACT)
    if bool((is_whole | np.isnan(numbers)).all()):
        # Of a missing value NumPy makes some number, which the mask hides.
        return pyarrow.array(np.where(is_whole, numbers, 0).astype(np.int64), mask=~is_whole)
    # Arrow writes 1.0 as 1.
    return pc.if_else(pyarrow.array(np.isnan(numbers)), None, column.cast(pyarrow.string()))


def ids(column: pyarrow.Array, name: str) -> Parsed:
    """Texts or int64, or codes of such; one that is missing is a fault, and a float that is not whole."""
    from pyarrow import types

    faults = np.zeros(len(column), np.int8)
    if not types.is_dictionary(column.type):
        column = plain(column, name)
    if types.is_floating(column.type):
        numbers = column.to_numpy(zero_copy_only=False).astype(np.float64)
        faults[(np.floor(numbers) != numbers) | (np.abs(numbers) >= EXACT)] = NOT_WHOLE
        faults[np.isnan(numbers)] = MISSING
        return Parsed(_whole(numbers, faults), faults)
    values = categories(column, name).values
    if values.null_count:
        faults[values.is_null().to_numpy(zero_copy_only=False)] = MISSING
    return Parsed(values, faults)


def _whole(numbers: np.ndarray, faults: np.ndarray) -> pyarrow.Array:
    import pyarrow

    return pyarrow.array(np.where(faults == 0, numbers, 0).astype(np.int64), mask=faults != 0)


def wholes(column: pyarrow.Array, name: str) -> Parsed:
    """int64 of texts, ids of other types; one that is missing is a fault, and a text that is none."""
    import pyarrow
    from pyarrow import types

    texts = plain(column, name)
    if not types.is_string(texts.type):
        return ids(texts, name)
    found, faults = _cast(texts, pyarrow.int64(), WHOLE, NO_WHOLE)
    values = found.fill_null(0).to_numpy(zero_copy_only=False)
    faults[(values >= 10**18) | (values <= -(10**18))] = NO_WHOLE
    faults[found.is_null().to_numpy(zero_copy_only=False) & (faults == 0)] = MISSING
    return Parsed(found, faults)


def lists(column: pyarrow.Array, name: str, separator: str) -> Parsed:
    """Lists, each as one text with ENTRY between its entries; without faults.

    separator: what stands there in a column of texts.
    """
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    column, num_rows = plain(column, name), len(column)
    faults = np.zeros(num_rows, np.int8)
    kind = column.type
    if not (types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)):
        texts = categories(column, name).values.cast(pyarrow.string())
        return Parsed(pc.replace_substring(texts, separator, ENTRY), faults)
    entries = categories(pc.list_flatten(column), name).values.cast(pyarrow.string())
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    joined = pyarrow.ListArray.from_arrays(offsets, pc.fill_null(entries, ""))
    texts = pc.binary_join(joined, ENTRY)
    # No entry is no value, as it is in a text.
    return Parsed(pc.if_else(pc.equal(texts, ""), None, texts), faults)


def numbers(column: pyarrow.Array, name: str) -> Parsed:
    """float64, NaN where a number is missing; a text that is none, and infinity, are faults."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    column = plain(column, name)
    faults = np.zeros(len(column), np.int8)
    if types.is_string(column.type):
        found, faults = _cast(column, pyarrow.float64(), DECIMAL, NO_NUMBER)
    elif types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type):
        # Arrow has no way from truths to floats.
        found = column.cast(pyarrow.int8()) if types.is_boolean(column.type) else column
        found = found.cast(pyarrow.float64(), safe=False)
    else:
        raise UserError(f"The column {name!r} holds values of the type {column.type}, and no numbers.")
    values = pc.fill_null(found, float("nan")).to_numpy(zero_copy_only=False)
    faults[np.isinf(values)] = INFINITE
    return Parsed(values, faults)


def _cast(texts: pyarrow.Array, kind: Any, pattern: str, fault: int) -> tuple[pyarrow.Array, np.ndarray]:
    """Texts as another type, null where there is no value; and `fault` for those that are not of it.

    pattern: how texts look that are, without blanks around them.
    """
    import pyarrow
    import pyarrow.compute as pc

    # Arrow would read 0x1 as 1.
    raw, faults = bytes(texts.buffers()[2] or b""), np.zeros(len(texts), np.int8)
    if b"x" not in raw and b"X" not in raw:
        # All of them at once take a third of the time. Arrow says that one cannot be cast, not which.
        with contextlib.suppress(pyarrow.ArrowInvalid):
            return texts.cast(kind), faults
    texts = pc.utf8_trim_whitespace(texts)
    texts = pc.if_else(pc.is_in(texts, pyarrow.array(NO_VALUE)), None, texts)
    fits = pc.fill_null(pc.match_substring_regex(texts, pattern), True)
    faults[~fits.to_numpy(zero_copy_only=False)] = fault
    return pc.if_else(fits, texts, None).cast(kind), faults


def labels(column: pyarrow.Array, name: str, label: LabelColumn) -> Parsed:
    """float32: a rating within the ends of its scale, 0 or 1, or log(1 + count)."""
    import pyarrow
    import pyarrow.compute as pc
    from pyarrow import types

    assert label.kind != CLICKS
    column = plain(column, name)
    if label.kind == YES_NO and types.is_string(column.type):
        texts = pc.utf8_lower(pc.utf8_trim_whitespace(column))
        is_yes, is_no = (pc.is_in(texts, pyarrow.array(words)) for words in (YES, NO))
        column = pc.if_else(is_yes, "1", pc.if_else(is_no, "0", column))
    found = numbers(column, name)
    values, faults = found.values, found.faults
    is_dropped = dropped(values, label.drop)
    faults[np.isnan(values) & (faults == 0)] = MISSING
    is_fine = faults == 0
    if label.kind == YES_NO:
        faults[(is_fine & (values != 0) & (values != 1)) | (faults == NO_NUMBER)] = NO_ANSWER
    elif label.kind == COUNT:
        faults[is_fine & (values < 0)] = NEGATIVE
        values = np.log1p(np.where(faults == 0, values, 0))
    else:
        faults[is_fine & ((values < label.lowest) | (values > label.highest))] = OFF_SCALE
    faults[is_dropped] = DROPPED
    return Parsed(values.astype(np.float32), faults)


def dropped(values: np.ndarray, drop: str) -> np.ndarray:
    """Where values are among those that `LabelColumn.drop` names, bool [n]."""
    found = np.zeros(len(values), bool)
    for sign, number in DROP.findall(drop):
        number = float(number)
        found |= values < number if sign == "<" else values > number if sign == ">" else values == number
    return found


def weights(column: pyarrow.Array, name: str) -> Parsed:
    """float32, 0 or more; one that is missing is a fault."""
    found = numbers(column, name)
    found.faults[np.isnan(found.values) & (found.faults == 0)] = MISSING
    found.faults[(found.faults == 0) & (found.values < 0)] = NEGATIVE
    return Parsed(found.values.astype(np.float32), found.faults)
