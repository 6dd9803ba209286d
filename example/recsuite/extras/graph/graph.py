"""Export of the dense part of a model as a graph for other programs: torch.export or ONNX.

The graph has no weights: it takes those of the dense part by their names in model.safetensors, so that a
delta changes a graph's inputs and never the graph. Its other inputs are the contents of table rows:

    user                a feature with one value: float32 [B, D]; numbers.rows and score.rows for features
                        that are called numbers and score
    genres              a feature with lists: float32 [V, D], list after list, and
    genres.lengths      the number of values of each list, int64 [B]
    numbers             dense numbers, encoded as in vocabulary.json: float32 [B, numbers], NaN for a missing
                        one; only of a model that has some
    history.labels      of each item of a history its label: float32 [V]
    history.places      the number of items of its history after it, int32 [V]; only of a model that uses ages
    history.gaps        the time bucket from it to the event, int32 [V]; likewise
    history.own         1 if it is the event's own item, else 0, float32 [V]; only of a model in which an
                        item of a history may be chosen again
    dense.mlp.0.weight  and so on: the dense part

The output "score" is what `ServedModel.score` returns: float32 [B], or [B, L] for L labels.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from recsuite.datasets.schema import HISTORY
from recsuite.errors import UserError, printable
from recsuite.hooks import require_installed
from recsuite.models.inputs import Inputs, Members
from recsuite.models.rows import FeatureRows
from recsuite.models.sequences import SequenceHead
from recsuite.serving.snapshot import ServedRows, Snapshot

# File of the graph, by the value of --format.
FILES = {"torch": "model.pt2", "onnx": "model.onnx"}
SCORE, NUMBERS = "score", "numbers"
# Events of the example with which a model is traced, and values of its first list: numbers that no other size
# of a model is likely to have.
EVENTS, VALUES = 5, 17


def input_of(feature: str) -> str:
    """Return the input with the rows of a feature, which has its name where nothing else has."""
    return f"{feature}.rows" if feature in (SCORE, NUMBERS) else feature


class Prediction(nn.Module):
    """Prediction of a snapshot from its inputs, by name."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self.head = snapshot.head
        self.predict = snapshot.predict
        self.lists = [feature.name for feature in snapshot.features if feature.multi]
        self.tables = [feature.name for feature in snapshot.features if feature.has_table]

    def forward(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the score of each event. given: see the head of this file, without the dense part."""
        size = given[f"{self.lists[0]}.lengths"] if self.lists else given[input_of(self.tables[0])]
        ones = torch.ones(size.size(0), dtype=torch.int64)
        tables = {
            name: ServedRows(given[input_of(name)], given.get(f"{name}.lengths", ones))
            for name in self.tables
        }
        none = torch.zeros(0, dtype=torch.int32)
        labels, places, gaps = (given.get(f"{HISTORY}.{name}", none) for name in ("labels", "places", "gaps"))
        members = Members(labels, places, gaps, none, none, none, none)
        rows = FeatureRows(tables, self.head.row_scale, self.lists)
        numbers = given.get(NUMBERS, torch.zeros(size.size(0), 0))
        is_own = given.get(f"{HISTORY}.own", torch.zeros(0))
        return self.predict(rows, Inputs(members, numbers, is_own))


class Graph(nn.Module):
    """Prediction whose dense part is an input too."""

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        # In a list, or its weights would be those of the graph.
        self.held = [prediction]

    def forward(self, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the score of each event. given: see the head of this file."""
        dense = {f"head.{name[6:]}": value for name, value in given.items() if name.startswith("dense.")}
        others = {name: value for name, value in given.items() if not name.startswith("dense.")}
        return torch.func.functional_call(self.held[0], dense, (others,))


def example_of(snapshot: Snapshot) -> dict[str, torch.Tensor]:
    """Return inputs of a graph for some events, in the order of its inputs."""
    given: dict[str, torch.Tensor] = {}
    for place, feature in enumerate(one for one in snapshot.features if one.has_table):
        dim = snapshot.table_of(feature.name).matrix.size(1)
        number = VALUES + place if feature.multi else EVENTS
        given[input_of(feature.name)] = torch.rand(number, dim)
        if feature.multi:
            lengths = torch.full((EVENTS,), number // EVENTS)
            lengths[0] += number % EVENTS
            given[f"{feature.name}.lengths"] = lengths
    numbers = sum(feature.width for feature in snapshot.features if not feature.has_table)
    if numbers:
        given[NUMBERS] = torch.rand(EVENTS, numbers)
    if snapshot.takes_history:
        number = given[HISTORY].size(0)
        given[f"{HISTORY}.labels"] = torch.ones(number)
        if snapshot.takes_ages:
            for name in ("places", "gaps"):
                given[f"{HISTORY}.{name}"] = torch.zeros(number, dtype=torch.int32)
        if getattr(snapshot.head, "own_items", None) is not None:
            given[f"{HISTORY}.own"] = torch.zeros(number)
    return given | snapshot.dense


def convert_rows(arrays: dict[str, np.ndarray], row_type: str) -> None:
    """Convert the rows of tables among the arrays of an export. row_type: one of `ROW_TYPES`."""
    # The dense part has weights too.
    for name in [name for name in arrays if name.endswith(".weight") and not name.startswith("dense.")]:
        if row_type == "float16":
            arrays[name] = arrays[name].astype(np.float16)
        elif row_type == "int8":
            # The largest number of a row becomes 127.
            scale = np.abs(arrays[name]).max(axis=1, initial=0.0) / 127
            arrays[f"{name.removesuffix('weight')}scale"] = scale.astype(np.float32)
            arrays[name] = np.rint(arrays[name] / np.where(scale > 0, scale, 1)[:, None]).astype(np.int8)


def write_graph(folder: Path, snapshot: Snapshot, kind: str) -> Path:
    """Write the graph of a model into a folder, and return its file. kind: of `FILES`.

    Raises:
        UserError: when the model cannot be traced, ONNX lacks an operation, or packages are missing.
    """
    if isinstance(snapshot.head, SequenceHead):
        raise UserError(
            f"--format {kind} cannot be used with --task sequence, whose attention cuts histories by their "
            "lengths; leave it out, and serve the export with this library."
        )
    if kind == "onnx":
        require_installed("--format onnx", "onnx", "onnxscript")
    given, path = example_of(snapshot), folder / FILES[kind]
    sizes = {name: None if name.startswith("dense.") else {0: torch.export.Dim.DYNAMIC} for name in given}
    graph = Graph(Prediction(snapshot)).eval()
    advice = "compute with tensors alone, without int(tensor), len(tensor) or branches on values"
    with torch.no_grad(), _explained(f"torch.export cannot trace this model: %s. Fix: {advice}."):
        program = torch.export.export(graph, (given,), dynamic_shapes=(sizes,), strict=False)
    if kind == "torch":
        torch.export.save(program, path)
    else:
        with _explained("ONNX cannot express this model: %s. Fix: use other operations, or --format torch."):
            _write_onnx(path, program, [*given])
    return path


@contextlib.contextmanager
def _explained(sentence: str) -> Iterator[None]:
    """Raise a UserError for any error of an exporter, which has errors of many types; no warnings of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Exception as error:
        # An exporter wraps the error that says why, and adds pages of advice after its first line.
        lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise UserError(sentence % printable(reason.rstrip("."))) from error


def _write_onnx(path: Path, program: torch.export.ExportedProgram, names: list[str]) -> None:
    import onnx
    from onnxscript.function_libs.torch_lib.ops import core

    def repeat_interleave(lengths: Any, output_size: Any = None) -> Any:
        # onnxscript 0.7.2 does not know `output_size`, which changes no result.
        return core.aten_repeat_interleave_Tensor(lengths)

    table: dict[Callable[..., Any], Callable[..., Any]] = {
        torch.ops.aten.repeat_interleave.Tensor: repeat_interleave
    }
    # They tell of each constant that is not folded, and of packages that no model here needs.
    loggers = [logging.getLogger(name) for name in ("onnxscript", "onnx_ir", "torch.onnx")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        graph = torch.onnx.export(
            program,
            input_names=names,
            output_names=[SCORE],
            custom_translation_table=table,
            dynamo=True,
            verbose=False,
        )
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
    assert graph is not None
    # Operations name their results themselves, such as "add", which may be the name of a feature.
    for value in (value for node in graph.model.graph.all_nodes() for value in node.outputs):
        if value.name in names:
            value.name = f"{value.name}.result"
    graph.save(path)
    onnx.checker.check_model(path, full_check=True)
