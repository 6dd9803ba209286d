"""Which of many lists each item lies in, so that a search looks at the lists that are near and not at all
items. This is all of an index that a model does not know by itself, and so all that is written of one.

Shapes: N items, D numbers in a vector, L lists, U users.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from dataclasses import dataclass
from typing import Any

import torch

# Lists for the root of the number of items: fewer are longer, and more take longer to choose from.
LISTS_PER_ROOT = 4
# The fewest items that a list has on average, and the most of a list from which its centre is made.
LEAST, SAMPLES = 16, 64
ROUNDS = 10
# Once so many vectors have come for each one of which the centres were made, these are made anew.
WORN = 0.5
# And once this share of all is longer than any was: every search looks at those.
MOST_LONGER = 0.01


@dataclass(frozen=True)
class Lists:
    """The centres of lists, and the items that lie in them.

    The centre that is nearest is that of the vector with one more number, by which all are equally long:
    where the products with a user are large, the distances from the user, whose number is 0, are then small
    (Bachrach et al., "Speeding up the Xbox recommender system using a Euclidean transformation", 2014). A
    vector that is longer than those of which the centres were made has no such number, and may be among the
    best for anybody: it lies in one more list, in which every search looks. The number chooses a list, and
    nothing else: what is found is compared by the products themselves.

    centres: float32 [L, D + 1], in units of `length`, the largest of the vectors that they were made of;
    made_of: how many these were; came: how many vectors have come since; keys: what items are known by, int64
    [N], ascending; numbers: of their lists, int64 [N], L for the one more; prints: of their vectors, see
    `prints_of`.
    """

    centres: torch.Tensor
    length: float
    made_of: int
    came: int
    keys: torch.Tensor
    numbers: torch.Tensor
    prints: torch.Tensor

    @functools.cached_property
    def _half_squares(self) -> torch.Tensor:
        """Half of the squared lengths of the centres, float32 [L]."""
        return self.centres.square().sum(dim=1) / 2

    @property
    def is_new(self) -> bool:
        """Whether they were made of the very items that are in them."""
        return self.came == 0 and self.made_of == len(self.keys)

    def units_of(self, vectors: torch.Tensor) -> torch.Tensor:
        """The vectors as lists hold them, float16 [N, D]: in products, they are right to 1 in 2,000."""
        return (vectors / self.length).to(torch.float16)

    def after(self, keys: torch.Tensor, vectors: torch.Tensor) -> tuple[Lists, torch.Tensor] | None:
        """The lists of other items, and which of these have come or changed, bool [N]; None where so many
        have that the centres may lie beside them, or vectors have another width.

        An item that was here with the same vector stays in its list. keys: int64 [N], ascending; vectors:
        float32 [N, D].
        """
        if self.centres.shape[1] != vectors.shape[1] + 1:
            return None
        prints = prints_of(self.units_of(vectors))
        comes = torch.ones(len(keys), dtype=torch.bool)
        places = torch.searchsorted(self.keys, keys).clamp(max=max(0, len(self.keys) - 1))
        if len(self.keys):
            comes = (self.keys[places] != keys) | (self.prints[places] != prints)
        came = self.came + int(comes.sum())
        if came > WORN * self.made_of or int(self._are_longer(vectors).sum()) > MOST_LONGER * len(keys):
            return None
        numbers = torch.empty(len(keys), dtype=torch.int64)
        numbers[~comes] = self.numbers[places[~comes]]
        numbers[comes] = self._nearest(vectors[comes])
        return dataclasses.replace(self, came=came, keys=keys, numbers=numbers, prints=prints), comes

    def _nearest(self, vectors: torch.Tensor) -> torch.Tensor:
        """The number of the list for each vector, int64 [N]."""
        faiss: Any = importlib.import_module("faiss")
        centres = faiss.IndexFlatL2(self.centres.shape[1])
        centres.add(self.centres.numpy())
        numbers = torch.from_numpy(centres.search(longer(vectors / self.length).numpy(), 1)[1]).view(-1)
        return numbers.masked_fill(self._are_longer(vectors), len(self.centres))

    def _are_longer(self, vectors: torch.Tensor) -> torch.Tensor:
        """Which vectors are longer than those of which the centres were made, bool [N]."""
        return vectors.square().sum(dim=1).sqrt() > self.length

    def near(self, users: torch.Tensor, breadth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of the lists to look in for users, int64 [U, breadth + 1], and how near they are,
        float32.
        """
        # Half of the squared distance between a user of the length 1 and a centre, but for what all have
        # alike.
        directions = torch.nn.functional.normalize(users, dim=1)
        nearness = torch.addmm(self._half_squares, directions, self.centres[:, :-1].t(), beta=-1)
        found = nearness.topk(breadth, dim=1, sorted=False)
        always = torch.full((len(users), 1), len(self.centres))
        return torch.cat([found.indices, always], dim=1), torch.nn.functional.pad(found.values, (0, 1))


def make_lists(keys: torch.Tensor, vectors: torch.Tensor) -> Lists:
    """Lists for items, with their centres by k-means. Takes seconds for every 100,000.

    keys: int64 [N], ascending; vectors: float32 [N, D].

    Raises:
        ImportError: when faiss is not installed.
    """
    # By name: its stubs lack much of it.
    faiss: Any = importlib.import_module("faiss")
    nobody = torch.empty(0, dtype=torch.int64)
    if not len(keys):
        centre = torch.zeros(1, vectors.shape[1] + 1)
        return Lists(centre, 1.0, 0, 0, nobody, nobody, nobody)
    number = max(1, min(round(LISTS_PER_ROOT * math.sqrt(len(keys))), len(keys) // LEAST))
    # Where all vectors are 0, any unit will do.
    length = float(vectors.square().sum(dim=1).amax().sqrt()) or 1.0
    means = faiss.Kmeans(
        vectors.shape[1] + 1,
        number,
        niter=ROUNDS,
        seed=0,
        min_points_per_centroid=1,
        max_points_per_centroid=SAMPLES,
    )
    means.train(longer(vectors / length).numpy())
    lists = Lists(torch.from_numpy(means.centroids), length, len(keys), 0, keys, nobody, nobody)
    numbers, prints = lists._nearest(vectors), prints_of(lists.units_of(vectors))
    return dataclasses.replace(lists, numbers=numbers, prints=prints)


def longer(vectors: torch.Tensor) -> torch.Tensor:
    """Vectors with the number that gives them the length 1, where they are not longer, float32 [N, D + 1]."""
    more = (1 - vectors.square().sum(dim=1, keepdim=True)).clamp(min=0).sqrt()
    return torch.cat([vectors, more], dim=1)


def prints_of(halves: torch.Tensor) -> torch.Tensor:
    """A number for each vector, float16 [N, D], by which another one is told from it, int64 [N]."""
    # Four numbers at once, as one of 64 bits. Odd factors: whichever bit is another, so is the product.
    words = torch.nn.functional.pad(halves, (0, -halves.shape[1] % 4)).view(torch.int64)
    factors = torch.randint(2**62, words.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 + 1
    return (words * factors).sum(dim=1)
