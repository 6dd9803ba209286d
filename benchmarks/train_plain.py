"""Training of the same model in plain PyTorch, as a user would write it.

    train_plain.py FOLDER MODEL    a rank of a team of benchmarks/train.py

With dense Adam, or an optimizer for sparse gradients; DDP on two ranks. Other variants measure the most that
memory and cores can do.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from teams import arguments, serve, take_answers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from train_here import COMPILED, MEAN_RATING, MODELS, Model, columns_of

from example import RatingModel
from recsuite.datasets.batching import places_of
from recsuite.datasets.columns import Columns
from recsuite.datasets.schema import HISTORY, ITEM, USER
from recsuite.models.tasks import ModelData

LR, DENSE_LR = 0.04, 0.001
# Other variants: one that adds two arrays up into a third one, after the triad of McCalpin's STREAM, and one
# that multiplies two square matrices. Their batch sizes are bytes that are read and written, and operations.
MEMORY, PRODUCTS = "memory", "products"
# Bytes of all arrays together: far more than a cache holds.
BYTES = 3 * 2**26
WIDTH = 1024
OPERATIONS = 2 * WIDTH**3
# Gradients of tables with fewer rows are always dense: most rows have one in every step.
FEWEST_ROWS_SPARSE = 1000
# Side of the vector of each feature; a history belongs to its user.
SIDES = {USER: USER, HISTORY: USER, ITEM: ITEM}


class PlainModel(nn.Module):
    """`RatingModel` on an embedding for each feature. Another model of plain PyTorch has the same methods."""

    def __init__(self, columns: Columns, model: Model, sparse: bool) -> None:
        super().__init__()
        dim = model.dim
        self.features = [table.feature for table in columns.tables]
        self.head = RatingModel(ModelData(columns.schema, self.features, MEAN_RATING), dim, model.mlp_dims)
        self.tables = nn.ModuleDict()
        for table in columns.tables:
            is_sparse = sparse and table.rows >= FEWEST_ROWS_SPARSE
            self.tables[table.name] = (
                # Row 0 pads lists. The rows of a history are weighted, and none is padding.
                nn.EmbeddingBag(table.rows, dim, mode="sum", sparse=is_sparse)
                if table.name == HISTORY
                else nn.EmbeddingBag(table.rows, dim, mode="mean", padding_idx=0, sparse=is_sparse)
                if table.feature.multi
                else nn.Embedding(table.rows, dim, sparse=is_sparse)
            )
        self.score = self.score_pairs

    def forward(self, rows: dict[str, torch.Tensor], history_labels: torch.Tensor) -> torch.Tensor:
        """Predicted ratings, float32 [B], of table rows, int [B] or int [B, longest]."""
        vectors: dict[str, torch.Tensor] = {}
        for feature in self.features:
            table, side = self.tables[feature.name], SIDES[feature.entity]
            if feature.name == HISTORY:
                weights = (history_labels - MEAN_RATING) / history_labels.size(1)
                found = table(rows[HISTORY], per_sample_weights=weights)
            else:
                found = table(rows[feature.name])
            vectors[side] = vectors[side] + found if side in vectors else found
        return self.score(vectors[USER], vectors[ITEM])

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        """Predicted ratings of vectors as of `RatingModel`, by operations of PyTorch alone."""
        products = users * items
        score = products[:, 1:].sum(dim=1) + users[:, 0] + items[:, 0]
        return MEAN_RATING + score + self.head.mlp(users, items, products)

    def loss(self, predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean over the events, []."""
        return ((predictions - labels) ** 2).mean()

    def inputs(
        self, columns: Columns, events: np.ndarray, device: torch.device
    ) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Return both arguments of `forward` for all events."""
        return inputs_of(columns, events, device)


class Plain:
    """Training loop of a few lines. name: of its optimizer; make: makes the model."""

    def __init__(
        self,
        name: str,
        columns: Columns,
        model: Model,
        device: torch.device,
        capturable: bool = False,
        make: Callable[[Columns, Model, bool], Any] = PlainModel,
    ) -> None:
        # Made on the device: a table that fits it need not fit the host.
        with device:
            plain = make(columns, model, name != "dense Adam")
        tables = [table.weight for table in plain.tables.values()]
        for table in tables:
            nn.init.normal_(table, std=0.05)
        sparse = [table for table in tables if len(table) >= FEWEST_ROWS_SPARSE]
        small = [table for table in tables if len(table) < FEWEST_ROWS_SPARSE]
        # Fused, the fastest of torch: the comparison should be with the best.
        fused: dict[str, Any] = {"lr": DENSE_LR, "fused": True, "capturable": capturable}
        dense = torch.optim.Adam([*plain.head.parameters(), *small], **fused)
        of_tables: dict[str, Any] = {
            "dense Adam": lambda: torch.optim.Adam(sparse, **fused),
            "sparse Adagrad": lambda: torch.optim.Adagrad(sparse, lr=LR),
            "SparseAdam": lambda: torch.optim.SparseAdam(sparse, lr=DENSE_LR),
        }
        self.plain = plain
        self.optimizers = [dense, of_tables[name]()]
        # A process group of one rank has nothing to add up.
        together = dist.is_initialized() and dist.get_world_size() > 1
        self.model = DistributedDataParallel(plain) if together else plain
        # In memory, and shuffled once: training steps are compared, so plain PyTorch pays for no loader.
        generator = torch.Generator().manual_seed(int(os.environ.get("RANK", 0)))
        events = columns.column("rows")
        events = events.take(torch.randperm(len(events), generator=generator).numpy())
        self.rows, self.others = plain.inputs(columns, events, device)
        self.labels = torch.from_numpy(events["label"].copy()).to(device)
        self.first = 0

    def step(self, batch_size: int) -> torch.Tensor:
        """Train on the next batch and return its loss, []."""
        if self.first + batch_size > len(self.labels):
            self.first = 0
        batch = slice(self.first, self.first + batch_size)
        self.first += batch_size
        return self.step_on(batch)

    def step_on(self, batch: slice | torch.Tensor) -> torch.Tensor:
        """Train on some of the events and return the loss, []."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        rows = {name: values[batch] for name, values in self.rows.items()}
        loss = self.plain.loss(self.model(rows, self.others[batch]), self.labels[batch])
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.detach()

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        for _ in range(number):
            loss = self.step(batch_size)
        return float(loss)


