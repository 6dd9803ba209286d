"""An index of items: a search meets most of those with the largest products, and not all items.

Shapes: N items, D numbers in a vector, L lists, U users.
"""

from __future__ import annotations

import importlib
import math
import threading
import time
from typing import Any

import numpy as np
import torch

from recsuite.runtime.console import say
from recsuite.serving.index.lists import Lists, make_lists

# A search looks at so many items or at this share of all, whichever is more: catalogues of fewer are searched
# whole.
SEARCHED, SHARE = 2**16, 1 / 12
# What faiss compares in one instruction: vectors are as long as a multiple of this.
WIDTH = 16
# So many more are found than asked for, because vectors of 16 bits may change places at the end.
SPARE = 0.1
# Keys from 0 to less than this times their number are rows, and have a table of their places, of 8
# bytes each; ids are searched for.
KEYS_PER_ITEM = 4
# Seconds that an index may take without a word.
SAID = 1.0


class NearestItems:
    """Items in lists, of which a search looks at the nearest ones (Sivic and Zisserman, "Video Google", 2003;
    here those of faiss). A newer model makes another one of it, see `after`; this one stays as it is, for
    somebody may be searching it.
    """

    def __init__(
        self, keys: torch.Tensor, vectors: torch.Tensor, lists: Lists | None = None, index: Any = None
    ) -> None:
        """An index of items, made from that of a former model where there is one, and not too much is new.

        keys: what items are known by, int64 [N]; vectors: float32 [N, D], their unit is free; lists: of the
        former model; index: in which its vectors are.

        Raises:
            ImportError: when faiss is not installed.
        """
        sorted_keys, self._order = keys.sort()
        vectors = vectors[self._order]
        before, found = lists, None if lists is None else lists.after(sorted_keys, vectors)
        self.lists, comes = found or (make_lists(sorted_keys, vectors), None)
        if before is None or index is None or comes is None:
            self._index = _empty_index(vectors.shape[1], self.num_lists + 1)
            comes = torch.ones(len(keys), dtype=torch.bool)
        else:
            self._index = _faiss().clone_index(index)
            stays = torch.isin(before.keys, sorted_keys[~comes], assume_unique=True)
            self._index.remove_ids(_faiss().IDSelectorBatch(before.keys[~stays].numpy()))
        self._add(vectors, comes)
        self._place_of: torch.Tensor | None = None
        if len(keys) and sorted_keys[0] >= 0 and sorted_keys[-1] < KEYS_PER_ITEM * len(keys):
            self._place_of = torch.zeros(int(sorted_keys[-1]) + 1, dtype=torch.int64)
            self._place_of[keys] = torch.arange(len(keys))

    def after(self, keys: torch.Tensor, vectors: torch.Tensor) -> NearestItems:
        """The index of a newer model: items that left are removed, those that came or changed are put where
        they belong now, and all others stay; made anew where too many are others. Takes what making one does.
        """
        return NearestItems(keys, vectors, self.lists, self._index)

    def _add(self, vectors: torch.Tensor, which: torch.Tensor) -> None:
        """Put some of the items into their lists. vectors: of all, in the order of keys; which: bool [N]."""
        pointer = _faiss().swig_ptr
        # Held until faiss has copied them: it is given addresses.
        padded = _padded(vectors[which] / self.lists.length)
        keys, numbers = self.lists.keys[which].numpy(), self.lists.numbers[which].numpy()
        self._index.add_core(len(keys), pointer(padded), pointer(keys), pointer(numbers))

    def __len__(self) -> int:
        """How many items are in it."""
        return len(self.lists.keys)

    @property
    def num_lists(self) -> int:
        """The largest breadth of a search."""
        return len(self.lists.centres)

    @property
    def breadth(self) -> int:
        """In how many lists a search looks, where it is not told."""
        looked_at = max(SEARCHED, SHARE * len(self))
        return min(self.num_lists, math.ceil(self.num_lists * looked_at / max(1, len(self))))

    def search(self, users: torch.Tensor, k: int, breadth: int | None = None) -> torch.Tensor:
        """The places of k items or some more for each user, int64 [U, at least min(k, N)]; -1 where fewer
        were found.

        users: float32 [U, D]; breadth: in how many lists it looks, at most L, where all items are found.
        """
        k = min(math.ceil((1 + SPARE) * k), len(self))
        if k == 0 or len(users) == 0:
            return torch.zeros(len(users), k, dtype=torch.int64)
        breadth = min(breadth or self.breadth, self.num_lists)
        lists, nearness = (tensor.numpy() for tensor in self.lists.near(users, breadth))
        products, keys = torch.empty(len(users), k), torch.empty(len(users), k, dtype=torch.int64)
        padded, pointer = _padded(users), _faiss().swig_ptr
        # The method of C++: that of Python keeps the breadth in the index, which threads share.
        self._index.search_preassigned_c(
            len(users),
            pointer(padded),
            k,
            pointer(lists),
            pointer(nearness),
            pointer(products.numpy()),
            pointer(keys.numpy()),
            False,
            _faiss().SearchParametersIVF(nprobe=breadth + 1),
        )
        # Told by the product: any key may be an id, below zero too.
        return self._places(keys).where(products > torch.finfo(torch.float32).min, -1)

    def _places(self, keys: torch.Tensor) -> torch.Tensor:
        """The places of keys; of one that is none, any."""
        if self._place_of is not None:
            return self._place_of[keys.clamp(min=0)]
        return self._order[torch.searchsorted(self.lists.keys, keys).clamp(max=len(self) - 1)]


class KeptIndex:
    """The index of the newest model that was asked for one, from which that of the next is made."""

    def __init__(self, lists: Lists | None = None) -> None:
        """lists: those that were written with a model."""
        self._lists = lists
        self._newest: NearestItems | None = None
        self._lock = threading.Lock()

    def of(self, keys: torch.Tensor, vectors: torch.Tensor) -> NearestItems:
        """The index of these items, see `NearestItems`. Says how long it took to make one anew.

        Raises:
            ImportError: when faiss is not installed.
        """
        begin = time.perf_counter()
        # Threads that ask for the first index of a model wait for one of them to make it.
        with self._lock:
            before = self._newest.lists if self._newest else self._lists
            if self._newest is None:
                self._newest = NearestItems(keys, vectors, self._lists)
            else:
                self._newest = self._newest.after(keys, vectors)
            newest = self._newest
        seconds = time.perf_counter() - begin
        was_made = before is None or newest.lists.centres is not before.centres
        if was_made and seconds > SAID:
            say(f"the index of {len(newest):,} items was made anew, in {seconds:.1f} s")
        return newest


def _empty_index(dim: int, num_lists: int) -> Any:
    faiss = _faiss()
    width = -(-dim // WIDTH) * WIDTH
    # It chooses no list: `Lists.near` does. Of 16 bits, as memory is what a search waits for.
    index = faiss.IndexIVFScalarQuantizer(
        faiss.IndexFlatIP(width),
        width,
        num_lists,
        faiss.ScalarQuantizer.QT_fp16,
        faiss.METRIC_INNER_PRODUCT,
        False,
    )
    index.is_trained = True
    return index


def _padded(vectors: torch.Tensor) -> np.ndarray:
    """Vectors with zeros at their ends, float32 [n, a multiple of WIDTH]."""
    found: np.ndarray = torch.nn.functional.pad(vectors, (0, -vectors.shape[1] % WIDTH)).numpy()
    return found


def _faiss() -> Any:
    # By name: its stubs lack much of it.
    return importlib.import_module("faiss")
