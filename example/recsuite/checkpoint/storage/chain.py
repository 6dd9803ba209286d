"""Chains: a full checkpoint with the deltas to replay on it. Each delta builds on the one before it."""

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
    folder = folder.resolve()
    # A user may rename a full checkpoint, so it is recognized by its manifest. A folder with the name of a
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
    # A delta that was named is the last one, also if --until is later.
    last = until if link is None else step_of(folder) if until == -1 else min(until, step_of(folder))
    if last < first:
        raise ChoiceError(
            f"--until {until} is before {base}, on which {folder.name} builds; give a later step."
        )
    # Gaps are not checked here: `check_chain` names the delta that is missing.
    deltas = [path for path in deltas_in(folder.parent) if first < step_of(path) <= last]
    return CheckpointChain(base, tuple(path for path in deltas if _builds_on(path, base)))


def _are_named(delta: str, base: str) -> bool:
    found = [NAME.fullmatch(name) for name in (delta, base)]
    return [name and name[1] for name in found] == ["delta", "step"]


def _builds_on(delta: Path, base: Path) -> bool:
    link = read_manifest(delta).link
    # A full checkpoint under the name of a delta is kept, so that its name is refused later.
    return link is None or link.base == base.name


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
                f"{delta} is out of order: it is number {link.sequence} and begins at step {link.from_step}, "
                f"and what comes after step {end} must be number {number}."
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
        raise UserError(f"{folder} says of itself that it is {name}; give it that name.")


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
    for each, manifest in zip(chain.folders, check_chain(chain), strict=True):
        check_sizes(each, manifest)
