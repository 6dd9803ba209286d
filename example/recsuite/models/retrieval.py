"""Items with the highest scores for each user: exactly, block by block.

Shapes: U users, N items, D numbers in a vector, E excluded pairs of a user and an item, W most categories of
an item, C categories.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from typing_extensions import override

# Scores in memory at once, and users that share a block of items.
PAIRS, USERS = 2**16, 32
# On a GPU, where a small block takes as long as the launch of its kernels; and users times items in a mask.
PAIRS_ON_GPU, MASK_ON_GPU = 2**22, 2**28
# Cosines in memory at once, see `Near`.
COSINES = 2**22


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
        positions = user.new_full((num_users, int(counts.max()) if len(user) else 0), -1)
        # The pairs are in the order of users.
        column = torch.arange(len(user), device=user.device) - (counts.cumsum(0) - counts)[user]
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


class Near(NamedTuple):
    """Items that are too similar to an item that the user had.

    had: positions of users, ascending, and of items in `of_had`, int64 [2, H]; of_had, of_items: directions,
    float32 [n, D] and [N, D]; most: largest cosine of an item that is allowed.
    """

    had: torch.Tensor
    of_had: torch.Tensor
    of_items: torch.Tensor
    most: float

    def block(self, blocked: torch.Tensor, first: int) -> None:
        """Mark the items in the mask of some users, bool [U, N]. first: position of the first user."""
        users = torch.arange(first, first + len(blocked) + 1, device=self.had.device)
        ends = torch.searchsorted(self.had[0].contiguous(), users).tolist()
        for user, (begin, end) in enumerate(itertools.pairwise(ends)):
            step = max(1, COSINES // max(1, len(self.of_items)))
            for start in range(begin, end, step):
                some = self.of_had[self.had[1, start : min(end, start + step)]]
                blocked[user] |= (some @ self.of_items.t()).amax(dim=0) > self.most


class Caps(NamedTuple):
    """Largest numbers of items of a category in a list. An item has any number of categories.

    categories: of each item, int64 [N, W], with C where an item has fewer; most: of each category,
    int64 [C + 1], the last one without a limit.
    """

    categories: torch.Tensor
    most: torch.Tensor


class Rules(NamedTuple):
    """Rules of a list beside the excluded pairs; None for no such rule."""

    near: Near | None = None
    caps: Caps | None = None


NO_RULES = Rules()


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tensor, or a named tuple such as `Rules`, with all its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return type(value)(*(on_device(part, device) for part in value)) if isinstance(value, tuple) else value


def top_items(
    scorer: Scorer,
    users: torch.Tensor,
    items: torch.Tensor,
    k: int,
    excluded: torch.Tensor,
    added: Added = NOTHING_ADDED,
    rules: Rules = NO_RULES,
) -> torch.Tensor:
    """Return the items with the k highest scores of each user, int64 [U, min(k, N)]; -1 where fewer are left.

    Of equal scores the earlier item counts as higher. excluded: indices of users and of items, int64 [2, E].
    With caps, an item is in the list if each of its categories has room after the items before it.
    """
    device, k = users.device, min(k, len(items))
    parts = [torch.zeros(0, k, dtype=torch.int64, device=device)]
    at_once = USERS if device.type == "cpu" else max(USERS, MASK_ON_GPU // max(1, len(items)))
    for begin in range(0, len(users), at_once):
        some, more = users[begin : begin + at_once], added.of_users(begin, begin + at_once)
        blocked = torch.zeros(len(some), len(items), dtype=torch.bool, device=device)
        user, item = excluded[:, (excluded[0] >= begin) & (excluded[0] < begin + at_once)]
        blocked[user - begin, item] = True
        if rules.near:
            rules.near.block(blocked, begin)
        search = functools.partial(_top_items, scorer, some, items, blocked, more)
        parts.append(_capped(search, blocked, k, rules.caps) if rules.caps else search(k))
    return torch.cat(parts)


def _capped(search: Callable[[int], torch.Tensor], blocked: torch.Tensor, k: int, caps: Caps) -> torch.Tensor:
    """Return the first k items of each user in the order of scores that the caps leave, int64 [U, k].

    search: returns the best items that are not in the mask `blocked`, bool [U, N], which is changed.
    """
    lists = caps.most.new_full((len(blocked), k), -1)
    lengths, room = caps.most.new_zeros(len(blocked)), caps.most.repeat(len(blocked), 1)
    number, num_items = k, blocked.shape[1]
    while k:
        found = search(number)
        for item in found.t():
            categories = caps.categories[item.clamp(min=0)]
            fits = (item >= 0) & (lengths < k) & (room.gather(1, categories) > 0).all(dim=1)
            lists[fits, lengths[fits]] = item[fits]
            lengths += fits
            room.scatter_add_(1, categories, -fits.long().unsqueeze(1).expand_as(categories))
        if bool(((lengths == k) | (found[:, -1] < 0)).all()):
            break
        # Whatever was found is in the list or in a full category, so the next search begins after it.
        user, place = (lists >= 0).nonzero(as_tuple=True)
        blocked[user, lists[user, place]] = True
        is_full = room <= 0
        for column in caps.categories.t():
            blocked |= is_full[:, column]
        # Few searches also where a full category has most of the best items.
        number = min(2 * number, num_items)
    return lists


def _top_items(
    scorer: Scorer,
    users: torch.Tensor,
    items: torch.Tensor,
    blocked: torch.Tensor,
    added: Added,
    k: int,
) -> torch.Tensor:
    device = users.device
    best = users.new_zeros(len(users), 0)
    positions = torch.zeros(len(users), 0, dtype=torch.int64, device=device)
    step = max(1, (PAIRS if device.type == "cpu" else PAIRS_ON_GPU) // len(users))
    for begin in range(0, len(items), step):
        scores = added.into(scorer.score_all(users, items[begin : begin + step]), begin)
        scores = scores.masked_fill(blocked[:, begin : begin + step], -torch.inf)
        numbers = torch.arange(begin, begin + scores.shape[1], device=device).expand_as(scores)
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
        # With equal scores at the edge, or NaN, only a sort finds the earlier ones.
        rows = (is_high.sum(dim=1) != k).nonzero()
        found = scores[rows.squeeze(1)].sort(dim=1, descending=True, stable=True).indices[:, :k]
        is_high[rows.squeeze(1)] = False
        is_high[rows, found] = True
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
