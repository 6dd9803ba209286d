"""Format of a checkpoint: its manifest, and the check of its files against it. Handles no tensors.

manifest.json is written last. It holds the format, the progress of the training, its run, name and shape of
every tensor, size and digest of every file, and, in a delta, the link to its parent. No file is read with
pickle, and each file is compared with its digest before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recsuite.errors import UserError, printable
from recsuite.files import (
    LARGEST,
    FileEntry,
    check_file,
    check_no_duplicates,
    check_size,
    digest_of,
    digest_of_bytes,
    explained,
    flush,
    parsed,
    plain,
    reason_of,
    sealed,
    typed,
)
from recsuite.places import ObjectPath
from recsuite.training.progress import Progress

FORMAT = 1
# Names in the file of fields that are called otherwise here: older programs read the file too.
IN_FILE = {"progress": "position"}
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.json"
# What a stream keeps of the events that it has learned, see `recent.RecentEvents`.
STREAM_FILE = "stream.state"
CONFIG = "config.json"
# Features of an export; a checkpoint has those of the schema.
FEATURES_FILE = "features.json"
# Key in `Manifest.about` of an index of the items, which the extra `index` writes into an export.
INDEX = "index"
# Types of tensors: name in the header of a safetensors file to name in a manifest.
TYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "I32": "int32",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
}
MOST_DIMENSIONS = 8
# Parameters that rankings of earlier versions lacked, see `models.layers.OwnItems`.
ADDED_LATER = "dense.own_items."
# The fix for a checkpoint that cannot be read.
OTHER_CHECKPOINT = "give another checkpoint"
# In bytes: a manifest is read into memory before any check.
LARGEST_MANIFEST = 2**26


@dataclass(frozen=True)
class DynamicRecord:
    """State of a dynamic table when its checkpoint was written.

    capacity: places on all ranks, in buckets of bucket_width; has_texts: True if its ids are of texts, which
    are beside the rows; now: its clock, in `unit`, "steps" or "seconds"; live: rows on all ranks; counts:
    ids admitted, evicted and so on since the beginning of the training, by the names of
    `sharding.table.IdCounters`. The other fields are as in `sharding.dynamic.DynamicSpec`.
    """

    embedding_dim: int
    capacity: int
    bucket_width: int
    distribution: str
    admit: int
    evict: str
    ttl: int
    half_life: int
    unit: str
    has_texts: bool
    now: int
    live: int
    counts: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ParentLink:
    """Parent of a delta: a full checkpoint, identified by its manifest's digest, and the place after it.

    sequence: 1 for the first delta after it; from_step: the step of the checkpoint before the delta.
    """

    base: str
    base_digest: str
    sequence: int
    from_step: int

    def after(self, step: int) -> ParentLink:
        """Return the link of the delta after this one. step: at which this one ended."""
        return dataclasses.replace(self, sequence=self.sequence + 1, from_step=step)


@dataclass(frozen=True)
class Manifest:
    """Contents of a full checkpoint, or of a delta, which has a link.

    tensors: name to (shape, dtype), of the whole model also in a delta; vocabulary, ratings: digests of the
    raw values and of the ratings in their order; features: table to the feature of its rows; world_size:
    number of ranks that wrote it; time: of the write, ISO 8601 with its zone; about: plan, versions and, in a
    delta, its number of rows of each table; dynamic: record of each dynamic table, which is not in `tensors`.
    """

    run: str
    progress: Progress
    tensors: dict[str, tuple[list[int], str]]
    files: tuple[FileEntry, ...]
    vocabulary: str
    optimizer: str
    about: dict[str, Any]
    link: ParentLink | None = None
    features: dict[str, Any] = field(default_factory=dict)
    ratings: str = ""
    world_size: int = 1
    time: str = field(default_factory=lambda: datetime.now(timezone.utc).isoformat(timespec="seconds"))
    dynamic: dict[str, DynamicRecord] = field(default_factory=dict)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and wait until it and the folder are on the disk."""
    path = folder / MANIFEST
    fields = {IN_FILE.get(name, name): value for name, value in plain(manifest).items()}
    # Only if there are any, as in checkpoints from before there were dynamic tables.
    if not manifest.dynamic:
        del fields["dynamic"]
    # Sealed: unless a delta builds on it, only its own digest can show that a manifest is damaged.
    path.write_text(json.dumps(sealed({"format": FORMAT, **fields}), indent=1, allow_nan=False))
    flush(path)
    # Otherwise a power cut could remove the names of files whose bytes are on the disk.
    flush(folder)


