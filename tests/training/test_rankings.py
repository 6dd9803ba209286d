"""Rankings by learned weights of histories, and by sequences, leave and come back."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from example import make_loss, make_model
from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.config.presets import PRESETS
from recsuite.datasets.columns import Columns
from recsuite.datasets.opening import open_data
from recsuite.datasets.schema import HISTORY
from recsuite.errors import UserError
from recsuite.extras.graph.flags import GraphConfig
from recsuite.models import heads
from recsuite.runtime.process import RuntimeContext
from recsuite.serving.export import write_export
from recsuite.serving.served import ServedModel
from recsuite.training.evaluation import RankingEvaluator, Users
from recsuite.training.loop import Training
from recsuite.training.steps import BatchFeed
from tests.support.launch import EXAMPLE, succeeded, torchrun
from tests.support.raw_values import raw_features, raw_lists

sys.path.append(str(EXAMPLE.parent))

# As --task ranking takes it, but small.
SIZES = {"epochs": 2, "embedding_dim": 8, "batch_size": 2_000, "history": 6}
SMALL = {
    "ranking": {**PRESETS["ranking"][1], **SIZES},
    "sequence": {**PRESETS["sequence"][1], "negatives": 100, **SIZES},
}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--history_weights", "learned"), "--history_weights learned requires --task ranking, got rating"),
        (
            ("--history_weights", "learned", "--task", "ranking", "--history", "0"),
            "--history_weights learned requires --history above 0",
        ),
        (("--stream", "--task", "ranking"), "--task ranking cannot be used with --stream"),
    ],
)
def test_impossible_history_weights_are_refused_with_one_message(
    flags: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_args([*flags])


@dataclasses.dataclass
class Trained:
    """A training on data, where its checkpoints are, and of its test events the scores of their items."""

    columns: Columns
    config: Config
    folder: Path
    scores: torch.Tensor

    def values(self, number: int) -> dict[str, list[Any]]:
        """Return the request values of the first test events."""
        told = {**raw_features(self.columns, self.config), **self.histories()}
        return {name: given[:number] for name, given in told.items()}

    def histories(self) -> dict[str, list[list[Any]]]:
        """The histories of the test events, as long as the training has them, and how old their items are."""
        events = self.columns.range_of("test")
        # An order continues within a second.
        reads_order = self.config.model.reads_order
        known_before = self.columns.column("history_before")
        ends = known_before if reads_order else self.columns.column("rows")["history_end"]
        ends = ends[events.start :]
        users = self.columns.column("rows")["user"][events.start :]
        begins = self.columns.column("test_history_offsets")[users]
        starts = np.maximum(begins, ends - self.config.data.history)
        known, now = self.columns.column("test_history_time"), self.columns.column("time")[events.start :]
        spans = [*zip(starts - begins, ends - begins, strict=True)]
        found = {
            name: [mine[start:end] for mine, (start, end) in zip(lists, spans, strict=True)]
            for name, lists in raw_lists(self.columns).items()
        }
        ages = [(at - known[start:end]).tolist() for at, start, end in zip(now, starts, ends, strict=True)]
        return {**found, "history_ages": ages}


@pytest.fixture(scope="module", params=[*SMALL])
def trained(
    request: pytest.FixtureRequest,
    synthetic_folder: Path,
    context: RuntimeContext,
    tmp_path_factory: pytest.TempPathFactory,
) -> Trained:
    """A small training."""
    folder = tmp_path_factory.mktemp("rankings") / "dumps"
    config = Config.of(
        **SMALL[request.param], data_path=str(synthetic_folder), save_dir=str(folder), dump=True
    )
    with open_data(config, context) as data:
        with checkpointing(data.columns, config, context) as checkpointer:
            loop = Training(data, config, context, checkpointer)
            loop.run(make_model, make_loss)
        evaluator = RankingEvaluator(BatchFeed(data.loader), data.columns, context, Users(data.columns, []))
        loop.train_state.model.eval()
        with torch.no_grad():
            _, scores, _ = evaluator._embed(loop.train_state.model, "test", 0)
    return Trained(data.columns, config, folder, scores)


def test_a_served_model_scores_as_the_trained_one(trained: Trained) -> None:
    # The weights of the best epoch, which a training ends with.
    model, values = ServedModel.open(trained.folder, "best", model=make_model), trained.values(200)
    assert max(map(len, values["history_ages"])) == SIZES["history"]
    found = model.score(values)
    torch.testing.assert_close(found, trained.scores[:200], rtol=1e-5, atol=1e-5)
    # Ages say something.
    without = {name: given for name, given in values.items() if name != "history_ages"}
    assert (model.score(without) - found).abs().max() > 0.001


def test_a_checkpoint_from_before_own_scores_is_continued_with_them(
    synthetic_folder: Path, context: RuntimeContext, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = {**SMALL["ranking"], "seen": "allow", "data_path": str(synthetic_folder)}
    first = Config.of(**flags, save_dir=str(tmp_path / "dumps"), inc_dump=True).replaced(epochs=1)
    with open_data(first, context) as data:
        with monkeypatch.context() as patched:
            patched.setattr(heads, "OwnItems", lambda num_types: None)
            with checkpointing(data.columns, first, context) as checkpointer:
                Training(data, first, context, checkpointer).run(make_model, make_loss)
        assert ServedModel.open(tmp_path / "dumps", model=make_model).snapshot.head.own_items is None
        # The second delta builds on a full checkpoint with all parameters.
        second = first.replaced(resume=True, epochs=3)
        with checkpointing(data.columns, second, context) as checkpointer:
            run = Training(data, second, context, checkpointer).run(make_model, make_loss)
    assert [epoch.number for epoch in run.epochs] == [2, 3]
    head = ServedModel.open(tmp_path / "dumps", "latest", model=make_model).snapshot.head
    assert head.own_items.types.abs().max() > 0


def test_an_export_scores_as_its_checkpoint(trained: Trained, tmp_path: Path) -> None:
    model, values = ServedModel.open(trained.folder, "latest", model=make_model), trained.values(50)
    write_export(model.snapshot, tmp_path / "exported")
    again = ServedModel.open(tmp_path / "exported", model=make_model).score(values)
    assert torch.equal(again, model.score(values))


@pytest.mark.beside
def test_a_graph_scores_as_its_checkpoint_or_says_that_it_cannot(trained: Trained, tmp_path: Path) -> None:
    model, values = ServedModel.open(trained.folder, "latest", model=make_model), trained.values(50)
    onnx = GraphConfig(format="onnx")
    if trained.config.model.reads_order:
        with pytest.raises(UserError, match="--format onnx cannot be used with --task sequence"):
            write_export(model.snapshot, tmp_path / "exported", extras=[onnx])
        assert not [*tmp_path.iterdir()]
        return
    write_export(model.snapshot, tmp_path / "exported", extras=[onnx])
    found = importlib.import_module("onnx_client").Client(tmp_path / "exported").score(values)
    np.testing.assert_allclose(found, model.score(values).numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ages", "sentence"),
    [
        ([[1.0]], "history_ages must have one number for each item"),
        ([[1.0, -1.0]], "history_ages .*got -1"),
        ([[1.0, None]], "history_ages .*got nan"),
        ([["a", 1.0]], "history_ages takes numbers, and got 'a'"),
        ([3], "history_ages takes a list for each rating"),
    ],
)
def test_ages_that_is_invalid_are_refused_with_one_message(
    trained: Trained, ages: list[Any], sentence: str
) -> None:
    movies = [*ServedModel.open(trained.folder, "latest", model=make_model).snapshot.vocabulary["movie"]][:2]
    values = {"movie": movies[:1], HISTORY: [movies], "history_ratings": [[3.0, 4.0]], "history_ages": ages}
    with pytest.raises(UserError, match=sentence):
        ServedModel.open(trained.folder, "latest", model=make_model).score(values)


def test_ids_without_a_vocabulary_are_ranked_by_learned_weights_too(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    data = ("--data_path", synthetic_folder, "--save_dir", tmp_path / "dumps")
    flags = ("--task", "ranking", "--vocabulary", "dynamic", "--embedding_dim", 4, "--batch_size", 4_000)
    said = succeeded(torchrun(2, EXAMPLE, "--dump", "--epochs", 1, *flags, *data))
    assert "| this model, epoch 1" in said
    shown = succeeded(torchrun(1, EXAMPLE, "--recommend", "--user", 1, *data))
    assert "| rank | title" in shown
