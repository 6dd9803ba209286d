"""One loop for training, one for evaluation, and their metrics over all ranks. Every mode uses these two."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from columns import Columns
from config import Config
from dataloader import Batch, EpochSampler, RatingBatches, build_dataloader
from metrics import Metrics, measure
from model import RatingBatch
from runtime import RuntimeContext
from sharding import build_model, describe_plan


@dataclass(frozen=True)
class Epoch:
    """What one pass over the training ratings did, the same on every rank.

    losses: mean squared error of each step's global batch, float32 [steps]; data_wait: the largest share,
    over ranks, of the pass that was spent waiting for batches.
    """

    number: int
    losses: np.ndarray
    train_rmse: float
    test: Metrics
    seconds: float
    ratings_per_second: float
    data_wait: float
    first_batch_seconds: float


class Feed:
    """The batches of all passes, from one loader: plain tensors become the model's input here.

    Each pass is a fresh iterator. TorchRec's pipeline knows an exhausted iterator by its identity, and a
    persistent DataLoader gives the same object every epoch, so without this the second epoch would
    silently be empty (torchrec issue 2327, `test_the_pipeline_sees_no_second_epoch_of_a_bare_loader`).
    """

    def __init__(self, loader: DataLoader[Batch], sampler: EpochSampler) -> None:
        self.loader = loader
        self.sampler = sampler
        self.keys = [table.name for table in sampler.dataset.tables]
        self.seconds_waited = 0.0
        self.first_batch_seconds = 0.0

    def batches(self, split: str, epoch: int) -> Iterator[RatingBatch]:
        """One pass over a split, on the host; counts the seconds that its consumer waits."""
        self.sampler.split, self.sampler.epoch = split, epoch
        self.seconds_waited = self.first_batch_seconds = 0.0
        start = time.perf_counter()
        for batch in self.loader:
            waited = time.perf_counter() - start
            self.seconds_waited += waited
            self.first_batch_seconds = self.first_batch_seconds or waited
            features = KeyedJaggedTensor(keys=self.keys, values=batch.values, lengths=batch.lengths)
            yield RatingBatch(features, batch.ratings, batch.weights)
            start = time.perf_counter()


class PlainPipeline:
    """A training step as it reads in a textbook; the same interface as TorchRec's pipelines."""

    def __init__(
        self, model: DistributedModelParallel, optimizer: CombinedOptimizer, device: torch.device
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device = device

    def progress(self, batches: Iterator[RatingBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Train on the next batch and return the model's output, (loss, predictions)."""
        batch = next(batches).to(self.device, non_blocking=True)
        self.optimizer.zero_grad()
        loss, output = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return output


def make_optimizer(model: DistributedModelParallel, config: Config) -> CombinedOptimizer:
    """The tables' optimizer, which runs inside the backward, and Adam for the dense part, as one."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda parameters: torch.optim.Adam(parameters, lr=config.dense_lr),
    )
    return CombinedOptimizer([model.fused_optimizer, dense])


def train_epoch(
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    feed: Feed,
    epoch: int,
    config: Config,
    context: RuntimeContext,
    progress: Callable[[int], None],
) -> np.ndarray:
    """One pass over the training ratings; returns the loss of each global batch, float32 [steps].

    Nothing waits for the device but the end: losses stay there until then. Collective: every rank.
    """
    model.train()
    pipelined = config.pipeline == "sparse_dist" or (config.pipeline == "auto" and context.device.type == "cuda")
    pipeline = (TrainPipelineSparseDist if pipelined else PlainPipeline)(model, optimizer, context.device)
    num_steps = feed.sampler.dataset.num_steps("train")
    losses = torch.zeros(num_steps, device=context.device)
    base_rates = [group["initial_lr"] for group in optimizer.param_groups]
    batches = feed.batches("train", epoch)
    for step in range(num_steps):
        left = 1 - (epoch * num_steps + step) / (config.epochs * num_steps)
        for group, rate in zip(optimizer.param_groups, base_rates, strict=True):
            group["lr"] = rate * left
        losses[step], _ = pipeline.progress(batches)
        progress(step)
    if pipelined:
        # Give the model its plain forward back, for evaluation.
        pipeline.detach()
    dist.all_reduce(losses)
    return (losses / context.world_size).cpu().numpy()


@torch.no_grad()
def evaluate(
    model: DistributedModelParallel, feed: Feed, columns: Columns, context: RuntimeContext
) -> Metrics:
    """Exact metrics over all test ratings, each counted once, the same on every rank. Collective: every rank."""
    model.eval()
    predictions = [
        model(batch.to(context.device, non_blocking=True))[1][1] for batch in feed.batches("test", epoch=0)
    ]
    mine = torch.stack(predictions)
    everyones = mine.new_empty(context.world_size * mine.shape[0], mine.shape[1])
    dist.all_gather_into_tensor(everyones, mine)
    # [ranks, steps, B] to the order of the ratings; what follows the last rating is padding.
    in_order = everyones.view(context.world_size, *mine.shape).transpose(0, 1).reshape(-1)
    ratings = np.load(f"{columns.folder}/rating.npy", mmap_mode="r")[columns.num_train :]
    return measure(in_order[: columns.num_test].cpu().numpy(), ratings)
