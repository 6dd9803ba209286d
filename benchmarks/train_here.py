"""Training of this project on drawn columns, for benchmarks that measure it in turns with others.

    train_here.py FOLDER MODEL    a rank of a team of benchmarks/train.py

The loader, the model, its sharding and the loop are those of the example. MODEL is one of `MODELS`; FOLDER
has the columns that `make_columns` wrote. Imports no torch at its top.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TextIO
from unittest import mock

import numpy as np
from teams import Variant, arguments, serve, take_answers

from recsuite.config.config import Config
from recsuite.datasets.arrays import FeatureArrays, write_records
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.movielens.synthetic import POPULARITY_SLOPE
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, USER, Table
from recsuite.runtime import process
from recsuite.runtime.process import RuntimeContext, end_process, init_runtime
from recsuite.training.observers import Stopwatch

DIM = 64
MLP_DIMS = (64, 32)
MEAN_RATING = 3.0
# Suffix of the names of compiled variants of plain PyTorch.
COMPILED = ", compiled"
# Values of the features that MovieLens has beside user and movie.
VALUES = {"gender": 2, "age": 7, "occupation": 21, "year": 81, "genres": 18}
MOST_GENRES = 3


@dataclass(frozen=True)
class Model:
    """Model and its measurement.

    batch, large_batch: ratings of each of two ranks; history: length; bars: least ratio of two processes to
    the best plain rate, for small, large and the largest tables; mlp_dims: of hidden layers.
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
        """Flags of its training."""
        return Config.of(embedding_dim=self.dim, mlp_dims=self.mlp_dims, history=self.history)


TWO_TABLES = Model("two_tables", "User and movie alone", DIM, 4096, 16384, 0, 2_000_000, bars=(1.1, 1.3, 1.5))
# The default of `example.py` on synthetic ratings. Fewer ratings, because plain PyTorch holds the history of
# each of them in memory.
DEFAULT = Model(
    "default", "The default model", 32, 2048, 8192, Config().data.history, 1_000_000, bars=(1.5, 1.8, 2.0)
)
MODELS = {model.name: model for model in (DEFAULT, TWO_TABLES)}


def rows_of(model: Model, users: int, movies: int) -> int:
    """Number of rows of the tables of a model, with those for unknown values."""
    if not model.history:
        return users + movies + 2
    return users + 2 * movies + 3 + sum(VALUES.values()) + len(VALUES)


