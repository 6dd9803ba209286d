"""A full checkpoint with the deltas to replay on it, and the check that each builds on the one before."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from recsuite.checkpoint.storage.directory import NAME, delta_name, deltas_in, full_name, newest_in, step_of
from recsuite.checkpoint.storage.manifest import (
    MANIFEST,
    Manifest,
    check_files,
    check_sizes,
    digest_of_manifest,
    read_manifest,
)
from recsuite.errors import UserError


class ChoiceError(UserError):
    """A mistake in what was asked for, of which no other state of the folder is the cure."""


@dataclass(frozen=True)
class CheckpointChain:
    """A full checkpoint, and the deltas to replay on it, in their order."""

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


def chain_at(folder: Path, until: int = -1) -> CheckpointChain:
    """What a folder stands for: a full checkpoint, a delta with all before it, or the newest of a save_dir.

    until: where it is not -1, the chain of the same base up to the last delta that ends by that step.

    Raises:
        UserError: when there is none, or none so early.
    """
    folder = folder.resolve()
    if not NAME.fullmatch(folder.name) and not (folder / MANIFEST).exists():
        newest = newest_in(folder, until)
        if newest is None:
            early = "" if until == -1 else f" by step {until}"
            what = f"holds no checkpoint{early}" if folder.is_dir() else "is not there"
            raise ChoiceError(f"{folder} {what}; train with --dump, or give the folder of a checkpoint.")
        folder = newest
    manifest = read_manifest(folder)
    link = manifest.link
    if link is not None and not _are_named(folder.name, link.base):
        raise UserError(
            f"{folder} is a delta on {link.base!r}; it, and the full checkpoint beside it on which it "
            "builds, must have the names under which they were written."
        )
    if link is None and until == -1:
        return CheckpointChain(folder)
    base = folder if link is None else folder.parent / link.base
    first = manifest.progress.step if link is None else step_of(base)
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


def check_chain(state: CheckpointChain) -> list[Manifest]:
    """The manifests of a state's folders, after each link was held against what is before it.

    Raises:
        UserError: names what is missing, twice, out of order, of another run, or built on another dump.
    """
    if not state.base.is_dir():
        raise UserError(f"{state.base} is missing, the checkpoint on which {state.folder.name} builds.")
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
                f"Delta {number} after {state.base} is missing: {delta.name} is number {link.sequence}."
            )
        end = manifests[-1].progress.step
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
    step = manifest.progress.step
    name = full_name(step) if manifest.link is None else delta_name(step)
    if folder.name != name and NAME.fullmatch(folder.name):
        raise UserError(f"{folder} says of itself that it is {name}; give it that name.")


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
    state = chain_at(folder)
    for each, manifest in zip(state.folders, check_chain(state), strict=True):
        check_sizes(each, manifest)
