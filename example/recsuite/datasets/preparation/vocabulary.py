"""What the raw values of features become: table rows, or inputs on a common scale.

Known from the training events alone, and kept with a model, so that what serves it does the same:
vocabulary.json has for a feature of categories its raw values, in the order of their table rows 1, 2, ...,
and for a number the edges of its buckets, or its scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.datasets.preparation.arrays.mapped import MOST, chunks, create_column, gather, release
from recsuite.datasets.schema import DENSE, EVENT, UNKNOWN_ROW, Codes, Events, Feature, Schema, Table
from recsuite.errors import UserError
from recsuite.records import typed

if TYPE_CHECKING:
    import pandas

# Rows of a number's table: quantiles, each of which has as many values of the training as any other.
NUM_BUCKETS = 32
# A number whose mean lies so many standard deviations above its median is taken by its logarithm.
SKEWED = 0.2
# Quantiles are those of so many values at most, evenly taken: their error is below a thousandth.
MOST_FITTED = 2**20


@dataclass(frozen=True)
class Buckets:
    """Quantiles: a value from edge n - 1 up to below edge n has row n + 1; without a value row 0."""

    edges: tuple[float, ...]

    @property
    def rows(self) -> int:
        """How many rows the table has."""
        return len(self.edges) + 2

    def encode(self, values: np.ndarray) -> np.ndarray:
        """Table rows, int32 [n], of numbers, float [n]; NaN where there is none."""
        rows = np.searchsorted(np.array(self.edges), rounded(values), side="right") + UNKNOWN_ROW + 1
        return np.where(np.isnan(values), UNKNOWN_ROW, rows).astype(np.int32)


@dataclass(frozen=True)
class Scale:
    """A number less its mean, divided by its spread; taken by log(1 + x) first when it is skewed."""

    mean: float
    spread: float
    is_log: bool

    def encode(self, values: np.ndarray) -> np.ndarray:
        """What the model receives, float32 [n]; NaN where there is no value."""
        # A value below the training's range has a logarithm too.
        values = rounded(values)
        values = np.log1p(np.maximum(values, 0.0)) if self.is_log else values
        scaled: np.ndarray = ((values - self.mean) / self.spread).astype(np.float32)
        return scaled


Encoding = Buckets | Scale
# A column of the events, and what makes table rows or scaled numbers of some of its values.
_Encoded = tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]


def rounded(values: np.ndarray) -> np.ndarray:
    """Numbers as precise as columns have them, and in their range, float64 [n]."""
    # A column of events has 32 bits, and a caller's number 64: what lies on an edge must lie there for both.
    limit = np.finfo(np.float32).max
    return values.astype(np.float64).clip(-limit, limit).astype(np.float32).astype(np.float64)


def fit(values: np.ndarray, number: str) -> Encoding:
    """The encoding of a number, of the training's values, float [n], NaN where there is none."""
    values = rounded(values[:: -(-len(values) // MOST_FITTED) or 1])
    values = values[~np.isnan(values)]
    if number == DENSE:
        return _fit_scale(values)
    if len(values) == 0:
        return Buckets(())
    # Each edge is a value that occurs, so rounding decides nothing.
    shares = np.arange(1, NUM_BUCKETS) / NUM_BUCKETS
    edges = np.unique(np.quantile(values, shares, method="higher"))
    # Below the lowest edge lies nothing: it is the minimum.
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


def encoding_of(found: Mapping[str, Any]) -> Encoding:
    """The encoding of a number, of what vocabulary.json has for it.

    Raises:
        TypeError, ValueError: when it describes none.
    """
    if "edges" in found:
        buckets: Buckets = typed(Buckets, found)
        if any(low >= high for low, high in zip(buckets.edges, buckets.edges[1:], strict=False)):
            raise ValueError("its edges do not rise")
        return buckets
    scale: Scale = typed(Scale, found)
    if not scale.spread > 0:
        raise ValueError("its spread is not above 0")
    return scale


@dataclass
class Written:
    """What is known of the features so far: their tables, the dense numbers among them, those that the files
    do not have, and what vocabulary.json is to say.
    """

    tables: list[Table] = field(default_factory=list)
    numbers: list[Feature] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    vocabulary: dict[str, Any] = field(default_factory=dict)


def write_features(
    folder: Path, entities: Mapping[str, tuple[pandas.DataFrame, np.ndarray]], schema: Schema
) -> Written:
    """Write what all users and items have of their features, those with table rows and the dense numbers.

    A table has a row for each value that the training events show, and row 0 for any other: a row that
    training never touches would be noise in the test. entities: users and items, and the positions of those
    that the training has.
    """
    written = Written()
    for entity, (frame, trained) in entities.items():
        rows: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        for feature in _features_of(entity, schema):
            if feature.column not in frame:
                written.left_out.append(feature.name)
            elif feature.number:
                values = frame[feature.column].to_numpy(np.float64)
                encoding = _add_number(written, feature, values[trained])
                (rows if isinstance(encoding, Buckets) else numbers).append(encoding.encode(values))
            else:
                rows += _add_categories(folder, written, feature, frame[feature.column], trained)
        name = schema.name_of(entity)
        np.save(folder / f"{name}_features.npy", np.stack(rows, axis=1))
        if numbers:
            np.save(folder / f"{name}_numbers.npy", np.stack(numbers, axis=1))
    return written


def write_event_features(
    folder: Path, written: Written, events: Events, order: np.ndarray, num_train: int, schema: Schema
) -> None:
    """Write what all events have of their own features, in the order in which they are stored; adds to what
    was `written`. order: int [events]; the first `num_train` are for training.
    """
    rows: list[_Encoded] = []
    numbers: list[_Encoded] = []
    for feature in _features_of(EVENT, schema):
        values = events.features.get(feature.column)
        if values is None:
            written.left_out.append(feature.name)
        elif isinstance(values, Codes):
            table = _add_codes(written, feature, values, order[:num_train])
            rows.append((values.codes, table.__getitem__))
        else:
            trained = gather(values, order[:num_train], np.empty(num_train, np.float32))
            encoding = _add_number(written, feature, trained)
            (rows if isinstance(encoding, Buckets) else numbers).append((values, encoding.encode))
    for name, columns, dtype in (("features", rows, np.int32), ("numbers", numbers, np.float32)):
        if columns:
            _write_encoded(folder / f"{EVENT}_{name}.npy", columns, order, dtype)


def _write_encoded(path: Path, columns: Sequence[_Encoded], order: np.ndarray, dtype: type) -> None:
    """Write columns of the events side by side, in the order in which events are stored."""
    table = create_column(path, (len(order), len(columns)), dtype)
    for place, (values, encode) in enumerate(columns):
        for part in chunks(len(order), table):
            table[part, place] = encode(values[order[part]])
        release(values)


def write_vocabulary(folder: Path, written: Written) -> None:
    """Write what table rows and scaled numbers stand for."""
    (folder / "vocabulary.json").write_text(json.dumps(written.vocabulary))


def _features_of(entity: str, schema: Schema) -> list[Feature]:
    # Those with lists last, so that all others are joined at once.
    ordered = sorted(schema.features, key=lambda feature: feature.multi)
    return [feature for feature in ordered if feature.entity == entity]


def _add_number(written: Written, feature: Feature, trained: np.ndarray) -> Encoding:
    """Add a number to what is known, and say how it is encoded. trained: of the training, float [n]."""
    encoding = fit(trained, feature.number)
    written.vocabulary[feature.name] = asdict(encoding)
    if isinstance(encoding, Buckets):
        written.tables.append(Table(feature, encoding.rows))
    else:
        written.numbers.append(feature)
    return encoding


def _add_categories(
    folder: Path, written: Written, feature: Feature, column: pandas.Series, trained: np.ndarray
) -> list[np.ndarray]:
    """The columns that a feature of categories takes in a file of rows, int32; writes the values of lists."""
    values = column.explode() if feature.multi else column
    known = np.unique(values.loc[trained].dropna())
    # Sorted, as np.unique gives them: the same data have the same rows on every machine.
    written.vocabulary[feature.name] = known.tolist()
    positions = _rows_of(values, known)
    if not feature.multi:
        written.tables.append(Table(feature, len(known) + 1))
        return [positions]
    # An item without a value has the value "unknown": no list is empty.
    if len(positions) > MOST:
        raise UserError(
            f"The lists of {feature.name} hold {len(positions):,} values, and {MOST:,} is the limit; leave "
            "the feature out, or shorten its lists."
        )
    counts = column.str.len().clip(lower=1).to_numpy(np.int32)
    np.save(folder / f"{feature.name}_values.npy", positions)
    written.tables.append(Table(feature, len(known) + 1, int(counts.max())))
    return [(np.cumsum(counts) - counts).astype(np.int32), counts]


def _add_codes(written: Written, feature: Feature, values: Codes, trained: np.ndarray) -> np.ndarray:
    """Add a category of events to what is known; the table row of each of its codes, int32, of which the last
    is that of the code -1. trained: the places of the events of the training.
    """
    parts = [np.unique(values.codes[trained[part]]) for part in chunks(len(trained))]
    known = np.unique(np.concatenate(parts))
    known = known[known >= 0]
    written.vocabulary[feature.name] = [values.values[code] for code in known.tolist()]
    written.tables.append(Table(feature, len(known) + 1))
    rows = np.full(len(values.values) + 1, UNKNOWN_ROW, np.int32)
    rows[known] = np.arange(len(known), dtype=np.int32) + UNKNOWN_ROW + 1
    return rows


def _rows_of(values: pandas.Series, known: np.ndarray) -> np.ndarray:
    """Table rows, int32: 1 and up for the known values, 0 for others (get_indexer says -1 for those)."""
    import pandas

    return (pandas.Index(known).get_indexer(pandas.Index(values)) + 1).astype(np.int32)
