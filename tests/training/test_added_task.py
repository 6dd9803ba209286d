"""A task that is added as CONTRIBUTING says, a module and a choice of --task, can be trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.config.sections.model import ModelConfig
from recsuite.datasets.schema import Feature, Schema
from recsuite.models.heads import TwoTower
from recsuite.models.tasks.ranking import Ranking
from recsuite.models.tasks.task import Sizes, all_tasks, task_named, task_of
from recsuite.runtime.process import RuntimeContext
from recsuite.tools.life import train_and_report


class ShadedTower(TwoTower):
    """A tower whose layers have a name of their own."""

    def __init__(self, features: Sequence[Feature], embedding_dim: int, mlp_dims: Sequence[int]) -> None:
        super().__init__(features, embedding_dim, mlp_dims)
        self.shade = torch.nn.Linear(1, 1)


class Choosing(Ranking):
    """A third task, judged by ranks."""

    name = "choosing"
    dense_parts = ("shade",)

    def make_head(
        self, schema: Schema, features: Sequence[Feature], sizes: Sizes, mean_label: float = 0.0
    ) -> ShadedTower:
        return ShadedTower(features, sizes.embedding_dim, sizes.mlp_dims)


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Choosing:
    """The third task, where a module of `models/tasks` and a choice of --task would put it."""
    task = Choosing()
    monkeypatch.setitem(sys.modules, "recsuite.models.tasks.choosing", SimpleNamespace(TASK=task))
    monkeypatch.setitem(ModelConfig.CHOICES, "task", (*ModelConfig.CHOICES["task"], task.name))
    return task


def test_a_third_task_is_trained_and_held_against_the_baselines_of_its_kind(
    choosing: Choosing, synthetic_folder: Path, context: RuntimeContext, capsys: pytest.CaptureFixture[str]
) -> None:
    config = parse_args(["--task", "choosing"]).replaced(
        data_path=str(synthetic_folder),
        epochs=1,
        batch_size=16_000,
        embedding_dim=4,
        mlp_dims=(4,),
        validation_fraction=0.0,
    )
    train_and_report(config, context)
    said = capsys.readouterr().out
    assert "| popularity " in said
    assert "| this model, epoch 1 " in said


def test_tasks_and_flags_say_alike_which_models_read_an_order() -> None:
    for task in all_tasks():
        assert task.reads_order == Config.of(task=task.name).model.reads_order


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("ranking", {"tower.0.weight": [0, 3], "tower.2.weight": [3, 0]}),
        ("sequence", {"blocks.0.attention.bias.places": [0, 50]}),
        ("sequence", {"blocks.0.attention.bias.places": [2, 0]}),
        ("sequence", {"blocks.0.attention.bias.places": [3, 50]}),
    ],
)
def test_shapes_of_no_head_are_refused(name: str, shapes: dict[str, list[int]]) -> None:
    with pytest.raises(ValueError, match=r"width|heads"):
        task_named(name).sizes_of(shapes, 8)


def test_names_of_no_task_are_refused() -> None:
    with pytest.raises(LookupError, match="the layers shade are those of no --task"):
        task_of(["shade.0.weight"])


def test_two_tasks_whose_layers_have_one_name_are_refused(
    choosing: Choosing, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all_tasks()[-1] is choosing
    monkeypatch.setattr(Choosing, "dense_parts", ("tower",))
    with pytest.raises(ValueError, match="ranking and choosing both call their layers tower"):
        all_tasks()