@contextlib.contextmanager
def parsing(what: str, fix: str = OTHER_CHECKPOINT) -> Iterator[None]:
    """Turn an error about the content of a file into a UserError. what: cannot be read.

    Raises:
        UserError: instead of the error.
    """
    try:
        yield
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise UserError(f"Cannot read {what}: {printable(error)}. Fix: {fix}.") from None


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder, and check its digest and its fields. The files are not checked.

    Raises:
        UserError: when the folder is not a checkpoint, or one of another format.
    """
    path = folder / MANIFEST
    try:
        recorded = parsed(_read_limited(path))
    except FileNotFoundError:
        what = f"it holds no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is not a checkpoint: {what}.") from None
    except OSError as error:
        raise UserError(f"Cannot read {path}: {reason_of(error)}. Fix: {OTHER_CHECKPOINT}.") from None
    except ValueError as error:
        raise UserError(f"Cannot read {path}: {printable(error)}. Fix: {OTHER_CHECKPOINT}.") from None
    version = recorded.get("format") if isinstance(recorded, dict) else None
    # In Python, True equals 1.
    if version != FORMAT or isinstance(version, bool):
        raise UserError(f"{path} has format {printable(version)}, and this program reads format {FORMAT}.")
    try:
        if sealed(recorded) != recorded:
            raise UserError(f"{path} is damaged: checksum mismatch.")
        return _manifest(recorded)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {printable(error)}"
        raise UserError(
            f"Cannot read {path} as the manifest of a checkpoint: {what}. Fix: {OTHER_CHECKPOINT}."
        ) from None


def _manifest(recorded: dict[str, Any]) -> Manifest:
    names = {part.name: IN_FILE.get(part.name, part.name) for part in dataclasses.fields(Manifest)}
    held = {name: recorded[key] for name, key in names.items() if name != "dynamic"}
    held["dynamic"] = recorded.get("dynamic", {})
    # The first version of checkpoints had no best one.
    held["progress"] = {**dataclasses.asdict(Progress()), **held["progress"]}
    manifest: Manifest = typed(Manifest, held)
    # A file that is named twice could have two digests, and a reader would check only one.
    check_no_duplicates([entry.name for entry in manifest.files])
    # A folder is named after the run, see `folder.archive_checkpoints`.
    if not manifest.run or "/" in manifest.run:
        raise ValueError(f"run is {manifest.run!r}")
    for name, (shape, dtype) in manifest.tensors.items():
        if dtype not in TYPES.values() or len(shape) > MOST_DIMENSIONS or math.prod(shape) > LARGEST:
            raise ValueError(f"{name} is {[shape, dtype]}")
    return dataclasses.replace(manifest, time=_time(manifest.time))


def _time(recorded: str) -> str:
    time = datetime.fromisoformat(recorded)
    # A server computes the age of its model from it, which needs a time zone.
    if time.utcoffset() is None:
        raise ValueError(f"time is {recorded!r}, which has no zone")
    return time.isoformat()


def _read_limited(path: Path) -> bytes:
    """Return the bytes of a manifest; a file that is too large, or not a regular file, is not read."""
    # For a missing file `read_bytes` raises, and `read_manifest` has a message of its own.
    if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST_MANIFEST):
        raise ValueError(f"it is not a file, or is larger than {LARGEST_MANIFEST:,} bytes")
    return path.read_bytes()


def read_config(folder: Path) -> dict[str, Any]:
    """Return the flags of the training that wrote a folder, at the time of the write.

    Raises:
        UserError: when they cannot be read, or are not what was written.
    """
    path = folder / CONFIG
    entry = next((entry for entry in read_manifest(folder).files if entry.name == CONFIG), None)
    if entry is None:
        raise UserError(f"{folder} does not say how it was trained: its {MANIFEST} names no {CONFIG}.")
    with explained(f"Cannot read {folder}", OTHER_CHECKPOINT):
        size = path.stat().st_size
        # The bytes that are parsed are the same bytes that are checked.
        content = path.read_bytes() if path.is_file() and size == entry.bytes else b""
    digest = digest_of_bytes(content)
    if digest != entry.xxh3_128:
        raise UserError(
            f"{path} is damaged: it has {size:,} bytes and digest {digest}, and had {entry.bytes:,} and "
            f"{entry.xxh3_128}."
        )
    with parsing(f"{path}"):
        config: dict[str, Any] = typed(dict, parsed(content), CONFIG)
    return config


def recorded_in(manifest: Manifest, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return tensors without those that checkpoints of earlier versions lack, and that begin at zero."""
    return {
        name: value
        for name, value in tensors.items()
        if name in manifest.tensors or not name.startswith(ADDED_LATER)
    }


def link_after(folder: Path) -> ParentLink:
    """Return the link of the next delta after a checkpoint."""
    manifest = read_manifest(folder)
    step = manifest.progress.step
    if manifest.link is None:
        return ParentLink(folder.name, digest_of_manifest(folder), 1, step)
    return manifest.link.after(step)


def digest_of_manifest(folder: Path) -> str:
    """Return the digest of a folder's manifest, by which a delta identifies the checkpoint it builds on.

    Raises:
        UserError: when it cannot be read.
    """
    with explained(f"Cannot read {folder}", OTHER_CHECKPOINT):
        return digest_of(folder / MANIFEST)


def check_files(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Read every byte of each `parts`-th file, from number `part` on, and refuse files that have changed.

    Raises:
        UserError: names the first file that is missing, unknown, too short, or damaged.
    """
    named = {MANIFEST, *(entry.name for entry in manifest.files)}
    with explained(f"Cannot read {folder}", OTHER_CHECKPOINT):
        # torch's reader takes every shard file in a folder, also one that is not in the manifest. Files of
        # other kinds, such as a user's notes, do no harm.
        # It reads no object store, where objects of unfinished attempts may lie.
        for path in () if isinstance(folder, ObjectPath) else sorted(folder.iterdir()):
            if path.name.endswith((".safetensors", ".json")) and path.name not in named:
                raise UserError(f"{path} is not a part of the checkpoint: {MANIFEST} does not name it.")
        for entry in manifest.files[part::parts]:
            check_file(folder, entry)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder in which a file is missing or has another size. Reads no file.

    Raises:
        UserError: names the first.
    """
    with explained(f"Cannot read {folder}", OTHER_CHECKPOINT):
        for entry in manifest.files:
            check_size(folder, entry)
