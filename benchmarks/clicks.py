"""Compare the ranking of clicks with alternating least squares, a matrix factorisation of `implicit`.

    python benchmarks/clicks.py FOLDER                       ratings.csv and movies.csv, as in ml-latest-small
    python benchmarks/clicks.py FOLDER --train --epochs 4    behind --train come flags of the example

Ratings of 4 and more are the clicks; the newest click of each user is the test. Both sides learn from the
same training events, choose by the same validation events, and rank each test item among all items that its
user has not clicked before; other items with the same score count as ranked before it. The settings of least
squares (the number of factors, their regularization, the weight of a click) are chosen on the validation
events; the flags of this project are the defaults. Both read the test once, at the end. For it both know the
validation clicks of users too: here as part of the history, there the factors of users are solved again.
"""

from __future__ import annotations

import argparse
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import DOCS, bar, describe, finish, make_parser, origin, table, train
from peers import LeastSquares, blas_on_one_thread, choose

from recsuite.config.parser import parse_args
from recsuite.datasets.preparation.cache import open_columns

PAGE = DOCS / "log" / "benchmarks.md"
SPLIT = ("--task", "ranking", "--split", "leave_one_out")
CLICKED_FROM = 4.0
# Of each format of MovieLens: file of ratings, separator, lines of a header, and the other files.
FORMATS: tuple[tuple[str, str, int, tuple[str, ...]], ...] = (
    ("ratings.csv", ",", 1, ("movies.csv",)),
    ("u.data", "\t", 0, ("u.item", "u.user", "u.genre")),
    ("ratings.dat", "::", 0, ("movies.dat", "users.dat")),
)
# Largest difference to least squares in NDCG@10.
ALLOWED = 0.02


def main() -> None:
    """Train both and show, and write if that is asked for."""
    parser = make_parser(__doc__, "implicit", "scipy", "threadpoolctl")
    parser.add_argument("data", type=Path, help="folder with the ratings.csv and movies.csv of MovieLens")
    parser.add_argument("--seed", type=int, default=0, help="of both sides (default: 0)")
    parser.add_argument("--ranks", type=int, default=2, help="processes that train (default: 2)")
    parser.add_argument(
        "--train", nargs=argparse.REMAINDER, default=[], help="flags of the example, the last"
    )
    finish("clicks", parser.parse_args(), measure, judge, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    with tempfile.TemporaryDirectory() as folder:
        write_clicks(flags.data, Path(folder) / "clicks")
        command = [*SPLIT, "--data_path", f"{folder}/clicks", "--seed", str(flags.seed), *flags.train]
        columns = open_columns(parse_args(command))
        with blas_on_one_thread():
            chosen, tried = choose(columns, flags.seed)
            theirs = LeastSquares(columns, chosen, flags.seed).measure("test")
        report = train(*command, ranks=flags.ranks)
    about = describe()
    validation = max(epoch["validation"]["ndcg_at_10"] for epoch in report["epochs"])
    return {
        **about,
        "versions": {**about["versions"], "implicit": version("implicit")},
        "clicks": [columns.num_train, columns.num_validation, columns.num_test],
        "num_users": columns.num_users,
        "num_items": columns.num_items,
        "tried": len(tried),
        "chosen": vars(chosen),
        "flags": flags.train,
        "epochs": len(report["epochs"]),
        "validation": {"this": validation, "least squares": max(tried.values())},
        "test": {
            "popularity": columns.baselines["ranks"]["popularity"],
            "least squares": theirs,
            "this": report["test"],
        },
    }


def write_clicks(source: Path, folder: Path) -> None:
    """Write the ratings of a MovieLens set that are clicks, and its users and movies, into a new folder.

    Raises:
        ValueError: when the set has none of FORMATS.
    """
    formats = [each for each in FORMATS if (source / each[0]).is_file()]
    if not formats:
        names = ", ".join(name for name, *_ in FORMATS)
        raise ValueError(f"{source} requires ratings in one of the files {names}")
    name, separator, first, others = formats[0]
    folder.mkdir(parents=True)
    for other in others:
        (folder / other).write_bytes((source / other).read_bytes())
    # As texts: each line stays the same, character for character.
    lines = (source / name).read_text().splitlines(keepends=True)
    clicks = [line for line in lines[first:] if float(line.split(separator)[2]) >= CLICKED_FROM]
    (folder / name).write_text("".join([*lines[:first], *clicks]))


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar: this ranking beside that of least squares."""
    this, other = (result["test"][name]["ndcg_at_10"] for name in ("this", "least squares"))
    return [
        bar("NDCG@10, this - least squares", this - other, -ALLOWED, f"{this - other:.4f}", f"-{ALLOWED}")
    ]


def render(result: dict[str, Any]) -> str:
    """Table, chosen settings and origin."""
    cells = [
        (name, f"{test['ndcg_at_10']:.4f}", f"{test['hr_at_10']:.4f}")
        for name, test in result["test"].items()
    ]
    train, validation, test = result["clicks"]
    chosen = ", ".join(f"{name} {value}" for name, value in result["chosen"].items())
    on_validation = ", ".join(f"{name} {value:.4f}" for name, value in result["validation"].items())
    return (
        f"{table(('test', 'NDCG@10', 'HR@10'), cells)}\n\n"
        f"{train:,} clicks for training, {validation:,} for validation, {test:,} for the test; "
        f"{result['num_users']:,} users, {result['num_items']:,} items.\n"
        f"Least squares: {chosen}, of {result['tried']} settings. NDCG@10 on validation: {on_validation}.\n"
        f"{origin(result)}"
    )


if __name__ == "__main__":
    main()
