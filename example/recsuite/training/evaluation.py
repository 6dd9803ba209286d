"""Metrics of a model on the validation events and on the test, over all ranks. Collective.

Everything is exact: each event counts once, without sampling. The metrics are computed by numpy from an array
with one entry for each event of the split, in their order, the same on every rank.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel
from typing_extensions import override

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.batching import history_prefix, places_of
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import HISTORY, ITEM, UNKNOWN_ROW, USER, YES_NO
from recsuite.errors import UserError
from recsuite.metrics import (
    KNOWN,
    NEVER_FOUND,
    NEW,
    TOP,
    Calibration,
    Measured,
    Metrics,
    Spread,
    fit_calibration,
    measure,
    measure_probabilities,
    measure_ranks,
    spread_of,
)
from recsuite.models.layers import repeated
from recsuite.models.losses import parts_of
from recsuite.models.retrieval import Added, highest
from recsuite.models.tasks import TASKS, ResponseTask, WorkerTask, first_label, predictions_of
from recsuite.runtime.console import stage
from recsuite.runtime.process import RuntimeContext
from recsuite.sharding.dynamic_ranks import have_rows
from recsuite.sharding.recommender import ModelInput
from recsuite.training.steps import BatchFeed

# Users times items to score at once: 32 MiB as float64.
SCORES_AT_ONCE = 2**22
# For windows: a calibration would have to be that of earlier windows; without one there is no log loss.
UNCALIBRATED = Calibration(float("nan"), float("nan"))


# Metrics of labels after the first, by their kind: True for yes/no answers.
METRICS_OF = {True: tuple(ResponseTask.metrics), False: ("rmse", "mae")}


class Evaluator(Protocol):
    """Evaluator of a model. Maps its columns when it is made, so that their files may be removed. Collective.

    The batches do not depend on the epoch, which is only for messages of failures.
    """

    def validate(self, model: DistributedModelParallel, epoch: int) -> Measured:
        """Return the metrics on the validation events, all NaN if there are none."""

    def test(self, model: DistributedModelParallel, epoch: int) -> Measured:
        """Return the metrics on the test events."""


def make_evaluator(feed: BatchFeed, columns: Columns, config: Config, context: RuntimeContext) -> Evaluator:
    """Return the evaluator of the configured task. Collective if the ranks have different events: every rank.

    Raises:
        UserError: for a segment that cannot be, and for lengths of lists without a ranking.
    """
    segments = [one for section in config.extras.values() for one in section.segments(columns)]
    users, cutoffs = Users(columns, segments), config.evaluation.cutoffs
    task = TASKS[config.model.task]
    if task.evaluation == "ranks":
        if columns.schema.more_labels:
            context.say(f"a ranking is not evaluated on {', '.join(columns.schema.label_names[1:])}")
        return RankingEvaluator(feed, columns, context, users, sorted({TOP, *cutoffs}))
    if cutoffs:
        raise UserError(
            f"--cutoffs requires a task that ranks, got --task {config.model.task}; leave it out."
        )
    return PredictionEvaluator(task, feed, columns, context, users)


class Users:
    """Users of the events of splits, and the events with a user, or an item, of the training.

    segments: of the test, see `ExtraSection.segments`.
    """

    def __init__(self, columns: Columns, segments: Sequence[Any]) -> None:
        self._segments = segments
        has_trained = (columns.user_counts() > 0, columns.column("item_counts") > 0)
        self.of: dict[str, np.ndarray] = {}
        self._is_known: dict[str, list[np.ndarray]] = {}
        for split in ("validation", "test"):
            events = columns.events(split)
            self.of[split] = columns.user_numbers(split)
            self._is_known[split] = [
                columns.joined(known[events[entity]])
                for known, entity in zip(has_trained, (USER, ITEM), strict=True)
            ]

    def described(self, measured: Measured, split: str) -> Measured:
        """Return the metrics of a split, with the shares of its new users and items."""
        new_users, new_items = (float(1 - known.mean()) for known in self._is_known[split])
        return replace(measured, new_users=new_users, new_items=new_items)

    def with_parts(self, of_some: Callable[[Any], Measured]) -> Measured:
        """Return the metrics of the test, of its segments, and of users with and without a training event.

        of_some: the metrics of some of the cases, bool [cases] or a slice.
        """
        test, is_known = self.described(of_some(slice(None)), "test"), self._is_known["test"][0]
        has_both = is_known.any() and not is_known.all()
        return replace(
            test,
            parts={KNOWN: of_some(is_known), NEW: of_some(~is_known)} if has_both else {},
            segments={
                segments.name: {value: of_some(mask) for value, mask in segments.masks().items()}
                for segments in self._segments
            },
        )


class PredictionEvaluator(Evaluator):
    """Evaluator of predicted labels."""

    def __init__(
        self,
        task: WorkerTask,
        feed: BatchFeed,
        columns: Columns,
        context: RuntimeContext,
        users: Users,
    ) -> None:
        self.task = task
        self.feed = feed
        self.context = context
        self.schema = columns.schema
        # float32 [n], or [n, L] of L labels.
        self.labels = {
            split: columns.joined(
                columns.all_labels(split) if self.schema.more_labels else columns.labels(split)
            )
            for split in ("validation", "test")
        }
        self.users = users

    @override
    def validate(self, model: DistributedModelParallel, epoch: int) -> Measured:
        predictions, labels = self.predict(model, "validation", epoch), self.labels["validation"]
        if len(labels) == 0:
            return Measured(self.task.no_metrics())
        calibration = self._calibration(predictions, labels)
        measured = self._measure(model, predictions, labels, calibration, self.users.of["validation"])
        return self.users.described(measured, "validation")

    @override
    def test(self, model: DistributedModelParallel, epoch: int) -> Measured:
        # Probabilities come from the calibration on the validation events.
        # Predicted again: the test uses the weights of the best epoch, and the last validation may have used
        # others.
        calibration = self._calibration(self.predict(model, "validation", epoch), self.labels["validation"])
        predictions = self.predict(model, "test", epoch)
        labels, users = self.labels["test"], self.users.of["test"]

        def of_some(some: Any) -> Measured:
            return self._measure(model, predictions[some], labels[some], calibration, users[some])

        if predictions.ndim < labels.ndim:
            self.context.say(
                f"the model predicts only {self.schema.label_names[0]}: "
                f"{', '.join(self.schema.label_names[1:])} not evaluated"
            )
        return self.users.with_parts(of_some)

    def window(
        self, model: DistributedModelParallel, number: int, window: tuple[int, int], labels: np.ndarray
    ) -> Metrics:
        """Return the metrics of the first label on the events of a stream's window.

        window: from one position to before another; labels: of its events.
        """
        predictions = first_label(self.predict(model, "validation", number, window))
        return self.measure_window(model, predictions, labels)

    def measure_window(
        self, model: DistributedModelParallel, predictions: np.ndarray, labels: np.ndarray
    ) -> Metrics:
        """Return the metrics of predictions of the first label, also those of the script.

        predictions: of the model or of a baseline; labels: float [n] both.
        """
        return self._measure(model, predictions, labels, UNCALIBRATED).values

    def _measure(
        self,
        model: DistributedModelParallel,
        predictions: np.ndarray,
        labels: np.ndarray,
        calibration: Calibration,
        users: np.ndarray | None = None,
    ) -> Measured:
        if predictions.ndim < labels.ndim:
            labels = first_label(labels)
        first, its_labels = first_label(predictions), first_label(labels)
        liked = its_labels >= self.schema.liked_label
        if self.task.evaluation == "answers":
            # The probabilities as they are: served predictions are not calibrated again.
            measured = measure_probabilities(first, liked, users)
        else:
            measured = measure(first, its_labels, liked, calibration, users)
        metrics, intervals = dict(measured.values), dict(measured.intervals)
        groups = dict(measured.groups)
        if labels.ndim == 2:
            self._add_more(metrics, intervals, predictions, labels, users)
        for name, metric in model.module.metrics.items():
            value = np.asarray(metric(predictions, labels))
            if value.ndim:
                raise ValueError(f"The metric {name} must return one number, got the shape {[*value.shape]}.")
            metrics[name] = float(value)
            # Those of a metric that a user's metric replaces.
            intervals.pop(name, None)
            groups.pop(name, None)
        return replace(measured, values=metrics, intervals=intervals, groups=groups)

    def _add_more(
        self,
        metrics: Metrics,
        intervals: dict[str, tuple[float, float]],
        predictions: np.ndarray,
        labels: np.ndarray,
        users: np.ndarray | None,
    ) -> None:
        """Add the metrics of the labels after the first, each NaN where an event lacks it."""
        columns = zip(self.schema.more_labels, predictions.T[1:], labels.T[1:], strict=True)
        for label, predicted, values in columns:
            names, has = METRICS_OF[label.kind == YES_NO], ~np.isnan(values)
            predicted, values, users_of = predicted[has], values[has], None if users is None else users[has]
            if not has.any():
                measured = Measured(dict.fromkeys(names, float("nan")), 0)
            elif label.kind == YES_NO:
                measured = measure_probabilities(predicted, values > 0, users_of)
            else:
                measured = measure(predicted, values, values > 0, UNCALIBRATED, users_of)
            for name in names:
                metrics[f"{label.name}_{name}"] = measured[name]
                if name in measured.intervals:
                    intervals[f"{label.name}_{name}"] = measured.intervals[name]

    def _calibration(self, predictions: np.ndarray, labels: np.ndarray) -> Calibration:
        liked = first_label(labels) >= self.schema.liked_label
        return fit_calibration(first_label(predictions), liked)

    @torch.no_grad()
    def predict(
        self, model: DistributedModelParallel, split: str, epoch: int, window: tuple[int, int] | None = None
    ) -> np.ndarray:
        """Return predictions for all n events of a split, or of a window, in their order.

        float32 [n], or [n, L] for a model of L labels, the same on every rank.
        """
        # Not only for layers: in this mode the tracker of a delta marks no row as changed.
        model.eval()
        # Allocated once: tensors of each step, between temporaries, would leave holes in the heap.
        dataset = self.feed.loader.dataset
        shape = dataset.num_steps(split, window=window), dataset.local_batch_size
        mine = torch.empty(*shape, device=self.context.device)
        batches = batches_with_progress(self.feed, split, epoch, self.context, window)
        for step, batch in enumerate(batches):
            output = model(batch.to(self.context.device, non_blocking=True)).output
            predictions = predictions_of(model.module.recommender.head, self.task, output, self.schema)
            if mine.shape[2:] != predictions.shape[1:]:
                mine = torch.empty(*shape, *predictions.shape[1:], device=self.context.device)
            mine[step] = predictions
        return in_order(mine, dataset, split, self.context, window)


def batches_with_progress(
    feed: BatchFeed,
    split: str,
    epoch: int,
    context: RuntimeContext,
    window: tuple[int, int] | None = None,
) -> Iterator[ModelInput]:
    """Yield the batches of a pass, and show its progress. Not collective."""
    sizes, done = feed.loader.dataset.step_sizes(split, window=window), 0
    schema, quiet = feed.loader.dataset.schema, context.rank != 0
    unit = schema.items if split == "catalogue" else schema.labels
    title = f"evaluation, {split}" if window is None else f"predicting window {epoch + 1}"
    with stage(title, sum(sizes), unit, quiet=quiet) as reached:
        batches = feed.batches(split, epoch, window=window)
        for size, batch in zip(sizes, batches, strict=True):
            yield batch
            done += size
            reached(done)


def in_order(
    mine: torch.Tensor,
    dataset: EventBatches,
    split: str,
    context: RuntimeContext,
    window: tuple[int, int] | None = None,
) -> np.ndarray:
    """Return the results of all ranks in the order of the events of a pass. Collective: every rank.

    mine: the results for the events of this rank's batches, [steps, B, ...].
    """
    everyones = [torch.empty_like(mine) for _ in range(context.world_size)]
    # All ranks have as many steps, so either all take part or none.
    if len(mine):
        dist.all_gather(everyones, mine)
    return dataset.in_order(torch.stack(everyones, dim=1), split, window).cpu().numpy()


def _cells(rows: np.ndarray, columns: np.ndarray, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cells of a matrix with `number` columns, without those beside it."""
    inside = (columns >= 0) & (columns < number)
    return torch.from_numpy(rows[inside]), torch.from_numpy(columns[inside])


