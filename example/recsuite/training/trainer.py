"""A training from its beginning, or from a checkpoint, to its end: in epochs, or along a stream."""

from __future__ import annotations

from collections.abc import Sequence

from recsuite.config.config import Config
from recsuite.datasets.opening import Data
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Callback, CheckpointerProtocol, Run
from recsuite.training.loops.epochs import EpochLoop
from recsuite.training.loops.loop import Training
from recsuite.training.loops.stream import StreamLoop


def begin_training(
    data: Data,
    config: Config,
    context: RuntimeContext,
    checkpointer: CheckpointerProtocol | None = None,
    callbacks: Sequence[Callback] = (),
) -> Training:
    """Return a training in epochs, validated after each and tested at the end, or along a stream, of which
    each window is predicted before it is learned. The workers begin. Collective: every rank.

    data: see `open_data`; config, context: flags and process; checkpointer: see `checkpointing`, None keeps
    the best weights in memory; callbacks: observe the training.

        with rs.begin_training(data, args, runtime, checkpoints) as training:
            model = training.shard(make_model)
            for part in training.passes():
                for batch in part:
                    model(batch).backward()
                    model.step()
                part.end(training.validate())
            result = training.finish()
    """
    kind = StreamLoop if config.stream.stream else EpochLoop
    return kind(data, config, context, checkpointer, callbacks)


def train(
    data: Data,
    config: Config,
    context: RuntimeContext,
    checkpointer: CheckpointerProtocol | None = None,
    callbacks: Sequence[Callback] = (),
) -> Run:
    """Train the model of the task, see `Training.run`. Collective: every rank."""
    return begin_training(data, config, context, checkpointer, callbacks).run()
