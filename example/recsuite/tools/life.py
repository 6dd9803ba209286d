"""Shared parts of scripts around their loop: modes of a command line, data, checkpoints, results.

Has no heavy imports at module level.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recsuite.config.config import ALONE, TRAINING, Config
from recsuite.config.parser import check_read, present_words, unread_flags
from recsuite.runtime.console import shown, stage
from recsuite.runtime.process import RuntimeContext, raise_on_all
from recsuite.tools import script

if TYPE_CHECKING:
    from recsuite.datasets.opening import Data
    from recsuite.models.tasks import ModelMaker
    from recsuite.monitoring.callbacks import Observers
    from recsuite.training.callbacks import CheckpointerProtocol, Run
    from recsuite.training.progress import Progress
    from recsuite.training.state import ShardedModel

# A mode of a script. Collective: every rank calls it.
Mode = Callable[[Config, RuntimeContext], None]
READING = {"--load", "--compact", "--export", "--recommend"}
WITH_TRAINING = {f"--{name}" for name in (*TRAINING, "incremental_dump")}
# Printed after a training without any flag, which is the first command of the README.
NEXT = (
    "next: ./run.sh dump keeps the model, ./run.sh train --data_path FOLDER learns from your own tables, "
    "./run.sh help lists the rest"
)
# Flags of modes that write or read checkpoints, or do not need any.
WITH_CHECKPOINTS = (WITH_TRAINING | READING | {f"--{name}" for name in ALONE}) - {"--train"}


def run_modes(
    argv: list[str] | None,
    modes: Mapping[str, Mode],
    model: ModelMaker | None = None,
    defaults: Sequence[str] = (),
    after: Mode | None = None,
    unread: Sequence[str] = (),
) -> int:
    """Parse a command line, check it, and run the modes that it names; return the exit status. Collective:
    every rank.

    argv: the flags, those of `sys.argv` when None; modes: the functions of a script by the names "train",
    "dump", "inc_dump" and "load", and "compact" if `compact` needs an optimizer; model: makes its model, for
    the modes of a single process and for "compact"; defaults: flags before those of the command line, which
    override them; after: work of a script after the modes. It needs a checkpoint: if no flag writes or reads
    one, deltas are written, and with --train alone it is skipped; unread: unused flags, or sections of them:
    --help omits them, and they are refused.

    Raises:
        UserError: for a flag that cannot be, and whatever a mode raises.

        MODES = {"train": train, "dump": train, "inc_dump": train, "load": load}
        rs.run_modes(None, MODES, make_model, defaults=("--epochs", "4"))
    """
    flags, without = present_words(argv), unread_flags(unread)
    check_read(flags, without)
    named = {word.partition("=")[0] for word in flags}
    if after is not None and not named & WITH_CHECKPOINTS:
        # The training alone if --train is named, else also the script's own work after it.
        after = None if "--train" in named else after
        flags += [] if after is None else ["--inc_dump"]
    # A checkpoint contains its own flags.
    if not named & READING or named & WITH_TRAINING:
        flags = [*defaults, *flags]
    added = frozenset(word[2:] for word in {*defaults} - named if word.startswith("--"))
    config, given = script.parse_once(flags, without)
    if config.is_alone:
        return script.run_alone(config, given, model)
    script.check_machine()
    with shown():
        run(config, given, modes, after, model, added)
    return 0


def run(
    config: Config,
    given: frozenset[str],
    modes: Mapping[str, Mode],
    after: Mode | None = None,
    model: ModelMaker | None = None,
    defaults: frozenset[str] = frozenset(),
) -> None:
    """Run the modes of the configuration. Collective: every rank.

    given: the flags of the command line; a checkpoint that is read has the others; modes, after, model: see
    `run_modes`; defaults: see `joined`.
    """
    # With a checkpoint this is known only after its flags are read: then `joined` prints it.
    if not config.checkpoint.reads:
        script.say_if_synthetic(config.data)
    with script.joined(config, given, defaults) as (config, context):
        modes = {"compact": lambda config, context: compact(config, context, model), **modes}
        section = config.checkpoint
        training = "inc_dump" if section.inc_dump else "dump" if section.dump else "train"
        for name in config.modes:
            modes[training if name == "train" else name](config, context)
        if not given:
            context.say(NEXT)
        if after is not None:
            # One rank may fail in work that the others do not have, and all must end with its message.
            raise_on_all(lambda: after(config, context))


@contextlib.contextmanager
def open_data(
    config: Config,
    context: RuntimeContext,
    build: Callable[..., Any],
    observers: Observers | None = None,
) -> Iterator[Data]:
    """Open the data of a training, or with --load those of a checkpoint, and the loader of their batches. A
    context manager; on exit the workers end. Collective: every rank.

    config, context: flags and process; build: makes the loader, see `build_dataloader`; observers: of a
    training; None for a load.

    Raises:
        UserError: when the data cannot be had, differ between machines, or the workers cannot start.

        with rs.open_data(args, runtime, rs.build_dataloader) as data:
            print(data.columns.num_train)
    """
    from recsuite.checkpoint.stream_state import reopen_data

    with contextlib.ExitStack() as stack:
        with observers.part("data") if observers else contextlib.nullcontext():
            data = stack.enter_context(reopen_data(config, context, observers is not None, build))
        yield data


@contextlib.contextmanager
def checkpointing(
    data: Data, config: Config, context: RuntimeContext, observers: Observers
) -> Iterator[CheckpointerProtocol | None]:
    """Open the writer of checkpoints, which knows where the training begins. It is None if the flags request
    no checkpoint: then memory keeps the best weights. A context manager. Collective: every rank.

    data: see `open_data`; config, context: flags and process; observers: see `observing`.

    Raises:
        UserError: when another training writes there, and when the last checkpoint failed.

        with rs.checkpointing(data, args, runtime, observers) as checkpoints:
            training = rs.begin_training(data, args, runtime, checkpoints)
    """
    # The workers start while this imports TorchRec.
    with observers.part("imports"), stage("importing TorchRec", quiet=context.rank != 0):
        from recsuite.checkpoint import checkpointer as checkpoints
    if not config.checkpoint.writes:
        yield None
        return
    with checkpoints.checkpointing(data.columns, config, context) as checkpointer:
        yield checkpointer


def report(result: Run, config: Config, context: RuntimeContext, observers: Observers) -> None:
    """Print the results of a training, and write its report if --report_dir is given. Not collective.

    result: of `Training.finish`; config, context: flags and process; observers: see `observing`.

    Raises:
        UserError: when the report cannot be written.

        result = training.finish()
        rs.report(result, args, runtime, observers)
    """
    from recsuite.monitoring.report import report_run

    report_run(result, observers.split(), config, context)


def restore(
    data: Data, config: Config, context: RuntimeContext, model: ModelMaker | None = None, **others: Any
) -> tuple[ShardedModel, Progress]:
    """Return a model with the weights of a checkpoint, and the progress of its training. Collective: every
    rank.

    data: see `open_data`; config, context: flags and process, --load names the checkpoint; model: makes it,
    as for `Training.shard`; None for that of --task; others: its loss, tables,
    dense and metrics, likewise.

    Raises:
        UserError: when the checkpoint is missing, damaged or of another model.

        model, progress = rs.restore(data, args, runtime, make_model)
        print(progress.step)
    """
    from recsuite.checkpoint.restore import restore_chosen
    from recsuite.training.state import build_train_state

    train_state = build_train_state(data.columns, config, context, model, **others)
    restored = restore_chosen(config.checkpoint, config.model, train_state, data.columns, context)
    return train_state, restored.progress


def report_test(
    model: ShardedModel, progress: Progress, data: Data, config: Config, context: RuntimeContext
) -> None:
    """Test a restored model, and print the results. Collective: every rank.

    model, progress: of `restore`; data: see `open_data`; config, context: flags and process.

    Raises:
        UserError: when a stream has lost events that the model has learned.

        model, progress = rs.restore(data, args, runtime, make_model)
        rs.report_test(model, progress, data, args, runtime)
    """
    from recsuite.monitoring.results import say_results
    from recsuite.training.evaluation import make_evaluator
    from recsuite.training.progress import describe_step
    from recsuite.training.steps import InputPipeline
    from recsuite.training.stream import say_rest

    evaluator = make_evaluator(InputPipeline(data.loader), data.columns, config.model, context)
    if config.stream.stream:
        say_rest(evaluator, model.model, progress, data.columns, context)
        return
    test = evaluator.test(model.model, progress.epoch)
    say_results(describe_step(progress), test, data.columns, config, context)


def compact(config: Config, context: RuntimeContext, model: ModelMaker | None = None, **others: Any) -> None:
    """Merge deltas into one full checkpoint. Collective: every rank.

    config, context: flags and process; model, others: see `restore`.

    Raises:
        UserError: when a checkpoint is missing, damaged or of another model.

        MODES = {**MODES, "compact": lambda config, context: rs.compact(config, context, make_model)}
    """
    from recsuite.checkpoint.stream_state import reopen_data

    with reopen_data(config, context, trains=False) as data:
        from recsuite.checkpoint.checkpointer import compact as merge
        from recsuite.training.state import build_train_state

        train_state = build_train_state(data.columns, config, context, model, **others)
        merge(train_state, data.columns, config, context)
