"""Synthetic MovieLens in ml-1m's own format, drawn from planted parameters.

Every user and movie has a bias and one or a few factors, partly explained by the user's demographics and by
the movie's genres, year and popularity. A rating is their score plus noise, clipped and rounded to 1..5. The
parameters are known, and so is the best possible prediction: the files contain it as the oracle.

    folder/ratings.dat   UserID::MovieID::Rating::Timestamp, sorted by user
           movies.dat    MovieID::Title (Year)::Genre|Genre, ISO-8859-1
           users.dat     UserID::Gender::Age::Occupation::Zip
           oracle.npy    float32 [num_ratings], the expected rating of each line of ratings.dat
           ranks.npy     float32 [num_ratings], the place of its movie in the best possible ranking
           oracle.json   {"rmse", "num_ratings", "num_users", "num_movies", "seed", "format", "world"}

Which movie a user takes depends on the movie before it and on the user's favourite clusters, see
`choices.py`. So the best possible ranking of the movies that the user has not had is known too. Clusters have
nothing to do with biases and factors: choices tell nothing about stars. The ratings of a user are in the
order of the choices, each later than the one before.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import numpy as np

from recsuite.datasets.movielens.choices import draw_clusters
from recsuite.errors import UserError
from recsuite.files import explained, remove, replacing
from recsuite.hooks import WORLDS, extra
from recsuite.runtime.console import stage

MIN_RATINGS_PER_USER = 20
# Spread of the log-normal activity: half of the users rate fewer than 100 movies, a few rate a thousand.
ACTIVITY_SIGMA = 1.2
# Shares of the variance that the side features explain: enough to be worth having, not enough alone.
USER_EXPLAINED = 0.5
MOVIE_EXPLAINED = 0.7
# Scores lie on this grid, so the oracle is a table, and another machine's last bits change no byte.
SCORE_STEPS = 256
MIN_SCORE, MAX_SCORE = -3, 9

# From 2000-04-25 to 2003-02-28, in seconds since 1970, UTC.
FIRST_TIME = 956_620_800
LAST_TIME = 1_046_390_400
SESSION_SECONDS = 3600
# A user's first session lies in this first part of the period and the others anywhere after it, so that the
# users of the newest ratings have older ones to learn from.
JOIN_PERIOD = 0.6
SESSIONS = 6
# Limits the memory. Part of the format, because it determines the order of the random numbers.
USERS_PER_BLOCK = 4096


class Planted(NamedTuple):
    """Parameters of users and movies, from which ratings are drawn.

    users, movies: float64 [users or movies, 1 + rank], the bias first; counts: ratings of each user, int64
    [users]; picks: cumulative chance of the movies, float64 [movies].
    """

    users: np.ndarray
    movies: np.ndarray
    counts: np.ndarray
    picks: np.ndarray


@dataclass(frozen=True)
class World:
    """Parameters of a stationary world, by default with as many users and movies as ml-1m.

    noise_std: of a rating around its score, in stars; mean_score: of the ratings; bias_stds: of the biases of
    users and of movies; factor_stds: of the user's side of each planted factor; mean_ratings_per_user,
    most_movies: of a large set; smaller sets have less.
    """

    NAME: ClassVar = "stationary"
    # Names of the files with predictions of each rating. The first one is the best possible prediction.
    ORACLES: ClassVar[tuple[str, ...]] = ("oracle", "ranks")

    noise_std: float = 0.9
    factor_stds: tuple[float, ...] = (0.65, 0.1, 0.06, 0.04)
    mean_ratings_per_user: float = 165
    most_movies: float = math.inf
    mean_score: float = 3.7
    bias_stds: tuple[float, float] = (0.48, 0.54)

    @property
    def rank(self) -> int:
        """Number of planted factors."""
        return len(self.factor_stds)

    def scores(self, users: np.ndarray, movies: np.ndarray) -> np.ndarray:
        """Return the scores of ratings by their parameters, float64 [ratings]."""
        return self.mean_score + users[:, 0] + movies[:, 0] + (users[:, 1:] * movies[:, 1:]).sum(axis=1)

    def draw(self, rng: np.random.Generator, planted: Planted) -> Iterator[tuple[np.ndarray, ...]]:
        """Yield user rows, movie rows, ratings, times and predictions of each of ORACLES, by blocks of users.

        Each is [ratings of a block].
        """
        users, movies, counts, picks = planted
        clusters = draw_clusters(rng, np.diff(picks, prepend=0))
        expected = expected_ratings(self)
        for begin in range(0, len(users), USERS_PER_BLOCK):
            block = counts[begin : begin + USERS_PER_BLOCK]
            rows = np.repeat(np.arange(len(block)), block)
            movie_rows, ranks = clusters.choose(rng, clusters.draw_tastes(rng, len(block)), block)
            times = in_order(rows, draw_times(rng, len(block), rows))
            steps = steps_of(self.scores(users[begin + rows], movies[movie_rows]))
            yield begin + rows, movie_rows, draw_stars(rng, steps, self), times, expected[steps], ranks

    def describe(self, ratings: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """Entries of oracle.json for this kind of world only.

        ratings: int8 [ratings]; predicted: predictions of each of ORACLES, float32 [oracles, ratings].
        """
        return {}


# At a million ratings: ml-1m's mean, spread and histogram, an RMSE of about 0.85 for the oracle and 1.0 for a
# model of biases alone. A bias and a factor are learned from the ratings of one row, and cost any model error
# in proportion to the number of rows. So there are fewer users and movies than in ml-1m, and one factor.
DEFAULT_WORLD = World(
    noise_std=0.88,
    factor_stds=(0.65,),
    mean_ratings_per_user=250,
    most_movies=1_750,
    mean_score=3.65,
    bias_stds=(0.4, 0.45),
)


def world_of(kind: str) -> World:
    """Return the world of a --synthetic_kind."""
    if kind == DEFAULT_WORLD.NAME:
        return DEFAULT_WORLD
    return getattr(extra(kind), WORLDS[kind])()


def with_unknown(rng: np.random.Generator, known: np.ndarray, explained: float) -> np.ndarray:
    """Columns of variance 1, of which `known` explains the given share."""
    unknown = rng.standard_normal(known.shape)
    return math.sqrt(explained) * standardized(known) + math.sqrt(1 - explained) * unknown


def standardized(columns: np.ndarray) -> np.ndarray:
    """Columns of mean 0 and variance 1."""
    return (columns - columns.mean(axis=0)) / columns.std(axis=0)


def draw_counts(rng: np.random.Generator, num_ratings: int, num_users: int, num_movies: int) -> np.ndarray:
    """Ratings of each user, int64 [num_users], with the sum num_ratings."""
    spare = num_ratings - MIN_RATINGS_PER_USER * num_users
    shares = np.exp(ACTIVITY_SIGMA * rng.standard_normal(num_users))
    # A user rates at most a third of the catalogue, or few movies would be left to draw.
    limit = (num_movies / 3 - MIN_RATINGS_PER_USER) / spare
    shares = np.minimum(shares / shares.sum(), limit)
    ends = np.rint(np.cumsum(shares / shares.sum()) * spare).astype(np.int64)
    return MIN_RATINGS_PER_USER + np.diff(ends, prepend=0)


def steps_of(scores: np.ndarray) -> np.ndarray:
    """Place of each score on the grid, int64 of any shape."""
    return np.rint((np.clip(scores, MIN_SCORE, MAX_SCORE) - MIN_SCORE) * SCORE_STEPS).astype(np.int64)


def draw_stars(rng: np.random.Generator, steps: np.ndarray, world: World) -> np.ndarray:
    """Draw ratings for scores at these places of the grid, int64 [n]."""
    noisy = MIN_SCORE + steps / SCORE_STEPS + world.noise_std * rng.standard_normal(len(steps))
    return np.rint(np.clip(noisy, 1, 5)).astype(np.int64)


def expected_ratings(world: World) -> np.ndarray:
    """Expected rating at each step of the score, float32 [steps].

    A rating is 1 plus the number of thresholds 1.5, 2.5, 3.5 and 4.5 below the noisy score, so its
    expectation is 1 plus the sum of their normal probabilities.
    """
    width = world.noise_std * math.sqrt(2)
    scores = np.arange(MIN_SCORE * SCORE_STEPS, MAX_SCORE * SCORE_STEPS + 1) / SCORE_STEPS
    above = [[math.erfc((half - score) / width) / 2 for half in (1.5, 2.5, 3.5, 4.5)] for score in scores]
    return (1 + np.sum(above, axis=1)).astype(np.float32)


def draw_times(rng: np.random.Generator, num_users: int, user_rows: np.ndarray) -> np.ndarray:
    """Draw the time of each rating, int64 [ratings], in seconds.

    Users join in the first part of the period and stay.
    """
    joined = JOIN_PERIOD * rng.random((num_users, 1))
    return draw_sessions(rng, joined, np.ones_like(joined), user_rows)


def draw_sessions(
    rng: np.random.Generator, joined: np.ndarray, left: np.ndarray, user_rows: np.ndarray
) -> np.ndarray:
    """Draw the time of each rating, int64 [ratings], in seconds.

    A user has a few sessions, the first one with the most ratings.

    joined, left: of each user, as shares of the period, float64 [users, 1].
    """
    later = joined + (left - joined) * rng.random((len(joined), SESSIONS - 1))
    sessions = np.concatenate([joined, later], axis=1) * (LAST_TIME - FIRST_TIME - SESSION_SECONDS)
    # Squared, so that the first session has four ratings in ten.
    session = (SESSIONS * np.square(rng.random(len(user_rows)))).astype(np.int64)
    within = rng.integers(SESSION_SECONDS, size=len(user_rows))
    return FIRST_TIME + sessions[user_rows, session].astype(np.int64) + within


def in_order(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Sort times for each user, without duplicates, int64 [ratings]. rows: user of each, sorted."""
    # Each at least a second after the one before. Offsets between users keep them independent.
    apart = 2 * LAST_TIME * rows
    place = np.arange(len(times))
    return np.maximum.accumulate(np.sort(apart + times) - place) + place - apart


