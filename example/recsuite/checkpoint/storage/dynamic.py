"""Dynamic tables in shard files: names, checks, texts of ids, and the replay of deltas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np
import torch
from safetensors import safe_open

from recsuite.checkpoint.storage.manifest import DynamicRecord, Manifest
from recsuite.errors import UserError, printable
from recsuite.ids import UNKNOWN_ID


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
        which = np.isin(self.ids, ids)
        return Texts(self.ids[which], self.texts[which])

    def with_others(self, others: Texts, table: str) -> Texts:
        """Return these and other texts together.

        Raises:
            UserError: when one id stands for two texts; names both.
        """
        ids = np.concatenate([self.ids, others.ids])
        texts = np.concatenate([self.texts, others.texts])
        order = np.argsort(ids, kind="stable")
        ids, texts = ids[order], texts[order]
        same = ids[1:] == ids[:-1]
        for place in np.flatnonzero(same & (texts[1:] != texts[:-1])):
            one, other = (printable(text.decode("utf-8", "replace")) for text in texts[place : place + 2])
            raise UserError(
                f"{one!r} and {other!r} of {table} have the same id, {ids[place]}; write one otherwise."
            )
        first = np.concatenate([np.ones(len(ids[:1]), bool), ~same])
        return Texts(ids[first], texts[first])


PREFIX = "dynamic."
# Slot to type; each slot has one entry for each of the ids.
ROWS = {"ids": "int64", "weight": "float32", "momentum1": "float32", "seen": "int64", "count": "int32"}
WAITING = {"waiting.ids": "int64", "waiting.count": "int32", "waiting.seen": "int64"}
GONE = ("gone", "waiting.gone")
UNKNOWN = ("unknown.weight", "unknown.momentum1")
TEXTS = {"texts.ids": "int64", "texts.bytes": "uint8", "texts.ends": "int64"}

Slots = dict[str, torch.Tensor]


def name_of(table: str, slot: str) -> str:
    """Return the name of a slot of a dynamic table in a shard file."""
    return f"{PREFIX}{table}.{slot}"


class Header(Protocol):
    """Entry of a tensor in the header of a shard file."""

    @property
    def path(self) -> Path:
        """Path of the file."""
        ...

    @property
    def name(self) -> str:
        """Name of the tensor."""
        ...

    @property
    def shape(self) -> list[int]:
        """Shape of the tensor."""
        ...

    @property
    def dtype(self) -> str:
        """Type of its numbers."""
        ...


Headers = dict[str, tuple[list[int], str]]
Anything = TypeVar("Anything", bound=Header)


def check_dynamic(folder: Path, manifest: Manifest, pieces: Sequence[Anything]) -> list[Anything]:
    """Check the dynamic tables in shard files against the manifest, and their ids; return the other tensors.

    Raises:
        UserError: names the file, and what in it does not fit.
    """
    entries = [entry for entry in manifest.files if entry.name.endswith(".safetensors")]
    headers: dict[Path, Headers] = {folder / entry.name: {} for entry in entries}
    for piece in pieces:
        if piece.name.startswith(PREFIX):
            headers[piece.path][piece.name] = (piece.shape, piece.dtype)
    is_delta = manifest.link is not None
    for path, held in headers.items():
        left = dict(held)
        for table, record in manifest.dynamic.items():
            _check_slots(path, table, record, is_delta, left)
        if left:
            raise UserError(f"{path} does not fit its manifest: it has {min(left)}, which is no part of it.")
    for table in manifest.dynamic:
        homes = [path for path, held in headers.items() if name_of(table, UNKNOWN[0]) in held]
        if len(homes) != 1:
            raise UserError(f"{folder} has the row of unknown ids of {table} {len(homes)} times, not once.")
        _check_ids(folder, table, is_delta, [safe_open(path, framework="pt") for path in headers])
    return [piece for piece in pieces if not piece.name.startswith(PREFIX)]


def _check_slots(path: Path, table: str, record: DynamicRecord, is_delta: bool, left: Headers) -> None:
    """Check the slots of a table in a file against the manifest, and remove them from `left`."""
    found: Headers = {}
    kinds = {**ROWS, **WAITING, **(dict.fromkeys(GONE, "int64") if is_delta else {})}
    kinds |= TEXTS if record.has_texts else {}
    if name_of(table, UNKNOWN[0]) in left:
        kinds |= dict.fromkeys(UNKNOWN, "float32")
    for slot, kind in kinds.items():
        shape, dtype = found[slot] = left.pop(name_of(table, slot), ([], "nothing"))
        dim = [record.embedding_dim] if slot.endswith("weight") else []
        if dtype != kind or len(shape) != 1 + len(dim) or shape[1:] != dim:
            raise UserError(
                f"{path} does not fit its manifest: it has {dtype} {shape} for {name_of(table, slot)}, "
                f"which should be {kind} [n{', ' if dim else ''}{', '.join(map(str, dim))}]."
            )
    of_texts = {"texts.ids": "", "texts.ends": ""} if record.has_texts else {}
    for group in (ROWS, WAITING, of_texts):
        if len({found[slot][0][0] for slot in group}) > 1:
            raise UserError(f"{path} does not fit its manifest: rows of {table} are not all as many.")
    if any(found[slot][0][0] != 1 for slot in UNKNOWN if slot in found):
        raise UserError(f"{path} does not fit its manifest: {table} has not one row for unknown ids.")


def _check_ids(folder: Path, table: str, is_delta: bool, files: Sequence[safe_open]) -> None:
    """Check that ids ascend in each file, and that each is there once."""
    for slots in (("ids", "gone"), ("waiting.ids", "waiting.gone")):
        parts = [
            file.get_tensor(name_of(table, slot))
            for file in files
            for slot in (slots if is_delta else slots[:1])
        ]
        ids = torch.cat(parts).sort().values
        ascend = all(bool((part[1:] > part[:-1]).all()) for part in parts)
        if not ascend or bool((ids[1:] == ids[:-1]).any()) or bool((ids[:1] == UNKNOWN_ID).any()):
            raise UserError(f"{folder} has ids of {table} that do not ascend, or one of them twice.")


@contextlib.contextmanager
def opened(folders: Sequence[Path], manifests: Sequence[Manifest]) -> Iterator[list[list[safe_open]]]:
    """Open the shard files of a chain, checkpoint by checkpoint."""
    with contextlib.ExitStack() as stack:
        yield [
            [
                stack.enter_context(safe_open(folder / entry.name, framework="pt"))
                for entry in manifest.files
                if entry.name.endswith(".safetensors")
            ]
            for folder, manifest in zip(folders, manifests, strict=True)
        ]


def everybody(ids: torch.Tensor) -> torch.Tensor:
    """Return True for every id, bool [n], see `replayed`."""
    return torch.ones_like(ids, dtype=torch.bool)


def replayed(
    files: Sequence[Sequence[safe_open]],
    table: str,
    is_wanted: Callable[[torch.Tensor], torch.Tensor],
    slots: Sequence[str] = (*ROWS, *WAITING),
) -> Iterator[Slots]:
    """Yield the rows of a table after a full checkpoint and its deltas, in parts without common ids.

    files: of each checkpoint of the chain, in order. is_wanted: ids to a mask, bool [n]. slots: those to
    read, of ROWS and WAITING.
    """
    # From the newest checkpoint back: the newest one with an id has its state, and no row is read that a
    # later delta replaces.
    rows, waiting = _Newest(is_wanted, ("ids", "gone")), _Newest(is_wanted, ("waiting.ids", "waiting.gone"))
    for checkpoint in reversed(files):
        for file in checkpoint:
            yield {
                **rows.read(file, table, [slot for slot in slots if slot in ROWS]),
                **waiting.read(file, table, [slot for slot in slots if slot in WAITING]),
            }
        rows.turn()
        waiting.turn()


class _Newest:
    """Reader that takes each id only from the newest checkpoint that has it."""

    def __init__(self, is_wanted: Callable[[torch.Tensor], torch.Tensor], slots: tuple[str, str]) -> None:
        self._is_wanted = is_wanted
        self._slots = slots
        self._known = torch.empty(0, dtype=torch.int64)
        self._new: list[torch.Tensor] = []

    def read(self, file: safe_open, table: str, slots: Sequence[str]) -> Slots:
        """Return the slots of wanted ids in a file that no newer checkpoint has."""
        there, gone = (self._unknown(file, name_of(table, slot)) for slot in self._slots)
        ids, which = there
        self._new += [ids, gone[0]]
        if not len(ids):
            # An empty slice: unwanted rows are not read.
            which = slice(0, 0)
        return {
            slot: file.get_slice(name_of(table, slot))[0:0]
            if isinstance(which, slice)
            else file.get_tensor(name_of(table, slot))[which]
            for slot in slots
        }

    def _unknown(self, file: safe_open, name: str) -> tuple[torch.Tensor, torch.Tensor | slice]:
        # A full checkpoint has no list of ids that left.
        ids = file.get_tensor(name) if name in file.keys() else self._known[:0]  # noqa: SIM118
        which = self._is_wanted(ids) & ~torch.isin(ids, self._known)
        return ids[which], which

    def turn(self) -> None:
        """Continue with the checkpoint before."""
        self._known = torch.cat([self._known, *self._new])
        self._new = []


def unknown_of(files: Sequence[safe_open], table: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the unknown row and its optimizer state, float32 [D] and [], from one checkpoint's files."""
    (file,) = (file for file in files if name_of(table, UNKNOWN[0]) in file.keys())  # noqa: SIM118
    weight, state = (file.get_tensor(name_of(table, slot)) for slot in UNKNOWN)
    return weight[0], state[0]


def with_texts(files: Sequence[safe_open], table: str, known: Texts) -> Texts:
    """Return the texts of ids in files together with the known ones.

    Raises:
        UserError: when they cannot be read, or one id stands for two texts.
    """
    for file in files:
        if name_of(table, "texts.ids") in file.keys():  # noqa: SIM118
            ids, content, ends = (file.get_tensor(name_of(table, slot)).numpy() for slot in TEXTS)
            try:
                known = known.with_others(Texts.of_arrays(ids, content, ends), table)
            except ValueError as error:
                raise UserError(f"The texts of {table} cannot be read ({error}).") from None
    return known
