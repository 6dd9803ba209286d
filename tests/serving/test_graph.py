"""A model that leaves: graphs of torch.export and ONNX score as the server does, by a client of numpy."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from recsuite.config.parser import parse_args
from recsuite.config.sections import CheckpointConfig, ServingConfig
from recsuite.errors import UserError
from recsuite.models.heads import TwoSided
from recsuite.serving.export import MODEL, export
from recsuite.serving.graph import FILES, example_of, write_graph
from recsuite.serving.request import members_of
from recsuite.serving.served import ServedModel
from tests.support.launch import EXAMPLE, ROOT, python
from tests.support.published import copied, state
from tests.support.raw_values import raw_test_values

sys.path.append(str(ROOT / "example"))


def client_of(folder: Path) -> Any:
    return importlib.import_module("onnx_client").Client(folder)


@pytest.fixture(scope="module")
def values(synthetic_folder: Path) -> dict[str, list[Any]]:
    """Raw values of the first test events."""
    return {name: list(given[:40]) for name, given in raw_test_values(synthetic_folder).items()}


@pytest.fixture(scope="module")
def until_10(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints until step 10."""
    return copied(trained_folder / "dumps", tmp_path_factory.mktemp("graphs") / "until-10", 10)


@pytest.fixture(scope="module")
def exports(until_10: Path) -> dict[str, Path]:
    """Exports with a graph, by the type of their rows."""
    found = {}
    for row_type in ("float32", "float16", "int8"):
        found[row_type] = until_10.parent / row_type
        wanted = ServingConfig(export="there", format="onnx", row_type=row_type)
        source = CheckpointConfig(save_dir=str(until_10), checkpoint="latest")
        export(source, found[row_type], wanted=wanted)
    return found


def inputs_of(model: ServedModel, values: Mapping[str, list[Any]]) -> dict[str, torch.Tensor]:
    """The inputs of a graph for some events, from the server's own look-up."""
    found, members = model.snapshot.look_up(values), members_of(values, model.snapshot.schema)
    given = {}
    for name, example in example_of(model.snapshot).items():
        feature, _, part = name.partition(".")
        if name in found:
            given[name] = found.found[name].values()
        elif part == "lengths":
            given[name] = found.found[feature].lengths()
        elif feature == "history":
            given[name] = getattr(members, part)
        else:
            given[name] = example if feature == "dense" else model.snapshot.numbers_of(values)
    return given


def test_a_client_without_torch_scores_as_the_server(
    exports: dict[str, Path], until_10: Path, values: dict[str, list[Any]]
) -> None:
    model, client = ServedModel.open(until_10, "latest"), client_of(exports["float32"])
    np.testing.assert_allclose(client.score(values), model.score(values).numpy(), atol=1e-6)
    # One event; and unknown values, and nothing but an item.
    schema = model.snapshot.schema
    single = {name: given[:1] for name, given in values.items()}
    np.testing.assert_allclose(client.score(single), model.score(single).numpy(), atol=1e-6)
    few = {schema.user: [-5, -6], schema.item: [values[schema.item][0], -7]}
    np.testing.assert_allclose(client.score(few), model.score(few).numpy(), atol=1e-6)
    # The export is one of this library too.
    assert torch.equal(ServedModel.open(exports["float32"]).score(values), model.score(values))


def test_a_client_imports_neither_torch_nor_the_library(exports: dict[str, Path]) -> None:
    code = (
        "import sys; from onnx_client import Client; "
        f"print(Client({str(exports['float32'])!r}).score({{'user': [1], 'movie': [2]}}).shape); "
        "assert not {'torch', 'recsuite'} & {*sys.modules}"
    )
    result = python("-c", code, env={"PYTHONPATH": str(EXAMPLE.parent)})
    assert (result.returncode, result.stdout) == (0, "(1,)\n"), result.stderr


