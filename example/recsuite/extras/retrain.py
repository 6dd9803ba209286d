"""A new model on newer data, promoted only if it is better than the one that is served.

    ./run.sh retrain --data_path shop --save_dir models

    models/
        promoted -> run-000001     what servers follow: a folder of checkpoints
        run-000001/                checkpoints of a training; report/, its metrics; verdict.json
            final/                 checkpoints of the same training on all events, which the link names
        run-000002/

Each call trains in a new run, and tests the promoted run on the same newest events, which neither has
learned. If the new one is better, a final training of as many epochs as its best one learns these too. A
training learns its events anew, or with --warm begins with the rows and the dense part of the promoted run.
The link changes in one rename, after everything else is written; whatever fails or is killed before leaves it
as it was.

In an object store the link is a small object. A store has no lock that ends with its process: the newest
retrain owns the folder, and an earlier one that still runs promotes nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from recsuite.checkpoint.folder import set_link
from recsuite.checkpoint.recorded import DATA_FLAGS, NAME_FLAGS
from recsuite.config.config import TRAINING, Config, alone_modes
from recsuite.config.fitting import with_preset
from recsuite.config.parser import parse_given
from recsuite.config.sections import NO_SPLIT
from recsuite.errors import UserError, counted, markdown_table
from recsuite.files import explained, held, resolved, shared_folder
from recsuite.metrics import LEAST_GROUPS, lower_is_better, paired_interval
from recsuite.places import ObjectPath, folder_at, write_whole
from recsuite.runtime.console import say
from recsuite.runtime.host import die_with_parent
from recsuite.runtime.process import launch_name
from recsuite.tools.choose_script import SCRIPTS, fitting_command
from recsuite.tools.script import exit_status, run_script

PROMOTED, FINAL, VERDICT = "promoted", "final", "verdict.json"
LOCK, NEWEST = ".retrain.lock", ".retrain.newest"
# The simplest prediction of each kind of metric; a model that is worse has learned from bad data.
SIMPLEST = ("popularity", "global mean", "share of yes")
MARGIN_HELP = "how much better the new one must be, within 95 %%; below 0, how much worse it may be: 0"
# Distance beyond the expected one, and share of new values, from which on a line is a warning.
FAR, MANY_NEW = 0.1, 0.3
RUN = re.compile(r"run-(\d{6})")
# Flags that this program sets itself.
RESERVED = {
    *(*alone_modes(), *TRAINING, "compact", "load", "resume", "stream"),
    *("warm_start", "report_dir", "other_data"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Retrain, and return the exit status: that of a training that failed, else 0."""
    return exit_status(lambda: retrain(*parse(sys.argv[1:] if argv is None else argv)))


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the flags of this program, and those of the training.

    Raises:
        UserError: for a flag of the training that this program sets.
    """
    parser = argparse.ArgumentParser(prog="./run.sh retrain", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--save_dir", type=folder_at, default=Path("models"), help="folder of runs: models")
    parser.add_argument("--margin", type=float, default=0.0, help=MARGIN_HELP)
    parser.add_argument("--keep_runs", type=int, default=4, help="runs to keep beside the promoted one: 4")
    help_text = "promote a model as it was tested, without a training on all events"
    parser.add_argument("--no_final_fit", action="store_true", help=help_text)
    parser.add_argument("--warm", action="store_true", help="begin with the rows of the promoted model")
    help_text = "compare with, and begin with, a model whose source has changed since"
    parser.add_argument("--accept_changed_model", action="store_true", help=help_text)
    parser.add_argument("--nproc_per_node", default="1", help=argparse.SUPPRESS)
    flags, others = parser.parse_known_args(argv)
    config, given = parse_given(others)
    if not math.isfinite(flags.margin):
        raise UserError(f"--margin must be a number, got {flags.margin}.")
    if flags.keep_runs < 0:
        raise UserError(f"--keep_runs must be at least 0, got {flags.keep_runs}.")
    if set_here := sorted(given & RESERVED):
        raise UserError(f"--{set_here[0]} is set by retrain itself; leave it out.")
    if not (config.data.data_path or config.data.dataset):
        raise UserError("retrain requires the data as they are now; give --data_path or --dataset.")
    return flags, others


def retrain(flags: argparse.Namespace, others: list[str]) -> int:
    """Train in a new run, compare, and promote."""
    folder: Path = flags.save_dir
    with contextlib.ExitStack() as stack:
        with explained(f"Cannot write to --save_dir {folder}", "give another folder"):
            folder.mkdir(parents=True, exist_ok=True)
            run, flags.lock = begin(folder, stack)
        promoted = promoted_in(folder)
        script, *words = fitting_command(others)
        for task, name in SCRIPTS.items():
            # It trains the same model, and does nothing after it.
            if script == name:
                script, words = "example.py", ["--task", task, *words]
        config = with_preset(*parse_given(words))
        check_comparable(config, promoted)
        training = [*words, "--dump"]
        if promoted and flags.warm:
            training += ["--warm_start", str(promoted), *accepting(flags)]
        outputs = ["--save_dir", str(run), "--report_dir", str(run / "report")]
        status = launch(flags, script, [*training, *outputs])
        with explained(f"Cannot finish {run}", "call retrain again"):
            check_newest(run)
            if status:
                say(f"the training failed with status {status}: {described(promoted)}")
                return status
            return finish(flags, script, training, run, promoted)


def begin(folder: Path, stack: contextlib.ExitStack) -> tuple[Path, int | None]:
    """Return the new run of the only retrain in a folder, and remove what earlier ones did not finish.

    Also return the descriptor of the lock, None in an object store.

    Raises:
        UserError: when another one is at work; in an object store, the other one is refused.
    """
    # Else a folder that is called like a run may be another program's.
    is_ours = (folder / LOCK).exists()
    if isinstance(folder, ObjectPath):
        run = claimed(folder)
        earlier = [each for each in runs_in(folder) if each < run and (each / LOCK).exists()]
        remove_unfinished(unpromoted(earlier))
        return run, None
    refusal = f"Another retrain, or a training that it has started, is at work in {folder}; wait for it."
    lock = stack.enter_context(held(folder / LOCK, refusal, is_inherited=True))
    # No number is used again: processes of a retrain that was killed may still write into a run that was
    # removed.
    newest, there = folder / NEWEST, runs_in(folder)
    names = [newest.read_text() if newest.exists() else "", *(run.name for run in there)]
    run = folder / f"run-{max(map(number_of, names)) + 1:06d}"
    write_whole(newest, run.name.encode())
    if is_ours:
        remove_unfinished(unpromoted(there))
    return run, lock


def claimed(folder: ObjectPath) -> Path:
    """Return a new run in an object store, and own the folder from now on.

    The lock names the newest run, so no number is used again: an earlier retrain may still write into a run
    that was removed.
    """
    lock = folder / LOCK
    for number in itertools.count(number_of(lock.read_text() if lock.exists() else "") + 1):
        run = folder / f"run-{number:06d}"
        # Of two that begin at the same time, one makes this object.
        with contextlib.suppress(FileExistsError):
            if not run.exists():
                (run / LOCK).put(launch_name().encode(), is_new=True)
                break
    # Before anything is removed: an earlier one must not promote a run that loses its files.
    lock.put(run.name.encode())
    return cast(Path, run)


def check_newest(run: Path) -> None:
    """Refuse to go on in an object store where another retrain has begun, and remove the run.

    Raises:
        UserError: with the name of the other run.
    """
    if isinstance(run, ObjectPath) and (newest := (run.parent / LOCK).read_text()) != run.name:
        # The other one did not see what came after it.
        remove_run(run)
        raise UserError(
            f"Another retrain is at work in {run.parent}, on {newest}, so {run.name} is not promoted; wait "
            "for it."
        )


def finish(
    flags: argparse.Namespace, script: str, training: Sequence[str], run: Path, promoted: Path | None
) -> int:
    """Compare the model of a run with the promoted one, promote the better one, and remove old runs.

    training: the words of its training.
    """
    new = json.loads((run / "report" / "metrics.json").read_text())
    for line in drift_lines(new["drift"]):
        say(line)
    if promoted is None:
        verdict: dict[str, Any] = {"is_better": True, "reason": "it is the first"}
    else:
        data = data_words(new["config"])
        test = ["--load", str(promoted), "--other_data", *data, *accepting(flags)]
        test.append(f"--by={new['config'].get('by', '')}")
        status = launch(flags, script, [*test, "--report_dir", str(run / "before")])
        check_newest(run)
        if status:
            say(f"the test of the promoted model failed with status {status}: {described(promoted)}")
            return status
        old = json.loads((run / "before" / "test.json").read_text())
        if new["test_digest"] != old["test_digest"]:
            say(f"the data changed during the training, call retrain again: {described(promoted)}")
            return 1
        groups = [json.loads((run / part / "groups.json").read_text()) for part in ("report", "before")]
        verdict = compare(new, old, groups, flags.margin)
        for segment, (low, high) in verdict.get("worse", {}).items():
            say(f"warning: the new one is worse for {segment}, by {-high:.4f} to {-low:.4f} (95 %)")
    model = run
    if verdict["is_better"] and not flags.no_final_fit and new["test_epoch"]:
        model = run / FINAL
        status = launch(flags, script, [*training, *final_words(new), "--save_dir", str(model)])
        check_newest(run)
        if status:
            say(f"the training on all events failed with status {status}: {described(promoted)}")
            return status
    elif verdict["is_better"] and not flags.no_final_fit:
        say("no training on all events: no epoch is better than the initial rows")
    write_whole(run / VERDICT, json.dumps(verdict, indent=1).encode())
    # Again: another one may have removed a run that had no verdict.
    check_newest(run)
    if verdict["is_better"]:
        set_link(model, PROMOTED, run.parent)
        say(f"promoted {run}: {verdict['reason']}")
    else:
        say(f"did not promote {run}: {verdict['reason']}; {described(promoted)}")
    remove_old(run.parent, flags.keep_runs)
    return 0


def final_words(report: Mapping[str, Any]) -> list[str]:
    """Return the flags of a training on all events that is like that of a report."""
    epochs, batch = report["test_epoch"], report["config"]["batch_size"]
    say(f"training on all {report['events']} for {counted(epochs, 'epoch')}, see --no_final_fit")
    return [f"--split={NO_SPLIT}", f"--epochs={epochs}", f"--batch_size={batch}"]


def accepting(flags: argparse.Namespace) -> list[str]:
    """Return the flags of a script that reads the promoted model."""
    return ["--accept_changed_model"] * flags.accept_changed_model


def drift_lines(drift: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a table of the drift, line by line, and a line with a warning for what is far."""
    names = [*dict.fromkeys(name for values in drift.values() for name in values)]
    rows = [
        (feature, *(f"{values[name]:.3f}" if name in values else "" for name in names))
        for feature, values in drift.items()
    ]
    lines = markdown_table([("newest events and training", *names), *rows]).split("\n")
    far = [
        feature
        for feature, values in drift.items()
        if values.get("distance", 0) > values.get("by_chance", 0) + FAR or values.get("new", 0) > MANY_NEW
    ]
    warning = f"warning: {', '.join(far)}: the newest events differ much from the training"
    return [*lines, warning] if far else lines


