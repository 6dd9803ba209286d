"""The doctor's lines about the data: where they and their columns lie, and what batches of them need."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.config.config import Config
from recsuite.errors import UserError, counted
from recsuite.files import reason_of
from recsuite.tools.examination.findings import Finding, human_size, judge
from recsuite.tools.examination.machine import Need

if TYPE_CHECKING:
    from recsuite.datasets.columns import Columns

# Bytes of what the columns hold besides ratings, amply.
LITTLE_DISK = 10 * 2**20
# Bytes of "1,1,4.0,123456789" and its end: no file has more ratings than lines of that.
SHORTEST_LINE = 18
# The most values that a known set has in a list, for batches whose columns are not made yet.
MOST_VALUES = 10


def check_data(config: Config) -> list[Finding]:
    """Where the data and their columns lie, and their size; unlike a run it obtains and makes none."""
    # Here, as in `machine.py`: a package that is broken is then a fault of this line alone.
    from recsuite.datasets.preparation.cache import find_columns
    from recsuite.datasets.source import NUM_EVENTS, locate, look

    try:
        folder, source = look(config.data, config.runtime.seed)
        if source:
            # Refuses files of another set.
            locate(config.data, config.runtime.seed)
        files = source.files if source else ()
        for file in files:
            file.open().close()
        size = sum(file.size for file in files)
        cache, columns = find_columns(config)
    except OSError as error:
        text = f"{error.filename or config.data.data_path} cannot be read ({reason_of(error)})"
        return [Finding("data", "fault", text, "give a --data_path that can be read, or change its mode")]
    how = "drawn" if config.data.is_synthetic else "downloaded"
    there = (
        f"{counted(len(files), 'file')}, {human_size(size)}"
        if files
        else f"not there yet, {how} at the first start"
    )
    remedy = "the first start needs the network; or unpack the files there, or give --data_path"
    missing = not files and not config.data.is_synthetic
    data = judge("data", f"{folder}: {there}", (missing, "warning", remedy))
    num_ratings = (
        config.data.synthetic_ratings
        if config.data.is_synthetic
        else NUM_EVENTS.get(config.data.dataset, size // SHORTEST_LINE)
    )
    return [data, check_cache(cache.absolute(), columns, num_ratings)]


def check_cache(cache: Path, columns: Columns | None, num_ratings: int) -> Finding:
    """Where the columns lie and their size, or whether there is room for them."""
    from recsuite.datasets.columns import BYTES_OF_AN_EVENT, BYTES_WHILE_MADE

    if columns is not None:
        size = sum(path.stat().st_size for path in Path(columns.folder).iterdir())
        return Finding("cache", "ok", f"{columns.folder}: {human_size(size)}")
    # The cache may not be there yet; what there is above it lies on the same disk.
    parent = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(parent).free
    need = LITTLE_DISK + (BYTES_OF_AN_EVENT + BYTES_WHILE_MADE) * num_ratings
    text = f"{cache}: no columns of these data yet, made at the first start; {human_size(free)} free"
    text += f" for up to {human_size(need)}"
    return judge(
        "cache",
        text,
        (not os.access(parent, os.W_OK), "fault", f"{parent} cannot be written: give another --cache_dir"),
        # Not a fault: what is needed is at most this.
        (free < need, "warning", "make room, or give --cache_dir a folder on another disk"),
    )


def ring_need(config: Config, num_ranks: int, num_workers: int) -> Need:
    """What the workers' batches take, from the columns if they are made, else from what known sets have."""
    from recsuite.datasets.batching.batch import largest_batch
    from recsuite.datasets.preparation.cache import find_columns
    from recsuite.datasets.schema import Table
    from recsuite.datasets.source import FIRST_SCHEMA, NUM_EVENTS
    from recsuite.workers.pool import SLOTS_BEYOND_PREFETCH

    # Of columns that are not made yet, only how many values a batch holds matters here.
    tables = tuple(
        Table(feature, 1, MOST_VALUES if feature.multi else 1) for feature in FIRST_SCHEMA.features
    )
    lists = {name: most for name, most in config.data.lists.items() if most}
    tables = (*tables, *(Table(getattr(FIRST_SCHEMA, name), 1, most) for name, most in lists.items()))
    num_numbers, most_shared = 0, NUM_EVENTS.get(config.data.dataset, 0) if config.data.shares_lists else 0
    # Where the data cannot be read, their own line says so.
    with contextlib.suppress(OSError, UserError):
        columns = find_columns(config)[1]
        if columns is not None:
            tables, num_numbers = columns.tables, len(columns.numbers)
            most_shared = columns.num_train + columns.num_validation if config.data.shares_lists else 0
    negatives = config.model.num_negatives(config.model.negatives)
    slot = largest_batch(tables, num_numbers, config.loader.batch_size, config.model, negatives, most_shared)
    num_slots = config.loader.prefetch_factor + SLOTS_BEYOND_PREFETCH
    num_bytes = num_ranks * num_workers * num_slots * slot
    of = f"{num_slots} slots of {human_size(slot)} for each of {num_ranks} x {counted(num_workers, 'worker')}"
    return Need(
        num_bytes, f"up to {human_size(num_bytes)} ({of})" if num_workers else "nothing without workers"
    )
