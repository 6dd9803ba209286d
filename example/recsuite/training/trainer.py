"""A training from its beginning, or from a checkpoint, to its end: in epochs, or along a stream."""

from __future__ import annotations

from collections.abc import Sequence

from recsuite.config.config import Config
from recsuite.datasets.opening import Data
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Callback, CheckpointerProtocol, Run
from recsuite.training.loops.epochs import EpochLoop
from recsuite.training.loops.stream import StreamLoop


def train(
    data: Data,
    config: Config,
    context: RuntimeContext,
    checkpointer: CheckpointerProtocol | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train a model: in epochs, validated after each and tested at the end, or along a stream, of which each
    window is predicted before it is learned from. Collective: every rank.

    Raises:
        UserError: when the tables do not fit, the training diverges, or data that grow cannot be read.
        WorkerError: when a data worker fails.
    """
    loop = StreamLoop if config.stream.stream else EpochLoop
    return loop(data, config, context, checkpointer, callbacks).run()
