"""What is learned, the sharded model with its optimizer, and whether there is something left to learn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.config.sections.training import TrainingConfig
from recsuite.datasets.columns import Columns
from recsuite.models.prior import Prior
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.plan import build_model
from recsuite.training.optimizer import make_optimizer, table_optimizer


@dataclass(frozen=True)
class TrainState:
    """All that learns: the model, the optimizer of its tables and of its dense part as one, and the decay of
    the tables in a pass, see `RowScale`.
    """

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    weight_decay: float

    @property
    def row_scale(self) -> torch.Tensor:
        """What the rows are of what the tables hold, float32 []: the model's buffer itself."""
        # DistributedModelParallel wraps our model.
        return self.model.module.row_scale

    @property
    def head(self) -> Any:
        """The model that computes with looked-up rows, without a parallel wrapper."""
        return self.model.module.recommender.head

    @property
    def prior(self) -> Prior | None:
        """The prior of the rows, where the model has one."""
        return getattr(self.head, "prior", None)

    def expect_noise(self, noise: float | None) -> None:
        """Hold rows by their prior, if they have one, as strongly as is right for this noise."""
        if self.prior is not None and noise is not None:
            self.prior.noise = noise


def build_train_state(columns: Columns, config: Config, context: RuntimeContext) -> TrainState:
    """The model of a data set and its optimizer, untrained. Collective: every rank.

    Raises:
        UserError: when the tables do not fit the memory of the ranks.
    """
    global_batch = config.loader.batch_size * context.world_size
    # One step learns from the batches of all ranks, so the rate is for that many events.
    model = build_model(columns, config, context, table_optimizer(config.optimizer, global_batch))
    return TrainState(model, make_optimizer(model, config.optimizer), config.optimizer.weight_decay)


def has_epochs_left(progress: Progress, config: TrainingConfig) -> bool:
    """Whether there is something left to train."""
    return progress.epoch < config.epochs and not stops_early(progress, config)


def stops_early(progress: Progress, config: TrainingConfig) -> bool:
    """Whether so many epochs in a row were no better than one before that no further one begins."""
    # Without a single finite result there is no best epoch to go back to, and nothing to compare with.
    is_impatient = 0 < config.patience <= progress.epochs_since_best and progress.best is not None
    # After the last epoch nothing is stopped early: the training is simply over.
    return is_impatient and progress.epoch < config.epochs
