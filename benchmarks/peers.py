"""Other systems that this project is compared with, and the events that they learn from.

panel.py, clicks.py and sequences.py import them. The columns of this project define the splits. It keeps its
validation events for stopping; the others learn from them too before they read the test, which is in their
favour. Needs requirements-dev.txt.

Ratings are predicted by the baseline of biases, by plain_factors.py, which learns from the training events
alone, and by myFM, a Bayesian factorization machine. It draws its parameters many times by Gibbs sampling,
and predicts the mean over the draws. Ranks are those of popularity, alternating least squares of the package
`implicit`, and EASE (Steck, "Embarrassingly shallow autoencoders for sparse data", 2019). The settings of
each are those of the highest NDCG@10 on validation, learned from the training events. With them it learns
again, from training and validation events, and reads the test once. Seconds are those of the training alone.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from common import require, timed, train, training_seconds

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.baselines import fit_biases
from recsuite.datasets.preparation.cache import open_columns
from recsuite.metrics import Calibration, Metrics, finite, measure, measure_ranks

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

NUM_RANKS = 2
NUM_SEEDS = 3
RANK = 10
# First draws that myFM skips by default, because they depend on the initial values.
BURN_IN = 5
UNDEFINED = Calibration(float("nan"), float("nan"))
# Settings of alternating least squares that are tried. The defaults of `implicit` lie inside: 64, 0.01 and 1.
FACTORS, REGULARIZATIONS, ALPHAS = (16, 32, 64, 128), (0.01, 0.1, 1.0, 10.0), (1.0, 4.0, 16.0, 64.0)
SQUARES_ITERATIONS = 15
# The newest fifth has more events than memory holds scores for.
CASES_AT_ONCE = 1024
PENALTIES = (10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
NUM_PARTS = 5
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


# --- the comparison ---


@dataclass(frozen=True)
class PeerCase:
    """Set, task and seed of a comparison; folder: of columns and reports."""

    data: Path
    task: str
    seed: int
    folder: Path
    # Of this project: the task, if it is not the default, and the split.
    flags: tuple[str, ...]
    # Processes of this project.
    ranks: int = NUM_RANKS

    @property
    def command(self) -> list[str]:
        """Flags of this project."""
        places = ("--data_path", str(self.data), "--cache_dir", str(self.folder / "columns"))
        return [*self.flags, *places, "--seed", str(self.seed)]

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


def add_sets(parser: argparse.ArgumentParser, seeds: int = NUM_SEEDS) -> None:
    """Add the flags that `data_sets` reads, and --seeds."""
    parser.add_argument("--real", type=Path, nargs="+", default=[], help="folders of MovieLens sets")
    parser.add_argument("--only_real", action="store_true", help="skip ml-100k")
    parser.add_argument("--seeds", type=int, default=seeds, help=f"of each case (default: {seeds})")


def data_sets(flags: argparse.Namespace, folder: Path) -> Iterator[Path]:
    """Folders of the data sets; ml-100k is written into one."""
    # First: the other sets may take hours.
    if not flags.only_real:
        require(PACKAGE)
    yield from flags.real
    if not flags.only_real:
        write_movielens_100k(folder / "ml-100k")
        yield folder / "ml-100k"


def compare_ratings(case: PeerCase, iterations: int, factors: int = RANK) -> list[dict[str, Any]]:
    """Compare every system on the test; iterations, factors: of myFM."""
    # It imports torch.
    from plain_factors import plain_factors

    columns = case.columns
    known, test = ratings_of(columns, "train", "validation"), ratings_of(columns, "test")
    train, validation = ratings_of(columns, "train"), ratings_of(columns, "validation")
    machine = partial(factorization_machine, known, test, case.seed, iterations=iterations, factors=factors)
    others = {
        "biases": biases(known, test),
        "plain factors": plain_factors(train, validation, test, case.seed),
        "myFM, ids": machine(sets=False),
        "myFM, who rated what": machine(sets=True),
    }
    return [
        *trained_ratings(case),
        *(case.run(name, {"rmse": fitted.rmse}, fitted.seconds) for name, fitted in others.items()),
    ]


def trained_ratings(case: PeerCase) -> list[dict[str, Any]]:
    """Train this project from drawn rows, its default, and from solved ones."""
    systems: dict[str, tuple[str, ...]] = {"this": (), "this, solved": ("--preset", "solved")}
    reports = {name: case.report(case.columns, *flags) for name, flags in systems.items()}
    return [
        case.run(name, {"rmse": report["test"]["rmse"]}, training_seconds(report))
        for name, report in reports.items()
    ]


def compare_ranks(case: PeerCase) -> list[dict[str, Any]]:
    """Compare every system on the test."""
    columns = case.columns
    report = case.report(columns)
    others = {
        "popularity": popularity(columns),
        "least squares": least_squares(columns, case.seed),
        "EASE": best_ease(columns),
    }
    return [
        case.run("this", report["test"], training_seconds(report)),
        *(
            case.run(name, ranked.metrics, ranked.seconds, settings=ranked.settings)
            for name, ranked in others.items()
        ),
    ]


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
        from scipy.sparse import csr_matrix

        return csr_matrix((np.ones(len(self.users)), (self.users, self.items)), shape=self.shape)


@dataclass(frozen=True)
class Fitted:
    """RMSE of a system on the ratings that it predicts, and seconds of its training."""

    rmse: float
    seconds: float


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


def biases(known: Ratings, asked: Ratings) -> Fitted:
    """Fit the baseline of the training on the known ratings."""
    seconds, (fitted,) = timed(
        fit_biases, known.users, known.items, known.labels, known.shape, [len(known.labels)]
    )
    return Fitted(rmse_of(fitted.predict(asked.users, asked.items), asked.labels), seconds)


def factorization_machine(
    known: Ratings,
    asked: Ratings,
    seed: int,
    sets: bool,
    iterations: int,
    factors: int = RANK,
) -> Fitted:
    """Fit myFM on the known ratings, in any order.

    Args:
        sets: add the rated movies to the features of a user, and its users to those of a movie.
    """
    myfm = import_myfm()
    begin = time.perf_counter()
    of_users, of_items, groups = features(known, sets)

    def blocks(ratings: Ratings) -> list[Any]:
        places = (ratings.users.astype(np.int64), ratings.items.astype(np.int64))
        return [myfm.RelationBlock(*block) for block in zip(places, (of_users, of_items), strict=True)]

    draws = Draws(blocks(asked), len(asked.labels), iterations, begin)
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
    return Fitted(rmse_of(draws.mean, asked.labels), draws.seconds)


def features(known: Ratings, sets: bool) -> tuple[csr_matrix, csr_matrix, list[int]]:
    """Features of users and items, float64 [users, n] and [items, m], and sizes of groups with one prior."""
    from scipy.sparse import hstack, identity

    num_users, num_items = known.shape
    of_users, of_items = identity(num_users, format="csr"), identity(num_items, format="csr")
    if not sets:
        return of_users, of_items, [num_users, num_items]
    of_users = hstack([of_users, scaled(known.matrix)], format="csr")
    of_items = hstack([of_items, scaled(known.matrix.T.tocsr())], format="csr")
    return of_users, of_items, [num_users, num_items, num_items, num_users]


def scaled(rated: csr_matrix) -> csr_matrix:
    """Rows divided by the root of their number of ones, so that each has length 1."""
    from scipy.sparse import diags_array

    counts = np.maximum(rated.sum(axis=1), 1)
    return (diags_array(1 / np.sqrt(np.asarray(counts).ravel())) @ rated).tocsr()


class Draws:
    """Callback of myFM: averages the predictions of its draws, with the clock of the training stopped."""

    def __init__(self, blocks: list[Any], num_asked: int, iterations: int, begin: float) -> None:
        from scipy.sparse import csr_matrix

        self.blocks = blocks
        # As many as its own predictor skips.
        self.num_skipped = iterations - min(max(iterations - BURN_IN, BURN_IN), iterations)
        self.nothing = csr_matrix((num_asked, 0))
        # Of the training until now, and predictions, float64 [asked].
        self.seconds, self.mean = 0.0, np.zeros(num_asked)
        self.resumed = begin

    def __call__(self, place: int, machine: Any, *_: Any) -> tuple[bool, None]:
        """Add a draw, numbered from 0; never ends the training."""
        self.seconds += time.perf_counter() - self.resumed
        number = place + 1 - self.num_skipped
        if number > 0:
            self.mean += (machine.predict_score(self.nothing, self.blocks) - self.mean) / number
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
    from scipy.sparse import csr_matrix

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
    return measure_ranks(np.concatenate(ranks) if ranks else np.zeros(0, np.int64)).values


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


def ease(known: csr_matrix, penalty: float) -> np.ndarray:
    """Scores of EASE, float64 [users, items].

    They are the known events X times the weights B that minimise |X - X B|^2 + penalty |B|^2 with a diagonal
    of zeros. With P the inverse of X'X + penalty, B is 1 - P divided, column by column, by the diagonal of P.
    X P is K X, where K is the inverse of X X' + penalty, which is smaller: these sets have fewer users than
    items.
    """
    events = known.toarray().astype(np.float64)
    through = np.linalg.solve(events @ events.T + penalty * np.eye(len(events)), events)
    diagonal = (1 - (events * through).sum(axis=0)) / penalty
    return events - through / diagonal


def blas_on_one_thread() -> AbstractContextManager[Any]:
    """Limit matrix products to one thread: the threads of `implicit` share the cores already."""
    from threadpoolctl import threadpool_limits

    limits: AbstractContextManager[Any] = threadpool_limits(1, "blas")
    return limits


def popularity(columns: Columns) -> Ranked:
    """Baseline of the columns; the seconds are those of counting."""
    begin = time.perf_counter()
    clicks_before(columns, "test").sum(axis=0)
    return Ranked(columns.baselines["ranks"]["popularity"], time.perf_counter() - begin, {})


def least_squares(columns: Columns, seed: int) -> Ranked:
    """Alternating least squares, with the best settings of the grid."""
    with blas_on_one_thread():
        settings, _ = choose(columns, seed)
        seconds, model = timed(LeastSquares, columns, settings, seed, "test")
        return Ranked(model.measure("test"), seconds, dict(vars(settings)))


def best_ease(columns: Columns) -> Ranked:
    """EASE, with the best penalty of the grid."""
    known = clicks_before(columns, "validation")
    tried = {each: judged(columns, "validation", ease(known, each))["ndcg_at_10"] for each in PENALTIES}
    penalty = max(tried, key=lambda each: tried[each])
    seconds, scores = timed(ease, clicks_before(columns, "test"), penalty)
    return Ranked(judged(columns, "test", scores), seconds, {"penalty": penalty})


def judged(columns: Columns, split: str, scores: np.ndarray) -> Metrics:
    """HR@10 and NDCG@10 of a split, by scores, float [users, items]."""
    users, _ = events_of(columns, split)
    return judged_cases(columns, split, lambda part: scores[users[part]])


# --- MovieLens 100K ---


def write_movielens_100k(folder: Path) -> None:
    """Write MovieLens 100K as GroupLens published it, from the files of the package `recbole`.

    Writes u.data, u.item, u.user, u.genre and the official parts u1 to u5 into a new folder, and does not
    import the package. Release dates and addresses are not in the package; they are unused here.

    Raises:
        PackageNotFoundError: without the package, of requirements-dev.txt.
    """
    source = Path(str(distribution(PACKAGE).locate_file(FOLDER)))
    folder.mkdir()
    ratings = ["\t".join(fields) for fields in rows_of(source / "ml-100k.inter")]
    write_lines(folder / "u.data", ratings)
    # The rule of the set's mku.sh: the test of a part is the next fifth of u.data, whose order was kept.
    fifth = len(ratings) // NUM_PARTS
    for part in range(NUM_PARTS):
        begin, end = part * fifth, (part + 1) * fifth
        write_lines(folder / f"u{part + 1}.test", ratings[begin:end])
        write_lines(folder / f"u{part + 1}.base", ratings[:begin] + ratings[end:])
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


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write lines, each with its end."""
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
