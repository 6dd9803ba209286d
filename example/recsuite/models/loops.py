"""Loops over vectors on a CPU, compiled by numba at their first use.

PyTorch reads and writes the arrays of a batch once for each operation, and they are larger than the cache of
a core.

B: events; D: numbers in a vector.
"""

from __future__ import annotations

import numpy as np

from recsuite.compiled import vectorised


@vectorised
def multiply_biased(
    users: np.ndarray, items: np.ndarray, scores: np.ndarray, products: np.ndarray, squares: np.ndarray
) -> None:
    """Write the results of `layers.biased_products`, float32 [B], [B, D] and [B]."""
    for event in range(len(users)):
        score, square = np.float32(0), np.float32(0)
        for number in range(users.shape[1]):
            user, item = users[event, number], items[event, number]
            products[event, number] = user * item
            score += user * item
            square += user * user + item * item
        scores[event] = score + (users[event, 0] + items[event, 0] - products[event, 0])
        squares[event] = square


@vectorised
def multiply_biased_backward(
    users: np.ndarray,
    items: np.ndarray,
    of_scores: np.ndarray,
    of_products: np.ndarray,
    of_squares: np.ndarray,
    of_users: np.ndarray,
    of_items: np.ndarray,
) -> None:
    """Write the gradients of both vectors, float32 [B, D], from those of the results of `multiply_biased`."""
    for event in range(len(users)):
        of_score, of_square = of_scores[event], np.float32(2) * of_squares[event]
        for number in range(users.shape[1]):
            user, item = users[event, number], items[event, number]
            of_both = of_products[event, number] + of_score
            of_users[event, number] = of_both * item + of_square * user
            of_items[event, number] = of_both * user + of_square * item
        # The biases are added, and not multiplied.
        of_users[event, 0] += of_score * (1 - items[event, 0])
        of_items[event, 0] += of_score * (1 - users[event, 0])
