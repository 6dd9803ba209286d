"""Train under Ray, which starts the processes, gives them a process group, and starts them again.

    python example/ray_train.py 2 --dataset ml-latest-small

The first word is the number of workers; the flags are those of example.py. The same `train_worker` runs under
torchrun, srun and torch.multiprocessing, see docs/extras/ray.md. Requires `pip install "ray[train]"`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

import recsuite as rs
from example import make_loss, make_model


def train_worker(
    flags: Sequence[str],
    report: Callable[[dict[str, float]], object] = print,
    must_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train on this process of a launch, or continue. Works in any thread. Collective: every rank.

    flags: of a training; report: takes the metrics of each epoch; must_stop: True to end after a checkpoint.
    """

    def train(args: rs.Config, runtime: rs.RuntimeContext) -> None:
        with rs.session(args, runtime, rs.build_dataloader) as training:
            model = training.shard(make_model, loss=make_loss(training.columns, args))
            step = training.step(model.train_on)
            for epoch in training.epochs():
                for batch in epoch:
                    if must_stop():
                        training.request_stop()
                    step(batch)
                metrics = training.validate()
                training.save(metrics)
                report(dict(metrics.values))
            result = training.finish()
        training.report(result)

    rs.run_modes(["--resume", *flags], {"train": train}, make_model)


def launch(workers: int, flags: Sequence[str]) -> int:
    """Train on a cluster of Ray, or on this machine. Return the exit status."""
    import ray.train
    from ray.train.torch import TorchTrainer

    # A mistake is said here, and not once by each worker.
    args = rs.parse_args(["--resume", *flags])
    # A worker runs a script of Ray, so its default is another folder.
    flags = [*flags, "--save_dir", args.checkpoint.save_dir]

    def worker(config: dict[str, Any]) -> None:
        # Ray starts a worker in a folder of its own.
        os.chdir(config["folder"])
        train_worker(config["flags"], ray.train.report)

    trainer = TorchTrainer(
        worker,
        train_loop_config={"flags": [*flags], "folder": os.getcwd()},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
        # A worker that dies is started again with all others, from the last checkpoint.
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()
    return 0


def main() -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""

    def run() -> int:
        words = sys.argv[1:]
        if not words or not words[0].isdecimal() or int(words[0]) < 1:
            raise rs.UserError(
                f"The first word must be the number of workers, at least 1, got {(words or ['nothing'])[0]}; "
                "give 2, say, and then the flags of the training."
            )
        return launch(int(words[0]), words[1:])

    return rs.exit_status(run)


if __name__ == "__main__":
    rs.run_script(main)
