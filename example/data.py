"""The data of a run: made once per machine, checked against the other ranks', and served by a loader.

Imports no TorchRec, so that the workers start while it is imported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from columns import Columns, open_columns
from config import Config
from dataloader import BatchLoader, EpochSampler, RatingBatches, build_dataloader
from errors import UserError
from movielens import PREPARATION_DEADLINE
from report import describe_data
from runtime import RuntimeContext, gathered, once_per_node


@dataclass(frozen=True)
class Data:
    """What every mode needs of the data set."""

    columns: Columns
    loader: BatchLoader


@contextlib.contextmanager
def open_data(config: Config, context: RuntimeContext) -> Iterator[Data]:
    """The data set and its loader; the workers end with the context. Collective: every rank.

    Raises:
        UserError: when the data cannot be had, differ between machines, or the workers cannot start.
    """
    once_per_node(context, lambda: open_columns(config), PREPARATION_DEADLINE)
    columns = open_columns(config)
    _check_same_data(columns)
    context.say(describe_data(columns, config))
    dataset = RatingBatches(columns, config, context.rank, context.world_size)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        yield Data(columns, loader)


def _check_same_data(columns: Columns) -> None:
    """Refuse machines whose copies of the data differ: their ranks would wait for each other for ever."""
    sizes = columns.num_train, columns.num_test, columns.num_validation
    mine = (*sizes, *(table.rows for table in columns.tables))
    everyones = gathered(lambda: mine)
    for rank, other in enumerate(everyones):
        if other != everyones[0]:
            raise UserError(
                f"Rank {rank} has {other[0]:,} training and {other[1]:,} test ratings, rank 0 has "
                f"{everyones[0][0]:,} and {everyones[0][1]:,}, or their tables differ; give all machines the "
                "same files."
            )
