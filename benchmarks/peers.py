"""Compare this project with other systems, on the same events in the same run: ratings, and ranks.

    python benchmarks/peers.py                              ml-100k
    python benchmarks/peers.py --real FOLDER... [--write]   and the MovieLens sets in these folders

Ratings are split at random, 90 to 10; for ranks the newest rating of each user is the test. This project has
its defaults and two processes, and its columns define the splits. It keeps its validation events for
stopping; the others learn from them too before they read the test, which is in their favour. The picture
shows the error on the validation events while every system learns from the training events alone. Needs
requirements-dev.txt.

Ratings are predicted by the baseline of biases, and by myFM, a Bayesian factorization machine. It draws its
parameters many times, and predicts the mean over the draws. Ranks are those of popularity, alternating least
squares and Bayesian personalized ranking (BPR), both of the package `implicit`, and EASE (Steck,
"Embarrassingly shallow autoencoders for sparse data", 2019). The settings of each are those of the highest
NDCG@10 on validation, learned from the training events. With them it learns again, from training and
validation events, and reads the test once. Seconds are those of the training alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.metadata import distribution, version
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from common import DOCS, describe, finish, make_parser, mean, new_figure, origin, spread, table, timed, train
from scipy.sparse import csr_matrix, diags_array, hstack, identity

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Calibration, Metrics, finite, measure, measure_ranks
from recsuite.datasets.preparation.baselines import fit_biases
from recsuite.datasets.preparation.cache import open_columns

NUM_RANKS = 2
NUM_SEEDS = 3
RANDOM = ("--split", "random", "--test_fraction", "0.1")
OTHERS = ("myfm", "implicit")
SPLIT = ("--task", "ranking", "--split", "leave_one_out")
RANK = 10
ITERATIONS = 512
# First draws that myFM skips by default, because they depend on the initial values.
BURN_IN = 5
# Measurements during a training.
NUM_POINTS = 64
UNDEFINED = Calibration(float("nan"), float("nan"))
# Settings of alternating least squares that are tried. The defaults of `implicit` lie inside: 64, 0.01 and 1.
FACTORS, REGULARIZATIONS, ALPHAS = (16, 32, 64, 128), (0.01, 0.1, 1.0, 10.0), (1.0, 4.0, 16.0, 64.0)
SQUARES_ITERATIONS = 15
# The newest fifth has more events than memory holds scores for.
CASES_AT_ONCE = 1024
PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
# Settings of BPR that are tried; the defaults of `implicit`, but for 100 factors, lie inside.
BPR_FACTORS, BPR_RATES, BPR_REGULARIZATIONS = (32, 64, 128), (0.003, 0.01, 0.03), (0.001, 0.01, 0.1)
PACKAGE, FOLDER = "recbole", "recbole/dataset_example/ml-100k"
GENRES = [
    "unknown",
    "Action",
    "Adventure",
    "Animation",
    "Children's",
    "Comedy",
    "Crime",
    "Documentary",
    "Drama",
    "Fantasy",
    "Film-Noir",
    "Horror",
    "Musical",
    "Mystery",
    "Romance",
    "Sci-Fi",
    "Thriller",
    "War",
    "Western",
]
PAGE = DOCS / "quality.md"
PICTURE = "![RMSE on validation over seconds of training, a line for each system](peers.png)"
# Protocol and metrics of each task, with their names.
TASKS = {
    "rating": ("random 90/10", {"rmse": "RMSE"}),
    "ranking": ("leave one out", {"hr_at_10": "HR@10", "ndcg_at_10": "NDCG@10"}),
}
# First and last systems of a table.
FIRST, LAST = ("biases", "popularity"), ("this",)
STYLES = {
    "biases": {"color": "0.6", "linestyle": "--"},
    "myFM, ids": {"color": "C2"},
    "myFM, who rated what": {"color": "C1"},
    "this": {"color": "C0", "marker": "."},
}


# --- the comparison ---


@dataclass(frozen=True)
class PeerCase:
    """Set, task and seed of a comparison; folder: of columns and reports."""

    data: Path
    task: str
    seed: int
    folder: Path
    # Processes of this project.
    ranks: int = NUM_RANKS

    @property
    def command(self) -> list[str]:
        """Flags of this project."""
        split = RANDOM if self.task == "rating" else SPLIT
        places = ("--data_path", str(self.data), "--cache_dir", str(self.folder / "columns"))
        return [*split, *places, "--seed", str(self.seed)]

    @property
    def columns(self) -> Columns:
        """Events as this project splits them."""
        return open_columns(parse_args(self.command))

    def report(self, columns: Columns, *flags: object) -> dict[str, Any]:
        """Train this project and return its report.

        Raises:
            RuntimeError: when it had other events than the columns.
        """
        report: dict[str, Any] = train(*self.command, *flags, ranks=self.ranks)
        kind = "predictions" if self.task == "rating" else "ranks"
        # With other events they would hardly be the same to the last digit.
        for name, metrics in columns.baselines[kind].items():
            if report["baselines"][name] != finite(metrics):
                raise RuntimeError(f"{name}: the baseline of the report is not that of the columns")
        return report

    def run(self, system: str, metrics: dict[str, float], seconds: float, **more: Any) -> dict[str, Any]:
        """Result of one system, as the tables need it."""
        about = {"data": self.data.resolve().name, "task": self.task, "seed": self.seed}
        return {**about, "system": system, "metrics": metrics, "seconds": seconds, **more}


def training_seconds(report: dict[str, Any]) -> float:
    """Seconds of the epochs of a training, and of the start before them if the report has them."""
    seconds: float = sum(epoch["seconds"] for epoch in report["epochs"])
    return seconds + report.get("start_seconds", 0.0)


def main() -> None:
    """Train all and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    add_sets(parser)
    parser.add_argument(
        "--iterations", type=int, default=ITERATIONS, help=f"draws of myFM (default: {ITERATIONS})"
    )
    flags = parser.parse_args()
    finish("quality_peers", flags, measure_all, None, render, PAGE, draw, mark="peers", picture="peers")


