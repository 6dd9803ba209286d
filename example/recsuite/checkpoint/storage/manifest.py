"""Manifest of a checkpoint, and the check of its files against it. Knows files, no tensors.

manifest.json is written last and holds the format, the progress of the training, its run, name and shape of
every tensor, size and digest of every file, and, in a delta, what it builds on. Nothing is read with pickle,
and nothing is believed before it was held against its digest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recsuite.errors import UserError, printable
from recsuite.files import (
    LARGEST,
    OPTIONAL,
    FileEntry,
    check_file,
    check_size,
    digest_of,
    digest_of_bytes,
    explained,
    flush,
    parsed,
    plain,
    reason_of,
    refuse_twice,
    sealed,
    typed,
)

FORMAT = 1
# What a field is called in the file, which older programs read too, where that is not its name here.
IN_FILE = {"progress": "position"}
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.json"
CONFIG = "config.json"
# What an export says of its features; a checkpoint has those of the schema.
FEATURES_FILE = "features.json"
# What the header of a safetensors file calls the types of tensors, and what a manifest calls them.
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
# Bytes: a manifest is read into memory before anything in it was checked.
LARGEST_MANIFEST = 2**26


@dataclass(frozen=True)
class DynamicRecord:
    """A dynamic table as it was when its checkpoint was written.

    capacity: places on all ranks, in buckets of bucket_width; has_texts: whether its ids are those of texts,
    which lie beside the rows; now: its clock, in `unit`, "steps" or "seconds"; live: rows on all ranks;
    counts: what became of ids since the beginning of the training, by the names of
    `sharding.dynamic.Counts`. The rest is as in `sharding.dynamic.DynamicSpec`.
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


# Of metrics whose squares have a mean over several windows, and not they themselves.
ROOTS = ("rmse",)


@dataclass(frozen=True)
class StreamProgress:
    """Where a stream is: positions are places among its events in the order of time.

    begin, end: of the window under way; both are where the last one ended, where none is. time: of the last
    event before `end`, in seconds since 1970. begins_at: where the clock of event time stands, that of the
    first event of the last window. events_per_file: of the data as they were last read, by which what comes
    later is known; late: see `datasets.streams.Past`; digest: of all events before `end`. predicted: the
    metrics of the window under way, which was predicted before it is learned from; sums, counts: of the
    metrics of all windows before it.
    """

    begin: int = 0
    end: int = 0
    time: int = 0
    begins_at: int = 0
    events_per_file: dict[str, int] = field(default_factory=dict)
    late: tuple[tuple[str, int, int], ...] = ()
    digest: str = ""
    predicted: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def is_under_way(self) -> bool:
        """Whether a window was predicted, and not all of it is learned."""
        return self.begin < self.end

    @property
    def learned(self) -> int:
        """Up to when events are learned, -1 for none."""
        return self.time if self.end else -1

    def done(self) -> StreamProgress:
        """Where it is when the window under way is learned."""
        return dataclasses.replace(self, begin=self.end, predicted={})

    def with_window(self, predicted: Mapping[str, float], number: int) -> StreamProgress:
        """With the metrics of one more window, of so many events; those that are not defined do not count."""
        sums, counts = dict(self.sums), dict(self.counts)
        known = {name: value for name, value in predicted.items() if math.isfinite(value)}
        for name, value in known.items():
            sums[name] = sums.get(name, 0.0) + number * (value**2 if name in ROOTS else value)
            counts[name] = counts.get(name, 0) + number
        return dataclasses.replace(self, predicted=known, sums=sums, counts=counts)

    def overall(self) -> dict[str, float]:
        """The metrics over all windows: exact for errors; of an AUC the mean of windows, by their events."""
        means = {name: value / self.counts[name] for name, value in self.sums.items()}
        return {name: math.sqrt(value) if name in ROOTS else value for name, value in means.items()}


