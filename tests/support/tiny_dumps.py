"""Checkpoints and deltas of a few bytes, for tests of the folder that holds them. Needs no torch."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path

from recsuite.checkpoint import chain
from recsuite.checkpoint import folder as directory
from recsuite.checkpoint.chain import CheckpointChain, chain_at
from recsuite.checkpoint.folder import delta_name, full_name, publish, step_of
from recsuite.checkpoint.format import MANIFEST, Manifest, ParentLink, read_manifest, write_manifest
from recsuite.files import digest_of, flushed
from recsuite.training.progress import Progress

PART = "part-00001.safetensors"
TENSORS = {"tables.user.weight": ([3, 4], "float32")}
# Program that writes to the folder of its argument, or prints why it may not.
WRITER = """
import sys
from pathlib import Path
from recsuite.errors import UserError
from recsuite.checkpoint.folder import writing
try:
    with writing(Path(sys.argv[1])): print("in")
except UserError as error: print(error)
"""
# Ends of epochs, in this order.
GOOD = Progress(epoch=1, best=0.9)
WORSE = Progress(epoch=2, best=0.9, epochs_since_best=1)
BETTER = Progress(epoch=3, best=0.8)


def content(run: str, step: int) -> bytes:
    """Content of the part of a step."""
    return f"{run} after step {step}\n".encode() * 50


def fill(
    folder: Path,
    step: int,
    link: ParentLink | None = None,
    run: str = "one",
    progress: Progress | None = None,
) -> Path:
    """Make a folder a full checkpoint, or with a link a delta; progress: but for its step."""
    progress = dataclasses.replace(progress or Progress(), step=step)
    folder.mkdir(parents=True)
    (folder / PART).write_bytes(content(run, step))
    files = (flushed(folder / PART),)
    write_manifest(folder, Manifest(run, progress, TENSORS, files, "values", "optimizer", {}, link))
    return folder


def add_dump(save_dir: Path, step: int, run: str = "one", progress: Progress | None = None) -> Path:
    """A full checkpoint, under its name."""
    return fill(save_dir / full_name(step), step, run=run, progress=progress)


def add_delta(base: Path, sequence: int, from_step: int, step: int, run: str = "one") -> Path:
    """A delta, under its name."""
    return fill(base.parent / delta_name(step), step, link_to(base, sequence, from_step), run)


def add_file(folder: Path, name: str, content: bytes) -> None:
    """Have a checkpoint or delta hold a file, as if it had been written with it."""
    (folder / name).write_bytes(content)
    manifest = read_manifest(folder)
    others = tuple(entry for entry in manifest.files if entry.name != name)
    write_manifest(folder, dataclasses.replace(manifest, files=(*others, flushed(folder / name))))


def link_to(base: Path, sequence: int, from_step: int) -> ParentLink:
    """Reference of a delta to its base."""
    return ParentLink(base.name, digest_of(base / MANIFEST), sequence, from_step)


def add_chain(save_dir: Path, *steps: int) -> list[Path]:
    """A checkpoint at the first step, and deltas that end at the others."""
    base = add_dump(save_dir, steps[0])
    pairs = itertools.pairwise(steps)
    return [base, *(add_delta(base, number, *pair) for number, pair in enumerate(pairs, start=1))]


def check_whole(folder: Path) -> CheckpointChain:
    """The checkpoint that a folder stands for, after every byte was found to be what its step makes it."""
    state = chain_at(folder)
    for path, manifest in zip(state.folders, chain.check_whole(state), strict=True):
        assert (path / PART).read_bytes() == content(manifest.run, step_of(path))
    return state


def names_in(folder: Path) -> list[str]:
    """The names of what a folder holds, but for the lock."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def publish_at(
    save_dir: Path, step: int, progress: Progress, keep: int = 1, link: ParentLink | None = None
) -> Path:
    """Write and publish the checkpoint of a step, as a trainer does, and return its folder."""
    final = save_dir / (directory.full_name(step) if link is None else directory.delta_name(step))
    making = fill(save_dir / f".making-{final.name}", step, link, progress=progress)
    publish(making, final, keep)
    return final


def links_in(save_dir: Path) -> dict[str, str]:
    """Targets of the links in a folder, by name."""
    return {path.name: os.readlink(path) for path in save_dir.iterdir() if path.is_symlink()}