def make_columns(folder: Path, users: int, movies: int, num_ratings: int, model: Model = TWO_TABLES) -> None:
    """Write ratings as the columns of a data set.

    All users are equally likely. So are movies if the model has no other feature, and few rows are looked up
    twice. With histories, which are all full, movies are as popular as in the synthetic ratings.
    """
    generator = np.random.default_rng(0)
    fields = {
        "user": generator.integers(users, size=num_ratings).astype(np.int32),
        "item": _movies(generator, movies, num_ratings, model),
        "label": generator.integers(1, 6, size=num_ratings).astype(np.float32),
    }
    own = {
        USER: FeatureArrays(features=[np.arange(1, users + 1, dtype=np.int32)]),
        ITEM: FeatureArrays(features=[np.arange(1, movies + 1, dtype=np.int32)]),
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
    write_records(folder / "rows.npy", fields, FeatureArrays())
    for entity in ENTITIES:
        write_records(folder / f"{SCHEMA.name_of(entity)}_features.npy", {}, own[entity])


def _movies(generator: np.random.Generator, number: int, size: int, model: Model) -> np.ndarray:
    """Movies, int32 [size]."""
    if not model.history:
        return generator.integers(number, size=size).astype(np.int32)
    # Inverse of the distribution: chances rise like exp(slope * place), which gives the top tenth two thirds.
    # Popular movies lie anywhere in the table.
    least = np.exp(-POPULARITY_SLOPE)
    places = -np.log(generator.uniform(least, 1, size)) / POPULARITY_SLOPE
    of_place = generator.permutation(number).astype(np.int32)
    return of_place[np.minimum((places * number).astype(np.int64), number - 1)]


def _rows(generator: np.random.Generator, number: int, size: int) -> np.ndarray:
    """Table rows of a feature with `number` values, int32 [size]."""
    return generator.integers(1, number + 1, size=size).astype(np.int32)


def _write_histories(
    folder: Path, generator: np.random.Generator, users: np.ndarray, movies: int, model: Model
) -> dict[str, np.ndarray]:
    """Write a history for each user and return the fields of the ratings that refer to it."""
    number = model.num_ratings
    labels = generator.integers(1, 6, size=number).astype(np.float32)
    held = np.stack([_movies(generator, movies, number, model) + 1, labels.view(np.int32)], axis=1)
    np.save(folder / f"{HISTORY}.npy", held)
    # Histories overlap in the file: with millions of users there are fewer labels than places.
    begins = generator.integers(number - model.history, size=int(users.max()) + 2)
    np.save(folder / f"{HISTORY}_offsets.npy", begins)
    return {f"{HISTORY}_end": (begins[users] + model.history).astype(np.int32)}


def columns_of(folder: Path, model: Model = TWO_TABLES) -> Columns:
    """Columns that `make_columns` wrote."""
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


class Here:
    """Training of the example, without evaluation, checkpoints and the progress bar."""

    def __init__(self, columns: Columns, context: RuntimeContext, config: Config) -> None:
        from example import make_loss, make_model
        from recsuite.training.state import build_train_state

        self.columns = columns
        self.context = context
        self.config = config
        state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
        state.model.train()
        self.state = state
        self.number = 0
        self.feeds: dict[int, Iterator[Any]] = {}

    def _batches(self, batch_size: int) -> Iterator[Any]:
        """Endless batches."""
        from recsuite.datasets.batches import EventBatches
        from recsuite.datasets.loader import EpochSampler, build_dataloader
        from recsuite.training.steps import BatchFeed

        config = self.config.replaced(local_batch_size=batch_size)
        sampler = EpochSampler(EventBatches(self.columns, config, self.context.rank, self.context.world_size))
        inputs = BatchFeed(build_dataloader(sampler.dataset, sampler, config))
        for epoch in itertools.count():
            yield from inputs.batches("train", epoch)

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        from recsuite.sharding.dynamic_ranks import grow
        from recsuite.training.progress import Progress
        from recsuite.training.state import set_rates
        from recsuite.training.steps import copied, start_clock

        if batch_size not in self.feeds:
            self.feeds[batch_size] = copied(self._batches(batch_size), self.context.device)
        for _ in range(number):
            # As a pass does around a step, with a constant rate and row scale.
            set_rates(self.state.optimizer, 1.0, 1.0)
            start_clock(self.state.tables, Progress(self.number))
            batch = next(self.feeds[batch_size])
            self.state.table_optimizer.zero_grad()
            loss = self.state(batch)
            loss.backward()
            self.state.step()
            self.state.row_scale.fill_(1.0)
            self.number += 1
            grow(self.state.tables, self.number)
        return float(loss)

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Median seconds of the parts of a step, on a CPU."""
        if self.context.device.type != "cpu":
            return {}
        from recsuite.extras.reports.profiler import OTHER, PARTS

        # By name in each module that imports it: the profiler would slow a step down.
        loaded = (module for name, module in sys.modules.items() if name.startswith("recsuite."))
        plain = process.profiler_range
        ranged = [module for module in loaded if getattr(module, "profiler_range", None) is plain]
        found: dict[str, list[float]] = {part: [] for part in PARTS}
        for _ in range(number):
            stopwatch = Stopwatch((*PARTS, OTHER))
            with contextlib.ExitStack() as stack:
                for module in ranged:
                    stack.enter_context(mock.patch.object(module, "profiler_range", stopwatch.part))
                self.steps(1, batch_size)
            split = stopwatch.split()
            for part, seconds in found.items():
                seconds.append(split[part])
        return {part: median(seconds) for part, seconds in found.items()}


def serve_rank(
    answers: TextIO,
    config: Config,
    make: Callable[[RuntimeContext, str], Variant],
    own_threads: bool = False,
) -> None:
    """Serve the jobs of a team as one of its ranks, and end this process.

    Args:
        answers: of `take_answers`, called before anything is printed.
        config: of `init_runtime`.
        make: returns the variant of a name.
        own_threads: keep the number of threads that `init_runtime` chooses, whatever a job says.
    """
    context = init_runtime(config)
    import torch
    import torch.distributed as dist

    def barrier() -> None:
        if context.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def set_threads(number: int) -> None:
        if not own_threads:
            torch.set_num_threads(number)

    serve(answers, lambda name: make(context, name), barrier, set_threads)
    end_process(0)


if __name__ == "__main__":
    folder_of_columns, model_name = arguments(__doc__, "FOLDER", "MODEL")
    started = take_answers()
    trained = MODELS[model_name]
    trained_on = columns_of(Path(folder_of_columns), trained)
    serve_rank(started, Config(), lambda context, name: Here(trained_on, context, trained.config))
