"""The order of training: a permutation of which any process can compute any part, in no memory."""

from __future__ import annotations

import functools
import math

import numpy as np

# Three rounds with a random function in each cannot be told from a random permutation by who asks for places
# (Luby and Rackoff, "How to Construct Pseudorandom Permutations from Pseudorandom Functions", 1988). With
# two, the order shows; docs/decisions.md has the figures.
ROUNDS = 3
# Positions are pairs of numbers below 2^16, so that all products fit 32 bits.
HALF = np.uint32(16)
MAX_NUMBER = 2**31
# How many shapes of the grid are tried for one with few places too many.
SHAPES_TRIED = 256
# Odd constants with well spread bits: 2^32 over the golden ratio, and one of xxHash's primes.
MULTIPLIERS = (np.uint32(0x9E3779B1), np.uint32(0x85EBCA77))


def shuffled(positions: np.ndarray, number: int, *draws: int) -> np.ndarray:
    """Where a shuffle of range(number) puts the positions, int64 [n] in and out.

    draws: the numbers by which one shuffle differs from another, such as the seed and the epoch.

    A Feistel network over the rows and columns of a grid permutes its places, which are `number` or a few
    more; whoever lands on one too many goes through again, which permutes the rest ("cycle walking": Black
    and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). `number` is at most 2^31.
    """
    assert number <= MAX_NUMBER
    shape, keys = _grid(number), _keys(*draws)
    result = _permuted(positions, shape, keys)
    outside = np.flatnonzero(result >= number)
    while len(outside):
        result[outside] = _permuted(result[outside], shape, keys)
        outside = outside[result[outside] >= number]
    return result


@functools.lru_cache
def _grid(number: int) -> tuple[np.uint32, np.uint32]:
    """Rows and columns, nearly a square, of the smallest of many grids with `number` places or more."""
    least = math.isqrt(number - 1) + 1
    rows = min(range(least, least + SHAPES_TRIED), key=lambda rows: -number % rows)
    return np.uint32(rows), np.uint32(-(-number // rows))


@functools.lru_cache
def _keys(*draws: int) -> list[np.uint32]:
    return list(np.random.SeedSequence(draws).generate_state(ROUNDS, np.uint32))


def _permuted(positions: np.ndarray, shape: tuple[np.uint32, np.uint32], keys: list[np.uint32]) -> np.ndarray:
    """One pass through the network, in 32 bits and in place: numpy's loops then use the whole vector unit."""
    # The half that a round changes comes first, with the number of its values.
    other = positions.astype(np.uint32)
    changed = other // shape[1]
    other -= changed * shape[1]
    size, other_size = shape
    hashed, shifted = np.empty_like(other), np.empty_like(other)
    for key in keys:
        np.bitwise_xor(other, key, out=hashed)
        hashed *= MULTIPLIERS[0]
        np.right_shift(hashed, np.uint32(15), out=shifted)
        hashed ^= shifted
        hashed *= MULTIPLIERS[1]
        # The high half of the hash times the size, over 2^16: a number below the size.
        hashed >>= HALF
        hashed *= size
        hashed >>= HALF
        changed += hashed
        # Modulo size: what is below it wraps around to something larger.
        np.subtract(changed, size, out=shifted)
        np.minimum(changed, shifted, out=changed)
        changed, other, size, other_size = other, changed, other_size, size
    # The half that the last round changed, the first one of the two, has been renamed.
    other *= shape[1]
    other += changed
    return other.astype(np.int64)
