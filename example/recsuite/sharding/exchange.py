"""How the ranks give each other rows: not at all, through memory that they share, through gloo, or both.

gloo sends what goes to another process of the machine through the kernel's network, with copies on both sides
and a second thread, and a rank waits for that thread to get a core. Ranks of one machine read each other's
rows in place instead, and see by a number beside them when they are there. A box is a sparse anonymous file:
it takes the memory that was written to, and /dev/shm may be small.
"""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from recsuite.errors import LostPeerError
from recsuite.runtime.process import all_gather_object

ROOMS = ("counts", "keys", "rows", "gradients")
# A room of a box has places that are used in turns: a rank writes keys while another one may still read those
# of the two steps before (TorchRec's pipeline asks so far ahead). When it comes to a place again, all ranks
# have since taken part in an exchange that they begin after they have read what lay there.
PLACES = 3
# Virtual, like the whole file: more than a step moves.
BYTES_OF_A_PLACE = 2**33
SIZE = len(ROOMS) * PLACES * BYTES_OF_A_PLACE
# At the end of a place, int64: the turn of what lies there, and where it begins for each rank.
SIGN_BYTES = 2**16
# A rank that waits looks without a pause for so long, which is most waits, and then from time to time.
SPIN_SECONDS, NAP_SECONDS = 0.002, 0.0002


@dataclass(frozen=True)
class Outgoing:
    """What is to be filled and goes out: rows, where they lie in the box of this rank, and in which turn."""

    rows: torch.Tensor
    place: int = 0
    turn: int = 0


