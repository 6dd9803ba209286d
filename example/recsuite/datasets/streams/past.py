"""What a stream remembers of the data that it has seen, to find its place in data that have grown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from recsuite.errors import UserError

# A stream begins from the mean of so many first labels, and weights are one in their mean: of all events it
# would be known too early, and change as they become more.
HEAD = 1_000
# Keys that are digested at once.
AT_ONCE = 2**20


@dataclass(frozen=True)
class Past:
    """Of a stream that goes on: how its values became table rows, and which events came too late.

    vocabulary: the content of its vocabulary.json, empty for a stream that begins. late: (number of events
    that the files had, time that was learned by then): what stands behind that number in the files, and is
    older than that time, is left out. rows: how many events the files had when it was last opened, where the
    last rule is of that: without more of them it leaves nothing out, and the columns of then will do.
    """

    vocabulary: str = ""
    late: tuple[tuple[int, int], ...] = ()
    rows: int = 0

    @property
    def before(self) -> tuple[Past, ...]:
        """As which the columns may have been made, if the files are as they were."""
        return (BEGINNING, Past(self.vocabulary, self.late[:-1])) if self.rows else ()

    @property
    def known(self) -> dict[str, Any]:
        """Feature to what its table rows stand for, or how a number becomes one; empty where all is new."""
        found: dict[str, Any] = json.loads(self.vocabulary) if self.vocabulary else {}
        return found

    @property
    def key(self) -> list[Any]:
        """All of it, as the name of columns depends on it."""
        digest = xxhash.xxh3_64_hexdigest(self.vocabulary.encode()) if self.vocabulary else ""
        return [digest, [list(rule) for rule in self.late]]

    def is_late(self, time: np.ndarray) -> np.ndarray:
        """Which events came too late, bool [n], of the times of all events in the order of the files."""
        late = np.zeros(len(time), bool)
        for number, learned in self.late:
            late[number:] |= time[number:] < learned
        return late


BEGINNING = Past()


def keys_of(user: np.ndarray, item: np.ndarray, label: np.ndarray, time: np.ndarray) -> np.ndarray:
    """A number for each event that changes with any of its parts, uint64 [n].

    user, item: digests of their raw ids, uint64 [n], for their places change as others come between them.
    """
    found = user.astype(np.uint64)
    for part in (item, label.astype(np.float32).view(np.uint32), time.astype(np.int64).view(np.uint64)):
        # The multiplier of splitmix64: an event with two parts exchanged is another one.
        found *= np.uint64(0x9E3779B97F4A7C15)
        found ^= found >> np.uint64(31)
        found += part.astype(np.uint64)
    return found


def digests_of(ids: Any) -> np.ndarray:
    """A digest of each raw id, whole numbers or texts, uint64 [n]."""
    values = np.asarray(ids)
    if values.dtype.kind in "iu":
        return values.astype(np.int64).view(np.uint64)
    found = (xxhash.xxh3_64_intdigest(str(value).encode()) for value in values.tolist())
    return np.fromiter(found, np.uint64, len(values))


class Prefix:
    """A digest of all events of a stream up to a place, which grows with it."""

    def __init__(self, keys: np.ndarray, end: int = 0) -> None:
        """keys: of all events in the order of the stream, see `keys_of`."""
        self._hash = xxhash.xxh3_128()
        self.keys = keys
        self.end = 0
        self.extend(end)

    def extend(self, end: int) -> str:
        """The digest of the events before `end`, which is not before the last one."""
        for first in range(self.end, end, AT_ONCE):
            self._hash.update(self.keys[first : min(end, first + AT_ONCE)].tobytes())
        self.end = end
        return self._hash.hexdigest()


def check_prefix(keys: np.ndarray, end: int, digest: str, source: str) -> None:
    """Refuse data whose past is not what was learned from. keys: of all events in the order of the stream.

    Raises:
        UserError: when fewer events are there than were learned from, or others.
    """
    if end > len(keys) or Prefix(keys, end).extend(end) != digest:
        raise UserError(
            f"The first {end:,} events in the order of time of {source} are not those that this stream has "
            "learned from: a stream goes on where events were added behind them, not where older ones were "
            "added, changed or removed; put the files back as they were, or train anew without --resume."
        )
