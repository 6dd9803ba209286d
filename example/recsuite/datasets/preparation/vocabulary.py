"""Encoding of the raw values of features: table rows, or inputs on a common scale.

It is fitted to the training events only, and kept with a model for serving. For a feature of categories,
vocabulary.json has its raw values, in the order of their table rows 1, 2, ..., and for a number the edges of
its buckets, or its scale. A dynamic feature has numbers of all values in the files instead of table rows, and
<feature>_ids.npy has the id of each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.arrays import (
    MOST,
    FeatureArrays,
    chunks,
    gather,
    release,
    temporary,
    write_records,
)
from recsuite.datasets.schema import DENSE, EVENT, UNKNOWN_ROW, Codes, Events, Feature, Schema, Table
from recsuite.datasets.tables.derived import USER_DAY
from recsuite.errors import UserError
from recsuite.files import typed
from recsuite.ids import UNKNOWN_ID, check_distinct, check_kind, ids_of

if TYPE_CHECKING:
    import pandas

# Buckets of a number: quantiles with equal numbers of training values.
NUM_BUCKETS = 32
# A number whose mean lies so many standard deviations above its median is replaced by its logarithm.
SKEWED = 0.2
# Quantiles are computed from at most so many evenly spaced values: their error is below a thousandth.
MOST_FITTED = 2**20


@dataclass(frozen=True)
class Buckets:
    """Quantiles: a value from edge n - 1 up to below edge n has row n + 1; a missing value has row 0."""

    edges: tuple[float, ...]

    @property
    def rows(self) -> int:
        """Number of rows of the table."""
        return len(self.edges) + 2

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Table rows, int32 [n], of numbers, float [n], NaN for a missing one."""
        rows = np.searchsorted(np.array(self.edges), rounded(values), side="right") + UNKNOWN_ROW + 1
        return np.where(np.isnan(values), UNKNOWN_ROW, rows).astype(np.int32)


