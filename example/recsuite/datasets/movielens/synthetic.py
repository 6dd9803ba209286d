"""A synthetic MovieLens in ml-1m's own format, drawn from planted parameters.

Every user and movie has a bias and a few factors, partly explained by the user's demographics and by the
movie's genres, year and popularity. A rating is their score plus noise, clipped and rounded to 1..5. Since
the parameters are known, so is the best possible prediction: the files carry it as the oracle.

    folder/ratings.dat   UserID::MovieID::Rating::Timestamp, sorted by user
           movies.dat    MovieID::Title (Year)::Genre|Genre, ISO-8859-1
           users.dat     UserID::Gender::Age::Occupation::Zip
           oracle.npy    float32 [num_ratings], the expected rating of each line of ratings.dat
           oracle.json   {"rmse", "num_ratings", "num_users", "num_movies", "seed", "format"}

Of a world that moves, oracle.json has its name too, and first_day.npy, in the form of the oracle, the
expectations that the parameters of the first day give. Of one whose users choose by taste, oracle.json has
its name, "biases_rmse" and "choices_rmse", and biases.npy and choices.npy have the expectations of who knows
no factors, and of who reads them off the choices. Of one with an order, oracle.json has its name and
"entropy", and ranks.npy and surprise.npy say how well each rating's movie could be foreseen.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import BinaryIO

import numpy as np

from recsuite.datasets.movielens.worlds.chain import ChainWorld
from recsuite.datasets.movielens.worlds.moving import MovingWorld
from recsuite.datasets.movielens.worlds.world import (
    DEFAULT_WORLD,
    MOVIE_BIAS_STD,
    MOVIE_EXPLAINED,
    USER_BIAS_STD,
    USER_EXPLAINED,
    World,
    draw_counts,
    standardized,
    with_unknown,
)
from recsuite.errors import UserError
from recsuite.files import explained, remove, written_aside
from recsuite.runtime.progress_bar import stage

FORMAT = 1
# By what --world calls them.
WORLDS = {world.NAME: world for world in (DEFAULT_WORLD, MovingWorld(), ChainWorld())}
MIN_NUM_RATINGS = 1_000

# ml-1m's genres, and the percentage of its movies that carry each.
GENRES = (
    "Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical "
    "Mystery Romance Sci-Fi Thriller War Western"
)
GENRE_PERCENTAGES = (13, 7, 3, 6, 31, 5, 3, 41, 2, 1, 9, 3, 3, 12, 7, 13, 4, 2)
# ml-1m's age codes, and the percentage of its users in each.
AGES = {1: 4, 18: 18, 25: 35, 35: 20, 45: 9, 50: 8, 56: 6}
SHARE_OF_MEN = 0.72
NUM_OCCUPATIONS = 21
# Real titles have accents, commas and colons too, and a reader has to survive them.
TITLE_HEADS = (
    "Silent Last Broken Golden Am\u00e9lie's Hidden Distant Crimson Lonely Electric Forgotten Se\u00f1or's "
    "Velvet Burning Frozen Wandering Paper Midnight Hollow Fran\u00e7ois' Iron Little Scarlet Restless"
)
TITLE_NOUNS = (
    "Harbor River Garden City Caf\u00e9 Station Winter Letter Stranger Mirror Dragon Orchard Ni\u00f1o "
    "Witness Horizon Promise Empire Shadow Voyage M\u00e4rchen Island Parade Engine Lullaby Verdict Circus"
)
TITLE_TAILS = ("", ", The", " II", ": The Return", ", A", " and Daughter", ": Part One", " in Love")
# Prime to the number of titles, so that neighbours in movies.dat do not look alike.
TITLE_STRIDE = 1009
LAST_YEAR = 2000
FIRST_YEAR = 1919
MEAN_MOVIE_AGE = 14.0
SHARE_OF_ID_GAPS = 0.02
# The chance to be picked grows like exp(POPULARITY_SLOPE * rank / num_movies), which gives the top tenth more
# than half of the ratings; the share that is spread evenly gets the rare movies a few.
POPULARITY_SLOPE = 11.0
UNIFORM_SHARE = 0.06


def write_synthetic(folder: Path, num_ratings: int, seed: int, world: World = DEFAULT_WORLD) -> None:
    """Write the synthetic data set; the same arguments give the same bytes.

    The folder appears complete or not at all: the files are written to `.<folder>.partial`, which is renamed
    at the end and removed on failure. Only one process may do this at a time.

    Args:
        folder: the folder to create, with its parents; must not hold files.
        num_ratings: lines of ratings.dat, at least 1,000.
        seed: 0 or more.
        world: what the ratings are drawn from.

    Raises:
        ValueError: if there are too few ratings to give every user enough movies to choose from.
        UserError: if the folder cannot be written.
    """
    if num_ratings < MIN_NUM_RATINGS:
        raise ValueError(f"num_ratings is {num_ratings}, but must be at least {MIN_NUM_RATINGS}")
    # A name that is known, unlike one of this process alone, so that the next start finds what a killed one
    # left.
    partial = folder.with_name(f".{folder.name}.partial")
    advice = "make room there, or name another folder with --data_path"
    explaining = explained(f"The synthetic data set cannot be written to {folder}", advice)
    with explaining, written_aside(folder, partial):
        # A killed process may have left one.
        remove(partial)
        partial.mkdir(parents=True)
        _write_files(partial, num_ratings, seed, world)


def check_synthetic(folder: Path, num_ratings: int, seed: int, world: str) -> None:
    """Refuse a folder that does not hold what `write_synthetic` writes. world: its name.

    Raises:
        UserError: says what was asked for.
    """
    oracle = folder / "oracle.json"
    try:
        found = json.loads(oracle.read_bytes()) if oracle.is_file() else {}
    # A damaged one describes no ratings.
    except ValueError:
        found = {}
    wanted = {"num_ratings": num_ratings, "seed": seed, "world": world}
    if not isinstance(found, dict) or not wanted.items() <= {"world": World.NAME, **found}.items():
        raise UserError(
            f"{folder} holds other ratings than --synthetic_ratings {num_ratings} --seed {seed} --world "
            f"{world}; give another --data_path, or leave --dataset out to read what lies there."
        )


def _write_files(folder: Path, num_ratings: int, seed: int, world: World) -> None:
    # Smaller sets get less active users, or the few of them would have to rate the whole catalogue.
    ratings_per_user = min(max(25.0, math.sqrt(num_ratings) / 4), world.mean_ratings_per_user)
    num_users, num_movies = round(num_ratings / ratings_per_user), round(3.9 * math.sqrt(num_ratings))
    movies, movie_ids, picks = _write_movies(folder / "movies.dat", num_movies, world, _generator(seed, 1))
    users = _write_users(folder / "users.dat", num_users, world, _generator(seed, 2))
    rng = _generator(seed, 3)
    counts = draw_counts(rng, num_ratings, num_users, num_movies)
    blocks = world.draw(rng, users, movies, counts, picks)
    oracles, done = np.empty((len(world.ORACLES), num_ratings), np.float32), 0
    stars, squared_error = np.empty(num_ratings, np.int8), 0.0
    drawing = stage("drawing synthetic ratings", num_ratings, "ratings")
    with (folder / "ratings.dat").open("wb") as file, drawing as reached:
        for user_rows, movie_rows, ratings, times, *expected in blocks:
            _append_lines(file, [user_rows + 1, movie_ids[movie_rows], ratings, times])
            oracles[:, done : done + len(ratings)] = expected
            stars[done : done + len(ratings)] = ratings
            done += len(ratings)
            reached(done)
            squared_error += float(np.square(ratings - expected[0], dtype=np.float64).sum())
    for name, column in zip(world.ORACLES, oracles, strict=True):
        np.save(folder / f"{name}.npy", column)
    summary = {
        # Rounded, since another machine may add up in another order.
        "rmse": round(math.sqrt(squared_error / num_ratings), 9),
        "num_ratings": num_ratings,
        "num_users": num_users,
        "num_movies": num_movies,
        "seed": seed,
        "format": FORMAT,
        # The name of the first world goes without saying: its files are older than any other.
        **({} if world.NAME == World.NAME else {"world": world.NAME}),
        **world.describe(stars, oracles),
    }
    (folder / "oracle.json").write_text(
        json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="ascii", newline="\n"
    )


def _generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, purpose]))


def _append_lines(file: BinaryIO, columns: list[np.ndarray]) -> None:
    """Write `::`-separated lines: pyarrow's delimiter is one character, so empty columns stand between."""
    import pyarrow
    from pyarrow import csv

    empty = pyarrow.nulls(len(columns[0]))
    spaced = [part for column in columns for part in (empty, pyarrow.array(column))][1:]
    table = pyarrow.table(spaced, names=[str(place) for place in range(len(spaced))])
    csv.write_csv(table, file, csv.WriteOptions(include_header=False, delimiter=":", quoting_style="none"))


