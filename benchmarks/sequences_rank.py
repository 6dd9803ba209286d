"""This project's training of sequences, or that of the SASRec of `recbole`: a rank of a team of
benchmarks/sequences_speed.py.

    sequences_rank.py FLAGS...

FLAGS: of the example. A variant of an order is THIS or RECBOLE.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from sequences_peers import Peer
from train_here import Here
from train_team import Trained, serve, take_answers

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import end_process, init_runtime

THIS, RECBOLE = "this", "recbole"


class Prefixes:
    """SASRec of `recbole`, to which every sequence before an event is one of a batch."""

    def __init__(self, columns: Columns) -> None:
        self.peer = Peer(columns, {}, 0)
        self.losses: dict[int, Iterator[float]] = {}

    def steps(self, number: int, batch_size: int) -> float:
        """See `train_team.Trained`."""
        if batch_size not in self.losses:
            epochs = (self.peer.losses(batch_size) for _ in itertools.count())
            self.losses[batch_size] = itertools.chain.from_iterable(epochs)
        return [*itertools.islice(self.losses[batch_size], number)][-1]

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Not known."""
        return {}


def main() -> None:
    """Serve orders."""
    answers = take_answers()
    config = parse_args(sys.argv[1:])
    columns = open_columns(config)
    context = init_runtime(config)

    def make(name: str) -> Trained:
        return Here(columns, context, config) if name == THIS else Prefixes(columns)

    serve(answers, make, dist.barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
    end_process(0)
