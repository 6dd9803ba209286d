"""Whether a training step of the default model waits for anything: a section of benchmarks/gpu.py.

The loop, the loader and the profiler are those of the example.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from gpu_device import Emit, Settings, processes_on_device, run_section
from gpu_trace import describe_trace
from train_models import DEFAULT, columns_of, make_columns

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext, init_runtime

STEPS = 50
USERS, MOVIES = 6040, 3952
# None is the default; as many as a GPU's machine can spare.
WORKERS = (0, 4)


def measure(settings: Settings, emit: Emit) -> None:
    """Rates, waiting and a profile of the steps, without workers and with them."""
    context = init_runtime(Config())
    folder = Path(settings.folder) / "columns"
    folder.mkdir()
    make_columns(folder, USERS, MOVIES, settings.small_or(60_000, DEFAULT.num_ratings), DEFAULT)
    for number in settings.small_or((0,), WORKERS):
        config = DEFAULT.config.replaced(num_workers=number)
        emit(measure_workers(folder, config, context, settings))
    if context.device.type == "cuda":
        emit({"fork is refused": fork_is_refused()})


def measure_workers(
    folder: Path, config: Config, context: RuntimeContext, settings: Settings
) -> dict[str, Any]:
    """Of one number of workers: samples a second and the share of the time that steps wait for batches,
    beside nothing else, then the profile.
    """
    from recsuite.datasets.batches import EventBatches
    from recsuite.datasets.loader import EpochSampler, build_dataloader
    from recsuite.monitoring.profiler import Profile
    from recsuite.training.progress import Progress
    from recsuite.training.state import Schedule, build_train_state
    from recsuite.training.steps import InputPipeline, Pass, learn

    columns = columns_of(folder, DEFAULT)
    dataset = EventBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        inputs = InputPipeline(loader)
        state = build_train_state(columns, config, context)

        def epoch(number: int, on_step: Any = lambda step: None) -> float:
            """Seconds of an epoch: its losses come from the device last."""
            began = time.perf_counter()
            schedule = Schedule(columns.num_train, config.training.epochs)
            learn(Pass(state, inputs, Progress(epoch=number), schedule, config.training, context, on_step))
            return time.perf_counter() - began

        epoch(0)
        seconds = epoch(1)
        found = {
            "workers": config.loader.num_workers,
            "samples a second": columns.num_train / seconds,
            "share waited": inputs.seconds_waited / seconds,
            "processes": {"ranks": context.world_size, **processes_on_device()},
        }
        profile = Profile(settings.small_or(10, STEPS), Path(settings.folder), context)
        with profile.epoch():
            epoch(2, profile.on_step)
    trace = json.loads(profile.path.read_text())
    return {**found, **describe_trace(trace["traceEvents"])}


def fork_is_refused() -> bool:
    """Whether workers that would inherit a CUDA context are refused."""
    from recsuite.datasets.loader import check_start_method
    from recsuite.errors import UserError

    try:
        check_start_method("fork")
    except UserError:
        return True
    return False


if __name__ == "__main__":
    run_section({"steps": measure})
