"""Train under Ray, which starts the processes, gives them a process group, and starts them again.

    python example/ray_train.py 2 --dataset ml-latest-small --save_dir /shared/dumps

The first word is the number of workers; the flags are those of example.py. The same `train_worker` runs under
torchrun, srun and torch.multiprocessing, see docs/ray.md. Requires `pip install "ray[train]"`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import recsuite as rs
from example import RatingLoss, make_model


def train_worker(flags: Sequence[str], report: Callable[[dict[str, float]], object]) -> None:
    """Train on this process of a launch. Works in any thread. Collective: every rank.

    flags: of a training, with --resume if it may be called again; report: takes the metrics of each epoch.
    """
    args = rs.parse_args(["--resume", *flags])
    runtime = rs.init_runtime(args)
    try:
        with (
            rs.observing(args, runtime) as observers,
            rs.open_data(args, runtime, rs.build_dataloader, observers) as data,
            rs.checkpointing(data, args, runtime, observers) as checkpoints,
            rs.begin_training(data, args, runtime, checkpoints, observers.callbacks) as training,
        ):
            loss = RatingLoss() if args.model.task == "rating" else None
            model = training.shard(make_model, loss=loss)
            for part in training.passes():
                for batch in part:
                    model(batch).backward()
                    model.step()
                metrics = training.validate()
                part.end(metrics)
                report(dict(metrics))
            result = training.finish()
        rs.report(result, args, runtime, observers)
    finally:
        rs.cleanup_runtime()


def main() -> None:
    """Train on a cluster of Ray, or on this machine."""
    import ray.train
    from ray.train.torch import TorchTrainer

    workers, flags = int(sys.argv[1]), sys.argv[2:]
    trainer = TorchTrainer(
        lambda config: train_worker(config["flags"], ray.train.report),
        train_loop_config={"flags": flags},
        scaling_config=ray.train.ScalingConfig(num_workers=workers),
        # A worker that dies is started again with all others, from the last checkpoint.
        run_config=ray.train.RunConfig(failure_config=ray.train.FailureConfig(max_failures=3)),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
