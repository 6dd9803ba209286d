"""One column's values: numbers, times and categories, and what is wrong with each."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pandas
import pyarrow
import pytest

from recsuite.datasets.tables.values import (
    FAR_TIME,
    FAULTS,
    INFINITE,
    MISSING,
    NO_NUMBER,
    NO_TIME,
    NOT_WHOLE,
    OTHER_UNIT,
    ColumnSpec,
    categories,
    ids,
    lists,
    near,
    numbers,
    shown_value,
    times,
)
from recsuite.errors import UserError

NOON = 1_795_176_000
UNITS = [("s", 1), ("ms", 10**3), ("us", 10**6)]
FAR = pytest.mark.skipif(
    int(pandas.__version__.split(".")[0]) < 3,
    reason="pandas 2, of Python 3.10, reads no such year beside a zone, and counts a bad time",
)


@pytest.mark.parametrize(
    ("text", "number", "fault"),
    [
        ("1", 1.0, 0),
        (" -2.5e3 ", -2500.0, 0),
        ("+.5", 0.5, 0),
        *((text, None, 0) for text in ("", "NA", "n/a", "#N/A", "<NA>", "null", "NaN", "None", "NAN")),
        *((text, None, NO_NUMBER) for text in ("1,5", "0x10", "1_0", "one", "1 2", "\u0663")),
        *((text, None, INFINITE) for text in ("inf", "-Infinity", "1e999")),
    ],
)
def test_a_text_is_parsed_as_a_number_a_missing_value_or_a_fault(
    text: str, number: float | None, fault: int
) -> None:
    # Beside another fault, which takes the slower way, and alone.
    for beside in ([], ["bad"], ["4"]):
        found = numbers(pyarrow.array([text, *beside]), "price")
        assert found.faults[0] == fault
        if fault == 0:
            np.testing.assert_equal(found.values[0], np.nan if number is None else number)


@pytest.mark.parametrize(
    ("form", "texts", "values"),
    [
        (
            "decimal_commas",
            ["3,00", " -0,5 ", "1.234,5", "1.234", "1.234.567"],
            [3, -0.5, 1234.5, 1234, 1234567],
        ),
        # A point before other than three digits is one, in either form.
        ("decimal_commas", ["3.5", "12", "NA"], [3.5, 12, np.nan]),
        ("grouping_commas", ["-61,753,924", "1,234.5", "1,234", "0.5"], [-61753924, 1234.5, 1234, 0.5]),
    ],
)
@pytest.mark.parametrize("kind", ["number", "more_weight"])
def test_numbers_with_commas_are_read_by_their_form(
    form: str, texts: list[str], values: list[float], kind: str
) -> None:
    texts, values = (texts, values) if kind == "number" else ([texts[-2]] * 2, [values[-2]] * 2)
    found = ColumnSpec("price", kind, "event", form).parse(pyarrow.array(texts))
    np.testing.assert_allclose(found.values, values)
    assert not found.faults.any()


@pytest.mark.parametrize(
    ("form", "text"), [("grouping_commas", "3,5"), ("decimal_commas", "1,2,3"), ("decimal_commas", "x")]
)
def test_a_number_of_another_form_with_commas_is_a_fault(form: str, text: str) -> None:
    assert ColumnSpec("price", "number", "item", form).parse(pyarrow.array([text])).faults == [NO_NUMBER]


# Types of times and dates, with the ticks of a second or a day.
KINDS = [
    *((pyarrow.timestamp(unit, zone), ticks) for unit, ticks in UNITS for zone in (None, "Europe/Berlin")),
    (pyarrow.date32(), None),
    (pyarrow.date64(), None),
]


@pytest.mark.parametrize(("kind", "ticks"), KINDS, ids=lambda each: str(each))
def test_a_time_outside_the_years_1_to_9999_is_a_fault_in_every_type(kind: Any, ticks: int | None) -> None:
    days = 1 if pyarrow.types.is_date32(kind) else 86_400_000
    most, near_one = (2**30, NOON // 86_400) if days == 1 else (2**62 // days * days, NOON // 86_400 * days)
    if ticks:
        most, near_one = 2**62, NOON * ticks
    raw = pyarrow.array([most, near_one, -most, None], "int32" if days == 1 else "int64")
    column = raw.cast(kind)
    found = times(column, "when", "iso")
    assert found.faults.tolist() == [FAR_TIME, 0, FAR_TIME, MISSING]
    assert found.values[1] == (NOON if ticks else NOON // 86_400 * 86_400)
    assert categories(column, "when").faults.tolist() == [FAR_TIME, 0, FAR_TIME, 0]
    in_lists = pyarrow.array([[each] for each in raw.to_pylist()], pyarrow.list_(raw.type))
    in_lists = pyarrow.ListArray.from_arrays(in_lists.offsets, in_lists.values.cast(kind))
    assert lists(in_lists, "when", ",").faults.tolist() == [FAR_TIME, 0, FAR_TIME, 0]
    assert str(most) in shown_value(column, 0)
    assert near(column).to_pylist()[0] is None


@pytest.mark.parametrize("column", [pyarrow.array([[1]]), pyarrow.array([datetime.date(2026, 1, 1)])])
def test_a_column_that_holds_no_numbers_is_named(column: pyarrow.Array) -> None:
    with pytest.raises(UserError, match="The column 'price' holds values of the type"):
        numbers(column, "price")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2026-11-20", NOON - 43_200),
        ("2026-11-20 12:00", NOON),
        ("2026-11-20T12:00:00", NOON),
        (" 2026-11-20 12:00:00 ", NOON),
        ("2026-11-20T12:00:00Z", NOON),
        ("2026-11-20T14:00:00+02:00", NOON),
        ("2026-11-20 10:00:00-0200", NOON),
        ("2026-11-20 14:00:00 +02", NOON),
        ("2026-11-20T12:00:00.5", NOON),
        ("2026-11-20T12:00:00.123456789Z", NOON),
        ("2026-11-20 12:00:00 UTC", NOON),
        ("2026-11-20 12:00:00.5 GMT", NOON),
        ("20261120T120000Z", NOON),
        ("20261120 1300+0100", NOON),
        ("20261120", NOON - 43_200),
        ("1969-12-31T23:59:59.5", -1),
        pytest.param("0001-01-01", -62_135_596_800, marks=FAR),
        pytest.param("9999-12-31T23:59:59", 253_402_300_799, marks=FAR),
    ],
)
def test_iso_times_are_seconds_in_utc(text: str, seconds: int) -> None:
    # Alone, and beside others, with a zone and without one.
    for beside in ([], ["2026-01-01"], ["2026-01-01T00:00:00Z"], ["bad"]):
        found = times(pyarrow.array([text, *beside]), "time", "iso")
        assert (found.values[0], found.faults[0]) == (seconds, 0), beside


@pytest.mark.parametrize(
    ("form", "value", "fault"),
    [
        *(
            ("iso", text, NO_TIME)
            for text in ("2026-02-31", "20.11.2026", "now", "2026-11-20T25:00:00", "2026")
        ),
        ("iso", "", MISSING),
        ("iso", None, MISSING),
        ("%d/%m/%Y", "31/02/2026", NO_TIME),
        ("%d/%m/%Y", "1/2/26x", NO_TIME),
        ("%d/%m/%Y %Z", "1/2/2026 PST", NO_TIME),
        ("unix", "NA", MISSING),
        ("unix", "soon", NO_NUMBER),
        # Milliseconds where seconds were said, and the other way.
        ("unix", NOON * 1000, OTHER_UNIT),
        ("unix_ms", NOON, OTHER_UNIT),
        ("unix_ns", NOON * 10**6, OTHER_UNIT),
        ("unix", 10**13, FAR_TIME),
    ],
)
def test_a_value_that_is_no_time_is_a_fault(form: str, value: Any, fault: int) -> None:
    found = times(pyarrow.array([value, value], pyarrow.string() if value is None else None), "time", form)
    assert found.faults.tolist() == [fault, fault]


@pytest.mark.parametrize(
    ("form", "column"),
    [
        ("%d.%m.%Y %H:%M", ["20.11.2026 12:00"]),
        ("%d.%m.%Y %H:%M", ["20.11.2026 12:00", "1.1.2026 0:0"]),
        ("%Y-%m-%dT%H:%M:%S.%f", ["2026-11-20T12:00:00.25"]),
        ("%Y-%m-%d %H:%M %z", ["2026-11-20 13:00 +0100"]),
        (
            "%Y-%m-%d %H:%M %Z",
            ["2026-11-20 13:00 CET", "2026-07-20 12:00 UTC", "2026-07-20 12:00 Europe/Berlin"],
        ),
        ("unix", [NOON]),
        ("unix", [f"{NOON}.75"]),
        ("unix", [f"{NOON:.9e}"]),
        ("unix_ms", [NOON * 1000 + 999]),
        ("unix_us", [NOON * 10**6 + 999_999]),
        ("unix_ns", [NOON * 10**9]),
        ("%d/%m/%Y %I:%M:%S %p", ["20/11/2026 12:00:00.999 PM"]),
        ("%Y%m%d%H", [2026112012.0]),
        ("%Y%m%d%H", ["2026112012.0"]),
        ("iso", pyarrow.array([NOON * 1000 + 1], pyarrow.timestamp("ms", "Europe/Berlin"))),
        ("unix", pyarrow.array([NOON * 10**9], pyarrow.timestamp("ns"))),
    ],
)
def test_times_of_every_form_are_the_same_second(form: str, column: Any) -> None:
    found = times(column if isinstance(column, pyarrow.Array) else pyarrow.array(column), "time", form)
    assert (found.values[0], found.faults.max()) == (NOON, 0)


def test_a_format_that_pandas_does_not_read_is_refused() -> None:
    with pytest.raises(UserError, match=r"^Cannot read times with the format '%Y-%m-%d %Z %z': .*\. Fix: "):
        times(pyarrow.array(["2026-11-20 UTC +0000"]), "time", "%Y-%m-%d %Z %z")


@pytest.mark.parametrize(
    ("column", "values"),
    [
        (pyarrow.array([1.0, None, 2.0]), [1, None, 2]),
        (pyarrow.array([1.0, 0.5, None]), ["1", "0.5", None]),
        (pyarrow.array([0.1], pyarrow.float32()), ["0.1"]),
        (pyarrow.array([True, None]), ["true", None]),
        (pyarrow.array(["", "NA", " x", "null", "\\N", "None"]), [None, None, " x", None, None, None]),
        (pyarrow.array(["N/A", "n/a", "#N/A", "<NA>", "n/a."]), [None, None, None, None, "n/a."]),
        (pyarrow.array(["a", "", None]).dictionary_encode(), ["a", None, None]),
        (pyarrow.array([datetime.date(2026, 11, 20)]), ["2026-11-20"]),
        (pyarrow.nulls(2), [None, None]),
    ],
)
def test_categories_are_texts_or_whole_numbers(column: pyarrow.Array, values: list[Any]) -> None:
    assert categories(column, "kind").values.to_pylist() == values


def test_an_id_that_a_float_cannot_hold_is_a_fault() -> None:
    found = ids(pyarrow.array([1.0, 1.5, float(2**53), None, float("inf")]), "user")
    assert found.faults.tolist() == [0, NOT_WHOLE, NOT_WHOLE, MISSING, NOT_WHOLE]
    assert all(FAULTS[fault] for fault in found.faults if fault)


@pytest.mark.parametrize(
    "column",
    [
        pyarrow.array(["a|b", "", None, "c"]),
        pyarrow.array([["a", "b"], [], None, ["c"]]),
        pyarrow.array([["a", "b"], [], None, ["c"]], pyarrow.large_list(pyarrow.string())),
        pyarrow.array([["a", "b"], [None], None, ["c"]]),
    ],
)
def test_lists_are_the_same_from_texts_and_lists(column: pyarrow.Array) -> None:
    assert lists(column, "tags", "|").values.to_pylist() == ["a\x1fb", None, None, "c"]


def test_values_of_nested_types_are_refused() -> None:
    with pytest.raises(UserError, match="The column 'who' holds values with parts of their own"):
        categories(pyarrow.array([{"a": 1}]), "who")
    with pytest.raises(UserError, match="holds lists, and is to be one value"):
        categories(pyarrow.array([[1]]), "who")
    with pytest.raises(UserError, match="holds bytes that are no text"):
        ids(pyarrow.array([b"\xff"]), "who")
