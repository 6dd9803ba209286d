"""Values in memory, such as a column of a frame, read as those of a file are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.tables.parts.wanted import TIME, Wanted
from recsuite.datasets.tables.values import FAULTS, MISSING, plain
from recsuite.errors import UserError, printable

if TYPE_CHECKING:
    import pandas
    import pyarrow


def frame_of(values: Any, name: str) -> pandas.DataFrame:
    """A table in memory as a pandas.DataFrame: one of pandas, or any that offers Arrow's stream of batches,
    such as those of polars, pyarrow and DuckDB. Its types stay as they are.

    Raises:
        UserError: for what is no table, and for columns that a file of tables cannot have.
    """
    import pandas
    import pyarrow

    if hasattr(values, "__arrow_c_stream__") and not isinstance(values, pandas.DataFrame):
        try:
            # Categories of polars have texts that Arrow can neither decode nor write.
            values = pyarrow.table(values).to_pandas(
                types_mapper=lambda t: None if pyarrow.types.is_dictionary(t) else pandas.ArrowDtype(t)
            )
        except (pyarrow.ArrowException, TypeError, ValueError) as error:
            raise UserError(f"{name} cannot be read as an Arrow table: {printable(error)}.") from None
    if not isinstance(values, pandas.DataFrame):
        given = printable(repr(type(values)))
        raise UserError(f"{name} must be a table of pandas, polars, pyarrow or DuckDB, got {given}.")
    odd = [column for column in values.columns if not isinstance(column, str)]
    odd += [*values.columns[values.columns.duplicated()]]
    if odd:
        raise UserError(
            f"{name} has a column {printable(repr(odd[0]))}, and takes columns with one name each, a text; "
            "rename it."
        )
    lost = [each for each in values.index.names if each is not None and each not in values.columns]
    if lost:
        raise UserError(
            f"{name} has an index {printable(repr(lost[0]))}, which is not read; call reset_index() to make "
            "it a column, or reset_index(drop=True) to leave it out."
        )
    for column, kind in values.dtypes.items():
        # Plain numbers, truths and times are of one type each.
        if kind.kind not in "biufM":
            column_of(values[column], str(column))
    return values


def column_of(values: Any, name: str) -> pyarrow.Array:
    """Values of one type as Arrow has them.

    Raises:
        UserError: for values of several types, or of one that no table has.
    """
    import pyarrow

    try:
        found = pyarrow.array(values, from_pandas=True)
    # What Arrow raises depends on which value it meets first.
    except (pyarrow.ArrowException, OverflowError, TypeError, ValueError):
        raise UserError(
            f"The column {printable(name)} holds values of several types, or of one that no table has; give "
            "texts, numbers, truths or times alone."
        ) from None
    return found.combine_chunks() if isinstance(found, pyarrow.ChunkedArray) else found


def parsed(values: Any, wanted: Wanted) -> Any:
    """The values of a column as training reads them: an array of NumPy's or Arrow's. Of times all must be
    there.

    Raises:
        UserError: for what the training would call a bad row, but for an id that is missing.
    """
    column = plain(column_of(values, wanted.column), wanted.column)
    found, faults = wanted.parse(column)
    is_bad = faults != 0 if wanted.kind == TIME else (faults != 0) & (faults != MISSING)
    if is_bad.any():
        place = int(np.argmax(is_bad))
        value = column[place].as_py()
        shown = "" if value is None else f"{printable(value)[:60]!r} "
        raise UserError(f"{wanted.column} {shown}{FAULTS[faults[place]]}; mend it.")
    return found


def raw_values(values: Any, wanted: Wanted, known: type[Any] | None) -> list[Any]:
    """Ids, categories or numbers as a model receives them, None where one is missing.

    known: the type that the training has for them, or None. One column may have texts where all of its values
    together are no whole numbers, and whole numbers where only some of them are looked at.

    Raises:
        UserError: see `parsed`.
    """
    import pyarrow

    found = parsed(values, wanted)
    if isinstance(found, np.ndarray):
        return [None if np.isnan(each) else each for each in found.tolist()]
    if known is str:
        found = found.cast(pyarrow.string())
    is_number = pyarrow.types.is_floating(plain(column_of(values, wanted.column), wanted.column).type)
    raw: list[Any] = found.to_pylist()
    if is_number and known is int and pyarrow.types.is_string(found.type):
        # What is not whole the training has never seen.
        return [int(each) if each is not None and each.lstrip("-").isdecimal() else None for each in raw]
    return raw
