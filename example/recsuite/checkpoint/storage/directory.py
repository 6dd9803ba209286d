"""The folder of dumps: the names in it, who may write, what is the newest, what is kept.

    save_dir/
        latest -> delta-000000900    the newest state, once there was a step
        best -> step-000000784       the one that was the best on the validation ratings, once an epoch ended
        step-000000784/              a full dump: the state after so many steps
        delta-000000900/             an increment: what changed since the state before it
        .making-delta-000001000-9f86d081c3a2/
                                     under way, or left by a process that died; the next trainer removes it
        run-1b9d6bcd/                what an earlier training left here, when a new one began
        .lock                        held by the trainer that writes here

A folder gets the name of a dump in one rename, when all of it is on the disk. What is under way has a name of
its attempt alone, so that a rank that outlives its attempt cannot write into a later one's folder. Touches
nothing whose name is not one of these, and removes what is half done only where a trainer has written before
and where there is nothing in it but what a trainer writes.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from recsuite.checkpoint.storage.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    check_sizes,
    digest_of_manifest,
    read_manifest,
)
from recsuite.errors import UserError
from recsuite.files import explained, flush

NAME = re.compile(r"(step|delta)-(\d{9,})")
LOCK = ".lock"
# How long to go on trying when a trainer moves away what is being read.
SETTLE_SECONDS = 30.0
LATEST = "latest"
BEST = "best"
# Without an attempt, what a trainer left before attempts had names.
LEFTOVER = re.compile(
    r"\.making-(step|delta)-\d{9,}(-[0-9a-f]{12})?|\.removing-(step|delta)-\d{9,}|\.(latest|best)-\d+"
)
# What a trainer writes into the folder of a dump; safetensors writes a part under another name first.
CONTENT = re.compile(r"part-\d{5,}\.safetensors|\.tmp[0-9A-Za-z]{6}|(manifest|config|vocabulary)\.json")

Result = TypeVar("Result")


class ChoiceError(UserError):
    """A mistake in what was asked for, of which no other state of the folder is the cure."""


@dataclass(frozen=True)
class CheckpointChain:
    """A dump, and the increments to replay on it, in their order."""

    base: Path
    deltas: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that names the state."""
        return self.folders[-1]

    @property
    def folders(self) -> tuple[Path, ...]:
        """All that the state is read from, in order."""
        return (self.base, *self.deltas)


def dump_name(step: int) -> str:
    """The folder name of the full dump after so many steps."""
    return f"step-{step:09d}"


def delta_name(step: int) -> str:
    """The folder name of the increment that ends after so many steps."""
    return f"delta-{step:09d}"


def making_name(final: Path, attempt: str) -> str:
    """The folder name under which an attempt writes a dump or increment, see `new_attempt`."""
    return f".making-{final.name}-{attempt}"


def new_attempt() -> str:
    """A name that no other attempt to write dumps has had; let one rank choose it for all."""
    return uuid.uuid4().hex[:12]


def step_of(folder: Path) -> int:
    """The step in a folder's name."""
    found = NAME.fullmatch(folder.name)
    assert found is not None
    return int(found[2])


def dumps_in(save_dir: Path) -> list[Path]:
    """The full dumps, oldest first."""
    return _named(save_dir, "step")


def deltas_in(save_dir: Path) -> list[Path]:
    """The increments of all dumps, oldest first."""
    return _named(save_dir, "delta")


def _named(save_dir: Path, kind: str) -> list[Path]:
    with explained(f"{save_dir} cannot be read"):
        if not save_dir.is_dir():
            return []
        names = [(NAME.fullmatch(path.name), path) for path in save_dir.iterdir() if path.is_dir()]
    return sorted((path for found, path in names if found and found[1] == kind), key=step_of)


def states_in(save_dir: Path) -> list[Path]:
    """The dumps and increments, oldest first; of one step the dump comes last, and so is the newest."""
    return sorted([*deltas_in(save_dir), *dumps_in(save_dir)], key=step_of)


def save_dir_of(folder: Path) -> Path:
    """The folder of dumps in which a dump or increment lies; any other folder is one itself."""
    folder = folder.resolve()
    return folder.parent if NAME.fullmatch(folder.name) else folder


