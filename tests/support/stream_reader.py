"""StreamReader of a stream in one process, without a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.growing_files import GrowingFiles, StreamFiles
from recsuite.datasets.preparation.recent import RecentEvents
from recsuite.datasets.preparation.stream_reader import StreamReader
from recsuite.datasets.streams import EMPTY_STREAM_STATE, StreamState


def sizes(config: Config) -> dict[str, int]:
    """Size of each file of a data set."""
    return GrowingFiles(config).ends()


def reader_of(
    config: Config, state: StreamState = EMPTY_STREAM_STATE, files: StreamFiles | None = None
) -> StreamReader:
    """Return a reader of a stream."""
    recent = RecentEvents(config.data.history, keeps_changes=True)
    return StreamReader(config, files or GrowingFiles(config), state, recent, "test")


def read(segments: StreamReader, config: Config, ends: Mapping[str, Any] | None = None) -> Columns:
    """Return the columns of the next segment, after what the files have now was read."""
    segments.read(sizes(config) if ends is None else ends)
    return segments.columns()


def append(path: Path, rows: Sequence[tuple[object, ...]]) -> None:
    """Append events of a user, an item, a label and a time to a CSV file."""
    header = "" if path.exists() else "user,item,rating,timestamp\n"
    with path.open("a") as file:
        file.write(header + "".join(",".join(map(str, row)) + "\n" for row in rows))