@dataclass(frozen=True)
class Scale:
    """Scale of a number: (x - mean) / spread, with log(1 + x) instead of x if it is skewed."""

    mean: float
    spread: float
    is_log: bool

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Inputs of the model, float32 [n]; NaN for a missing value."""
        # At least 0, so that a value below the training range has a logarithm too.
        values = rounded(values)
        values = np.log1p(np.maximum(values, 0.0)) if self.is_log else values
        return ((values - self.mean) / self.spread).astype(np.float32)


Encoding = Buckets | Scale


def rounded(values: np.ndarray) -> np.ndarray:
    """Round numbers to the precision and range of columns, float64 [n]."""
    # A column of events has 32 bits, and a caller's number 64: a value on an edge must be on it for both.
    limit = np.finfo(np.float32).max
    return values.astype(np.float64).clip(-limit, limit).astype(np.float32).astype(np.float64)


def fit(values: np.ndarray, number: str) -> Encoding:
    """Fit the encoding of a number to its training values, float [n], NaN for a missing one."""
    values = rounded(values[:: -(-len(values) // MOST_FITTED) or 1])
    values = values[~np.isnan(values)]
    if number == DENSE:
        return _fit_scale(values)
    if len(values) == 0:
        return Buckets(())
    # Each edge is a value that occurs, so rounding decides nothing.
    shares = np.arange(1, NUM_BUCKETS) / NUM_BUCKETS
    edges = np.unique(np.quantile(values, shares, method="higher"))
    # No value is below the minimum, so it is no edge.
    return Buckets(tuple(edges[edges > values.min()].tolist()))


def _fit_scale(values: np.ndarray) -> Scale:
    if len(values) == 0:
        return Scale(0.0, 1.0, is_log=False)
    spread = float(values.std())
    is_log = bool(values.min() >= 0 and values.mean() - np.median(values) > SKEWED * spread)
    if is_log:
        values = np.log1p(values)
        spread = float(values.std())
    return Scale(float(values.mean()), spread if spread > 0 else 1.0, is_log)


def encoding_of(entry: Mapping[str, Any]) -> Encoding:
    """Return the encoding of a number from its entry in vocabulary.json.

    Raises:
        TypeError, ValueError: when it describes none.
    """
    if "edges" in entry:
        buckets: Buckets = typed(Buckets, entry)
        if any(low >= high for low, high in zip(buckets.edges, buckets.edges[1:], strict=False)):
            raise ValueError("its edges do not rise")
        return buckets
    scale: Scale = typed(Scale, entry)
    if not scale.spread > 0:
        raise ValueError("its spread is not above 0")
    return scale


@dataclass
class WrittenFeatures:
    """Features written so far.

    tables: their tables; numbers: the dense numbers; left_out: features that the files do not have;
    vocabulary: the content of vocabulary.json.
    """

    tables: list[Table] = field(default_factory=list)
    numbers: list[Feature] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    vocabulary: dict[str, Any] = field(default_factory=dict)
    # The vocabulary of earlier columns of a stream, or of all parts of the data, which applies.
    known: Mapping[str, Any] = field(default_factory=dict)
    # True if `known` has all values of features with ids too; those of a stream grow.
    has_ids: bool = False

    def held(self, feature: Feature) -> Any:
        """Return the known values, or the encoding, of a feature; None to take those of the data."""
        return None if feature.is_dynamic and not self.has_ids else self.known.get(feature.name)

    def lacks(self, feature: Feature) -> bool:
        """True if earlier columns exist and lack this feature: the model has no table for it."""
        return bool(self.known) and feature.name not in self.known


def write_features(
    folder: Path,
    entities: Mapping[str, tuple[pandas.DataFrame, np.ndarray]],
    schema: Schema,
    known: Mapping[str, Any] | None = None,
    has_ids: bool = False,
) -> WrittenFeatures:
    """Write the features of all users and items.

    A table has a row for each value in the training events, and row 0 for any other: an untrained row would
    be noise in the test. entities: users and items, and the positions of those with training events; known:
    vocabulary.json of earlier columns or of all parts, which applies to its features; has_ids: see
    `WrittenFeatures`.
    """
    written = WrittenFeatures(known=known or {}, has_ids=has_ids)
    for entity, (frame, trained) in entities.items():
        own = FeatureArrays()
        for feature in _features_of(entity, schema):
            if feature.column not in frame or written.lacks(feature):
                written.left_out.append(feature.name)
            elif feature.number:
                column = frame[feature.column]
                values = (
                    column.to_numpy(np.float64)
                    if feature.width == 1
                    else np.array(column.tolist(), np.float32).reshape(-1, feature.width)
                )
                # One scale for all numbers of a vector, and for all items: newer events alone do not change
                # it, and a projection stays right.
                fitted = values[trained] if feature.width == 1 else values.reshape(-1)
                encoding = _add_number(written, feature, fitted)
                _kind_of(encoding, own).extend(np.atleast_2d(encoding.encode(values).T))
            elif feature.multi:
                own.lists.append(_add_lists(folder, written, feature, frame[feature.column], trained))
            else:
                own.features.append(_add_categories(written, feature, frame[feature.column], trained))
        write_records(folder / f"{schema.name_of(entity)}_features.npy", {}, own)
    return written


def features_of_events(
    folder: Path, written: WrittenFeatures, events: Events, order: np.ndarray, num_train: int, schema: Schema
) -> FeatureArrays:
    """Return the features of all events, in the order in which they are stored, in unnamed files.

    Adds them to `written`. order: int [events]; the first `num_train` are for training.
    """
    own = FeatureArrays()
    for feature in _features_of(EVENT, schema):
        values = events.features.get(feature.column)
        if values is None or written.lacks(feature):
            # The days of users are computed; a note says already why there are none.
            if values is not None or feature.column != USER_DAY:
                written.left_out.append(feature.name)
        elif isinstance(values, Codes):
            table = _add_codes(written, feature, values, order[:num_train])
            own.features.append(_encoded(folder, values.codes, order, table.__getitem__))
        else:
            trained = gather(values, order[:num_train], np.empty(num_train, np.float32))
            encoding = _add_number(written, feature, trained)
            _kind_of(encoding, own).append(_encoded(folder, values, order, encoding.encode))
    return own


def _kind_of(encoding: Encoding, own: FeatureArrays) -> list[np.ndarray]:
    """Return the list for a number with this encoding: the table rows or the dense numbers."""
    return own.features if isinstance(encoding, Buckets) else own.numbers


def _encoded(
    folder: Path, values: np.ndarray, order: np.ndarray, encode: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """Encode a column of the events, in the order in which they are stored: table rows or scaled numbers."""
    encoded = temporary(folder, len(order), encode(values[:0]).dtype)
    for part in chunks(len(order), encoded):
        encoded[part] = encode(values[order[part]])
    release(values)
    return encoded


def write_vocabulary(folder: Path, written: WrittenFeatures) -> None:
    """Write vocabulary.json, and the ids of dynamic features."""
    (folder / "vocabulary.json").write_text(json.dumps(written.vocabulary, allow_nan=False))
    for name in (table.name for table in written.tables if table.feature.is_dynamic):
        values = written.vocabulary[name]
        ids = ids_of(values)
        check_distinct(name, values, ids)
        np.save(folder / f"{name}_ids.npy", np.concatenate([[UNKNOWN_ID], ids]))


def _features_of(entity: str, schema: Schema) -> list[Feature]:
    # Features with lists last, so that all others are joined at once.
    ordered = sorted(schema.features, key=lambda feature: feature.multi)
    return [feature for feature in ordered if feature.entity == entity]


def _add_number(written: WrittenFeatures, feature: Feature, trained: np.ndarray) -> Encoding:
    """Add a number to `written` and return its encoding. trained: training values, float [n]."""
    held = written.held(feature)
    encoding = fit(trained, feature.number) if held is None else encoding_of(held)
    written.vocabulary[feature.name] = asdict(encoding)
    if isinstance(encoding, Buckets):
        written.tables.append(Table(feature, encoding.rows))
    else:
        written.numbers.append(feature)
    return encoding


def _add_categories(
    written: WrittenFeatures, feature: Feature, values: pandas.Series, trained: np.ndarray, longest: int = 1
) -> np.ndarray:
    """Add a feature of categories to `written` and return the table rows of its values, int32."""
    held = written.held(feature)
    # A dynamic table inserts values when they come, so all of them have a number here.
    shown = values if feature.is_dynamic else values.loc[trained]
    check_kind(feature.column, written.known.get(feature.name), shown.dropna().to_numpy())
    known = np.unique(shown.dropna()) if held is None else np.array(held)
    # Sorted by np.unique: the same data have the same rows on every machine.
    written.vocabulary[feature.name] = known.tolist()
    written.tables.append(Table(feature, len(known) + 1, longest))
    return _rows_of(values, known)


def _add_lists(
    folder: Path, written: WrittenFeatures, feature: Feature, column: pandas.Series, trained: np.ndarray
) -> np.ndarray:
    """Write a feature with lists; return the begin of each list and its length, int32 [n, 2]."""
    counts = column.str.len().clip(lower=1).to_numpy(np.int32)
    # An empty list gets the unknown row: no list is empty.
    rows = _add_categories(written, feature, column.explode(), trained, int(counts.max(initial=0)))
    if len(rows) > MOST:
        raise UserError(
            f"The lists of {feature.name} hold {len(rows):,} values, and {MOST:,} is the limit; leave "
            "the feature out, or shorten its lists."
        )
    np.save(folder / f"{feature.name}_values.npy", rows)
    return np.stack([np.cumsum(counts) - counts, counts], axis=1).astype(np.int32)


def _add_codes(written: WrittenFeatures, feature: Feature, values: Codes, trained: np.ndarray) -> np.ndarray:
    """Add a category of events; return the table row of each of its codes, int32, last that of code -1."""
    if feature.is_dynamic:
        known = np.arange(len(values.values))
    else:
        parts = [np.unique(values.codes[trained[part]]) for part in chunks(len(trained))]
        # A segment of a stream may be empty.
        known = np.unique(np.concatenate([values.codes[:0], *parts]))
        known = known[known >= 0]
    raw, rows = [values.values[code] for code in known.tolist()], np.arange(len(known)) + UNKNOWN_ROW + 1
    if (held := written.held(feature)) is not None:
        row_of = {value: row for row, value in enumerate(held, start=UNKNOWN_ROW + 1)}
        raw, rows = held, np.array([row_of.get(value, UNKNOWN_ROW) for value in raw], np.int64)
    written.vocabulary[feature.name] = raw
    written.tables.append(Table(feature, len(raw) + 1))
    row_of_code = np.full(len(values.values) + 1, UNKNOWN_ROW, np.int32)
    row_of_code[known] = rows
    return row_of_code


def _rows_of(values: pandas.Series, known: np.ndarray) -> np.ndarray:
    """Table rows, int32: 1 and up for the known values, 0 for others (get_indexer returns -1 for those)."""
    import pandas

    return (pandas.Index(known).get_indexer(pandas.Index(values)) + 1).astype(np.int32)
