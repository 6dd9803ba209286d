"""Program of each rank of a launch in `extras/test_plan.py`: memory of tables, and bytes that ranks exchange.

python plan_ranks.py RESULTS DATA STEPS FLAGS...
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from recsuite.config.config import Config
from recsuite.config.parser import parse_given
from recsuite.runtime.process import RuntimeContext, all_gather_object, end_process, once_per_node
from recsuite.tools.script import joined_launch

WARM_UP_DIM = 8


def main() -> None:
    """Write a list with an entry for each rank."""
    results, data, steps, *flags = sys.argv[1:]
    with joined_launch(*parse_given(["--data_path", data, *flags])) as (config, context):
        found = measure(config, context, int(steps))
        everyones = all_gather_object(lambda: found)
    if context.rank == 0:
        Path(results).write_text(json.dumps(everyones))


def measure(config: Config, context: RuntimeContext, steps: int) -> dict[str, Any]:
    """Bytes of the tables as tensors and as resident memory; of each step those read and sent."""
    from example import make_loss, make_model
    from recsuite.datasets.opening import load
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.training.state import build_train_state
    from recsuite.training.steps import BatchFeed
    from tests.support.benchmarks import benchmark
    from tests.support.steps import make_step

    once_per_node(context, lambda: open_columns(config), deadline=60)
    columns = open_columns(config)
    # Imports and compiled loops are no memory of tables.
    build_train_state(columns, config.replaced(embedding_dim=WARM_UP_DIM), context, make_model)
    before = resident()
    train_state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    found: dict[str, Any] = {"resident": resident() - before}
    shardings = [item for module in train_state.model.plan.plan.values() for item in module.items()]
    found["plan"] = {name: [table.sharding_type, table.ranks] for name, table in shardings}
    tensors = [each for table in train_state.tables.values() for each in table.tensors.values()]
    shards = [shard.tensor for tensor in tensors for shard in tensor.local_shards()]
    found["tensors"] = sum(shard.numel() * shard.element_size() for shard in shards)
    read, counted = noting_reads(), benchmark("exchange").counted
    found["sent"] = []
    with load(columns, config.replaced(num_workers=0), context) as loader:
        for batch in itertools.islice(BatchFeed(loader).batches("train", 0), steps):
            read.append({})
            with counted(context.rank) as sent:
                make_step(train_state, batch)
            found["sent"].append([*sent.values()])
    return {**found, "read": read}


def resident() -> int:
    """Resident bytes of this process, without those that malloc keeps for later."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def noting_reads() -> list[dict[str, list[list[int]]]]:
    """Return a list whose last entry gets, by channel, the rank and the bytes of each read from a buffer."""
    from recsuite.sharding.exchange import CHANNELS, SLOTS, SharedExchange

    real, noted = SharedExchange._rows_of, list[dict[str, list[list[int]]]]()

    def rows_of(exchange: Any, rank: int, outgoing: Any, first: int, count: int) -> Any:
        found = real(exchange, rank, outgoing, first, count)
        if rank != exchange.rank:
            channel = CHANNELS[outgoing.slot // SLOTS]
            noted[-1].setdefault(channel, []).append([rank, found.numel() * found.element_size()])
        return found

    mock.patch.object(SharedExchange, "_rows_of", rows_of).start()
    return noted


if __name__ == "__main__":
    main()
    end_process(0)
