"""Train a sharded recommender on MovieLens, on any number of processes.

    python example.py                                          one process
    torchrun --standalone --nproc_per_node=2 example.py        two, on CPU or GPU alike
    torchrun --standalone --nproc_per_node=8 example.py --dataset ml-1m --num_workers 4

`python example.py --help` lists the flags. Every spawned data worker imports this file again, so its top
level imports nothing heavy.
"""

from __future__ import annotations

import contextlib
from typing import Any

from recsuite.config.config import Config
from recsuite.config.parser import parse_args as parse_args
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.process import cleanup_runtime as cleanup_runtime
from recsuite.runtime.process import init_runtime as init_runtime
from recsuite.runtime.progress_bar import shown, stage
from recsuite.tools import script


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
    return script.exit_status(lambda: start(argv))


def start(argv: list[str] | None) -> int:
    """Parse, check, and run on one process or on all; returns the exit status."""
    config, given = script.parse_once(argv)
    if config.is_alone:
        return script.run_alone(config, given)
    script.check_machine()
    with shown():
        run(config, given)
    return 0


def run(config: Config, given: frozenset[str] = frozenset()) -> None:
    """Run the modes of the configuration. Collective: every rank.

    given: the flags of the command line; the others are those of the checkpoint that is read, if one is.
    """
    modes = {"train": train_and_report, "compact": compact_checkpoints, "load": restore_and_report}
    script.announce_data(config)
    with script.joined(config, given) as (config, context):
        for mode in config.modes:
            modes[mode](config, context)


def train_and_report(config: Config, context: RuntimeContext) -> None:
    """Train, with checkpoints if the flags ask for them, and report. Collective: every rank."""
    from recsuite.checkpoint.past import reopen_data
    from recsuite.monitoring.callbacks import observing
    from recsuite.monitoring.report import report_run

    with observing(config, context) as (stopwatch, callbacks):
        with contextlib.ExitStack() as stack:
            with stopwatch.part("data"):
                data = stack.enter_context(reopen_data(config, context, trains=True))
            # The workers start while this imports TorchRec.
            with stopwatch.part("imports"), stage("importing TorchRec", quiet=context.rank != 0):
                from recsuite.checkpoint.session import checkpointing
                from recsuite.training.trainer import train
            # Without checkpoints the trainer keeps the best weights in memory by itself.
            checkpointer = None
            if config.checkpoint.writes:
                checkpointer = stack.enter_context(checkpointing(data.columns, config, context))
            result = train(data, config, context, checkpointer, callbacks)
        report_run(result, stopwatch.split(), config, context)


def restore_and_report(config: Config, context: RuntimeContext) -> None:
    """Restore a checkpoint, and evaluate it. Collective: every rank."""
    from recsuite.checkpoint.past import reopen_data
    from recsuite.monitoring.results import say_results

    with reopen_data(config, context, trains=False) as data:
        from recsuite.checkpoint.restore import restore_chosen
        from recsuite.checkpoint.storage.choice import describe_step
        from recsuite.training.evaluation import make_evaluator
        from recsuite.training.input_pipeline import InputPipeline
        from recsuite.training.loops.rest import say_rest
        from recsuite.training.state import build_train_state

        train_state = build_train_state(data.columns, config, context)
        restored = restore_chosen(config.checkpoint, config.model, train_state, data.columns, context)
        evaluator = make_evaluator(InputPipeline(data.loader), data.columns, config.model, context)
        if config.stream.stream:
            say_rest(evaluator, train_state.model, restored.progress, data.columns, context)
            return
        test = evaluator.test(train_state.model, restored.progress.epoch)
    say_results(describe_step(restored.progress), test, data.columns, config.model, context)


def compact_checkpoints(config: Config, context: RuntimeContext) -> None:
    """Merge deltas into one full checkpoint. Collective: every rank."""
    from recsuite.checkpoint.past import reopen_data

    with reopen_data(config, context, trains=False) as data:
        from recsuite.checkpoint.compaction import compact
        from recsuite.training.state import build_train_state

        compact(build_train_state(data.columns, config, context), data.columns, config, context)


if __name__ == "__main__":
    script.run_script(main)
