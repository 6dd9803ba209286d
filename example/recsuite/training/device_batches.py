"""Batches that are made on the device, from columns that were copied to it once.

A batch equals that of the loader, bit for bit, but each list has as many slots as the longest one of its
feature, so that every batch has the same shapes. An unused slot repeats a value of its list, with the weight
0: it adds zero to the gradient of a row that the step changes anyway. The slots of an empty list have the
unknown row, which an optimizer with momentum then moves.

Where the longest list is many times the mean, the lists of a batch come one after the other, with a budget of
slots for all of them, see `_budget_of`; unused ones are at its end. A batch above the budget has slots of its
own, and its step is eager. So have histories that are read in order, whose budget is always enough.

    order of a pass                computed for up to 2^26 events at once, the same as `batching.shuffled`
    positions of a step            [B] of them; padding is an event of its own, behind all others
    features, lists, labels ...    gathered when a step first reads them, inside a captured step if it is one

A kernel of a small batch takes as long as its launch. So the columns of an event, a user or an item are in
one record, and what changes only with the last batch of a pass is made outside of the step.

In training, rows of N drawn items come before those of the B events, see `datasets.batching.Batch`. They have
no slots in histories.

F: features with one value.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from recsuite.config.config import Config
from recsuite.config.sections import UVM_CACHING
from recsuite.datasets.batches import SPLITS, EventBatches
from recsuite.datasets.batching import MASKED_EVERY, history_prefix
from recsuite.datasets.schema import ENTITIES, HISTORY, ITEM, UNKNOWN_ROW, USER, Table
from recsuite.errors import require
from recsuite.models.inputs import Members
from recsuite.models.rows import PaddedListError
from recsuite.models.sequences import SequenceHead
from recsuite.sharding.recommender import ModelInput
from recsuite.sharding.torchrec_tables import CheckedFeatures
from recsuite.time_buckets import NUM_TIME_BUCKETS
from recsuite.training.device_negatives import BYTES_OF_PLACE, BYTES_OF_SORTING, DeviceNegatives, marks_seen
from recsuite.training.device_order import DeviceOrder, ReadInputs, spread
from recsuite.training.device_shuffles import shuffled
from recsuite.training.state import ShardedModel

# Events whose order is computed at once. Their positions take 256 MiB, and the computation some times that.
EVENTS_AT_ONCE = 2**26
SHUFFLED_AT_ONCE = RECORDS_AT_ONCE = 2**22
# Bytes of an event while its order is computed: eight numbers of 64 bits.
BYTES_OF_SHUFFLING = 8 * 8
# Share of the device's free memory that columns and the order of passes may take.
MOST_OF_MEMORY = 0.5
# Slots for each value of a list, on average, above which padding costs more than it is worth.
MOST_SLOTS = 10
# Standard deviations of the number of values of a batch, by which a budget is above the mean.
BUDGET_DEVIATIONS = 6


class StepMasks(NamedTuple):
    """Parts of a step's input that are the same in nearly all steps of a pass.

    weights: of the events, see `datasets.batching.Batch`, float32 [B]; hidden: values that are hidden, see
    `EventBatches`, bool [F, B]; hides_numbers: events whose own dense numbers are hidden, bool [B, 1].
    """

    weights: torch.Tensor
    hidden: torch.Tensor
    hides_numbers: torch.Tensor


class KeyLayout(NamedTuple):
    """Shape of the features of a batch, see `KeyedJaggedTensor`: int32 and int64 tensors, and host numbers.

    budgets: slots of the lists that come one after the other; is_above: more of them than the budget.
    """

    lengths: torch.Tensor
    offsets: torch.Tensor
    sizes: list[int]
    ends: list[int]
    budgets: Mapping[str, int]
    is_above: bool


@dataclass(frozen=True)
class StepInputs:
    """Input of a step, from which all of its batch is made.

    positions: of the events in the columns, or of the items of a catalogue, int32 [B]; split: of the events;
    negatives: positions of the drawn items, int32 [N]; reads: see `ReadInputs`; layout: of the features, the
    same object for the same shapes.
    """

    positions: torch.Tensor
    masks: StepMasks
    split: str
    negatives: torch.Tensor
    reads: ReadInputs
    layout: KeyLayout

    def copy_(self, source: StepInputs, before: StepInputs) -> None:
        """Copy the input of a step of the same split into these tensors; before: the one copied last."""
        self.positions.copy_(source.positions)
        for mine, other in zip((self.negatives, *self.reads), (source.negatives, *source.reads), strict=True):
            if mine.numel():
                mine.copy_(other)
        if source.masks is not before.masks:
            for mine, other in zip(self.masks, source.masks, strict=True):
                mine.copy_(other)

    def clone(self) -> StepInputs:
        """Return a copy with tensors of its own."""
        masks = StepMasks(*(mask.clone() for mask in self.masks))
        reads = ReadInputs(*(each.clone() for each in self.reads))
        positions, negatives = self.positions.clone(), self.negatives.clone()
        return StepInputs(positions, masks, self.split, negatives, reads, self.layout)


class DeviceInput(ModelInput):
    """Batch whose tensors are made on the device when the first of them is read. inputs: of its step."""

    # Without the constructor of its fields.
    def __init__(self, source: DeviceBatches, inputs: StepInputs) -> None:
        self.source, self.inputs = source, inputs

    @property
    def is_above_budget(self) -> bool:
        """True if lists have more values than their budget: the shapes are not those of other batches."""
        return self.inputs.layout.is_above

    @property
    def is_made(self) -> bool:
        """True if a tensor was read."""
        return "features" in self.__dict__

    def __getattr__(self, name: str) -> Any:
        if name not in FIELDS:
            raise AttributeError(name)
        self.__dict__ |= self.source.make(self.inputs)
        return self.__dict__[name]

    def to(self, device: torch.device, non_blocking: bool = False) -> ModelInput:
        """Return this batch, which is on the device already."""
        return self


FIELDS = {field.name for field in dataclasses.fields(ModelInput)}


class Records:
    """Records of 32-bit numbers on the device, one row each, and a last one for padding.

    fields: name to its place and width in a row, and its type.
    """

    def __init__(self, parts: dict[str, tuple[np.ndarray, Any]], device: torch.device) -> None:
        """Copy records to the device.

        parts: values of each field, int32 or float32 [n] or [n, width], and those of padding.
        """
        self.fields: dict[str, tuple[int, int, torch.dtype]] = {}
        columns, begin = [], 0
        for name, (values, _) in parts.items():
            # Not with -1, which is undefined without events: a stream may have learned all.
            columns.append(values.reshape(len(values), math.prod(values.shape[1:])))
            is_float = values.dtype == np.float32
            self.fields[name] = begin, columns[-1].shape[1], torch.float32 if is_float else torch.int32
            begin += columns[-1].shape[1]
        number = len(columns[0])
        self.values = torch.empty(number + 1, begin, dtype=torch.int32, device=device)
        # In pieces: the columns may be larger than the memory of the host.
        for first in range(0, number, RECORDS_AT_ONCE):
            end = min(first + RECORDS_AT_ONCE, number)
            piece = [np.ascontiguousarray(values[first:end]).view(np.int32) for values in columns]
            self.values[first:end] = torch.from_numpy(np.concatenate(piece, axis=1)).to(device)
        last = [
            np.full((1, values.shape[1]), padding, values.dtype).view(np.int32)
            for values, (_, padding) in zip(columns, parts.values(), strict=True)
        ]
        self.values[number:] = torch.from_numpy(np.concatenate(last, axis=1)).to(device)

    def column(self, name: str) -> torch.Tensor:
        """Return a field of all records, int32 [n + 1, width]."""
        begin, width, _ = self.fields[name]
        return self.values[:, begin : begin + width]

    def take(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of some records, [B, width] each; one kernel."""
        records = self.values.index_select(0, rows)
        return {
            name: records[:, begin : begin + width].view(dtype)
            for name, (begin, width, dtype) in self.fields.items()
        }


