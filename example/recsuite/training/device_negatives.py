"""Negatives of batches that are made on the device: drawn items, and bits of those that users had.

    drawn items      a sample for each step, computed for many steps at once, outside of a captured step
    seen_bits        a search for each pair of an event and a candidate, in the step

A user had an item before an event if the first place of the item in the user's history is before the end of
the history of the event.

B: events of a batch; N: drawn items; S: events of a group, a multiple of 8; C: candidates of an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn.functional import pad

from recsuite.datasets.batches import EventBatches
from recsuite.datasets.batching import bytes_of_bits, keys_of
from recsuite.datasets.schema import HISTORY
from recsuite.training.device_shuffles import permuted

# Items that are drawn at once, and pairs of an event and a candidate that are searched at once: each takes
# some numbers of 64 bits.
DRAWN_AT_ONCE, PAIRS_AT_ONCE = 2**22, 2**24
# Bytes of a place in the histories: its user and item, and the place. While they are sorted there are less
# than eight numbers of 64 bits: two before, two of the result, and on a GPU a little above three of torch.
BYTES_OF_PLACE, BYTES_OF_SORTING = 8 + 4, 8 * 8


class DeviceNegatives:
    """Negatives of the batches of an `EventBatches` of one rank. Copies the columns that they need.

    number: N in training.
    """

    def __init__(self, dataset: EventBatches, device: torch.device) -> None:
        self.dataset, self.device = dataset, device
        most = dataset.model.num_negatives(dataset.num_items)
        self.items = torch.from_numpy(dataset.features.trained_items() if most else np.zeros(0, np.int32))
        self.items = self.items.to(device)
        self.number = min(most, len(self.items))
        size = dataset.batch_size
        self.group_bytes = bytes_of_bits(size, dataset.model.in_batch_negatives)
        self.nothing = torch.zeros(0, dtype=torch.int32, device=device)
        self.marks_seen = marks_seen(dataset)
        # Numbers of a pair are below those of the next user; an item that pads a group is `num_items`.
        self.stride = dataset.num_items + 1
        if self.marks_seen:
            self._find_places()

    def _find_places(self) -> None:
        """Sort the items of all histories: the number of each pair with the user, and the place."""
        column = self.dataset.features.column
        seen = torch.from_numpy(column("seen").copy()).to(self.device)
        offsets = torch.from_numpy(column(f"{HISTORY}_offsets").astype(np.int64)).to(self.device)
        users = torch.arange(len(offsets) - 1, device=self.device)
        pairs = users.repeat_interleave(offsets.diff(), output_size=len(seen)) * self.stride + seen
        # Below 0 are events of the context, which do not count.
        places = (seen >= 0).nonzero().squeeze(1)
        # Leaves their memory to the sort.
        del seen, offsets, users
        pairs = pairs.index_select(0, places)
        pairs, order = pairs.sort(stable=True)
        # Behind all, so that each search finds a place.
        end = [torch.full((1,), torch.iinfo(dtype).max, dtype=dtype) for dtype in (torch.int64, torch.int32)]
        self.pairs = torch.cat([pairs, end[0].to(self.device)])
        self.places = torch.cat([places.index_select(0, order).int(), end[1].to(self.device)])

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        held = [self.items, *([self.pairs, self.places] if self.marks_seen else [])]
        return sum(tensor.nbytes for tensor in held)

    def of_steps(self, epoch: int, begins: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yield the items drawn for steps of a training pass, int32 [N]. begins: of each in the pass."""
        if not self.number:
            yield from (self.nothing for _ in begins)
            return
        steps_at_once = max(1, DRAWN_AT_ONCE // self.number)
        for first in range(0, len(begins), steps_at_once):
            yield from self._drawn(epoch, begins[first : first + steps_at_once])

    def _drawn(self, epoch: int, begins: Sequence[int]) -> torch.Tensor:
        """Return `sample_items` for each step, int32 [steps, N]. Waits for the device."""
        total = len(self.items)
        if self.number == total:
            return self.items.expand(len(begins), -1)
        drawn = np.array([keys_of(self.dataset.seed, epoch, begin) for begin in begins], np.int64)
        keys = torch.from_numpy(drawn).to(self.device).unsqueeze(2).unbind(1)
        result = torch.arange(self.number, device=self.device).expand(len(begins), -1)
        result = permuted(result, total, keys)
        while bool((result >= total).any()):
            result = torch.where(result >= total, permuted(result, total, keys), result)
        return self.items.index_select(0, result.view(-1)).view(len(begins), -1)

    def seen_bits(
        self, users: torch.Tensor, items: torch.Tensor, ends: torch.Tensor, drawn: torch.Tensor
    ) -> torch.Tensor:
        """Return `seen_bits` of training events, uint8 [B, bytes], see `datasets.batching.Batch`.

        users, items: of the events, int32 [B]; ends: the place in the histories before which an event had
        items, int32 [B], 0 for none; drawn: int32 [N].
        """
        number, size = len(users), 8 * self.group_bytes or 1
        steps = max(1, PAIRS_AT_ONCE // (size + len(drawn))) // size * size or size
        parts = []
        for part in (slice(begin, begin + steps) for begin in range(0, number, steps)):
            firsts = users[part].long() * self.stride
            candidates = drawn.expand(len(firsts), -1)
            if self.group_bytes:
                candidates = torch.cat([self._of_groups(items[part], size), candidates], dim=1)
            pairs = firsts.unsqueeze(1) + candidates
            found = torch.searchsorted(self.pairs, pairs)
            is_before = self.places[found] < ends[part].unsqueeze(1)
            had = (self.pairs[found] == pairs) & is_before
            of_group = had.size(1) - len(drawn)
            parts.append(torch.cat([packed(had[:, :of_group]), packed(had[:, of_group:])], dim=1))
        return torch.cat(parts)

    def _of_groups(self, items: torch.Tensor, size: int) -> torch.Tensor:
        """Return the items of the group of each event, int32 [n, S]; the last group is padded."""
        number = len(items)
        items = pad(items, (0, -number % size), value=self.stride - 1)
        groups = items.view(-1, 1, size).expand(-1, size, -1)
        return groups.reshape(-1, size)[:number]

    def unseen(self, number: int, num_drawn: int) -> torch.Tensor:
        """Return `seen_bits` of events whose users had no negative. num_drawn: N in training, else 0."""
        width = self.group_bytes + bytes_of_bits(num_drawn, num_drawn)
        return torch.zeros(number, width, dtype=torch.uint8, device=self.device)


def marks_seen(dataset: EventBatches) -> bool:
    """Return True if batches of a training tell which negatives the users had."""
    has_negatives = dataset.model.in_batch_negatives or dataset.model.num_negatives(dataset.num_items)
    return bool(has_negatives) and dataset.schema.excludes_seen


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Return bits as bytes, the lowest bit first, uint8 [n, bytes] of bool [n, bits]; see `unpack_bits`."""
    bits = pad(bits.to(torch.uint8), (0, -bits.size(1) % 8))
    shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.view(len(bits), -1, 8) << shifts).sum(dim=2, dtype=torch.uint8)
