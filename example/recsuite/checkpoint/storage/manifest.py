"""What a dump or an increment says of itself, and the check that it is what it says. Knows files, no tensors.

manifest.json is written last and holds the format, the position of the training, its run, name and shape of
every tensor, size and digest of every file, and, in an increment, what it builds on. Nothing is read with
pickle, and nothing is believed before it was held against its digest.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from recsuite.errors import UserError, printable
from recsuite.files import (
    LARGEST,
    FileEntry,
    check_file,
    check_size,
    digest_of,
    digest_of_bytes,
    explained,
    flush,
    sealed,
)

FORMAT = 1
MANIFEST = "manifest.json"
VOCABULARY = "vocabulary.json"
CONFIG = "config.json"
# What an export says of its features; a dump has those of the schema.
FEATURES_FILE = "features.json"
TEXTS = ("vocabulary", "optimizer", "ratings")
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
LONGEST_TEXT = 1000
LARGEST_MANIFEST = 2**26


@dataclass(frozen=True)
class Progress:
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


def describe_step(position: Progress) -> str:
    """How far a training is, for people."""
    return f"step {position.step:,}" if position.step else "step 0, untrained"


def describe_choice(position: Progress, checkpoint: str, metric: str) -> str:
    """Which state was taken, and by what.

    checkpoint: the kind that was asked for, nothing of one that was named itself; metric: of the validation.
    """
    step = describe_step(position)
    if checkpoint != "best" or not position.is_best:
        return f"latest: {step}" if checkpoint else step
    value = "not validated" if position.best is None else f"validation {metric} {position.best:.4f}"
    return f"best: epoch {position.epoch}, {value} ({step})"


@dataclass(frozen=True)
class ParentLink:
    """What an increment builds on: a dump, known by the digest of its manifest, and the steps in between.

    sequence: 1 for the first increment after the dump; from_step: the step of the state before it.
    """

    base: str
    base_digest: str
    sequence: int
    from_step: int

    def after(self, step: int) -> ParentLink:
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
    position: Progress
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, and wait until it and the folder are on the disk."""
    path = folder / MANIFEST
    path.write_text(json.dumps(sealed({"format": FORMAT, **dataclasses.asdict(manifest)}), indent=1))
    flush(path)
    flush(folder)


def read_manifest(folder: Path) -> Manifest:
    """What a folder says of itself, held against its own digest and then piece by piece; its files are not
    looked at.

    Raises:
        UserError: when the folder is no dump or increment, or one of another format.
    """
    path = folder / MANIFEST
    try:
        found = parsed(_read_limited(path))
    except FileNotFoundError:
        what = f"it holds no {MANIFEST}" if folder.is_dir() else "there is no such folder"
        raise UserError(f"{folder} is no dump: {what}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({printable(error)}).") from None
    version = found.get("format") if isinstance(found, dict) else None
    if version != FORMAT or isinstance(version, bool):
        raise UserError(f"{path} has format {printable(version)}, and this program reads format {FORMAT}.")
    try:
        if sealed(found) != found:
            raise UserError(f"{path} is damaged: its digest is not that of what it says.")
        return _manifest(found)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        what = f"{type(error).__name__}: {printable(error)}"
        raise UserError(f"{path} is no manifest of a dump ({what}).") from None


def _manifest(found: dict[str, Any]) -> Manifest:
    files = tuple(_plain(FileEntry, entry) for entry in _of_type(list, "files", found["files"]))
    _refuse_twice([entry.name for entry in files])
    tensors = _of_type(dict, "tensors", found["tensors"])
    return Manifest(
        run=_run(found["run"]),
        position=_plain(Progress, found["position"]),
        tensors={_checked("tensors", name): _tensor(name, of) for name, of in tensors.items()},
        files=files,
        link=None if found["link"] is None else as_link(found["link"]),
        world_size=_checked("world_size", _of_type(int, "world_size", found["world_size"])),
        time=_time(found["time"]),
        **{name: _checked(name, _of_type(str, name, found[name])) for name in TEXTS},
        **{name: _of_type(dict, name, found[name]) for name in ("about", "features")},
    )


