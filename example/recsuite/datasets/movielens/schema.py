"""The table of features of MovieLens: what a model learns about a user and a movie.

Parsing, batches, embedding tables and tests all derive from it; adding a feature is one line here, if the
files have its column.
"""

from __future__ import annotations

from recsuite.datasets.schema import ITEM, USER, Feature, Schema

SCHEMA = Schema(
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
    # Four stars count as a recommendation.
    liked_label=4.0,
)
