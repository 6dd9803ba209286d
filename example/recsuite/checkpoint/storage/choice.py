"""Choice of a checkpoint in a folder, also while a trainer writes there, and of another one that would do."""

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
from recsuite.checkpoint.storage.manifest import MANIFEST, Progress
from recsuite.errors import UserError
from recsuite.runtime.console import say

# How long to try again when a trainer moves away what is being read.
SETTLE_SECONDS = 30.0
Result = TypeVar("Result")


def asked_for(folder: Path, checkpoint: str, until: int = -1) -> str:
    """The kind of checkpoint to choose in a folder; nothing where a checkpoint itself is named."""
    folder = folder.resolve()
    named = until != -1 or NAME.fullmatch(folder.name) or (folder / MANIFEST).exists()
    return "" if named else checkpoint


def chosen_chain(folder: Path, checkpoint: str = BEST, until: int = -1) -> CheckpointChain:
    """`chain_at`, but that a save_dir stands for its best checkpoint, or for the newest one with LATEST or as
    long as there is no best; never for the one before the first step.

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
    # Where there is no checkpoint at all, `chain_at` has the sentence for it.
    if checkpoint == LATEST or newest is None:
        return chain_at(folder)
    best = best_in(folder)
    if best is None:
        say(
            f"{folder} holds nothing that was validated yet, so the newest checkpoint is taken, {newest.name}"
        )
    return chain_at(best or newest)


def describe_step(progress: Progress) -> str:
    """How far a training is, for people."""
    return f"step {progress.step:,}" if progress.step else "step 0, untrained"


def describe_choice(progress: Progress, checkpoint: str, metric: str) -> str:
    """Which checkpoint was taken, and by what.

    checkpoint: the kind that was asked for, nothing of one that was named itself; metric: of the validation.
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
    """What an action that reads checkpoints returns, tried again when one was moved away meanwhile.

    ask: who answers what is to be done; one rank for all, where the action is collective.

    Raises:
        UserError: of the action, when nothing was moved, or always something.
    """
    # Readers take no lock, so a trainer may remove what is being read. An action that failed is tried again
    # if a checkpoint that was there before it is gone by now; if none is, the fault lies in what was read.
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
    """What a search in a folder finds; a refusal of what is missing or damaged also names the newest complete
    checkpoint there, but for that folder. Put it around `settled`: what is tried again needs no suggestion.

    check: refuses the folder of a checkpoint that is not to be named. Others may wait for the rank that
    searches, so the default reads few bytes.

    Raises:
        UserError: of the search.
    """
    try:
        return find()
    except ChoiceError:
        # The wish itself was wrong, so another checkpoint would not fulfil it.
        raise
    except UserError as error:
        save_dir = save_dir_of(folder)
        newest = newest_in(save_dir)
        # Where nothing was learned yet there is nothing to suggest.
        if newest is None or step_of(newest) == 0:
            raise
        raise UserError(
            f"{str(error).rstrip('.')}; {suggestion(others_in(save_dir, folder), check)}."
        ) from None


def suggestion(others: Sequence[Path], check: Callable[[Path], Any]) -> str:
    """What to do when a checkpoint was refused: to take the first of others that a check does not refuse."""
    for folder in others:
        with contextlib.suppress(UserError):
            check(folder)
            return (
                f"the newest complete one there is {folder}; give that folder to --load, or as --save_dir to "
                "--export and --recommend; to --resume from it, first remove the newer checkpoints beside it"
            )
    return "no other one there is complete"
