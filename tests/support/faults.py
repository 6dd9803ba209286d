"""The example with a data set that fails on the last rank: python faults.py FAULT FLAGS..."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

import example
from recsuite.datasets.batches import EventBatches, Request
from recsuite.runtime.process import end_with
from tests.support.sources import FAILING_STEP, FAULTS


class FailingBatches(EventBatches):
    """Fails at one step of the second epoch, on one rank: the pool is long under way."""

    fault = sys.argv[1]

    def make(self, request: Request, empty: Callable[..., np.ndarray] = np.empty) -> Sequence[np.ndarray]:
        """The batch, or the fault."""
        if request[:3] == ("train", 1, FAILING_STEP) and self.rank == self.world_size - 1:
            if self.fault == "cut":
                os.truncate(Path(self.features.folder) / "rows.npy", 1000)
            elif (result := FAULTS[self.fault]()) is not None:
                return result
        return super().make(request, empty)


if __name__ == "__main__":
    from recsuite.datasets import opening as data

    data.EventBatches = FailingBatches  # type: ignore[misc]
    # As the example itself ends.
    end_with(lambda: example.main(sys.argv[2:]))