def _write_movies(
    path: Path, num_movies: int, world: World, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write movies.dat.

    Returns:
        Planted parameters, float64 [num_movies, 1 + rank], the bias first; ids, int64 [num_movies];
        cumulative chance to be picked, float64 [num_movies].
    """
    ids = np.cumsum(1 + (rng.random(num_movies) < SHARE_OF_ID_GAPS))
    years = np.maximum(LAST_YEAR - rng.exponential(MEAN_MOVIE_AGE, num_movies).astype(np.int64), FIRST_YEAR)
    names = GENRES.split()
    has_genre = rng.random((num_movies, len(names))) < np.array(GENRE_PERCENTAGES) / 100
    has_genre[~has_genre.any(axis=1), names.index("Drama")] = True
    with path.open("w", encoding="latin-1", newline="\n") as file:
        for row, (movie_id, year) in enumerate(zip(ids, years, strict=True)):
            genres = "|".join(genre for genre, has in zip(names, has_genre[row], strict=True) if has)
            file.write(f"{movie_id}::{_title(row)} ({year})::{genres}\n")

    popularity = rng.permutation(num_movies) / num_movies
    skewed = np.exp(POPULARITY_SLOPE * popularity)
    chances = (1 - UNIFORM_SHARE) * skewed / skewed.sum() + UNIFORM_SHARE / num_movies
    known = has_genre @ rng.standard_normal((len(names), 1 + world.rank))
    known /= np.sqrt(has_genre.sum(axis=1, keepdims=True))
    known += standardized(years)[:, None] * rng.standard_normal(1 + world.rank) / 2
    known[:, 0] += standardized(popularity)
    parameters = with_unknown(rng, known, MOVIE_EXPLAINED)
    # Centered over ratings rather than movies, so that liked popular movies do not shift the mean rating.
    parameters[:, 0] = MOVIE_BIAS_STD * (parameters[:, 0] - chances @ parameters[:, 0])
    return parameters, ids, np.cumsum(chances)


def _title(row: int) -> str:
    row, tail = divmod(row * TITLE_STRIDE, len(TITLE_TAILS))
    heads, nouns = TITLE_HEADS.split(), TITLE_NOUNS.split()
    row, noun = divmod(row, len(nouns))
    return f"{heads[row % len(heads)]} {nouns[noun]}{TITLE_TAILS[tail]}"


def _write_users(path: Path, num_users: int, world: World, rng: np.random.Generator) -> np.ndarray:
    """Write users.dat; returns the planted parameters, float64 [num_users, 1 + rank], the bias first."""
    is_man = (rng.random(num_users) < SHARE_OF_MEN).astype(np.int64)
    age_rows = np.repeat(np.arange(len(AGES)), list(AGES.values()))[rng.integers(100, size=num_users)]
    occupations = rng.integers(NUM_OCCUPATIONS, size=num_users)
    zips = np.char.zfill(rng.integers(100_000, size=num_users).astype(str), 5)
    with path.open("wb") as file:
        genders, ages = np.array(["F", "M"])[is_man], np.array(list(AGES))[age_rows]
        _append_lines(file, [np.arange(1, num_users + 1), genders, ages, occupations, zips])

    known = np.zeros((num_users, 1 + world.rank))
    for size, rows in ((2, is_man), (len(AGES), age_rows), (NUM_OCCUPATIONS, occupations)):
        known += rng.standard_normal((size, 1 + world.rank))[rows]
    return with_unknown(rng, known, USER_EXPLAINED) * (USER_BIAS_STD, *world.factor_stds)