# Of the files and of the parameters: another one means other ratings for the same flags.
FORMAT = 3
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
# With accents, commas and colons, as in real titles, to test readers.
TITLE_HEADS = (
    "Silent Last Broken Golden Am\u00e9lie's Hidden Distant Crimson Lonely Electric Forgotten Se\u00f1or's "
    "Velvet Burning Frozen Wandering Paper Midnight Hollow Fran\u00e7ois' Iron Little Scarlet Restless"
)
TITLE_NOUNS = (
    "Harbor River Garden City Caf\u00e9 Station Winter Letter Stranger Mirror Dragon Orchard Ni\u00f1o "
    "Witness Horizon Promise Empire Shadow Voyage M\u00e4rchen Island Parade Engine Lullaby Verdict Circus"
)
TITLE_TAILS = ("", ", The", " II", ": The Return", ", A", " and Daughter", ": Part One", " in Love")
# Coprime to the number of titles, so that neighbours in movies.dat do not look alike.
TITLE_STRIDE = 1009
LAST_YEAR = 2000
FIRST_YEAR = 1919
MEAN_MOVIE_AGE = 14.0
SHARE_OF_ID_GAPS = 0.02
# The chance of a movie grows like exp(POPULARITY_SLOPE * rank / num_movies), which gives the top tenth more
# than half of the ratings. UNIFORM_SHARE is spread evenly, so that rare movies get a few.
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
    # A fixed name, without the process id, so that the next start finds the folder of a killed process.
    partial = folder.with_name(f".{folder.name}.partial")
    advice = "make room there, or name another folder with --data_path"
    explaining = explained(f"Cannot write the synthetic data set to {folder}", advice)
    with explaining, replacing(folder, partial):
        # A killed process may have left one.
        remove(partial)
        partial.mkdir(parents=True)
        _write_files(partial, num_ratings, seed, world)


