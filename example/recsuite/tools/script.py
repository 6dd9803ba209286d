"""Start and end of every script, and the agreement of its ranks on the flags."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import signal
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.config.config import Config
from recsuite.config.parser import parse_given
from recsuite.config.presets import AUTO, NONE, fitting_preset, in_words, preset_flags, with_preset
from recsuite.config.sections import DataConfig, require
from recsuite.errors import BrokenLaunchError, UserError
from recsuite.runtime.console import end_when_unread, say, shown
from recsuite.runtime.ending import (
    name_lost_peers,
    record_crash,
    report_broken_launch,
    report_lost_worker,
    report_mistake,
)
from recsuite.runtime.host import check_descriptors, check_versions
from recsuite.runtime.process import (
    Recovery,
    RuntimeContext,
    advise,
    broadcast_from_rank0,
    cleanup_runtime,
    end_with,
    init_runtime,
    read_launch,
)
from recsuite.workers.pool import WorkerError

if TYPE_CHECKING:
    from recsuite.models.tasks import ModelMaker

SYNTHETIC_NOTICE = (
    "The ratings are synthetic, drawn from a planted world; for real ones: ./run.sh --dataset ml-1m"
)

# Scripts of tasks for which example.py, whose own model predicts ratings, uses a model of the library.
SCRIPTS = {"ranking": "retrieval.py", "sequence": "sequential.py"}


def run_script(main: Callable[[], int]) -> None:
    """Run a script's `main` as the whole work of this process, and exit with the status that it returns. Not
    collective.

    main: called without arguments; returns an exit status.

        if __name__ == "__main__":
            rs.run_script(main)
    """
    # Python's KeyboardInterrupt is lost inside a callback from C++, as in every backward. The default action
    # of the signal always ends the process, its workers end with it, and no file is left half written. A
    # training that writes checkpoints has a handler of its own.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_when_unread(checkpoint_first=True)
    end_with(main)


def exit_status(work: Callable[[], int]) -> int:
    """Return the status of the work, or that of its exception: 2 for a user's mistake. Not collective.

    work: the whole work, which returns a status. A mistake, a lost worker and a lost peer print one message
    each, without a traceback. Any other exception is recorded for torchrun's report and raised again.

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
        record_crash(error)
        raise


def parse_once(argv: list[str] | None, unread: Collection[str] = ()) -> tuple[Config, frozenset[str]]:
    """Parse as `parse_given`, but print the help text on rank 0 only. Not collective.

    Raises:
        UserError: see `parse_given`.
        SystemExit: after --help.
    """
    # Every rank parses for itself, because there is no process group yet.
    launch = read_launch()
    with contextlib.redirect_stdout(io.StringIO()) if launch.rank else contextlib.nullcontext():
        return parse_given(argv, launch.world_size, unread)


def check_machine() -> None:
    """Refuse too few file descriptors and packages that do not match. Does not import torch.

    Raises:
        UserError: with the command that mends it.
    """
    check_descriptors()
    check_versions()


def run_alone(config: Config, given: frozenset[str], model: ModelMaker | None = None) -> int:
    """Examine the machine, write a schema, export or recommend, on rank 0 of a launch. Return the exit
    status. Not collective.

    given: the flags of the command line; model: makes the model of the script.

    Raises:
        UserError: when it cannot be done.
    """
    # With status 0, because torchrun would end rank 0 during its work if another rank failed.
    if read_launch().rank != 0:
        return 0
    # Before the checks below: the doctor prints their errors as lines of its report, beside the other
    # lines.
    if config.monitoring.doctor:
        from recsuite.tools.doctor import diagnose

        return diagnose(config)
    # Needs none of the packages that are checked.
    if config.data.schema:
        from recsuite.datasets.tables.proposal import propose

        propose(config.data.schema).show()
        return 0
    check_machine()
    with shown():
        _serve(config, given, model)
    return 0


def _serve(config: Config, given: frozenset[str], model: ModelMaker | None) -> None:
    if config.serving.export:
        from recsuite.serving.export import export

        export(config.checkpoint, Path(config.serving.export), model)
    else:
        from recsuite.serving.recommend import recommend

        recommend(config, given, model)


@contextlib.contextmanager
def joined(
    config: Config, given: frozenset[str] = frozenset(), defaults: frozenset[str] = frozenset()
) -> Iterator[tuple[Config, RuntimeContext]]:
    """Join the process group of this launch, and agree on one configuration. Collective: every rank.

    given: the flags of the command line; a checkpoint that is read has the others. defaults: those of the
    given flags that come from the script alone, and do not override a checkpoint's.

    Raises:
        UserError: on every rank, when machines were given different flags, or one that contradicts the
            checkpoint.
        BrokenLaunchError: for any exception that says only that another rank is lost: which, and how to
            continue.
    """
    # Not at the top: every data worker imports this file, and does not need checkpoints.
    from recsuite.checkpoint.folder import newest_in

    recovery = Recovery(config, newest_in)
    try:
        context = init_runtime(config)
        advise(recovery.after_lost_peer)
        yield _agree_on_flags(config, given, defaults), context
    except Exception as error:
        name_lost_peers(error, config.runtime.timeout, recovery)
        raise
    finally:
        cleanup_runtime()


