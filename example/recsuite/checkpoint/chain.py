"""Chains of checkpoints, and the choice of one in a folder, also while a trainer writes there.

A chain is a full checkpoint with the deltas to replay on it. Each delta builds on the one before it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from recsuite.checkpoint.folder import (
    BEST,
    LATEST,
    NAME,
    best_in,
    delta_name,
    deltas_in,
    full_name,
    newest_in,
    others_in,
    save_dir_of,
    seen_in,
    step_of,
)
from recsuite.checkpoint.format import (
    MANIFEST,
    Manifest,
    check_files,
    check_sizes,
    digest_of_manifest,
    read_manifest,
)
from recsuite.errors import UserError
from recsuite.files import resolved
from recsuite.runtime.console import say
from recsuite.training.progress import Progress, describe_step


class ChoiceError(UserError):
    """Error in a request for a checkpoint; no other checkpoint of the folder would help."""


@dataclass(frozen=True)
class CheckpointChain:
    """Full checkpoint, and the deltas to replay on it, in order."""

    base: Path
    deltas: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        """Last folder of the chain, which names the whole chain."""
        return self.folders[-1]

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders of the chain, in order."""
        return (self.base, *self.deltas)


def chain_at(folder: Path, until: int = -1) -> CheckpointChain:
    """Return the chain of a folder: a full checkpoint, a delta with all before it, or a save_dir's newest.

    until: unless it is -1, the chain of the same base up to the last delta that ends by that step.

    Raises:
        UserError: when there is none, or none so early.
    """
    # "latest" and "best" are links, which the trainer may change meanwhile.
    folder = resolved(folder)
    # A user may rename a full checkpoint, so it is recognized by its manifest. A folder with the name of a
    # checkpoint and no manifest is refused below, not searched for checkpoints inside.
    if not NAME.fullmatch(folder.name) and not (folder / MANIFEST).exists():
        newest = newest_in(folder, until)
        if newest is None:
            early = "" if until == -1 else f" by step {until}"
            missing = "is a file, not a folder" if folder.exists() else "is not there"
            what = f"holds no checkpoint{early}" if folder.is_dir() else missing
            raise ChoiceError(f"{folder} {what}; train with --dump, or give the folder of a checkpoint.")
        folder = newest
    manifest = read_manifest(folder)
    link = manifest.link
    if link is not None and not _are_named(folder.name, link.base):
        raise UserError(
            # The base and the deltas in between are found by their names.
            f"{folder} is a delta on {link.base!r}. Fix: give both folders the names under which they were "
            "written."
        )
    if link is None and until == -1:
        return CheckpointChain(folder)
    base = folder if link is None else folder.parent / link.base
    first = manifest.progress.step if link is None else step_of(base)
    # A delta that was named is the last one, also if --until is later.
    last = until if link is None else step_of(folder) if until == -1 else min(until, step_of(folder))
    if last < first:
        raise ChoiceError(
            f"--until {until} is before {base}, on which {folder.name} builds; give a later step."
        )
    # Gaps are not checked here: `check_chain` names the delta that is missing.
    deltas = [path for path in deltas_in(folder.parent) if first < step_of(path) <= last]
    links = {path: read_manifest(path).link for path in deltas}
    # A full checkpoint under the name of a delta is kept, so that its name is refused later.
    kept = (path for path, link in links.items() if link is None or link.base == base.name)
    return CheckpointChain(base, tuple(kept))


def _are_named(delta: str, base: str) -> bool:
    matches = [NAME.fullmatch(name) for name in (delta, base)]
    return [name and name[1] for name in matches] == ["delta", "step"]


