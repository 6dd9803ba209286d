"""Columns written from what was read, and given their name in one rename."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from recsuite.config.config import Config
from recsuite.datasets.columns import MANIFEST
from recsuite.datasets.features import Feature, place_of_identity
from recsuite.datasets.preparation.baselines import baselines_of
from recsuite.datasets.preparation.histories import Stored, write_histories
from recsuite.datasets.preparation.splits import split
from recsuite.datasets.preparation.vocabulary import write_features
from recsuite.errors import UserError
from recsuite.files import digest_of, flush, flushed, sealed
from recsuite.runtime.progress_bar import stage

if TYPE_CHECKING:
    from recsuite.datasets.movielens.formats import RawData

# What is under way, by the number of its process, and what may be in it.
LEFTOVER = re.compile(r"\.making-\d+")
CONTENT = re.compile(r"\w+\.npy|vocabulary\.json|manifest\.json")
# Positions and ends are int32.
MAX_RATINGS = 2**31 - 1

# Of making columns, as its progress is told.
NUM_PARTS = 5


def make_columns(folder: Path, raw: RawData, features: Sequence[Feature], config: Config) -> None:
    """Write columns, and put them where they are to be. Call it with the lock."""
    # The lock is ours, so whatever lies here unfinished was left by a process that died.
    for leftover in filter(_is_leftover, folder.parent.iterdir()):
        shutil.rmtree(leftover)
    making = folder.parent / f".making-{os.getpid()}"
    making.mkdir()
    try:
        with stage("making columns", NUM_PARTS, "parts", even=False) as reached:
            manifest = _write_columns(making, raw, features, config, reached)
        # The rename must not get to the disk before what it names.
        files = [dataclasses.asdict(flushed(path)) for path in sorted(making.iterdir())]
        (making / MANIFEST).write_text(json.dumps(sealed({**manifest, "files": files}), indent=1))
        flush(making / MANIFEST)
        flush(making)
        _publish(making, folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _is_leftover(path: Path) -> bool:
    """Whether `_make` made a folder: --cache_dir may be one in which others make things too."""
    if not LEFTOVER.fullmatch(path.name) or path.is_symlink() or not path.is_dir():
        return False
    return all(CONTENT.fullmatch(found.name) for found in path.iterdir())


def _publish(making: Path, folder: Path) -> None:
    """Give new columns their name; where damaged ones lie, file by file, for somebody may be reading them."""
    if not folder.is_dir():
        folder.unlink(missing_ok=True)
        making.rename(folder)
        return
    made = sorted(making.iterdir(), key=lambda path: path.name == MANIFEST)
    names = {path.name for path in made}
    for old in folder.iterdir():
        if old.is_dir() and (old.name in names or old.suffix == ".npy"):
            shutil.rmtree(old)
        elif old.name not in names and old.suffix == ".npy":
            old.unlink()
    for path in made:
        path.replace(folder / path.name)
    making.rmdir()


def _write_columns(
    folder: Path, raw: RawData, features: Sequence[Feature], config: Config, reached: Callable[[int], None]
) -> dict[str, Any]:
    import pandas

    order, sizes, notes = split(raw, config)
    num_train = sizes[0]
    ratings = raw.ratings
    if len(order) > MAX_RATINGS:
        raise UserError(f"There are {len(order):,} ratings, and {MAX_RATINGS:,} is the limit; give fewer.")
    reached(1)
    # Hashed look-ups of raw ids: ids have gaps, positions have none.
    user = pandas.Index(raw.users["user_id"]).get_indexer(ratings.user_id[order]).astype(np.int32)
    movie = pandas.Index(raw.movies["movie_id"]).get_indexer(ratings.movie_id[order]).astype(np.int32)
    rating = ratings.rating[order]
    np.save(folder / "rating.npy", rating)
    np.save(folder / "time.npy", ratings.time[order])
    reached(2)
    entities = {
        "user": (raw.users, np.unique(user[:num_train])),
        "movie": (raw.movies, np.unique(movie[:num_train])),
    }
    tables, left_out = write_features(folder, entities, features)
    place = place_of_identity("movie", [table.feature for table in tables])
    movie_rows = np.load(folder / "movie_features.npy")[:, place]
    stored = Stored(user, movie, movie_rows[movie], rating, ratings.time[order])
    reached(3)
    ends, longest_history = write_histories(folder, stored, sizes)
    np.save(folder / "rows.npy", np.stack([user, movie, rating.view(np.int32), ends], axis=1))
    reached(4)
    oracle = None if raw.oracle is None else raw.oracle[order]
    if left_out:
        notes.append(f"left out the features that the files do not have: {', '.join(left_out)}")
    return {
        # Of all that a position of the training stands for.
        "digest": f"{digest_of(folder / 'rows.npy')}-{num_train}-{sizes[1]}",
        "num_train": num_train,
        "num_validation": sizes[1],
        "num_test": sizes[2],
        "num_skipped": raw.num_skipped,
        "num_users": len(raw.users),
        "num_movies": len(raw.movies),
        "longest_history": longest_history,
        "mean_rating": float(rating[:num_train].mean(dtype=np.float64)),
        "tables": [dataclasses.asdict(table) for table in tables],
        "baselines": baselines_of(stored, sizes, len(raw.movies), oracle),
        "notes": [*raw.skipped, *notes],
    }
