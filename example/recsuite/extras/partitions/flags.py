"""Flags of a data set of partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from recsuite.config.config import Config, ExtraSection
from recsuite.config.flag import flag
from recsuite.errors import require
from recsuite.places import is_remote

# The most partitions that are expected.
MOST_PARTITIONS = 100_000


@dataclass(frozen=True)
class PartitionsConfig(ExtraSection):
    """Data sets of partitions, of which each process reads its own."""

    data_flags: ClassVar[tuple[str, ...]] = ("partitions", "min_count")

    partitions: int = flag(
        0,
        "Number of partitions of the events, in folders events/part=0 and so on; each process reads its own "
        "alone. 0 reads the events as one table.",
        least=0,
        most=MOST_PARTITIONS,
    )
    min_count: int = flag(
        1,
        "Training events that a value of a fixed vocabulary must have for a row of its own; others share the "
        "unknown row.",
        least=1,
        most=1_000_000_000,
        requires=("partitions", True),
    )

    def check(self, config: Config) -> None:
        """Refuse flags that do not support partitions."""
        if not self.partitions:
            return
        data = config.data
        require(
            bool(data.data_path) and not data.dataset, "--partitions requires --data_path, without --dataset"
        )
        require(not config.stream.stream, "--partitions cannot be used with --stream")
        require(
            not is_remote(data.cache_dir),
            f"--partitions requires a --cache_dir on this machine, got {data.cache_dir}",
        )
        require(
            data.order == "time", f"--partitions requires events in order of time, got --order {data.order}"
        )
        require(
            data.day_feature == "none",
            f"--day_feature {data.day_feature} cannot be used with --partitions; give none",
        )
        require(
            config.model.initial_rows == "random",
            f"--initial_rows {config.model.initial_rows} cannot be used with --partitions; give random",
        )

    def reader(self) -> Any:
        """Return the module that reads partitions."""
        if not self.partitions:
            return None
        from recsuite.extras.partitions import reading

        return reading
