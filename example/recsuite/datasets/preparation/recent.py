"""Recent events of a stream that it has learned: the last items of each user, and sums of labels.

Its size depends on the users and items that are kept, not on the number of events. The first process of each
machine holds it. A checkpoint has all of it, and a delta what changed since the checkpoint before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from recsuite.datasets.batching import places_of

# Entries of dropped and replaced lists beyond which the lists are moved together.
LEAST_MOVED = 2**16


class Entities:
    """Users or items by their raw ids, each in a slot, with the sum and the number of its labels.

    sums, counts: by slot, float64 and int64; is_changed: bool by slot; removed: ids that were removed. The
    last two are since the last `clear_changes`, if they are kept.
    """

    def __init__(self, keeps_changes: bool) -> None:
        self._keeps_changes = keeps_changes
        self.slot_of: dict[Any, int] = {}
        self.ids: list[Any] = []
        self.sums, self.counts = np.zeros(0), np.zeros(0, np.int64)
        self.is_changed = np.zeros(0, bool)
        self.removed: dict[Any, None] = {}
        self._free: list[int] = []

    def find(self, ids: Iterable[Any]) -> np.ndarray:
        """Return the slots of ids, int64 [n], -1 for unknown ones."""
        return np.fromiter((self.slot_of.get(key, -1) for key in ids), np.int64)

    def insert(self, ids: Iterable[Any]) -> np.ndarray:
        """Return the slots of ids, int64 [n]; unknown ones get one."""
        slots = np.fromiter(map(self._slot, ids), np.int64)
        if len(self.ids) > len(self.sums):
            size = max(2 * len(self.sums), len(self.ids))
            for name in ("sums", "counts", "is_changed"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(size - len(column), column.dtype)]))
        self.is_changed[slots] = True
        return slots

    def _slot(self, key: Any) -> int:
        slot = self.slot_of.get(key)
        if slot is None:
            if self._free:
                slot = self._free.pop()
                self.ids[slot] = key
            else:
                slot = len(self.ids)
                self.ids.append(key)
            self.slot_of[key] = slot
            self.removed.pop(key, None)
        return slot

    def add(self, slots: np.ndarray, labels: np.ndarray) -> None:
        """Add labels of events, [n], to the sums of slots, int64 [n]."""
        np.add.at(self.sums, slots, labels)
        np.add.at(self.counts, slots, 1)

    def taken(self) -> np.ndarray:
        """Return the slots in use, int64, in the order in which their ids were inserted."""
        return np.fromiter(self.slot_of.values(), np.int64, len(self.slot_of))

    def remove(self, slots: np.ndarray) -> None:
        """Remove the ids of some slots."""
        for slot in slots.tolist():
            key, self.ids[slot] = self.ids[slot], None
            del self.slot_of[key]
            if self._keeps_changes:
                self.removed[key] = None
            self._free.append(slot)
        self.sums[slots], self.counts[slots], self.is_changed[slots] = 0, 0, False

    def clear_changes(self) -> None:
        """Forget which ids were changed or removed."""
        self.is_changed[:] = False
        self.removed.clear()


class Lists:
    """Last items of each user, list after list in growing arrays. A list that changes moves to the end.

    longest: most items of a list before its newest time, and most items of that time.
    """

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.starts, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._columns: list[np.ndarray] = [np.zeros(0, kind) for kind in ("int64", "float32", "int64")]
        self._end = 0

    def of(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the entries of users: of each, its user's place among the slots, item, label and time."""
        counts = self.counts[slots]
        places = places_of(self.starts[slots], counts)
        items, labels, times = (column[places] for column in self._columns)
        return np.arange(len(slots)).repeat(counts), items, labels, times

    def make_room(self, num_slots: int) -> None:
        """Make room for so many users."""
        if num_slots > len(self.starts):
            more = np.zeros(max(2 * len(self.starts), num_slots) - len(self.starts), np.int64)
            self.starts, self.counts = (
                np.concatenate([column, more]) for column in (self.starts, self.counts)
            )

    def extend(self, user: np.ndarray, *events: np.ndarray) -> None:
        """Add events to the lists of their users.

        user: slots; events: slots of items, labels and times, in the order of time, [n] each. An event is not
        older than those of its user in the lists.
        """
        slots, owner = np.unique(user, return_inverse=True)
        before = self.of(slots)
        owners = np.concatenate([before[0], owner])
        order = np.argsort(owners, kind="stable")
        owners = owners[order]
        columns = [np.concatenate(both)[order] for both in zip(before[1:], events, strict=True)]
        kept = self._is_kept(owners, columns[2], len(slots))
        counts = np.bincount(owners[kept], minlength=len(slots))
        self.starts[slots] = self._end + counts.cumsum() - counts
        self.counts[slots] = counts
        self._append([column[kept] for column in columns])
        self._move_together()

    def _is_kept(self, owners: np.ndarray, times: np.ndarray, number: int) -> np.ndarray:
        """Return a mask of the entries that a later event may read."""
        ends = np.bincount(owners, minlength=number).cumsum()
        from_end = ends[owners] - 1 - np.arange(len(owners))
        # A later event of the newest time does not read others of it, see `columns`, but those before.
        is_newest = times == times[ends[owners] - 1]
        num_newest = np.bincount(owners[is_newest], minlength=number)
        return np.where(is_newest, from_end, from_end - num_newest[owners]) < self.longest

    def _append(self, columns: list[np.ndarray]) -> None:
        end = self._end + len(columns[0])
        if end > len(self._columns[0]):
            size = max(2 * self._end, end)
            self._columns = [
                np.concatenate([held[: self._end], np.zeros(size - self._end, held.dtype)])
                for held in self._columns
            ]
        for held, column in zip(self._columns, columns, strict=True):
            held[self._end : end] = column
        self._end = end

    def _move_together(self) -> None:
        used = int(self.counts.sum())
        if self._end - used <= max(used, LEAST_MOVED):
            return
        slots = np.flatnonzero(self.counts)
        counts = self.counts[slots]
        places = places_of(self.starts[slots], counts)
        self._columns = [column[places] for column in self._columns]
        self.starts[slots], self._end = counts.cumsum() - counts, used

    def remove(self, slots: np.ndarray) -> None:
        """Empty the lists of users."""
        self.counts[slots] = 0

    def items(self) -> np.ndarray:
        """Return the slots of the items in the lists, int64, ascending."""
        slots = np.flatnonzero(self.counts)
        return np.unique(self._columns[0][places_of(self.starts[slots], self.counts[slots])])


