"""Scores items by what comes next in the order of what a user had.

    user = what the user and the event have + sum of the history by weights that are learned + state of a
    transformer

The rows of a history are those of the items themselves: what is learned of an item as what comes next is
known of it as what came before. Shapes: B events, V items of all histories, D numbers in a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from recsuite.datasets.schema import HISTORY, Feature
from recsuite.models.co_occurrence import SIDE_SCALE
from recsuite.models.heads import SCALE, ProductHead
from recsuite.models.layers import repeated
from recsuite.models.lists import DistinctRows
from recsuite.models.recency import LEAST_SUM, MOST_LOG_WEIGHT
from recsuite.models.rows import FeatureRows, Inputs, LookedUp
from recsuite.models.sequences.dropout import Dropout
from recsuite.models.sequences.window import PairBias, Window

# Of the sum of a history: one half of a vector looks near to begin with, the other one far.
SLOPES = (1.0, 0.0)
# Items of histories that are gone through at once where no gradient is wanted: an evaluation has many times
# as many as a step.
ITEMS_AT_ONCE = 2**14


class SequenceHead(ProductHead):
    """See the module. ids: the features that tell users, and items, apart; blocks: of the transformer; width:
    how many items of a history are read.
    """

    takes_ages = True

    def __init__(
        self,
        features: Sequence[Feature],
        embedding_dim: int,
        ids: tuple[str, str],
        blocks: Sequence[nn.Module],
        width: int,
        dropout: float,
    ) -> None:
        super().__init__(features, embedding_dim)
        # Rows that many items or users have in common move with each event of many.
        self.weights = {each.name: SIDE_SCALE for each in features if each.name not in ids}
        _, self.item = ids
        self.width = width
        self.nearness = PairBias(torch.tensor(SLOPES), width)
        # What is known of the time from an item to the event that follows.
        self.following = nn.Parameter(torch.zeros(len(self.nearness.gaps[0]), embedding_dim))
        self.dropout = Dropout(dropout, 0)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(embedding_dim)
        self.out = nn.Linear(embedding_dim, embedding_dim)
        # Nothing to begin with: what the sum of the rows says is not disturbed by blocks that know nothing
        # yet.
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        # Of whoever had nothing before.
        self.start = nn.Parameter(torch.zeros(embedding_dim))

    def forward(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `ProductHead`."""
        apart_rows = FeatureRows(apart(rows.found, self.item), rows.scale, rows.lists)
        return super().forward(apart_rows, batch)

    def user_vectors(self, rows: FeatureRows, batch: Inputs) -> torch.Tensor:
        """See `Head`; batch.members: with ages, and with draws where the head trains."""
        vectors = SCALE * super().user_vectors(rows, batch)
        vectors = vectors + self._states_of(rows, batch)
        # The bias of an item counts once.
        return torch.cat([torch.ones_like(vectors[:, :1]), vectors[:, 1:]], dim=1)

    def _states_of(self, found: FeatureRows, batch: Inputs) -> torch.Tensor:
        """Return of each event the state after the last item that it reads, float32 [B, D]."""
        # After the scale and not before: what is learned of rows has it.
        rows, lengths = found.jagged(HISTORY)
        ages, links = batch.members.ages, batch.links
        if links is None:
            # Whoever asks may know more than is read.
            is_read = after_last(lengths, len(rows)) < self.width
            lengths, rows, ages = lengths.clamp(max=self.width), rows[is_read], ages[is_read]
        if torch.is_grad_enabled():
            states = self._states(rows, lengths, ages, batch.members.draws)
        else:
            states = self._states_in_parts(rows, lengths, ages)
        first = lengths.cumsum(0) - lengths
        # An event that takes its own list takes all of it.
        last = first + lengths if links is None else first[links.sources[0]] + links.reads
        reads = lengths if links is None else links.reads
        # The start stands in front of all states. Threads add up the gradient of brackets in any order.
        all_states = torch.cat([self.start.unsqueeze(0), states])
        return all_states.index_select(0, torch.where(reads > 0, last, 0))

    def _states_in_parts(self, rows: torch.Tensor, lengths: torch.Tensor, ages: torch.Tensor) -> torch.Tensor:
        # Histories do not look at each other, so they may be taken by some at once.
        number = max(1, ITEMS_AT_ONCE // self.width)
        parts = lengths.split(number)
        sizes = [int(part.sum()) for part in parts]
        cut = zip(rows.split(sizes), parts, ages.split(sizes), strict=True)
        # Nothing is dropped, so nothing is drawn.
        return torch.cat([self._states(*each, draws=ages) for each in cut])

    def _states(
        self, rows: torch.Tensor, lengths: torch.Tensor, ages: torch.Tensor, draws: torch.Tensor
    ) -> torch.Tensor:
        """The state after each item of histories, float32 [V, D]."""
        window = Window(lengths, ages, self.width)
        rows = SCALE * rows
        following = window.items(window.gaps.diagonal(self.width, 1, 2).view(-1, 1, self.width, 1)).view(-1)
        items = self.dropout(rows + self.following.index_select(0, following), draws)
        for block in self.blocks:
            items = block(items, window, draws)
        return self._sums(rows, window) + self.out(self.norm(items))

    def _sums(self, rows: torch.Tensor, window: Window) -> torch.Tensor:
        """Of each item and those before it the weighted sum, over the root of the weights, float32 [V, D]."""
        weights = self.nearness(window).clamp(max=MOST_LOG_WEIGHT).exp() * window.is_seen.unsqueeze(1)
        weights = weights * (weights.sum(dim=3, keepdim=True) + LEAST_SUM).rsqrt()
        keys = window.keys(rows)
        halves = keys.view(*keys.shape[:2], len(SLOPES), -1).transpose(1, 2)
        return window.items(weights @ halves)


def after_last(lengths: torch.Tensor, total: int) -> torch.Tensor:
    """How many items of its history came after each, int64 [total]; lengths: int64 [B], of that sum."""
    ends = repeated(lengths.cumsum(0), lengths, total)
    return ends - 1 - torch.arange(total, device=lengths.device)


def apart(looked_up: Mapping[str, LookedUp], item: str) -> Mapping[str, LookedUp]:
    """The rows of items and those of histories apart, where these lie behind each event's own item."""
    if HISTORY in looked_up:
        return looked_up
    found = looked_up[item]
    counts = found.lengths().to(torch.int64)
    if isinstance(found, DistinctRows):
        rows, places = found.rows, found.places
    else:
        rows = found.values()
        places = torch.arange(len(rows), device=rows.device)
    first, others = counts.cumsum(0) - counts, counts - 1
    number = len(places) - len(counts)
    event = repeated(torch.arange(len(counts), device=rows.device), others, number)
    members = torch.arange(number, device=rows.device) + event + 1
    own = DistinctRows(rows, places[first], torch.ones_like(counts), is_single=True)
    return {**looked_up, item: own, HISTORY: DistinctRows(rows, places[members], others)}
