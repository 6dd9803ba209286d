"""Program of many ranks in `test_partitions_on_ranks.py`: the flags are FOLDER RESULTS RANKS PARTITIONS.

The ranks are threads of one process, see `many_ranks.py`. Each evaluates fixed weights and trains an epoch.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import example
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.runtime.process import RuntimeContext, end_process
from recsuite.sharding import cpu_tables, plan
from recsuite.sharding.exchange import Exchange
from tests.support import many_ranks
from tests.support.partition_ranks import COMMON, evaluated
from tests.support.trainings import gather

SEED_LOCK, make, make_model = threading.Lock(), EventBatches.make, example.make_model


def main() -> int:
    """Run the ranks; return the exit status."""
    folder, results, ranks, partitions = sys.argv[1:]
    flags = {"data_path": folder, "partitions": int(partitions), "num_workers": 0, "batch_size": 256}
    config = Config.of(**{**COMMON, **flags, "by": "city,history_length,item_events"})

    def run(_results: Path, _data: str, _folder: Path, context: RuntimeContext) -> None:
        many_ranks.CURRENT.times = []
        found = evaluated(config, context)
        everyones = gather([found["steps"], len(found["losses"]), many_ranks.CURRENT.times], context)
        if context.rank == 0:
            Path(results).write_text(json.dumps({**found, "ranks": everyones}))

    with (
        mock.patch.object(many_ranks, "run", run),
        mock.patch.object(cpu_tables, "open_exchange", lambda group, timeout: Exchange(group)),
        mock.patch.object(EventBatches, "make", make_and_note),
        mock.patch.object(example, "make_model", make_alone),
        # Set by each rank, and set back: that of another rank.
        mock.patch.object(plan, "INIT_STD", 0.4),
    ):
        return many_ranks.run_threads(Path(results), folder, Path(folder), int(ranks))


def make_alone(data: Any, args: Any) -> torch.nn.Module:
    """Make the model of example.py. Threads share torch's generator, so one after the other."""
    with SEED_LOCK:
        torch.manual_seed(0)
        return make_model(data, args)


def make_and_note(self: EventBatches, request: Request, *arguments: Any) -> Any:
    """Make a batch, and note the times of its training events."""
    if request.split == "train":
        positions = self._positions_of_step(request)[0]
        many_ranks.CURRENT.times += self.features.column("time")[positions].tolist()
    return make(self, request, *arguments)


if __name__ == "__main__":
    end_process(main())
