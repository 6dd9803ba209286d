"""Choice of a checkpoint in a folder, also while a trainer writes there, and suggestion of another one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from recsuite.checkpoint.storage.chain import CheckpointChain, ChoiceError, chain_at, check_complete
from recsuite.checkpoint.storage.directory import (
    BEST,
    LATEST,
    NAME,
    best_in,
    newest_in,
    others_in,
    save_dir_of,
    seen_in,
    step_of,
)
from recsuite.checkpoint.storage.manifest import MANIFEST
from recsuite.errors import UserError
from recsuite.runtime.console import say
from recsuite.training.progress import Progress, describe_step

# Time for retries, in seconds, when a trainer moves a checkpoint that is being read.
SETTLE_SECONDS = 30.0
Result = TypeVar("Result")


def asked_for(folder: Path, checkpoint: str, until: int = -1) -> str:
    """Return the kind of checkpoint to choose in a folder; empty if the folder is a checkpoint itself."""
    folder = folder.resolve()
    named = until != -1 or NAME.fullmatch(folder.name) or (folder / MANIFEST).exists()
    return "" if named else checkpoint


def chosen_chain(folder: Path, checkpoint: str = BEST, until: int = -1) -> CheckpointChain:
    """Return the chain of a folder like `chain_at`, but of a save_dir the best checkpoint.

    With LATEST, or without a best one, it is the newest one. An untrained checkpoint is never chosen.

    Raises:
        UserError: see `chain_at`, and when nothing was learned yet.
    """
    if checkpoint not in (BEST, LATEST):
        raise ChoiceError(f"The checkpoint {checkpoint!r} is not known; give {BEST} or {LATEST}.")
    folder = folder.resolve()
    if not asked_for(folder, checkpoint, until):
        return chain_at(folder, until)
    newest = newest_in(folder)
    if newest is not None and step_of(newest) == 0:
        raise UserError(
            f"{folder} holds only {newest.name}, which is untrained; wait for the next checkpoint, or give "
            "that folder."
        )
    # Without any checkpoint, `chain_at` raises the error.
    if checkpoint == LATEST or newest is None:
        return chain_at(folder)
    best = best_in(folder)
    if best is None:
        say(
            f"{folder} holds nothing that was validated yet, so the newest checkpoint is taken, {newest.name}"
        )
    return chain_at(best or newest)


def describe_choice(progress: Progress, checkpoint: str, metric: str) -> str:
    """Return a text with the checkpoint that was chosen, and by what.

    checkpoint: the kind that was asked for, empty for a checkpoint that was named; metric: of the validation.
    """
    step = describe_step(progress)
    if checkpoint != "best" or not progress.is_best:
        return f"latest: {step}" if checkpoint else step
    value = "not validated" if progress.best is None else f"validation {metric} {progress.best:.4f}"
    return f"best: epoch {progress.epoch}, {value} ({step})"


def settled(
    folder: Path,
    action: Callable[[], Result],
    ask: Callable[[Callable[[], Any]], Any] = lambda question: question(),
) -> Result:
    """Return the result of an action that reads checkpoints; retry it if one was moved away meanwhile.

    ask: evaluates the questions that decide on a retry; on one rank for all, if the action is collective.

    Raises:
        UserError: of the action, when nothing was moved, or always something.
    """
    # Readers take no lock, so a trainer may remove a checkpoint that is being read. A failed action is
    # retried if a checkpoint that was there before it is gone now; if none is gone, the files are bad.
    deadline = time.monotonic() + SETTLE_SECONDS
    while True:
        before = ask(lambda: seen_in(folder))
        try:
            return action()
        except UserError:
            after, is_late = ask(lambda: (seen_in(folder), time.monotonic() > deadline))
            if before <= after or is_late:
                raise


def suggesting(
    folder: Path, find: Callable[[], Result], check: Callable[[Path], Any] = check_complete
) -> Result:
    """Return the result of a search in a folder; its errors also name the newest other complete checkpoint.

    Put it around `settled`: an action that is retried needs no suggestion.

    check: refuses a folder that must not be suggested. Other ranks may wait for the rank that searches, so
    the default reads few bytes.

    Raises:
        UserError: of the search.
    """
    try:
        return find()
    except ChoiceError:
        # The request itself was wrong, so another checkpoint would not help.
        raise
    except UserError as error:
        save_dir = save_dir_of(folder)
        newest = newest_in(save_dir)
        # Without a trained checkpoint there is none to suggest.
        if newest is None or step_of(newest) == 0:
            raise
        raise UserError(
            f"{str(error).rstrip('.')}; {suggestion(others_in(save_dir, folder), check)}."
        ) from None


def suggestion(others: Sequence[Path], check: Callable[[Path], Any]) -> str:
    """Return the fix for a refused checkpoint: use the first of the others that passes a check."""
    for folder in others:
        with contextlib.suppress(UserError):
            check(folder)
            return (
                f"the newest complete one there is {folder}; give that folder to --load, or as --save_dir to "
                "--export and --recommend; to --resume from it, first remove the newer checkpoints beside it"
            )
    return "no other one there is complete"