def check_chain(chain: CheckpointChain) -> list[Manifest]:
    """Return the manifests of a chain's folders, after a check of each link against the folder before it.

    Raises:
        UserError: names what is missing, twice, out of order, of another run, or built on another
            checkpoint.
    """
    # Checked first: the message names the delta that needs the base.
    if not chain.base.is_dir():
        raise UserError(f"{chain.base} is missing, the checkpoint on which {chain.folder.name} builds.")
    base = read_manifest(chain.base)
    check_name(chain.base, base)
    manifests = [base]
    # The digest and not the name: a new training in the folder uses the same names again.
    base_digest = digest_of_manifest(chain.base)
    for number, delta in enumerate(chain.deltas, start=1):
        manifest = read_manifest(delta)
        link = manifest.link
        check_name(delta, manifest)
        assert link is not None
        if manifest.run != base.run:
            raise UserError(f"{delta} is of run {manifest.run}, and {chain.base} of run {base.run}.")
        if link.base_digest != base_digest:
            raise UserError(
                f"{delta} builds on a {link.base} with digest {link.base_digest}, and the one here has "
                f"{base_digest}."
            )
        if link.sequence > number:
            raise UserError(
                f"Delta {number} after {chain.base} is missing: {delta.name} is number {link.sequence}."
            )
        end = manifests[-1].progress.step
        if link.sequence < number or link.from_step != end:
            raise UserError(
                f"{delta} is out of order: number {link.sequence} from step {link.from_step}, expected "
                f"number {number} from step {end}."
            )
        # A delta is applied by row numbers, so these must mean the same as in the base.
        if (manifest.tensors, manifest.vocabulary) != (base.tensors, base.vocabulary):
            raise UserError(f"{delta} holds another model than {chain.base}.")
        if manifest.dynamic.keys() != base.dynamic.keys():
            raise UserError(f"{delta} holds other dynamic tables than {chain.base}.")
        manifests.append(manifest)
    return manifests


def check_name(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder with the name of another checkpoint.

    Raises:
        UserError: names both.
    """
    # A full checkpoint that the user renamed is fine: no delta refers to it by that name.
    step = manifest.progress.step
    name = full_name(step) if manifest.link is None else delta_name(step)
    if folder.name != name and NAME.fullmatch(folder.name):
        raise UserError(f"{folder} has the manifest of {name}. Fix: rename it to {name}.")


def check_whole(chain: CheckpointChain, rank: int = 0, world_size: int = 1) -> list[Manifest]:
    """Call `check_chain`, and read every byte of all files too; the ranks share that work.

    Raises:
        UserError: as `check_chain`, and names what is missing, unknown or damaged.
    """
    manifests = check_chain(chain)
    for folder, manifest in zip(chain.folders, manifests, strict=True):
        check_files(folder, manifest, rank, world_size)
    return manifests


def check_complete(folder: Path) -> None:
    """Refuse a checkpoint with missing parts. Reads only the manifests and the sizes of files.

    Raises:
        UserError: names the first that is not there, or not as long as it was.
    """
    chain = chain_at(folder)
    for part, manifest in zip(chain.folders, check_chain(chain), strict=True):
        check_sizes(part, manifest)


# --- choice ---

# Time for retries, in seconds, when a trainer moves a checkpoint that is being read.
SETTLE_SECONDS = 30.0
Result = TypeVar("Result")


def requested_kind(folder: Path, checkpoint: str, until: int = -1) -> str:
    """Return the kind of checkpoint to choose in a folder; empty if the folder is a checkpoint itself."""
    folder = resolved(folder)
    named = until != -1 or NAME.fullmatch(folder.name) or (folder / MANIFEST).exists()
    return "" if named else checkpoint


def chosen_chain(folder: Path, checkpoint: str = BEST, until: int = -1) -> CheckpointChain:
    """Return the chain of a folder like `chain_at`, but of a save_dir the best checkpoint.

    With LATEST, or without a best one, it is the newest one. A checkpoint of step 0 is chosen only with BEST,
    and if its initial rows were validated.

    Raises:
        UserError: see `chain_at`, and when nothing was learned yet.
    """
    if checkpoint not in (BEST, LATEST):
        raise ChoiceError(f"The checkpoint {checkpoint!r} is not known; give {BEST} or {LATEST}.")
    folder = resolved(folder)
    if not requested_kind(folder, checkpoint, until):
        return chain_at(folder, until)
    newest, best = newest_in(folder), best_in(folder) if checkpoint == BEST else None
    if newest is not None and best is None and step_of(newest) == 0:
        raise UserError(
            f"{folder} holds only {newest.name}, which is untrained; wait for the next checkpoint, or give "
            "that folder."
        )
    # Without any checkpoint, `chain_at` raises the error.
    if checkpoint == LATEST or newest is None:
        return chain_at(folder)
    if best is None:
        say(f"{folder} has no validated checkpoint yet, so the newest is used, {newest.name}")
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


def retrying_if_moved(
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


def with_suggestion(
    folder: Path, find: Callable[[], Result], check: Callable[[Path], Any] = check_complete
) -> Result:
    """Return the result of a search in a folder; its errors also name the newest other complete checkpoint.

    Put it around `retrying_if_moved`: an action that is retried needs no suggestion.

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