class Compiled:
    """The same training with a compiled head: torch.compile refuses the sparse gradients of the tables."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain
        self.score = torch.compile(plain.plain.score_pairs, dynamic=False)

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        eager, self.plain.plain.score = self.plain.plain.score, self.score
        loss = self.plain.steps(number, batch_size)
        self.plain.plain.score = eager
        return loss


class CompiledModel:
    """The same training with a model that is compiled as a whole, of dense gradients."""

    def __init__(self, plain: Plain) -> None:
        self.plain = plain
        self.model = torch.compile(plain.model, dynamic=False)

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        eager, self.plain.model = self.plain.model, self.model
        loss = self.plain.steps(number, batch_size)
        self.plain.model = eager
        return loss


class Captured:
    """The same training, as one CUDA graph for each batch size. plain: with dense Adam, and capturable.

    A sparse gradient cannot be captured: its size is known on the device alone.
    """

    def __init__(self, plain: Plain, device: torch.device) -> None:
        self.plain = plain
        self.replays = Replays(plain.step_on, len(plain.labels), device)

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""
        return self.replays.steps(number, batch_size)


class Replays:
    """Captured steps on events in their order.

    step: trains on events, int64 [B], and returns the loss, [].
    """

    def __init__(
        self, step: Callable[[torch.Tensor], torch.Tensor], num_events: int, device: torch.device
    ) -> None:
        self.step, self.num_events, self.device = step, num_events, device
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self.order = torch.arange(num_events, device=device)
        self.first = 0

    def steps(self, number: int, batch_size: int) -> float:
        """Make some steps and return the last loss."""
        if batch_size not in self.graphs:
            self.graphs[batch_size] = self._captured(batch_size)
        graph, events, loss = self.graphs[batch_size]
        for _ in range(number):
            if self.first + batch_size > self.num_events:
                self.first = 0
            events.copy_(self.order[self.first : self.first + batch_size])
            self.first += batch_size
            graph.replay()
        return float(loss)

    def _captured(self, batch_size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]:
        events, stream = self.order[:batch_size].clone(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step(events)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = self.step(events)
        return graph, events, loss


def inputs_of(
    columns: Columns, events: np.ndarray, device: torch.device
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Table rows of each feature and labels of histories, for each event.

    Rows are int64 [events], or of lists int32 [events, longest], padded with 0; labels are float32
    [events, longest].
    """
    found: dict[str, np.ndarray] = {}
    history_labels = np.zeros((len(events), 0), np.float32)
    places = {USER: 0, ITEM: 0}
    for table in columns.tables:
        feature, shape = table.feature, (len(events), table.longest)
        if feature.name == HISTORY:
            held = columns.column(HISTORY).take(
                places_of(events["history_end"] - table.longest, np.full(*shape)), axis=0
            )
            found[HISTORY] = held[:, 0].reshape(shape)
            history_labels = held[:, 1].view(np.float32).reshape(shape)
            continue
        own = columns.column(f"{columns.schema.name_of(feature.entity)}_features")
        if feature.multi:
            begins, counts = own["lists"][events[feature.entity], 0].T
            is_there = np.arange(table.longest) < counts[:, None]
            found[feature.name] = np.zeros(shape, np.int32)
            values = columns.column(f"{feature.name}_values")
            found[feature.name][is_there] = values.take(places_of(begins, counts))
        else:
            rows = own["features"][:, places[feature.entity]]
            found[feature.name] = rows.take(events[feature.entity]).astype(np.int64)
            places[feature.entity] += 1
    tensors = {name: torch.from_numpy(rows.copy()).to(device) for name, rows in found.items()}
    return tensors, torch.from_numpy(history_labels.copy()).to(device)


class MachineLimit:
    """The most that memory or cores of this machine do; name: MEMORY or PRODUCTS."""

    def __init__(self, name: str) -> None:
        shape = (BYTES // 12,) if name == MEMORY else (WIDTH, WIDTH)
        self.one, self.other, self.result = (torch.ones(shape) for _ in range(3))
        self.apply = torch.add if name == MEMORY else torch.mm

    def steps(self, number: int, batch_size: int) -> float:
        """Apply it a number of times."""
        for _ in range(number):
            self.apply(self.one, self.other, out=self.result)
        return 0.0


def main() -> None:
    """Serve jobs."""
    folder, name_of_model = arguments(__doc__, "FOLDER", "MODEL")
    answers = take_answers()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    if os.environ["WORLD_SIZE"] != "1":
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    def barrier() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        if dist.is_initialized():
            dist.barrier()

    model = MODELS[name_of_model]
    columns = columns_of(Path(folder), model)
    made: dict[str, Plain] = {}

    def make(name: str) -> Any:
        if name in (MEMORY, PRODUCTS):
            return MachineLimit(name)
        # Compiled or not, it is the same training: tables of ten million rows exist once.
        optimizer = name.removesuffix(COMPILED)
        if optimizer not in made:
            made[optimizer] = Plain(optimizer, columns, model, device)
        return made[optimizer] if name == optimizer else Compiled(made[optimizer])

    serve(answers, make, barrier, torch.set_num_threads)


if __name__ == "__main__":
    main()
