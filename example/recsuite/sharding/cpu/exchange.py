"""How the ranks exchange rows, through gloo; `shared_exchange.py` is the faster way within one machine.

A step of the tables makes three exchanges: keys to the ranks that own their rows, rows back, and gradients to
the owners. Each waits in two halves, so that work can lie between sending and receiving.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist


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