def compare(
    new: dict[str, Any], old: dict[str, Any], groups: Sequence[dict[str, Any]], margin: float
) -> dict[str, Any]:
    """Return whether a new model is better than an old one on the same events, and why.

    It is if the 95 % interval of the difference on the same users is above the margin, and no simplest
    prediction is better.

    new, old: the reports of a training and of a load; groups: the groups.json of both; margin: in the unit of
    the metric; below 0 it is how much worse the new one may be.
    """
    name = new["main_metric"]
    values = now, before = new["test"][name], old["test"][name]
    label = new["metrics"][name]
    shown = " and ".join("undefined" if value is None else f"{value:.4f}" for value in values)
    reason = f"test {label} {shown}, new and promoted, on the same {new['data']['num_test']:,} newest events"
    verdict: dict[str, Any] = {"metric": name, "new": now, "promoted": before, "margin": margin}
    is_better = now is not None
    if None not in values:
        low, high = (float(end) for end in interval(name, *(each["test"] for each in groups)))
        is_better = low > margin
        if math.isfinite(low):
            gain = before - now if lower_is_better(name) else now - before
            verdict |= {"gain": gain, "interval": [low, high], "worse": worse_segments(name, groups)}
            by = f"better by {gain:.4f}" if gain >= 0 else f"worse by {-gain:.4f}"
            reason += f"; {by}, 95 % interval of the gain {low:.4f} to {high:.4f}"
            if margin or not is_better:
                reason += f", {'above' if is_better else 'not above'} the margin of {margin:g}"
        else:
            reason += f"; they are of fewer than {LEAST_GROUPS} users, too few to compare"
    for simple in SIMPLEST:
        least = new["baselines"].get(simple, {}).get(name)
        if None not in (now, least) and (now > least if lower_is_better(name) else now < least):
            is_better, reason = False, f"{reason}; the new one is worse than {simple}, {least:.4f}"
    return {"is_better": is_better, "reason": reason, **verdict}


