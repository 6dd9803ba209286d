"""Small sets of ratings in the CSV files of MovieLens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

Rating = tuple[int, int, float, int]


def write_ratings(folder: Path, ratings: Iterable[Rating]) -> None:
    """Write user, movie, stars and time of each rating, and a table of their movies."""
    ratings = list(ratings)
    folder.mkdir(exist_ok=True)
    lines = ["userId,movieId,rating,timestamp", *(",".join(map(str, rating)) for rating in ratings)]
    (folder / "ratings.csv").write_text("\n".join(lines) + "\n")
    movies = sorted({movie for _, movie, _, _ in ratings})
    titles = ["movieId,title,genres", *(f"{movie},Title (1990),Drama" for movie in movies)]
    (folder / "movies.csv").write_text("\n".join(titles) + "\n")