def as_link(found: Any) -> ParentLink:
    """A link, of what JSON held for it.

    Raises:
        TypeError, ValueError: when it is none.
    """
    link: ParentLink = _plain(ParentLink, found)
    return link


def _run(found: Any) -> str:
    run: str = _checked("run", _of_type(str, "run", found))
    if not run or "/" in run:
        raise ValueError(f"run is {run!r}")
    return run


def _tensor(name: str, found: Any) -> tuple[list[int], str]:
    """The shape of a tensor and its type, as `Manifest` has them."""
    shape, dtype = _of_type(list, name, found)
    sizes = [_checked(name, _of_type(int, name, size)) for size in _of_type(list, name, shape)]
    if dtype not in TYPES.values() or len(sizes) > MOST_DIMENSIONS or math.prod(sizes) > LARGEST:
        raise ValueError(f"{name} is {found}")
    return sizes, dtype


def _time(found: Any) -> str:
    time = datetime.fromisoformat(_of_type(str, "time", found))
    if time.utcoffset() is None:
        raise ValueError(f"time is {found!r}, which has no zone")
    return time.isoformat()


def _plain(kind: type[Any], found: Any) -> Any:
    """A dataclass of texts and numbers, of the values that JSON held for it."""
    made = kind(**_of_type(dict, kind.__name__, found))
    for part in dataclasses.fields(made):
        value = getattr(made, part.name)
        kind_of_value = "None" if value is None else type(value).__name__
        if kind_of_value not in str(part.type).split(" | "):
            raise TypeError(f"{part.name} is {value!r}")
        _checked(part.name, value)
    return made


def _of_type(kind: type[Any], name: str, value: Any) -> Any:
    # A truth value is an int to Python.
    if type(value) is not kind:
        raise TypeError(f"{name} is {value!r}")
    return value


def _checked(name: str, value: Any) -> Any:
    """Refuse numbers that count nothing and texts that no line can show."""
    if isinstance(value, int) and not 0 <= value <= LARGEST:
        raise ValueError(f"{name} is {value}")
    if isinstance(value, str) and not (value.isprintable() and len(value) <= LONGEST_TEXT):
        raise ValueError(f"{name} is {value!r}")
    return value


def parsed(content: bytes) -> Any:
    """What JSON says; names that come twice and what is no number are refused.

    Raises:
        ValueError: when it is no JSON, or too deep.
    """
    try:
        return json.loads(content, object_pairs_hook=_once, parse_constant=_no_number)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _refuse_twice([name for name, _ in pairs])
    return dict(pairs)


def _refuse_twice(names: list[str]) -> None:
    if len({*names}) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"{twice!r} is there twice")


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _read_limited(path: Path) -> bytes:
    """The bytes of a manifest; what is larger than any, or goes on for ever, is not read."""
    if path.exists() and not (path.is_file() and path.stat().st_size <= LARGEST_MANIFEST):
        raise ValueError(f"it is no file, or larger than {LARGEST_MANIFEST:,} bytes")
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
        return dict(_of_type(dict, CONFIG, parsed(content)))
    except (ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({printable(error)}).") from None


def link_after(folder: Path) -> ParentLink:
    """What the next increment after a dump or increment says that it builds on."""
    manifest = read_manifest(folder)
    step = manifest.position.step
    if manifest.link is None:
        return ParentLink(folder.name, digest_of_manifest(folder), 1, step)
    return manifest.link.after(step)


def digest_of_manifest(folder: Path) -> str:
    """What an increment says of the dump on which it builds.

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
    for path in sorted(folder.iterdir()):
        if path.name.endswith((".safetensors", ".json")) and path.name not in {*named, MANIFEST}:
            raise UserError(f"{path} is no part of the dump: {MANIFEST} does not name it.")
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
