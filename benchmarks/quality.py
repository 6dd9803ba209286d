"""Measure how well the defaults learn: every protocol, several seeds, several worlds, 1, 2 and 3 processes.

    python benchmarks/quality.py                                  synthetic worlds
    python benchmarks/quality.py --real FOLDER... [--write]       and the MovieLens sets in these folders

The name of a folder says which set it holds: ml-latest-small, ml-100k, ml-1m, ml-10m. --write puts the tables
into docs/log/benchmarks.md and the results into docs/quality.json. Trains with the defaults alone; no
setting is chosen by the results.

One of the worlds, `ChoosingWorld`, is drawn here: users choose movies that they like, tastes drift, and days
differ. The next movie of a user depends on its popularity and on the taste for it, the product of the planted
factors in units of its standard deviation over all users and movies:

    chance of a movie that is not rated yet  ~  popularity * exp(choice_strength * taste)

The factors of a user move from the first rating to the last one, here at the share x of the time between, and
all ratings of one user and day have an offset in common:

    factors at x = factors + (x - 1/2) * way,   way = drift * spread of the factors * a standard normal
    score = mean + biases + offset of user and day + factors at x * factors of the movie

The summary of the world has the RMSE of three predictions, which all know biases, offsets and movies:

    rmse           the oracle knows the factors of the user at the time of each rating: the lower bound
    choices_rmse   knows which movies each user rates, test ratings included, and estimates the factors of the
                   user by a linear function of the mean factors of these movies
    biases_rmse    knows no factors and no choices

biases_rmse - rmse bounds the gain by taste, and so by choices; biases_rmse - choices_rmse is the gain by that
estimate before any star is seen. The last two are those of the best linear function of the expected rating,
because users who choose what they like give more stars.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from common import DOCS, bar, describe, finish, make_parser, mean, origin, processes, spread, table, train

from recsuite.datasets.movielens.synthetic import (
    DEFAULT_WORLD,
    Planted,
    World,
    draw_stars,
    draw_times,
    expected_ratings,
    steps_of,
    write_synthetic,
)

PAGE = DOCS / "log" / "benchmarks.md"
NUM_RANKS = 2
NUM_SEEDS = 5
RANDOM = ("--split", "random", "--test_fraction", "0.1")
RANKING = ("--task", "ranking", "--split", "leave_one_out")
SECONDS_PER_DAY = 86_400
# Parts of the time of a user whose tastes drift; choices follow the tastes in the middle of each.
PARTS = 4
# Fewer than in other worlds, because every movie is compared for each user. Part of the format, too.
CHOOSERS_PER_BLOCK = 1024
OFFICIAL = ("u1", "u2", "u3", "u4", "u5")


@dataclass(frozen=True)
class ChoosingWorld(World):
    """World in which choices depend on taste.

    choice_strength: of taste in the choice of movies, 0 for popularity alone, as in the default world;
    drift: of tastes from the first rating to the last, in units of their spread; day_std: of the offset of a
    user and day (UTC), in stars.
    """

    NAME: ClassVar = "choosing"
    ORACLES: ClassVar = ("oracle", "choices", "biases")

    choice_strength: float = 0.5
    drift: float = 0.0
    day_std: float = 0.0

    def draw(self, rng: np.random.Generator, planted: Planted) -> Iterator[tuple[np.ndarray, ...]]:
        """See `World.draw`. Takes time for every pair of a user and a movie, rated or not."""
        users, movies, counts, picks = planted
        expected = expected_ratings(self)
        log_chances = np.log(np.diff(picks, prepend=0))
        for begin in range(0, len(users), CHOOSERS_PER_BLOCK):
            block = users[begin : begin + CHOOSERS_PER_BLOCK]
            tastes = self._draw_tastes(rng, block[:, 1:])
            moments = draw_moments(rng, counts[begin : begin + len(block)])
            rows, movie_rows, times = self._draw_movies(rng, tastes, movies[:, 1:], log_chances, moments)
            factors = movies[movie_rows, 1:]
            scores = self.mean_score + block[rows, 0] + movies[movie_rows, 0]
            scores += draw_offsets(rng, rows, times, self.day_std)
            now = tastes.at(shares_of_time(rows, times), rows)
            read = factors_by_choices(tastes.middle, rows, factors)[rows]
            steps, read_steps = (steps_of(scores + (known * factors).sum(axis=1)) for known in (now, read))
            stars = draw_stars(rng, steps, self)
            less = expected[read_steps], expected[steps_of(scores)]
            yield begin + rows, movie_rows, stars, times, expected[steps], *less

    def describe(self, ratings: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
        """See `World.describe`: the RMSE of the two predictions that know less than the oracle."""
        less = zip(self.ORACLES[1:], predicted[1:], strict=True)
        # Rounded as that of the oracle.
        return {f"{name}_rmse": round(linear_rmse(ratings, column), 9) for name, column in less}

    def _draw_tastes(self, rng: np.random.Generator, factors: np.ndarray) -> Tastes:
        """Draw tastes from the mean factors, float64 [users, rank]."""
        return Tastes(factors, self.drift * np.array(self.factor_stds) * rng.standard_normal(factors.shape))

    def _draw_movies(
        self,
        rng: np.random.Generator,
        tastes: Tastes,
        movies: np.ndarray,
        log_chances: np.ndarray,
        moments: tuple[np.ndarray, np.ndarray],
    ) -> tuple[np.ndarray, ...]:
        """Draw the movies that each user rates, and their times.

        Args:
            tastes: of the users.
            movies: factors, float64 [movies, rank].
            log_chances: of the movies by popularity, float64 [movies].
            moments: user row and time, see `draw_moments`.

        Returns:
            User row, movie row and time, each int64 [ratings], sorted by user, then movie.
        """
        rows, times = moments
        num_parts = PARTS if self.drift else 1
        parts = np.minimum((num_parts * shares_of_time(rows, times)).astype(np.int64), num_parts - 1)
        wanted = np.bincount(rows * num_parts + parts, minlength=len(tastes.middle) * num_parts)
        strength = self.choice_strength / math.hypot(*self.factor_stds)
        likings = (
            log_chances + strength * tastes.at(np.array((part + 0.5) / num_parts)) @ movies.T
            for part in range(num_parts)
        )
        part_of = draw_choices(rng, wanted.reshape(-1, num_parts), len(movies), likings)
        rows, movie_rows = np.nonzero(part_of >= 0)
        # Movies and times of the same part are paired by chance: the order of drawn times says nothing.
        paired = np.empty_like(times)
        paired[np.lexsort((part_of[rows, movie_rows], rows))] = times[np.lexsort((parts, rows))]
        return rows, movie_rows, paired


@dataclass(frozen=True)
class Tastes:
    """Factors of users in the middle of their time, and their way to the end; float64 [users, rank]."""

    middle: np.ndarray
    way: np.ndarray

    def at(self, shares: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Factors of users at shares of their time, float64 [n, rank]; shares: float64 [n], or one."""
        return self.middle[rows] + (shares[..., None] - 0.5) * self.way[rows]


