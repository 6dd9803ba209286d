"""Compare the order of recsuite.datasets.batching.py with a true permutation.

    python benchmarks/order.py --write     docs/shuffle.json

Trains twice for each seed on the same synthetic ratings, in one process: RMSE on the test ratings after the
last epoch, and the mean difference with its standard error.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from common import ROOT, describe, finish, make_parser, table

from example import make_loss, make_model
from recsuite.config.config import Config
from recsuite.datasets import batching
from recsuite.datasets.batching import shuffled
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import RuntimeContext, cleanup_runtime, init_runtime

ShuffleOrder = Callable[[np.ndarray, int, int, int], np.ndarray]


def main() -> None:
    """Train, compare and show, and write if that is asked for."""
    parser = make_parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "data" / "benchmark", help="keeps the ratings")
    parser.add_argument("--ratings", type=int, default=1_000_000, help="number of synthetic ratings")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of trainings")
    parser.add_argument("--epochs", type=int, default=4, help="of each training")
    finish("shuffle", parser.parse_args(), measure, None, render)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Test RMSE of both orders, seed by seed."""
    data_path = str(flags.folder / str(flags.ratings))
    open_columns(Config.of(dataset="synthetic", synthetic_ratings=flags.ratings, data_path=data_path))
    context = init_runtime(Config())
    pairs = []
    for seed in range(flags.seeds):
        # Without the name of a data set the seed is that of order and weights, not of the ratings.
        config = Config.of(data_path=data_path, seed=seed, epochs=flags.epochs)
        ours, true = (train(config, context, order) for order in (shuffled, true_permutation))
        pairs.append({"seed": seed, "ours": ours, "true": true})
    cleanup_runtime()
    differences = np.array([pair["ours"] - pair["true"] for pair in pairs])
    error = float(differences.std(ddof=1) / np.sqrt(len(pairs))) if len(pairs) > 1 else None
    return {
        **describe(),
        "ratings": flags.ratings,
        "epochs": flags.epochs,
        "test_rmse": pairs,
        "mean_difference": float(differences.mean()),
        "standard_error": error,
    }


def render(result: dict[str, Any]) -> str:
    """Table, and the mean difference."""
    lines = [
        [
            f"{pair['seed']}",
            f"{pair['ours']:.5f}",
            f"{pair['true']:.5f}",
            f"{pair['ours'] - pair['true']:+.5f}",
        ]
        for pair in result["test_rmse"]
    ]
    error = result["standard_error"]
    spread = "" if error is None else f" +- {error:.5f}"
    shown = f"mean difference {result['mean_difference']:+.5f}{spread} (one standard error)"
    return f"{table(['seed', 'ours', 'true permutation', 'difference'], lines, left=())}\n\n{shown}"


def train(config: Config, context: RuntimeContext, order: ShuffleOrder) -> float:
    """Test RMSE of a model trained in the given order."""
    import torch

    from recsuite.datasets.opening import open_data
    from recsuite.training.loop import Training

    torch.manual_seed(config.runtime.seed)
    # The only place where batches look their order up; without workers they are made in this process.
    with mock.patch.object(batching, "shuffled", order), open_data(config, context) as data:
        return Training(data, config, context).run(make_model, make_loss).test["rmse"]


def true_permutation(positions: np.ndarray, number: int, seed: int, epoch: int) -> np.ndarray:
    """Same as `shuffled`, from an array of the whole permutation."""
    return _permutation(number, seed, epoch)[positions]


@functools.lru_cache(maxsize=1)
def _permutation(number: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(number)


if __name__ == "__main__":
    main()
