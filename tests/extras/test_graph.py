"""A model that leaves: graphs of torch.export and ONNX score as the server does, by a client of numpy."""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

from example import make_model
from recsuite.config.parser import parse_args
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.preparation.vocabulary import Buckets
from recsuite.errors import UserError
from recsuite.extras.graph.flags import GraphConfig
from recsuite.extras.graph.graph import example_of, input_of, write_graph
from recsuite.models.heads import TwoSided
from recsuite.serving.export import MODEL, export, write_export
from recsuite.serving.request import members_of
from recsuite.serving.served import ServedModel
from tests.support.graphs import one_graph
from tests.support.launch import EXAMPLE, ROOT, python, succeeded, torchrun
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
    with one_graph():
        for row_type in ("float32", "float16", "int8"):
            found[row_type] = until_10.parent / row_type
            wanted = GraphConfig(format="onnx", row_type=row_type)
            source = CheckpointConfig(save_dir=str(until_10), checkpoint="latest")
            export(source, found[row_type], make_model, extras=[wanted])
    return found


def inputs_of(model: ServedModel, values: Mapping[str, list[Any]]) -> dict[str, torch.Tensor]:
    """The inputs of a graph for some events, from the server's own look-up."""
    found, members = model.snapshot.look_up(values), members_of(values, model.snapshot.schema)
    given, rows = {}, {input_of(table): table for table in found.found}
    for name, example in example_of(model.snapshot).items():
        feature, _, part = name.partition(".")
        if name in rows:
            given[name] = found.found[rows[name]].values()
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
    model, client = ServedModel.open(until_10, "latest", model=make_model), client_of(exports["float32"])
    np.testing.assert_allclose(client.score(values), model.score(values).numpy(), atol=1e-6)
    # One event; and unknown values, and nothing but an item.
    schema = model.snapshot.schema
    single = {name: given[:1] for name, given in values.items()}
    np.testing.assert_allclose(client.score(single), model.score(single).numpy(), atol=1e-6)
    few = {schema.user: [-5, -6], schema.item: [values[schema.item][0], -7]}
    np.testing.assert_allclose(client.score(few), model.score(few).numpy(), atol=1e-6)
    assert client.score({"movie": []}).shape == (0,)
    # The export is one of this library too.
    assert torch.equal(
        ServedModel.open(exports["float32"], model=make_model).score(values), model.score(values)
    )


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
        with pytest.raises(UserError, match=f"--row_type {row_type}"):
            ServedModel.open(exports[row_type], model=make_model)
    assert sizes["int8"] < sizes["float16"] < (exports["float32"] / MODEL).stat().st_size


@pytest.mark.parametrize(("row_type", "most"), [("float32", 1e-6), ("float16", 0.02), ("int8", 0.05)])
def test_deltas_are_applied_to_an_export_in_their_order(
    exports: dict[str, Path], trained_folder: Path, values: dict[str, list[Any]], row_type: str, most: float
) -> None:
    client = client_of(exports[row_type])
    before = client.score(values)
    for wrong in (14, 10, 16):
        with pytest.raises(ValueError, match="is not the next delta of this model"):
            client.apply(state(trained_folder / "dumps", wrong))
    np.testing.assert_array_equal(client.score(values), before)
    for step in (12, 14):
        client.apply(state(trained_folder / "dumps", step))
    wanted = ServedModel.open(state(trained_folder / "dumps", 14), model=make_model).score(values).numpy()
    assert np.abs(wanted - before).max() > most
    np.testing.assert_allclose(client.score(values), wanted, atol=most)


def test_a_damaged_delta_changes_nothing(
    exports: dict[str, Path], trained_folder: Path, values: dict[str, list[Any]], tmp_path: Path
) -> None:
    client = client_of(exports["float32"])
    before = client.score(values)
    for number, name in enumerate(("manifest.json", "part-00001.safetensors", "part-00001.safetensors")):
        delta = Path(shutil.copytree(state(trained_folder / "dumps", 12), tmp_path / str(number)))
        if number < 2:
            content = bytearray((delta / name).read_bytes())
            # The step of the manifest, or the last number of a row.
            content[content.index(b'"step": 12') + 9 if number == 0 else -1] ^= 1
            (delta / name).write_bytes(content)
        else:
            (delta / name).unlink()
        with pytest.raises(ValueError, match=f"{re.escape(name)} is missing or damaged"):
            client.apply(delta)
    np.testing.assert_array_equal(client.score(values), before)
    client.apply(state(trained_folder / "dumps", 12))


