"""What a batch holds, and how many bytes the largest one takes. A worker imports this module: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from recsuite.config.sections import ModelConfig
from recsuite.datasets.batching.competitors import bytes_of_group
from recsuite.datasets.schema import AUDIENCE, ENTITIES, EVENT, HISTORY, LISTS, Table

if TYPE_CHECKING:
    import torch


class Batch(NamedTuple):
    """One rank's part of a global batch, B rows, as plain tensors.

    `values` (int64) and `lengths` (int32 [features * B]) are those of a KeyedJaggedTensor whose keys are the
    data set's features in order: ids of dynamic features, rows of the tables of all others. `labels` is
    float32 [B]. `weights` is float32 [B]: 0 for the rows that pad the last batch, and for real rows global
    batch size / real rows in the global batch, so that the mean over ranks of the weighted mean over B is the
    mean over real rows; in training times the event's own weight. `more_labels` and `more_weights` are those
    of the labels after the first, float32 [B, L - 1]: both are 0 where an event lacks one. `history_labels`
    is float32, one for each value of the feature "history". `numbers` is float32 [B, dense numbers], in the
    order of the data set's, NaN where there is none.

    Where weights of histories are learned, `places` and `gaps` say of each value of the feature "history" how
    many of its list came after it, and how long before the event it came, see `recsuite.gaps`, int32 both;
    elsewhere they are empty.

    Where there is an audience, each row has one more value behind its lists, its own item and its own user,
    and of each of S lists `sources`, int64 [S, B], is the row whose list a row takes; `scales`, float32
    [S, B], by what the sum of its values is multiplied; `own`, float32 [S, B], 1 where the row's own value is
    to be subtracted from that sum. `rarities` is float32 [3 + features of events, B]: the weight over
    the number of training events of the row's user, of its item, of all, and of those that share what the
    event has of each feature; 0 outside of training, and in a stream, which does not know how many will come.
    Elsewhere all four are empty.

    Where events compete, `had` is uint8 [B, bytes]: bit k of byte j of a row says that its user had, before,
    the item of row 8 j + k of its group; 0 outside of training. A group is 8 * bytes rows, or what is left.

    Where N items are drawn to compete with them, training has N rows before the B: of these items alone, in
    everything but `labels`, `weights` and `had`, which has as many bits more, in bytes behind those of the
    group.

    Where the order of events is read, rows that are a run of one user share the list of its first row:
    `sources`, int64 [1, N + B], is the row whose list a row reads, and `reads`, int32 [N + B], how many of
    its values stand before the row's event. `ages` says of each value of the feature "history" how many
    seconds before the event of the last row of its run it came, and `draws` is a number drawn for it in this
    pass, int32 both. Elsewhere all are empty.
    """

    values: torch.Tensor
    lengths: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    history_labels: torch.Tensor
    places: torch.Tensor
    gaps: torch.Tensor
    ages: torch.Tensor
    draws: torch.Tensor
    numbers: torch.Tensor
    sources: torch.Tensor
    scales: torch.Tensor
    own: torch.Tensor
    reads: torch.Tensor
    rarities: torch.Tensor
    had: torch.Tensor
    more_labels: torch.Tensor
    more_weights: torch.Tensor


def largest_batch(
    tables: Sequence[Table],
    num_numbers: int,
    batch_size: int,
    model: ModelConfig,
    num_negatives: int,
    most_shared: int = 0,
    more_labels: int = 0,
) -> int:
    """The most bytes that a batch can take, for a slot of the workers' ring: it is allocated once.

    num_negatives: the rows before those of events; most_shared: the values of one list for all rows together,
    where they share them; else 0; more_labels: how many labels there are after the first.
    """
    lists = [table for table in tables if table.name in LISTS]
    # Where there is an audience, each row has its own value behind each list.
    own = batch_size if AUDIENCE in [table.name for table in lists] else 0
    in_lists = {
        table.name: min(batch_size * table.longest, most_shared or batch_size * table.longest) + own
        for table in lists
    }
    num_rows = num_negatives + batch_size
    values = num_rows * sum(table.longest for table in tables if table.name not in LISTS)
    values += sum(in_lists.values())
    row = 4 * len(tables) + (4 + 4) * (1 + more_labels) + 4 * num_numbers
    row += bytes_of_group(batch_size, model.competitors) + bytes_of_group(num_negatives, num_negatives)
    # A source, and how much is read.
    row += (8 + 4) * model.reads_order
    if own:
        row += (8 + 4 + 4) * len(lists) + 4 * num_rarities(tables)
    # A label, and where they are told a place and a gap, or an age and a draw.
    of_member = 4 + (4 + 4) * model.learns_history_weights + (4 + 4) * model.reads_order
    # Each array begins on a cache line.
    return 8 * values + of_member * in_lists.get(HISTORY, 0) + num_rows * row + 64 * len(Batch._fields)


def num_rarities(tables: Sequence[Table]) -> int:
    """How many a `Batch` has for each row."""
    return len(ENTITIES) + 1 + sum(table.feature.entity == EVENT for table in tables)


def to_tensors(arrays: Sequence[np.ndarray]) -> Batch:
    """The arrays of a batch as tensors that share their memory."""
    import torch

    return Batch(*map(torch.from_numpy, arrays))
