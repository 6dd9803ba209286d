"""How good a model is on the validation events and on the test, over all ranks, for either task. Collective.

Everything is exact: each event counts once, and nothing is sampled. What is compared in the end is an array
with one entry for each event of the split, in their order, the same on every rank; metrics are numpy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from recsuite.config.sections.model import ModelConfig
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.batching.places import places_of
from recsuite.datasets.columns import Columns
from recsuite.datasets.metrics import (
    Calibration,
    Metrics,
    fit_calibration,
    measure,
    measure_probabilities,
    measure_ranks,
)
from recsuite.datasets.schema import ITEM, USER
from recsuite.models.tasks.task import Task, task_named
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.progress_bar import stage
from recsuite.sharding.recommender import ModelInput
from recsuite.training.input_pipeline import InputPipeline

# Users times items that are scored at once: 32 MiB as float64.
SCORES_AT_ONCE = 2**22
# Of windows: a calibration would have to be that of windows before; no log loss is given without one.
UNCALIBRATED = Calibration(float("nan"), float("nan"))


class Evaluator(Protocol):
    """Measures a model. Maps its columns when it is made, so that they may be removed. Collective.

    The batches do not depend on the epoch: it is what a failure is reported with.
    """

    def validate(self, model: DistributedModelParallel, epoch: int) -> Metrics:
        """The metrics on the validation events, all NaN where there are none."""

    def test(self, model: DistributedModelParallel, epoch: int) -> Metrics:
        """The metrics on the test events."""


def make_evaluator(
    input_pipeline: InputPipeline, columns: Columns, config: ModelConfig, context: RuntimeContext
) -> Evaluator:
    """The evaluator that the configured task asks for. Not collective."""
    task = task_named(config.task)
    if task.evaluation == "ranks":
        return RankingEvaluator(input_pipeline, columns, config.embedding_dim, context)
    return PredictionEvaluator(task, input_pipeline, columns, context)


class PredictionEvaluator:
    """Holds predicted labels against the labels."""

    def __init__(
        self, task: Task, input_pipeline: InputPipeline, columns: Columns, context: RuntimeContext
    ) -> None:
        self.task = task
        self.input_pipeline = input_pipeline
        self.context = context
        self.labels = {split: columns.labels(split) for split in ("validation", "test")}
        self.liked_label = columns.schema.liked_label

    def validate(self, model: DistributedModelParallel, epoch: int) -> Metrics:
        """See `Evaluator`."""
        predictions, labels = self.predict(model, "validation", epoch), self.labels["validation"]
        if len(labels) == 0:
            return self.task.no_metrics()
        return self._measure(predictions, labels, self._calibration(predictions, labels))

    def test(self, model: DistributedModelParallel, epoch: int) -> Metrics:
        """See `Evaluator`; probabilities come from the calibration on the validation events."""
        # Predicted anew: the test is read with the best epoch's weights, and the last validation may have
        # been of others.
        calibration = self._calibration(self.predict(model, "validation", epoch), self.labels["validation"])
        return self._measure(self.predict(model, "test", epoch), self.labels["test"], calibration)

    def window(
        self, model: DistributedModelParallel, number: int, window: tuple[int, int], labels: np.ndarray
    ) -> Metrics:
        """The metrics on the events of a stream from one position to before another; labels: of them."""
        return self._measure(self.predict(model, "validation", number, window), labels, UNCALIBRATED)

    def _measure(self, predictions: np.ndarray, labels: np.ndarray, calibration: Calibration) -> Metrics:
        liked = labels >= self.liked_label
        if self.task.evaluation == "answers":
            # The probabilities as they are: what is served is not calibrated again.
            return measure_probabilities(predictions, liked)
        return measure(predictions, labels, liked, calibration)

    def _calibration(self, predictions: np.ndarray, labels: np.ndarray) -> Calibration:
        return fit_calibration(predictions, labels >= self.liked_label)

    @torch.no_grad()
    def predict(
        self,
        model: DistributedModelParallel,
        split: str,
        epoch: int,
        window: tuple[int, int] | None = None,
    ) -> np.ndarray:
        """Predictions for all events of a split, or of a window, float32, in their order, the same on every
        rank.
        """
        # Not for layers alone: in this mode the tracker of a delta marks no row as changed.
        model.eval()
        # Allocated once: tensors of each step, kept between its temporaries, would leave holes in the heap.
        dataset = self.input_pipeline.loader.dataset
        shape = dataset.num_steps(split, window=window), dataset.batch_size
        mine = torch.empty(*shape, device=self.context.device)
        for step, batch in enumerate(shown_batches(self.input_pipeline, split, epoch, self.context, window)):
            output = model(batch.to(self.context.device, non_blocking=True)).output.predictions
            mine[step] = self.task.labels_of(output)
        return in_order(mine, len(dataset.positions_of(split, window)), self.context)


def shown_batches(
    input_pipeline: InputPipeline,
    split: str,
    epoch: int,
    context: RuntimeContext,
    window: tuple[int, int] | None = None,
) -> Iterator[ModelInput]:
    """The batches of a pass, and how far it has come. Not collective."""
    sizes, done = input_pipeline.loader.dataset.step_sizes(split, window=window), 0
    schema, quiet = input_pipeline.loader.dataset.schema, context.rank != 0
    unit = schema.items if split == "catalogue" else schema.labels
    title = f"evaluation, {split}" if window is None else f"predicting window {epoch + 1}"
    with stage(title, sum(sizes), unit, quiet=quiet) as reached:
        batches = input_pipeline.batches(split, epoch, window=window)
        for size, batch in zip(sizes, batches, strict=True):
            yield batch
            done += size
            reached(done)


def in_order(mine: torch.Tensor, number: int, context: RuntimeContext) -> np.ndarray:
    """What all ranks found for the events of their batches, [steps, B] each, in the order of the `number`
    events. Collective: every rank.
    """
    everyones = [torch.empty_like(mine) for _ in range(context.world_size)]
    # All ranks have as many steps, so all of them take part or none does.
    if number:
        dist.all_gather(everyones, mine)
    # Step after step, and in a step rank after rank: that is how batches are cut from the split. What follows
    # the last event is padding.
    return torch.stack(everyones, dim=1).flatten()[:number].cpu().numpy()


class Cases:
    """What a rank ranks: the events of its batches of a split, each with a user who has seen other items.

    items: positions of the items that were chosen, int64 [n], in the order of the batches. What a
    user has seen are the items of the training events, and for the test also those of the validation events.
    """

    def __init__(self, columns: Columns, dataset: EventBatches, split: str) -> None:
        positions, shape = columns.range_of(split), (dataset.num_steps(split), dataset.batch_size)
        # The same numbers by which `EventBatches` deals out events that are not shuffled.
        steps, places = np.indices(shape, sparse=True)
        numbers = ((steps * dataset.world_size + dataset.rank) * dataset.batch_size + places).reshape(-1)
        # Numbers beyond the split are padding, which is nobody's case.
        rows = columns.column("rows").take(positions.start + numbers[numbers < len(positions)])
        self.shape = shape
        self.number = len(positions)
        self.items = rows[ITEM].astype(np.int64)
        self._users = rows[USER].astype(np.int64)
        prefix = "test_" if split == "test" else ""
        self._seen, self._offsets = (
            columns.column(f"{prefix}{name}") for name in ("seen", "history_offsets")
        )

    def not_competing(self, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """The items that some cases are not ranked against, those seen and their own: numbers of cases,
        counted from the first of the part, and positions of items, int64 [k] both.
        """
        users, own = self._users[part], self.items[part]
        starts = self._offsets[users]
        counts = self._offsets[users + 1] - starts
        case = np.arange(len(users))
        seen = self._seen[places_of(starts, counts)].astype(np.int64)
        return np.concatenate([case.repeat(counts), case]), np.concatenate([seen, own])


class RankingEvaluator:
    """Ranks the item of each event among all items that its user has not seen.

    Each rank keeps the vectors of its own users, and the items are collected in blocks, so no array has a
    number for every user and item. Scores are float64 products, rounded to float32 before they are compared:
    how a product is summed depends on the number of ranks, and what is left of it does not.
    """

    def __init__(
        self, input_pipeline: InputPipeline, columns: Columns, embedding_dim: int, context: RuntimeContext
    ) -> None:
        self.input_pipeline = input_pipeline
        self.context = context
        self.embedding_dim = embedding_dim
        # Both now: the training may outlive the files.
        self.cases = {
            split: Cases(columns, input_pipeline.loader.dataset, split) for split in ("validation", "test")
        }

    def validate(self, model: DistributedModelParallel, epoch: int) -> Metrics:
        """See `Evaluator`."""
        return measure_ranks(self.ranks(model, "validation", epoch))

    def test(self, model: DistributedModelParallel, epoch: int) -> Metrics:
        """See `Evaluator`."""
        return measure_ranks(self.ranks(model, "test", epoch))

    @torch.no_grad()
    def ranks(self, model: DistributedModelParallel, split: str, epoch: int) -> np.ndarray:
        """For all events of a split, in their order, the rank of the item for the user, int64, from 1 on:
        every other item that the user has not seen and that scores as high counts. The same on every rank.
        """
        cases = self.cases[split]
        if cases.number == 0:
            return np.zeros(0, np.int64)
        model.eval()
        users, own = self._embed(model, split, epoch)
        # The first rank, for an item that none is above.
        found = torch.ones(cases.shape, dtype=torch.int64, device=self.context.device)
        mine = found.view(-1)[: len(cases.items)]
        # Items outside, cases inside: every rank takes part in collecting each block, and ranks differ in
        # their cases.
        for first, items in self._catalogue(model, epoch):
            step = max(1, SCORES_AT_ONCE // len(items))
            for part in (slice(start, start + step) for start in range(0, len(mine), step)):
                # A score that is not a number counts against the item too.
                is_above = ~((users[part].double() @ items.T).float() < own[part].unsqueeze(1))
                case, item = cases.not_competing(part)
                here = (item >= first) & (item < first + len(items))
                is_above[torch.from_numpy(case[here]), torch.from_numpy(item[here] - first)] = False
                mine[part] += is_above.sum(dim=1)
        return in_order(found, cases.number, self.context)

    def _embed(
        self, model: DistributedModelParallel, split: str, epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The users' vectors, float32 [n, D], and the scores of their own items, float32 [n]."""
        cases, device = self.cases[split], self.context.device
        # As in `PredictionEvaluator.predict`.
        users = torch.empty(*cases.shape, self.embedding_dim, device=device)
        scores = torch.empty(cases.shape, device=device)
        for step, batch in enumerate(shown_batches(self.input_pipeline, split, epoch, self.context)):
            user, item = model(batch.to(device, non_blocking=True)).output.predictions.unbind(dim=1)
            users[step] = user
            scores[step] = (user.double() * item.double()).sum(dim=1)
        number = len(cases.items)
        return users.flatten(0, 1)[:number], scores.flatten()[:number]

    def _catalogue(self, model: DistributedModelParallel, epoch: int) -> Iterator[tuple[int, torch.Tensor]]:
        """All items in blocks: the position of the first, and their vectors, float64 [m, D]."""
        dataset = self.input_pipeline.loader.dataset
        first = 0
        sizes = dataset.step_sizes("catalogue")
        batches = shown_batches(self.input_pipeline, "catalogue", epoch, self.context)
        for size, batch in zip(sizes, batches, strict=True):
            vectors = model(batch.to(self.context.device, non_blocking=True)).output.predictions
            # Every second vector of a larger tensor, which a collective does not take as it is.
            mine = vectors[:, 1].contiguous()
            everyones = [torch.empty_like(mine) for _ in range(self.context.world_size)]
            dist.all_gather(everyones, mine)
            yield first, torch.cat(everyones)[:size].double()
            first += size
