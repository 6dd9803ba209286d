"""Exchanges of rows between ranks: through gloo, or within one machine through shared memory.

A step of the tables makes three exchanges: keys to the ranks that own their rows, rows back, and gradients to
the owners. Each has two halves, so that other work can run between sending and receiving.

Between processes of one machine gloo uses the kernel's network, with copies on both sides and a second
thread, and a rank waits until that thread gets a core. With shared memory a rank writes its rows once into
its own buffer, and the others read them in place:

    buffer = one sparse file           written by its rank alone, read by the others
      channel = one kind of message    "counts", "keys", "rows", "gradients", "dense"
        slot 0 | slot 1 | slot 2       used in rotation, one for each step
          data ... | header            the header is written last: it publishes the data

A header holds the sequence number of the slot's message and, for each rank, the index of its first row. A
reader waits until it sees the sequence number of its own step.
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
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from typing_extensions import override

from recsuite.errors import LostPeerError
from recsuite.runtime.process import all_gather_object

# Waits for tensors under way, and returns them.
Wait = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class OutgoingMessage:
    """A message that this rank fills and sends: rows, and in shared memory their slot and sequence number."""

    rows: torch.Tensor
    slot: int = 0
    sequence: int = 0


class Exchange:
    """Exchange of rows through gloo; a single rank keeps its own."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # Number of keys that fit the message to and from each rank. Sender and receiver compute the same
        # sizes, because both have seen the same messages.
        self.capacity_out = [0] * self.world_size
        self.capacity_in = [0] * self.world_size

    def grow(self, rank: int, num_out: int, num_in: int) -> None:
        """Size later messages for as many keys as went to, and came from, another rank."""
        for capacity, count in ((self.capacity_out, num_out), (self.capacity_in, num_in)):
            if count > capacity[rank]:
                # A quarter more, so that slightly more keys do not need a second message.
                capacity[rank] = count + count // 4

    def outgoing(
        self, channel: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> OutgoingMessage:
        """Return memory for the rows that this rank sends in one step; channel: one of `CHANNELS`."""
        return OutgoingMessage(torch.empty(shape, dtype=dtype))

    def send_keys(self, keys: OutgoingMessage, header: torch.Tensor) -> KeyTransfer:
        """Send keys, which are sorted by rank, and a header to each rank. Collective: every rank.

        header: for each rank the index of its first key, and then counts that add up to the number of its
        keys, int64 [ranks, n].
        """
        if self.world_size == 1:
            return KeyTransfer(keys, header)
        return KeyMessages(self, keys, header)

    def exchange_rows(self, outgoing: OutgoingMessage, num_out: list[int], num_in: list[int]) -> Wait:
        """Send rows; return a function that waits for the received rows, sorted by rank. Collective.

        num_out, num_in: rows to and from each rank.
        """
        if self.world_size == 1:
            return lambda: outgoing.rows
        rows = outgoing.rows
        # Both sides know all sizes from the exchange of keys, so rows need no message with their number.
        incoming = rows.new_empty(sum(num_in), *rows.shape[1:])
        work = dist.all_to_all_single(incoming, rows, num_in, num_out, self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return incoming

        return wait

    def add_up(self, numbers: torch.Tensor) -> Wait:
        """Sum a tensor, float32 [n], over the ranks, in the order of the ranks. Collective.

        Returns a function that waits for the sum, which is the same to the last bit on every rank and through
        every exchange; it is collective too.
        """
        if self.world_size == 2:
            # A sum of two numbers has one order.
            return add_up_by_torch(numbers, self.group)
        # An all-reduce of gloo adds in an order that depends on the position of a number. So each rank adds
        # up one piece of the tensor, and sends the sums to all others: as many bytes as in an all-reduce.
        sizes = [len(piece) for piece in numbers.tensor_split(self.world_size)]
        mine = [sizes[self.rank]] * self.world_size
        pieces = numbers.new_empty(sum(mine))
        work = dist.all_to_all_single(pieces, numbers, mine, sizes, self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            sums = sum_in_order(pieces.split(mine)).repeat(self.world_size)
            dist.all_to_all_single(numbers, sums, sizes, mine, self.group)
            return numbers

        return wait


def add_up_by_torch(numbers: torch.Tensor, group: Any) -> Wait:
    """Sum a tensor over the ranks in place, in torch's order, which depends on positions. Collective.

    Returns a function that waits for the sum, which is the same on every rank.
    """
    work = dist.all_reduce(numbers, group=group, async_op=True)

    def wait() -> torch.Tensor:
        work.wait()
        return numbers

    return wait


def sum_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum of tensors of one shape, at least one of them, added one after the other.

    From five tensors on, torch.sum adds the last elements of a row in another order than the others, so the
    rounding depends on the position.
    """
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class KeyTransfer:
    """Keys that ranks send each other in one step; this class is for a single rank."""

    def __init__(self, keys: OutgoingMessage, header: torch.Tensor) -> None:
        self.outgoing = keys
        self.header = header

    def counts(self) -> torch.Tensor:
        """Wait for the headers sent to this rank, int64 [ranks, n]; call it before `keys`."""
        return self.header

    def keys(self) -> torch.Tensor:
        """Wait for the received keys, sorted by rank."""
        return self.outgoing.rows


class KeyMessages(KeyTransfer):
    """Keys through gloo, where a message costs more than the few bytes in it.

    So a header and its keys travel in one message, before the receiver knows the number of keys: a message
    has the capacity that earlier steps suggest, and further keys follow in a second one.
    """

    def __init__(self, exchange: Exchange, keys: OutgoingMessage, header: torch.Tensor) -> None:
        super().__init__(keys, header)
        self.exchange = exchange
        self.ours = keys.rows.split(header[:, 1:].sum(1).tolist())
        # Copies: the capacities of this message stay valid until it has come, even if the exchange changes
        # its own.
        self.capacity_out, self.capacity_in = exchange.capacity_out.copy(), exchange.capacity_in.copy()
        width = header.size(1)
        sizes_out = [width + capacity for capacity in self.capacity_out]
        sizes_in = [width + capacity for capacity in self.capacity_in]
        # Zeros, because unused capacity is sent too.
        outgoing, incoming = keys.rows.new_zeros(sum(sizes_out)), keys.rows.new_empty(sum(sizes_in))
        messages = outgoing.split(sizes_out)
        for message, head, part, capacity in zip(messages, header, self.ours, self.capacity_out, strict=True):
            message[:width] = head
            message[width:][: len(part)] = part[:capacity]
        self.messages = incoming.split(sizes_in)
        self.work = [
            dist.all_to_all_single(incoming, outgoing, sizes_in, sizes_out, exchange.group, async_op=True)
        ]

    def counts(self) -> torch.Tensor:
        """Return the counts as in `KeyTransfer`; send the keys that did not fit."""
        self.work.pop().wait()
        width = self.header.size(1)
        self.header = torch.stack([message[:width] for message in self.messages]).long()
        counts = self.header[:, 1:].sum(1).tolist()
        self.parts: list[torch.Tensor] = []
        for rank, (message, count) in enumerate(zip(self.messages, counts, strict=True)):
            # A rank's own keys are not sent: its capacity for itself stays 0.
            if rank == self.exchange.rank:
                self.parts.append(self.ours[rank])
            else:
                self.parts += [message[width:][:count], self._exchange_rest(rank, count)]
                self.exchange.grow(rank, len(self.ours[rank]), count)
        return self.header

    def _exchange_rest(self, rank: int, count: int) -> torch.Tensor:
        """Send and receive the keys that did not fit; the returned tensor is filled when the work is done."""
        group = self.exchange.group
        left = self.ours[rank][self.capacity_out[rank] :]
        rest = self.ours[rank].new_empty(max(0, count - self.capacity_in[rank]))
        # Only between these two ranks; the others do not know of the second message. Both compute it from
        # counts and capacities that they share, so neither waits for a message that is not sent.
        if len(left):
            self.work.append(dist.isend(left, group=group, group_dst=rank))
        if len(rest):
            self.work.append(dist.irecv(rest, group=group, group_src=rank))
        return rest

    @override
    def keys(self) -> torch.Tensor:
        for work in self.work:
            work.wait()
        return torch.cat(self.parts)


def starts_of(counts: Sequence[int]) -> list[int]:
    """Return the start of each of several parts in a row, by their numbers of rows."""
    return [0, *accumulate(counts)][:-1]


CHANNELS = ("counts", "keys", "rows", "gradients", "dense")
# Three, because a rank writes keys while another one may still read those of the two steps before: TorchRec's
# pipeline works so far ahead. No lock is needed: before a rank reuses a slot, all ranks have taken part in an
# exchange that they begin only after they have read the slot.
SLOTS = 3
# Virtual, like the whole file: more than a step needs. A sparse file takes only the memory that is written.
SLOT_BYTES = 2**33
BUFFER_BYTES = len(CHANNELS) * SLOTS * SLOT_BYTES
# At the end of a slot, int64: the sequence number, and an index for each of at most 8,191 ranks.
HEADER_BYTES = 2**16


class BufferOwner(NamedTuple):
    """Description of a rank's buffer for the others: path and name of its file, and the rank's process."""

    path: str
    name: str
    pid: int


def slot_number(channel: str, sequence: int) -> int:
    """Return the slot of a message in a buffer, by its channel and its sequence number."""
    return CHANNELS.index(channel) * SLOTS + sequence % SLOTS


def header_of(buffer: torch.Tensor, slot: int) -> np.ndarray:
    """Return the header of a slot, int64 [1 + ranks or more], as a view of the memory."""
    end = (slot + 1) * SLOT_BYTES
    return buffer[end - HEADER_BYTES : end].view(torch.int64).numpy()


def data_of(buffer: torch.Tensor, slot: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return the data of a slot as a tensor, a view of the memory.

    Raises:
        ValueError: when a slot is too small for it.
    """
    first, size = slot * SLOT_BYTES, shape.numel() * dtype.itemsize
    if size > SLOT_BYTES - HEADER_BYTES:
        raise ValueError(f"a message of {size} bytes exceeds the {SLOT_BYTES - HEADER_BYTES} of a slot")
    return buffer[first : first + size].view(dtype).view(shape)


def map_buffers(group: Any) -> tuple[list[torch.Tensor | None], list[int], list[BufferOwner]]:
    """Make the buffer of this rank, and map those of all ranks. Collective: every rank.

    Returns rank to buffer, None unless this rank and the other one have mapped each other's; for each rank
    the number of its buffers, 0 for one without its own; and the ranks' descriptions.
    """
    # Random: two containers may have the same process numbers, and then the same path exists in both. Only
    # this name tells the right file.
    name = f"exchange-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        mine = BufferOwner(_make_file(name, stack), name, os.getpid())
        peers: list[BufferOwner] = all_gather_object(lambda: mine, group)
        buffers = [map_file(peer.path, peer.name) for peer in peers]
        # The file descriptors close here, after all ranks have mapped the files: a mapping keeps its file.
        # One number for each pair: a rank that got the whole table would get the square of the ranks.
        mapped = torch.tensor([buffer is not None for buffer in buffers], dtype=torch.int64)
        by_others = torch.empty_like(mapped)
        dist.all_to_all_single(by_others, mapped, group=group)
    # In both directions, because each of the two reads from the other.
    pairs = (mapped * by_others).tolist()
    # 0 for a rank that could not make its own buffer.
    counts = all_gather_object(lambda: pairs[dist.get_rank(group)] * sum(pairs), group)
    return [buffer if pair else None for buffer, pair in zip(buffers, pairs, strict=True)], counts, peers


def _make_file(name: str, stack: contextlib.ExitStack) -> str:
    """Return the path of the file for this rank's buffer until the stack ends; "" if it cannot be made."""
    try:
        # An anonymous file, because /dev/shm may be small, and no file remains when a rank is killed.
        file = os.memfd_create(name)
        stack.callback(os.close, file)
        os.ftruncate(file, BUFFER_BYTES)
    except OSError:
        return ""
    return f"/proc/{os.getpid()}/fd/{file}"


def map_file(path: str, name: str) -> torch.Tensor | None:
    """Return a rank's buffer, uint8 [BUFFER_BYTES]; None if this rank cannot map it."""
    try:
        # On another machine, or in another container, the same path may be another file.
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            return None
        # Through /proc: this needs neither a file with a name nor a socket. The kernel requires the same
        # rights as for debugging that process; without them, ranks use gloo.
        return torch.from_file(path, shared=True, size=BUFFER_BYTES, dtype=torch.uint8)
    except (OSError, RuntimeError):
        return None


def watch_process(pid: int) -> select.poll | None:
    """Return an object that polls for the end of a process; None if the system has none."""
    try:
        # A descriptor stays that of this process. A process number may be reused after the process has ended.
        descriptor = os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
    watched = select.poll()
    watched.register(descriptor, select.POLLIN)
    return watched


# A waiting rank polls without a pause for this long, which covers most waits; then it sleeps between polls.
SPIN_SECONDS, NAP_SECONDS = 0.002, 0.0002


class SharedExchange(Exchange):
    """Exchange of rows through buffers that all ranks have mapped.

    buffers: rank to buffer, None for one that this rank has not mapped; timeout: seconds to wait for a rank;
    pids: the process of each rank, where it is known.
    """

    def __init__(
        self, group: Any, buffers: Sequence[torch.Tensor | None], timeout: float, pids: Sequence[int] = ()
    ) -> None:
        super().__init__(group)
        self.buffers = {rank: buffer for rank, buffer in enumerate(buffers) if buffer is not None}
        self.timeout = timeout
        self.processes = {rank: watch_process(pid) for rank, pid in enumerate(pids) if rank in self.buffers}
        # Each rank counts for itself. Every rank takes part in every exchange, so all counts are equal, and a
        # message is addressed by its channel and its number alone.
        self.sequences = dict.fromkeys(CHANNELS, 0)
        slots = range(len(CHANNELS) * SLOTS)
        # Views are made once: a waiting rank reads them thousands of times.
        self.headers = {
            rank: [header_of(buffer, slot) for slot in slots] for rank, buffer in self.buffers.items()
        }

    def outgoing(
        self, channel: str, shape: Sequence[int], dtype: torch.dtype = torch.float32
    ) -> OutgoingMessage:
        """Return the next slot of the channel, in the buffer of this rank."""
        self.sequences[channel] += 1
        sequence = self.sequences[channel]
        slot = slot_number(channel, sequence)
        return OutgoingMessage(
            data_of(self.buffers[self.rank], slot, torch.Size(shape), dtype), slot, sequence
        )

    @override
    def send_keys(self, keys: OutgoingMessage, header: torch.Tensor) -> KeyTransfer:
        return SharedKeys(self, keys, header)

    @override
    def exchange_rows(self, outgoing: OutgoingMessage, num_out: list[int], num_in: list[int]) -> Wait:
        self._publish(outgoing, num_out)
        return lambda: self.received(outgoing, self._starts(outgoing), num_in)

    def received(self, outgoing: OutgoingMessage, starts: Sequence[int], num_in: list[int]) -> torch.Tensor:
        """Return the rows that all ranks have published. starts: of each rank the index of its first row."""
        of_ranks = zip(range(self.world_size), starts, num_in, strict=True)
        # Copied to this rank's own memory: the caller looks up in all rows at once, and may change them in
        # place, which must not change the buffers of others.
        return torch.cat([self._rows_of(rank, outgoing, first, count) for rank, first, count in of_ranks])

    @override
    def add_up(self, numbers: torch.Tensor) -> Wait:
        mine = self.outgoing("dense", numbers.shape)
        mine.rows.copy_(numbers)
        # Every rank takes all numbers of all ranks, from the first one on.
        self._publish(mine, [0] * self.world_size)

        def wait() -> torch.Tensor:
            # Each rank adds up the whole: reading is faster than a second exchange. In place, without a copy
            # of the numbers of all ranks.
            of_ranks = enumerate(self._starts(mine))
            return sum_in_order([self._rows_of(rank, mine, first, len(numbers)) for rank, first in of_ranks])

        return wait

    def _starts(self, outgoing: OutgoingMessage) -> list[int]:
        """Wait until all have published; return the index of this rank's first row in those of each."""
        return [self._wait_for(rank, outgoing) for rank in range(self.world_size)]

    def _publish(self, outgoing: OutgoingMessage, num_out: list[int]) -> None:
        """Publish the rows to the other ranks, with the index of each rank's first row."""
        header = self.headers[self.rank][outgoing.slot]
        header[1 : 1 + self.world_size] = starts_of(num_out)
        # The sequence number last. x86 keeps the order of stores, so a rank that reads it sees the rows too;
        # `open_exchange` does not use shared memory on other processors.
        header[0] = outgoing.sequence

    def _rows_of(self, rank: int, outgoing: OutgoingMessage, first: int, count: int) -> torch.Tensor:
        """Return rows in a rank's buffer, in the same slot and of the same kind as our own outgoing ones."""
        shape = torch.Size((first + count, *outgoing.rows.shape[1:]))
        return data_of(self.buffers[rank], outgoing.slot, shape, outgoing.rows.dtype)[first:]

    def _wait_for(self, rank: int, outgoing: OutgoingMessage) -> int:
        """Wait until a rank has published its rows; return the index of the first one for this rank."""
        header = self.headers[rank][outgoing.slot]
        begin = time.monotonic()
        # Another process writes it; numpy reads the memory each time.
        while header[0] != outgoing.sequence:
            waited = time.monotonic() - begin
            if waited < SPIN_SECONDS:
                # Yields the core: with more ranks than cores the other rank needs it to get here.
                os.sched_yield()
                continue
            # Shared memory has no connection that could break. So a lost rank is found by the timeout, or by
            # the kernel when the process has ended.
            if waited > self.timeout:
                raise LostPeerError(f"timed out: rank {rank} has sent no rows for {self.timeout:.0f} s")
            # Read once more: the rank may have published its rows just before it ended.
            if self._has_ended(rank) and header[0] != outgoing.sequence:
                raise LostPeerError(f"rank {rank} has ended before it sent its rows")
            time.sleep(NAP_SECONDS)
        return int(header[1 + self.rank])

    def _has_ended(self, rank: int) -> bool:
        process = self.processes.get(rank)
        return process is not None and bool(process.poll(0))


class SharedKeys(KeyTransfer):
    """Keys through shared memory: the headers are exchanged as rows of their own channel."""

    def __init__(self, exchange: SharedExchange, keys: OutgoingMessage, header: torch.Tensor) -> None:
        super().__init__(keys, header)
        self.exchange = exchange
        one_each = [1] * exchange.world_size
        # The header has a row for each rank, so an exchange of rows gives each rank its header.
        mine = exchange.outgoing("counts", header.shape, header.dtype)
        mine.rows.copy_(header)
        self.wait = exchange.exchange_rows(mine, one_each, one_each)

    @override
    def counts(self) -> torch.Tensor:
        self.header = self.wait()
        return self.header

    @override
    def keys(self) -> torch.Tensor:
        num_in = self.header[:, 1:].sum(1).tolist()
        # The keys were written before the header, so they need no sequence number of their own.
        return self.exchange.received(self.outgoing, self.header[:, 0].tolist(), num_in)


class MixedExchange(SharedExchange):
    """Rows through shared memory within a machine and gloo between machines; all keys through gloo."""

    @override
    def send_keys(self, keys: OutgoingMessage, header: torch.Tensor) -> KeyTransfer:
        return KeyMessages(self, keys, header)

    @override
    def add_up(self, numbers: torch.Tensor) -> Wait:
        # Also on a rank that has mapped all others: all ranks have to take part in the same collective.
        return Exchange.add_up(self, numbers)

    @override
    def exchange_rows(self, outgoing: OutgoingMessage, num_out: list[int], num_in: list[int]) -> Wait:
        self._publish(outgoing, num_out)
        far_out = [0 if rank in self.buffers else count for rank, count in enumerate(num_out)]
        far_in = [0 if rank in self.buffers else count for rank, count in enumerate(num_in)]
        parts = zip(outgoing.rows.split(num_out), far_out, strict=True)
        leaving = torch.cat([outgoing.rows[:0], *(part for part, count in parts if count)])
        arriving = leaving.new_empty(sum(far_in), *leaving.shape[1:])
        # Ranks of this machine take part with no data: a collective needs all ranks of its group.
        work = dist.all_to_all_single(arriving, leaving, far_in, far_out, self.group, async_op=True)

        def wait() -> torch.Tensor:
            # gloo first: its wait sleeps, and the ranks of this machine can use the core.
            work.wait()
            parts = list(arriving.split(far_in))
            for rank in self.buffers:
                parts[rank] = self._rows_of(rank, outgoing, self._wait_for(rank, outgoing), num_in[rank])
            return torch.cat(parts)

        return wait


def open_exchange(group: Any, timeout: float) -> Exchange:
    """Return the fastest exchange that the ranks of a group can use. Collective: every rank.

    Shared memory between ranks that can map each other's buffers: those of one machine, unless they are in
    different containers. gloo between others. timeout: seconds to wait for a rank.
    """
    # On other processors a core may see the sequence number before the rows that were written earlier.
    keeps_order_of_stores = platform.machine() in ("x86_64", "AMD64")
    if dist.get_world_size(group) == 1 or not keeps_order_of_stores or not hasattr(os, "memfd_create"):
        return Exchange(group)
    buffers, counts, peers = map_buffers(group)
    # All ranks decide from the same numbers, and so alike: exchanges of different kinds would wait for each
    # other. If one rank could not make its own buffer, all use gloo.
    if min(counts) == 0 or max(counts) == 1:
        return Exchange(group)
    # Both sides could open the same /proc path, so a process has the same number on both sides.
    pids = [peer.pid for peer in peers]
    kind = SharedExchange if min(counts) == len(peers) else MixedExchange
    return kind(group, buffers, timeout, pids)
