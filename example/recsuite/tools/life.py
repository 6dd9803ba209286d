"""The life of a model, which every script that trains one has: train and report, restore, merge deltas.

Imports nothing heavy at its top, for every spawned data worker imports the script again.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence

from recsuite.config.config import ALONE, TRAINING, Config
from recsuite.runtime.collectives import raise_on_all
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.progress_bar import shown, stage
from recsuite.tools import script

# What a script adds: called on every rank once its modes are done, with their configuration.
AfterModes = Callable[[Config, RuntimeContext], None]
READING = {"--load", "--compact", "--export", "--recommend"}
WITH_TRAINING = {f"--{name}" for name in (*TRAINING, "incremental_dump")}
# Printed after a training without any flag, which is the first command of the README.
NEXT = (
    "next: ./run.sh dump keeps the model, ./run.sh train --data_path FOLDER learns from your own tables, "
    "./run.sh help lists the rest"
)
# Flags of modes that write or read checkpoints, or need none.
WITH_CHECKPOINTS = {
    *(f"--{name}" for name in (*ALONE, *TRAINING, "incremental_dump", "compact", "load") if name != "train")
}


def start(argv: list[str] | None, defaults: Sequence[str] = (), after_modes: AfterModes | None = None) -> int:
    """Parse, check, and run on one process or on all; returns the exit status.

    argv: the flags, those of `sys.argv` when None; defaults: flags that those of a training come after;
    after_modes: what a script does beside the modes. It needs a checkpoint: where no flag writes or reads
    one, deltas are written.
    """
    flags = [*(sys.argv[1:] if argv is None else argv)]
    named = {word.partition("=")[0] for word in flags}
    # A checkpoint that is read says itself what it is of.
    if not named & READING or named & WITH_TRAINING:
        flags = [*defaults, *flags]
    if after_modes is not None and not named & WITH_CHECKPOINTS:
        flags.append("--inc_dump")
    config, given = script.parse_once(flags)
    if config.is_alone:
        return script.run_alone(config, given)
    script.check_machine()
    with shown():
        run(config, given, after_modes)
    return 0


def run(config: Config, given: frozenset[str] = frozenset(), after_modes: AfterModes | None = None) -> None:
    """Run the modes of the configuration. Collective: every rank.

    given: the flags of the command line; the others are those of the checkpoint that is read, if one is.
    """
    modes = {"train": train_and_report, "compact": compact_checkpoints, "load": restore_and_report}
    script.announce_data(config)
    with script.joined(config, given) as (config, context):
        for mode in config.modes:
            modes[mode](config, context)
        if not given:
            context.say(NEXT)
        if after_modes is not None:
            # One rank may fail where the others have nothing to do, and all are to end with its sentence.
            raise_on_all(lambda: after_modes(config, context))


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
    say_results(describe_step(restored.progress), test, data.columns, config, context)


def compact_checkpoints(config: Config, context: RuntimeContext) -> None:
    """Merge deltas into one full checkpoint. Collective: every rank."""
    from recsuite.checkpoint.past import reopen_data

    with reopen_data(config, context, trains=False) as data:
        from recsuite.checkpoint.compaction import compact
        from recsuite.training.state import build_train_state

        compact(build_train_state(data.columns, config, context), data.columns, config, context)
