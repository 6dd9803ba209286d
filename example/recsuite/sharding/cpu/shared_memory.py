"""The memory through which the ranks of one machine exchange rows: a buffer per rank, mapped by all of them.

    buffer = one sparse file           written by its rank alone, read by the others
      channel = one kind of message    "counts", "keys", "rows", "gradients", "dense"
        slot 0 | slot 1 | slot 2       used in rotation, one for each step
          data ... | header            the header is written last: it publishes the data

A header holds the sequence number of what lies in the slot and, for each rank, the index of the first row
that is meant for it. A reader waits until it sees the sequence number of its own step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
from typing import Any, NamedTuple

import numpy as np
import torch

from recsuite.runtime.process import all_gather_object

CHANNELS = ("counts", "keys", "rows", "gradients", "dense")
# Three, because a rank writes keys while another one may still read those of the two steps before: TorchRec's
# pipeline asks so far ahead. No lock is needed. When a rank comes back to a slot, all ranks have since taken
# part in an exchange that they begin only after they have read what lay there.
SLOTS = 3
# Virtual, like the whole file: more than a step moves. A sparse file takes only the memory that is written.
SLOT_BYTES = 2**33
BUFFER_BYTES = len(CHANNELS) * SLOTS * SLOT_BYTES
# At the end of a slot, int64: the sequence number, and an index for each rank, of which there may be 8,191.
HEADER_BYTES = 2**16


class Peer(NamedTuple):
    """What a rank tells the others of its buffer: the path and the name of its file, and its process."""

    path: str
    name: str
    pid: int


def slot_number(channel: str, sequence: int) -> int:
    """The slot of a buffer that a message uses, by its channel and its sequence number."""
    return CHANNELS.index(channel) * SLOTS + sequence % SLOTS


def header_of(buffer: torch.Tensor, slot: int) -> np.ndarray:
    """The header of a slot, int64 [1 + ranks or more], as a view of the memory."""
    end = (slot + 1) * SLOT_BYTES
    header: np.ndarray = buffer[end - HEADER_BYTES : end].view(torch.int64).numpy()
    return header


def data_of(buffer: torch.Tensor, slot: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The data of a slot as a tensor, a view of the memory.

    Raises:
        ValueError: when a slot is too small for it.
    """
    first, size = slot * SLOT_BYTES, shape.numel() * dtype.itemsize
    if size > SLOT_BYTES - HEADER_BYTES:
        raise ValueError(f"a step moves {size} bytes at once, and a slot takes {SLOT_BYTES - HEADER_BYTES}")
    return buffer[first : first + size].view(dtype).view(shape)


def map_buffers(group: Any) -> tuple[list[torch.Tensor | None], list[list[bool]], list[Peer]]:
    """Make the buffer of this rank, and map those of all: rank to buffer, None where this rank cannot have
    it; for each rank, which ones it has mapped; and the ranks. Collective: every rank.
    """
    # Drawn, because two containers may have the same process numbers: a path of one that also exists in the
    # other is told from the right one by this name alone.
    name = f"exchange-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        mine = Peer(_make_file(name, stack), name, os.getpid())
        peers: list[Peer] = all_gather_object(lambda: mine, group)
        buffers = [map_file(peer.path, peer.name) for peer in peers]
        # The file descriptors close here, once all ranks have mapped the files: a mapping keeps its file.
        # Everybody learns who has mapped what, so that all come to the same decision on how to exchange.
        mapped = all_gather_object(lambda: [buffer is not None for buffer in buffers], group)
    return buffers, mapped, peers


def _make_file(name: str, stack: contextlib.ExitStack) -> str:
    """The path of the file for this rank's buffer, valid until the stack ends; "" where none can be made."""
    try:
        # An anonymous file, because /dev/shm may be small, and nothing is left behind when a rank is killed.
        file = os.memfd_create(name)
        stack.callback(os.close, file)
        os.ftruncate(file, BUFFER_BYTES)
    except OSError:
        return ""
    return f"/proc/{os.getpid()}/fd/{file}"


def map_file(path: str, name: str) -> torch.Tensor | None:
    """A rank's buffer, uint8 [BUFFER_BYTES]; None where this rank cannot map it."""
    try:
        # On another machine, or in another container, the same path may be another file.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return None
        # Through /proc, so that neither a file with a name nor a socket is needed to hand it over. The kernel
        # asks for the same rights as for debugging that process; where they are missing, ranks use gloo.
        return torch.from_file(path, shared=True, size=BUFFER_BYTES, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None


def watch_process(pid: int) -> select.poll | None:
    """An object whose `poll` tells that a process has ended; None where the system cannot tell."""
    try:
        # A descriptor stands for this process alone. A number may be given to another process once it has
        # ended.
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    return watched
