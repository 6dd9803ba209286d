"""Synthetic ratings as they were written, read back for tests of what was planted in them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass
class World:
    """A written folder, read back without the project's own reader."""

    folder: Path
    user_ids: np.ndarray
    movie_ids: np.ndarray
    ratings: np.ndarray
    times: np.ndarray
    oracle: np.ndarray
    summary: dict[str, float]
    movies: list[list[str]]
    users: list[list[str]]

    @property
    def is_test(self) -> np.ndarray:
        """The newest fifth of the ratings, bool [ratings]."""
        return self.times >= np.sort(self.times)[len(self.times) * 4 // 5]


def read(folder: Path) -> World:
    """Files of `write_synthetic`."""
    rows = [row.split("::") for row in (folder / "ratings.dat").read_text().splitlines()]
    user_ids, movie_ids, ratings, times = np.array(rows, dtype=int).T
    return World(
        folder,
        user_ids,
        movie_ids,
        ratings,
        times,
        oracle=np.load(folder / "oracle.npy"),
        summary=json.loads((folder / "oracle.json").read_text()),
        movies=[row.split("::") for row in (folder / "movies.dat").read_text("latin-1").splitlines()],
        users=[row.split("::") for row in (folder / "users.dat").read_text().splitlines()],
    )


def rmse(errors: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(errors, dtype=np.float64))))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
