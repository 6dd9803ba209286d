"""How the ranks give each other rows: not at all, through memory that they share, or through gloo.

gloo sends what goes to another process of the machine through the kernel's network, with copies on both sides
and a second thread. Ranks of one machine read each other's rows in place instead, and use gloo to tell when
they are there; so a rank that is gone, or slow, is found out as everywhere else. A box is a sparse anonymous
file: it takes the memory that was written to, and /dev/shm may be small.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

ROOMS = ("keys", "rows", "gradients")
# A room of a box has places that are used in turns: a rank writes keys while another one may still read those
# of the two steps before (TorchRec's pipeline asks so far ahead). When it comes to a place again, all ranks
# have since taken part in an exchange that they begin after they have read what lay there.
PLACES = 3
# Virtual, like the whole file: more than a step moves.
BYTES_OF_A_PLACE = 2**33
SIZE = len(ROOMS) * PLACES * BYTES_OF_A_PLACE


@dataclass(frozen=True)
class Outgoing:
    """What is to be filled and goes out: rows, and where they lie in the box of this rank."""

    rows: torch.Tensor
    place: int = 0


class Exchange:
    """The ranks' rows by gloo; a single rank keeps its own."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world_size = dist.get_world_size(group)

    def outgoing(self, room: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Outgoing:
        """Room for rows to send, for one step; room: which of `ROOMS`."""
        return Outgoing(torch.empty(shape, dtype=dtype))

    def swap_counts(self, outgoing: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Give row r, of [ranks, n], to rank r, and the work to wait for. Collective: every rank."""
        if self.world_size == 1:
            return outgoing, Done()
        incoming = torch.empty_like(outgoing)
        return incoming, dist.all_to_all_single(incoming, outgoing, group=self.group, async_op=True)

    def swap(
        self, outgoing: Outgoing, go: list[int], come: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """What waits for the rows that come, by rank; go, come: how many to and from each rank. Collective.

        starts: which of its rows is the first that comes from each rank, where that is known already, since
        it was told after the rows had been filled in.
        """
        if self.world_size == 1:
            return lambda: outgoing.rows
        rows = outgoing.rows
        incoming = rows.new_empty(sum(come), *rows.shape[1:])
        work = dist.all_to_all_single(incoming, rows, come, go, self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return incoming

        return wait


class SharedExchange(Exchange):
    """The ranks' rows through boxes that all of them have mapped."""

    def __init__(self, group: Any, boxes: list[torch.Tensor]) -> None:
        super().__init__(group)
        self.boxes = boxes
        self.mine = boxes[dist.get_rank(group)]
        self.turns = dict.fromkeys(ROOMS, 0)

    def outgoing(self, room: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Outgoing:
        """A place in the box of this rank."""
        turn = self.turns[room]
        self.turns[room] = (turn + 1) % PLACES
        place = ROOMS.index(room) * PLACES + turn
        return Outgoing(_view(self.mine, place, torch.Size(shape), dtype), place)

    def swap(
        self, outgoing: Outgoing, go: list[int], come: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """As that of `Exchange`."""
        work: Any = Done()
        told = torch.empty(0)
        if starts is None:
            told, work = self.swap_counts(torch.tensor(starts_of(go)).unsqueeze(1))

        def wait() -> torch.Tensor:
            work.wait()
            rows = outgoing.rows
            firsts = told.flatten().tolist() if starts is None else starts
            parts = []
            for box, first, count in zip(self.boxes, firsts, come, strict=True):
                shape = torch.Size((first + count, *rows.shape[1:]))
                parts.append(_view(box, outgoing.place, shape, rows.dtype)[first:])
            return torch.cat(parts)

        return wait


class Done:
    """Work that needs nobody else."""

    def wait(self) -> None:
        """Return at once."""


def starts_of(counts: Sequence[int]) -> list[int]:
    """Where parts of so many rows begin that lie one after the other."""
    return [0, *accumulate(counts)][:-1]


def _view(box: torch.Tensor, place: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    first, size = place * BYTES_OF_A_PLACE, shape.numel() * dtype.itemsize
    if size > BYTES_OF_A_PLACE:
        raise ValueError(f"a step moves {size} bytes at once, and a place takes {BYTES_OF_A_PLACE}")
    return box[first : first + size].view(dtype).view(shape)


def open_exchange(group: Any) -> Exchange:
    """Through shared memory where all ranks of a group can map each other's, which those of one machine can,
    unless they are in different containers. Collective: every rank.
    """
    if dist.get_world_size(group) == 1 or not hasattr(os, "memfd_create"):
        return Exchange(group)
    name = f"exchange-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        everyones = _gathered((_make_file(name, stack), name), group)
        boxes = [box for path, name in everyones if (box := _mapped(path, name)) is not None]
        # The maps keep the files, once all ranks have them.
        is_complete = all(_gathered(len(boxes) == len(everyones), group))
    return SharedExchange(group, boxes) if is_complete else Exchange(group)


def _make_file(name: str, stack: contextlib.ExitStack) -> str:
    """The path of a file for the box of this rank, until the stack ends; of none where there can be none."""
    try:
        file = os.memfd_create(name)
        stack.callback(os.close, file)
        os.ftruncate(file, SIZE)
    except OSError:
        return ""
    return f"/proc/{os.getpid()}/fd/{file}"


def _mapped(path: str, name: str) -> torch.Tensor | None:
    """A rank's box; None where this rank cannot have it."""
    try:
        # Elsewhere the same path is something else.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return None
        return torch.from_file(path, shared=True, size=SIZE, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None


def _gathered(value: Any, group: Any) -> list[Any]:
    everyones: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, value, group=group)
    return everyones
