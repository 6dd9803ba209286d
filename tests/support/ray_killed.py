"""Training of ray_train.py on a Ray of this machine; a worker kills itself once, after its first epoch.

python ray_killed.py RESULTS FLAGS...
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

EXAMPLE = str(Path(__file__).resolve().parents[2] / "example")
sys.path.append(EXAMPLE)


def train(config: dict[str, object]) -> None:
    """One worker."""
    import ray.train

    from ray_train import train_worker

    results, flags = Path(str(config["results"])), config["flags"]
    assert isinstance(flags, list)

    def report(metrics: dict[str, float]) -> None:
        if os.environ["RANK"] == "0":
            with results.open("a") as file:
                file.write(json.dumps([os.getpid(), metrics]) + "\n")
        ray.train.report(metrics)
        marker = results.with_suffix(".killed")
        if os.environ["RANK"] == "1" and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train_worker(flags, report)


if __name__ == "__main__":
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    results, *flags = sys.argv[1:]
    # No server of its own listens beyond this machine, and nothing is reported to others.
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        object_store_memory=100_000_000,
        runtime_env={"env_vars": {"PYTHONPATH": EXAMPLE}},
    )
    TorchTrainer(
        train,
        train_loop_config={"results": results, "flags": flags},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(Path(results).parent), failure_config=FailureConfig(max_failures=1)
        ),
    ).fit()
