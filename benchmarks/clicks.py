"""Rank clicks, and hold the ranking against alternating least squares, a matrix factorisation of `implicit`.

    python benchmarks/clicks.py FOLDER                       ratings.csv and movies.csv, as in ml-latest-small
    python benchmarks/clicks.py FOLDER --train --epochs 4    behind --train come flags of the example

Ratings of 4 and more are the clicks; the newest click of each user is the test. Both sides learn from the
same training events, choose by the same validation events, and rank each test item among all items that its
user has not clicked before; other items with the same score count as ranked before it. The settings of least
squares (the number of factors, their regularization, how much a click counts) are chosen on the validation
events; the flags of this project are the defaults. Both read the test once, in the end. For it both know the
users' validation clicks too: here they are part of the history, there the factors of the users are solved for
again. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from environment import DOCS, EXAMPLE, describe, finish, make_parser, torchrun
from figures import bar, origin, table
from implicit.als import AlternatingLeastSquares  # codespell:ignore als
from scipy.sparse import csr_matrix
from threadpoolctl import threadpool_limits

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import Metrics, measure_ranks
from recsuite.datasets.preparation.cache import open_columns

PAGE = DOCS / "log" / "benchmarks.md"
MARKS = ("<!-- clicks: made by benchmarks/clicks.py -->", "<!-- end of clicks -->")
CLICKED_FROM = 4.0
SPLIT = ("--task", "ranking", "--split", "leave_one_out")
# Of alternating least squares: what is tried. The defaults of `implicit` lie inside: 64, 0.01 and 1.
FACTORS, REGULARIZATIONS, ALPHAS = (16, 32, 64, 128), (0.01, 0.1, 1.0, 10.0), (1.0, 4.0, 16.0, 64.0)
ITERATIONS = 15
# A newest fifth has more events than there is memory for all of their scores.
CASES_AT_ONCE = 1024
# How far the ranking may fall short of least squares, in NDCG@10.
ALLOWED = 0.02


@dataclass(frozen=True)
class Settings:
    """Of least squares: factors of a vector, their regularization, and the weight of a click, where that of
    an item that was not clicked is 1.
    """

    factors: int
    regularization: float
    alpha: float


class LeastSquares:
    """Alternating least squares on the events of columns that are known before those of a split."""

    def __init__(
        self, columns: Columns, settings: Settings, seed: int, fitted_for: str = "validation"
    ) -> None:
        self.columns = columns
        self.model = AlternatingLeastSquares(
            settings.factors,
            regularization=settings.regularization,
            alpha=settings.alpha,
            iterations=ITERATIONS,
            random_state=seed,
            use_gpu=False,
            calculate_training_loss=False,
        )
        self.model.fit(clicks_before(columns, fitted_for), show_progress=False)

    def measure(self, split: str) -> Metrics:
        """HR@10 and NDCG@10 of "validation" or "test"."""
        known = clicks_before(self.columns, split)
        users, of_case = np.unique(events_of(self.columns, split)[0], return_inverse=True)
        # Of the items as they were learned; in training they are the same but for the last half step.
        vectors = np.asarray(self.model.recalculate_user(users, known[users]))
        items = np.asarray(self.model.item_factors)
        return judged_cases(self.columns, split, lambda part: vectors[of_case[part]] @ items.T)


def main() -> None:
    """Train both, show both."""
    flags = parse()
    with tempfile.TemporaryDirectory() as folder:
        write_clicks(flags.data, Path(folder) / "clicks")
        command = [*SPLIT, "--data_path", f"{folder}/clicks", "--seed", str(flags.seed), *flags.train]
        columns = open_columns(parse_args(command))
        # Its own threads share the cores, so those of the products would only be in their way.
        with threadpool_limits(1, "blas"):
            chosen, tried = choose(columns, flags.seed)
            theirs = LeastSquares(columns, chosen, flags.seed).measure("test")
        ours = train(command, flags.ranks, Path(folder) / "report")
        about = describe()
        result = {
            **about,
            "versions": {**about["versions"], "implicit": version("implicit")},
            "clicks": [columns.num_train, columns.num_validation, columns.num_test],
            "num_users": columns.num_users,
            "num_items": columns.num_items,
            "tried": len(tried),
            "chosen": vars(chosen),
            "flags": flags.train,
            "epochs": ours["epochs"],
            "validation": {"this": ours["validation"], "least squares": max(tried.values())},
            "test": {
                "popularity": columns.baselines["ranks"]["popularity"],
                "least squares": theirs,
                "this": ours["test"],
            },
        }
    finish("clicks", {**result, "bars": judge(result)}, render(result), flags, page=PAGE, marks=MARKS)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path, help="folder with the ratings.csv and movies.csv of MovieLens")
    parser.add_argument("--seed", type=int, default=0, help="of both sides (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train (default: 2)")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], help="flags of the example, the last"
    )
    return parser.parse_args()


def write_clicks(source: Path, folder: Path) -> None:
    """The ratings of `source` that are clicks, and its movies, as a data set in another folder."""
    folder.mkdir()
    # As texts: what is written is, character for character, what was read.
    ratings = pd.read_csv(source / "ratings.csv", dtype=str)
    is_click = ratings["rating"].astype(float) >= CLICKED_FROM
    ratings[is_click].to_csv(folder / "ratings.csv", index=False)
    (folder / "movies.csv").write_bytes((source / "movies.csv").read_bytes())


def events_of(columns: Columns, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions of the users and of the items of a split's events, int32 [n] both."""
    positions = columns.range_of(split)
    rows = columns.column("rows")[positions.start : positions.stop]
    return rows["user"], rows["item"]


