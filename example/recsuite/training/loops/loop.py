"""A training: its model, data, progress, checkpoints and callbacks, and the passes that are left of it."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from recsuite.checkpoint.storage.manifest import Progress
from recsuite.config.config import Config
from recsuite.datasets.metrics import Metrics
from recsuite.datasets.opening import Data
from recsuite.models.tasks import TASKS, ModelMaker
from recsuite.runtime.collectives import all_gather_object, raise_on_all
from recsuite.runtime.process import RuntimeContext
from recsuite.runtime.progress_bar import stage
from recsuite.sharding.dynamic.sharded.collective import counts_of, describe_counts, dynamic_rows
from recsuite.sharding.plan import describe_plan
from recsuite.sharding.recommender import Metric, ModelInput
from recsuite.sharding.table_rules import TableRule
from recsuite.training.callbacks import Callback, Callbacks, CheckpointerProtocol, Run, Step
from recsuite.training.input_pipeline import InputPipeline
from recsuite.training.optimizer import DenseOptimizer, Schedule
from recsuite.training.state import ShardedModel, build_train_state
from recsuite.training.steps import Pass, learn, start_clock
from recsuite.training.weights import BestInMemory, check_finite, check_sound, unsound


class Training(ABC):
    """A training from where its checkpointer begins.

        with begin_training(data, config, context, checkpointer, callbacks) as training:
            model = training.shard()
            for part in training.passes():
                for batch in part:
                    loss = model(batch)
                    loss.backward()
                    model.step()
                part.end(training.validate())
            run = training.finish()

    Collective: every rank makes one, and makes the same calls.
    """

    def __init__(
        self,
        data: Data,
        config: Config,
        context: RuntimeContext,
        checkpointer: CheckpointerProtocol | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        self.config = config
        self.context = context
        self.data = data
        self.columns = data.columns
        self.task = TASKS[config.model.task]
        # A training without checkpoints is tested with its best weights too.
        self.checkpointer = checkpointer or BestInMemory(config.training, context)
        self.progress = self.checkpointer.start
        self.unit = data.columns.schema.labels
        self.part: TrainingPass
        self.callbacks = Callbacks([*callbacks, self.make_bar()])
        self.input_pipeline = InputPipeline(data.loader, self.phase)
        self.prepare()

    def shard(
        self,
        maker: ModelMaker | None = None,
        loss: nn.Module | None = None,
        tables: TableRule | None = None,
        dense: DenseOptimizer | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> ShardedModel:
        """Build the model, share its tables out, and put it where the checkpointer begins. Collective.

        maker: makes the model from the columns and the flags of the model; loss: called with the output of
        the model and the batch, returns the mean over the batch; tables, dense: the optimizers. What is None
        is that of the task and the flags. metrics: a name to a function of predictions and labels, numpy
        float32 [n], which returns a number; shown beside those of the task. One with the name of the main
        metric takes its place, and chooses the best epoch.

        Raises:
            UserError: when the tables do not fit, there is no such optimizer of them, or a checkpoint is
                damaged or of another model.
        """
        with self.phase("model"), stage("building the model", quiet=self.context.rank != 0):
            self.train_state = build_train_state(
                self.columns, self.config, self.context, maker, loss, tables, dense, metrics
            )
        self.plan = describe_plan(self.train_state.model, self.columns, self.config.model)
        for line in self.plan.splitlines():
            self.context.say(line)
        with self.phase(self.checkpointer.phase):
            self.checkpointer.begin(self.train_state)
        # A row may have expired since it was written: evaluation, which is no step, has to know the time too.
        start_clock(dynamic_rows(self.train_state.model), self.progress)
        # A tracker of one rank may refuse, and all are to end with its sentence.
        raise_on_all(lambda: self.callbacks.on_begin(self.progress, self.checkpointer.run))
        return self.train_state

    def run(self) -> Run:
        """Train with the model of the task. Collective: every rank.

        Raises:
            UserError: when the tables do not fit, the training diverges, or data that grow cannot be read.
            WorkerError: when a data worker fails.
        """
        with self:
            self.shard()
            for part in self.passes():
                learn(part)
                part.end(self.validate())
            return self.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End what the training has begun beside its data; harmless twice. Not collective."""
        return

    @abstractmethod
    def passes(self) -> Iterator[TrainingPass]:
        """Yield what is left to train: epochs, or windows of a stream. Ends the one before, if it was not."""

    @abstractmethod
    def validate(self) -> Metrics:
        """Return the metrics of the pass that was trained: on the validation events, or of a window's
        predictions, which were made before it was learned.
        """

    @abstractmethod
    def finish(self) -> Run:
        """Test the best weights, and tell the callbacks of the end."""

    @abstractmethod
    def make_bar(self) -> Callback:
        """What shows how far the steps are."""

    @abstractmethod
    def prepare(self) -> None:
        """Have the workers make the first batches, while the model is built."""

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """A context around one of `callbacks.PHASES`."""
        return self.callbacks.phase(name, self.progress)

    def check_whole(self) -> None:
        """Refuse a pass of which not all was learned."""
        if self.part.losses is None:
            raise RuntimeError(
                "The loop over the batches ended early. Fix: take every batch of a pass; for a shorter "
                "training give --epochs."
            )
        if self.train_state.is_pending:
            raise RuntimeError(
                "The dense part has not learned from the last batches. Fix: call model.step() after "
                "loss.backward(); where gradients add up over batches, also when part.is_last."
            )

    def check_weights(self, rows: Mapping[str, torch.Tensor] | None = None) -> None:
        """Refuse weights that cannot be those of a trained model; rows: see `unsound`. Collective."""
        tensors, shares = self.checkpointer.tensors, dynamic_rows(self.train_state.model)
        faults = all_gather_object(lambda: unsound(tensors, shares, rows))
        check_sound(faults, self.progress.step, self.config.optimizer)

    def say_dynamic_tables(self) -> None:
        """Say how full dynamic tables are, and what became of ids. Collective: every rank."""
        sentence = describe_counts(counts_of(dynamic_rows(self.train_state.model)))
        if sentence:
            self.context.say(sentence)

    def trained(self, part: TrainingPass) -> None:
        """Note that all steps of a pass are made."""
        assert part.losses is not None
        # First of all: what follows would validate, compare and keep a model that is broken.
        check_finite(part.losses, self.progress.step, self.config.optimizer)
        # Of the rank that waited most: in every step all wait for it.
        part.wait = _largest(self.input_pipeline.seconds_waited / part.seconds, self.context)
        self.progress = dataclasses.replace(self.progress, **after(self.progress, len(part.losses)))

    @abstractmethod
    def ended(self, part: TrainingPass) -> None:
        """Keep what a pass has learned."""

    def after_step(self, step: Step, num_events: int) -> None:
        """Tell who looks on of a step, and the checkpointer too unless it was the last of `num_events`."""
        self.callbacks.on_step(step)
        # After the last step of an epoch its losses are checked first, and it is validated. A checkpoint has
        # no gradients, so none is written while some wait for their step.
        if step.progress.samples < num_events and not self.train_state.is_pending:
            with self.phase(self.checkpointer.phase):
                self.checkpointer.on_step(step)


