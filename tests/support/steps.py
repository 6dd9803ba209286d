"""What a trainer tells a checkpointer, for tests without a trainer, and collectives at little cost."""

from __future__ import annotations

from typing import Any
from unittest import mock


def among_own_ranks() -> Any:
    """Within this, collectives do not look whose the connections are, as they do before each: a test makes
    hundreds, and all are its own.
    """
    return mock.patch("recsuite.runtime.collectives.check_visitors")


def tell(checkpointer: Any, progress: Any, loss: float = 0.5) -> None:
    """Tell of a step that was just made, or of the epoch that it ended."""
    import numpy as np
    import torch

    from recsuite.training.callbacks import Epoch, Step

    if progress.samples:
        checkpointer.on_step(Step(progress, torch.tensor(loss), {}))
    else:
        checkpointer.on_epoch(Epoch(progress, np.array([loss], np.float32), loss, {}, 0.0, 0.0, 0.0))