def newest_in(save_dir: Path, until: int = -1) -> Path | None:
    """The folder of the newest state, by step `until` where that is not -1; None where there is none."""
    there = [path for path in states_in(save_dir) if until == -1 or step_of(path) <= until]
    return there[-1] if there else None


def best_in(save_dir: Path) -> Path | None:
    """The folder of the best state by validation, as the states say themselves; None before there is one.

    The newest of those that were the best when they were dumped: each was better than all before it. What has
    the name of a state and says nothing of itself does not count.

    Raises:
        UserError: when one that is newer than it cannot be read.
    """
    there = (path for path in reversed(states_in(save_dir)) if (path / MANIFEST).is_file())
    return next((path for path in there if read_manifest(path).position.is_best), None)


def asked_for(folder: Path, checkpoint: str, until: int = -1) -> str:
    """The kind of state that is to be chosen in a folder; nothing where the state itself is named."""
    folder = folder.resolve()
    named = until != -1 or NAME.fullmatch(folder.name) or (folder / MANIFEST).exists()
    return "" if named else checkpoint


def chosen_state(folder: Path, checkpoint: str = BEST, until: int = -1) -> CheckpointChain:
    """`state_at`, but that a save_dir stands for its best state, or for the newest one as long as there is no
    best or with LATEST; never for the one before the first step.

    Raises:
        UserError: see `state_at`, and when nothing was learned yet.
    """
    if checkpoint not in (BEST, LATEST):
        raise ChoiceError(f"The checkpoint {checkpoint!r} is not known; give {BEST} or {LATEST}.")
    folder = folder.resolve()
    if not asked_for(folder, checkpoint, until):
        return state_at(folder, until)
    newest = newest_in(folder)
    if newest is not None and step_of(newest) == 0:
        raise UserError(
            f"{folder} holds only {newest.name}, which is untrained; wait for the next dump, or give that "
            "folder."
        )
    if checkpoint == LATEST or newest is None:
        return state_at(folder)
    best = best_in(folder)
    if best is None:
        print(f"{folder} holds nothing that was validated yet, so the newest state is taken, {newest.name}")
    return state_at(best or newest)


def state_at(folder: Path, until: int = -1) -> CheckpointChain:
    """What a folder stands for: a dump, an increment with all before it, or the newest state of a save_dir.

    until: where it is not -1, the state of the same dump after the last increment that ends by that step.

    Raises:
        UserError: when there is none, or none so early.
    """
    folder = folder.resolve()
    if not NAME.fullmatch(folder.name) and not (folder / MANIFEST).exists():
        newest = newest_in(folder, until)
        if newest is None:
            early = "" if until == -1 else f" by step {until}"
            what = f"holds no dump{early}" if folder.is_dir() else "is not there"
            raise ChoiceError(f"{folder} {what}; train with --dump, or give the folder of a dump.")
        folder = newest
    manifest = read_manifest(folder)
    link = manifest.link
    if link is not None and not _are_named(folder.name, link.base):
        raise UserError(
            f"{folder} is an increment on {link.base!r}; it, and the dump beside it on which it builds, must "
            "have the names under which they were written."
        )
    if link is None and until == -1:
        return CheckpointChain(folder)
    base = folder if link is None else folder.parent / link.base
    first = manifest.position.step if link is None else step_of(base)
    last = until if link is None else step_of(folder) if until == -1 else min(until, step_of(folder))
    if last < first:
        raise ChoiceError(
            f"--until {until} is before {base}, on which {folder.name} builds; give a later step."
        )
    deltas = [path for path in deltas_in(folder.parent) if first < step_of(path) <= last]
    return CheckpointChain(base, tuple(path for path in deltas if _builds_on(path, base)))


def _are_named(delta: str, base: str) -> bool:
    found = [NAME.fullmatch(name) for name in (delta, base)]
    return [name and name[1] for name in found] == ["delta", "step"]


def _builds_on(delta: Path, base: Path) -> bool:
    link = read_manifest(delta).link
    return link is None or link.base == base.name


def check_whole(state: CheckpointChain, rank: int = 0, world_size: int = 1) -> list[Manifest]:
    """`check_chain`, and every byte of all files is read too; the ranks share that work.

    Raises:
        UserError: as `check_chain`, and names what is missing, unknown or damaged.
    """
    manifests = check_chain(state)
    for folder, manifest in zip(state.folders, manifests, strict=True):
        check_files(folder, manifest, rank, world_size)
    return manifests