@dataclass(frozen=True)
class Progress:
    """How far a training is: steps made, the epoch under way, counted from 0, and its ratings that were used.

    What comes next is place `samples` of the epoch's order, on any number of ranks. best: the best validation
    result so far, None before the first; epochs_since_best: how many have ended since the one that counts as
    the best, see `training.loops.judged`. In a stream an epoch is a window, and `stream` says where it
    is; it is None elsewhere.
    """

    step: int = 0
    epoch: int = 0
    samples: int = 0
    best: float | None = None
    epochs_since_best: int = 0
    stream: StreamProgress | None = field(default=None, metadata=OPTIONAL)

    @property
    def window(self) -> int:
        """The number of windows of a stream that are learned; 0 elsewhere."""
        return self.epoch if self.stream else 0

    @property
    def time(self) -> int:
        """Up to when the events of a stream are learned, in seconds since 1970; 0 elsewhere."""
        return self.stream.time if self.stream else 0

    @property
    def is_best(self) -> bool:
        """Whether no checkpoint before this one was better; where nothing is validated, each is better than
        those before it, once an epoch has ended.
        """
        if self.best is None:
            return self.epoch > 0
        return self.samples == 0 and self.epochs_since_best == 0


@dataclass(frozen=True)
class ParentLink:
    """What a delta builds on: a full checkpoint, known by its manifest's digest, and the steps in between.

    sequence: 1 for the first delta after it; from_step: the step of the checkpoint before the delta.
    """

    base: str
    base_digest: str
    sequence: int
    from_step: int

    def after(self, step: int) -> ParentLink:
        """What the delta after this one builds on, when this one ended at a step."""
        return dataclasses.replace(self, sequence=self.sequence + 1, from_step=step)


