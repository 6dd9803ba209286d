"""Makes columns of drawn events, mapped from files as those of large tables are, for `test_bounded_memory`.

python making_columns.py FOLDER NUM_EVENTS SPLIT DUPLICATES            prints the bytes that it took
python making_columns.py FOLDER NUM_EVENTS SPLIT DUPLICATES clicks     of clicks, not ratings
python making_columns.py FOLDER NUM_EVENTS SPLIT DUPLICATES own        with a weight and features of the event
python making_columns.py FOLDER NUM_EVENTS SPLIT DUPLICATES stop       stops where histories are written
"""

from __future__ import annotations

import dataclasses
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas

from recsuite import metrics
from recsuite.config.sections import DataConfig
from recsuite.datasets import arrays
from recsuite.datasets.preparation import loops, making, vocabulary
from recsuite.datasets.preparation.splits import settle
from recsuite.datasets.schema import (
    BUCKETS,
    CLICKS,
    DENSE,
    EVENT,
    ITEM,
    USER,
    Codes,
    Events,
    Feature,
    RawData,
    Schema,
)
from recsuite.extras import leakage

FEATURES = (Feature("user", USER, "user_id"), Feature("item", ITEM, "item_id"))
OF_EVENTS = (
    Feature("device", EVENT, "device"),
    Feature("price", EVENT, "price", number=BUCKETS),
    Feature("discount", EVENT, "discount", number=DENSE),
)
SCHEMA = Schema(FEATURES, "user", "item", "title", "rating", 1.0, 5.0, 4.0)


def main() -> None:
    """Draw, make, print."""
    folder, number, split, duplicates = Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:5]
    # As small beside these events as they are beside a hundred million: what grows with the events is seen.
    arrays.CHUNK, loops.RANGE_EVENTS, arrays.SMALL_BYTES = 2**15, 2**14, 2**16
    leakage.MOST_EVENTS, vocabulary.MOST_FITTED, metrics.CHUNK = 2**12, 2**14, 2**15
    # Compiled loops take memory that does not grow with the events.
    make(folder, 1_000, split, duplicates)
    shutil.rmtree(folder / "columns")
    if "stop" in sys.argv:
        mock.patch.object(making, "write_histories", stop).start()
    print(make(folder, number, split, duplicates))


def make(folder: Path, number: int, split: str, duplicates: str) -> int:
    """Draw events and make columns of them; return how much the memory grew while they were made."""
    raw, schema = drawn(folder, number), SCHEMA
    if "clicks" in sys.argv:
        raw.events.label[:] = 1
        arrays.release(raw.events.label)
        schema = dataclasses.replace(SCHEMA, label_kind=CLICKS)
    if "own" in sys.argv:
        schema = dataclasses.replace(SCHEMA, features=(*FEATURES, *OF_EVENTS))
        add_own(folder, raw.events)
    before = memory("VmRSS")
    # From now on the peak is counted.
    Path("/proc/self/clear_refs").write_text("5")
    config = DataConfig(split=split, duplicates=duplicates)
    settled = settle(raw, duplicates, schema, folder)
    making.make_columns(folder / "columns", settled, schema, config, seed=0)
    return memory("VmHWM") - before


def drawn(folder: Path, number: int) -> RawData:
    """Events of users and items of which few are popular, at times without order, some of them repeated."""
    draw = np.random.default_rng(0)
    num_users, num_items = number // 100, number // 500
    dtypes = (np.int32, np.int32, np.float32, np.int64)
    user, item, label, seconds = columns = [arrays.temporary(folder, number, dtype) for dtype in dtypes]
    for part in arrays.chunks(number, *columns):
        rows = part.stop - part.start
        user[part] = num_users * draw.random(rows) ** 2
        item[part] = num_items * draw.random(rows) ** 3
        label[part] = draw.integers(1, 6, rows)
        seconds[part] = draw.integers(1_500_000_000, 1_600_000_000, rows)
    items = pandas.DataFrame({"item_id": np.arange(num_items), "title": "Title"})
    users = pandas.DataFrame({"user_id": np.arange(num_users)})
    return RawData(Events(user, item, label, seconds), items, users)


def add_own(folder: Path, events: Events) -> None:
    """Give each event a weight, a category and two numbers."""
    draw, number = np.random.default_rng(1), len(events.user)
    device = arrays.temporary(folder, number, np.int32)
    weight, price, discount = (arrays.temporary(folder, number, np.float32) for _ in range(3))
    for part in arrays.chunks(number, device, weight, price, discount):
        rows = part.stop - part.start
        device[part] = draw.integers(-1, 3, rows)
        for column in (weight, price, discount):
            column[part] = draw.random(rows)
    events.weight = weight
    codes = Codes(device, ["desktop", "phone", "tablet"])
    events.features = {"device": codes, "price": price, "discount": discount}


def stop(*arguments: Any) -> None:
    """Say so, and never return."""
    print("stopped", flush=True)
    time.sleep(1_000)


def memory(name: str) -> int:
    """Bytes of this process, mapped files included: VmRSS, which it has, or VmHWM, the most that it had."""
    found = re.search(rf"{name}:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
