"""How far from zero the rows of a model lie, learned from validation events; see `models/prior.py`."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsuite.models.co_occurrence import GROUPS, CoOccurrence, learned_spreads
from recsuite.runtime.process import broadcast_from_rank0
from recsuite.sharding.recommender import Recommender
from recsuite.training.input_pipeline import InputPipeline

# The share of the epochs after which spreads are learned. Before, rows are small because they have learned
# little, which is no fault of the prior.
WARM_UP = 0.2


def learn_spreads(model: DistributedModelParallel, input_pipeline: InputPipeline, epoch: int) -> None:
    """Move the spreads of a model with a prior to where the validation events say. Collective: every rank.

    epoch: what a failure of the batches is reported with.
    """
    recommender: Recommender = model.module.recommender
    head: CoOccurrence = recommender.head
    assert head.prior is not None
    products, errors = _evidence(model, input_pipeline, epoch)
    spreads = head.spreads.double().cpu()
    noise = head.prior.noise
    # One rank solves: the machines of others may round otherwise.
    learned = broadcast_from_rank0(lambda: learned_spreads(spreads, products, errors, noise).tolist())
    head.spreads.copy_(torch.tensor(learned))


@torch.no_grad()
def _evidence(
    model: DistributedModelParallel, input_pipeline: InputPipeline, epoch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products and errors as `learned_spreads` takes them, summed over the events of all ranks."""
    # In this mode the tracker of a delta marks no row as changed.
    model.eval()
    recommender: Recommender = model.module.recommender
    head: CoOccurrence = recommender.head
    device = head.spreads.device
    # One tensor for one exchange: the errors are the last column.
    sums = torch.zeros(len(GROUPS), len(GROUPS) + 1, dtype=torch.float64, device=device)
    for batch in input_pipeline.batches("validation", epoch):
        batch = batch.to(device, non_blocking=True)
        predictions, directions = head.predict_with_directions(recommender.look_up(batch), batch)
        # Padding has the weight 0.
        is_real = (batch.weights > 0).double()
        directions = directions.double() * is_real
        missed = (batch.labels - predictions).double() * is_real
        sums += directions @ torch.cat([directions, missed.unsqueeze(0)]).T
    dist.all_reduce(sums)
    sums = sums.cpu()
    return sums[:, :-1], sums[:, -1]


def describe_spreads(head: CoOccurrence) -> str:
    """One line on how far from zero rows lie."""
    times = (
        f"{group} {math.exp(spread):.2f}" for group, spread in zip(GROUPS, head.spreads.tolist(), strict=True)
    )
    return (
        "learned from the validation: how many times as far from zero as the prior says rows lie: "
        f"{', '.join(times)} (docs/quality.md, Who had what)"
    )
