"""Measure the delay from an event to a served model that has learned from it, and the value of that.

    python benchmarks/online_serving.py --write                          docs/online_serving.json: minutes
    python benchmarks/online_serving.py --ratings 3000 --chunks 4 --chunk 128 --burst 2

A training follows a file with --follow_data, and a server follows the training. Ratings of a drifting world
are appended, a chunk at a time. Three models predict each chunk before it is appended: the served one; one
that is trained in epochs on all ratings each night, after so many chunks, while the others wait; and the
served one of the beginning, which learns no more. All get the features of user and movie, and the history of
the user before each rating. Then the time is measured until the served model has learned the chunk; and of
several chunks at once, the ratings a second. Prints each figure beside its bar.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import pandas as pd
from common import DOCS, EXAMPLE, bar, describe, finish, make_parser, mean, origin, table, train
from online_quality import Lines

from example import make_model
from recsuite.checkpoint.folder import LATEST
from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.source import locate
from recsuite.extras.drifting import DriftingWorld
from recsuite.serving.followers import wait_for_first
from recsuite.serving.served import Follower, ServedModel

PAGE = DOCS / "dynamic.md"
SERVED, NIGHTLY, NEVER = "served online", "retrained each night", "never trained again"
# Share of the test of a training in epochs.
TESTED = 0.01
# Items of a user history, the default.
HISTORY = DataConfig.history
# Seconds between two looks for a newer model, and until a missing one is an error.
LOOK_EVERY, DEADLINE = 0.01, 300.0


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--ratings", type=int, default=50_000, help="of the world (default: 50,000)")
    parser.add_argument("--chunk", type=int, default=256, help="ratings that are appended at once")
    parser.add_argument("--chunks", type=int, default=60, help="number of chunks, one after the other")
    parser.add_argument("--burst", type=int, default=20, help="chunks at once, at the end")
    parser.add_argument("--night", type=int, default=20, help="chunks from one night to the next")
    finish("online_serving", parser.parse_args(), measure, judge, render, PAGE, mark="online")


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    about = {name: getattr(flags, name) for name in ("ratings", "chunk", "night")}
    with tempfile.TemporaryDirectory() as folder:
        return {**describe(), **about, **follow(flags, Path(folder))}


def follow(flags: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Seconds until each chunk was learned, errors of the three models on it, and the rate of a burst."""
    write_synthetic(folder / "world", flags.ratings, seed=0, world=DriftingWorld())
    lines, features = Lines(folder / "world"), read_features(folder / "world")
    # The rest is history; windows are whole chunks.
    begin = (flags.ratings // flags.chunk - flags.chunks - flags.burst) * flags.chunk
    lines.write_oldest(begin, folder / "data")
    with training(folder, flags):
        wait_for_first(folder / "dumps")
        follower = Follower(folder / "dumps", model=make_model, checkpoint="latest")
        wait_until(follower, begin)
        models = {SERVED: follower.model, NEVER: ServedModel.open(folder / "dumps", LATEST, model=make_model)}
        seconds, errors, start = [], [], time.monotonic()
        for number in range(flags.chunks):
            if number % flags.night == 0:
                models[NIGHTLY] = retrained(lines, folder, begin)
            rows = lines.rows[begin : begin + flags.chunk]
            found = predicted(models, lines.rows[: begin + flags.chunk], begin, *features)
            begin += flags.chunk
            errors.append({"minute": (time.monotonic() - start) / 60, **found})
            append(folder / "data" / lines.name, rows)
            seconds.append(wait_until(follower, begin))
        rows = lines.rows[begin : begin + flags.burst * flags.chunk]
        append(folder / "data" / lines.name, rows)
        rate = len(rows) / wait_until(follower, begin + len(rows))
    return {"seconds": seconds, "errors": errors, "events_per_second": rate}


@contextlib.contextmanager
def training(folder: Path, flags: argparse.Namespace) -> Iterator[None]:
    """Run a training that follows a folder of ratings."""
    places = ("--data_path", folder / "data", "--save_dir", folder / "dumps")
    stream = ("--stream", "--follow_data", "--inc_dump", "--window", flags.chunk)
    command = [sys.executable, EXAMPLE, *places, *stream, "--vocabulary", "dynamic", "--capacity", 10_000]
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def retrained(lines: Lines, folder: Path, number: int) -> ServedModel:
    """Best model of a training from scratch on the oldest ratings."""
    data, save_dir = folder / "night", folder / f"dumps of {number}"
    lines.write_oldest(number, data)
    fixed = ("--dump", "--duplicates", "keep", "--test_fraction", str(TESTED))
    train("--data_path", data, "--cache_dir", folder / "columns", "--save_dir", save_dir, *fixed)
    return ServedModel.open(save_dir, model=make_model)


def append(path: Path, rows: list[bytes]) -> None:
    """Append ratings to their file."""
    with path.open("ab") as file:
        file.write(b"".join(rows))


def wait_until(follower: Follower, position: int) -> float:
    """Wait until the served model has learned all ratings before a position, and return the seconds."""
    start = time.monotonic()
    while True:
        follower.refresh()
        stream = follower.model.progress.stream
        if stream is not None and stream.begin >= position:
            return time.monotonic() - start
        if time.monotonic() - start > DEADLINE:
            raise RuntimeError(f"no model has learned {position} ratings after {DEADLINE:.0f} s")
        time.sleep(LOOK_EVERY)


def predicted(
    models: dict[str, ServedModel],
    rows: list[bytes],
    begin: int,
    users: pd.DataFrame,
    movies: pd.DataFrame,
) -> dict[str, float]:
    """RMSE of each model on the ratings from a position on, each with its user's history until then.

    users, movies: see `read_features`.
    """
    user, movie, stars = np.array([row.split(b"::")[:3] for row in rows]).astype(np.int64).T
    mine = [np.flatnonzero(user[:place] == user[place])[-HISTORY:] for place in range(begin, len(rows))]
    values = {
        "user": user[begin:].tolist(),
        "movie": movie[begin:].tolist(),
        **users.loc[user[begin:]].to_dict("list"),
        **movies.loc[movie[begin:]].to_dict("list"),
        "history": [movie[places].tolist() for places in mine],
        "history_ratings": [stars[places].tolist() for places in mine],
    }
    return {
        name: math.sqrt(np.square(model.score(values).numpy() - stars[begin:]).mean())
        for name, model in models.items()
    }


def read_features(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Features of the users and of the movies of a world, by id."""
    config = Config.of(data_path=str(folder)).data
    raw = read(locate(config, seed=0), config)
    return raw.users.set_index("user_id"), raw.items.set_index("movie_id").drop(columns="title")


def judge(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Bar: the served model is better than the one that is retrained each night."""
    served, other = (mean(chunk[name] for chunk in result["errors"]) for name in (SERVED, NIGHTLY))
    return [
        bar("RMSE served online", served, other, f"{served:.4f}", f"{other:.4f}, {NIGHTLY}", at_most=True)
    ]


def render(result: dict[str, Any]) -> str:
    """Delay, rate, and errors over the first and the last third of the chunks."""
    seconds, third = result["seconds"], max(1, len(result["errors"]) // 3)
    worst = quantiles(seconds, n=100, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    lines = []
    for name in (SERVED, NIGHTLY, NEVER):
        parts = (result["errors"][:third], result["errors"][-third:])
        lines.append([name, *(f"{mean(chunk[name] for chunk in part):.4f}" for part in parts)])
    nights = f"{len(seconds)} chunks, a night after each {result['night']}"
    about = (
        f"From {result['chunk']} appended ratings to a served model that has learned from them: "
        f"{median(seconds):.1f} s (median), {worst:.1f} s (99 of 100); {result['events_per_second']:,.0f} "
        f"ratings/s where many are appended at once. {nights}. {origin(result)}."
    )
    return f"{table(['RMSE of the next ratings', 'first third', 'last third'], lines)}\n\n{about}"


if __name__ == "__main__":
    main()