def check_complete(folder: Path) -> None:
    """Refuse a state of which anything is missing, by the manifests and the sizes of files; reads no more.

    Raises:
        UserError: names the first that is not there, or not as long as it was.
    """
    state = state_at(folder)
    for each, manifest in zip(state.folders, check_chain(state), strict=True):
        check_sizes(each, manifest)


def settled(
    folder: Path,
    action: Callable[[], Result],
    ask: Callable[[Callable[[], Any]], Any] = lambda question: question(),
) -> Result:
    """What an action that reads dumps returns, tried again when a dump there was moved away meanwhile.

    ask: who answers what is to be done; one rank for all, where the action is collective.

    Raises:
        UserError: of the action, when nothing was moved, or always something.
    """
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
    state there, but for that folder. Put it around `settled`, for what is tried again needs no suggestion.

    check: refuses the folder of a state that is not to be named. Others may wait for the rank that searches,
    so by itself it reads few bytes.

    Raises:
        UserError: of the search.
    """
    try:
        return find()
    except ChoiceError:
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


def others_in(save_dir: Path, refused: Path) -> list[Path]:
    """The states beside one that was refused, newest first."""
    return [path for path in reversed(states_in(save_dir)) if path != refused]


def suggestion(others: Sequence[Path], check: Callable[[Path], Any]) -> str:
    """What to do when a state was refused: to take the first of others that a check does not refuse."""
    for folder in others:
        with contextlib.suppress(UserError):
            check(folder)
            return (
                f"the newest complete one there is {folder}; give that folder to --load, or as --save_dir to "
                "--export and --recommend; to --resume from it, first remove the newer dumps beside it"
            )
    return "no other one there is complete"


def seen_in(folder: Path) -> set[tuple[str, int]]:
    """Name and inode of the dumps and increments of a folder, or of the one in which it is."""
    where = save_dir_of(folder)
    with explained(f"{where} cannot be read"):
        if not where.is_dir():
            return set()
        return {(entry.name, entry.inode()) for entry in os.scandir(where) if NAME.fullmatch(entry.name)}


def check_chain(state: CheckpointChain) -> list[Manifest]:
    """The manifests of a state's folders, after each link was held against what is before it.

    Raises:
        UserError: names what is missing, twice, out of order, of another run, or built on another dump.
    """
    if not state.base.is_dir():
        raise UserError(f"{state.base} is missing, the dump on which {state.folder.name} builds.")
    base = read_manifest(state.base)
    check_name(state.base, base)
    manifests = [base]
    base_digest = digest_of_manifest(state.base)
    for number, delta in enumerate(state.deltas, start=1):
        manifest = read_manifest(delta)
        link = manifest.link
        check_name(delta, manifest)
        assert link is not None
        if manifest.run != base.run:
            raise UserError(f"{delta} is of run {manifest.run}, and {state.base} of run {base.run}.")
        if link.base_digest != base_digest:
            raise UserError(
                f"{delta} builds on a {link.base} with digest {link.base_digest}, and the one here has "
                f"{base_digest}."
            )
        if link.sequence > number:
            raise UserError(
                f"Increment {number} after {state.base} is missing: {delta.name} is number {link.sequence}."
            )
        end = manifests[-1].position.step
        if link.sequence < number or link.from_step != end:
            raise UserError(
                f"{delta} is out of order: it is number {link.sequence} and begins at step {link.from_step}, "
                f"and what comes after step {end} must be number {number}."
            )
        if (manifest.tensors, manifest.vocabulary) != (base.tensors, base.vocabulary):
            raise UserError(f"{delta} holds another model than {state.base}.")
        manifests.append(manifest)
    return manifests


def check_name(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder under the name of another state.

    Raises:
        UserError: names both.
    """
    step = manifest.position.step
    name = dump_name(step) if manifest.link is None else delta_name(step)
    if folder.name != name and NAME.fullmatch(folder.name):
        raise UserError(f"{folder} says of itself that it is {name}; give it that name.")


