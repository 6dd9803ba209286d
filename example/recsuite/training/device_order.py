"""Histories that are read in order, in batches that are made on the device.

    pieces of a pass        on the host, once in a pass, see `datasets.batching.pieces_of`
    places of the events    for many steps at once, outside of a captured step
    runs, items, draws      in the step

The histories of a batch have V items in all, another number in each step. A training step of B events reads
at most B + L of them, where L is the length of the longest history: each event adds the one before it to its
run, except that the first run may have begun in the step before. So training batches have B + L slots, and
those behind the last item are unused. Batches of other splits have as many as they need.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from recsuite.datasets.batches import EventBatches
from recsuite.datasets.batching import history_prefix, pieces_of
from recsuite.datasets.schema import HISTORY, USER
from recsuite.models.inputs import Members
from recsuite.time_buckets import OLDEST

# Those of `datasets.batching.mix_bits`, as numbers of int64.
GOLDEN, MIXER = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64


class ReadInputs(NamedTuple):
    """Part of a step's input for a model that reads the order; empty tensors for others.

    turns: the place of each event in the user histories and the begin of the part that it reads, int32
    [2, B], both -1 for padding; seed: of the draws of a pass, int64 [1].
    """

    turns: torch.Tensor
    seed: torch.Tensor


class DeviceOrder:
    """Order of the events of an `EventBatches` of one rank, and what they read of the user histories.

    records, times: items of the histories of each prefix and seconds of events and items, by the names of
    their columns, with one behind all of them. longest: L.
    """

    def __init__(
        self,
        dataset: EventBatches,
        device: torch.device,
        records: dict[str, torch.Tensor],
        times: dict[str, torch.Tensor],
    ) -> None:
        self.dataset, self.device, self.records, self.times = dataset, device, records, times
        self.longest = dataset.features.longest
        self.events = torch.from_numpy(dataset.features.column(f"{HISTORY}_event").copy()).to(device)
        self._pieces: tuple[int, torch.Tensor, torch.Tensor] | None = None

    @property
    def budget(self) -> int:
        """Slots for items of histories in a training batch."""
        return self.dataset.local_batch_size + self.longest

    def seed_of(self, epoch: int) -> torch.Tensor:
        """Return the seed of the draws of a pass."""
        seed = np.random.SeedSequence([self.dataset.seed, epoch]).generate_state(1, np.uint64)
        return torch.from_numpy(seed.view(np.int64)).to(self.device)

    def turns(self, split: str, epoch: int, numbers: range) -> torch.Tensor:
        """Return the turns of events by their numbers in a pass, int32 [2, n], see `ReadInputs`."""
        if split == "catalogue":
            return torch.zeros(2, len(numbers), dtype=torch.int32, device=self.device)
        if split != "train":
            # On the host: these events are in the order of the disk.
            read, positions = self.dataset.features.column, self.dataset.positions_of(split)
            part = slice(positions.start + numbers.start, positions.start + numbers.stop)
            places = read(f"{HISTORY}_before")[part]
            firsts = read(f"{history_prefix(split)}{HISTORY}_offsets").take(read("rows")[USER][part])
            turns = np.stack([places, np.maximum(firsts, places - self.longest)]).astype(np.int32)
            return torch.from_numpy(turns).to(self.device)
        begins, ends = self._pieces_of(epoch)
        wanted = torch.arange(numbers.start, numbers.stop, device=self.device)
        pieces = torch.searchsorted(ends, wanted, right=True)
        starts = begins.index_select(0, pieces)
        before = pad(ends, (1, 0)).index_select(0, pieces)
        return torch.stack([starts + wanted - before, starts]).int()

    def _pieces_of(self, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pieces is None or self._pieces[0] != epoch:
            offsets = self.dataset.features.column(f"{HISTORY}_offsets")
            found = pieces_of(offsets, self.longest, self.dataset.seed, epoch)
            begins, ends = (torch.from_numpy(each.astype(np.int64)).to(self.device) for each in found)
            self._pieces = epoch, begins, ends
        return self._pieces[1:]

    def members(self, inputs: Any, num_drawn: int, total: int) -> tuple[torch.Tensor, torch.Tensor, Members]:
        """Return items of histories, [total], lengths of the events' histories, int64 [B], and other data.

        inputs: `StepInputs`; num_drawn: rows before the events, without histories; total: slots.
        """
        (places, starts), trains = inputs.reads.turns.long(), inputs.split == "train"
        number, prefix = len(places), history_prefix(inputs.split)
        first = last = torch.arange(number, device=self.device)
        counts = places - starts
        if trains:
            # Runs of one user, whose events read parts of one history.
            begins_run = pad((starts.diff() != 0) | (places.diff() != 1), (1, 0), value=True)
            run = begins_run.cumsum(0)
            first, last = torch.searchsorted(run, run), torch.searchsorted(run, run, right=True) - 1
            counts = torch.where(begins_run, places.index_select(0, last) - starts, 0)
        records = self.records[prefix]
        positions, event = spread(starts, counts, total, len(records) - 1)
        items, labels = records.index_select(0, positions).unbind(1)
        # Those of a catalogue are items, without a history.
        of_events = inputs.positions.clamp(max=len(self.times["time"]) - 1)
        event_times = self.times["time"].index_select(0, of_events).index_select(0, last)
        seconds = event_times.index_select(0, event)
        ages = seconds - self.times[f"{prefix}{HISTORY}_time"].index_select(0, positions)
        members = Members(
            labels=labels.view(torch.float32),
            places=items[:0],
            gaps=items[:0],
            ages=ages.clamp(0, OLDEST).int(),
            draws=mixed(positions, inputs.reads.seed),
            sources=torch.cat([torch.arange(num_drawn, device=self.device), first + num_drawn]),
            reads=pad((inputs.reads.turns[0] - inputs.reads.turns[1]), (num_drawn, 0)),
        )
        return items, counts, members


def spread(
    starts: torch.Tensor, counts: torch.Tensor, total: int, nowhere: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the position of each value of lists, one list after the other, and its list, int64 [total].

    Unused slots at the end repeat the last value, or have the position `nowhere` if all lists are empty.
    starts, counts: of the lists, [n].
    """
    counts = counts.long()
    ends = counts.cumsum(0)
    slots = torch.arange(total, device=counts.device).minimum((ends[-1] - 1).clamp(min=0))
    lists = torch.searchsorted(ends, slots, right=True).clamp(max=len(counts) - 1)
    positions = slots + (starts - ends + counts).index_select(0, lists)
    return torch.where(ends[-1] > 0, positions, nowhere), lists


def mixed(owners: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
    """Return `datasets.batching.mix_bits` as int32 [n]. owners: int64 [n]; seed: see `ReadInputs`."""
    hashed = (owners + seed) * GOLDEN
    # Shifts of int64 fill in the sign.
    hashed = (hashed ^ ((hashed >> 29) & (2**35 - 1))) * MIXER
    return (hashed >> 32).int()
