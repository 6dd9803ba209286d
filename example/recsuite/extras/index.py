"""Approximate index of items: search in lists, files of the index, and recall against search time."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from recsuite.checkpoint.format import INDEX, Manifest
from recsuite.checkpoint.shards import write_shard_file
from recsuite.errors import UserError, printable
from recsuite.files import FileEntry, check_file, plain, typed
from recsuite.hooks import require_installed
from recsuite.models.retrieval import ranked, top_items
from recsuite.runtime.console import say
from recsuite.serving.catalogue import Items

# No pairs to exclude: the caller excludes the items that users have had.
NOTHING = torch.empty(2, 0, dtype=torch.int64)
K = 100


@dataclass(frozen=True)
class SearchPoint:
    """Recall and time of searches in `breadth` lists.

    recall: share of the k best items that are found; 1 if all lists are searched. microseconds: median time
    of one user's search alone. is_default: `recommend` searches this many lists.
    """

    breadth: int
    recall: float
    microseconds: float
    is_default: bool


@torch.inference_mode()
def recall_curve(users: torch.Tensor, items: Items, k: int = K) -> list[SearchPoint]:
    """Return recall and time for powers of 2 from one list to all of them, and for the default breadth.

    users: float32 [U, D], see `ServedModel.vectors_of`.

    Raises:
        UserError: see `Items.nearest`.
    """
    best = top_items(items.head, users, items.vectors, k, NOTHING)
    nearest = items.nearest
    powers = [2**power for power in range(nearest.num_lists.bit_length())]
    breadths = sorted({*powers, nearest.breadth, nearest.num_lists})
    return [_point(users, items, best, breadth) for breadth in breadths]


def _point(users: torch.Tensor, items: Items, best: torch.Tensor, breadth: int) -> SearchPoint:
    k, seconds, num_found = best.shape[1], [], 0
    for user, wanted in zip(users.split(1), best.tolist(), strict=True):
        begin = time.perf_counter()
        positions = items.near(user, k, NOTHING, breadth)
        positions = ranked(items.head, user, items.vectors, positions)[0][:, :k]
        seconds.append(time.perf_counter() - begin)
        num_found += len({*wanted} & {*positions[0].tolist()})
    recall = num_found / best.numel() if best.numel() else 1.0
    return SearchPoint(breadth, recall, 1e6 * statistics.median(seconds), breadth == items.nearest.breadth)


def curve_lines(points: Sequence[SearchPoint], k: int = K) -> Iterator[str]:
    """Yield the lines of the curve as a table; a star marks the default breadth of `recommend`."""
    label = f"recall@{k}"
    yield f"| lists searched | {label} | us a query |"
    yield f"|---------------:|{'-' * (len(label) + 1)}:|-----------:|"
    for point in points:
        breadth = f"{point.breadth:,}{' *' if point.is_default else ''}"
        yield f"| {breadth:>14} | {point.recall:{len(label)}.4f} | {point.microseconds:10,.0f} |"


# Lists per square root of the number of items: fewer lists are longer, and more take longer to choose from.
LISTS_PER_ROOT = 4
# Minimum average number of items in a list, and maximum number of items per list for k-means.
LEAST, SAMPLES = 16, 64
ROUNDS = 10
# The centres are recomputed once this many vectors have come for each vector that they were computed from.
MAX_CHANGED_SHARE = 0.5
# They are also recomputed once this share of the vectors is longer than all that they were computed from:
# every search scans the longer ones.
MOST_LONGER = 0.01


@dataclass(frozen=True)
class ItemLists:
    """Centres of lists, and the items in each list.

    Each vector gets one more number, which makes all vectors equally long; a user's number is 0. A large
    product with a user is then a small distance from the user (Bachrach et al., "Speeding up the Xbox
    recommender system using a Euclidean transformation", 2014). An item is in the list of the nearest centre.
    A vector that is longer than all vectors of the centres has no such number, and may be among the best for
    any user: it is in an extra list, which every search scans. The extra number only chooses a list: the
    items found are compared by the products themselves.

    centres: float32 [L, D + 1], in units of `length`, the maximum length of the vectors that they were
    computed from; made_of: number of these vectors; came: number of vectors that have come since; keys: of
    the items, int64 [N], ascending; numbers: of their lists, int64 [N], L for the extra list; prints:
    fingerprints of their vectors, see `fingerprints_of`.
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
        """Half the squared lengths of the centres, float32 [L]."""
        return self.centres.square().sum(dim=1) / 2

    @property
    def is_new(self) -> bool:
        """True if the centres were computed from exactly the items in the lists."""
        return self.came == 0 and self.made_of == len(self.keys)

    def units_of(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the vectors as lists hold them, float16 [N, D]: products are right to 1 in 2,000."""
        return (vectors / self.length).to(torch.float16)

    def after(self, keys: torch.Tensor, vectors: torch.Tensor) -> tuple[ItemLists, torch.Tensor] | None:
        """Return the lists of a new set of items, and a mask of the new or changed ones, bool [N].

        None if so many have changed that the centres may no longer fit, or if the vectors have another width.
        An item with the same vector as before stays in its list. keys: int64 [N], ascending; vectors: float32
        [N, D].
        """
        if self.centres.shape[1] != vectors.shape[1] + 1:
            return None
        prints = fingerprints_of(self.units_of(vectors))
        comes = torch.ones(len(keys), dtype=torch.bool)
        positions = torch.searchsorted(self.keys, keys).clamp(max=max(0, len(self.keys) - 1))
        if len(self.keys):
            comes = (self.keys[positions] != keys) | (self.prints[positions] != prints)
        came, num_longer = self.came + int(comes.sum()), int(self._are_longer(vectors).sum())
        if came > MAX_CHANGED_SHARE * self.made_of or num_longer > MOST_LONGER * len(keys):
            return None
        numbers = torch.empty(len(keys), dtype=torch.int64)
        numbers[~comes] = self.numbers[positions[~comes]]
        numbers[comes] = self._nearest(vectors[comes])
        return dataclasses.replace(self, came=came, keys=keys, numbers=numbers, prints=prints), comes

    def _nearest(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the number of the list for each vector, int64 [N]."""
        centres = _faiss().IndexFlatL2(self.centres.shape[1])
        centres.add(self.centres.numpy())
        _, numbers = centres.search(with_unit_length(vectors / self.length).numpy(), 1)
        return torch.from_numpy(numbers).view(-1).masked_fill(self._are_longer(vectors), len(self.centres))

    def _are_longer(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return a mask of the vectors that are longer than all vectors of the centres, bool [N]."""
        return vectors.square().sum(dim=1).sqrt() > self.length

    def near(self, users: torch.Tensor, breadth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the lists to search for users, int64 [U, breadth + 1], and their nearness, float32."""
        # Minus half the squared distance between a user of length 1 and a centre, without the term that all
        # centres share.
        directions = torch.nn.functional.normalize(users, dim=1)
        nearness = torch.addmm(self._half_squares, directions, self.centres[:, :-1].t(), beta=-1)
        nearest = nearness.topk(breadth, dim=1, sorted=False)
        always = torch.full((len(users), 1), len(self.centres))
        return torch.cat([nearest.indices, always], dim=1), torch.nn.functional.pad(nearest.values, (0, 1))


def make_lists(keys: torch.Tensor, vectors: torch.Tensor) -> ItemLists:
    """Make lists for items, with centres by k-means. Takes seconds for every 100,000 items.

    keys: int64 [N], ascending; vectors: float32 [N, D].

    Raises:
        UserError: when faiss is not installed.
    """
    nobody = torch.empty(0, dtype=torch.int64)
    if not len(keys):
        centre = torch.zeros(1, vectors.shape[1] + 1)
        return ItemLists(centre, 1.0, 0, 0, nobody, nobody, nobody)
    number = max(1, min(round(LISTS_PER_ROOT * math.sqrt(len(keys))), len(keys) // LEAST))
    # If all vectors are 0, any unit will do.
    length = float(vectors.square().sum(dim=1).amax().sqrt()) or 1.0
    means = _faiss().Kmeans(
        vectors.shape[1] + 1,
        number,
        niter=ROUNDS,
        seed=0,
        min_points_per_centroid=1,
        max_points_per_centroid=SAMPLES,
    )
    means.train(with_unit_length(vectors / length).numpy())
    lists = ItemLists(torch.from_numpy(means.centroids), length, len(keys), 0, keys, nobody, nobody)
    numbers, prints = lists._nearest(vectors), fingerprints_of(lists.units_of(vectors))
    return dataclasses.replace(lists, numbers=numbers, prints=prints)


def with_unit_length(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors with one more number, float32 [N, D + 1], which makes shorter ones length 1."""
    more = (1 - vectors.square().sum(dim=1, keepdim=True)).clamp(min=0).sqrt()
    return torch.cat([vectors, more], dim=1)


def fingerprints_of(halves: torch.Tensor) -> torch.Tensor:
    """Return a fingerprint of each vector, int64 [N], to detect changes. halves: float16 [N, D]."""
    # Four numbers at once, as one of 64 bits. Odd factors: if any bit changes, the product changes.
    words = torch.nn.functional.pad(halves, (0, -halves.shape[1] % 4)).view(torch.int64)
    factors = torch.randint(2**62, words.shape[1:], generator=torch.Generator().manual_seed(0)) * 2 + 1
    return (words * factors).sum(dim=1)


# A name that readers from before there were indexes ignore.
FILE = "items.index"
TENSORS = ("centres", "keys", "numbers", "prints")


@dataclass(frozen=True)
class IndexRecord:
    """Record of an index in a manifest: its file, and the fields of its `ItemLists` that are not tensors."""

    file: FileEntry
    length: float
    made_of: int
    came: int


def write_lists(folder: Path, lists: ItemLists) -> dict[str, Any]:
    """Write lists into a folder, wait until they are on the disk, and return the entry for its manifest."""
    arrays = {name: getattr(lists, name).contiguous().numpy() for name in TENSORS}
    entry = write_shard_file(folder / FILE, arrays)
    return {INDEX: plain(IndexRecord(entry, lists.length, lists.made_of, lists.came))}


def read_lists(folder: Path, manifest: Manifest) -> ItemLists | None:
    """Read the lists that were written with a model; None, with a printed line, if they are damaged."""
    try:
        return _read(folder, manifest.about[INDEX])
    except (UserError, OSError, SafetensorError, TypeError, ValueError) as error:
        say(f"ignoring the index of {folder} ({printable(error)}); a new one will be made")
        return None


def _read(folder: Path, told: Any) -> ItemLists:
    written: IndexRecord = typed(IndexRecord, told)
    check_file(folder, written.file)
    with safe_open(folder / written.file.name, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in TENSORS}
    lists = ItemLists(length=written.length, made_of=written.made_of, came=written.came, **tensors)
    _check(lists)
    return lists


def _check(lists: ItemLists) -> None:
    """Refuse lists that do not fit together: a wrong number would make faiss read outside of its memory."""
    keys, numbers = lists.keys, lists.numbers
    whole = [tensor.dtype == torch.int64 and tensor.ndim == 1 for tensor in (keys, numbers, lists.prints)]
    fits = (
        lists.centres.dtype == torch.float32
        and lists.centres.ndim == 2
        and min(lists.centres.shape) > 0
        and all(whole)
        and len(keys) == len(numbers) == len(lists.prints)
        and bool((keys[1:] > keys[:-1]).all())
        and bool(((numbers >= 0) & (numbers <= len(lists.centres))).all())
        and lists.length > 0
    )
    if not fits:
        raise ValueError("its lists do not fit together")


# A search scans this many items or this share of all, whichever is more. Smaller catalogues are searched
# whole.
SEARCHED, SHARE = 2**16, 1 / 12
# Numbers that faiss compares in one instruction: vectors are padded to a multiple of this.
WIDTH = 16
# Share of extra items to find: with 16-bit vectors the order of the last items may be wrong.
SPARE = 0.1
# Keys from 0 to below this times their number are rows: their positions are in an array of 8 bytes a key.
# Other keys are ids, and are found by a binary search.
KEYS_PER_ITEM = 4
# A line is printed if making an index takes longer than this, in seconds.
SAID = 1.0


class NearestItems:
    """Index of items in lists of faiss; a search scans the nearest lists.

    See Sivic and Zisserman, "Video Google", 2003. A newer model makes a new index from it, see `after`. The
    old one does not change, because another thread may be searching it.
    """

    def __init__(
        self, keys: torch.Tensor, vectors: torch.Tensor, lists: ItemLists | None = None, index: Any = None
    ) -> None:
        """Make an index of items, from the previous model's index if there is one and little has changed.

        keys: of the items, int64 [N]; vectors: float32 [N, D], in any unit; lists: of the previous model;
        index: the faiss index with the vectors of the previous model.

        Raises:
            UserError: when faiss is not installed.
        """
        sorted_keys, self._order = keys.sort()
        vectors = vectors[self._order]
        before, moved = lists, None if lists is None else lists.after(sorted_keys, vectors)
        self.lists, comes = moved or (make_lists(sorted_keys, vectors), None)
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
        """Return the index of a newer model; arguments as for making one.

        Items that are gone are removed, new or changed ones are put into their lists, and the others stay. If
        too many have changed, the index is made again.
        """
        return NearestItems(keys, vectors, self.lists, self._index)

    def _add(self, vectors: torch.Tensor, which: torch.Tensor) -> None:
        """Put some of the items into their lists. vectors: of all, in the order of keys; which: bool [N]."""
        pointer = _faiss().swig_ptr
        # Variables keep the arrays alive until faiss, which gets only addresses, has copied them.
        padded = _padded(vectors[which] / self.lists.length)
        keys, numbers = self.lists.keys[which].numpy(), self.lists.numbers[which].numpy()
        self._index.add_core(len(keys), pointer(padded), pointer(keys), pointer(numbers))

    def __len__(self) -> int:
        """Return the number of items in the index."""
        return len(self.lists.keys)

    @property
    def num_lists(self) -> int:
        """Number of lists, which is the maximum breadth of a search."""
        return len(self.lists.centres)

    @property
    def breadth(self) -> int:
        """Default number of lists that a search scans."""
        looked_at = max(SEARCHED, SHARE * len(self))
        return min(self.num_lists, math.ceil(self.num_lists * looked_at / max(1, len(self))))

    def search(self, users: torch.Tensor, k: int, breadth: int | None = None) -> torch.Tensor:
        """Return positions of k or some more items for each user, int64 [U, at least min(k, N)]; -1 for none.

        users: float32 [U, D]; breadth: number of lists to search, at most L, which finds all items.
        """
        k = min(math.ceil((1 + SPARE) * k), len(self))
        if k == 0 or len(users) == 0:
            return torch.zeros(len(users), k, dtype=torch.int64)
        breadth = min(breadth or self.breadth, self.num_lists)
        lists, nearness = (tensor.numpy() for tensor in self.lists.near(users, breadth))
        products, keys = torch.empty(len(users), k), torch.empty(len(users), k, dtype=torch.int64)
        padded, pointer = _padded(users), _faiss().swig_ptr
        # The C++ method: the Python one keeps the breadth in the index, which threads share.
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
        # The product shows where faiss has no result. The key cannot: ids may have any value, also -1.
        return self._places(keys).where(products > torch.finfo(torch.float32).min, -1)

    def _places(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the positions of keys; any position for a key that is not there."""
        if self._place_of is not None:
            return self._place_of[keys.clamp(min=0)]
        return self._order[torch.searchsorted(self.lists.keys, keys).clamp(max=len(self) - 1)]


def updated(
    previous: NearestItems | None, lists: ItemLists | None, keys: torch.Tensor, vectors: torch.Tensor
) -> NearestItems:
    """Return the index of the items of a model, and print the time if new lists took long to make.

    previous: of the previous model; None if there is none, and then `lists` that were written with a model
    are used, if any. keys, vectors: see `NearestItems`.

    Raises:
        UserError: when faiss is not installed.
    """
    begin = time.perf_counter()
    index = previous.after(keys, vectors) if previous else NearestItems(keys, vectors, lists)
    seconds, before = time.perf_counter() - begin, previous.lists if previous else lists
    was_made = before is None or index.lists.centres is not before.centres
    if was_made and seconds > SAID:
        say(f"the index of {len(index):,} items was made in {seconds:.1f} s")
    return index


def _empty_index(dim: int, num_lists: int) -> Any:
    faiss = _faiss()
    width = -(-dim // WIDTH) * WIDTH
    # The quantizer is not used: `ItemLists.near` chooses the lists. 16 bits, because memory limits the speed.
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
    """Return vectors padded with zeros, float32 [n, a multiple of WIDTH]."""
    return torch.nn.functional.pad(vectors, (0, -vectors.shape[1] % WIDTH)).numpy()


def _faiss() -> Any:
    require_installed("An approximate search", "faiss")
    # Imported by name, because the type stubs of faiss are incomplete.
    return importlib.import_module("faiss")
