"""Calls of a checkpointer as a trainer makes them, for tests without a trainer."""

from __future__ import annotations

from typing import Any


def tell(checkpointer: Any, progress: Any, loss: float = 0.5) -> None:
    """Tell of a step that was just made, or of the epoch that it ended."""
    import numpy as np
    import torch

    from recsuite.metrics import Measured
    from recsuite.training.callbacks import Epoch, Step

    if progress.samples:
        checkpointer.on_step(Step(progress, torch.tensor(loss), {}))
    else:
        checkpointer.on_epoch(
            Epoch(progress, np.array([loss], np.float32), loss, Measured({}), 0.0, 0.0, 0.0)
        )


def train_epoch(train_state: Any, feed: Any, progress: Any, config: Any, context: Any, *on_step: Any) -> Any:
    """Train on the rest of an epoch; returns the losses, float32 [steps]. Collective: every rank."""
    from recsuite.training.state import Schedule
    from recsuite.training.steps import Pass, learn

    schedule = Schedule(len(feed.loader.dataset.ranges["train"]), config.epochs)
    return learn(Pass(train_state, feed, progress, schedule, config, context, *on_step))


def make_step(train_state: Any, batch: Any) -> Any:
    """Make a complete step on a batch on the device; returns the loss, detached. Collective: every rank."""
    # Here TorchRec passes the tables' rate to their kernel.
    train_state.table_optimizer.zero_grad()
    return train_state.train_on(batch).detach()
