"""Loops over ids and rows on a CPU, compiled by numba at their first use.

PyTorch needs several passes, or a sort by comparison, for each of them. Imported only where tables are on a
CPU, because numba takes 60 MiB.

n: keys; D: numbers in a row.
"""

from __future__ import annotations

import numpy as np

from recsuite.compiled import compiled

# Most bits of a key that are sorted at once: their counts should stay in the cache of a core.
DIGIT = 14
SIGN = np.uint64(1 << 63)


@compiled
def sort_keys(
    keys: np.ndarray, found: np.ndarray, inverse: np.ndarray, order: np.ndarray, starts: np.ndarray
) -> int:
    """Write the fields of `cpu_tables.Distinct`; return the number of distinct keys. A radix sort.

    keys: int64 [n], at least one; found, inverse: int64 [n]; order, starts: int32 [n].
    """
    number, first = len(keys), np.uint64(keys[0])
    # Two of each: a pass over a digit moves all keys from one to the other.
    values, places = np.empty((2, number), np.uint64), np.empty((2, number), np.int32)
    differing_bits = np.uint64(0)
    for place in range(number):
        key = np.uint64(keys[place])
        differing_bits |= key ^ first
        # Unsigned numbers in the order of the signed ones.
        values[0, place] = key ^ SIGN
        places[0, place] = place
    # Most keys are small numbers, and equal in their high bits.
    num_bits = 0
    while num_bits < 64 and differing_bits >> np.uint64(num_bits):
        num_bits += 1
    digits = max(1, -(-num_bits // DIGIT))
    width = -(-num_bits // digits)
    counts, source, mask = np.empty(1 << width, np.int32), 0, np.uint64((1 << width) - 1)
    for digit_number in range(digits):
        shift = np.uint64(digit_number * width)
        counts[:] = 0
        for place in range(number):
            counts[(values[source, place] >> shift) & mask] += 1
        begin = 0
        for digit in range(len(counts)):
            begin, counts[digit] = begin + counts[digit], begin
        for place in range(number):
            digit = (values[source, place] >> shift) & mask
            target = counts[digit]
            counts[digit] += 1
            values[1 - source, target] = values[source, place]
            places[1 - source, target] = places[source, place]
        source = 1 - source
    count = 0
    for place in range(number):
        if place == 0 or values[source, place] != values[source, place - 1]:
            found[count] = np.int64(values[source, place] ^ SIGN)
            starts[count] = place
            count += 1
        order[place] = places[source, place]
        inverse[places[source, place]] = count - 1
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
