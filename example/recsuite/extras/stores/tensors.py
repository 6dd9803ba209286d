"""Tensors of safetensors files in an object store: only the header and the requested rows are read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from safetensors import SafetensorError

from recsuite.checkpoint.format import TYPES, parsing
from recsuite.files import parsed

# Bytes of a header of safetensors, at most, as in its own reader.
LARGEST_HEADER = 100_000_000
# Read of an object in one request: its first bytes, and parts of a tensor, several at the same time.
HEAD_BYTES, RANGE_BYTES = 2**20, 2**24


class Ranges(Protocol):
    """Object of which ranges can be read, such as an `FsspecPath`."""

    def read_ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return ranges of its bytes."""


class ObjectTensors:
    """Tensors of a safetensors file in an object store, with the methods of `safe_open`.

    Only the first bytes of the file, which hold the header, and the requested rows are read.
    """

    def __init__(self, path: Ranges) -> None:
        self._path = path
        (self._head,) = path.read_ranges([0], [HEAD_BYTES])
        begin = 8 + int.from_bytes(self._head[:8], "little")
        if begin > LARGEST_HEADER:
            raise SafetensorError(f"the header has {begin:,} bytes")
        with parsing(f"the header of {path}"):
            self._tensors: dict[str, Any] = parsed(self._bytes(8, begin))
            self._metadata = self._tensors.pop("__metadata__", None)
        self._begin = begin

    def keys(self) -> Iterable[str]:
        """Return the names of the tensors."""
        return self._tensors.keys()

    def metadata(self) -> dict[str, str] | None:
        """Return the metadata of the file."""
        return self._metadata

    def get_slice(self, name: str) -> ObjectSlice:
        """Return a tensor that is read when it is indexed."""
        return ObjectSlice(self, self._tensors[name])

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a tensor."""
        return self.get_slice(name)[:]

    def read(self, low: int, high: int) -> bytes:
        """Return bytes of the tensors, whose positions count from the end of the header."""
        return self._bytes(self._begin + low, self._begin + high)

    def _bytes(self, low: int, high: int) -> bytes:
        if high <= len(self._head):
            return self._head[low:high]
        begins = range(low, high, RANGE_BYTES)
        ends = [min(begin + RANGE_BYTES, high) for begin in begins]
        content = b"".join(self._path.read_ranges(begins, ends))
        if len(content) != high - low:
            raise SafetensorError(f"{len(content):,} of {high - low:,} bytes are there")
        return content


@dataclass(frozen=True)
class ObjectSlice:
    """Tensor of a file in an object store. entry: of the header."""

    file: ObjectTensors
    entry: dict[str, Any]

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return list(self.entry["shape"])

    def get_dtype(self) -> str:
        """Return the type, as safetensors calls it."""
        return str(self.entry["dtype"])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        shape = self.get_shape()
        low, high = self.entry["data_offsets"]
        if shape:
            first, end, _ = rows.indices(shape[0])
            row = (high - low) // max(1, shape[0])
            low, high = low + first * row, low + max(first, end) * row
            shape[0] = max(0, end - first)
        dtype = getattr(torch, TYPES[self.get_dtype()])
        content = bytearray(self.file.read(low, high))
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.view(shape)
