"""How long before an event each item of its history came, as a model takes it.

A data worker imports this module: no torch.
"""

from __future__ import annotations

import numpy as np

from recsuite.config.sections import NUM_GAPS

# Seconds that a number of 32 bits holds.
OLDEST = 2**31 - 1


def gaps_of(seconds: np.ndarray) -> np.ndarray:
    """The bucket of each gap, int32 [n]: of 0 seconds 0, of 1 and 2 it is 1, of 3 to 6 it is 2, and so on.

    seconds: whole numbers of any type, [n]; below 0 they count as 0.
    """
    # The exponent of 1 + s in binary, which is exact, unlike a logarithm.
    exponents = np.frexp(1.0 + np.maximum(seconds, 0))[1] - 1
    return np.minimum(exponents, NUM_GAPS - 1).astype(np.int32)
