"""Loops over ids and rows on a CPU, compiled by numba at their first use.

PyTorch needs several passes, or a sort by comparison, for each of them. Imported only where tables are on a
CPU, because numba takes 60 MiB.

n: keys; D: numbers in a row.
"""

from __future__ import annotations

import numpy as np

from recsuite.compiled import compiled, inlined, vectorised

# Most bits of a key that are sorted at once: their counts should stay in the cache of a core.
DIGIT = 14
SIGN = np.uint64(1 << 63)
# Most possible keys for each key for which counting all of them is faster than sorting.
MOST_SPARSE = 2


@inlined
def count_keys(
    keys: np.ndarray,
    least: int,
    most: int,
    distinct: np.ndarray,
    inverse: np.ndarray,
    order: np.ndarray,
    starts: np.ndarray,
) -> int:
    """Do the same as `sort_keys` for keys from `least` to `most`."""
    counts, ranks = np.zeros(most - least + 1, np.int32), np.empty(most - least + 1, np.int32)
    for key in keys:
        counts[key - least] += 1
    begin, number = 0, 0
    for index in range(len(counts)):
        count = counts[index]
        counts[index] = begin
        begin += count
        if count:
            distinct[number], starts[number], ranks[index] = index + least, begin - count, number
            number += 1
    for index in range(len(keys)):
        key = keys[index] - least
        order[counts[key]] = index
        counts[key] += 1
        inverse[index] = ranks[key]
    return number


@compiled
def sort_keys(
    keys: np.ndarray, distinct: np.ndarray, inverse: np.ndarray, order: np.ndarray, starts: np.ndarray
) -> int:
    """Write the fields of `cpu_tables.Distinct`; return the number of distinct keys.

    keys: int64 [n], at least one; distinct, inverse: int64 [n]; order, starts: int32 [n]. Counts keys that
    are close together, and sorts others digit by digit.
    """
    least, most = keys[0], keys[0]
    for key in keys:
        least, most = min(least, key), max(most, key)
    # Unsigned: the difference of two signed numbers may be too large for one.
    if np.uint64(most) - np.uint64(least) < np.uint64(MOST_SPARSE * len(keys)):
        return count_keys(keys, least, most, distinct, inverse, order, starts)
    number, first = len(keys), np.uint64(keys[0])
    # Two of each: a pass over a digit moves all keys from one to the other.
    values, indices = np.empty((2, number), np.uint64), np.empty((2, number), np.int32)
    differing_bits = np.uint64(0)
    for index in range(number):
        key = np.uint64(keys[index])
        differing_bits |= key ^ first
        # Unsigned numbers in the order of the signed ones.
        values[0, index] = key ^ SIGN
        indices[0, index] = index
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
        for index in range(number):
            counts[(values[source, index] >> shift) & mask] += 1
        begin = 0
        for digit in range(len(counts)):
            begin, counts[digit] = begin + counts[digit], begin
        for index in range(number):
            digit = (values[source, index] >> shift) & mask
            target = counts[digit]
            counts[digit] += 1
            values[1 - source, target] = values[source, index]
            indices[1 - source, target] = indices[source, index]
        source = 1 - source
    count = 0
    for index in range(number):
        if index == 0 or values[source, index] != values[source, index - 1]:
            distinct[count] = np.int64(values[source, index] ^ SIGN)
            starts[count] = index
            count += 1
        order[index] = indices[source, index]
        inverse[indices[source, index]] = count - 1
    return count


@vectorised
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
    for index in range(len(rows)):
        row, square = rows[index], np.float32(0)
        for number in range(dim):
            square += gradients[index, number] * gradients[index, number]
        sums[row] += square / np.float32(dim)
        factor = rate / (np.sqrt(sums[row]) + eps)
        for number in range(dim):
            weights[row, number] -= factor * gradients[index, number]


# Requests of a row that its slot remembers, see `storage.RowsOnDisk`.
MOST_HEAT = 3


@compiled
def find_slots(
    rows: np.ndarray,
    slot_of: np.ndarray,
    called: np.ndarray,
    heat: np.ndarray,
    loaded: np.ndarray,
    call: int,
    slots: np.ndarray,
    missing: np.ndarray,
) -> tuple[int, int]:
    """Find the slots of rows, see `storage.RowsOnDisk`, and note the call in them.

    rows, slots: int64 [n]; missing: the indices of rows without a slot, int64 [n]. Returns the number of
    these, and that of the last transfer that fills any of the slots.
    """
    number, newest = 0, 0
    for index in range(len(rows)):
        slot = slot_of[rows[index]]
        if slot < 0:
            missing[number] = index
            number += 1
            continue
        slots[index] = slot
        called[slot] = call
        heat[slot] = min(heat[slot] + 1, MOST_HEAT)
        newest = max(newest, loaded[slot])
    return number, newest


@compiled
def evict(
    rows: np.ndarray,
    missing: np.ndarray,
    slot_of: np.ndarray,
    row_of: np.ndarray,
    called: np.ndarray,
    heat: np.ndarray,
    loaded: np.ndarray,
    least: int,
    call: int,
    transfer: int,
    hand: int,
    done: int,
    slots: np.ndarray,
    before: np.ndarray,
) -> tuple[int, int]:
    """Assign slots that no call since `least` used to the missing rows from index `done` on.

    before: the row that had the slot, or -1, int64 [missing]. Returns the number of rows with a slot, and the
    next position of the clock's hand.
    """
    for index in range(done, len(missing)):
        row, seen = rows[missing[index]], 0
        before[index] = -1
        if slot_of[row] >= 0:
            # The row is requested twice.
            slots[missing[index]] = slot_of[row]
            continue
        while row_of[hand] >= 0 and (called[hand] >= least or heat[hand] > 0):
            if called[hand] < least:
                heat[hand] -= 1
            hand = hand + 1 if hand + 1 < len(row_of) else 0
            seen += 1
            # Each slot was seen with every heat.
            if seen > (MOST_HEAT + 1) * len(row_of):
                return index, hand
        before[index] = row_of[hand]
        if row_of[hand] >= 0:
            slot_of[row_of[hand]] = -1
        row_of[hand], slot_of[row] = row, hand
        called[hand], heat[hand], loaded[hand] = call, 0, transfer
        slots[missing[index]] = hand
        hand = hand + 1 if hand + 1 < len(row_of) else 0
    return len(missing), hand


@compiled
def copy_rows(source: np.ndarray, of_source: np.ndarray, target: np.ndarray, of_target: np.ndarray) -> None:
    """Copy rows, float32 [n, D], of one array to rows of another. of_source, of_target: int64 [n]."""
    for index in range(len(of_source)):
        for number in range(source.shape[1]):
            target[of_target[index], number] = source[of_source[index], number]


@compiled
def clean_pages(
    rows: np.ndarray,
    per_page: int,
    slot_of: np.ndarray,
    dirty: np.ndarray,
    others: np.ndarray,
    slots: np.ndarray,
) -> int:
    """Find the changed rows that are in the same pages of a file as some rows, and mark them unchanged.

    rows: int64 [n]; per_page: rows in a page; others, slots: those found, int64 [the most to find]; slot_of,
    dirty: see `storage.RowsOnDisk`. Returns their number.
    """
    number = 0
    for row in rows:
        first = row // per_page * per_page
        for other in range(first, min(first + per_page, len(slot_of))):
            if number == len(others):
                return number
            slot = slot_of[other]
            if slot >= 0 and dirty[slot]:
                others[number], slots[number], dirty[slot] = other, slot, False
                number += 1
    return number
