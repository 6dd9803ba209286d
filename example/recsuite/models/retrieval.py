"""Items with the highest scores for each user: exactly, block by block.

Shapes: U users, N items, D numbers in a vector, E excluded pairs of a user and an item.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from typing_extensions import override

# Scores in memory at once, and users that share a block of items.
PAIRS = 2**16
USERS = 32


class Scorer(Protocol):
    """Scores of users and items by their vectors; every `heads.TwoSided` is one."""

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return float32 [B], of vectors [B, D] both."""

    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Return float32 [U, N], of vectors [U, D] and [N, D]; equal to `score_pairs` except for rounding."""


class InnerProduct(Scorer):
    """Scorer by inner products, such as cosines of vectors of length 1."""

    @override
    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return (users * items).sum(dim=1)

    @override
    def score_all(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return users @ items.t()


class Added(NamedTuple):
    """Numbers added to the scores of some pairs, such as those of the items of a user's history.

    pairs: positions of users, ascending, and of items, int64 [2, E]; numbers: [E], of the type of the scores.
    """

    pairs: torch.Tensor
    numbers: torch.Tensor

    def of_users(self, begin: int, end: int) -> Added:
        """Return those of some users, which are counted from the first of them."""
        ends = self.pairs.new_tensor([begin, end])
        here = slice(*torch.searchsorted(self.pairs[0].contiguous(), ends).tolist())
        return Added(self.pairs[:, here] - self.pairs.new_tensor([[begin], [0]]), self.numbers[here])

    def into(self, scores: torch.Tensor, first: int) -> torch.Tensor:
        """Add the numbers to the scores of a block of items in place, and return these, [U, m].

        first: position of the first item of the block.
        """
        user, item = self.pairs[0], self.pairs[1] - first
        here = (item >= 0) & (item < scores.shape[1])
        return scores.index_put_((user[here], item[here]), self.numbers[here], accumulate=True)

    def places(self, num_users: int) -> torch.Tensor:
        """Return the positions of the items of each user, int64 [U, most of a user], -1 for none."""
        user, item = self.pairs
        counts = user.bincount(minlength=num_users)
        positions = torch.full((num_users, int(counts.max()) if len(user) else 0), -1)
        # The pairs are in the order of users.
        column = torch.arange(len(user)) - (counts.cumsum(0) - counts)[user]
        positions[user, column] = item
        return positions

    def onto(self, scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the scores of items with the numbers added, float32 [U, k]; positions: int64 [U, k]."""
        user, item = self.pairs
        pair, column = (positions[user] == item.unsqueeze(1)).nonzero(as_tuple=True)
        return scores.index_put((user[pair], column), self.numbers[pair], accumulate=True)


NOTHING_ADDED = Added(torch.empty(2, 0, dtype=torch.int64), torch.empty(0))


def sum_of_pairs(pairs: torch.Tensor, numbers: torch.Tensor) -> Added:
    """Return the sum of the numbers of each pair. pairs: int64 [2, n]; numbers: float32 [n]."""
    distinct, inverse = pairs.unique(dim=1, return_inverse=True)
    return Added(distinct, numbers.new_zeros(distinct.size(1)).index_add(0, inverse, numbers))


def top_items(
    scorer: Scorer,
    users: torch.Tensor,
    items: torch.Tensor,
    k: int,
    excluded: torch.Tensor,
    added: Added = NOTHING_ADDED,
) -> torch.Tensor:
    """Return the items with the k highest scores of each user, int64 [U, min(k, N)]; -1 where fewer are left.

    Of equal scores the earlier item counts as higher. excluded: indices of users and of items, int64 [2, E].
    """
    parts = [torch.zeros(0, min(k, len(items)), dtype=torch.int64)]
    for begin in range(0, len(users), USERS):
        some = users[begin : begin + USERS]
        here = (excluded[0] >= begin) & (excluded[0] < begin + USERS)
        user, item = excluded[:, here]
        more = added.of_users(begin, begin + USERS)
        parts.append(_top_items(scorer, some, items, k, (user - begin, item), more))
    return torch.cat(parts)


def _top_items(
    scorer: Scorer,
    users: torch.Tensor,
    items: torch.Tensor,
    k: int,
    excluded: tuple[torch.Tensor, torch.Tensor],
    added: Added,
) -> torch.Tensor:
    user, item = excluded
    best, positions = users.new_zeros(len(users), 0), torch.zeros(len(users), 0, dtype=torch.int64)
    step = max(1, PAIRS // len(users))
    for begin in range(0, len(items), step):
        scores = added.into(scorer.score_all(users, items[begin : begin + step]), begin)
        here = (item >= begin) & (item < begin + step)
        scores[user[here], item[here] - begin] = -torch.inf
        numbers = torch.arange(begin, begin + scores.shape[1]).expand_as(scores)
        if best.shape[1] == k:
            # Of equal scores the earlier item counts, so only a higher one, or NaN, can still come in.
            columns = (~(scores <= best[:, -1:])).any(dim=0).nonzero().squeeze(1)
            scores, numbers = scores[:, columns], numbers[:, columns]
        # The best ones so far come first, because their positions are lower.
        best, positions = highest(torch.cat([best, scores], dim=1), torch.cat([positions, numbers], dim=1), k)
    return positions.masked_fill(best == -torch.inf, -1)


def highest(scores: torch.Tensor, positions: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k highest scores of each row, sorted, with their items; of equal scores the earlier ones."""
    # `topk` is several times as fast as a sort of all, but takes any of the equal scores at its edge.
    if k < scores.shape[1]:
        is_high = scores >= scores.topk(k, dim=1).values[:, -1:]
        if bool((is_high.sum(dim=1) == k).all()):
            columns = is_high.nonzero()[:, 1].view(-1, k)
            scores, positions = scores.gather(1, columns), positions.gather(1, columns)
    order = scores.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return scores.gather(1, order), positions.gather(1, order)


def ranked(
    scorer: Scorer,
    users: torch.Tensor,
    items: torch.Tensor,
    positions: torch.Tensor,
    added: Added = NOTHING_ADDED,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return positions of items, int64 [U, k], and their scores, float32 [U, k], the highest first.

    Of equal scores the earlier item comes first. The position -1 is none; its score is minus infinity.
    """
    # Sorted by position first: the stable sort below keeps this order for equal scores.
    positions = positions.sort(dim=1).values
    user = users.repeat_interleave(positions.shape[1], dim=0)
    # Scored again, pair by pair: a product of matrices rounds differently from the score of a pair.
    scores = scorer.score_pairs(user, items[positions.flatten().clamp(min=0)]).view(positions.shape)
    scores = added.onto(scores, positions)
    scores, order = scores.masked_fill(positions < 0, -torch.inf).sort(dim=1, descending=True, stable=True)
    return positions.gather(1, order), scores


def mask_excluded(positions: torch.Tensor, excluded: torch.Tensor) -> torch.Tensor:
    """Return positions of items, int64 [U, k], with -1 for excluded pairs, int64 [2, E]."""
    user, item = excluded
    pair, column = (positions[user] == item.unsqueeze(1)).nonzero(as_tuple=True)
    positions = positions.clone()
    positions[user[pair], column] = -1
    return positions
