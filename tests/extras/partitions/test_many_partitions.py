"""16 ranks with 64 partitions, beside the same data in one piece; the ranks are threads of one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from tests.extras.partitions.test_partitions_on_ranks import BY_GROUPS, OF_DATA, assert_close
from tests.support.launch import SUPPORT, python, read_json, succeeded
from tests.support.partition_files import log, partition_of, write_partitions

RANKS, PARTITIONS = 16, 64


@pytest.mark.soak
def test_16_ranks_read_4_partitions_each_and_give_the_metrics_of_one_piece(tmp_path: Path) -> None:
    if not hasattr(ProcessLocalGroup, "all_to_all_single"):
        pytest.skip("the ranks as threads of torch 2.11 exchange no rows")
    events = log(num_users=1_500, num_items=300, number=20_000)
    folder, results = write_partitions(tmp_path / "data", PARTITIONS, events), tmp_path / "found.json"
    found = []
    for ranks, partitions in ((1, 0), (RANKS, PARTITIONS)):
        script = SUPPORT / "partition_threads.py"
        succeeded(python(script, folder, results, ranks, partitions, timeout=400))
        found.append(read_json(results))
    one, many = found
    for name in OF_DATA:
        assert_close(many[name], one[name])
    for split in ("validation", "test"):
        assert_close(many[split], one[split], BY_GROUPS)
    assert one["test"]["cases"] == (events["split"] == "test").sum()
    # Each rank has the training events of its own partitions once, in as many steps.
    train = events[events["split"] == "train"]
    owners = partition_of(train["user"], PARTITIONS) % RANKS
    for rank, (steps, num_losses, times) in enumerate(many["ranks"]):
        assert steps == many["steps"]
        assert num_losses == len(steps)
        assert sorted(times) == np.sort(train["time"][owners == rank]).tolist()
    assert sum(many["steps"]) == len(train)
    assert len(many["steps"]) == pytest.approx(len(one["steps"]), abs=1)