SCHEMA = """
[user]
column = "user"
[item]
column = "item"
[label]
kind = "rating"
column = "stars"
[timestamp]
column = "when"
format = "unix"
[features.age]
of = "user"
column = "age"
kind = "number"
input = "buckets"
[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"
[features.image]
of = "item"
column = "image"
kind = "vector"
length = 4
[features.tags]
of = "item"
column = "tags"
kind = "list"
"""


# Names of attributes of torch's modules, of the inputs and the output of a graph, and of an operation in it.
NAMES = [
    *("type", "keys", "values", "half", "training", "pop", "forward", "_modules", "__class__", "numbers"),
    *("score", "getitem", "add", "type_", "class", "None"),
]


def write_names(folder: Path) -> Path:
    """Tables with a feature of each kind, and of each name: categories, some lists, dense numbers."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    events = {
        "user": draw.integers(0, 20, 300),
        "item": draw.integers(0, 9, 300),
        "stars": draw.integers(1, 6, 300),
        "when": 1_700_000_000 + np.arange(300),
    }
    pandas.DataFrame(events).to_csv(folder / "events.csv", index=False)
    users = {"user": np.arange(20), "age": draw.integers(10, 90, 20).astype(float)}
    pandas.DataFrame(users).to_csv(folder / "users.csv", index=False)
    lists = [["a", "b"], ["c"], ["d"]] * 3
    items: dict[str, Any] = {"item": np.arange(9), "price": np.exp(draw.normal(2, 2, 9))}
    items |= {"image": draw.normal(size=(9, 4)).tolist(), "tags": [["a", "b"], ["c"], []] * 3}
    schema = SCHEMA
    kinds = {"keys": "list", "values": "list", "training": "number", "pop": "number"}
    for place, name in enumerate(NAMES):
        kind = kinds.get(name, "category")
        items[name] = {
            "category": [f"v{(item + place) % 3}" for item in range(9)],
            "list": lists,
            "number": draw.normal(size=9),
        }[kind]
        dense = 'input = "dense"\n' if kind == "number" else ""
        schema += f'[features.{name}]\nof = "item"\ncolumn = "{name}"\nkind = "{kind}"\n{dense}'
    pandas.DataFrame(items).to_parquet(folder / "items.parquet")
    (folder / "schema.toml").write_text(schema)
    return folder


def test_features_of_any_name_and_kind_are_encoded_alike_in_training_checkpoints_graphs_and_clients(
    tmp_path: Path,
) -> None:
    data, dumps = write_names(tmp_path / "data"), tmp_path / "dumps"
    flags = ("--data_path", data, "--save_dir", dumps, "--preset", "none")
    trained = succeeded(torchrun(2, EXAMPLE, *flags, "--epochs", "1", "--dump"))
    loaded = succeeded(python(EXAMPLE, *flags, "--load"))
    assert "missing 0, unexpected 0" in loaded
    lines = [line for line in (trained + loaded).splitlines() if line.startswith("| this model, ")]
    assert len({line.partition("|")[2].partition("|")[2] for line in lines}) == 1
    model = ServedModel.open(dumps, model=make_model)
    tables = {name.split(".")[1] for name in model.snapshot.manifest.tensors if name.startswith("tables.")}
    assert tables >= {"user", "item", "history", *NAMES} - {"training", "pop"}
    age = model.snapshot.encodings["age"]
    assert isinstance(age, Buckets)
    edges = age.edges
    asked: dict[str, list[Any]] = {name: ["v0", None, "v2", "unseen", "v1"] for name in NAMES}
    asked |= {
        "user": [1, 2, -1, 3, 4],
        "item": [5, -1, 6, 7, 8],
        "age": [edges[0], edges[3], None, float("nan"), 1e39],
        "price": [None, -5.0, 1e39, float("nan"), 7.5],
        "image": [None, [0.1, 0.2, 0.3, 0.4], [1, 2, 3, 4], None, [0, 0, 0, 0]],
        "tags": [["a", "c"], [], ["unseen"], ["b"], ["b", "b"]],
        "keys": [["a"], [], ["b", "c"], [], ["d"]],
        "values": [["d"], ["a", "b"], [], ["c"], []],
        "training": [0.5, None, -1.0, 0.0, 2.0],
        "pop": [1.0, 2.0, None, -3.0, 0.0],
        "history": [[5, 6], [], [7], [-3, 5, 6], []],
        "history_ratings": [[4.0, 1.0], [], [5.0], [1.0, 2.0, 3.0], []],
    }
    write_export(model.snapshot, tmp_path / "served", extras=[GraphConfig(format="onnx")])
    graph = torch.export.load(write_graph(tmp_path, model.snapshot, "torch")).module()
    client = client_of(tmp_path / "served")
    for number in (5, 1):
        few = {name: given[:number] for name, given in asked.items()}
        wanted = model.score(few)
        np.testing.assert_allclose(client.score(few), wanted.numpy(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(graph(inputs_of(model, few)), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "the model has the features"),
        ({"user": [1], "film": [2]}, "the model has the features .*got .*film"),
        ({"user": [1], "movie": [2, 3]}, "give each feature as many values"),
        ({"movie": [2], "history": [[1]]}, "each item of a history a rating and an age"),
        ({"movie": [2], "history_ratings": [[1.0]]}, "each item of a history a rating and an age"),
        ({"movie": [2], "history_ages": [[1.0]]}, "each item of a history a rating and an age"),
        ({"movie": [2], "history": [[1]], "history_ratings": [[1.0, 2.0]]}, "each item of a history"),
    ],
)
def test_a_client_refuses_names_and_lengths_that_cannot_be(
    exports: dict[str, Path], values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        client_of(exports["float32"]).score(values)


def test_a_graph_of_torch_export_scores_as_the_server(
    until_10: Path, values: dict[str, list[Any]], tmp_path: Path
) -> None:
    model = ServedModel.open(until_10, "latest", model=make_model)
    graph = torch.export.load(write_graph(tmp_path, model.snapshot, "torch")).module()
    for number in (40, 1):
        few = {name: given[:number] for name, given in values.items()}
        torch.testing.assert_close(graph(inputs_of(model, few)), model.score(few), rtol=0, atol=1e-6)


class Own(TwoSided):
    """A model of a user: a layer on the sum of rows, and what cannot be a graph."""

    def __init__(self, dim: int, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(dim, 2 if kind == "squeeze" else 1), kind
        self.register_buffer("row_scale", torch.tensor(1.0))

    def predict(self, rows: Any, batch: Any) -> torch.Tensor:
        both = rows.sum(["user", "movie"])
        if self.kind == "branch" and float(both.sum()) > 0:
            both = -both
        if self.kind == "silent":
            raise NotImplementedError
        found: torch.Tensor = self.layer(both).squeeze(1)
        return found


def with_own(folder: Path, kind: str) -> ServedModel:
    model = ServedModel.open(folder, "latest", model=make_model)
    model.snapshot.__dict__["head"] = Own(model.snapshot.tables["user"].matrix.size(1), kind)
    return model


def test_a_model_of_a_user_is_traced(until_10: Path, values: dict[str, list[Any]], tmp_path: Path) -> None:
    model = with_own(until_10, "plain")
    graph = torch.export.load(write_graph(tmp_path, model.snapshot, "torch")).module()
    torch.testing.assert_close(graph(inputs_of(model, values)), model.score(values), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("branch", r"^torch.export cannot trace this model: .*Fix: compute with tensors alone"),
        ("silent", r"^torch.export cannot trace this model: NotImplementedError. Fix: compute with"),
        # Two labels: torch leaves them as they are, and ONNX refuses.
        ("squeeze", r"^ONNX cannot express this model: .*Fix: use other operations, or --format torch"),
    ],
)
def test_a_model_that_cannot_be_a_graph_is_refused_with_one_sentence(
    until_10: Path, tmp_path: Path, kind: str, sentence: str
) -> None:
    wanted = GraphConfig(format="onnx")
    with pytest.raises(UserError, match=sentence) as refusal:
        write_export(with_own(until_10, kind).snapshot, tmp_path / "served", extras=[wanted])
    assert "\n" not in str(refusal.value)
    assert not [*tmp_path.iterdir()]


def test_a_refused_export_leaves_nothing(
    until_10: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", None)
    wanted = GraphConfig(format="onnx")
    with pytest.raises(UserError, match=r"--format onnx requires onnx, .* pip install onnx"):
        export(CheckpointConfig(save_dir=str(until_10)), tmp_path / "served", make_model, extras=[wanted])
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UserError, match="--row_type int8 requires --format torch or onnx"):
        parse_args(["--export", "there", "--row_type", "int8"])


def test_onnxscript_does_not_know_the_size_of_a_repeated_tensor() -> None:
    from onnxscript.function_libs.torch_lib.ops import core

    # If this fails, `repeat_interleave` in extras/graph/graph.py is no longer needed.
    with pytest.raises(TypeError, match="output_size"):
        core.aten_repeat_interleave_Tensor(None, output_size=1)
