"""Retrieve, then rank: two trainings, and a server that chains their newest models while they run.

    python pipeline.py                         a small synthetic data set
    python pipeline.py --data_path ml-1m       the ratings of a MovieLens folder, or tables of your own
    python pipeline.py --candidates 500        further flags are those of example.py, for both trainings

The model of sequential.py finds candidates. The model of example.py --task ranking ranks them, together with
the first. Both trainings write checkpoints, and this process serves the newest of each. At the end it prints
the metrics of the chain and of each part, and the latency of an answer.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recsuite as rs
from recsuite.errors import UserError
from recsuite.files import local
from recsuite.runtime.console import say

if TYPE_CHECKING:
    from recsuite.extras.chain.cases import RequestCases
    from recsuite.extras.chain.chain import ModelChain
    from recsuite.serving.served import ServedModel

HERE = Path(__file__).parent
# Script and flags of each training. Both exclude the newest event of each user.
RETRIEVER = HERE / "sequential.py", "--split", "leave_one_out", "--dump"
RANKER = HERE / "example.py", "--task", "ranking", "--split", "leave_one_out", "--dump"
WORLD = ("--dataset", "synthetic", "--synthetic_ratings", "100000")
# Candidate weights of the ranker; validation chooses one.
WEIGHTS = (0.5, 1.0, 1.5)
CLIENTS, ANSWERS = 8, 50


def main(argv: list[str] | None = None) -> int:
    """Train both, serve, and compare. Return the exit status: 2 for a user's mistake."""
    return rs.exit_status(lambda: run(*parse(argv)))


def parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this script, and the others, which are those of both trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data_path", help="MovieLens or tables; synthetic ratings without one")
    parser.add_argument("--save_dir", type=local, help="keeps both models here; without one they are removed")
    parser.add_argument("--candidates", type=int, default=300, help="items of a user that are ranked: 300")
    flags, others = parser.parse_known_args(argv)
    if flags.candidates < 10:
        raise UserError(f"--candidates must be at least 10, got {flags.candidates}.")
    return flags, others


def run(flags: argparse.Namespace, others: Sequence[str]) -> int:
    """Train and serve in parallel, then measure."""
    from recsuite.extras.trainings import working_folder

    with working_folder("pipeline-") as folder:
        data_path, save_dir = flags.data_path or folder / "ratings", flags.save_dir or folder / "models"
        chain = serve(save_dir, ["--data_path", data_path, *(() if flags.data_path else WORLD), *others])
        chain.num_candidates = flags.candidates
        measure(chain, str(data_path))
    return 0


def serve(save_dir: Path, given: Sequence[object]) -> ModelChain:
    """Train both, and serve the newest of each until both have ended. Return the final chain."""
    # It makes the models of both scripts.
    from example import make_model
    from recsuite.extras.chain.chain import ModelChain
    from recsuite.extras.trainings import newest, started

    folders = {"retriever": save_dir / "retriever", "ranker": save_dir / "ranker"}
    commands = {
        f"training of the {name}": [*command, "--save_dir", folder, *given]
        for (name, folder), command in zip(folders.items(), (RETRIEVER, RANKER), strict=True)
    }
    chain = None
    with started(commands) as begun:
        for followers in newest(folders, begun, make_model):
            epochs = {name: each.model.progress.epoch for name, each in followers.items()}
            say("serving " + ", ".join(f"the {name} after epoch {epoch}" for name, epoch in epochs.items()))
            chain = ModelChain(followers["retriever"].model, followers["ranker"].model)
    if chain is None:
        raise UserError("There is no checkpoint of both models. Fix: give flags that train.")
    return chain


def measure(chain: ModelChain, data_path: str) -> None:
    """Choose the weight of the ranker by validation, and print the test metrics of each part and of the
    chain.
    """
    from recsuite.extras.chain.cases import cases_of_models, latencies
    from recsuite.training.results import share_of_best

    validation, test = cases_of_models([chain.retriever, chain.ranker], data_path)
    values = {weight: ndcg_of(chain, weight, validation) for weight in WEIGHTS}
    chain.weight = max(values, key=lambda weight: values[weight])
    measured = {
        "retriever": test.metrics(functools.partial(asked, chain.retriever)),
        "ranker": test.metrics(functools.partial(asked, chain.ranker)),
        f"chain, weight {chain.weight:g}": test.metrics(chain.recommend),
    }
    baseline, best = test.baselines["popularity"], test.baselines.get("oracle")
    rows = {"popularity": baseline, **measured, **({"best possible": best} if best else {})}
    say(f"| {'test events':<17} |  HR@10 | NDCG@10 |")
    say(f"|{'-' * 19}|-------:|--------:|")
    for name, metrics in rows.items():
        say(f"| {name:<17} | {metrics['hr_at_10']:.4f} |  {metrics['ndcg_at_10']:.4f} |")
    *alone, together = (each["ndcg_at_10"] for each in measured.values())
    gain = f"{together / max(alone):.3f}" if max(alone) else "not defined"
    say(f"NDCG@10 of the chain / of the better of its parts: {gain}")
    if best:
        ends = baseline["ndcg_at_10"], best["ndcg_at_10"]
        for sentence in share_of_best("NDCG@10 of the chain", together, "popularity", *ends):
            say(sentence)
    seconds = latencies(test, chain.recommend, CLIENTS, ANSWERS)
    p50, p99 = (1e3 * seconds[int(share * (len(seconds) - 1))] for share in (0.5, 0.99))
    say(f"{CLIENTS} clients at once, {chain.num_candidates} candidates: p50 {p50:.1f} ms, p99 {p99:.1f} ms")


def ndcg_of(chain: ModelChain, weight: float, cases: RequestCases) -> float:
    """Return the NDCG@10 of the chain with this weight of the ranker."""
    chain.weight = weight
    return cases.metrics(chain.recommend)["ndcg_at_10"]


def asked(
    model: ServedModel, values: dict[str, list[Any]], k: int, exclude: list[Any]
) -> list[list[tuple[Any, float]]]:
    """Return the recommendations of one model alone."""
    from recsuite.extras.chain.chain import accepted_features

    return model.recommend(accepted_features(model, values), k, exclude=exclude)


if __name__ == "__main__":
    rs.run_script(main)