def _add_to_lists(best: torch.Tensor, items: torch.Tensor, scores: torch.Tensor, first: int) -> None:
    """Merge the scores of a block of items, float32 [n, m], into lists [n, TOP]; ties go to earlier items."""
    rows = (scores > best[:, -1:]).any(dim=1).nonzero().squeeze(1)
    numbers = torch.arange(first, first + scores.shape[1], device=scores.device).expand(len(rows), -1)
    best[rows], items[rows] = highest(
        torch.cat([best[rows], scores[rows]], dim=1), torch.cat([items[rows], numbers], dim=1), TOP
    )


class RankedCases:
    """Cases of a rank: the events of its batches of a split, each with the items that its user has seen.

    items: positions of the chosen items, int64 [n], in the order of the batches. Seen items are those of the
    training events, and for the test also those of the validation events; none if the data allow such items,
    see `Schema.seen`.
    """

    def __init__(self, columns: Columns, dataset: EventBatches, split: str) -> None:
        self.sizes = dataset.local_sizes(split)
        rows = columns.column("rows").take(columns.range_of(split).start + dataset.numbers_of(split))
        self.shape = len(self.sizes), dataset.local_batch_size
        # Positions of the cases in the rows of all batches; the others are padding.
        steps = np.arange(len(self.sizes))
        self.positions = torch.from_numpy(places_of(steps * dataset.local_batch_size, self.sizes))
        self.items = rows[ITEM].astype(np.int64)
        self._users = rows[USER].astype(np.int64)
        self._excludes = columns.schema.excludes_seen
        prefix = history_prefix(split)
        self._seen = columns.column(f"{prefix}seen")
        self._offsets = columns.column(f"{prefix}history_offsets")

    def seen(self, part: slice) -> tuple[np.ndarray, np.ndarray]:
        """Return the excluded items of some cases, int64 [k] both.

        The first array has numbers of cases, counted from the first of the part, the second one positions of
        items.
        """
        users = self._users[part] if self._excludes else self._users[:0]
        starts = self._offsets[users]
        counts = self._offsets[users + 1] - starts
        return np.arange(len(users)).repeat(counts), self._seen[places_of(starts, counts)].astype(np.int64)