def _agree_on_flags(config: Config, given: frozenset[str], defaults: frozenset[str] = frozenset()) -> Config:
    """Return the same configuration on every rank, except flags of one machine. Collective: every rank."""
    # This imports torch, which a data worker must not do.
    from recsuite.datasets.opening import check_same_flags, fitted_to_tables, of_this_machine

    check_same_flags(config)

    def decided() -> Config:
        if not config.checkpoint.reads:
            return _begun(config, given)
        from recsuite.checkpoint.recorded import with_recorded

        found = with_recorded(config, given - defaults)
        if found is config:
            return _begun(config, given)
        # A checkpoint has all flags, including those of its preset.
        fitted = fitted_to_tables(found, given - defaults, is_recorded=True)
        require(
            fitted.model.task == found.model.task,
            f"The checkpoint is of a training with --task {found.model.task}, and the labels of --data_path "
            f"{found.data.data_path} are for --task {fitted.model.task}; give the data of that training, or "
            "train anew on these",
        )
        return fitted

    config = of_this_machine(config, broadcast_from_rank0(decided))
    if config.checkpoint.reads:
        say_if_synthetic(config.data)
    return config


def _begun(config: Config, given: frozenset[str]) -> Config:
    """Return the flags of a new training, fitted to its tables, with those of its preset, which are printed.
    Not collective.

    Raises:
        UserError: when one that is given cannot be with them.
    """
    (config, name), reason = _fitted(config, given), ""
    if config.model.preset == AUTO:
        if name == NONE:
            return config
        config = config.replaced(preset=name)
        fitted = f"--task {config.model.task} --split {config.data.split}"
        reason = f", as it fits {fitted}; --preset none sets nothing"
    world_size = read_launch().world_size
    if flags := preset_flags(config, given, world_size):
        say(f"--preset {config.model.preset} sets {in_words(flags)}{reason}")
    return with_preset(config, given, world_size)


def _fitted(config: Config, given: frozenset[str]) -> tuple[Config, str]:
    """Return the flags fitted to the tables of a new training, and the name of the preset that fits them."""
    from recsuite.datasets.opening import fitted_to_tables

    # With a named preset, its --task and --split count as given.
    config = fitted_to_tables(config, {*given, *preset_flags(config, given)})
    return config, fitting_preset(config, given) if config.model.preset == AUTO else config.model.preset


def print_fitting_command() -> int:
    """Print the script that fits the flags of this process and the labels of their data, and its flags, for a
    shell. Other output goes to standard error. Not collective.

    Raises:
        UserError: when a flag cannot be, or asks for what the tables do not say.
    """
    with contextlib.redirect_stdout(sys.stderr):
        command = shlex.join(fitting_command(sys.argv[1:]))
    print(command)
    return 0


def fitting_command(argv: list[str]) -> list[str]:
    """Return the script that fits flags and the labels of their data, and its flags: the given ones, and
    those of task and preset, so that the script does not choose them itself.

    Raises:
        UserError: see `print_fitting_command`.
    """
    config, given = parse_given(argv)
    if script := _script_of_labels(config.data):
        return [script, *argv]
    # Given flags would override those of the checkpoint.
    if config.checkpoint.reads:
        return ["example.py", *argv]
    fitted, name = _fitted(config, given)
    # Impossible flags are refused here, so that the error names the flags that were given.
    with_preset(fitted.replaced(preset=name), given)
    script, added, found = SCRIPTS.get(fitted.model.task, "example.py"), list[str](), {"preset": name}
    if fitted.data.split != config.data.split:
        found["split"] = fitted.data.split
    if script == "example.py":
        found["task"] = fitted.model.task
    else:
        # The other scripts have one task each, and no flag for it.
        pairs = zip(["", *argv], argv, strict=False)
        argv = [word for before, word in pairs if "--task" not in (before, word.partition("=")[0])]
        # No file is written without a request.
        if not config.checkpoint.writes and "train" not in given:
            added.append("--train")
    for flag, value in found.items():
        added += [] if flag in given else [f"--{flag}", value]
    return [script, *argv, *added]


def _script_of_labels(config: DataConfig) -> str:
    """Return the script for several binary labels, or for a log like Criteo's, whose events have no users: 40
    columns without names, or a schema that gives all events the same user; "" for other data.
    """
    from recsuite.datasets.source import is_own
    from recsuite.datasets.tables.description import given_in
    from recsuite.datasets.tables.files import find_tables
    from recsuite.datasets.tables.formats import TextFile
    from recsuite.datasets.tables.schema_file import schema_path

    if not is_own(config):
        return ""
    written = schema_path(config.data_path)
    if written.exists():
        _, given = given_in(written)
        labels = [given.get("label", {}), *given.get("more_labels", ())]
        if any(label.get("kind") != "yes_no" for label in labels):
            return ""
        has_no_users = any(each.startswith("user=") for each in given.get("files", {}).get("constants", ()))
        return "multitask.py" if len(labels) > 1 else "ctr.py" if has_no_users else ""
    # The guess of the schema reports errors in the tables.
    with contextlib.suppress(UserError):
        lines = (TextFile(file).head.splitlines()[0] for file in find_tables(config.data_path).events)
        return "ctr.py" if all(re.fullmatch(rb"[01](\t[^\t]*){39}", line) for line in lines) else ""
    return ""


def say_if_synthetic(config: DataConfig) -> None:
    """Print from rank 0 if the ratings are synthetic. Not collective."""
    if config.is_synthetic and read_launch().rank == 0:
        say(SYNTHETIC_NOTICE)