class Exchange:
    """The ranks' rows by gloo; a single rank keeps its own."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # How many keys a message to, and from, each rank takes. Two ranks agree, because both have seen the
        # same messages when they make the next one.
        self.most_out = [0] * self.world_size
        self.most_in = [0] * self.world_size

    def expect(self, rank: int, out: int, came: int) -> None:
        """Make room in later messages for as many keys as went to, and came from, another rank."""
        for most, count in ((self.most_out, out), (self.most_in, came)):
            if count > most[rank]:
                most[rank] = count + count // 4

    def outgoing(self, room: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Outgoing:
        """Room for rows to send, for one step; room: which of `ROOMS`."""
        return Outgoing(torch.empty(shape, dtype=dtype))

    def send_keys(self, keys: Outgoing, told: torch.Tensor) -> KeysOnTheWay:
        """Send keys, which lie rank after rank, and what each rank is told of its own. Collective.

        told: for each rank the place of its first key, and then counts that add up to the number of its keys,
        int64 [ranks, n].
        """
        if self.world_size == 1:
            return KeysOnTheWay(keys, told)
        return KeyMessages(self, keys, told)

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
    """The ranks' rows through boxes that all of them have mapped.

    boxes: rank after rank, each None that this rank has not mapped; timeout: seconds to wait for a rank;
    pids: the process of each, where it is known.
    """

    def __init__(
        self, group: Any, boxes: Sequence[torch.Tensor | None], timeout: float, pids: Sequence[int] = ()
    ) -> None:
        super().__init__(group)
        self.near = {rank: box for rank, box in enumerate(boxes) if box is not None}
        self.timeout = timeout
        self.ends = {rank: _end_of(pid) for rank, pid in enumerate(pids) if rank in self.near}
        self.turns = dict.fromkeys(ROOMS, 0)
        places = range(len(ROOMS) * PLACES)
        self.signs = {rank: [_sign(box, place) for place in places] for rank, box in self.near.items()}

    def outgoing(self, room: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Outgoing:
        """A place in the box of this rank."""
        self.turns[room] += 1
        place = ROOMS.index(room) * PLACES + self.turns[room] % PLACES
        rows = _view(self.near[self.rank], place, torch.Size(shape), dtype)
        return Outgoing(rows, place, self.turns[room])

    def send_keys(self, keys: Outgoing, told: torch.Tensor) -> KeysOnTheWay:
        """As that of `Exchange`."""
        return SharedKeys(self, keys, told)

    def swap(
        self, outgoing: Outgoing, go: list[int], come: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """As that of `Exchange`."""
        if starts is None:
            self._show(outgoing, go)

        def wait() -> torch.Tensor:
            firsts = starts or [self._start_of(rank, outgoing) for rank in range(self.world_size)]
            of_ranks = zip(range(self.world_size), firsts, come, strict=True)
            return torch.cat([self._rows_of(rank, outgoing, first, count) for rank, first, count in of_ranks])

        return wait

    def _show(self, outgoing: Outgoing, go: list[int]) -> None:
        """Say that rows are there, and where they begin for each rank."""
        sign = self.signs[self.rank][outgoing.place]
        sign[1 : 1 + self.world_size] = starts_of(go)
        # Last: who reads it reads the rest after it.
        sign[0] = outgoing.turn

    def _rows_of(self, rank: int, outgoing: Outgoing, first: int, count: int) -> torch.Tensor:
        """Rows in the box of a rank that lie where, and are such as, our own outgoing ones."""
        shape = torch.Size((first + count, *outgoing.rows.shape[1:]))
        return _view(self.near[rank], outgoing.place, shape, outgoing.rows.dtype)[first:]

    def _start_of(self, rank: int, outgoing: Outgoing) -> int:
        """Wait until a rank has put its rows of this turn into its box; which of them is the first for us."""
        sign = self.signs[rank][outgoing.place]
        begin = time.monotonic()
        while sign[0] != outgoing.turn:
            waited = time.monotonic() - begin
            if waited < SPIN_SECONDS:
                os.sched_yield()
                continue
            if waited > self.timeout:
                raise LostPeerError(f"timed out: rank {rank} has sent no rows for {self.timeout:.0f} s")
            # What it had sent before it ended is there.
            if self._is_gone(rank) and sign[0] != outgoing.turn:
                raise LostPeerError(f"rank {rank} has ended, and its rows are missing")
            time.sleep(NAP_SECONDS)
        return int(sign[1 + self.rank])

    def _is_gone(self, rank: int) -> bool:
        end = self.ends.get(rank)
        return end is not None and bool(end.poll(0))


class MixedExchange(SharedExchange):
    """Rows through boxes among the ranks of a machine, and by gloo to those of others; keys all by gloo."""

    def send_keys(self, keys: Outgoing, told: torch.Tensor) -> KeysOnTheWay:
        """As that of `Exchange`."""
        return KeyMessages(self, keys, told)

    def swap(
        self, outgoing: Outgoing, go: list[int], come: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """As that of `Exchange`."""
        self._show(outgoing, go)
        far_go, far_come = (
            [0 if r in self.near else n for r, n in enumerate(counts)] for counts in (go, come)
        )
        parts = zip(outgoing.rows.split(go), far_go, strict=True)
        leaving = torch.cat([outgoing.rows[:0], *(part for part, count in parts if count)])
        arriving = leaving.new_empty(sum(far_come), *leaving.shape[1:])
        work = dist.all_to_all_single(arriving, leaving, far_come, far_go, self.group, async_op=True)

        def wait() -> torch.Tensor:
            # First, since it sleeps.
            work.wait()
            parts = list(arriving.split(far_come))
            for rank in self.near:
                parts[rank] = self._rows_of(rank, outgoing, self._start_of(rank, outgoing), come[rank])
            return torch.cat(parts)

        return wait


class KeysOnTheWay:
    """Keys that ranks send each other in one step; those of a single rank are there."""

    def __init__(self, keys: Outgoing, told: torch.Tensor) -> None:
        self.outgoing = keys
        self.told = told

    def counts(self) -> torch.Tensor:
        """Wait for what each rank has told this one, int64 [ranks, n]; to be called before `keys`."""
        return self.told

    def keys(self) -> torch.Tensor:
        """Wait for the keys that come, by rank."""
        return self.outgoing.rows


class SharedKeys(KeysOnTheWay):
    """Keys in boxes; where they lie is told in another place of the boxes."""

    def __init__(self, exchange: SharedExchange, keys: Outgoing, told: torch.Tensor) -> None:
        super().__init__(keys, told)
        self.exchange = exchange
        one_each = [1] * exchange.world_size
        mine = exchange.outgoing("counts", told.shape, told.dtype)
        mine.rows.copy_(told)
        self.wait = exchange.swap(mine, one_each, one_each)

    def counts(self) -> torch.Tensor:
        """As that of `KeysOnTheWay`."""
        self.told = self.wait()
        return self.told

    def keys(self) -> torch.Tensor:
        """As that of `KeysOnTheWay`."""
        come = self.told[:, 1:].sum(1).tolist()
        return self.exchange.swap(self.outgoing, [], come, self.told[:, 0].tolist())()


class KeyMessages(KeysOnTheWay):
    """Keys through gloo, where a message costs more than the little that is in it.

    Each rank gets one: what it is told, and its keys. Nobody knows yet how many there are, so a message takes
    a quarter more than there were at most so far, and what it does not take follows in a second one.
    """

    def __init__(self, exchange: Exchange, keys: Outgoing, told: torch.Tensor) -> None:
        super().__init__(keys, told)
        self.exchange = exchange
        self.ours = keys.rows.split(told[:, 1:].sum(1).tolist())
        self.most_out, self.most_in = exchange.most_out.copy(), exchange.most_in.copy()
        sizes_out, sizes_in = (
            [told.size(1) + most for most in counts] for counts in (self.most_out, self.most_in)
        )
        outgoing, incoming = keys.rows.new_zeros(sum(sizes_out)), keys.rows.new_empty(sum(sizes_in))
        for message, head, part, most in zip(
            outgoing.split(sizes_out), told, self.ours, self.most_out, strict=True
        ):
            message[: len(head)] = head
            message[len(head) :][: len(part)] = part[:most]
        self.messages = incoming.split(sizes_in)
        self.work = [
            dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, exchange.group, async_op=True)
        ]

    def counts(self) -> torch.Tensor:
        """As that of `KeysOnTheWay`; keys that are left over go out."""
        self.work.pop().wait()
        width = self.told.size(1)
        self.told = torch.stack([message[:width] for message in self.messages]).long()
        counts, group = self.told[:, 1:].sum(1).tolist(), self.exchange.group
        self.parts = []
        for rank, (message, count) in enumerate(zip(self.messages, counts, strict=True)):
            if rank == self.exchange.rank:
                self.parts.append(self.ours[rank])
                continue
            left, missing = self.ours[rank][self.most_out[rank] :], max(0, count - self.most_in[rank])
            rest = message.new_empty(missing)
            if len(left):
                self.work.append(dist.isend(left, group=group, group_dst=rank))
            if missing:
                self.work.append(dist.irecv(rest, group=group, group_src=rank))
            self.parts += [message[width:][:count], rest]
            self.exchange.expect(rank, len(self.ours[rank]), count)
        return self.told

    def keys(self) -> torch.Tensor:
        """As that of `KeysOnTheWay`."""
        for work in self.work:
            work.wait()
        return torch.cat(self.parts)


def starts_of(counts: Sequence[int]) -> list[int]:
    """Where parts of so many rows begin that lie one after the other."""
    return [0, *accumulate(counts)][:-1]


def _end_of(pid: int) -> select.poll | None:
    """What tells, when it is polled, that a process has ended; None where the system cannot."""
    try:
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    end = select.poll()
    end.register(descriptor, select.POLLIN)
    return end


def _sign(box: torch.Tensor, place: int) -> np.ndarray:
    end = (place + 1) * BYTES_OF_A_PLACE
    sign: np.ndarray = box[end - SIGN_BYTES : end].view(torch.int64).numpy()
    return sign


def _view(box: torch.Tensor, place: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    first, size = place * BYTES_OF_A_PLACE, shape.numel() * dtype.itemsize
    if size > BYTES_OF_A_PLACE - SIGN_BYTES:
        room = BYTES_OF_A_PLACE - SIGN_BYTES
        raise ValueError(f"a step moves {size} bytes at once, and a place takes {room}")
    return box[first : first + size].view(dtype).view(shape)


def open_exchange(group: Any, timeout: float) -> Exchange:
    """Through shared memory among ranks that can map each other's, which those of one machine can unless they
    are in different containers; by gloo among others. Collective: every rank.

    timeout: seconds to wait for a rank.
    """
    # Elsewhere a core may see the number before the rows.
    in_order = platform.machine() in ("x86_64", "AMD64")
    if dist.get_world_size(group) == 1 or not in_order or not hasattr(os, "memfd_create"):
        return Exchange(group)
    name, rank = f"exchange-{secrets.token_hex(8)}", dist.get_rank(group)
    with contextlib.ExitStack() as stack:
        everyones = all_gather_object(lambda: (_make_file(name, stack), name, os.getpid()), group)
        boxes = [_mapped(path, name) for path, name, _ in everyones]
        # The maps keep the files, once all ranks have them.
        mapped = all_gather_object(lambda: [box is not None for box in boxes], group)
    ranks = range(len(everyones))
    pairs = {(one, other) for one in ranks for other in ranks if mapped[one][other] and mapped[other][one]}
    alone = {(rank, rank) for rank in ranks}
    if pairs == alone or not alone <= pairs:
        return Exchange(group)
    boxes = [box if (rank, other) in pairs else None for other, box in enumerate(boxes)]
    # The path of a box was the same for both, so a process has the same number for both.
    pids = [pid for *_, pid in everyones]
    kind = SharedExchange if len(pairs) == len(ranks) ** 2 else MixedExchange
    return kind(group, boxes, timeout, pids)


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
