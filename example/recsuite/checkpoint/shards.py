"""Shard files of a checkpoint, in safetensors: writing, checks, and reading of rows along a chain.

A file of a full checkpoint or an export has for each table, of its rank's rows:

    tables.user.weight, .momentum1      rows by number; the metadata has their offsets in the whole table
    dynamic.user.ids, .weight, ...      rows by id, see `ROWS`; ids that wait for admission, see `WAITING`

and the first one also the dense part, "dense.mlp.0.weight" and so on. A file of a delta has for each table
the rows that changed:

    tables.user.rows, .ids, .weight     numbers of the rows, ascending, and their raw values
    dynamic.user.gone, .waiting.gone    ids that were removed, besides the rows by id

Raw values that are numbers are int64 or float64; row 0, which has no raw value, gets the smallest number or
nan. Texts are uint8 [n, longest], in UTF-8 and padded with zeros. A table by id whose ids are of texts has
these too, see `Texts`. One file has the row of unknown ids of each such table.

Serving reads with this module too, and it needs no process group. Every byte of a file and its header are
checked before a row is read.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from recsuite.checkpoint.format import OTHER_CHECKPOINT, TYPES, DynamicRecord, Manifest, parsing
from recsuite.errors import UserError, printable
from recsuite.files import LARGEST, FileEntry, explained, flushed, parsed
from recsuite.places import ObjectPath

# Key of the metadata where the reader of torch.distributed.checkpoint finds the offsets of a file's tensors
# in the whole ones; without it, it takes each for a whole tensor.
OFFSETS_KEY = "DCP_SHARDING_INFO"
# Raw values in a delta may have any type and shape: only other programs read them.
ANY = "any"
PREFIX = "dynamic."
# Slots of a table by id, with their types; each slot has one entry for each of the ids.
ROWS = {"ids": "int64", "weight": "float32", "momentum1": "float32", "seen": "int64", "count": "int32"}
WAITING = {"waiting.ids": "int64", "waiting.count": "int32", "waiting.seen": "int64"}
# Slots of the ids of a table and of its removed ids.
IDS, WAITING_IDS = ("ids", "gone"), ("waiting.ids", "waiting.gone")
UNKNOWN = ("unknown.weight", "unknown.momentum1")
TEXTS = {"texts.ids": "int64", "texts.bytes": "uint8", "texts.ends": "int64"}
# Open files at once: a chain may have more than a process may open.
MOST_OPEN = 64

# Values of rows by the name of the slot.
Slots = dict[str, torch.Tensor]
# Shape and type of a tensor.
Kind = tuple[list[int], str]


@dataclass(frozen=True)
class Texts:
    """Texts by their ids. ids: int64 [n], ascending; texts: their UTF-8, object [n]."""

    ids: np.ndarray
    texts: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, texts: Iterable[bytes]) -> Texts:
        """Return texts from ids and texts in any order."""
        held = np.empty(len(ids), object)
        held[:] = list(texts)
        order = np.argsort(ids, kind="stable")
        return cls(ids[order], held[order])

    @classmethod
    def none(cls) -> Texts:
        """Return an empty set of texts."""
        return cls(np.empty(0, np.int64), np.empty(0, object))

    @classmethod
    def of_arrays(cls, ids: np.ndarray, content: np.ndarray, ends: np.ndarray) -> Texts:
        """Return texts from the arrays of a file.

        Raises:
            ValueError: when the ends do not ascend, or are not those of the bytes.
        """
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        if (ends < begins).any() or (ends[-1:] != len(content)).any() or (not len(ends) and len(content)):
            raise ValueError("texts do not end where they should")
        whole = content.tobytes()
        return cls.of(ids, [whole[begin:end] for begin, end in zip(begins, ends, strict=True)])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the texts as arrays of a file."""
        ends = np.cumsum([len(text) for text in self.texts], dtype=np.int64)
        content = np.frombuffer(b"".join(self.texts), np.uint8)
        return {"texts.ids": self.ids, "texts.bytes": content, "texts.ends": ends}

    def of_ids(self, ids: np.ndarray) -> Texts:
        """Return the texts of some ids; ids without a text are skipped."""
        places, is_known = self._places_of(np.unique(ids))
        return Texts(self.ids[places[is_known]], self.texts[places[is_known]])

    def _places_of(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of ids, or those to insert them at, and a mask of those that have a text."""
        places = np.searchsorted(self.ids, ids)
        is_known = places < len(self.ids)
        is_known[is_known] = self.ids[places[is_known]] == ids[is_known]
        return places, is_known

    def with_others(self, others: Texts, table: str) -> Texts:
        """Return these and other texts together.

        Raises:
            UserError: when one id stands for two texts; names both.
        """
        # Only the others are sorted: these may be many, and stay where they are.
        places, is_known = self._places_of(others.ids)
        new, place = Texts(others.ids[~is_known], others.texts[~is_known]), places[is_known]
        _refuse_same_ids(self.texts[place], others.texts[is_known], others.ids[is_known], table)
        is_again = new.ids[1:] == new.ids[:-1]
        _refuse_same_ids(new.texts[:-1][is_again], new.texts[1:][is_again], new.ids[1:][is_again], table)
        is_first = np.concatenate([np.ones(len(new.ids[:1]), bool), ~is_again])
        at = places[~is_known][is_first]
        if not len(at):
            return self
        return Texts(
            np.insert(self.ids, at, new.ids[is_first]), np.insert(self.texts, at, new.texts[is_first])
        )


def _refuse_same_ids(texts: np.ndarray, others: np.ndarray, ids: np.ndarray, table: str) -> None:
    for place in np.flatnonzero(texts != others)[:1]:
        one, other = (printable(text.decode("utf-8", "replace")) for text in (texts[place], others[place]))
        raise UserError(
            f"{one!r} and {other!r} of {table} have the same id, {ids[place]}; rename one of them."
        )


def name_of(table: str, slot: str) -> str:
    """Return the name of a slot of a table by id in a shard file."""
    return f"{PREFIX}{table}.{slot}"


# --- writing ---


def shard_file_name(rank: int, attempt: str = "") -> str:
    """Return the name of the file that a rank writes. attempt: a part of the name, see `writer`."""
    return f"part-{rank + 1:05d}{attempt}.safetensors"


def write_shard_file(
    path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str] | None = None
) -> FileEntry:
    """Write arrays into one file without copying them, and wait until it is on the disk."""
    # safetensors makes a file that only its owner can read, but a server may run as another user: the file
    # gets the mode that the user's umask gives to any new file.
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(arrays, path, metadata=metadata)
    except SafetensorError as error:
        raise _as_os_error(error) from error
    path.chmod(mode)
    return flushed(path)


def _as_os_error(error: SafetensorError) -> Exception:
    """Return the OSError behind an error of safetensors, which has it only as text; else the same error."""
    match = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(match[1]), os.strerror(int(match[1]))) if match else error


# --- reading ---


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Raise a UserError for errors of the system or of safetensors when reading a file."""
    try:
        with explained(f"Cannot read {folder}", OTHER_CHECKPOINT):
            yield
    except SafetensorError as error:
        raise UserError(f"Cannot read {folder}: {printable(error)}. Fix: {OTHER_CHECKPOINT}.") from error


class ShardFile:
    """Open shard file. shapes: of its tensors, by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: Any = (
            path.open_tensors() if isinstance(path, ObjectPath) else safe_open(path, framework="pt")
        )
        names = list(self._file.keys())
        # This reads the header of the file, not the tensors.
        self._slices = {name: self._file.get_slice(name) for name in names}
        self.shapes: dict[str, list[int]] = {name: each.get_shape() for name, each in self._slices.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor of the file."""
        return self._file.get_tensor(name)

    def rows(self, name: str, first: int, end: int) -> torch.Tensor:
        """Return some rows of a tensor; the others are not read."""
        return self._slices[name][first:end]

    def dtype(self, name: str) -> str:
        """Return the type of a tensor."""
        return TYPES.get(self._slices[name].get_dtype(), "no type")

    @cached_property
    def begins(self) -> dict[str, list[int]]:
        """Offsets of each tensor in the whole one.

        Raises:
            UserError: when they cannot be.
        """
        text = (self._file.metadata() or {}).get(OFFSETS_KEY)
        # The files of deltas and exports hold whole tensors, and have no offsets.
        if not text:
            return {name: [0] * len(shape) for name, shape in self.shapes.items()}
        with parsing(f"the offsets of tensors in {self.path}"):
            said = parsed(text.encode())
            begins = {name: said[name]["saved_offsets"] for name in self.shapes}
        for name, begin in begins.items():
            is_list = type(begin) is list and len(begin) == len(self.shapes[name])
            if not is_list or not all(map(_is_place, begin)):
                raise UserError(
                    f"{self.path} is damaged: {printable(name)} has the invalid offsets {printable(begin)}."
                )
        return begins


def _is_place(value: Any) -> bool:
    # Not isinstance: in Python, True is an int.
    return type(value) is int and 0 <= value <= LARGEST


def _shard_paths(folder: Path, manifest: Manifest) -> list[Path]:
    return [folder / entry.name for entry in manifest.files if entry.name.endswith(".safetensors")]


class RowReader:
    """Reader of the rows in a chain: a full checkpoint or an export, and deltas. Any of them may be first.

    Call `check_shard_files` before: the headers are not checked here. folders, manifests: of the chain, in
    order.
    """

    def __init__(self, folders: Sequence[Path], manifests: Sequence[Manifest]) -> None:
        self.folders, self.manifests = folders, manifests
        self._paths = [_shard_paths(*each) for each in zip(folders, manifests, strict=True)]
        self._open = functools.lru_cache(MOST_OPEN)(ShardFile)

    def record(self, table: str) -> DynamicRecord:
        """Return the record of a table by id, as of the last checkpoint."""
        return self.manifests[-1].dynamic[table]

    def files(self, number: int) -> Iterator[ShardFile]:
        """Yield the shard files of a checkpoint of the chain."""
        return map(self._open, self._paths[number])

    def fill(self, targets: Mapping[str, torch.Tensor]) -> None:
        """Fill dense tensors with those of the last checkpoint. targets: by their names in the files."""
        for file in self.files(-1):
            _fill_pieces(file, targets, 0)

    def fill_rows(self, table: str, slots: Mapping[str, torch.Tensor], first: int = 0) -> None:
        """Fill tensors with the rows of a table by number, from number `first` on. slots: slot to tensor."""
        whole = {f"tables.{table}.{slot}": target for slot, target in slots.items()}
        for number, manifest in enumerate(self.manifests):
            if manifest.link is None:
                for file in self.files(number):
                    _fill_pieces(file, whole, first)
                continue
            for rows, values in self.changed_rows(number, table, slots):
                for slot, target in slots.items():
                    here = (rows >= first) & (rows < first + len(target))
                    target[(rows[here] - first).to(target.device)] = values[slot][here].to(target)

    def changed_rows(
        self, number: int, table: str, slots: Iterable[str] = ("weight",)
    ) -> Iterator[tuple[torch.Tensor, Slots]]:
        """Yield the rows of a table by number that a delta changed, int64 [n], and their values."""
        for file in self.files(number):
            values = {slot: file.tensor(f"tables.{table}.{slot}") for slot in slots}
            yield file.tensor(f"tables.{table}.rows"), values

    def rows_of_ids(
        self,
        table: str,
        is_wanted: Callable[[torch.Tensor], torch.Tensor] = lambda ids: torch.ones_like(
            ids, dtype=torch.bool
        ),
        slots: Sequence[str] = (*ROWS, *WAITING),
    ) -> Iterator[Slots]:
        """Yield the rows of a table by id after all deltas, in parts without common ids.

        is_wanted: ids to a mask, bool [n], by default all. slots: those to read, of ROWS and WAITING.
        """
        # From the newest checkpoint back: the newest one with an id has its state, and no row is read that a
        # later delta replaces.
        kinds = [(IDS, ROWS), (WAITING_IDS, WAITING)]
        # Without waiting ids where none of their slots is wanted, as in serving.
        groups = [_NewestRows(table, *kind) for kind in kinds if not kind[1].keys().isdisjoint(slots)]
        for number in reversed(range(len(self.folders))):
            for file in self.files(number):
                yield {
                    slot: value
                    for group in groups
                    for slot, value in group.read(file, is_wanted, slots).items()
                }
            for group in groups:
                group.turn()

    def gone_ids(self, table: str) -> torch.Tensor:
        """Return the ids of a table that the last delta removed, int64 [n]."""
        return torch.cat([file.tensor(name_of(table, "gone")) for file in self.files(-1)])

    def unknown_row(self, table: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of unknown ids and its optimizer state, float32 [D] and []."""
        (file,) = (file for file in self.files(-1) if name_of(table, UNKNOWN[0]) in file)
        weight, state = (file.tensor(name_of(table, slot)) for slot in UNKNOWN)
        return weight[0], state[0]

    def texts(self, table: str, known: Texts | None = None) -> Texts:
        """Return the texts of ids in all files together with the known ones.

        Raises:
            UserError: when they cannot be read, or one id stands for two texts.
        """
        known = known or Texts.none()
        for file in itertools.chain(*map(self.files, range(len(self.folders)))):
            if name_of(table, "texts.ids") in file:
                arrays = (file.tensor(name_of(table, slot)).numpy() for slot in TEXTS)
                with parsing(f"the texts of {table} in {file.path}"):
                    known = known.with_others(Texts.of_arrays(*arrays), table)
        return known


def _fill_pieces(file: ShardFile, targets: Mapping[str, torch.Tensor], first: int) -> None:
    """Copy the numbers of a file into tensors that hold the rows from `first` on of whole tensors."""
    for name in targets.keys() & file.shapes.keys():
        target, begin, number = targets[name], file.begins[name][0], file.shapes[name][0]
        low, high = max(first, begin), min(first + len(target), begin + number)
        if low < high:
            values = file.rows(name, low - begin, high - begin)
            target[low - first : high - first] = values.to(target.device)


class _NewestRows:
    """Reader that takes each id only from the newest checkpoint that has it.

    names: of the slots with the ids and with the removed ids; kinds: of all slots.
    """

    def __init__(self, table: str, names: tuple[str, str], kinds: Mapping[str, str]) -> None:
        self._table, self._names, self._kinds = table, names, kinds
        self._known = torch.empty(0, dtype=torch.int64)
        self._new: list[torch.Tensor] = []

    def read(
        self, file: ShardFile, is_wanted: Callable[[torch.Tensor], torch.Tensor], slots: Sequence[str]
    ) -> Slots:
        """Return the slots of wanted ids in a file that no newer checkpoint has."""
        names = {slot: name_of(self._table, slot) for slot in slots if slot in self._kinds}
        (ids, which), (gone, _) = (self._unknown(file, slot, is_wanted) for slot in self._names)
        self._new += [ids, gone]
        if not len(ids):
            # Unwanted rows are not read.
            return {slot: file.rows(name, 0, 0) for slot, name in names.items()}
        return {slot: file.tensor(name)[which] for slot, name in names.items()}

    def _unknown(
        self, file: ShardFile, slot: str, is_wanted: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        name = name_of(self._table, slot)
        # A full checkpoint has no list of removed ids.
        ids = file.tensor(name) if name in file else self._known[:0]
        which = is_wanted(ids) & ~torch.isin(ids, self._known)
        return ids[which], which

    def turn(self) -> None:
        """Continue with the checkpoint before."""
        self._known = torch.cat([self._known, *self._new])
        self._new = []


# --- headers of shard files, compared with the manifest ---


def shape_of(folder: Path, manifest: Manifest, name: str) -> list[int]:
    """Return the shape of a float32 tensor.

    Raises:
        UserError: when there is none of that name.
    """
    shape, dtype = manifest.tensors.get(name, ([], "nothing"))
    if dtype != "float32":
        raise UserError(f"A float32 tensor {name} is needed, and {folder} has {dtype}.")
    return shape


def tables_of(manifest: Manifest) -> dict[str, dict[str, Kind]]:
    """Return table to slot ("weight", "momentum1") to shape and type of the whole tensor."""
    tables: dict[str, dict[str, Kind]] = {}
    for name, tensor in manifest.tensors.items():
        if name.startswith("tables."):
            _, _, rest = name.partition(".")
            table, _, slot = rest.partition(".")
            tables.setdefault(table, {})[slot] = tensor
    return tables


def widths_in(manifest: Manifest) -> dict[str, int]:
    """Return the numbers in a row of each table; 0 if the shape is not that of a table."""
    weights = {name: slots["weight"] for name, slots in tables_of(manifest).items() if "weight" in slots}
    widths = {name: shape[1] if len(shape) == 2 else 0 for name, (shape, _) in weights.items()}
    return {**widths, **{name: record.embedding_dim for name, record in manifest.dynamic.items()}}


def check_shard_files(folder: Path, manifest: Manifest) -> None:
    """Compare the headers of shard files with the manifest, after their bytes were checked.

    Checks names, types, shapes and offsets, and in a delta also that the changed rows are in their table.

    Raises:
        UserError: names the file, and what in it does not fit.
    """
    expected = _expected(manifest)
    missing = {name: math.prod(shape) for name, (shape, _) in expected.items() if -1 not in shape}
    with reading(folder):
        for file in map(ShardFile, _shard_paths(folder, manifest)):
            # Readers need tensors of any number of rows in each file, also if it has no rows.
            if absent := expected.keys() - missing.keys() - file.shapes.keys():
                raise UserError(f"{file.path} does not fit its manifest: it has no {printable(min(absent))}.")
            for name, shape in file.shapes.items():
                _check_tensor(file, name, *expected.get(name, ([], "nothing")))
                if name in missing:
                    missing[name] -= math.prod(shape)
            if manifest.link is not None:
                _check_rows(file, manifest)
    for name, number in missing.items():
        if number > 0:
            raise UserError(f"{folder} is incomplete: {number:,} numbers of {printable(name)} are missing.")


def _expected(manifest: Manifest) -> dict[str, Kind]:
    """Return name to shape and type of all tensors; -1 for a number of rows that each file decides."""
    expected, is_delta = dict(manifest.tensors), manifest.link is not None
    for table, slots in tables_of(manifest).items() if is_delta else ():
        for slot, (shape, dtype) in slots.items():
            expected[f"tables.{table}.{slot}"] = [-1, *shape[1:]][: len(shape)], dtype
        expected |= {f"tables.{table}.rows": ([-1], "int64"), f"tables.{table}.ids": ([-1], ANY)}
    for table, record in manifest.dynamic.items():
        kinds = {**ROWS, **WAITING, **(TEXTS if record.has_texts else {})}
        kinds |= dict.fromkeys((IDS[1], WAITING_IDS[1]), "int64") if is_delta else {}
        shapes = {slot: [-1] for slot in kinds} | {"weight": [-1, record.embedding_dim]}
        shapes |= dict(zip(UNKNOWN, ([1, record.embedding_dim], [1]), strict=True))
        for slot, shape in shapes.items():
            expected[name_of(table, slot)] = shape, kinds.get(slot, "float32")
    return expected


def _check_tensor(file: ShardFile, name: str, wanted: list[int], dtype: str) -> None:
    """Refuse a tensor that is not of this type, or whose rows are not rows of this shape."""
    shape, begin, kind = file.shapes[name], file.begins[name], file.dtype(name)
    fits = dtype == kind and len(shape) == len(wanted) and shape[1:] == wanted[1:]
    if dtype != ANY and not (fits and all(map(_ends_in, begin, shape, wanted))):
        raise UserError(
            f"{file.path} does not fit its manifest: it has {kind} {shape} from {begin} on for "
            f"{printable(name)}, which should be {dtype} {str(wanted).replace('-1', 'n')}."
        )


def _ends_in(begin: int, size: int, most: int) -> bool:
    return most == -1 or begin + size <= most


def _check_rows(file: ShardFile, manifest: Manifest) -> None:
    """Refuse changed rows that are not in their table, or without a row for each: serving writes them."""
    for table, slots in tables_of(manifest).items():
        rows, most = file.tensor(f"tables.{table}.rows"), min(shape[0] for shape, _ in slots.values())
        counts = {file.shapes[f"tables.{table}.{slot}"][0] for slot in slots}
        if counts != {len(rows)} or (len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < most):
            raise UserError(
                f"{file.path} has rows of {table} outside 0 to {most - 1:,}, or tensors of different lengths."
            )