class AddedScores:
    """Numbers that items of histories add to their own scores, see `losses.WithOwn`, for cases in order.

    keys: row or id of each item as batches have them, int64 [items]; is_listed: mask of the items with one.
    """

    def __init__(self, keys: np.ndarray, is_listed: np.ndarray, device: torch.device) -> None:
        positions = np.flatnonzero(is_listed)
        positions = positions[np.argsort(keys[positions])]
        self.positions = torch.from_numpy(positions).to(device)
        self.keys = torch.from_numpy(keys[positions].astype(np.int64)).to(device)
        self._parts: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, cases: torch.Tensor, keys: torch.Tensor, numbers: torch.Tensor) -> None:
        """Take the numbers of the next cases: ascending numbers of cases, rows or ids, and float32, [V]."""
        if not len(self.keys):
            return
        nearest = torch.searchsorted(self.keys, keys).clamp(max=len(self.keys) - 1)
        is_there = self.keys[nearest] == keys
        self._parts.append((cases[is_there], self.positions[nearest[is_there]], numbers[is_there].double()))

    @functools.cached_property
    def _added(self) -> Added:
        cases, positions, numbers = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        return Added(torch.stack([cases, positions]), numbers)

    def onto(self, scores: torch.Tensor, part: slice, first: int) -> torch.Tensor:
        """Return the scores of some cases, float64 [n, m], with the numbers of m items from one on added."""
        return self._added.of_users(part.start, part.stop).into(scores, first) if self._parts else scores

    def of_items(self, items: torch.Tensor) -> torch.Tensor:
        """Return what is added to the score of one item of each case, float64 [n]. items: positions, [n]."""
        added = torch.zeros(len(items), dtype=torch.float64, device=items.device)
        if self._parts:
            (cases, positions), numbers = self._added
            is_own = positions == items[cases]
            added.index_add_(0, cases[is_own], numbers[is_own])
        return added


