"""What a dump or an increment says of itself, and the check that it is what it says. Knows files, no tensors.

manifest.json is written last and holds the format, the position of the training, its run, name and shape of
every tensor, size and digest of every file, and, in an increment, what it builds on. Nothing is read with
pickle, and nothing is believed before it was held against its digest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import xxhash

from errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.json"
CONFIG = "config.json"
# The name of a manifest's own digest in it.
SEAL = "xxh3_128"
# What is read for a digest should still be in the core's cache when it is digested.
BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Position:
    """How far a training is: steps made, the epoch under way, counted from 0, and its ratings that were used.

    What comes next is place `samples` of the epoch's order, on any number of ranks. best: the best validation
    result so far, None before the first; epochs_since_best: how many have ended since.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    epochs_since_best: int = 0

    @property
    def is_best(self) -> bool:
        """Whether no state before this one was better; where nothing is validated, each is better than those
        before it, once an epoch has shown that.
        """
        if self.best is None:
            return self.epoch > 0
        return self.samples == 0 and self.epochs_since_best == 0


def describe_step(position: Position) -> str:
    """How far a training is, for people."""
    return f"step {position.step:,}" if position.step else "step 0, untrained"


@dataclass(frozen=True)
class FileEntry:
    """A file of a dump: its size, and its XXH3 digest of 128 bits, which finds damage, not forgery."""

    name: str
    bytes: int
    xxh3_128: str


@dataclass(frozen=True)
class Link:
    """What an increment builds on: a dump, known by the digest of its manifest, and the steps in between.

    sequence: 1 for the first increment after the dump; from_step: the step of the state before it.
    """

    base: str
    base_digest: str
    sequence: int
    from_step: int

    def after(self, step: int) -> Link:
        """What the increment after this one builds on, when this one ended at a step."""
        return dataclasses.replace(self, sequence=self.sequence + 1, from_step=step)


@dataclass(frozen=True)
class Manifest:
    """What a dump, or with a link an increment, holds.

    tensors: name to (shape, dtype), of the whole model also in an increment; vocabulary, ratings: digests of
    the raw values and of the ratings in their order; features: table to what its rows stand for; world_size:
    of the ranks that wrote; time: when, ISO 8601 with its zone; about: plan, versions and, in an increment,
    the rows it holds of each table.
    """

    run: str
    position: Position
    tensors: dict[str, tuple[list[int], str]]
    files: tuple[FileEntry, ...]
    vocabulary: str
    optimizer: str
    about: dict[str, Any]
    link: Link | None = None
    features: dict[str, Any] = field(default_factory=dict)
    ratings: str = ""
    world_size: int = 1
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and wait until it and the folder are on the disk."""
    path = folder / MANIFEST
    path.write_text(json.dumps(sealed({"format": FORMAT, **dataclasses.asdict(manifest)}), indent=1))
    flush(path)
    flush(folder)


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a manifest with their own digest, which tells whether any of them was changed."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, SEAL: xxhash.xxh3_128_hexdigest(text.encode())}


def read_manifest(folder: Path) -> Manifest:
    """What a folder says of itself; its files are not looked at.

    Raises:
        UserError: when the folder is no dump or increment, or one of another format.
    """
    path = folder / MANIFEST
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        what = f"it holds no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is no dump: {what}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        version = found.get("format") if isinstance(found, dict) else None
        raise UserError(f"{path} has format {version}, and this program reads format {FORMAT}.")
    try:
        manifest = Manifest(
            run=str(found["run"]),
            position=_plain(Position, found["position"]),
            tensors={name: (list(shape), str(dtype)) for name, (shape, dtype) in found["tensors"].items()},
            files=tuple(_plain(FileEntry, entry) for entry in found["files"]),
            vocabulary=str(found["vocabulary"]),
            optimizer=str(found["optimizer"]),
            about=dict(found["about"]),
            link=None if found["link"] is None else _plain(Link, found["link"]),
            features=dict(found["features"]),
            ratings=str(found["ratings"]),
            world_size=int(found["world_size"]),
            time=datetime.fromisoformat(found["time"]).isoformat(),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path} is no manifest of a dump ({type(error).__name__}: {error}).") from None
    if sealed(found) != found:
        raise UserError(f"{path} is damaged: its digest is not that of what it says.")
    return manifest


def _plain(kind: type[Any], found: Any) -> Any:
    """A dataclass of texts and numbers, of the values that JSON held for it."""
    made = kind(**found)
    for part in dataclasses.fields(made):
        value = getattr(made, part.name)
        kind_of_value = "None" if value is None else type(value).__name__
        if kind_of_value not in str(part.type).split(" | "):
            raise TypeError(f"{part.name} is {value!r}")
    return made


def read_config(folder: Path) -> dict[str, Any]:
    """The flags of the training that wrote a folder.

    Raises:
        UserError: when they cannot be read.
    """
    path = folder / CONFIG
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}).") from None


def link_after(folder: Path) -> Link:
    """What the next increment after a dump or increment says that it builds on."""
    manifest = read_manifest(folder)
    step = manifest.position.step
    if manifest.link is None:
        return Link(folder.name, digest_of(folder / MANIFEST), 1, step)
    return manifest.link.after(step)


def check_files(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Read every byte of each `parts`-th file, from number `part` on, and refuse what was not written so.

    Raises:
        UserError: names the first file that is missing, unknown, too short, or damaged.
    """
    with _in_words(folder):
        _check_files(folder, manifest, part, parts)


@contextlib.contextmanager
def _in_words(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror or error}).") from error


def _check_files(folder: Path, manifest: Manifest, part: int, parts: int) -> None:
    named = {entry.name for entry in manifest.files}
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".safetensors", ".json")) and path.name not in {*named, MANIFEST}:
            raise UserError(f"{path} is no part of the dump: {MANIFEST} does not name it.")
    for entry in manifest.files[part::parts]:
        path = folder / entry.name
        if Path(entry.name).name != entry.name or not path.is_file():
            raise UserError(f"{path} is missing.")
        size = path.stat().st_size
        if size != entry.bytes:
            raise UserError(f"{path} has {size:,} bytes and had {entry.bytes:,} when it was written.")
        digest = digest_of(path)
        if digest != entry.xxh3_128:
            raise UserError(f"{path} is damaged: its digest is {digest}, and was {entry.xxh3_128}.")


def digest_of(path: Path) -> str:
    """The digest of a file's bytes, as a `FileEntry` has it."""
    digest, block = xxhash.xxh3_128(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(block[:size])
    return digest.hexdigest()


def flushed(path: Path) -> FileEntry:
    """Wait until a file is on the disk; its digest is taken meanwhile, from the page cache."""
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(flush, path)
        digest = digest_of(path)
        flushing.result()
    return FileEntry(path.name, path.stat().st_size, digest)


def flush(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