class TrainingPass(Pass):
    """A pass of a training, see `Pass`.

    wait: the share of it that was spent waiting for batches; validation: its metrics, once it was ended.
    """

    def __init__(self, training: Training, schedule: Schedule, num_events: int) -> None:
        super().__init__(
            training.train_state,
            training.input_pipeline,
            training.progress,
            schedule,
            training.config.training,
            training.context,
            lambda step: training.after_step(step, num_events),
        )
        training.part, self.training, self.wait = self, training, 0.0
        self.validation: Metrics | None = None

    def __iter__(self) -> Iterator[ModelInput]:
        """See `Pass`."""
        with self.training.phase("steps"):
            yield from super().__iter__()
        self.training.trained(self)

    def end(self, validation: Metrics) -> None:
        """Keep what was learned, and tell the callbacks. Collective; it may end the process.

        validation: the metrics of the pass, by which the best one is chosen.
        """
        self.training.check_whole()
        self.validation = validation
        self.training.ended(self)


def after(progress: Progress, num_steps: int) -> dict[str, Any]:
    """What changes of a progress when its epoch ended after so many more steps."""
    return {"step": progress.step + num_steps, "epoch": progress.epoch + 1, "samples": 0}


def _largest(value: float, context: RuntimeContext) -> float:
    largest = torch.tensor(value, device=context.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)
