"""Time buckets of the gaps between an event and the items of its history, in training and in serving.

A data worker imports this module: no torch.
"""

from __future__ import annotations

import numpy as np

# Number of time buckets for the age of an item of a history, see `time_buckets_of`: the last one begins at 68
# years.
NUM_TIME_BUCKETS = 32
# Most seconds that fit a number of 32 bits.
OLDEST = 2**31 - 1


def time_buckets_of(seconds: np.ndarray) -> np.ndarray:
    """Time bucket of each gap, int32 [n]: 0 for 0 seconds, 1 for 1 and 2, 2 for 3 to 6, and so on.

    seconds: whole numbers of any type, [n]; below 0 they count as 0.
    """
    # The exponent of 1 + s in binary, which is exact, unlike a logarithm.
    exponents = np.frexp(1.0 + np.maximum(seconds, 0))[1] - 1
    return np.minimum(exponents, NUM_TIME_BUCKETS - 1).astype(np.int32)
