"""Train in the order of recsuite.datasets.batching.py and in that of a true permutation, and compare.

    python benchmarks/order.py

Trains twice for each seed on the same synthetic ratings, in one process, and writes docs/shuffle.json: RMSE
on the test ratings after the last epoch, and the mean difference with its standard error. Measures; asserts
nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from environment import DOCS, ROOT, describe

from recsuite.config.config import Config
from recsuite.datasets import batches
from recsuite.datasets.batching import shuffled
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime

Order = Callable[[np.ndarray, int, int, int], np.ndarray]


def main() -> None:
    """Train, compare, write, show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "benchmark", help="keeps the ratings")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="how many are drawn")
    parser.add_argument("--seeds", type=int, default=5, help="how many pairs of trainings")
    parser.add_argument("--epochs", type=int, default=4, help="passes in each training")
    flags = parser.parse_args()
    data_path = str(flags.folder / str(flags.ratings))
    open_columns(Config.of(dataset="synthetic", synthetic_ratings=flags.ratings, data_path=data_path))
    context = init_runtime(Config())
    lines = ["| seed | ours | true permutation | difference |", "| ---: | ---: | ---: | ---: |"]
    pairs = []
    for seed in range(flags.seeds):
        # Without the name of a data set the seed is that of order and weights, not of the ratings.
        config = Config.of(data_path=data_path, seed=seed, epochs=flags.epochs)
        ours, true = (train(config, context, order) for order in (shuffled, true_permutation))
        pairs.append({"seed": seed, "ours": ours, "true": true})
        lines.append(f"| {seed} | {ours:.5f} | {true:.5f} | {ours - true:+.5f} |")
    cleanup_runtime()
    differences = np.array([pair["ours"] - pair["true"] for pair in pairs])
    error = float(differences.std(ddof=1) / np.sqrt(len(pairs))) if len(pairs) > 1 else None
    result: dict[str, Any] = {
        **describe(),
        "ratings": flags.ratings,
        "epochs": flags.epochs,
        "test_rmse": pairs,
        "mean_difference": float(differences.mean()),
        "standard_error": error,
    }
    (DOCS / "shuffle.json").write_text(json.dumps(result, indent=1) + "\n")
    spread = "" if error is None else f" +- {error:.5f}"
    print("\n".join([*lines, "", f"mean difference {differences.mean():+.5f}{spread} (one standard error)"]))


def train(config: Config, context: RuntimeContext, order: Order) -> float:
    """RMSE on the test ratings of a model that was trained in the given order."""
    import torch

    from recsuite.datasets.opening import open_data
    from recsuite.training.loop import begin_training

    torch.manual_seed(config.runtime.seed)
    # Batches ask for their order in this one place, and without workers they are made in this process.
    with mock.patch.object(batches, "shuffled", order), open_data(config, context) as data:
        return begin_training(data, config, context).run().test["rmse"]


def true_permutation(positions: np.ndarray, number: int, seed: int, epoch: int) -> np.ndarray:
    """Like `shuffled`, out of an array that holds the whole permutation."""
    return _permutation(number, seed, epoch)[positions]


@functools.lru_cache(maxsize=1)
def _permutation(number: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(number)


if __name__ == "__main__":
    main()