def draw_moments(rng: np.random.Generator, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Draw user row and second of each rating, each int64 [ratings], sorted by user.

    counts: ratings of each user, int64 [users].
    """
    rows = np.repeat(np.arange(len(counts)), counts)
    return rows, draw_times(rng, len(counts), rows)


def shares_of_time(rows: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Place of each rating between the first and the last one of its user, from 0 to 1, float64 [ratings].

    rows, times: user row and second of each rating, int64 [ratings], sorted by user.
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    first, last = (extreme.reduceat(times, starts)[rows] for extreme in (np.minimum, np.maximum))
    return (times - first) / np.maximum(last - first, 1)


def draw_choices(
    rng: np.random.Generator, wanted: np.ndarray, num_movies: int, likings: Iterable[np.ndarray]
) -> np.ndarray:
    """Draw the movies of each user without replacement, part after part of the time.

    Args:
        wanted: movies of each user and part, int64 [users, parts].
        likings: of each part, the logarithm of the weight of each movie, float64 [users, movies].

    Returns:
        Part in which a user rates a movie, -1 for none, int8 [users, movies].
    """
    part_of = np.full((len(wanted), num_movies), -1, np.int8)
    for part, (number, liking) in enumerate(zip(wanted.T, likings, strict=True)):
        # The k shortest of exponential waiting times are k draws by weight without replacement. In float64:
        # the last bits of another machine would choose other movies.
        waits = np.log(rng.standard_exponential(liking.shape)) - liking
        waits[part_of >= 0] = np.inf
        longest = np.take_along_axis(np.sort(waits, axis=1), np.maximum(number - 1, 0)[:, None], axis=1)
        part_of[(waits <= longest) & (number > 0)[:, None]] = part
    return part_of


def draw_offsets(rng: np.random.Generator, rows: np.ndarray, times: np.ndarray, std: float) -> np.ndarray:
    """Draw the offset of the user and day of each rating, float64 [ratings].

    rows, times: user row and second of each rating, int64 [ratings].
    """
    num_days = times.max() // SECONDS_PER_DAY + 1
    days, day_of = np.unique(rows * num_days + times // SECONDS_PER_DAY, return_inverse=True)
    return std * rng.standard_normal(len(days))[day_of]


def factors_by_choices(factors: np.ndarray, rows: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Best linear estimate of the factors of users from those of their movies, float64 [users, rank].

    factors: those of the users, float64 [users, rank]; rows: user of each rating, int64 [ratings], sorted;
    chosen: factors of the movie of each rating, float64 [ratings, rank].
    """
    starts = np.flatnonzero(np.diff(rows, prepend=-1))
    means = np.add.reduceat(chosen, starts) / np.diff(starts, append=len(rows))[:, None]
    known = np.column_stack([np.ones(len(means)), means])
    return known @ np.linalg.lstsq(known, factors)[0]


def linear_rmse(ratings: np.ndarray, predicted: np.ndarray) -> float:
    """RMSE of the best linear function of a prediction; both float [ratings]."""
    return float(np.std(ratings) * math.sqrt(1 - np.corrcoef(ratings, predicted)[0, 1] ** 2))


# Name, number of ratings, and world.
WORLDS = (
    ("default", 1_000_000, DEFAULT_WORLD),
    ("small", 100_000, World()),
    ("sparse", 300_000, World(mean_ratings_per_user=60)),
    ("noisy", 300_000, World(noise_std=1.2)),
    ("quiet", 300_000, World(noise_std=0.6)),
    ("many factors", 300_000, World(factor_stds=(0.25,) * 8)),
    ("choices", 300_000, ChoosingWorld()),
    ("drift and days", 300_000, ChoosingWorld(drift=1.0, day_std=0.2)),
)


@dataclass(frozen=True)
class QualityTraining:
    """Training with its name in the tables, flags, seed and number of processes."""

    name: str
    flags: tuple[str, ...]
    seed: int = 0
    num_ranks: int = NUM_RANKS

    def run(self) -> dict[str, Any]:
        """Train, and return the part of the report that the tables need."""
        report = train(*self.flags, "--seed", self.seed, ranks=self.num_ranks)
        return {
            "name": self.name,
            "seed": self.seed,
            "num_ranks": self.num_ranks,
            "task": report["config"]["task"],
            "num_train": report["data"]["num_train"],
            "epochs": len(report["epochs"]),
            "test": report["test"],
            "baselines": report["baselines"],
        }


def main() -> None:
    """Train and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help=f"of each case (default: {NUM_SEEDS})")
    parser.add_argument("--share", type=float, default=1.0, help="of the ratings of worlds (default: all)")
    finish("quality", parser.parse_args(), measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory() as folder:
        trainings = [*worlds(Path(folder), flags.share)]
        for real in flags.real:
            trainings += real_trainings(real, flags.seeds, Path(folder) / "columns")
        return {**describe(), "runs": [training.run() for training in trainings]}


def worlds(folder: Path, share: float) -> Iterator[QualityTraining]:
    """Trainings on the synthetic worlds, drawn into a folder."""
    for name, num_ratings, world in WORLDS:
        path = folder / name.replace(" ", "-")
        write_synthetic(path, round(num_ratings * share), seed=0, world=world)
        yield QualityTraining(f"world: {name}", ("--data_path", str(path)))


def real_trainings(folder: Path, num_seeds: int, cache: Path) -> Iterator[QualityTraining]:
    """Trainings on a MovieLens set, with every protocol."""
    name = folder.resolve().name
    data = ("--data_path", str(folder), "--cache_dir", str(cache / name))
    if name == "ml-100k":
        yield from (QualityTraining(f"{name} {split}", (*data, "--split", split)) for split in OFFICIAL)
    for seed in range(num_seeds):
        yield QualityTraining(f"{name} random 90/10", (*data, *RANDOM), seed)
        yield QualityTraining(f"{name} time 80/20", (*data, "--split", "time"), seed)
        yield QualityTraining(f"{name} leave one out", (*data, *RANKING), seed)
        for num_ranks in (1, 3) if name == "ml-latest-small" else ():
            case = f"{name} random 90/10, {processes(num_ranks)}"
            yield QualityTraining(case, (*data, *RANDOM), seed, num_ranks)


def render(result: dict[str, Any]) -> str:
    """Tables of ratings of real sets, of ranks of real sets, and of worlds; and the origin."""
    runs = result["runs"]
    real = [run for run in runs if not run["name"].startswith("world")]
    tables = [
        rating_table([run for run in real if run["task"] == "rating"]),
        ranking_table([run for run in real if run["task"] == "ranking"]),
        world_table([run for run in runs if run["name"].startswith("world")]),
    ]
    return "\n\n".join([*filter(None, tables), f"{origin(result, fbgemm=True)}."])


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Each bar beside its figure, if that was measured."""
    cases = by_name(result["runs"])
    bars = []
    if same := cases.get("ml-latest-small random 90/10"):
        rmse = mean(run["test"]["rmse"] for run in same)
        bars.append(bar("random 90/10, RMSE", rmse, 0.85, f"{rmse:.4f}", "0.85", at_most=True))
    for split, least in (("random 90/10", 0.02), ("time 80/20", 0.015)):
        if same := cases.get(f"ml-latest-small {split}"):
            under = mean(run["baselines"]["biases"]["rmse"] - run["test"]["rmse"] for run in same)
            bars.append(bar(f"{split}, RMSE under the biases", under, least, f"{under:.4f}", f"{least}"))
    if same := cases.get("ml-latest-small leave one out"):
        gain = mean(run["test"]["hr_at_10"] / run["baselines"]["popularity"]["hr_at_10"] for run in same)
        bars.append(bar("leave one out, HR@10 / popularity", gain, 1.5, f"{gain:.2f}", "1.5"))
    if same := cases.get("world: default"):
        ratio = mean(run["test"]["rmse"] / run["baselines"]["oracle"]["rmse"] for run in same)
        bars.append(bar("default world, RMSE / oracle", ratio, 1.02, f"{ratio:.4f}", "1.02", at_most=True))
    return bars


def by_name(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs that differ only in the seed, by their name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault(run["name"], []).append(run)
    return found


def rating_table(runs: Sequence[dict[str, Any]]) -> str:
    """RMSE beside the biases, and the other metrics of ratings."""
    lines = []
    for name, same in by_name(runs).items():
        biases = [run["baselines"]["biases"]["rmse"] for run in same]
        tests = {metric: [run["test"][metric] for run in same] for metric in same[0]["test"]}
        under = [bias - rmse for bias, rmse in zip(biases, tests["rmse"], strict=True)]
        cells = [f"{mean(biases):.4f}", f"**{spread(tests['rmse'])}**", spread(under)]
        others = [f"{mean(tests[metric]):.4f}" for metric in ("mae", "auc", "log_loss")]
        lines.append([name, f"{len(same)}", *cells, *others])
    heads = ["ratings", "seeds", "biases, RMSE", "this, RMSE", "below the biases", "MAE", "AUC", "log loss"]
    return table(heads, lines) if runs else ""


def ranking_table(runs: Sequence[dict[str, Any]]) -> str:
    """HR@10 and NDCG@10 beside popularity."""
    metrics = {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}
    heads = ["ranks among all movies", "seeds"]
    heads += [f"{who}, {shown}" for shown in metrics.values() for who in ("popularity", "this")]
    lines = []
    for name, same in by_name(runs).items():
        cells = []
        for metric in metrics:
            cells.append(f"{mean(run['baselines']['popularity'][metric] for run in same):.4f}")
            cells.append(f"**{spread([run['test'][metric] for run in same])}**")
        lines.append([name, f"{len(same)}", *cells])
    return table(heads, lines) if runs else ""


def world_table(runs: Sequence[dict[str, Any]]) -> str:
    """RMSE between the biases and the oracle."""
    lines = []
    for run in runs:
        name, oracle = run["name"].removeprefix("world: "), run["baselines"]["oracle"]["rmse"]
        biases, test = run["baselines"]["biases"]["rmse"], run["test"]["rmse"]
        cells = [f"{biases:.4f}", f"**{test:.4f}**", f"{oracle:.4f}", f"{test / oracle:.4f}"]
        lines.append([name, f"{run['num_train']:,}", *cells])
    heads = [
        "synthetic world",
        "training ratings",
        "biases, RMSE",
        "this, RMSE",
        "oracle, RMSE",
        "this / oracle",
    ]
    return table(heads, lines)


if __name__ == "__main__":
    main()
