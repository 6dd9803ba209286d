"""The example with slow steps, each of which is noted, for `test_elastic.py`: timed_example.py FILE ...

Rank 0 appends a line to FILE after each step: the time, on a clock that all processes share, its pid, the
number of ranks, and how many ratings the model has learned from.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import example
from recsuite.runtime.process import end_process

SECONDS_OF_A_STEP = 0.03


def note_steps(path: Path) -> None:
    """Have every step noted."""
    from recsuite.checkpoint.checkpointer import Checkpointer

    methods = {"on_step": Checkpointer.on_step, "on_epoch": Checkpointer.on_epoch}

    def noted(self: Any, done: Any, method: Any) -> None:
        time.sleep(SECONDS_OF_A_STEP)
        progress = done.progress
        if self.context.rank == 0:
            learned = progress.epoch * self.columns.num_train + progress.samples
            with path.open("a") as file:
                file.write(f"{time.monotonic()} {os.getpid()} {self.context.world_size} {learned}\n")
        method(self, done)

    for name, method in methods.items():
        setattr(Checkpointer, name, functools.partialmethod(noted, method=method))


if __name__ == "__main__":
    note_steps(Path(sys.argv[1]))
    end_process(example.main(sys.argv[2:]))
