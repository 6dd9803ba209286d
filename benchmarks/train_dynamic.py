"""Static and dynamic tables in one training: a rank of a team of benchmarks/dynamic_train.py.

    train_dynamic.py FOLDER

The columns in the folder have numbers for users and movies. To static tables these are rows; dynamic ones are
asked by ids, which `write_ids` draws. A table that is full holds them all before the first step, as after a
load, so a step takes nobody in; one that fills begins without any.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import numpy as np
from train_here import Here
from train_models import columns_of
from train_team import DIM, MLP_DIMS, serve, take_answers

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.runtime.process import end_process, init_runtime

STATIC, FULL, FILLING = "static", "dynamic", "dynamic, filling"
PUT_AT_A_TIME = 2**18


def write_ids(folder: Path, name: str, number: int) -> None:
    """Draw an id for each value of a feature, and one before them that is never asked for."""
    generator = np.random.default_rng(1)
    # Drawn until there are enough that differ; of 64 bits hardly any are drawn twice.
    ids = np.unique(generator.integers(-(2**63) + 1, 2**63 - 1, size=number + 1000))
    np.save(folder / f"{name}_ids.npy", generator.permutation(ids)[: number + 1])


def dynamic(columns: Columns) -> Columns:
    """The same data for tables that take ids in."""
    tables = tuple(
        dataclasses.replace(table, feature=dataclasses.replace(table.feature, ids="dynamic"))
        for table in columns.tables
    )
    return dataclasses.replace(columns, tables=tables)


def fill(trained: Here) -> None:
    """Put a row for each id into the tables of this rank."""
    import torch

    from recsuite.sharding.dynamic import LiveRows, Waiting

    for name, share in trained.shares.items():
        ids = torch.from_numpy(np.load(Path(trained.columns.folder) / f"{name}_ids.npy")[1:])
        for part in ids[share.placement.owner_of(ids) == share.rank].split(PUT_AT_A_TIME):
            weight = torch.empty(len(part), DIM).uniform_(-0.04, 0.04)
            nothing, once = torch.zeros_like(part), torch.full((len(part),), 256, dtype=torch.int32)
            share.put(LiveRows(part, weight, torch.zeros(len(part)), nothing, once, Waiting.none()))


def main() -> None:
    """Serve orders."""
    answers = take_answers()
    columns = columns_of(Path(sys.argv[1]))
    context = init_runtime(Config())
    import torch
    import torch.distributed as dist

    # No table becomes too full, and room to grow would need more memory than a small machine has.
    config = Config.of(embedding_dim=DIM, mlp_dims=MLP_DIMS, history=0, max_load_factor=0.0)

    def make(name: str) -> Any:
        trained = Here(columns if name == STATIC else dynamic(columns), context, config)
        if name == FULL:
            fill(trained)
        return trained

    serve(answers, make, dist.barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
    end_process(0)