class RankingEvaluator(Evaluator):
    """Evaluator that ranks the item of each event among all items that may be recommended to its user.

    These are the items that have a row, or all, see `Schema.new_items`, and that the user has not seen. An
    event with another item is a miss.

    Each rank keeps the vectors of its own users, and the items are gathered in blocks, so no array has a
    number for every user and item. Scores are float64 products, rounded to float32 before they are compared:
    the last bits of a product depend on the number of ranks, the rounded score does not.
    """

    def __init__(
        self,
        feed: BatchFeed,
        columns: Columns,
        context: RuntimeContext,
        users: Users,
        cutoffs: Sequence[int] = (TOP,),
    ) -> None:
        self.cutoffs = cutoffs
        self.feed = feed
        self.context = context
        # Both splits now: the training may outlive the files.
        self.cases = {
            split: RankedCases(columns, feed.loader.dataset, split) for split in ("validation", "test")
        }
        self.users, self._has_row, self._ids = users, columns.trained_items(), columns.item_ids()
        self._had = columns.column("item_counts")
        self._tested = columns.joined(np.array(columns.events("test")[ITEM]))
        # Row of each item, and the ids by row.
        features = columns.column(f"{columns.schema.item}_features")["features"]
        self._rows = features[:, columns.place_of(ITEM)]
        self._keys = self._rows if self._ids is None else self._ids[self._rows]
        self._vocabulary = np.memmap(Path(columns.folder) / "vocabulary.json", np.uint8, "r")
        self._item, self._lists_new = columns.schema.item, columns.schema.lists_new_items

    @override
    def validate(self, model: DistributedModelParallel, epoch: int) -> Measured:
        ranks = self.ranks(model, "validation", epoch)
        measured = measure_ranks(ranks, self.users.of["validation"])
        return self.users.described(measured, "validation") if len(ranks) else measured

    @override
    def test(self, model: DistributedModelParallel, epoch: int) -> Measured:
        listed, users = np.zeros(len(self._rows), np.int64), self.users.of["test"]
        ranks = self.ranks(model, "test", epoch, listed)
        test = self.users.with_parts(lambda some: measure_ranks(ranks[some], users[some], self.cutoffs))
        is_ranked = self.is_ranked(model).cpu().numpy()
        missed = int(np.count_nonzero(~is_ranked[self._tested]))
        has_row = self.have_rows(model).cpu().numpy()
        spread = self._spread_of(listed, is_ranked, has_row) if self.context.rank == 0 else None
        return replace(test, missed=missed, lists=spread)

    def _spread_of(self, listed: np.ndarray, is_ranked: np.ndarray, has_row: np.ndarray) -> Spread | None:
        ids = [f"a new {self._item}", *json.loads(bytes(self._vocabulary))[self._item]]
        return spread_of(listed, self._had, is_ranked, has_row, lambda item: ids[int(self._rows[item])])

    def is_ranked(self, model: DistributedModelParallel) -> torch.Tensor:
        """Return a mask of the items that lists may have, bool [items], the same on every rank."""
        has_row = self.have_rows(model)
        return torch.ones_like(has_row) if self._lists_new else has_row

    def have_rows(self, model: DistributedModelParallel) -> torch.Tensor:
        """Return a mask of the items that have a row in a model, bool [items], the same on every rank."""
        if self._ids is None:
            return torch.from_numpy(self._has_row).to(self.context.device)
        # A dynamic table may have evicted some.
        ids = torch.from_numpy(self._ids[self._rows]).to(self.context.device)
        return have_rows(model, self._item, ids, self.context.rank)

    @torch.no_grad()
    def ranks(
        self, model: DistributedModelParallel, split: str, epoch: int, listed: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the rank of the item for the user of each event, int64, from 1.

        In the order of the split, the same on every rank.

        listed: gets for each item the number of the events' lists of TOP items that it is in; None to make no
        lists, which saves time.

        Each other item that may be recommended and has at least the same score adds one. An item that may not
        be recommended ranks below all: its user has seen it, or it has no row.
        """
        cases = self.cases[split]
        if self.feed.loader.dataset.num_events(split) == 0:
            return np.zeros(0, np.int64)
        model.eval()
        is_ranked, (users, own, added) = self.is_ranked(model), self._embed(model, split, epoch)
        # Rank 1 if no item is above.
        mine = torch.ones(len(cases.items), dtype=torch.int64, device=self.context.device)
        # The lists so far: scores, the highest first, and positions of items.
        best = users.new_full((0 if listed is None else len(mine), TOP), -torch.inf)
        best_items = torch.zeros_like(best, dtype=torch.int64)
        # Items outside, cases inside: every rank takes part in gathering each block, but ranks have different
        # cases.
        for first, items in self._catalogue(model, epoch):
            step = max(1, SCORES_AT_ONCE // len(items))
            hidden = (~is_ranked[first : first + len(items)]).nonzero().squeeze(1)
            for part in (slice(start, start + step) for start in range(0, len(mine), step)):
                scores = added.onto(users[part].double() @ items.T, part, first).float()
                # A NaN score counts as above.
                is_above = ~(scores < own[part].unsqueeze(1))
                own_item, (case, item) = cases.items[part], cases.seen(part)
                scores[:, hidden], is_above[:, hidden] = -torch.inf, False
                seen = _cells(case, item - first, len(items))
                scores[seen], is_above[seen] = -torch.inf, False
                # The item itself is not counted: ranks start at 1.
                is_above[_cells(np.arange(len(own_item)), own_item - first, len(items))] = False
                mine[part] += is_above.sum(dim=1)
                mine[part][torch.from_numpy(case[own_item[case] == item])] = NEVER_FOUND
                if listed is not None:
                    _add_to_lists(best[part], best_items[part], scores, first)
        mine[~is_ranked[torch.from_numpy(cases.items).to(mine.device)]] = NEVER_FOUND
        if listed is not None:
            counts = torch.bincount(best_items[best > -torch.inf], minlength=len(self._rows))
            dist.all_reduce(counts)
            listed += counts.cpu().numpy()
        padded = mine.new_zeros(cases.shape)
        padded.view(-1)[cases.positions.to(mine.device)] = mine
        return in_order(padded, self.feed.loader.dataset, split, self.context)

    def _embed(
        self, model: DistributedModelParallel, split: str, epoch: int
    ) -> tuple[torch.Tensor, torch.Tensor, AddedScores]:
        """Return vectors of users [n, D], scores of their own items [n], and what histories add to scores."""
        cases, device = self.cases[split], self.context.device
        # As in `PredictionEvaluator.predict`.
        users, end = torch.empty(0), 0
        scores = torch.empty(len(cases.items), dtype=torch.float64, device=device)
        added = AddedScores(self._keys, self._rows != UNKNOWN_ROW, device)
        batches = batches_with_progress(self.feed, split, epoch, self.context)
        for size, batch in zip(cases.sizes.tolist(), batches, strict=True):
            batch = batch.to(device, non_blocking=True)
            vectors, of_history = parts_of(model(batch).output)
            user, item = vectors[:size].unbind(dim=1)
            if end == 0:
                # As wide as the model's vectors.
                users = user.new_empty(len(scores), user.size(1))
            part = slice(end, end := end + size)
            users[part] = user
            scores[part] = (user.double() * item.double()).sum(dim=1)
            if of_history is not None:
                # With the unused slots of padded histories, which add nothing.
                history = batch.features[HISTORY]
                counts = history.lengths().long()[:size]
                if HISTORY in batch.counts:
                    of_history = of_history[: size * (len(of_history) // len(vectors))]
                numbers = torch.arange(part.start, part.stop, device=device)
                numbers = repeated(numbers, counts, len(of_history))
                added.add(numbers, history.values()[: len(of_history)], of_history)
        scores += added.of_items(torch.from_numpy(cases.items).to(device))
        return users, scores.float(), added

    def _catalogue(self, model: DistributedModelParallel, epoch: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield all items in blocks: the position of the first, and their vectors, float64 [m, D]."""
        dataset = self.feed.loader.dataset
        first = 0
        sizes = dataset.step_sizes("catalogue")
        batches = batches_with_progress(self.feed, "catalogue", epoch, self.context)
        for size, batch in zip(sizes, batches, strict=True):
            vectors, _ = parts_of(model(batch.to(self.context.device, non_blocking=True)).output)
            # A strided view of a larger tensor, which a collective does not accept.
            mine = vectors[:, 1].contiguous()
            everyones = [torch.empty_like(mine) for _ in range(self.context.world_size)]
            dist.all_gather(everyones, mine)
            yield first, torch.cat(everyones)[:size].double()
            first += size