def interval(name: str, new: Sequence[Any], old: Sequence[Any]) -> tuple[float, float]:
    """Return `paired_interval` of groups from a groups.json of both models."""
    return paired_interval(name, np.array(new), np.array(old))


def worse_segments(name: str, groups: Sequence[dict[str, Any]]) -> dict[str, tuple[float, float]]:
    """Return the segments of --by in which the new model is worse, with the interval of the difference."""
    new, old = (each["segments"] for each in groups)
    both = {
        f"{feature} {value}": interval(name, of_new, old[feature][value])
        for feature, values in new.items()
        for value, of_new in values.items()
    }
    return {segment: ends for segment, ends in both.items() if ends[1] < 0}


def launch(flags: argparse.Namespace, script: str, words: Sequence[str]) -> int:
    """Run a script on the processes of this machine; return its status."""
    launcher = ("-m", "recsuite.extras.launcher", "--standalone", f"--nproc_per_node={flags.nproc_per_node}")
    command = [sys.executable, *launcher, str(shared_folder() / "example" / script), *words]
    # A training ends with its retrain. The lock is its standard input, which is empty and which the launcher
    # passes on to the ranks: as long as one of them lives, no other retrain begins.
    return subprocess.run(command, stdin=flags.lock, preexec_fn=die_with_parent).returncode


