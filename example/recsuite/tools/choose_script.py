"""Choice of the script that fits the data of a command line, for `./run.sh train`."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys

from recsuite.config.config import Config
from recsuite.config.fitting import with_preset
from recsuite.config.parser import parse_given
from recsuite.config.sections import DataConfig, folder_of_script
from recsuite.errors import UserError
from recsuite.tools.script import exit_status, fitted_to_data

EXAMPLE = "example.py"
# Scripts with the models of other tasks than those of example.py.
SCRIPTS = {"ranking": "retrieval.py", "sequence": "sequential.py"}


def print_fitting_command() -> int:
    """Print the script that fits the flags of this process and the labels of their data, and its flags.

    For a shell: other output goes to standard error. Not collective.

    Raises:
        UserError: for a flag that is invalid, or that the tables do not support.
    """
    with contextlib.redirect_stdout(sys.stderr):
        command = shlex.join(fitting_command(sys.argv[1:]))
    print(command)
    return 0


def fitting_command(argv: list[str]) -> list[str]:
    """Return the script that fits flags and the labels of their data, and its flags.

    These are the given ones, and those of task and preset, so that the script does not choose them itself.

    Raises:
        UserError: see `print_fitting_command`.
    """
    config, given = parse_given(argv)
    script, *words = _fitting(argv, config, given)
    section = config.checkpoint
    if script != EXAMPLE and (section.writes or section.reads) and "save_dir" not in given:
        # Where recommend, score, serve and a later load of any data read.
        words += ["--save_dir", folder_of_script(EXAMPLE)]
    return [script, *words]


def _fitting(argv: list[str], config: Config, given: frozenset[str]) -> list[str]:
    if script := _script_of_labels(config.data):
        return [script, *argv]
    # Given flags would override those of the checkpoint.
    if config.checkpoint.reads:
        return [EXAMPLE, *argv]
    fitted, name = fitted_to_data(config, given)
    # Impossible flags are refused here, so that the error names the flags that were given.
    with_preset(fitted.replaced(preset=name), given)
    script, added, chosen = SCRIPTS.get(fitted.model.task, EXAMPLE), list[str](), {"preset": name}
    if fitted.data.split != config.data.split:
        chosen["split"] = fitted.data.split
    if script == EXAMPLE:
        chosen["task"] = fitted.model.task
    else:
        # The other scripts have one task each, and no flag for it.
        pairs = zip(["", *argv], argv, strict=False)
        argv = [word for before, word in pairs if "--task" not in (before, word.partition("=")[0])]
        # No file is written without a request.
        if not config.checkpoint.writes and "train" not in given:
            added.append("--train")
    for flag, value in chosen.items():
        added += [] if flag in given else [f"--{flag}", value]
    return [script, *argv, *added]


def _script_of_labels(config: DataConfig) -> str:
    """Return the script for several binary labels, or for a log without users like Criteo's, or ""."""
    from recsuite.datasets.source import is_user_tables
    from recsuite.datasets.tables.files import find_tables, schema_path
    from recsuite.datasets.tables.formats import TextFile
    from recsuite.datasets.tables.schema_file import given_in

    if not is_user_tables(config):
        return ""
    written = schema_path(config.data_path)
    if written.exists():
        _, given = given_in(written)
        labels = [given.get("label", {}), *given.get("more_labels", ())]
        if any(label.get("kind") != "yes_no" for label in labels):
            return ""
        # A schema that gives all events the same user.
        constants = given.get("files", {}).get("constants", ())
        has_no_users = any(constant.startswith("user=") for constant in constants)
        return "multitask.py" if len(labels) > 1 else "ctr.py" if has_no_users else ""
    # Criteo's logs have 40 columns without names. The guess of the schema reports errors in the tables.
    with contextlib.suppress(UserError):
        lines = (TextFile(file).head.splitlines()[0] for file in find_tables(config.data_path).events)
        return "ctr.py" if all(re.fullmatch(rb"[01](\t[^\t]*){39}", line) for line in lines) else ""
    return ""


if __name__ == "__main__":
    sys.exit(exit_status(print_fitting_command))