def check_synthetic(folder: Path, num_ratings: int, seed: int, world: str) -> None:
    """Refuse a folder whose content differs from that of `write_synthetic`. world: its name.

    Raises:
        UserError: says what was asked for.
    """
    oracle = folder / "oracle.json"
    try:
        recorded = json.loads(oracle.read_bytes()) if oracle.is_file() else {}
    # A damaged file counts as empty.
    except ValueError:
        recorded = {}
    wanted = {"num_ratings": num_ratings, "seed": seed, "world": world}
    if not isinstance(recorded, dict) or not wanted.items() <= recorded.items():
        raise UserError(
            f"{folder} holds other ratings than --synthetic_ratings {num_ratings} --seed {seed} "
            f"--synthetic_kind {world}; give another --data_path, or leave --dataset out to read what lies "
            f"there."
        )
    if recorded.get("format") != FORMAT:
        raise UserError(
            f"{folder} was drawn by another version of this program, with other tastes; remove it, or give "
            "another --data_path."
        )


def _write_files(folder: Path, num_ratings: int, seed: int, world: World) -> None:
    # Smaller sets have less active users: a few very active ones would have to rate the whole catalogue.
    ratings_per_user = min(max(25.0, math.sqrt(num_ratings) / 4), world.mean_ratings_per_user)
    num_users = round(num_ratings / ratings_per_user)
    num_movies = round(min(3.9 * math.sqrt(num_ratings), world.most_movies))
    movies, movie_ids, picks = _write_movies(folder / "movies.dat", num_movies, world, _generator(seed, 1))
    users = _write_users(folder / "users.dat", num_users, world, _generator(seed, 2))
    rng = _generator(seed, 3)
    counts = draw_counts(rng, num_ratings, num_users, num_movies)
    blocks = world.draw(rng, Planted(users, movies, counts, picks))
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
        # Rounded, because another machine may sum in another order.
        "rmse": round(math.sqrt(squared_error / num_ratings), 9),
        "num_ratings": num_ratings,
        "num_users": num_users,
        "num_movies": num_movies,
        "seed": seed,
        "format": FORMAT,
        "world": world.NAME,
        **world.describe(stars, oracles),
    }
    (folder / "oracle.json").write_text(
        json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="ascii", newline="\n"
    )


