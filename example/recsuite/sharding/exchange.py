"""Exchanges of rows between ranks: through gloo, or within one machine through memory that all of them map.

A step of the tables makes three exchanges: keys to the ranks that own their rows, rows back, and gradients to
the owners. Each waits in two halves, so that work can lie between sending and receiving.

gloo sends what goes to another process of the machine through the kernel's network, with copies on both sides
and a second thread, and a rank waits for that thread to get a core. Within one machine a rank writes its rows
into its own buffer once, and the others read them in place:

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

from recsuite.errors import LostPeerError
from recsuite.runtime.process import all_gather_object


@dataclass(frozen=True)
class Outgoing:
    """A message that this rank fills and sends: rows, and in shared memory their slot and sequence number."""

    rows: torch.Tensor
    slot: int = 0
    sequence: int = 0


class Exchange:
    """The ranks' rows through gloo; a single rank keeps its own."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.world_size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        # How many keys fit the message to, and from, each rank. Sender and receiver agree without a word,
        # because both have seen the same messages when they size the next one.
        self.capacity_out = [0] * self.world_size
        self.capacity_in = [0] * self.world_size

    def grow(self, rank: int, num_out: int, num_in: int) -> None:
        """Size later messages for as many keys as went to, and came from, another rank."""
        for capacity, count in ((self.capacity_out, num_out), (self.capacity_in, num_in)):
            if count > capacity[rank]:
                # A quarter more, so that batches of slightly more keys do not need a second message.
                capacity[rank] = count + count // 4

    def outgoing(self, channel: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Outgoing:
        """Memory for the rows that this rank sends in one step; channel: one of `CHANNELS`."""
        return Outgoing(torch.empty(shape, dtype=dtype))

    def send_keys(self, keys: Outgoing, header: torch.Tensor) -> KeyTransfer:
        """Send keys, which are sorted by rank, and a header to each rank. Collective: every rank.

        header: for each rank the index of its first key, and then counts that add up to the number of its
        keys, int64 [ranks, n].
        """
        if self.world_size == 1:
            return KeyTransfer(keys, header)
        return KeyMessages(self, keys, header)

    def swap(
        self, outgoing: Outgoing, num_out: list[int], num_in: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """Send rows; returns a function that waits for the rows that come, sorted by rank. Collective.

        num_out, num_in: rows to and from each rank; starts: for each rank, which of its rows is the first for
        this one, where a header has told that already.
        """
        if self.world_size == 1:
            return lambda: outgoing.rows
        rows = outgoing.rows
        # Both sides know all sizes from the exchange of keys, so rows need no message that announces them.
        incoming = rows.new_empty(sum(num_in), *rows.shape[1:])
        work = dist.all_to_all_single(incoming, rows, num_in, num_out, self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return incoming

        return wait

    def add_up(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Add a tensor, float32 [n], up over the ranks; returns a function that waits for the sum, which is
        the same on every rank to the last bit. Collective.
        """
        # gloo adds up where it lies.
        work = dist.all_reduce(numbers, group=self.group, async_op=True)

        def wait() -> torch.Tensor:
            work.wait()
            return numbers

        return wait


class KeyTransfer:
    """The keys that ranks send each other in one step; this class is for a single rank, which has them."""

    def __init__(self, keys: Outgoing, header: torch.Tensor) -> None:
        self.outgoing = keys
        self.header = header

    def counts(self) -> torch.Tensor:
        """Wait for the headers that the ranks sent to this one, int64 [ranks, n]; call it before `keys`."""
        return self.header

    def keys(self) -> torch.Tensor:
        """Wait for the keys that come, sorted by rank."""
        return self.outgoing.rows


class KeyMessages(KeyTransfer):
    """Keys through gloo, where a message costs more than the few bytes that are in it.

    So a header and its keys travel in one message, although nobody knows yet how many keys there are: a
    message has the capacity that earlier steps suggest, and keys beyond it follow in a second one.
    """

    def __init__(self, exchange: Exchange, keys: Outgoing, header: torch.Tensor) -> None:
        super().__init__(keys, header)
        self.exchange = exchange
        self.ours = keys.rows.split(header[:, 1:].sum(1).tolist())
        # Copies: what this message was sized by counts until it has come, whatever the exchange learns
        # meanwhile.
        self.capacity_out, self.capacity_in = exchange.capacity_out.copy(), exchange.capacity_in.copy()
        width = header.size(1)
        sizes_out, sizes_in = (
            [width + capacity for capacity in capacities]
            for capacities in (self.capacity_out, self.capacity_in)
        )
        # Zeros, because capacity that is not used is sent as well.
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
        """As in `KeyTransfer`; the keys that did not fit are sent here."""
        self.work.pop().wait()
        width = self.header.size(1)
        self.header = torch.stack([message[:width] for message in self.messages]).long()
        counts = self.header[:, 1:].sum(1).tolist()
        self.parts: list[torch.Tensor] = []
        for rank, (message, count) in enumerate(zip(self.messages, counts, strict=True)):
            # A rank's own keys do not travel: its capacity for itself stays 0.
            if rank == self.exchange.rank:
                self.parts.append(self.ours[rank])
            else:
                self.parts += [message[width:][:count], self._exchange_rest(rank, count)]
                self.exchange.grow(rank, len(self.ours[rank]), count)
        return self.header

    def _exchange_rest(self, rank: int, count: int) -> torch.Tensor:
        """Send and receive the keys that did not fit; the tensor is filled when the work is done."""
        group = self.exchange.group
        left = self.ours[rank][self.capacity_out[rank] :]
        rest = self.ours[rank].new_empty(max(0, count - self.capacity_in[rank]))
        # Between these two ranks alone; the others do not learn that there was a second message. Both sides
        # find out from counts and capacities that they have in common, so neither waits for one that is not
        # sent.
        if len(left):
            self.work.append(dist.isend(left, group=group, group_dst=rank))
        if len(rest):
            self.work.append(dist.irecv(rest, group=group, group_src=rank))
        return rest

    def keys(self) -> torch.Tensor:
        """As in `KeyTransfer`."""
        for work in self.work:
            work.wait()
        return torch.cat(self.parts)


def starts_of(counts: Sequence[int]) -> list[int]:
    """Where parts of so many rows begin that lie one after the other."""
    return [0, *accumulate(counts)][:-1]


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


# A waiting rank polls without a pause for this long, which covers most waits, and then sleeps between looks.
SPIN_SECONDS, NAP_SECONDS = 0.002, 0.0002


class SharedExchange(Exchange):
    """The ranks' rows through buffers that all of them have mapped.

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
        # Counted by each rank for itself. Every rank takes part in every exchange, so all count alike, and a
        # message needs no other address than its channel and its number.
        self.sequences = dict.fromkeys(CHANNELS, 0)
        slots = range(len(CHANNELS) * SLOTS)
        # Views that are made once: a waiting rank looks at them thousands of times.
        self.headers = {
            rank: [header_of(buffer, slot) for slot in slots] for rank, buffer in self.buffers.items()
        }

    def outgoing(self, channel: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Outgoing:
        """The next slot of the channel, in the buffer of this rank."""
        self.sequences[channel] += 1
        sequence = self.sequences[channel]
        slot = slot_number(channel, sequence)
        return Outgoing(data_of(self.buffers[self.rank], slot, torch.Size(shape), dtype), slot, sequence)

    def send_keys(self, keys: Outgoing, header: torch.Tensor) -> KeyTransfer:
        """As in `Exchange`."""
        return SharedKeys(self, keys, header)

    def swap(
        self, outgoing: Outgoing, num_out: list[int], num_in: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """As in `Exchange`."""
        if starts is None:
            self._publish(outgoing, num_out)

        def wait() -> torch.Tensor:
            # A rank waits for itself too, which costs one look: its own rows take the same way as those of
            # others.
            firsts = starts or [self._wait_for(rank, outgoing) for rank in range(self.world_size)]
            of_ranks = zip(range(self.world_size), firsts, num_in, strict=True)
            # Joined in memory of this rank's own: whoever takes the rows looks up in all of them at once, and
            # may change them in place, which must not reach into the buffers of others.
            return torch.cat([self._rows_of(rank, outgoing, first, count) for rank, first, count in of_ranks])

        return wait

    def add_up(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As in `Exchange`."""
        mine = self.outgoing("dense", numbers.shape)
        mine.rows.copy_(numbers)
        # Every rank takes all that the others have, from the first number on.
        wait = SharedExchange.swap(self, mine, [0] * self.world_size, [len(numbers)] * self.world_size)
        # In the order of the ranks, on each of them.
        return lambda: wait().view(self.world_size, -1).sum(0)

    def _publish(self, outgoing: Outgoing, num_out: list[int]) -> None:
        """Tell the other ranks that the rows are there, and where those begin that are for each of them."""
        header = self.headers[self.rank][outgoing.slot]
        header[1 : 1 + self.world_size] = starts_of(num_out)
        # The sequence number last. x86 keeps the order of stores, so a rank that reads it sees the rows too;
        # `open_exchange` does not use shared memory on other processors.
        header[0] = outgoing.sequence

    def _rows_of(self, rank: int, outgoing: Outgoing, first: int, count: int) -> torch.Tensor:
        """Rows in a rank's buffer, in the same slot and of the same kind as our own outgoing ones."""
        shape = torch.Size((first + count, *outgoing.rows.shape[1:]))
        return data_of(self.buffers[rank], outgoing.slot, shape, outgoing.rows.dtype)[first:]

    def _wait_for(self, rank: int, outgoing: Outgoing) -> int:
        """Wait until a rank has published its rows of this step; which of them is the first for this rank.

        Raises:
            LostPeerError: when the rank has ended, or took longer than the timeout.
        """
        header = self.headers[rank][outgoing.slot]
        begin = time.monotonic()
        # Another process writes it; numpy reads the memory at each look.
        while header[0] != outgoing.sequence:
            waited = time.monotonic() - begin
            if waited < SPIN_SECONDS:
                # Yields the core: with more ranks than cores the other one needs it to get here.
                os.sched_yield()
                continue
            # Shared memory has no connection that could break. Only time tells that no rows will come, or the
            # kernel, that the process has ended.
            if waited > self.timeout:
                raise LostPeerError(f"timed out: rank {rank} has sent no rows for {self.timeout:.0f} s")
            # Looked at again, for it may have published its rows just before it ended.
            if self._has_ended(rank) and header[0] != outgoing.sequence:
                raise LostPeerError(f"rank {rank} has ended, and its rows are missing")
            time.sleep(NAP_SECONDS)
        return int(header[1 + self.rank])

    def _has_ended(self, rank: int) -> bool:
        process = self.processes.get(rank)
        return process is not None and bool(process.poll(0))


class SharedKeys(KeyTransfer):
    """Keys through shared memory: the headers are exchanged as rows of a channel of their own."""

    def __init__(self, exchange: SharedExchange, keys: Outgoing, header: torch.Tensor) -> None:
        super().__init__(keys, header)
        self.exchange = exchange
        one_each = [1] * exchange.world_size
        # A row for each rank, so the exchange of rows is the exchange of headers: each takes its own row.
        mine = exchange.outgoing("counts", header.shape, header.dtype)
        mine.rows.copy_(header)
        self.wait = exchange.swap(mine, one_each, one_each)

    def counts(self) -> torch.Tensor:
        """As in `KeyTransfer`."""
        self.header = self.wait()
        return self.header

    def keys(self) -> torch.Tensor:
        """As in `KeyTransfer`."""
        num_in = self.header[:, 1:].sum(1).tolist()
        # The keys were written before the header, so they need no sequence number of their own.
        return self.exchange.swap(self.outgoing, [], num_in, self.header[:, 0].tolist())()


class MixedExchange(SharedExchange):
    """Rows through shared memory within a machine and gloo between machines; all keys through gloo."""

    def send_keys(self, keys: Outgoing, header: torch.Tensor) -> KeyTransfer:
        """As in `Exchange`."""
        return KeyMessages(self, keys, header)

    def add_up(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        """As in `Exchange`."""
        # Also by a rank that has mapped all others: all ranks have to take part in the same collective.
        return Exchange.add_up(self, numbers)

    def swap(
        self, outgoing: Outgoing, num_out: list[int], num_in: list[int], starts: list[int] | None = None
    ) -> Callable[[], torch.Tensor]:
        """As in `Exchange`."""
        self._publish(outgoing, num_out)
        far_out, far_in = (
            [0 if rank in self.buffers else count for rank, count in enumerate(counts)]
            for counts in (num_out, num_in)
        )
        parts = zip(outgoing.rows.split(num_out), far_out, strict=True)
        leaving = torch.cat([outgoing.rows[:0], *(part for part, count in parts if count)])
        arriving = leaving.new_empty(sum(far_in), *leaving.shape[1:])
        # Ranks of this machine take part with nothing to send or to receive: a collective needs all of its
        # group.
        work = dist.all_to_all_single(arriving, leaving, far_in, far_out, self.group, async_op=True)

        def wait() -> torch.Tensor:
            # gloo first: its wait sleeps, and the ranks of this machine get the core meanwhile.
            work.wait()
            parts = list(arriving.split(far_in))
            for rank in self.buffers:
                parts[rank] = self._rows_of(rank, outgoing, self._wait_for(rank, outgoing), num_in[rank])
            return torch.cat(parts)

        return wait


def open_exchange(group: Any, timeout: float) -> Exchange:
    """The fastest exchange that the ranks of a group can use. Collective: every rank.

    Shared memory among ranks that can map each other's buffers, which those of one machine can unless they
    are in different containers; gloo among others. timeout: seconds to wait for a rank.
    """
    # Elsewhere a core may see the sequence number before the rows that were written earlier.
    keeps_order_of_stores = platform.machine() in ("x86_64", "AMD64")
    if dist.get_world_size(group) == 1 or not keeps_order_of_stores or not hasattr(os, "memfd_create"):
        return Exchange(group)
    buffers, mapped, peers = map_buffers(group)
    rank, ranks = dist.get_rank(group), range(len(peers))
    # In both directions, because each of the two reads from the other.
    pairs = {(one, other) for one in ranks for other in ranks if mapped[one][other] and mapped[other][one]}
    alone = {(rank, rank) for rank in ranks}
    # All ranks decide from the same table, and so alike: exchanges of different kinds would wait for each
    # other. A rank that could not even make its own buffer has nothing that others could read, so all use
    # gloo.
    if pairs == alone or not alone <= pairs:
        return Exchange(group)
    buffers = [buffer if (rank, other) in pairs else None for other, buffer in enumerate(buffers)]
    # Both sides could open the same /proc path, so a process has the same number for both.
    pids = [peer.pid for peer in peers]
    kind = SharedExchange if len(pairs) == len(ranks) ** 2 else MixedExchange
    return kind(group, buffers, timeout, pids)
