"""Train a sharded recommender on MovieLens, on any number of processes.

    python example.py                                          one process
    torchrun --standalone --nproc_per_node=2 example.py        two, on CPU or GPU alike
    torchrun --standalone --nproc_per_node=8 example.py --dataset ml-1m --num_workers 4

`python example.py --help` lists the flags. Every spawned data worker imports this file again, so its top
level imports nothing heavy.
"""

from __future__ import annotations

from typing import Any

from recsuite.config.parser import parse_args as parse_args
from recsuite.runtime.process import cleanup_runtime as cleanup_runtime
from recsuite.runtime.process import init_runtime as init_runtime
from recsuite.tools import life, script


def __getattr__(name: str) -> Any:
    # These need torch or TorchRec, so they are imported when somebody asks for them.
    if name == "build_dataloader":
        from recsuite.datasets.loader import build_dataloader

        return build_dataloader
    if name == "train":
        from recsuite.training.trainer import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main(argv: list[str] | None = None) -> int:
    """Do what the command line asks for; returns the exit status: 2 for a user's mistake."""
    return script.exit_status(lambda: life.start(argv))


if __name__ == "__main__":
    script.run_script(main)