def _generator(seed: int, purpose: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, purpose]))


def _append_lines(file: BinaryIO, columns: list[np.ndarray]) -> None:
    """Write `::`-separated lines. pyarrow's delimiter is one character, so empty columns are inserted."""
    import pyarrow
    from pyarrow import csv

    empty = pyarrow.nulls(len(columns[0]))
    spaced = [part for column in columns for part in (empty, pyarrow.array(column))][1:]
    table = pyarrow.table(spaced, names=[str(place) for place in range(len(spaced))])
    csv.write_csv(table, file, csv.WriteOptions(include_header=False, delimiter=":", quoting_style="none"))


def _write_movies(
    path: Path, num_movies: int, world: World, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Write movies.dat. Return planted parameters [movies, 1 + rank], the bias first, ids and picks."""
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
    # Centered over ratings instead of movies, so that the biases of popular movies do not shift the mean.
    parameters[:, 0] = world.bias_stds[1] * (parameters[:, 0] - chances @ parameters[:, 0])
    return parameters, ids, np.cumsum(chances)


def _title(row: int) -> str:
    row, tail = divmod(row * TITLE_STRIDE, len(TITLE_TAILS))
    heads, nouns = TITLE_HEADS.split(), TITLE_NOUNS.split()
    row, noun = divmod(row, len(nouns))
    return f"{heads[row % len(heads)]} {nouns[noun]}{TITLE_TAILS[tail]}"


def _write_users(path: Path, num_users: int, world: World, rng: np.random.Generator) -> np.ndarray:
    """Write users.dat. Returns the planted parameters, float64 [num_users, 1 + rank], the bias first."""
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
    return with_unknown(rng, known, USER_EXPLAINED) * (world.bias_stds[0], *world.factor_stds)
