"""Loops over ids and rows on a CPU, compiled by numba at their first use.

PyTorch needs several passes, or a sort by comparison, for each of them.

n: keys; D: numbers in a row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from recsuite.compiled import compiled

# Most bits of a key that are sorted at once: their counts should stay in the cache of a core.
DIGIT = 14
SIGN = np.uint64(1 << 63)


class Distinct(NamedTuple):
    """Distinct keys, ascending, int64.

    inverse: for each key its index among them, int64 [n], as in torch.unique; order: the keys in ascending
    order, equal keys in input order, int32 [n]; starts: the start of each distinct key in that order, int32.
    """

    keys: torch.Tensor
    inverse: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor


def distinct(keys: torch.Tensor) -> Distinct:
    """Return the distinct keys of an int64 tensor [n], n < 2^31."""
    number = len(keys)
    found, inverse = torch.empty_like(keys), torch.empty_like(keys)
    order, starts = (torch.empty(number, dtype=torch.int32) for _ in range(2))
    arrays = (each.numpy() for each in (keys.contiguous(), found, inverse, order, starts))
    count = _sort(*arrays) if number else 0
    return Distinct(found[:count], inverse, order, starts[:count])


@compiled
def _sort(
    keys: np.ndarray, found: np.ndarray, inverse: np.ndarray, order: np.ndarray, starts: np.ndarray
) -> int:
    """Write the fields of `Distinct`, and return the number of distinct keys (radix sort)."""
    number, first = len(keys), np.uint64(keys[0])
    values, places = np.empty((2, number), np.uint64), np.empty((2, number), np.int32)
    varies = np.uint64(0)
    for place in range(number):
        key = np.uint64(keys[place])
        varies |= key ^ first
        # Unsigned numbers in the order of the signed ones.
        values[0, place] = key ^ SIGN
        places[0, place] = place
    # Most keys are small numbers, and equal in their high bits.
    high = 0
    while high < 64 and varies >> np.uint64(high):
        high += 1
    digits = max(1, -(-high // DIGIT))
    width = -(-high // digits)
    counts, now, mask = np.empty(1 << width, np.int32), 0, np.uint64((1 << width) - 1)
    for digit_number in range(digits):
        shift = np.uint64(digit_number * width)
        counts[:] = 0
        for place in range(number):
            counts[(values[now, place] >> shift) & mask] += 1
        begin = 0
        for digit in range(len(counts)):
            begin, counts[digit] = begin + counts[digit], begin
        for place in range(number):
            digit = (values[now, place] >> shift) & mask
            target = counts[digit]
            counts[digit] += 1
            values[1 - now, target], places[1 - now, target] = values[now, place], places[now, place]
        now = 1 - now
    count = 0
    for place in range(number):
        if place == 0 or values[now, place] != values[now, place - 1]:
            found[count] = np.int64(values[now, place] ^ SIGN)
            starts[count] = place
            count += 1
        order[place] = places[now, place]
        inverse[places[now, place]] = count - 1
    return count


@compiled
def update_by_adagrad(
    weights: np.ndarray,
    sums: np.ndarray,
    rows: np.ndarray,
    gradients: np.ndarray,
    rate: np.float32,
    eps: np.float32,
) -> None:
    """Make a step of row-wise Adagrad, see `table_rules`, in one pass.

    weights: float32 [rows, D]; sums: of mean squares, float32 [rows]; rows: distinct, int64 [n]; gradients:
    float32 [n, D].
    """
    dim = weights.shape[1]
    for place in range(len(rows)):
        row, square = rows[place], np.float32(0)
        for number in range(dim):
            square += gradients[place, number] * gradients[place, number]
        sums[row] += square / np.float32(dim)
        factor = rate / (np.sqrt(sums[row]) + eps)
        for number in range(dim):
            weights[row, number] -= factor * gradients[place, number]