def add_sets(parser: argparse.ArgumentParser, seeds: int = NUM_SEEDS) -> None:
    """Add the flags that `data_sets` reads, and --seeds."""
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--only_real", action="store_true", help="skip ml-100k")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"of each case (default: {seeds})")


def measure_all(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    runs, curves = [], []
    with tempfile.TemporaryDirectory() as folder:
        for data in data_sets(flags, Path(folder)):
            for seed in range(flags.seeds):
                found, drawn = compare_ratings(PeerCase(data, "rating", seed, Path(folder)), flags.iterations)
                runs += found
                curves += drawn
                runs += compare_ranks(PeerCase(data, "ranking", seed, Path(folder)))
    about = describe()
    versions = {**about["versions"], **{name: version(name) for name in OTHERS}}
    return {**about, "versions": versions, "iterations": flags.iterations, "runs": runs, "curves": curves}


def data_sets(flags: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """Folders of the data sets; ml-100k is written into one."""
    yield from flags.real
    if not flags.only_real:
        write_movielens_100k(folder / "ml-100k")
        yield folder / "ml-100k"


def compare_ratings(
    case: PeerCase, iterations: int, factors: int = RANK, curves: bool = True
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Compare every system on the test; with the first seed, also while it learns, on validation.

    factors: of myFM; curves: False skips the validation, and returns no curves.
    """
    columns = case.columns
    report = case.report(columns)
    runs = [case.run("this", {"rmse": report["test"]["rmse"]}, training_seconds(report))]
    known, test = ratings_of(columns, "train", "validation"), ratings_of(columns, "test")
    for name, peer in rating_peers(case.seed, iterations, 1, factors).items():
        trace = peer(known, test)
        runs.append(case.run(name, {"rmse": trace.rmse[-1]}, trace.seconds[-1]))
    if case.seed > 0 or not curves:
        return runs, []
    start, epochs = report.get("start_seconds", 0.0), report["epochs"]
    seconds = [start + trained for trained in accumulate(epoch["seconds"] for epoch in epochs)]
    errors = [epoch["validation"]["rmse"] for epoch in epochs]
    traces = {"this": Trace(seconds, errors)}
    known, validation = ratings_of(columns, "train"), ratings_of(columns, "validation")
    for name, peer in rating_peers(case.seed, iterations, NUM_POINTS, factors).items():
        traces[name] = peer(known, validation)
    data = case.data.resolve().name
    return runs, [{"data": data, "system": name, **vars(trace)} for name, trace in traces.items()]


def rating_peers(seed: int, iterations: int, num_points: int, factors: int = RANK) -> dict[str, RatingPeer]:
    """Other systems by their names in the table."""
    machine = partial(
        factorization_machine, seed=seed, iterations=iterations, num_points=num_points, factors=factors
    )
    return {
        "biases": biases,
        "myFM, ids": partial(machine, sets=False),
        "myFM, who rated what": partial(machine, sets=True),
    }


def compare_ranks(case: PeerCase, skipped: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Compare every system on the test; skipped: names of other systems."""
    columns = case.columns
    report = case.report(columns)
    runs = [case.run("this", report["test"], training_seconds(report))]
    for name, ranked in rank_all(columns, case.seed, skipped).items():
        runs.append(case.run(name, ranked.metrics, ranked.seconds, settings=ranked.settings))
    return runs


# --- systems that predict ratings ---


@dataclass(frozen=True)
class Ratings:
    """Positions of users and items, int [n] both, and their labels, float32 [n].

    shape: numbers of users and of items.
    """

    users: np.ndarray
    items: np.ndarray
    labels: np.ndarray
    shape: tuple[int, int]

    @cached_property
    def matrix(self) -> csr_matrix:
        """Ones at the rated pairs, float64 [users, items]."""
        return csr_matrix((np.ones(len(self.users)), (self.users, self.items)), shape=self.shape)


@dataclass
class Trace:
    """Seconds since the start of a training, and the RMSE at that time."""

    seconds: list[float] = field(default_factory=list)
    rmse: list[float] = field(default_factory=list)


# From known ratings, and asked ones, to the trace of a training.
RatingPeer = Callable[[Ratings, Ratings], Trace]


def ratings_of(columns: Columns, *splits: str) -> Ratings:
    """Ratings of some splits, one split after the other."""
    ranges = [columns.range_of(split) for split in splits]
    rows = np.concatenate([columns.column("rows")[each.start : each.stop] for each in ranges])
    labels = np.concatenate([columns.labels(split) for split in splits])
    return Ratings(rows["user"], rows["item"], labels, (columns.num_users, columns.num_items))


def rmse_of(predictions: np.ndarray, labels: np.ndarray) -> float:
    """RMSE of predictions, float [n], as the training measures it."""
    # The other metrics are not used, and need to know which cases are liked.
    return measure(predictions, labels, np.zeros(len(labels), bool), UNDEFINED)["rmse"]


def biases(known: Ratings, asked: Ratings) -> Trace:
    """Fit the baseline of the training on the known ratings."""
    begin = time.perf_counter()
    (fitted,) = fit_biases(known.users, known.items, known.labels, known.shape, [len(known.labels)])
    seconds = time.perf_counter() - begin
    return Trace([seconds], [rmse_of(fitted.predict(asked.users, asked.items), asked.labels)])


def factorization_machine(
    known: Ratings,
    asked: Ratings,
    seed: int,
    sets: bool,
    iterations: int,
    num_points: int = 1,
    factors: int = RANK,
) -> Trace:
    """Fit myFM on the known ratings, in any order.

    Args:
        sets: add the rated movies to the features of a user, and its users to those of a movie.
        num_points: measurements during the training, the last one at its end.
    """
    myfm = import_myfm()
    begin = time.perf_counter()
    of_users, of_items, groups = features(known, sets)

    def blocks(ratings: Ratings) -> list[Any]:
        places = (ratings.users.astype(np.int64), ratings.items.astype(np.int64))
        return [myfm.RelationBlock(*block) for block in zip(places, (of_users, of_items), strict=True)]

    draws = Draws(blocks(asked), asked.labels, iterations, num_points, begin)
    model = myfm.MyFMRegressor(rank=factors, random_seed=seed)
    # Its progress bar cannot be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        model.fit(
            None,
            known.labels,
            X_rel=blocks(known),
            n_iter=iterations,
            # `Draws` averages them one by one; all of them would fill the memory.
            n_kept_samples=1,
            group_shapes=groups,
            callback=draws,
        )
    return draws.trace


def features(known: Ratings, sets: bool) -> tuple[csr_matrix, csr_matrix, list[int]]:
    """Features of users and items, float64 [users, n] and [items, m], and sizes of groups with one prior."""
    num_users, num_items = known.shape
    of_users, of_items = identity(num_users, format="csr"), identity(num_items, format="csr")
    if not sets:
        return of_users, of_items, [num_users, num_items]
    of_users = hstack([of_users, scaled(known.matrix)], format="csr")
    of_items = hstack([of_items, scaled(known.matrix.T.tocsr())], format="csr")
    return of_users, of_items, [num_users, num_items, num_items, num_users]


def scaled(rated: csr_matrix) -> csr_matrix:
    """Rows divided by the root of their number of ones, so that each has length 1."""
    counts = np.maximum(rated.sum(axis=1), 1)
    return (diags_array(1 / np.sqrt(np.asarray(counts).ravel())) @ rated).tocsr()


class Draws:
    """Callback of myFM: averages the predictions of its draws, with the clock of the training stopped."""

    def __init__(
        self, blocks: list[Any], labels: np.ndarray, iterations: int, num_points: int, begin: float
    ) -> None:
        self.blocks, self.labels = blocks, labels
        # As many as its own predictor skips.
        self.num_skipped = iterations - min(max(iterations - BURN_IN, BURN_IN), iterations)
        self.judged = {round(iterations * (point + 1) / num_points) for point in range(num_points)}
        self.nothing = csr_matrix((len(labels), 0))
        self.total = np.zeros(len(labels))
        self.trained, self.resumed = 0.0, begin
        self.trace = Trace()

    def __call__(self, place: int, machine: Any, *_: Any) -> tuple[bool, None]:
        """Add a draw, numbered from 0; never ends the training."""
        self.trained += time.perf_counter() - self.resumed
        predictions = machine.predict_score(self.nothing, self.blocks)
        number = place + 1 - self.num_skipped
        # Skipped draws are shown alone.
        self.total = self.total + predictions if number > 1 else predictions
        if place + 1 in self.judged:
            self.trace.seconds.append(self.trained)
            self.trace.rmse.append(rmse_of(self.total / max(number, 1), self.labels))
        self.resumed = time.perf_counter()
        return False, None


def import_myfm() -> ModuleType:
    """Import myFM.

    Version 0.4.0 imports two unused names from pkg_resources, which setuptools 82 removed.
    """
    stand_in = ModuleType("pkg_resources")
    stand_in.__dict__.update(DistributionNotFound=Exception, get_distribution=None)
    sys.modules.setdefault("pkg_resources", stand_in)
    try:
        return importlib.import_module("myfm")
    finally:
        # No other code may find the stand-in.
        if sys.modules.get("pkg_resources") is stand_in:
            del sys.modules["pkg_resources"]


# --- systems that rank ---


def events_of(columns: Columns, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the users and of the items of a split's events, int32 [n] both."""
    positions = columns.range_of(split)
    rows = columns.column("rows")[positions.start : positions.stop]
    return rows["user"], rows["item"]


def clicks_before(columns: Columns, split: str) -> csr_matrix:
    """Ones at the pairs that are known before a split, float32 [users, items].

    Those of the training events, and for the test those of the validation events too, as in the training.
    """
    splits = ("train",) if split == "validation" else ("train", "validation")
    users, items = np.concatenate([events_of(columns, name) for name in splits], axis=1)
    ones = np.ones(len(users), np.float32)
    return csr_matrix((ones, (users, items)), shape=(columns.num_users, columns.num_items))


def ranks_of(scores: np.ndarray, items: np.ndarray, known: csr_matrix) -> np.ndarray:
    """Rank of the item of each case among all that its user has not clicked, int64 [n], from 1.

    scores: float32 [n, items]; items: int [n]; known: earlier clicks of the users, [n, items]. Other items
    with the same score count as ranked before it.
    """
    cases = np.arange(len(items))
    is_above = scores >= scores[cases, items][:, None]
    is_above[known.nonzero()] = False
    is_above[cases, items] = True
    return is_above.sum(axis=1)


def judged_cases(columns: Columns, split: str, score: Callable[[slice], np.ndarray]) -> Metrics:
    """HR@10 and NDCG@10 of a split, by the scores of some of its events, float [n, items]."""
    users, items = events_of(columns, split)
    known = clicks_before(columns, split)
    parts = [slice(begin, begin + CASES_AT_ONCE) for begin in range(0, len(items), CASES_AT_ONCE)]
    ranks = [ranks_of(score(part), items[part], known[users[part]]) for part in parts]
    return measure_ranks(np.concatenate(ranks) if ranks else np.zeros(0, np.int64))


def choose(columns: Columns, seed: int) -> tuple[SquaresSettings, dict[SquaresSettings, float]]:
    """Settings of the highest NDCG@10 on validation, and the NDCG@10 of all settings."""
    tried = {
        settings: LeastSquares(columns, settings, seed).measure("validation")["ndcg_at_10"]
        for settings in itertools.starmap(
            SquaresSettings, itertools.product(FACTORS, REGULARIZATIONS, ALPHAS)
        )
    }
    return max(tried, key=lambda settings: tried[settings]), tried


@dataclass(frozen=True)
class SquaresSettings:
    """Settings of least squares: factors of a vector, regularization, and weight of a click.

    An item without a click has the weight 1.
    """

    factors: int
    regularization: float
    alpha: float


class LeastSquares:
    """Alternating least squares on the events of columns that are known before those of a split."""

    def __init__(
        self, columns: Columns, settings: SquaresSettings, seed: int, fitted_for: str = "validation"
    ) -> None:
        from implicit.als import AlternatingLeastSquares  # codespell:ignore als

        self.columns = columns
        self.model = AlternatingLeastSquares(
            settings.factors,
            regularization=settings.regularization,
            alpha=settings.alpha,
            iterations=SQUARES_ITERATIONS,
            random_state=seed,
            use_gpu=False,
            calculate_training_loss=False,
        )
        self.model.fit(clicks_before(columns, fitted_for), show_progress=False)

    def measure(self, split: str) -> Metrics:
        """HR@10 and NDCG@10 of "validation" or "test"."""
        known = clicks_before(self.columns, split)
        users, of_case = np.unique(events_of(self.columns, split)[0], return_inverse=True)
        # As learned for the items; vectors of users in the training are older by half a step.
        vectors = np.asarray(self.model.recalculate_user(users, known[users]))
        items = np.asarray(self.model.item_factors)
        return judged_cases(self.columns, split, lambda part: vectors[of_case[part]] @ items.T)


@dataclass(frozen=True)
class Ranked:
    """Metrics of a system on the test, seconds of its training, and chosen settings."""

    metrics: Metrics
    seconds: float
    settings: dict[str, float]


# From known events, float32 [users, items], settings and a seed to scores, float [users, items].
Scorer = Callable[[csr_matrix, Any, int], np.ndarray]


def ease(known: csr_matrix, penalty: float, seed: int = 0) -> np.ndarray:
    """Scores of EASE, float64 [users, items].

    They are the known events X times the weights B that minimise |X - X B|^2 + penalty |B|^2 with a diagonal
    of zeros. With P the inverse of X'X + penalty, B is 1 - P divided, column by column, by the diagonal of P.
    X P is K X, where K is the inverse of X X' + penalty, which is smaller: these sets have fewer users than
    items. The seed is unused.
    """
    events = known.toarray().astype(np.float64)
    through = np.linalg.solve(events @ events.T + penalty * np.eye(len(events)), events)
    diagonal = (1 - (events * through).sum(axis=0)) / penalty
    return events - through / diagonal


@dataclass(frozen=True)
class PairwiseSettings:
    """Settings of BPR: factors of a vector, learning rate, and regularization."""

    factors: int
    learning_rate: float
    regularization: float


def pairwise(known: csr_matrix, settings: PairwiseSettings, seed: int) -> np.ndarray:
    """Scores of BPR, float32 [users, items]."""
    from implicit.bpr import BayesianPersonalizedRanking

    # On more threads updates race, and the same seed gives other vectors each time.
    model = BayesianPersonalizedRanking(**vars(settings), random_state=seed, num_threads=1, use_gpu=False)
    model.fit(known, show_progress=False)
    return np.asarray(model.user_factors) @ np.asarray(model.item_factors).T


def every_pairwise() -> list[PairwiseSettings]:
    """The grid of BPR."""
    return [
        PairwiseSettings(*values) for values in itertools.product(BPR_FACTORS, BPR_RATES, BPR_REGULARIZATIONS)
    ]


def blas_on_one_thread() -> AbstractContextManager[Any]:
    """Limit matrix products to one thread: the threads of `implicit` share the cores already."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1, "blas")
    return limits


def rank_all(columns: Columns, seed: int, skipped: Sequence[str] = ()) -> dict[str, Ranked]:
    """Choose and test every system on the same events, popularity included, except the skipped ones."""
    systems: dict[str, Callable[[], Ranked]] = {
        "popularity": lambda: popularity(columns),
        "least squares": lambda: least_squares(columns, seed),
        "BPR": lambda: chosen(columns, pairwise, every_pairwise(), seed),
        "EASE": lambda: chosen(columns, ease, PENALTIES, seed),
    }
    found = {}
    for name in (name for name in systems if name not in skipped):
        with blas_on_one_thread() if name in ("least squares", "BPR") else contextlib.nullcontext():
            found[name] = systems[name]()
    return found


def popularity(columns: Columns) -> Ranked:
    """Baseline of the columns; the seconds are those of counting."""
    begin = time.perf_counter()
    clicks_before(columns, "test").sum(axis=0)
    return Ranked(columns.baselines["ranks"]["popularity"], time.perf_counter() - begin, {})


def least_squares(columns: Columns, seed: int) -> Ranked:
    """Alternating least squares, with the best settings of the grid."""
    settings, _ = choose(columns, seed)
    seconds, model = timed(LeastSquares, columns, settings, seed, "test")
    return Ranked(model.measure("test"), seconds, dict(vars(settings)))


def chosen(columns: Columns, score: Scorer, grid: Sequence[Any], seed: int) -> Ranked:
    """Test a system with the settings that are best on validation."""
    known = clicks_before(columns, "validation")
    tried = [judged(columns, "validation", score(known, settings, seed))["ndcg_at_10"] for settings in grid]
    best = grid[int(np.argmax(tried))]
    known = clicks_before(columns, "test")
    seconds, scores = timed(score, known, best, seed)
    settings = {"penalty": best} if isinstance(best, float) else dict(vars(best))
    return Ranked(judged(columns, "test", scores), seconds, settings)


def judged(columns: Columns, split: str, scores: np.ndarray) -> Metrics:
    """HR@10 and NDCG@10 of a split, by scores, float [users, items]."""
    users, _ = events_of(columns, split)
    return judged_cases(columns, split, lambda part: scores[users[part]])


# --- MovieLens 100K ---


def write_movielens_100k(folder: Path) -> None:
    """Write MovieLens 100K as GroupLens published it, from the files of the package `recbole`.

    Writes u.data, u.item, u.user and u.genre into a new folder, and does not import the package.

    The parts u1 to u5, release dates and addresses are not in the package; the latter two are unused here.

    Raises:
        PackageNotFoundError: without the package, of requirements-dev.txt.
    """
    source = Path(str(distribution(PACKAGE).locate_file(FOLDER)))
    folder.mkdir()
    write_lines(folder / "u.data", ("\t".join(fields) for fields in rows_of(source / "ml-100k.inter")))
    write_lines(folder / "u.user", ("|".join(fields) for fields in rows_of(source / "ml-100k.user")))
    write_lines(folder / "u.item", (movie_line(*fields) for fields in rows_of(source / "ml-100k.item")))
    write_lines(folder / "u.genre", (f"{name}|{place}" for place, name in enumerate(GENRES)))


def rows_of(path: Path) -> Iterator[list[str]]:
    """Fields of each line after the header."""
    lines = path.read_text(encoding="utf-8").split("\n")
    return (line.split("\t") for line in lines[1:] if line)


def movie_line(movie_id: str, title: str, year: str, genres: str) -> str:
    """A line of u.item: number, title with its year, two dates, an address, and a mark for each genre.

    Raises:
        ValueError: for a genre that the set does not have.
    """
    named = genres.split()
    if not set(named) <= set(GENRES):
        raise ValueError(f"movie {movie_id} has genres that are not those of the set: {genres}")
    # Two movies have no year there: one has it in its title, that of the other is unknown.
    full_title = f"{title} ({year})" if year.isdigit() else title
    return "|".join([movie_id, full_title, "", "", "", *(str(int(name in named)) for name in GENRES)])


def write_lines(path: Path, lines: Iterator[str]) -> None:
    """Write lines, each with its end."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# --- tables and picture; computed from the JSON alone ---


def render(result: dict[str, Any]) -> str:
    """Picture, table of ratings, table of ranks, and origin."""
    runs = result["runs"]
    tables = [table_of(task, [run for run in runs if run["task"] == task]) for task in TASKS]
    seeds = len({run["seed"] for run in runs})
    about = f"{seeds} seed{'s' * (seeds > 1)}; {result['iterations']} draws of myFM. {origin(result)}."
    return "\n\n".join([PICTURE, *tables, about])


def table_of(task: str, runs: Sequence[dict[str, Any]]) -> str:
    """Table with a row for each set and system: metrics of the test, and seconds of training."""
    protocol, metrics = TASKS[task]
    lines = []
    for (data, system), same in sorted_cases(runs).items():
        cells = [spread([run["metrics"][metric] for run in same]) for metric in metrics]
        if system in LAST:
            cells = [f"**{cell}**" for cell in cells]
        lines.append([data, system, *cells, shown_seconds(mean(run["seconds"] for run in same))])
    return table([protocol, "system", *metrics.values(), "training"], lines, left=(0, 1))


def shown_seconds(seconds: float) -> str:
    """Seconds with one decimal."""
    return f"{seconds:.1f} s" if seconds >= 0.05 else "under 0.1 s"


def sorted_cases(runs: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Runs that differ only in the seed, by set and system: the baseline first, this project last."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        found.setdefault((run["data"], run["system"]), []).append(run)
    sets = list(dict.fromkeys(data for data, _ in found))

    def place(case: tuple[str, str]) -> tuple[int, bool, bool]:
        data, system = case
        return sets.index(data), system not in FIRST, system in LAST

    return {case: found[case] for case in sorted(found, key=place)}


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw the RMSE on validation over the seconds of training, a panel a set and a line a system."""
    sets = list(dict.fromkeys(curve["data"] for curve in result["curves"]))
    figure = new_figure(5.5 * len(sets), 4.5)
    for axes, data in zip(figure.subplots(1, len(sets), squeeze=False)[0], sets, strict=True):
        draw_curves(axes, data, [curve for curve in result["curves"] if curve["data"] == data])
    figure.suptitle(origin(result), fontsize="xx-small")
    figure.savefig(path)


def draw_curves(axes: Any, title: str, curves: Sequence[dict[str, Any]]) -> None:
    """Draw one panel; a system without steps is a level line."""
    for curve in curves:
        style = STYLES[curve["system"]]
        if len(curve["seconds"]) > 1:
            axes.plot(curve["seconds"], curve["rmse"], label=curve["system"], **style)
        else:
            axes.axhline(curve["rmse"][0], label=curve["system"], **style)
    ends = [curve["rmse"][-1] for curve in curves]
    # The first draws are far off.
    axes.set(xscale="log", xlabel="seconds of training", ylabel="RMSE on validation", title=title)
    axes.set_ylim(min(ends) - 0.01, max(ends) + 0.05)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


if __name__ == "__main__":
    main()
