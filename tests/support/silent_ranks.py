"""The example, made to stay in one of its phases: python silent_ranks.py PHASE RANK FLAGS...

Every rank that has come to the phase says so, with `MARK`, and stays there, as far as it can. Where ranks
meet or leave, RANK comes last.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import example
from recsuite.runtime import process as runtime
from recsuite.tools import script

MARK = "has come to the phase"
# What the others wait for it there.
SECONDS = 3.0


def mark() -> None:
    """Say that this rank is there; one write, so that ranks do not mix."""
    os.write(1, f"rank {runtime.read_launch().rank} {MARK}\n".encode())


def again_and_again(original: Callable[..., Any]) -> Callable[..., Any]:
    """The function, without an end."""

    def endless(*arguments: Any, **named: Any) -> None:
        for number in itertools.count():
            original(*arguments, **named)
            if number == 0:
                mark()

    return endless


def marked(original: Callable[..., Any], seconds: float = 0.0) -> Callable[..., Any]:
    """The function, after a mark and a pause."""

    def slower(*arguments: Any, **named: Any) -> Any:
        mark()
        time.sleep(seconds)
        return original(*arguments, **named)

    return slower


def pause() -> float:
    """The seconds that this rank keeps the others waiting."""
    return SECONDS if runtime.read_launch().rank == int(sys.argv[2]) else 0.0


def stay_at_start() -> None:
    """Before the ranks meet."""
    runtime._init_process_group = marked(runtime._init_process_group, pause())


def stay_in_preparation() -> None:
    """While the first rank of each machine prepares the data, and the others wait for it."""
    from recsuite.datasets import opening as data

    original = data.open_columns
    is_first = runtime.read_launch().local_rank == 0
    data.open_columns = marked(original, 3600) if is_first else original
    if not is_first:
        data.once_per_node = marked(data.once_per_node)


def stay_in_training() -> None:
    """In the steps of a training."""
    from recsuite.training.state import ShardedModel

    ShardedModel.step = marked(ShardedModel.step)  # type: ignore[method-assign]


def stay_in_dumps() -> None:
    """While checkpoints are written, one after every step."""
    from recsuite.checkpoint.writer import CheckpointWriter

    CheckpointWriter.write_full = marked(CheckpointWriter.write_full)  # type: ignore[method-assign]


def stay_in_a_long_dump() -> None:
    """While one checkpoint is written, of which the first rank's shard file takes an hour."""
    from recsuite.checkpoint import writer

    writer.SLOWEST_DISK = 1
    if runtime.read_launch().rank == 0:
        writer.write_shard_file = marked(writer.write_shard_file, 3600)
    else:
        writer.write_shard_file = marked(writer.write_shard_file)


def stay_in_evaluation() -> None:
    """In evaluation."""
    from recsuite.training.evaluation import PredictionEvaluator

    PredictionEvaluator.predict = again_and_again(PredictionEvaluator.predict)  # type: ignore[method-assign]


def stay_in_load() -> None:
    """In loading a checkpoint, for an evaluation or to merge deltas."""
    from recsuite.checkpoint import checkpointer
    from recsuite.checkpoint import restore as loading

    loading.restore_chosen = again_and_again(loading.restore_chosen)
    checkpointer.restore = again_and_again(checkpointer.restore)


def stay_at_end() -> None:
    """Before the ranks leave each other."""
    script.cleanup_runtime = marked(script.cleanup_runtime, pause())


PHASES: dict[str, Callable[[], None]] = {
    "start": stay_at_start,
    "preparation": stay_in_preparation,
    "training": stay_in_training,
    "dumps": stay_in_dumps,
    "a long dump": stay_in_a_long_dump,
    "evaluation": stay_in_evaluation,
    "load": stay_in_load,
    "the end": stay_at_end,
}

if __name__ == "__main__":
    PHASES[sys.argv[1]]()
    # As the example does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    runtime.end_with(lambda: example.main(sys.argv[3:]))
