"""The table of features: what the model is told about a user and a movie.

Parsing, batches, embedding tables and tests all derive from `FEATURES`; adding a feature is one line
here, if the files have its column. Knows numbers and names only, so a data worker may import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recsuite.errors import UserError

# Row 0 of every table stands for "unknown": a value that the training ratings never show.
UNKNOWN_ROW = 0
# What a rating joins, in the order of its columns. The feature that has an entity's name, wherever it stands
# in the table, tells its users or movies apart: it is the one that a history holds and that a ranking finds.
ENTITIES = ("user", "movie")


@dataclass(frozen=True)
class Feature:
    """One property of a user or of a movie, with an embedding table of its own.

    The name is the key in the KeyedJaggedTensor and the name of the table; the column is where the
    parsed files keep the raw values, hashable and of one type (lists of them when multi).
    """

    name: str
    entity: str
    column: str
    multi: bool = False


FEATURES = (
    Feature("user", "user", "user_id"),
    Feature("gender", "user", "gender"),
    Feature("age", "user", "age"),
    Feature("occupation", "user", "occupation"),
    Feature("movie", "movie", "movie_id"),
    Feature("year", "movie", "year"),
    Feature("genres", "movie", "genres", multi=True),
)


# What --history adds: the movies that the user rated before, each with the rating it got. Its values are rows
# like those of the feature "movie", in a table of their own.
HISTORY = Feature("history", "history", "movie_id", multi=True)


def place_of_identity(entity: str, features: Sequence[Feature]) -> int:
    """Where, among an entity's features with one value, the one is that tells its users or movies apart.

    Raises:
        UserError: when there is none.
    """
    names = [feature.name for feature in features if feature.entity == entity and not feature.multi]
    if entity not in names:
        raise UserError(
            f"The table of features has {', '.join(names) or 'nothing'} for a {entity}, and not the feature "
            f'"{entity}" itself; put it back into FEATURES in features.py.'
        )
    return names.index(entity)


def vocabulary_of(table: str) -> str:
    """The feature whose raw values the rows of a table stand for: a history has those of the movies."""
    return "movie" if table == HISTORY.name else table


@dataclass(frozen=True)
class Table:
    """A feature as one data set shows it: how many rows its table has, row 0 included.

    longest: the most values that one rating has of it.
    """

    feature: Feature
    rows: int
    longest: int = 1

    @property
    def name(self) -> str:
        """The feature's name, which is also the table's."""
        return self.feature.name
