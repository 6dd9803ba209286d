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
    """A mistake in what was asked for, which no other checkpoint of the folder would cure."""


@dataclass(frozen=True)
class CheckpointChain:
    """A full checkpoint, and the deltas to replay on it, in their order."""

    base: Path
    deltas: tuple[Path, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that stands for all of it: the last one."""
        return self.folders[-1]

    @property
    def folders(self) -> tuple[Path, ...]:
        """All that it is read from, in order."""
        return (self.base, *self.deltas)


def chain_at(folder: Path, until: int = -1) -> CheckpointChain:
    """What a folder stands for: a full checkpoint, a delta with all before it, or the newest of a save_dir.

    until: where it is not -1, the chain of the same base up to the last delta that ends by that step.

    Raises:
        UserError: when there is none, or none so early.
    """
    # "latest" and "best" are links: the trainer may point them elsewhere while this goes on.
    folder = folder.resolve()
    # A full checkpoint may have a name of the user's, and is known by its manifest. What has the name of a
    # checkpoint and no manifest is refused below, not searched for checkpoints inside.
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
            # The base and the deltas in between are found by their names.
            f"{folder} is a delta on {link.base!r}; it, and the full checkpoint beside it on which it "
            "builds, must have the names under which they were written."
        )
    if link is None and until == -1:
        return CheckpointChain(folder)
    base = folder if link is None else folder.parent / link.base
    first = manifest.progress.step if link is None else step_of(base)
    # A delta that was named is the last one, also where --until is later.
    last = until if link is None else step_of(folder) if until == -1 else min(until, step_of(folder))
    if last < first:
        raise ChoiceError(
            f"--until {until} is before {base}, on which {folder.name} builds; give a later step."
        )
    # Gaps are not looked for here: `check_chain` says which delta is missing.
    deltas = [path for path in deltas_in(folder.parent) if first < step_of(path) <= last]
    return CheckpointChain(base, tuple(path for path in deltas if _builds_on(path, base)))


def _are_named(delta: str, base: str) -> bool:
    found = [NAME.fullmatch(name) for name in (delta, base)]
    return [name and name[1] for name in found] == ["delta", "step"]


def _builds_on(delta: Path, base: Path) -> bool:
    link = read_manifest(delta).link
    # A full checkpoint under the name of a delta stays, to be refused with its name.
    return link is None or link.base == base.name


def check_chain(chain: CheckpointChain) -> list[Manifest]:
    """The manifests of a chain's folders, after each link was held against what is before it.

    Raises:
        UserError: names what is missing, twice, out of order, of another run, or built on another
            checkpoint.
    """
    # Asked for first: the sentence names the delta for whose sake it is needed.
    if not chain.base.is_dir():
        raise UserError(f"{chain.base} is missing, the checkpoint on which {chain.folder.name} builds.")
    base = read_manifest(chain.base)
    check_name(chain.base, base)
    manifests = [base]
    # The digest and not the name: a training that began afresh in the folder uses the same names again.
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
                f"{delta} is out of order: it is number {link.sequence} and begins at step {link.from_step}, "
                f"and what comes after step {end} must be number {number}."
            )
        # A delta is applied by the numbers of rows, so these have to mean what they mean in the base.
        if (manifest.tensors, manifest.vocabulary) != (base.tensors, base.vocabulary):
            raise UserError(f"{delta} holds another model than {chain.base}.")
        if manifest.dynamic.keys() != base.dynamic.keys():
            raise UserError(f"{delta} holds other dynamic tables than {chain.base}.")
        manifests.append(manifest)
    return manifests


def check_name(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder under the name of another checkpoint.

    Raises:
        UserError: names both.
    """
    # A full checkpoint under a name of the user's is fine: nothing refers to it by that.
    step = manifest.progress.step
    name = full_name(step) if manifest.link is None else delta_name(step)
    if folder.name != name and NAME.fullmatch(folder.name):
        raise UserError(f"{folder} says of itself that it is {name}; give it that name.")


def check_whole(chain: CheckpointChain, rank: int = 0, world_size: int = 1) -> list[Manifest]:
    """`check_chain`, and every byte of all files is read too; the ranks share that work.

    Raises:
        UserError: as `check_chain`, and names what is missing, unknown or damaged.
    """
    manifests = check_chain(chain)
    for folder, manifest in zip(chain.folders, manifests, strict=True):
        check_files(folder, manifest, rank, world_size)
    return manifests


def check_complete(folder: Path) -> None:
    """Refuse a checkpoint of which anything is missing. Reads the manifests and the sizes of files, no more.

    Raises:
        UserError: names the first that is not there, or not as long as it was.
    """
    chain = chain_at(folder)
    for each, manifest in zip(chain.folders, check_chain(chain), strict=True):
        check_sizes(each, manifest)