def test_short_rows_are_within_their_rounding(
    exports: dict[str, Path], until_10: Path, values: dict[str, list[Any]]
) -> None:
    whole = client_of(exports["float32"])
    sizes = {}
    for row_type, share in (("float16", 2.0**-11), ("int8", 0.5 / 127)):
        client = client_of(exports[row_type])
        sizes[row_type] = (exports[row_type] / MODEL).stat().st_size
        for table in client.tables:
            rows = np.arange(table["rows"])
            exact = whole.looked_up(table["name"], rows)
            limit = 1.001 * share * np.abs(exact).max(axis=1, keepdims=True) + 1e-7
            assert (np.abs(client.looked_up(table["name"], rows) - exact) <= limit).all()
        assert 0 < np.abs(client.score(values) - whole.score(values)).max() < 0.05
        with pytest.raises(UserError, match="float32"):
            ServedModel.open(exports[row_type])
    assert sizes["int8"] < sizes["float16"] < (exports["float32"] / MODEL).stat().st_size


def test_a_delta_is_applied_to_an_export(
    exports: dict[str, Path], trained_folder: Path, values: dict[str, list[Any]], tmp_path: Path
) -> None:
    client = client_of(shutil.copytree(exports["float32"], tmp_path / "served"))
    before = client.score(values)
    delta = state(trained_folder / "dumps", 12)
    client.apply(delta)
    wanted = ServedModel.open(delta).score(values).numpy()
    assert np.abs(wanted - before).max() > 1e-4
    np.testing.assert_allclose(client.score(values), wanted, atol=1e-6)


def test_a_graph_of_torch_export_scores_as_the_server(
    until_10: Path, values: dict[str, list[Any]], tmp_path: Path
) -> None:
    model = ServedModel.open(until_10, "latest")
    graph = torch.export.load(write_graph(tmp_path, model.snapshot, "torch")).module()
    for number in (40, 1):
        few = {name: given[:number] for name, given in values.items()}
        torch.testing.assert_close(graph(inputs_of(model, few)), model.score(few), rtol=0, atol=1e-6)


class Own(TwoSided):
    """A model of a user: a layer on the sum of all rows, and a branch that cannot be traced."""

    def __init__(self, dim: int, branches: bool) -> None:
        super().__init__()
        self.layer, self.branches = nn.Linear(dim, 1), branches
        self.register_buffer("row_scale", torch.tensor(1.0))

    def predict(self, rows: Any, batch: Any) -> torch.Tensor:
        both = rows.sum(["user", "movie"])
        if self.branches and float(both.sum()) > 0:
            both = -both
        found: torch.Tensor = self.layer(both).squeeze(1)
        return found


@pytest.mark.parametrize("branches", [False, True])
def test_a_model_of_a_user_is_traced_or_refused_with_one_sentence(
    until_10: Path, values: dict[str, list[Any]], tmp_path: Path, branches: bool
) -> None:
    model = ServedModel.open(until_10, "latest")
    dim = model.snapshot.tables["user"].matrix.size(1)
    model.snapshot.__dict__["head"] = Own(dim, branches)
    if branches:
        with pytest.raises(UserError, match=r"^torch.export cannot trace this model: .*Fix: compute with"):
            write_graph(tmp_path, model.snapshot, "onnx")
        assert not [*tmp_path.iterdir()]
        return
    graph = torch.export.load(write_graph(tmp_path, model.snapshot, "torch")).module()
    torch.testing.assert_close(graph(inputs_of(model, values)), model.score(values), rtol=0, atol=1e-6)


def test_a_refused_export_leaves_nothing(
    until_10: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    wanted = ServingConfig(export="there", format="onnx")
    with pytest.raises(UserError, match="--format onnx requires onnx; pip install onnx onnxscript"):
        export(CheckpointConfig(save_dir=str(until_10)), tmp_path / "served", wanted=wanted)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="--row_type int8 requires --format torch or onnx"):
        parse_args(["--export", "there", "--row_type", "int8"])
    assert {*FILES} == {"torch", "onnx"}


def test_onnxscript_does_not_know_the_size_of_a_repeated_tensor() -> None:
    from onnxscript.function_libs.torch_lib.ops import core

    # If this fails, `repeat_interleave` in serving/graph.py is no longer needed.
    with pytest.raises(TypeError, match="output_size"):
        core.aten_repeat_interleave_Tensor(None, output_size=1)