class RecentEvents:
    """Last items of each user, and sums of labels, of the learned events of a stream.

    users, items: with the sums of their labels; lists: last items of each user, with labels and times; total,
    number: sum and number of all labels. longest: length of a user history; keeps_changes: True if deltas are
    written.
    """

    def __init__(self, longest: int, keeps_changes: bool = False) -> None:
        self.users, self.items, self.lists = Entities(keeps_changes), Entities(keeps_changes), Lists(longest)
        self.total, self.number = 0.0, 0

    def learn(
        self,
        ids: tuple[np.ndarray, np.ndarray],
        user: np.ndarray,
        item: np.ndarray,
        label: np.ndarray,
        time: np.ndarray,
    ) -> None:
        """Add events in the order of time.

        ids: raw ids of users and of items; user, item: positions among them, int [n]; label: float32 [n];
        time: int64 [n], seconds since 1970.
        """
        slots = []
        for entity, of_entity, positions in zip((self.users, self.items), ids, (user, item), strict=True):
            used, inverse = np.unique(positions, return_inverse=True)
            slots.append(entity.insert(of_entity[used].tolist())[inverse])
            entity.add(slots[-1], label)
        # One after the other: the same bits whatever the parts are.
        total = np.array([self.total])
        np.add.at(total, np.zeros(len(label), np.int64), label)
        self.total = float(total[0])
        self.number += len(label)
        self.lists.make_room(len(self.users.ids))
        if self.lists.longest:
            self.lists.extend(*slots, label, time)

    def sums_of(self, ids: tuple[np.ndarray, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the sums and numbers of labels of users and items, float64 [n, 2], and of all, [1, 2]."""
        user, item = (
            _sums_of(entity, of_entity)
            for entity, of_entity in zip((self.users, self.items), ids, strict=True)
        )
        return {"past_user": user, "past_item": item, "past_all": np.array([[self.total, self.number]])}

    def remove_users(self, slots: np.ndarray) -> None:
        """Remove users, by their slots."""
        self.users.remove(slots)
        self.lists.remove(slots)

    def clear_changes(self) -> None:
        """Forget what was changed, after it was written."""
        self.users.clear_changes()
        self.items.clear_changes()

    def arrays(self, is_delta: bool) -> dict[str, np.ndarray]:
        """Return the content as arrays of a file; of a delta what changed since `clear_changes`."""
        arrays = {"past_all": np.array([self.total, self.number])}
        for name, entity in (("users", self.users), ("items", self.items)):
            slots = np.flatnonzero(entity.is_changed) if is_delta else entity.taken()
            arrays |= _arrays_of(f"{name}.ids", [entity.ids[slot] for slot in slots.tolist()])
            arrays |= {f"{name}.sums": entity.sums[slots], f"{name}.counts": entity.counts[slots]}
            arrays |= _arrays_of(f"{name}.removed", [*entity.removed] if is_delta else [])
            if entity is self.users:
                _, items, labels, times = self.lists.of(slots)
                distinct, place = np.unique(items, return_inverse=True)
                arrays |= _arrays_of("lists.ids", [self.items.ids[slot] for slot in distinct.tolist()])
                arrays |= {"lists.counts": self.lists.counts[slots], "lists.items": place.astype(np.int32)}
                arrays |= {"lists.labels": labels, "lists.times": times}
        return arrays

    def add_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Add the content of a file: a full checkpoint first, then its deltas in order.

        Raises:
            KeyError, ValueError: when it has other content.
        """
        self.total, number = arrays["past_all"].tolist()
        self.number = int(number)
        for name, entity in (("users", self.users), ("items", self.items)):
            removed = entity.find(_ids_of(f"{name}.removed", arrays))
            if entity is self.users:
                self.remove_users(removed[removed >= 0])
            else:
                entity.remove(removed[removed >= 0])
            slots = entity.insert(_ids_of(f"{name}.ids", arrays))
            entity.sums[slots], entity.counts[slots] = arrays[f"{name}.sums"], arrays[f"{name}.counts"]
            if entity is self.users:
                users = slots
                self.lists.make_room(len(entity.ids))
        # What was written is replaced, not extended.
        self.lists.remove(users)
        if self.lists.longest and len(arrays["lists.items"]):
            items = self.items.insert(_ids_of("lists.ids", arrays))[arrays["lists.items"]]
            user = users.repeat(arrays["lists.counts"])
            self.lists.extend(user, items, arrays["lists.labels"], arrays["lists.times"])
        self.clear_changes()


def _sums_of(entity: Entities, ids: np.ndarray) -> np.ndarray:
    slots = entity.find(ids.tolist())
    sums, known = np.zeros((len(slots), 2)), slots >= 0
    sums[known, 0], sums[known, 1] = entity.sums[slots[known]], entity.counts[slots[known]]
    return sums


def _arrays_of(name: str, ids: list[Any]) -> dict[str, np.ndarray]:
    """Return ids as arrays of a file: whole numbers, or the UTF-8 of texts and the end of each."""
    if not ids or isinstance(ids[0], int):
        return {name: np.array(ids, np.int64)}
    texts = [text.encode("utf-8", "surrogatepass") for text in ids]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return {f"{name}.bytes": np.frombuffer(b"".join(texts), np.uint8), f"{name}.ends": ends}


def _ids_of(name: str, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    if name in arrays:
        return arrays[name].tolist()
    content, ends = arrays[f"{name}.bytes"].tobytes(), arrays[f"{name}.ends"].tolist()
    begins = [0, *ends[:-1]]
    return [
        content[begin:end].decode("utf-8", "surrogatepass") for begin, end in zip(begins, ends, strict=True)
    ]
