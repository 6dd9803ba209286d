"""What the memory and the cores of a machine do at most: a rank of a team of benchmarks/train.py.

A step of "memory" adds two arrays up into a third one, after the triad of McCalpin's STREAM; one of
"products" multiplies two square matrices. Batch sizes are in bytes that are read and written, and in
operations.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from train_bounds import BYTES, MEMORY, WIDTH
from train_team import serve, take_answers


class Work:
    """One of the two, by its name."""

    def __init__(self, name: str) -> None:
        shape = (BYTES // 12,) if name == MEMORY else (WIDTH, WIDTH)
        self.one, self.other, self.result = (torch.ones(shape) for _ in range(3))
        self.apply = torch.add if name == MEMORY else torch.mm

    def steps(self, number: int, batch_size: int) -> float:
        """Do it so often."""
        for _ in range(number):
            self.apply(self.one, self.other, out=self.result)
        return 0.0

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """It has none."""
        return {}


def main() -> None:
    """Serve orders."""
    answers = take_answers()
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("gloo")

    def barrier() -> Any:
        return dist.barrier() if dist.is_initialized() else None

    serve(answers, Work, barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