@contextlib.contextmanager
def writing(save_dir: Path) -> Iterator[None]:
    """Be the only one that writes here; removes what trainers left half done. Call on rank 0.

    Raises:
        UserError: when another one writes, or the folder cannot be written.
    """
    with tidying(save_dir):
        save_dir.mkdir(parents=True, exist_ok=True)
        is_ours = (save_dir / LOCK).is_file()
        lock = FileLock(save_dir / LOCK, timeout=0)
        try:
            lock.acquire()
        except Timeout:
            raise UserError(
                f"Another training writes its dumps to {save_dir}; wait for it, or give another --save_dir."
            ) from None
    try:
        with tidying(save_dir):
            for path in list(save_dir.iterdir()):
                if LEFTOVER.fullmatch(path.name):
                    _remove_leftover(path, is_ours)
        yield
    finally:
        lock.release()


def _remove_leftover(path: Path, is_ours: bool) -> None:
    """Remove what a trainer left half done; what may be somebody else's stays, and that is said."""
    foreign = _foreign_in(path) if is_ours else f"no trainer has written to {path.parent} before"
    if foreign:
        print(f"{path} stays where it is: {foreign}")
    else:
        _remove(path)


def _foreign_in(path: Path) -> str:
    """Why something with the name of a leftover is none of a trainer's; empty if it is one."""
    if path.name.startswith((f".{LATEST}-", f".{BEST}-")):
        return "" if path.is_symlink() else "it is no link"
    if path.is_symlink() or not path.is_dir():
        return "it is no folder"
    foreign = [found for found in path.iterdir() if not CONTENT.fullmatch(found.name) or not found.is_file()]
    return f"it holds {min(foreign).name}, which no trainer writes" if foreign else ""


def tidying(save_dir: Path) -> contextlib.AbstractContextManager[None]:
    """Say in a sentence why the folder cannot be written, if it cannot."""
    return explained(f"--save_dir {save_dir} cannot be written", "give another folder")


def publish(making: Path, final: Path, keep: int) -> None:
    """Give a complete folder its name, point `latest` and `best` at it, and remove what is not kept."""
    making.rename(final)
    try:
        flush(final.parent)
        # Nobody wants what has learned nothing.
        if step_of(final) > 0:
            point_at(final, LATEST)
        if read_manifest(final).position.is_best:
            point_at(final, BEST)
        prune(final.parent, keep)
    except (OSError, UserError) as error:
        # The dump is there, and an increment that counted as failed would come a second time.
        print(
            f"{final} is whole, but the folders beside it are not tidy ({error}); the next dump tries again"
        )


def prune(save_dir: Path, keep: int) -> None:
    """Remove the oldest of more than `keep` dumps; the best one, and those that an increment builds on, are
    kept beside them.

    What has the name of a dump and says nothing of itself is not ours: it neither counts nor goes.
    """
    old = [path for path in dumps_in(save_dir) if (path / MANIFEST).is_file()][:-keep]
    if not old:
        return
    links = [read_manifest(delta).link for delta in deltas_in(save_dir)]
    used = {link.base for link in links if link}
    best = best_in(save_dir)
    if best is not None:
        used.add(best.name)
        # Before anything goes: where a trainer was killed, it may still name what is no longer the best.
        point_at(best, BEST)
    for dump in old:
        if dump.name not in used:
            retire(dump)


def set_aside(save_dir: Path) -> Path:
    """Move all states of an earlier training into a folder of their own; returns it. Call on rank 0.

    Raises:
        UserError: when there is such a folder, and it holds one of them already.
    """
    there = states_in(save_dir)
    try:
        aside = save_dir / f"run-{read_manifest(there[-1]).run[:8]}"
    except UserError:
        aside = save_dir / "run-unreadable"
    with tidying(save_dir):
        for link in (LATEST, BEST):
            (save_dir / link).unlink(missing_ok=True)
        aside.mkdir(exist_ok=True)
        # The newest first: what is left of a chain, if this is cut short, has no gap.
        for state in reversed(there):
            if (aside / state.name).exists():
                raise UserError(f"{aside} holds a {state.name} already; give another --save_dir.")
            state.rename(aside / state.name)
    return aside


def retire(folder: Path) -> None:
    """Remove a dump or increment. Renamed first, because what has the name of a dump is complete."""
    removing = folder.with_name(f".removing-{folder.name}")
    folder.rename(removing)
    _remove(removing)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def point_at(final: Path, name: str) -> None:
    """Have the link LATEST or BEST name this folder, at once and for good."""
    if (final.parent / name).resolve() == final.resolve():
        return
    link = final.parent / f".{name}-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    link.replace(final.parent / name)
    flush(final.parent)