def clicks_before(columns: Columns, split: str) -> csr_matrix:
    """Who clicked what before the events of a split, float32 [users, items]: as training ranks it, those of
    the training events, and for the test those of the validation events too.
    """
    splits = ("train",) if split == "validation" else ("train", "validation")
    users, items = np.concatenate([events_of(columns, name) for name in splits], axis=1)
    ones = np.ones(len(users), np.float32)
    return csr_matrix((ones, (users, items)), shape=(columns.num_users, columns.num_items))


def ranks_of(scores: np.ndarray, items: np.ndarray, known: csr_matrix) -> np.ndarray:
    """The rank of each case's item among all that its user has not clicked, int64 [n], from 1 on.

    scores: float32 [n, items]; items: int [n]; known: what the users clicked before, [n, items]. Every other
    item that scores as high counts as before.
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


def choose(columns: Columns, seed: int) -> tuple[Settings, dict[Settings, float]]:
    """The settings of the highest NDCG@10 on validation, and that of all that were tried."""
    tried = {
        settings: LeastSquares(columns, settings, seed).measure("validation")["ndcg_at_10"]
        for settings in every_settings()
    }
    return max(tried, key=lambda settings: tried[settings]), tried


def every_settings() -> Iterator[Settings]:
    """The grid."""
    for values in itertools.product(FACTORS, REGULARIZATIONS, ALPHAS):
        yield Settings(*values)


def train(command: list[str], num_ranks: int, report: Path) -> dict[str, Any]:
    """Of a training by the example: its test, the number of epochs, and the best NDCG@10 on validation."""
    found = report_of(command, num_ranks, report)
    best = max(epoch["validation"]["ndcg_at_10"] for epoch in found["epochs"])
    return {"test": found["test"], "epochs": len(found["epochs"]), "validation": best}


def report_of(command: list[str], num_ranks: int, folder: Path) -> dict[str, Any]:
    """What a training by the example with these flags reports, in a folder."""
    launched = [*torchrun(num_ranks), str(EXAMPLE), *command, "--report_dir", str(folder)]
    subprocess.run(launched, check=True, stdout=subprocess.DEVNULL)
    report: dict[str, Any] = json.loads((folder / "metrics.json").read_text())
    return report


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The bar: this ranking beside that of least squares."""
    this, other = (result["test"][name]["ndcg_at_10"] for name in ("this", "least squares"))
    return [
        bar("NDCG@10, this - least squares", this - other, -ALLOWED, f"{this - other:.4f}", f"-{ALLOWED}")
    ]


def render(result: dict[str, Any]) -> str:
    """The table, and what was chosen."""
    cells = [
        (name, f"{test['ndcg_at_10']:.4f}", f"{test['hr_at_10']:.4f}")
        for name, test in result["test"].items()
    ]
    train, validation, test = result["clicks"]
    chosen = ", ".join(f"{name} {value}" for name, value in result["chosen"].items())
    on_validation = ", ".join(f"{name} {value:.4f}" for name, value in result["validation"].items())
    return (
        f"{table([('test', 'NDCG@10', 'HR@10'), ('---', '---:', '---:'), *cells])}\n\n"
        f"{train:,} clicks for training, {validation:,} for validation, {test:,} for the test; "
        f"{result['num_users']:,} users, {result['num_items']:,} items.\n"
        f"Least squares: {chosen}, of {result['tried']} settings. NDCG@10 on validation: {on_validation}.\n"
        f"{origin(result)}"
    )


if __name__ == "__main__":
    main()
