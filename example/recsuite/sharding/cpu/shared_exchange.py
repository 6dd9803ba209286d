"""How the ranks of one machine exchange rows: they read each other's memory.

gloo sends what goes to another process of the machine through the kernel's network, with copies on both sides
and a second thread, and a rank waits for that thread to get a core. Here a rank writes its rows into its own
buffer once, and the others read them in place; see `shared_memory.py` for what lies where.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from recsuite.errors import LostPeerError
from recsuite.sharding.cpu.exchange import Exchange, KeyMessages, KeyTransfer, Outgoing, starts_of
from recsuite.sharding.cpu.shared_memory import (
    CHANNELS,
    SLOTS,
    data_of,
    header_of,
    map_buffers,
    slot_number,
    watch_process,
)

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
