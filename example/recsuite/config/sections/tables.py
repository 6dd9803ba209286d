"""The flags of the embedding tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.durations import Duration, duration
from recsuite.config.section import Section, require

# Of one part of --capacity: a number of places, a share of the memory, or as many as the data call for.
AUTO = "auto"
PLACES = re.compile(r"[0-9]{1,19}", re.ASCII)
SHARE = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)%", re.ASCII)
MOST_PLACES = 2**40


@dataclass(frozen=True)
class TablesConfig(Section):
    """How raw values find their rows."""

    CHOICES: ClassVar = {
        "ids": ("schema", "vocabulary", "dynamic"),
        "evict": ("lru", "lfu", "ttl", "none"),
        "distribution": ("continuous", "roundrobin", "hash"),
    }
    POSITIVE: ClassVar = ("admit", "max_growth")
    MOST: ClassVar = {"admit": 1_000_000, "max_growth": 1024}

    ids: str = "schema"
    """How users, items and other categories find their rows: by a vocabulary of what the training shows, by
    their own ids, of which a table takes in any (dynamic), or for each feature as its schema says."""

    capacity: str = AUTO
    """How many places for rows a dynamic table has: a number, a share of the memory for tables such as 25%,
    which it takes once it has grown, auto for twice the ids of the data, which a stream does not know, or
    NAME=VALUE for some tables, with commas between them."""

    admit: int = 1
    """In how many training steps an id of a dynamic table must be seen before it gets a row."""

    evict: str = "lru"
    """Whose row is given away where a new id finds no place: that of the id that was not seen for longest
    (lru), that was seen least (lfu), of one that has expired alone (ttl), or nobody's (none)."""

    ttl: str = "0"
    """After how long without being seen a row of a dynamic table expires: a number of steps or, with
    --stream, a time such as 90d; 0 means never."""

    half_life: str = "0"
    """After how long half of what --evict lfu has counted is left, in the unit of --ttl; 0 means never."""

    distribution: str = "continuous"
    """Which rank has which part of a dynamic table: a range each (continuous), one after the other
    (roundrobin), or drawn (hash); changes no result."""

    grow: float = 0.75
    """The share of its places that may be taken before a dynamic table gets twice as many; 0 means never."""

    max_growth: int = 8
    """How many times its first --capacity a dynamic table may grow to; the memory is planned for that, and
    used as rows come."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        self.capacities()
        require(0 <= self.grow <= 1, f"--grow {self.grow} is not a share; give 0 to 1")
        require(
            self.evict != "ttl" or self.expiry.amount > 0,
            "--evict ttl gives away rows that have expired, and --ttl 0 lets none expire; give --ttl too",
        )
        require(
            self.evict == "lfu" or self.halving.amount == 0,
            f"--half_life {self.half_life} ages what --evict lfu counts, and --evict is {self.evict}; give "
            "--evict lfu too",
        )
        units = {part.is_time for part in (self.expiry, self.halving) if part.amount}
        require(
            len(units) < 2,
            f"--ttl {self.ttl} and --half_life {self.half_life} are in different units; give both as times "
            "or both as steps",
        )

    @property
    def expiry(self) -> Duration:
        """What --ttl says."""
        return duration("ttl", self.ttl, "steps")

    @property
    def halving(self) -> Duration:
        """What --half_life says."""
        return duration("half_life", self.half_life, "steps")

    @property
    def unit(self) -> str:
        """What both are counted in: "seconds" of the events' time, or "steps"."""
        return "seconds" if self.expiry.is_time or self.halving.is_time else "steps"

    def capacities(self) -> Mapping[str, str]:
        """What --capacity says of each table by name, and of all others by the name "".

        Raises:
            UserError: when it is none of what it may be.
        """
        # A comma within a number would part it, so numbers have none.
        found = {"": AUTO}
        for part in self.capacity.split(","):
            name, _, value = part.strip().rpartition("=")
            require(
                self._is_capacity(value),
                f"--capacity {self.capacity} asks for {value or 'nothing'}; give a number of places "
                f"from 1 to {MOST_PLACES:,}, a share of the memory such as 25%, or auto",
            )
            found[name] = value
        return found

    def _is_capacity(self, value: str) -> bool:
        share = SHARE.fullmatch(value)
        if share:
            return 0 < float(share[1]) <= 100
        return value == AUTO or bool(PLACES.fullmatch(value) and 1 <= int(value) <= MOST_PLACES)
