"""Train a sharded recommender on MovieLens, on any number of processes.

    python example.py                                          one process
    torchrun --standalone --nproc_per_node=2 example.py        two, on CPU or GPU alike
    torchrun --standalone --nproc_per_node=8 example.py --dataset ml-1m --num_workers 4

`python example.py --help` lists the flags. Every spawned data worker imports this file again, so its top
level imports nothing heavy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from recsuite.config.config import Config
from recsuite.config.parser import parse_args as parse_args
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.process import cleanup_runtime as cleanup_runtime
from recsuite.runtime.process import init_runtime as init_runtime
from recsuite.runtime.progress_bar import shown, stage
from recsuite.tools.session import (
    announce_data,
    check_machine,
    exit_status,
    joined,
    parse_once,
    run_alone,
    run_script,
)

if TYPE_CHECKING:
    from recsuite.datasets.columns import Columns
    from recsuite.datasets.metrics import Metrics
    from recsuite.monitoring.stopwatch import Stopwatch
    from recsuite.training.callbacks import Callback, Run


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
    return exit_status(lambda: start(argv))


def start(argv: list[str] | None) -> int:
    """Parse, check, and run on one process or on all; returns the exit status."""
    config, given = parse_once(argv)
    if config.is_alone:
        return run_alone(config)
    check_machine()
    with shown():
        run(config, given)
    return 0


def run(config: Config, given: frozenset[str] = frozenset()) -> None:
    """Run the modes of the configuration. Collective: every rank.

    given: the flags of the command line; the others are those of the checkpoint that is read, if one is.
    """
    modes = {"train": train_and_report, "compact": compact_dumps, "load": load_and_report}
    announce_data(config)
    with joined(config, given) as (config, context):
        for mode in config.modes:
            modes[mode](config, context)


def train_and_report(config: Config, context: RuntimeContext) -> None:
    """Train, and show what came of it. Collective: every rank."""
    from recsuite.monitoring.callbacks import callbacks_of
    from recsuite.monitoring.report import describe_nothing_left, make_report_dir, write_report
    from recsuite.monitoring.stopwatch import Stopwatch

    if context.rank == 0 and config.monitoring.report_dir:
        make_report_dir(config)
    stopwatch = Stopwatch()
    with callbacks_of(config, context) as callbacks:
        result = train_watched(config, context, stopwatch, [stopwatch, *callbacks])
        if result.epochs and context.rank == 0 and config.monitoring.report_dir:
            write_report(result, stopwatch.split(), config, context)
    if not result.epochs:
        context.say(describe_nothing_left(result, config))
    show_test(f"epoch {result.test_epoch}", result.test, result.columns, config, context)


def show_test(when: str, test: Metrics, columns: Columns, config: Config, context: RuntimeContext) -> None:
    """The table of a model after an epoch or step, and whether it is worse than none."""
    from recsuite.monitoring.report import describe_failure, results_table

    context.say(results_table(columns, config, f"this model, {when}", test), tagged=False)
    if failure := describe_failure(columns, config, test):
        context.say(failure)


def train_watched(
    config: Config, context: RuntimeContext, stopwatch: Stopwatch, callbacks: Sequence[Callback]
) -> Run:
    """Train on the data of the configuration, with dumps if it asks for them. Collective: every rank."""
    from recsuite.datasets.opening import open_data

    with contextlib.ExitStack() as stack:
        with stopwatch.part("data"):
            data = stack.enter_context(open_data(config, context))
        # The workers start while this imports TorchRec.
        with stopwatch.part("imports"), stage("importing TorchRec", quiet=context.rank != 0):
            from recsuite.training.trainer import train
        checkpointer = None
        if config.checkpoint.dumps:
            from recsuite.checkpoint.session import checkpointing

            checkpointer = stack.enter_context(checkpointing(data.columns, config, context))
        return train(data, config, context, checkpointer, callbacks)


def load_and_report(config: Config, context: RuntimeContext) -> None:
    """Evaluate a dump. Collective: every rank."""
    from recsuite.datasets.opening import open_data

    with open_data(config, context) as data:
        from recsuite.checkpoint.restore import restore_chosen
        from recsuite.checkpoint.storage.choice import describe_step
        from recsuite.training.evaluation import make_evaluator
        from recsuite.training.input_pipeline import InputPipeline
        from recsuite.training.state import build_train_state

        learner = build_train_state(data.columns, config, context)
        progress = restore_chosen(config, learner, data.columns, context).progress
        evaluator = make_evaluator(InputPipeline(data.loader), data.columns, config, context)
        test = evaluator.test(learner.model, progress.epoch)
    show_test(describe_step(progress), test, data.columns, config, context)


def compact_dumps(config: Config, context: RuntimeContext) -> None:
    """Fold increments into one dump. Collective: every rank."""
    from recsuite.datasets.opening import open_data

    with open_data(config, context) as data:
        from recsuite.checkpoint.compaction import compact
        from recsuite.training.state import build_train_state

        compact(build_train_state(data.columns, config, context), data.columns, config, context)


if __name__ == "__main__":
    run_script(main)