@dataclass(frozen=True)
class Manifest:
    """What a full checkpoint, or with a link a delta, holds.

    tensors: name to (shape, dtype), of the whole model also in a delta; vocabulary, ratings: digests of
    the raw values and of the ratings in their order; features: table to what its rows stand for; world_size:
    of the ranks that wrote; time: when, ISO 8601 with its zone; about: plan, versions and, in a delta,
    the rows it holds of each table; dynamic: what there is of each dynamic table, which is not in `tensors`.
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
    # Only where there are any, as in checkpoints of before there were.
    if not manifest.dynamic:
        del fields["dynamic"]
    # Sealed: as long as no delta builds on it, only its own digest can show that a manifest is damaged.
    path.write_text(json.dumps(sealed({"format": FORMAT, **fields}), indent=1, allow_nan=False))
    flush(path)
    # A power cut could otherwise take the names of files whose bytes are on the disk.
    flush(folder)


def read_manifest(folder: Path) -> Manifest:
    """What a folder says of itself, held against its own digest and then piece by piece; its files are not
    looked at.

    Raises:
        UserError: when the folder is not a checkpoint, or one of another format.
    """
    path = folder / MANIFEST
    try:
        found = parsed(_read_limited(path))
    except FileNotFoundError:
        what = f"it holds no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is not a checkpoint: {what}.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read ({reason_of(error)}).") from None
    except ValueError as error:
        raise UserError(f"{path} cannot be read ({printable(error)}).") from None
    version = found.get("format") if isinstance(found, dict) else None
    # To Python, true is 1.
    if version != FORMAT or isinstance(version, bool):
        raise UserError(f"{path} has format {printable(version)}, and this program reads format {FORMAT}.")
    try:
        if sealed(found) != found:
            raise UserError(f"{path} is damaged: its digest is not that of what it says.")
        return _manifest(found)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {printable(error)}"
        raise UserError(f"{path} is not the manifest of a checkpoint ({what}).") from None


def _manifest(found: dict[str, Any]) -> Manifest:
    names = {part.name: IN_FILE.get(part.name, part.name) for part in dataclasses.fields(Manifest)}
    held = {name: found[key] for name, key in names.items() if name != "dynamic"}
    held["dynamic"] = found.get("dynamic", {})
    # The first checkpoints knew nothing of a best one.
    held["progress"] = {**dataclasses.asdict(Progress()), **held["progress"]}
    manifest: Manifest = typed(Manifest, held)
    # A file that is named twice could have two digests, of which a reader looks at one.
    refuse_twice([entry.name for entry in manifest.files])
    # A folder is named after it, see `writer.set_aside`.
    if not manifest.run or "/" in manifest.run:
        raise ValueError(f"run is {manifest.run!r}")
    for name, (shape, dtype) in manifest.tensors.items():
        if dtype not in TYPES.values() or len(shape) > MOST_DIMENSIONS or math.prod(shape) > LARGEST:
            raise ValueError(f"{name} is {[shape, dtype]}")
    return dataclasses.replace(manifest, time=_time(manifest.time))


def _time(found: str) -> str:
    time = datetime.fromisoformat(found)
    # A server tells the age of its model by it, and cannot subtract a time without a zone from its own.
    if time.utcoffset() is None:
        raise ValueError(f"time is {found!r}, which has no zone")
    return time.isoformat()


def _read_limited(path: Path) -> bytes:
    """The bytes of a manifest; what is larger than any, or never ends, is not read."""
    # One that is missing is left to `read_bytes`, for `read_manifest` has a sentence of its own for that.
    if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST_MANIFEST):
        raise ValueError(f"it is not a file, or is larger than {LARGEST_MANIFEST:,} bytes")
    return path.read_bytes()


def read_config(folder: Path) -> dict[str, Any]:
    """The flags of the training that wrote a folder, as they were when it was written.

    Raises:
        UserError: when they cannot be read, or are not what was written.
    """
    path = folder / CONFIG
    entry = next((entry for entry in read_manifest(folder).files if entry.name == CONFIG), None)
    if entry is None:
        raise UserError(f"{folder} does not say how it was trained: its {MANIFEST} names no {CONFIG}.")
    with explained(f"{folder} cannot be read"):
        size = path.stat().st_size
        # The bytes that are believed are those that were looked at.
        content = path.read_bytes() if path.is_file() and size == entry.bytes else b""
    digest = digest_of_bytes(content)
    if digest != entry.xxh3_128:
        raise UserError(
            f"{path} is damaged: it has {size:,} bytes and digest {digest}, and had {entry.bytes:,} and "
            f"{entry.xxh3_128}."
        )
    try:
        config: dict[str, Any] = typed(dict, parsed(content), CONFIG)
        return config
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({printable(error)}).") from None


def link_after(folder: Path) -> ParentLink:
    """What the next delta after a checkpoint says that it builds on."""
    manifest = read_manifest(folder)
    step = manifest.progress.step
    if manifest.link is None:
        return ParentLink(folder.name, digest_of_manifest(folder), 1, step)
    return manifest.link.after(step)


def digest_of_manifest(folder: Path) -> str:
    """What a delta says of the checkpoint on which it builds.

    Raises:
        UserError: when it cannot be read.
    """
    with explained(f"{folder} cannot be read"):
        return digest_of(folder / MANIFEST)


def check_files(folder: Path, manifest: Manifest, part: int = 0, parts: int = 1) -> None:
    """Read every byte of each `parts`-th file, from number `part` on, and refuse what was not written so.

    Raises:
        UserError: names the first file that is missing, unknown, too short, or damaged.
    """
    with explained(f"{folder} cannot be read"):
        _check_files(folder, manifest, part, parts)


def _check_files(folder: Path, manifest: Manifest, part: int, parts: int) -> None:
    named = {entry.name for entry in manifest.files}
    # torch's reader takes every shard file that lies in a folder, named in the manifest or not. Files of
    # other kinds, such as a note of the user's, harm nothing.
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".safetensors", ".json")) and path.name not in {*named, MANIFEST}:
            raise UserError(f"{path} is not a part of the checkpoint: {MANIFEST} does not name it.")
    for entry in manifest.files[part::parts]:
        check_file(folder, entry)


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a folder of which a file is missing, or not as long as it was. Reads none of them.

    Raises:
        UserError: names the first.
    """
    with explained(f"{folder} cannot be read"):
        for entry in manifest.files:
            check_size(folder, entry)