class DeviceBatches:
    """Batches of an `EventBatches` of one rank, made on a device. Copies the columns that they need.

    dataset: see `why_not_on_device` for those that can be; order: names of its features in the order in which
    the batch shall have them, None for that of the data set.
    """

    def __init__(
        self, dataset: EventBatches, device: torch.device, order: Sequence[str] | None = None
    ) -> None:
        self.dataset, self.device = dataset, device
        column, tables = dataset.features.column, dataset.tables
        has_histories = any(table.name == HISTORY for table in tables)
        self.negatives = DeviceNegatives(dataset, device)
        self.events = Records(_event_parts(dataset, has_histories or self.negatives.marks_seen), device)
        if f"{HISTORY}_last" in self.events.fields:
            # The columns have the end, which is one behind the last.
            self.events.column(f"{HISTORY}_last").sub_(1)
        names = [table.name for table in tables]
        self.entities: list[Records] = []
        # Of features with lists: entity, values and slots.
        self.lists: dict[str, tuple[int, torch.Tensor, int]] = {}
        for entity, name in enumerate(map(dataset.schema.name_of, ENTITIES)):
            record = column(f"{name}_features")
            parts: dict[str, Any] = {part: (record[part], 0) for part in ("features", "numbers")}
            of_entity = [
                table for table in tables if table.feature.multi and table.feature.entity == ENTITIES[entity]
            ]
            for place, table in enumerate(table for table in of_entity if table.name != HISTORY):
                values = column(f"{table.name}_values")
                parts[table.name] = _list_parts(record["lists"][:, place], len(values))
                # Behind the values is that of empty lists.
                self.lists[table.name] = entity, _copied(values, UNKNOWN_ROW, device), table.longest
            self.entities.append(Records(parts, device))
        singles = [records.fields["features"][1] for records in (*self.entities, self.events)]
        self.num_single, self.first_of_event, self.num_of_users = sum(singles), sum(singles[:-1]), singles[0]
        self.single_names = names[: self.num_single]
        slots = dict.fromkeys(self.single_names, 1)
        slots |= {name: longest for name, (_, _, longest) in self.lists.items()}
        long = [table for table in tables if table.name in self.lists and _is_long(dataset, table)]
        self.budgets = {table.name: _budget_of(dataset, table, self.negatives.number) for table in long}
        self.histories: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self.times: dict[str, torch.Tensor] = {}
        self.history_slots = 0
        self.order: DeviceOrder | None = None
        if has_histories and not dataset.model.reads_order:
            self.history_slots = slots[HISTORY] = max(1, tables[names.index(HISTORY)].longest)
        for prefix in _prefixes(dataset):
            records, offsets = column(f"{prefix}{HISTORY}"), column(f"{prefix}{HISTORY}_offsets")
            # Behind the items is one of empty histories; behind the users one of padding.
            items = _copied(records, 0, device)
            begins = np.zeros(len(self.entities[0].values), np.int32)
            begins[: len(offsets) - 1] = offsets[:-1]
            self.histories[prefix] = items, torch.from_numpy(begins).to(device)
        for name in _time_columns(dataset):
            self.times[name] = _copied(column(name), 0, device)
        # Seconds at which the time buckets after the first begin.
        self.bounds = (1 << torch.arange(1, NUM_TIME_BUCKETS, device=device)) - 1
        if dataset.model.reads_order:
            held_items = {prefix: held for prefix, (held, _) in self.histories.items()}
            self.order = DeviceOrder(dataset, device, held_items, self.times)
        # A history that is read in order is behind the events' own items, as their values.
        self.keys = [name for name in order or names if name != HISTORY or self.order is None]
        number = dataset.local_batch_size
        self._slot_counts = slots
        self._layouts: dict[Any, KeyLayout] = {}
        nothing = (torch.zeros(0, dtype=dtype, device=device) for dtype in OF_MEMBERS)
        self.no_members = Members(*nothing)
        self.no_bits = torch.zeros(number, 0, dtype=torch.uint8, device=device)
        self.slots = torch.arange(max(slots.values()), dtype=torch.int32, device=device)
        self.no_reads = ReadInputs(self.slots[:0], self.slots[:0])
        self._masks: dict[Any, StepMasks] = {}
        self._check_rows()

    def _check_rows(self) -> None:
        """Refuse rows that a table does not have: the lookup of a batch does not check them again."""
        num_rows = {table.name: table.rows for table in self.dataset.tables}
        records = (*self.entities, self.events)
        singles = [column for each in records for column in each.column("features").unbind(1)]
        held = [
            *zip(self.single_names, singles, strict=True),
            *((name, values) for name, (_, values, _) in self.lists.items()),
            *((HISTORY, items[:, 0]) for items, _ in self.histories.values()),
        ]
        for name, values in held:
            # A history without a table of its own has rows of the items' table.
            number = num_rows[name] or num_rows[self.dataset.schema.item]
            least, most = torch.stack(values.aminmax()).tolist()
            require(
                0 <= least <= most < number,
                f"The prepared columns of {name} must have rows from 0 to {number - 1:,}, got {least:,} to "
                f"{most:,}. Fix: give --rebuild, which makes them again",
            )

    def _layout_of(self, num_drawn: int, budgets: dict[str, int], is_above: bool) -> KeyLayout:
        """Return the layout of batches with so many drawn items. budgets: see `KeyLayout`."""
        key = num_drawn, *budgets.items()
        if key not in self._layouts:
            number, slots, lengths = self.dataset.local_batch_size, self._slot_counts, []
            for name in self.keys:
                of_key = torch.zeros(num_drawn + number, dtype=torch.int32)
                if name in budgets:
                    # The batch's counts have the lengths of the lists.
                    of_key[-1] = budgets[name]
                else:
                    of_key[num_drawn * (name == HISTORY) :] = slots[name]
                if self.order is not None and name == self.dataset.schema.item:
                    of_key[-1] += budgets[HISTORY]
                lengths.append(of_key)
            sizes = [int(of_key.sum()) for of_key in lengths]
            all_lengths = torch.cat(lengths).to(self.device)
            offsets = pad(all_lengths.cumsum(0), (1, 0))
            ends = [0, *itertools.accumulate(sizes)]
            self._layouts[key] = KeyLayout(all_lengths, offsets, sizes, ends, budgets, is_above)
        return self._layouts[key]

    def _layouts_of(
        self, split: str, order: torch.Tensor, turns: torch.Tensor, drawn: Sequence[torch.Tensor]
    ) -> list[KeyLayout]:
        """Return the layouts of steps. order, turns, drawn: of their events, as in `StepInputs`.

        Waits for the device, once for many steps.
        """
        size, before = self.dataset.local_batch_size, len(drawn[0])
        budgets = self.budgets
        totals = {name: self._values_of(name, split, order, drawn) for name in budgets}
        if self.order is not None:
            budgets = {**budgets, HISTORY: self.order.budget}
            if split != "train":
                totals[HISTORY] = (turns[0] - turns[1]).view(-1, size).sum(1).tolist()
        layouts = []
        for step in range(len(drawn)):
            # In multiples of a batch, so that there are few layouts.
            own = {name: max(1, -(-of_steps[step] // size)) * size for name, of_steps in totals.items()}
            above = {name: own[name] for name in self.budgets if totals[name][step] > budgets[name]}
            own_history = {name: number for name, number in own.items() if name == HISTORY}
            layouts.append(self._layout_of(before, {**budgets, **above, **own_history}, bool(above)))
        return layouts

    def _values_of(
        self, name: str, split: str, order: torch.Tensor, drawn: Sequence[torch.Tensor]
    ) -> list[int]:
        """Return the number of values of a list in each step."""
        size, (entity, _, _) = self.dataset.local_batch_size, self.lists[name]
        steps_at_once, totals = max(1, SHUFFLED_AT_ONCE // (size + len(drawn[0]))), []
        for first in range(0, len(drawn), steps_at_once):
            part = drawn[first : first + steps_at_once]
            events = self._events_of(split, order[first * size : (first + len(part)) * size])
            rows = events[ENTITIES[entity]].view(len(part), size)
            items = torch.stack([*part])
            # The drawn items are those of the first user.
            others = items if ENTITIES[entity] == ITEM else torch.zeros_like(items)
            rows = torch.cat([rows, others], dim=1)
            counts = self.entities[entity].take(rows.view(-1))[name][:, 2]
            totals += counts.view(rows.shape).sum(1).tolist()
        return totals

    def free(self) -> None:
        """Free the columns, also for a script that holds the last batch. Nothing can be made after it."""
        vars(self).clear()

    @property
    def nbytes(self) -> int:
        """Bytes of the columns on the device."""
        held = [self.events.values, *(records.values for records in self.entities)]
        held += [values for _, values, _ in self.lists.values()]
        held += [tensor for both in self.histories.values() for tensor in both]
        held += self.times.values()
        held += [self.order.events] if self.order is not None else []
        return sum(tensor.nbytes for tensor in held) + self.negatives.nbytes

    def batches(
        self, split: str, epoch: int, first: int = 0, window: tuple[int, int] | None = None
    ) -> Iterator[DeviceInput]:
        """Yield the batches of a pass over a split, or a window of a stream, from event number `first` on."""
        size, sizes = self.dataset.batch_size, self.dataset.step_sizes(split, first, window)
        events, trains = self.dataset.positions_of(split, window), split == "train"
        begin = self.dataset.first_event + events.start + first
        steps_at_once = max(1, EVENTS_AT_ONCE // (size + self.negatives.number))
        begins, nothing = range(first, first + sum(sizes), size), itertools.repeat(self.negatives.nothing)
        all_drawn = self.negatives.of_steps(epoch, begins) if trains else nothing
        seed = self.no_reads.seed if self.order is None else self.order.seed_of(epoch)
        for step in range(0, len(sizes), steps_at_once):
            part = sizes[step : step + steps_at_once]
            drawn = [*itertools.islice(all_drawn, len(part))]
            numbers = range(begins[step], begins[step] + sum(part))
            order, turns = self._order_of(split, epoch, events, numbers)
            layouts = self._layouts_of(split, order, turns, drawn)
            for place, (number, negatives, layout) in enumerate(zip(part, drawn, layouts, strict=True)):
                mine = slice(place * size, (place + 1) * size)
                # In a window the events of a small batch have the weights of those of a full one.
                weight = size / number if window is None else 1.0
                masks = self._masks_of(trains, (begin + (step + place) * size) % MASKED_EVERY, number, weight)
                reads = ReadInputs(turns[:, mine], seed)
                yield DeviceInput(self, StepInputs(order[mine], masks, split, negatives, reads, layout))

    def _masks_of(self, trains: bool, begin: int, number: int, weight: float) -> StepMasks:
        """Return the masks of a step of events from `begin` on, as `EventBatches._mask_ids` counts them."""
        key = trains, begin if trains else 0, number, weight
        if key not in self._masks:
            size = self.dataset.local_batch_size
            weights = np.zeros(size, np.float32)
            weights[:number] = weight
            hidden, hides_numbers = np.zeros((self.num_single, size), bool), np.zeros((size, 1), bool)
            if trains:
                every = self.dataset.hidden_every
                hidden[self.dataset.user_place, -begin % every : number : every] = True
                others = slice((every // 2 - begin) % MASKED_EVERY, number, MASKED_EVERY)
                hidden[self.first_of_event :, others] = True
                hides_numbers[others] = True
            made = (torch.from_numpy(mask).to(self.device) for mask in (weights, hidden, hides_numbers))
            masks = StepMasks(*made)
            if number < size:
                # Not kept: a stream has such a step in each window, with nearly any number of events.
                return masks
            self._masks[key] = masks
        return self._masks[key]

    def _order_of(
        self, split: str, epoch: int, events: range, numbers: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return positions and turns of events by their numbers in a pass, int32, and padding up to a batch.

        The turns have no columns for a model that does not read the order.
        """
        size = self.dataset.batch_size
        last = self.entities[ENTITIES.index(ITEM)] if split == "catalogue" else self.events
        length, padding = -(-len(numbers) // size) * size, len(last.values) - 1
        order = torch.full((length,), padding, dtype=torch.int32, device=self.device)
        turns = torch.full((2, length * (self.order is not None)), -1, dtype=torch.int32, device=self.device)
        for begin in range(numbers.start, numbers.stop, SHUFFLED_AT_ONCE):
            end = min(begin + SHUFFLED_AT_ONCE, numbers.stop)
            mine = slice(begin - numbers.start, end - numbers.start)
            if self.order is not None:
                turns[:, mine] = self.order.turns(split, epoch, range(begin, end))
            if self.order is not None and split == "train":
                order[mine] = self.order.events.index_select(0, turns[0, mine])
                continue
            part = torch.arange(begin, end, device=self.device)
            if split == "train":
                part = shuffled(part, len(events), self.dataset.seed, epoch)
            order[mine] = part + events.start
        return order, turns

    def make(self, inputs: StepInputs) -> dict[str, Any]:
        """Return the fields of a `ModelInput` for the input of a step. Waits for no kernel."""
        trains, masks, drawn = inputs.split == "train", inputs.masks, inputs.negatives
        events, before = self._events_of(inputs.split, inputs.positions), len(drawn)
        entities = [events[entity].squeeze(1) for entity in ENTITIES]
        users, items = entities
        if before:
            # As `EventFeatures.find_items` has them: with the first user.
            entities = [pad(users, (before, 0)), torch.cat([drawn, items])]
        records = [held.take(rows) for held, rows in zip(self.entities, entities, strict=True)]
        own, own_numbers = events["features"].t(), events["numbers"]
        if trains and own_numbers.numel():
            own_numbers = own_numbers.masked_fill(masks.hides_numbers, float("nan"))
        if before:
            own = pad(own, (before, 0), value=UNKNOWN_ROW)
            own_numbers = pad(own_numbers, (0, 0, before, 0), value=float("nan"))
        single = torch.cat([*(record["features"].t() for record in records), own])
        single[: self.num_of_users, :before] = UNKNOWN_ROW
        if trains:
            single[:, before:].masked_fill_(masks.hidden, UNKNOWN_ROW)
            if self.dataset.hides_histories and f"{HISTORY}_last" in events:
                hidden = masks.hidden[self.dataset.user_place].unsqueeze(1)
                events[f"{HISTORY}_last"] = events[f"{HISTORY}_last"].masked_fill(hidden, -1)
        parts, counts = dict(zip(self.single_names, single, strict=True)), {}
        for name, (entity, values, slots) in self.lists.items():
            starts, lasts, lengths = records[entity][name].unbind(1)
            counts[name] = lengths
            if name in self.budgets:
                budget = inputs.layout.budgets[name]
                parts[name] = values.index_select(0, spread(starts, lengths, budget, len(values) - 1)[0])
                continue
            slot_positions = torch.minimum(starts.unsqueeze(1) + self.slots[:slots], lasts.unsqueeze(1))
            parts[name] = values.index_select(0, slot_positions.view(-1))
        members = self.no_members
        if self.history_slots:
            parts[HISTORY], counts[HISTORY], members = self._histories(events, inputs)
        layout, item = inputs.layout, self.dataset.schema.item
        if self.order is not None:
            of_order = self.order.members(inputs, before, layout.budgets[HISTORY])
            history, counts[HISTORY], members = of_order
            parts[item] = torch.cat([parts[item], history])
        features = CheckedFeatures(
            self.keys,
            torch.cat([parts[name] for name in self.keys]).long(),
            lengths=layout.lengths,
            offsets=layout.offsets,
            stride=before + len(inputs.positions),
            length_per_key=layout.sizes,
            offset_per_key=layout.ends,
        )
        labels, weights, more_labels, more_weights = self._labels(events, masks.weights, trains)
        if trains and self.negatives.marks_seen:
            # If the order is read, earlier items of the same second count too.
            ends = events[f"{HISTORY}_last"].squeeze(1) + 1 if self.order is None else inputs.reads.turns[0]
            seen_bits = self.negatives.seen_bits(users, items, ends, drawn)
        else:
            seen_bits = self.negatives.unseen(len(users), before)
        return {
            "features": features,
            "labels": labels,
            "weights": weights,
            "numbers": torch.cat([*(record["numbers"] for record in records), own_numbers], dim=1),
            "seen_bits": seen_bits,
            "members": members,
            "more_labels": more_labels,
            "more_weights": more_weights,
            "share": None,
            "counts": counts,
            "joined": frozenset(self.budgets),
        }

    def _events_of(self, split: str, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the fields of events of a split, see `EventFeatures.events`. positions: see `StepInputs`."""
        if split != "catalogue":
            return self.events.take(positions)
        # As events of the first user without features. The record of padding has zeros and no history.
        events = self.events.take(torch.full_like(positions, len(self.events.values) - 1))
        items, padding = positions.unsqueeze(1), len(self.entities[ENTITIES.index(ITEM)].values) - 1
        is_item = items < padding
        events[USER], events[ITEM] = events[USER].masked_fill(is_item, 0), items
        events["numbers"] = events["numbers"].masked_fill(is_item, float("nan"))
        return events

    def _histories(
        self, events: dict[str, torch.Tensor], inputs: StepInputs
    ) -> tuple[torch.Tensor, torch.Tensor, Members]:
        """Return the items of user histories, [B * slots], their lengths, int32 [B], and their other data."""
        prefix, users = history_prefix(inputs.split), events[USER].squeeze(1)
        records, begins = self.histories[prefix]
        lasts, slots = events[f"{HISTORY}_last"], self.slots[: self.history_slots]
        starts = torch.maximum(begins.index_select(0, users).unsqueeze(1), lasts - (self.history_slots - 1))
        positions = torch.minimum(starts + slots, lasts)
        # Before the begin: the history is empty.
        positions = torch.where(lasts < starts, len(records) - 1, positions).view(-1)
        items, labels = records.index_select(0, positions).unbind(1)
        counts = (lasts - starts + 1).clamp(min=0)
        members = self.no_members._replace(labels=labels.view(torch.float32))
        if self.times:
            # Those of a catalogue are items, without a history.
            of_events = inputs.positions.clamp(max=len(self.times["time"]) - 1)
            times = self.times["time"].index_select(0, of_events).unsqueeze(1)
            ages = times - self.times[f"{prefix}{HISTORY}_time"].index_select(0, positions).view(
                len(times), -1
            )
            gaps = torch.bucketize(ages, self.bounds, right=True, out_int32=True)
            # Counted from the end of each list.
            places = (counts - 1 - slots).clamp(min=0)
            members = members._replace(places=places.view(-1), gaps=gaps.view(-1))
        return items, counts.squeeze(1), members

    def _labels(
        self, events: dict[str, torch.Tensor], weights: torch.Tensor, trains: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return labels and weights, and those of the labels after the first; see `Batch`."""
        labels = events["label"].squeeze(1)
        if "weight" in events and trains:
            weights = weights * events["weight"].squeeze(1)
        more: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        for place in range(len(self.dataset.schema.more_labels)):
            values = events[f"label_{place + 2}"].squeeze(1)
            more[0].append(values.nan_to_num())
            more[1].append(weights.masked_fill(values.isnan(), 0.0))
            if (name := f"weight_{place + 2}") in events:
                more[1][-1] = more[1][-1] * events[name].squeeze(1).nan_to_num()
        nothing = self.no_bits.to(torch.float32)
        return labels, weights, *(torch.stack(columns, dim=1) if columns else nothing for columns in more)


# Types of the fields of `Members`.
OF_MEMBERS = (torch.float32, *[torch.int32] * 4, torch.int64, torch.int32)


def _event_parts(dataset: EventBatches, has_ends: bool) -> dict[str, tuple[np.ndarray, Any]]:
    """Return the fields of the records of events, and their values of padding."""
    rows = dataset.features.column("rows")
    # Those of padding are the last ones, behind all.
    last = {
        entity: len(dataset.features.column(f"{dataset.schema.name_of(entity)}_features"))
        for entity in ENTITIES
    }
    parts: dict[str, tuple[np.ndarray, Any]] = {}
    for name in rows.dtype.names or ():
        if name == f"{HISTORY}_end":
            if has_ends:
                parts[f"{HISTORY}_last"] = rows[name], 0
        elif name != "lists":
            parts[name] = rows[name], last.get(name, 0)
    return parts


def _list_parts(lists: np.ndarray, number: int) -> tuple[np.ndarray, Any]:
    """Return begin, last position and length of lists [begin, length], int32 [n, 3], and those of padding."""
    starts, counts = lists.T
    begins = np.where(counts > 0, starts, number)
    lasts = begins + np.maximum(counts, 1) - 1
    # The loader pads a batch with one unknown value.
    return np.stack([begins, lasts, counts], axis=1).astype(np.int32), (number, number, 1)


@torch.no_grad()
def why_not_padded(model: ShardedModel, batches: DeviceBatches) -> str | None:
    """Return the reason why a model cannot take lists with unused slots, or None.

    Collective: every rank. Calls the model with one batch, as it predicts and as it trains. Its modes and
    buffers, and torch's random numbers, are the same afterwards.
    """
    if batches.order is not None and not isinstance(model.head, SequenceHead):
        return "the model reads the order and is no SequenceHead"
    recommender = model.model.module.recommender
    modes = [(module, module.training) for module in model.model.modules()]
    buffers = [(module._buffers, dict(module._buffers)) for module in model.head.modules()]
    devices = [batches.device] if batches.device.type == "cuda" else []
    model.model.eval()
    try:
        for held, before in buffers:
            held.update({name: value if value is None else value.clone() for name, value in before.items()})
        with torch.random.fork_rng(devices):
            for batch in itertools.islice(batches.batches("train", 0), 1):
                looked_up = [tables(batch.features) for tables in recommender.embeddings]
                recommender.compute(looked_up, batch)
                # The model alone: in training the tables note which rows change.
                model.head.train()
                with torch.enable_grad():
                    recommender.compute(looked_up, batch)
    except PaddedListError as error:
        return f"the model reads the single values of the list {error.name}"
    finally:
        for held, before in buffers:
            held.update(before)
        for module, mode in modes:
            module.training = mode
    return None


def _mean_length(dataset: EventBatches, table: Table) -> float:
    """Return the mean length of the lists of a feature, of histories those of the training events."""
    column = dataset.features.column
    if table.name != HISTORY:
        lists = column(f"{dataset.schema.name_of(table.feature.entity)}_features")
        return len(column(f"{table.name}_values")) / max(1, len(lists))
    events, total = column("rows")[: len(dataset.ranges["train"])], 0
    for part in _parts_of(events):
        lengths = part[f"{HISTORY}_end"] - column(f"{HISTORY}_offsets").take(part[USER])
        total += int(np.minimum(lengths, table.longest).sum())
    return total / max(1, len(events))


def _parts_of(values: np.ndarray) -> Iterator[np.ndarray]:
    """Yield a column in parts, at least one: it may be larger than the memory of the host."""
    for first in range(0, max(1, len(values)), RECORDS_AT_ONCE):
        yield values[first : first + RECORDS_AT_ONCE]


def _copied(values: np.ndarray, last: int, device: torch.device) -> torch.Tensor:
    """Return a column on the device, with one value behind it."""
    dtype = torch.from_numpy(np.empty(0, values.dtype)).dtype
    held = torch.full((len(values) + 1, *values.shape[1:]), last, dtype=dtype, device=device)
    for target, part in zip(held[:-1].split(RECORDS_AT_ONCE), _parts_of(values), strict=True):
        target.copy_(torch.from_numpy(part.copy()))
    return held


def _is_long(dataset: EventBatches, table: Table) -> bool:
    """Return True for a feature whose lists get a budget of slots for all of a batch."""
    return table.longest > MOST_SLOTS * max(1.0, _mean_length(dataset, table))


def _budget_of(dataset: EventBatches, table: Table, num_drawn: int) -> int:
    """Return the slots for all lists of a feature in a training batch.

    The mean of a batch of shuffled events and its drawn items, and some standard deviations: a function of
    the data and of the size of the batch.
    """
    schema, entity = dataset.schema, table.feature.entity
    rows = dataset.features.column("rows")[: len(dataset.ranges["train"])]
    of_entity = [each for each in dataset.tables if each.feature.multi and each.feature.entity == entity]
    place = [each.name for each in of_entity if each.name != HISTORY].index(table.name)
    counts = dataset.features.column(f"{schema.name_of(entity)}_features")["lists"][:, place, 1]
    mean = variance = 0.0
    drawn = dataset.features.trained_items() if num_drawn and entity == ITEM else np.zeros(1, np.int32)
    for number, owners in ((dataset.local_batch_size, rows[entity]), (num_drawn, drawn)):
        occurring = sum(np.bincount(part, minlength=len(counts)) for part in _parts_of(owners))
        shares = occurring / max(1, len(owners))
        one = float(shares @ counts)
        mean, variance = mean + number * one, variance + number * float(shares @ (counts - one) ** 2)
    most = (dataset.local_batch_size + num_drawn) * table.longest
    return min(most, table.longest + math.ceil(mean + BUDGET_DEVIATIONS * math.sqrt(variance)))


def _column_names(dataset: EventBatches) -> list[str]:
    """Names of the columns that `DeviceBatches` copies."""
    names = ["rows", *(f"{dataset.schema.name_of(entity)}_features" for entity in ENTITIES)]
    names += [
        f"{table.name}_values" for table in dataset.tables if table.feature.multi and table.name != HISTORY
    ]
    names += [f"{prefix}{HISTORY}{part}" for prefix in _prefixes(dataset) for part in ("", "_offsets")]
    names += [f"{HISTORY}_event"] if dataset.model.reads_order else []
    return [*names, *_time_columns(dataset)]


def _time_columns(dataset: EventBatches) -> list[str]:
    """Return the names of the columns with times, for histories with learned weights or in order."""
    if not (dataset.model.learns_history_weights or dataset.model.reads_order):
        return []
    return ["time", *(f"{prefix}{HISTORY}_time" for prefix in _prefixes(dataset))]


def _prefixes(dataset: EventBatches) -> list[str]:
    """Return the prefixes of the columns with user histories, of splits with events."""
    has_histories = any(table.name == HISTORY for table in dataset.tables)
    return [
        *dict.fromkeys(history_prefix(split) for split in SPLITS if has_histories and dataset.ranges[split])
    ]


def why_on_host(config: Config, device: torch.device, world_size: int) -> str | None:
    """Return the reason why any data have batches of the loader with these flags and ranks, or None."""
    if device.type == "cpu":
        return "there is no GPU"
    if config.training.data_device == "cpu":
        return "--data_device is cpu"
    return _why_not_by_flags(config, world_size)


def check_data_device(config: Config, reason: str | None) -> None:
    """Refuse --data_device cuda for a reason, unless it is None."""
    require(
        config.training.data_device != "cuda" or reason is None,
        f"--data_device cuda cannot be used, because {reason}; give auto or cpu",
    )


def _why_not_by_flags(config: Config, world_size: int) -> str | None:
    if world_size > 1:
        return "there are several processes"
    if config.loader.num_workers != 0:
        return f"--num_workers is {config.loader.num_workers}"
    if config.training.pipeline == "sparse_dist":
        return "--pipeline is sparse_dist"
    if config.tables.storage == UVM_CACHING:
        return f"--storage is {UVM_CACHING}"
    return None


def why_not_on_device(dataset: EventBatches, config: Config, free_bytes: int) -> str | None:
    """Return the reason why batches of a data set are not made on the device, or None.

    free_bytes: of the device's memory, after the tables.
    """
    model = config.model
    if (reason := _why_not_by_flags(config, dataset.world_size)) is not None:
        return reason
    if any(table.feature.is_dynamic for table in dataset.tables):
        return "tables are dynamic"
    for table in dataset.tables:
        if table.name == HISTORY and not model.reads_order and _is_long(dataset, table):
            return f"a history has up to {table.longest} items, and less than a tenth of it on average"
    needed = bytes_needed(dataset)
    if needed > MOST_OF_MEMORY * free_bytes:
        return (
            f"columns and the order of a pass need {needed / 1e6:,.0f} MB, more than half of the "
            f"{free_bytes / 1e6:,.0f} MB left"
        )
    return None


def bytes_needed(dataset: EventBatches) -> int:
    """Return the most bytes that columns, their sorting, and the order of passes take on the device."""
    column = dataset.features.column
    held, sorting = sum(column(name).nbytes for name in _column_names(dataset)), 0
    if marks_seen(dataset):
        held += BYTES_OF_PLACE * len(column("seen"))
        # Before other columns are copied. A user has a begin and a number.
        sorting = BYTES_OF_SORTING * len(column("seen")) + 16 * len(column(f"{HISTORY}_offsets"))
    return max(sorting, held + _bytes_of_order(dataset))


def _bytes_of_order(dataset: EventBatches) -> int:
    """Return the most bytes of the positions, turns and drawn items of passes."""
    column, size = dataset.features.column, dataset.batch_size
    drawn = dataset.model.num_negatives(dataset.num_items)
    longest_pass = max(len(dataset.positions_of(split)) for split in dataset.ranges)
    steps = min(-(-longest_pass // size), max(1, EVENTS_AT_ONCE // (size + drawn)))
    # Those of the last step, of a pass or a part of it, are held while the next ones are computed.
    needed = 2 * 4 * steps * (size * (3 if dataset.model.reads_order else 1) + drawn)
    # The order of a part is computed, and then its lists are counted, with the records of events and owners.
    records = [column(name).itemsize for name in _column_names(dataset)[: 1 + len(ENTITIES)]]
    of_slot = max(BYTES_OF_SHUFFLING, records[0] + max(records[1:]) + 16)
    needed += of_slot * min(steps * (size + drawn), SHUFFLED_AT_ONCE)
    if dataset.model.reads_order:
        offsets = column(f"{HISTORY}_offsets")
        # Begin and end of the pieces of a pass, those of the pass before, and the ends once more.
        pieces = min(int(offsets[-1]), 2 * len(offsets) + int(offsets[-1]) // dataset.features.longest)
        needed += 5 * 8 * pieces
    return needed
