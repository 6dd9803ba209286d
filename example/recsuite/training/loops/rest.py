"""How good a model of a stream is on what it has not learned: as if nobody had trained it any further."""

from __future__ import annotations

import numpy as np
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsuite.checkpoint.storage.choice import describe_step
from recsuite.checkpoint.storage.manifest import Progress
from recsuite.checkpoint.storage.stream_progress import StreamProgress
from recsuite.datasets.columns import Columns
from recsuite.datasets.streams import check_prefix
from recsuite.errors import counted, four_places
from recsuite.runtime.process import RuntimeContext, raise_on_all
from recsuite.training.evaluation import Evaluator, PredictionEvaluator


def say_rest(
    evaluator: Evaluator,
    model: DistributedModelParallel,
    progress: Progress,
    columns: Columns,
    context: RuntimeContext,
) -> None:
    """Predict all events of a stream behind those that a model has learned, and say with what error.
    Collective: every rank.

    Raises:
        UserError: when what it has learned is not there as it was.
    """
    # A ranking of a stream is refused with the flags.
    assert isinstance(evaluator, PredictionEvaluator)
    stream, end = progress.stream or StreamProgress(), columns.num_train
    raise_on_all(lambda: check_prefix(columns.column("keys"), stream.end, stream.digest, columns.source))
    begin = stream.begin + progress.samples
    step, unit = describe_step(progress), columns.schema.labels
    if begin == end:
        context.say(f"{step} has learned all {end:,} {unit} of the stream, and none is left to predict")
        return
    labels = np.asarray(columns.column("rating")[begin:end])
    metrics = evaluator.window(model, progress.epoch, (begin, end), labels)
    name, label = evaluator.task.main_metric, evaluator.task.main_label
    many, error = counted(end - begin, unit[:-1], unit), four_places(metrics[name])
    context.say(f"{step}: {many} after it, none of them learned, predicted with {label} {error}")