def promoted_in(folder: Path) -> Path | None:
    """Return the run of the promoted model, or None if there is none.

    Raises:
        UserError: when its name is no link.
    """
    link = folder / PROMOTED
    if link.exists() and not link.is_symlink():
        raise UserError(f"{link} must be a link to a run, and is none; move it away.")
    run = resolved(link)
    if link.is_symlink() and not run.exists():
        say(f"{link} names {run.name}, which is not there")
    run = run.parent if run.name == FINAL else run
    return run if link.is_symlink() and run.exists() else None


def check_comparable(config: Config, promoted: Path | None) -> None:
    """Refuse a training that cannot be compared with the promoted model, before it begins.

    Raises:
        UserError: when the test is not of newest events that the promoted model has not learned, or another
            metric.
    """
    if config.data.split != "time":
        raise UserError(
            f"retrain compares models on the newest events, and the split is {config.data.split}; give data "
            "with times, and no other --split."
        )
    report = promoted and promoted / "report" / "metrics.json"
    if report is None or not report.is_file():
        return
    before, now = json.loads(report.read_text())["config"], config.flags
    if before["task"] != now["task"]:
        raise UserError(
            f"{promoted} is of --task {before['task']}, and this training of {now['task']}; give another "
            "--save_dir."
        )
    if now["test_fraction"] > before["test_fraction"]:
        raise UserError(
            f"With --test_fraction {now['test_fraction']} the test has events that {promoted} has learned; "
            f"give at most {before['test_fraction']}."
        )


def data_words(flags: dict[str, Any]) -> list[str]:
    """Return the flags of the data and their split among others: the promoted model may differ."""
    names = ("data_path", "cache_dir", *NAME_FLAGS, *DATA_FLAGS)
    return [f"--{name}={flags[name]}" for name in names if name != "stream" and flags.get(name, "") != ""]


def described(promoted: Path | None) -> str:
    """Describe what is served."""
    return f"{promoted} stays promoted" if promoted else "nothing is promoted yet"


def number_of(name: str) -> int:
    """Return the number in the name of a run; 0 for another text."""
    match = RUN.fullmatch(name)
    return int(match[1]) if match else 0


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs, the oldest first."""
    return sorted(path for path in folder.iterdir() if RUN.fullmatch(path.name) and not path.is_symlink())


def unpromoted(runs: Sequence[Path]) -> list[Path]:
    """Return some runs of a folder without the promoted one, which nothing may remove."""
    promoted = resolved(runs[0].parent / PROMOTED) if runs else None
    return [run for run in runs if promoted not in (run.resolve(), run.resolve() / FINAL)]


def remove_unfinished(runs: Sequence[Path]) -> None:
    """Remove runs without a verdict, which were killed or failed; call it with the lock."""
    for run in runs:
        if not (run / VERDICT).exists():
            say(f"removing {run}, which was not finished")
            remove_run(run)


def remove_old(folder: Path, keep: int) -> None:
    """Remove the oldest runs but `keep`, and never the promoted one; call it with the lock."""
    # A run without a verdict may be that of a newer retrain, in an object store.
    others = unpromoted([run for run in runs_in(folder) if (run / VERDICT).exists()])
    for run in others[: max(0, len(others) - keep)]:
        say(f"removing {run}, see --keep_runs")
        remove_run(run)


def remove_run(run: Path) -> None:
    """Remove a run; in an object store the verdict first, so that the next retrain removes what is left."""
    if isinstance(run, ObjectPath):
        run.remove(VERDICT)
    else:
        shutil.rmtree(run)


if __name__ == "__main__":
    run_script(main)
