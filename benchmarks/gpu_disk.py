"""Dump and load of large tables, beside plain writing and reading of the same disk: a section of
benchmarks/gpu.py.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint_reading import PlainRead, forget
from checkpoint_setup import MOST_AT_ONCE
from gpu_device import Deadline, Emit, Settings, rows_drawn_on_device, run_section, synchronize
from gpu_training import two_tables
from train_models import columns_of, make_columns
from train_team import MLP_DIMS

from recsuite.checkpoint.format import VOCABULARY
from recsuite.config.config import Config
from recsuite.datasets.schema import SCHEMA_FILE
from recsuite.runtime.host import available_memory
from recsuite.runtime.process import RuntimeContext, init_runtime

DIM = 64
ROWS, SMALL_ROWS = 100_000_000, 20_000
ITEMS = 1_000
# Of the file by which the disk's own rates are measured.
PLAIN_BYTES, SMALL_PLAIN_BYTES = 2**32, 2**22
# A checkpoint is written, and read twice: for its digests, and for its rows. Shares of the time and the disk
# that may be used for that.
SHARE_OF_TIME, SHARE_OF_DISK, SHARE_OF_MEMORY = 0.6, 0.8, 0.4


def measure(settings: Settings, emit: Emit) -> None:
    """The disk's rates, then those of a full checkpoint of tables that fit disk, memory and time."""
    deadline = Deadline(settings.seconds)
    context = init_runtime(Config())
    folder = Path(settings.folder)
    plain = plain_rates(folder, settings.small_or(SMALL_PLAIN_BYTES, PLAIN_BYTES), context)
    emit({"of": "plain", **plain})
    rows = rows_that_fit(
        settings.small_or(SMALL_ROWS, ROWS),
        shutil.disk_usage(folder).free,
        available_memory()[0],
        deadline.left,
        plain["write bytes a second"],
        plain["read bytes a second"],
    )
    for found in checkpoint_rates(rows, folder, context):
        emit({"of": "checkpoint", "rows": rows, **found})


def rows_that_fit(
    rows: int, disk: int, memory: int, seconds: float, write_rate: float, read_rate: float
) -> int:
    """How many of the rows that are wanted, at so many bytes free on the disk and in memory, at these
    seconds, and bytes a second.
    """
    row = 4 * (DIM + 1)
    in_time = SHARE_OF_TIME * seconds / (1 / write_rate + 2 / read_rate)
    return max(
        1, min(rows, *(int(each / row) for each in (SHARE_OF_DISK * disk, SHARE_OF_MEMORY * memory, in_time)))
    )


def plain_rates(folder: Path, num_bytes: int, context: RuntimeContext) -> dict[str, float]:
    """Bytes a second to and from the disk, past what the host keeps in memory, in one file."""
    # Of random bytes: a disk may keep zeros in no place at all.
    block = np.random.default_rng(0).bytes(min(num_bytes, MOST_AT_ONCE))
    path = folder / "plain"
    path.mkdir()
    began = time.perf_counter()
    with open(path / "file", "wb", buffering=0) as file:
        for _ in range(num_bytes // len(block)):
            assert file.write(block) == len(block)
        os.fsync(file.fileno())
    writing = time.perf_counter() - began
    forget(path, context)
    # Its memory is touched before, as that of tables is.
    read = PlainRead([path / "file"], context)
    began = time.perf_counter()
    read()
    reading = time.perf_counter() - began
    shutil.rmtree(path)
    return {
        "bytes": num_bytes,
        "write bytes a second": num_bytes / writing,
        "read bytes a second": num_bytes / reading,
    }


def checkpoint_rates(rows: int, folder: Path, context: RuntimeContext) -> Any:
    """Bytes a second of writing a full checkpoint, and then of loading it from the disk."""
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.checkpointer import Checkpointer
    from recsuite.checkpoint.restore import restore
    from recsuite.training.state import build_train_state

    model = two_tables(DIM, MLP_DIMS, 4096, 100_000)
    config = model.config.replaced(dump=True, save_dir=str(folder / "dumps"))
    made = folder / "columns"
    made.mkdir()
    make_columns(made, rows, ITEMS, model.num_ratings, model)
    for name in (VOCABULARY, SCHEMA_FILE):
        # A checkpoint copies them; of raw values there are none to be written.
        (made / name).write_text("{}")
    columns = columns_of(made, model)
    with rows_drawn_on_device():
        state = build_train_state(columns, config, context)
    checkpointer = Checkpointer(None, "benchmark", columns, config, context)
    Path(config.checkpoint.save_dir).mkdir()
    checkpointer.begin(state)
    synchronize(context.device)
    began = time.perf_counter()
    checkpointer.writer.write_full(checkpointer.start)
    checkpointer.close()
    seconds = time.perf_counter() - began
    chain = chain_at(Path(config.checkpoint.save_dir))
    num_bytes = sum(path.stat().st_size for path in chain.base.iterdir())
    yield {"what": "dump", "bytes": num_bytes, "seconds": seconds, "bytes a second": num_bytes / seconds}
    forget(chain.base, context)
    began = time.perf_counter()
    restore(chain, state, columns, context)
    synchronize(context.device)
    seconds = time.perf_counter() - began
    yield {"what": "load", "bytes": num_bytes, "seconds": seconds, "bytes a second": num_bytes / seconds}


if __name__ == "__main__":
    run_section({"disk": measure})
