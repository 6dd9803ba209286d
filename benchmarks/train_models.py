"""The models that benchmarks/train.py trains, and the columns with their ratings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from train_team import DIM, MEAN_RATING, MLP_DIMS

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.movielens.synthetic import POPULARITY_SLOPE
from recsuite.datasets.preparation.arrays import Own, write_records
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, USER, Table

# Of the features that MovieLens has beside user and movie: how many values.
VALUES = {"gender": 2, "age": 7, "occupation": 21, "year": 81, "genres": 18}
MOST_GENRES = 3


@dataclass(frozen=True)
class Model:
    """A model and how it is measured.

    batch, large_batch: ratings of each of two ranks; history: how long; bars: what two processes are to make
    of the best plain rate, for small tables, for large ones and for the largest; mlp_dims: of hidden layers.
    """

    name: str
    title: str
    dim: int
    batch: int
    large_batch: int
    history: int
    num_ratings: int
    bars: tuple[float, float, float]
    mlp_dims: tuple[int, ...] = MLP_DIMS

    @property
    def config(self) -> Config:
        """The flags of its training."""
        return Config.of(embedding_dim=self.dim, mlp_dims=self.mlp_dims, history=self.history)


TWO_TABLES = Model("two_tables", "User and movie alone", DIM, 4096, 16384, 0, 2_000_000, bars=(1.0, 1.3, 1.5))
# What `example.py` trains by default on synthetic ratings. Fewer ratings, for plain PyTorch has the history
# of each of them in memory.
DEFAULT = Model(
    "default", "The default model", 32, 2048, 8192, Config().data.history, 1_000_000, bars=(1.3, 1.5, 1.5)
)
MODELS = {model.name: model for model in (DEFAULT, TWO_TABLES)}


def rows_of(model: Model, users: int, movies: int) -> int:
    """How many rows the tables of a model have, with those for unknown values."""
    if not model.history:
        return users + movies + 2
    return users + 2 * movies + 3 + sum(VALUES.values()) + len(VALUES)


def make_columns(folder: Path, users: int, movies: int, num_ratings: int, model: Model = TWO_TABLES) -> None:
    """Write ratings as the columns of a data set.

    Users are all as likely, and so are movies where the model has nothing else: few are asked for twice. With
    histories, which are all full, movies are as popular as in the synthetic ratings.
    """
    generator = np.random.default_rng(0)
    fields = {
        "user": generator.integers(users, size=num_ratings).astype(np.int32),
        "item": _movies(generator, movies, num_ratings, model),
        "label": generator.integers(1, 6, size=num_ratings).astype(np.float32),
    }
    own = {
        USER: Own(features=[np.arange(1, users + 1, dtype=np.int32)]),
        ITEM: Own(features=[np.arange(1, movies + 1, dtype=np.int32)]),
    }
    if model.history:
        fields |= _write_histories(folder, generator, fields["user"], movies, model)
        for name, number in VALUES.items():
            feature = next(feature for feature in SCHEMA.features if feature.name == name)
            owners = len(own[feature.entity].features[0])
            if feature.multi:
                counts = generator.integers(1, MOST_GENRES + 1, size=owners)
                np.save(folder / f"{name}_values.npy", _rows(generator, number, counts.sum()))
                places = np.stack([counts.cumsum() - counts, counts], axis=1).astype(np.int32)
                own[feature.entity].lists.append(places)
            else:
                own[feature.entity].features.append(_rows(generator, number, owners))
    write_records(folder / "rows.npy", fields, Own())
    for entity in ENTITIES:
        write_records(folder / f"{SCHEMA.name_of(entity)}_features.npy", {}, own[entity])


def _movies(generator: np.random.Generator, number: int, size: int, model: Model) -> np.ndarray:
    """Movies, int32 [size]."""
    if not model.history:
        return generator.integers(number, size=size).astype(np.int32)
    # The inverse of the distribution: chances rise like exp(slope * place), which gives the top tenth two
    # thirds. Popular ones lie anywhere in the table.
    least = np.exp(-POPULARITY_SLOPE)
    places = -np.log(generator.uniform(least, 1, size)) / POPULARITY_SLOPE
    of_place = generator.permutation(number).astype(np.int32)
    return of_place[np.minimum((places * number).astype(np.int64), number - 1)]


def _rows(generator: np.random.Generator, number: int, size: int) -> np.ndarray:
    """Table rows of a feature with so many values, int32 [size]."""
    return generator.integers(1, number + 1, size=size).astype(np.int32)


def _write_histories(
    folder: Path, generator: np.random.Generator, users: np.ndarray, movies: int, model: Model
) -> dict[str, np.ndarray]:
    """Write a history for each user; the fields of the ratings that tell of it."""
    number = model.num_ratings
    labels = generator.integers(1, 6, size=number).astype(np.float32)
    held = np.stack([_movies(generator, movies, number, model) + 1, labels.view(np.int32)], axis=1)
    np.save(folder / f"{HISTORY}.npy", held)
    # Anywhere in the file: with millions of users many share a part, which they would not have to look up.
    begins = generator.integers(number - model.history, size=int(users.max()) + 2)
    np.save(folder / f"{HISTORY}_offsets.npy", begins)
    return {f"{HISTORY}_end": (begins[users] + model.history).astype(np.int32)}


def columns_of(folder: Path, model: Model = TWO_TABLES) -> Columns:
    """What `make_columns` wrote."""
    users, movies = (
        len(np.load(folder / f"{SCHEMA.name_of(entity)}_features.npy", mmap_mode="r")) for entity in ENTITIES
    )
    numbers = {SCHEMA.user: users, SCHEMA.item: movies, **(VALUES if model.history else {})}
    tables = [
        Table(feature, numbers[feature.name] + 1, MOST_GENRES if feature.multi else 1)
        for feature in SCHEMA.features
        if feature.name in numbers
    ]
    if model.history:
        tables.append(Table(SCHEMA.history, movies + 1, model.history))
    nothing: dict[str, Any] = {
        "num_validation": 0,
        "num_test": 0,
        "num_skipped": 0,
        "longest_history": model.history,
        "longest_audience": 0,
        "baselines": {},
        "numbers": (),
        "notes": (),
    }
    return Columns(
        folder=str(folder),
        source="",
        schema=SCHEMA,
        num_train=len(np.load(folder / "rows.npy", mmap_mode="r")),
        num_users=users,
        num_items=movies,
        mean_label=MEAN_RATING,
        tables=tuple(tables),
        **nothing,
    )
