"""Parts that all scripts share: start and end, modes, agreement of the ranks, data, checkpoints, results.

Has no heavy imports at module level.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.config.config import TRAINING, Config, alone_modes, serving_modes
from recsuite.config.fitting import fitting_preset, preset_flags, with_preset
from recsuite.config.parser import check_read, parse_given, unread_flags
from recsuite.config.presets import AUTO, NONE, in_words
from recsuite.config.sections import DataConfig
from recsuite.errors import BrokenLaunchError, UserError, require, script_name
from recsuite.hooks import describe_missing, extra, require_installed
from recsuite.places import folder_at
from recsuite.runtime.console import end_when_pipe_closes, say, showing_progress, stage
from recsuite.runtime.ending import (
    end_on_ctrl_c,
    identify_lost_peers,
    is_out_of_memory,
    record_crash,
    report_broken_launch,
    report_lost_worker,
    report_mistake,
)
from recsuite.runtime.host import check_limits, check_versions, describe_memory, is_of_launcher
from recsuite.runtime.process import (
    RuntimeContext,
    broadcast_from_rank0,
    cleanup_runtime,
    end_with,
    init_runtime,
    raise_on_all,
    read_launch,
)
from recsuite.workers.pool import WorkerError

if TYPE_CHECKING:
    from recsuite.datasets.opening import Data
    from recsuite.models.tasks import ModelMaker
    from recsuite.training.callbacks import Callback, CheckpointerProtocol, Tracker
    from recsuite.training.loop import Training
    from recsuite.training.observers import Observers
    from recsuite.training.progress import Progress
    from recsuite.training.state import ShardedModel

SYNTHETIC_NOTICE = "The ratings are synthetic; for real ones: ./run.sh --dataset ml-1m"

# A mode of a script. Collective: every rank calls it.
Mode = Callable[[Config, RuntimeContext], None]
READING = {"--load", "--compact", *(f"--{name}" for name in serving_modes())}
WITH_TRAINING = {f"--{name}" for name in (*TRAINING, "incremental_dump")}
# Printed after a training without any flag, which is the first command of the README.
NEXT = (
    "next: ./run.sh dump keeps the model, ./run.sh train --data_path FOLDER learns from your own tables, "
    "./run.sh help lists the rest"
)
# Flags of modes that write or read checkpoints, or do not need any.
WITH_CHECKPOINTS = (WITH_TRAINING | READING | {f"--{name}" for name in alone_modes()}) - {"--train"}


def run_script(main: Callable[[], int]) -> None:
    """Run a script's `main`, and exit with the status that it returns. Not collective.

    It has to be the whole work of this process.

    Args:
        main: Called without arguments; returns an exit status.

    Example:
        if __name__ == "__main__":
            rs.run_script(main)
    """
    # Python's KeyboardInterrupt is lost inside a callback from C++, as in every backward. An end at once is
    # safe: the workers end with their trainer, and no file is left half written. A training that writes
    # checkpoints has a handler of its own.
    if is_of_launcher():
        # It prints a sentence itself.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    else:
        end_on_ctrl_c()
    end_when_pipe_closes(checkpoint_first=True)
    end_with(main)


def exit_status(work: Callable[[], int]) -> int:
    """Return the status of the work, or that of its exception. Not collective.

    A mistake of the user, an extra that is not installed, a lost worker and a lost peer print one message
    each, without a traceback. Any other exception is recorded for torchrun's report and raised again.

    Args:
        work: The whole work; returns a status.

    Returns:
        The status of the work; 2 after a mistake or without memory, 1 after a lost worker or peer.

    Example:
        def main(argv: list[str] | None = None) -> int:
            return rs.exit_status(lambda: rs.run_modes(argv, MODES, make_model))
    """
    try:
        return work()
    except UserError as error:
        report_mistake(str(error))
        return 2
    except WorkerError as error:
        report_lost_worker(str(error))
        return 1
    except BrokenLaunchError as error:
        report_broken_launch(error)
        return 1
    except SystemExit as ended:
        # --help was printed, or a signal ended the training after a checkpoint.
        return int(str(ended.code or 0))
    except Exception as error:
        sentence = describe_missing(error)
        if is_out_of_memory(error):
            sentence = (
                f"Out of memory. {describe_memory()} Fix: give fewer processes, a smaller "
                "--batch_size or a higher limit (ulimit -v, cgroup)."
            )
        if sentence:
            report_mistake(sentence)
            return 2
        record_crash(error)
        raise


def run_modes(
    argv: list[str] | None,
    modes: Mapping[str, Mode],
    model: ModelMaker,
    defaults: Sequence[str] = (),
    after: Mode | None = None,
    unread: Sequence[str] = (),
    needs: Sequence[str] = (),
) -> int:
    """Parse a command line, check it, and run the modes that it names. Collective: every rank.

    Args:
        argv: The flags; None for those of `sys.argv`.
        modes: Functions of a script by the names "train" and "load". There may be others for "dump",
            "inc_dump" (without them "train" is called) and "compact" (if it needs an optimizer).
        model: Makes the model of a script, for "compact" and the modes of a single process.
        defaults: Flags before those of the command line, which override them.
        after: Work of a script after the modes, which needs a checkpoint. If no flag writes or reads one,
            deltas are written; with --train alone it is skipped.
        unread: Flags of the library, or sections of them, that the script does not use: they are refused, and
            the help omits them.
        needs: Modules that `after` imports: it is refused before the training if one is not installed.

    Returns:
        The exit status.

    Raises:
        UserError: For an invalid flag, and from a mode.

    Example:
        MODES = {"train": train, "load": load}
        rs.run_modes(None, MODES, make_model, defaults=("--epochs", "4"))
    """
    flags, without = [*(sys.argv[1:] if argv is None else argv)], unread_flags(unread)
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
    config, given = parse_once(flags, without)
    if config.is_alone:
        return run_alone(config, given, model)
    check_machine()
    if after is not None:
        require_installed(f"The end of {script_name()}, after the training,", *needs)
    with showing_progress():
        run(config, given, modes, after, model, added)
    return 0


def run(
    config: Config,
    given: frozenset[str],
    modes: Mapping[str, Mode],
    after: Mode | None,
    model: ModelMaker,
    defaults: frozenset[str],
) -> None:
    """Run the modes of a configuration, see `run_modes`. Collective: every rank.

    given: the flags of the command line; defaults: see `joined_launch`.
    """
    # With a checkpoint this is known only after its flags are read: then `joined_launch` prints it.
    if not config.checkpoint.reads:
        print_if_synthetic(config.data)
    with joined_launch(config, given, defaults) as (config, context):
        modes = {"compact": lambda config, context: compact(config, context, model), **modes}
        section = config.checkpoint
        kind = "inc_dump" if section.inc_dump else "dump" if section.dump else "train"
        for name in config.modes:
            modes[kind if name == "train" and kind in modes else name](config, context)
        if not given:
            context.say(NEXT)
        if after is not None:
            # One rank may fail in work that the others do not have, and all must end with its message.
            raise_on_all(lambda: after(config, context))


def parse_once(argv: list[str] | None, unread: Collection[str] = ()) -> tuple[Config, frozenset[str]]:
    """Parse as `parse_given`, but print the help text on rank 0 only. Not collective.

    Raises:
        UserError: see `parse_given`.
        SystemExit: after --help.
    """
    # Every rank parses for itself, because there is no process group yet.
    launch = read_launch()
    with contextlib.redirect_stdout(io.StringIO()) if launch.rank else contextlib.nullcontext():
        return parse_given(argv, unread)


def check_machine() -> None:
    """Refuse too few file descriptors and packages that do not match. Does not import torch.

    Raises:
        UserError: with the command that fixes it.
    """
    check_limits()
    check_versions()


def run_alone(config: Config, given: frozenset[str], model: ModelMaker) -> int:
    """Export, or run the mode of an extra, on rank 0 of a launch. Return the exit status.

    Not collective.

    given: the flags of the command line; model: makes the model of the script.

    Raises:
        UserError: from that work.
    """
    # With status 0, because torchrun would end rank 0 during its work if another rank failed.
    if read_launch().rank != 0:
        return 0
    # Before `check_machine`: an extra checks what it needs.
    for section in config.extras.values():
        if any(config.flags[mode] for mode in section.modes):
            return section.run_alone(config, given, model)
    check_machine()
    with showing_progress():
        from recsuite.serving.export import export

        export(config.checkpoint, Path(config.serving.export), model, config.extras.values())
    return 0


@contextlib.contextmanager
def joined_launch(
    config: Config, given: frozenset[str] = frozenset(), defaults: frozenset[str] = frozenset()
) -> Iterator[tuple[Config, RuntimeContext]]:
    """Join the process group of this launch, and agree on one configuration. Collective: every rank.

    given: the flags of the command line; a checkpoint that is read has the others. defaults: those of the
    given flags that come from the script alone, and do not override a checkpoint's.

    Raises:
        UserError: on every rank, when machines were given different flags, or one that contradicts the
            checkpoint.
        BrokenLaunchError: when another rank is lost; with its name and how to continue.
    """
    try:
        context = init_runtime(config)
        yield _agree_on_flags(config, context, given, defaults), context
    except Exception as error:
        identify_lost_peers(error, config)
        raise
    finally:
        cleanup_runtime()


def _agree_on_flags(
    config: Config, context: RuntimeContext, given: frozenset[str], defaults: frozenset[str]
) -> Config:
    """Return the same configuration on every rank, except flags of one machine. Collective: every rank."""
    # This imports torch, which a data worker must not do.
    from recsuite.datasets.opening import check_same_flags, fitted_to_tables, with_machine_flags

    check_same_flags(config)

    def decided() -> Config:
        if not config.checkpoint.reads:
            return _begun(config, given, defaults)
        from recsuite.checkpoint.recorded import with_recorded

        recorded = with_recorded(config, given - defaults)
        if recorded is config:
            return _begun(config, given, defaults)
        # A checkpoint has all flags, including those of its preset.
        fitted = fitted_to_tables(recorded, given - defaults, is_recorded=True)
        require(
            fitted.model.task == recorded.model.task,
            f"The checkpoint was trained with --task {recorded.model.task}, and the labels of --data_path "
            f"{recorded.data.data_path} require --task {fitted.model.task}; give the data of that training, "
            "or train again",
        )
        return fitted

    config = with_machine_flags(config, broadcast_from_rank0(decided))
    if config.checkpoint.reads:
        print_if_synthetic(config.data)
    return config


def _begun(config: Config, given: frozenset[str], defaults: frozenset[str] = frozenset()) -> Config:
    """Return the flags of a new training, fitted to its tables, and print those of its preset."""
    # The user's test files come before the --split of a script.
    (config, name), reason = fitted_to_data(config, given - ({"split"} & defaults)), ""
    if config.model.preset == AUTO:
        if name == NONE:
            return config
        config = config.replaced(preset=name)
        fitted = f"--task {config.model.task} --split {config.data.split}"
        reason = f", as it fits {fitted}; --preset none sets nothing"
    if name == "rating" and config.tables.vocabulary != "dynamic":
        reason += "; --preset solved usually has a lower error up to ten million ratings"
    if flags := preset_flags(config, given):
        say(f"--preset {config.model.preset} sets {in_words(flags)}{reason}")
    return with_preset(config, given)


def fitted_to_data(config: Config, given: frozenset[str]) -> tuple[Config, str]:
    """Return the flags fitted to the tables of a new training, and the name of the preset that fits them."""
    from recsuite.datasets.opening import fitted_to_tables

    # With a named preset, its --task and --split count as given.
    config = fitted_to_tables(config, {*given, *preset_flags(config, given)})
    return config, fitting_preset(config, given) if config.model.preset == AUTO else config.model.preset


def print_if_synthetic(config: DataConfig) -> None:
    """Print from rank 0 if the ratings are synthetic. Not collective."""
    if config.is_synthetic and read_launch().rank == 0:
        say(SYNTHETIC_NOTICE)


@contextlib.contextmanager
def open_data(
    config: Config, context: RuntimeContext, build: Callable[..., Any], observers: Observers | None = None
) -> Iterator[Data]:
    """Open the data of a training, or with --load those of a checkpoint. Collective: every rank.

    A context manager; on exit the workers end.

    Args:
        config: The flags.
        context: This process.
        build: Makes the loader, see `build_dataloader`.
        observers: Of a training; None for a load.

    Returns:
        The columns and the loader of their batches.

    Raises:
        UserError: When the data cannot be read, differ between machines, or the workers cannot start.

    Example:
        with rs.open_data(args, runtime, rs.build_dataloader) as data:
            print(data.columns.num_train)
    """
    from recsuite.checkpoint.stream_state import reopen_data

    with contextlib.ExitStack() as stack:
        with observers.part("data") if observers else contextlib.nullcontext():
            data = stack.enter_context(reopen_data(config, context, observers is not None, build))
        if observers is not None:
            config = config.with_global_batch(data.columns.num_train, context.world_size)
            observers.flags.update(config.flags)
        yield data


@contextlib.contextmanager
def checkpointing(
    data: Data, config: Config, context: RuntimeContext, observers: Observers
) -> Iterator[CheckpointerProtocol | None]:
    """Open the writer of checkpoints, which knows where the training begins. Collective: every rank.

    A context manager. Gives None if the flags request no checkpoint: then memory keeps the best weights.

    Raises:
        UserError: when another training writes there, and when the last checkpoint failed.
    """
    # The workers start while this imports TorchRec.
    with observers.part("imports"), stage("importing TorchRec", quiet=context.rank != 0):
        from recsuite.checkpoint import checkpointer as checkpoints
    if not config.checkpoint.writes:
        yield None
        return
    with checkpoints.checkpointing(data.columns, config, context) as checkpointer:
        yield checkpointer


@contextlib.contextmanager
def session(
    config: Config,
    context: RuntimeContext,
    build: Callable[..., Any],
    callbacks: Sequence[Callback] = (),
    trackers: Sequence[Tracker] = (),
) -> Iterator[Training]:
    """Open a training: its data and workers, its checkpoints, and its observers. Collective: every rank.

    A context manager; on exit the last checkpoint is written and the workers end.

    Args:
        config: Flags.
        context: This process.
        build: Function that makes the loader, see `build_dataloader`.
        callbacks: Callbacks of your own, beside those of the flags.
        trackers: Trackers of your own, beside those of the flags.

    Yields:
        The training, with its data, checkpoints, observers and loop.

    Raises:
        UserError: When --save_dir has an earlier training, the data cannot be read, differ between machines,
            or results could not be written.

    Example:
        with rs.session(args, runtime, rs.build_dataloader) as training:
            model = training.shard(make_model, loss=MyLoss())
            step = training.step(model.train_on)
            for epoch in training.epochs():
                for batch in epoch:
                    step(batch)
                training.save(training.validate())
            result = training.finish()
        training.report(result)
    """
    from recsuite.checkpoint.earlier import check_free
    from recsuite.training.observers import observing

    # Before the data are read and the results of the earlier training are replaced.
    if config.checkpoint.writes:
        raise_on_all(lambda: check_free(config.checkpoint) if context.rank == 0 else None)
    with (
        observing(config, context, callbacks, trackers) as observers,
        open_data(config, context, build, observers) as data,
        checkpointing(data, config, context, observers) as checkpoints,
    ):
        from recsuite.training.loop import Training

        observed = (observers.callbacks, observers.split)
        with Training(data, config, context, checkpoints, *observed) as training:
            yield training


def restore(
    data: Data, config: Config, context: RuntimeContext, model: ModelMaker, **others: Any
) -> tuple[ShardedModel, Progress]:
    """Load a model from the checkpoint that --load names. Collective: every rank.

    Args:
        data: See `open_data`.
        config: The flags.
        context: This process.
        model: Makes the model, as for `Training.shard`.
        others: Its loss, tables, dense and metrics, as for `Training.shard`.

    Returns:
        The model with its weights, and the progress of its training.

    Raises:
        UserError: When the checkpoint is missing, damaged or of another model.

    Example:
        model, progress = rs.restore(data, args, runtime, make_model)
        print(progress.step)
    """
    from recsuite.checkpoint.restore import restore_chosen
    from recsuite.training.state import build_train_state

    train_state = build_train_state(data.columns, config, context, model, **others)
    if config.checkpoint.other_data:
        from recsuite.models.tasks import TASKS

        section, task = config.checkpoint, TASKS[config.model.task]
        origin = (data.columns, task, context, section.checkpoint, section.until)
        folder = folder_at(section.folder_to_load)
        loaded = extra("warm").start_from(folder, train_state, *origin, draws=False)
        return train_state, loaded.progress
    restored = restore_chosen(config.checkpoint, config.model, train_state, data.columns, context)
    return train_state, restored.progress


def report_test(
    model: ShardedModel, progress: Progress, data: Data, config: Config, context: RuntimeContext
) -> None:
    """Test a restored model, and print the results. Collective: every rank.

    Args:
        model: From `restore`.
        progress: From `restore`.
        data: See `open_data`.
        config: The flags.
        context: This process.

    Raises:
        UserError: When a stream has lost events that the model was trained on.

    Example:
        model, progress = rs.restore(data, args, runtime, make_model)
        rs.report_test(model, progress, data, args, runtime)
    """
    from recsuite.training.evaluation import make_evaluator
    from recsuite.training.progress import describe_step
    from recsuite.training.results import describe_no_test, print_results
    from recsuite.training.steps import BatchFeed, place_batches
    from recsuite.training.stream import report_rest_of_stream

    feed = BatchFeed(data.loader)
    evaluator = make_evaluator(feed, data.columns, config, context)
    if not (config.stream.stream or data.columns.num_test):
        context.say(describe_no_test(data.columns))
        return
    place_batches(feed, model, config, context)
    if config.stream.stream:
        report_rest_of_stream(evaluator, model.model, progress, data.columns, context)
        return
    test = evaluator.test(model.model, progress.epoch)
    print_results(describe_step(progress), test, data.columns, config, context)
    if context.rank == 0:
        config = config.with_global_batch(data.columns.num_train, context.world_size)
        for section in config.extras.values():
            section.report_test(test, data.columns, config)


def compact(config: Config, context: RuntimeContext, model: ModelMaker, **others: Any) -> None:
    """Merge deltas into one full checkpoint. Collective: every rank.

    Args:
        config: The flags.
        context: This process.
        model: See `restore`.
        others: See `restore`.

    Raises:
        UserError: When a checkpoint is missing, damaged or of another model.

    Example:
        MODES = {**MODES, "compact": lambda config, context: rs.compact(config, context, make_model)}
    """
    from recsuite.checkpoint.stream_state import reopen_data

    with reopen_data(config, context, trains=False) as data:
        from recsuite.checkpoint.checkpointer import compact as merge
        from recsuite.training.state import build_train_state

        train_state = build_train_state(data.columns, config, context, model, **others)
        merge(train_state, data.columns, config, context, data.stream_reader)
