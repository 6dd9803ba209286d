"""Train a sharded recommender on MovieLens, on any number of processes.

    python example.py                                          one process
    torchrun --standalone --nproc_per_node=2 example.py        two, on CPU or GPU alike
    torchrun --standalone --nproc_per_node=8 example.py --dataset ml-1m --num_workers 4

`python example.py --help` lists the flags. Every spawned data worker imports this file again, so its top
level imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from recsuite.config.config import Config
from recsuite.config.parser import parse_args as parse_args
from recsuite.config.parser import parse_given
from recsuite.errors import BrokenLaunchError, UserError
from recsuite.runtime.collectives import broadcast_from_rank0
from recsuite.runtime.console import end_when_unread
from recsuite.runtime.ending.failures import (
    name_lost_peers,
    record_crash,
    report_broken_launch,
    report_lost_worker,
    report_mistake,
)
from recsuite.runtime.ending.recovery import Recovery
from recsuite.runtime.host import check_descriptors
from recsuite.runtime.launch import read_launch
from recsuite.runtime.process import RuntimeContext, advise, cleanup_runtime, end_with, init_runtime
from recsuite.runtime.progress_bar import shown, stage
from recsuite.runtime.versions import check_stack
from recsuite.workers.failure import WorkerError

if TYPE_CHECKING:
    from recsuite.datasets.columns import Columns
    from recsuite.datasets.metrics import Metrics
    from recsuite.training.trainer import Run
    from recsuite.training.watch import Watch

SYNTHETIC_NOTICE = (
    "The ratings are synthetic, drawn from a planted world; for real ones: ./run.sh --dataset ml-1m"
)


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
    """Run the modes that the command line names; returns the exit status: 2 for a user's mistake.

    With --doctor it is 1 if anything on the page is a fault.
    """
    try:
        with _one_voice():
            config, given = parse_given(argv)
        if config.monitoring.doctor:
            return examine_machine(config)
        check_descriptors()
        check_stack()
        with shown():
            if config.is_alone:
                run_alone(config)
            else:
                run(config, given)
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
        # Told to end by a signal, after a dump.
        return int(str(ended.code or 0))
    except Exception as error:
        record_crash(error)
        raise
    return 0


def examine_machine(config: Config) -> int:
    """Print the doctor's page from rank 0, whatever is broken; returns the exit status. Not collective."""
    if read_launch().rank != 0:
        return 0
    from recsuite.tools.doctor import examine
    from recsuite.tools.findings import has_fault, page

    findings = examine(config)
    print(page(findings))
    return 1 if has_fault(findings) else 0


def run_alone(config: Config) -> None:
    """Export or recommend, on rank 0 of a launch. Not collective."""
    if read_launch().rank != 0:
        return
    if config.serving.export:
        from recsuite.serving.export import export

        export(config)
    else:
        from recsuite.serving.recommend import recommend

        recommend(config)


def run(config: Config, given: frozenset[str] = frozenset()) -> None:
    """Run the modes of the configuration. Collective: every rank.

    given: the flags of the command line; others are those of the checkpoint that is loaded or gone on from.
    """
    from recsuite.checkpoint.storage.directory import newest_in

    modes = {"train": train_and_report, "compact": compact_dumps, "load": load_and_report}
    goes_on = bool(config.checkpoint.load or config.checkpoint.compact or config.checkpoint.resume)
    if not goes_on:
        announce_data(config)
    try:
        context = init_runtime(config)
        advise(Recovery(config, newest_in).after_lost_peer)
        from recsuite.datasets.opening import check_same_flags, of_this_machine

        check_same_flags(config)
        if goes_on:
            from recsuite.checkpoint.recorded import with_recorded

            config = of_this_machine(config, broadcast_from_rank0(lambda: with_recorded(config, given)))
            announce_data(config)
        for mode in config.modes:
            modes[mode](config, context)
    except Exception as error:
        name_lost_peers(error, config.runtime.timeout, Recovery(config, newest_in))
        raise
    finally:
        cleanup_runtime()


def announce_data(config: Config) -> None:
    """Say from rank 0 if the ratings are not real ones. Not collective."""
    if config.data.is_synthetic and read_launch().rank == 0:
        print(SYNTHETIC_NOTICE)


def train_and_report(config: Config, context: RuntimeContext) -> None:
    """Train, and show what came of it. Collective: every rank."""
    from recsuite.monitoring.report import describe_nothing_left, make_report_dir, write_report
    from recsuite.training.watch import watching

    if context.rank == 0 and config.monitoring.report_dir:
        make_report_dir(config)
    with watching(config, context) as watch:
        result = train_watched(config, context, watch)
        if result.epochs and context.rank == 0 and config.monitoring.report_dir:
            watch.after_run(write_report(result, watch.stopwatch.split(), config, context))
    if not result.epochs:
        context.say(describe_nothing_left(result, config))
    show_test(f"epoch {result.test_epoch}", result.test, result.columns, config, context)


def show_test(when: str, test: Metrics, columns: Columns, config: Config, context: RuntimeContext) -> None:
    """The table of a model after an epoch or step, and whether it is worse than none."""
    from recsuite.monitoring.report import describe_failure, results_table

    context.say(results_table(columns, config, f"this model, {when}", test), tagged=False)
    if failure := describe_failure(columns, config, test):
        context.say(failure)


def train_watched(config: Config, context: RuntimeContext, watch: Watch) -> Run:
    """Train on the data of the configuration, with dumps if it asks for them. Collective: every rank."""
    from recsuite.datasets.opening import open_data

    with contextlib.ExitStack() as stack:
        with watch.stopwatch.part("data"):
            data = stack.enter_context(open_data(config, context))
        # The workers start while this imports TorchRec.
        with watch.stopwatch.part("imports"), stage("importing TorchRec", quiet=context.rank != 0):
            from recsuite.training.trainer import train
        keeper = None
        if config.checkpoint.dumps:
            from recsuite.checkpoint.checkpointer import keeping_dumps

            keeper = stack.enter_context(keeping_dumps(data.columns, config, context))
        return train(data, config, context, keeper, watch)


def load_and_report(config: Config, context: RuntimeContext) -> None:
    """Evaluate a dump. Collective: every rank."""
    from recsuite.datasets.opening import open_data

    with open_data(config, context) as data:
        from recsuite.checkpoint.restore import load_chosen
        from recsuite.checkpoint.storage.manifest import describe_step
        from recsuite.training.evaluation import make_evaluator
        from recsuite.training.trainer import InputPipeline, build_learner

        learner = build_learner(data.columns, config, context)
        position = load_chosen(config, learner, data.columns, context).position
        evaluator = make_evaluator(InputPipeline(data.loader), data.columns, config, context)
        test = evaluator.test(learner.model, position.epoch)
    show_test(describe_step(position), test, data.columns, config, context)


def compact_dumps(config: Config, context: RuntimeContext) -> None:
    """Fold increments into one dump. Collective: every rank."""
    from recsuite.datasets.opening import open_data

    with open_data(config, context) as data:
        from recsuite.checkpoint.checkpointer import compact
        from recsuite.training.trainer import build_learner

        compact(build_learner(data.columns, config, context), data.columns, config, context)


@contextlib.contextmanager
def _one_voice() -> Iterator[None]:
    """Let rank 0 alone print the help text."""
    quiet = read_launch().rank != 0
    with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
        yield


if __name__ == "__main__":
    # Python's KeyboardInterrupt is lost when it comes up inside a callback from C++, as in every backward.
    # The plain signal always ends the process, its workers end with it, and no file is ever half written. A
    # training that dumps has a handler of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_when_unread(dumps_first=True)
    end_with(main)
