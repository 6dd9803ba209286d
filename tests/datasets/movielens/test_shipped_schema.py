"""The schema of MovieLens, which is a file like that of any other tables."""

from __future__ import annotations

from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.schema import ITEM, USER, Feature, Schema

# Columns, checkpoints and exports are of this one: a difference would refuse all that were written before.
WRITTEN_BEFORE = Schema(
    features=(
        Feature("user", USER, "user_id"),
        Feature("gender", USER, "gender"),
        Feature("age", USER, "age"),
        Feature("occupation", USER, "occupation"),
        Feature("movie", ITEM, "movie_id"),
        Feature("year", ITEM, "year"),
        Feature("genres", ITEM, "genres", multi=True),
    ),
    user="user",
    item="movie",
    title="title",
    label="rating",
    lowest_label=0.5,
    highest_label=5.0,
    liked_label=4.0,
    label_kind="rating",
)


def test_the_shipped_schema_equals_the_recorded_one() -> None:
    assert SCHEMA == WRITTEN_BEFORE
