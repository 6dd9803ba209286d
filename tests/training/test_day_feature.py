"""The feature of a day: the flags that exclude it; a trained model with it is saved, resumed and served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from example import make_loss, make_model
from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.datasets.opening import open_data
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.serving.served import ServedModel
from recsuite.training.evaluation import PredictionEvaluator, Users
from recsuite.training.loop import Training
from recsuite.training.steps import BatchFeed
from tests.support.launch import EXAMPLE, succeeded, torchrun
from tests.support.raw_values import raw_days, raw_features, raw_histories
from tests.support.states import FLAGS

SMALL = {
    "split": "random",
    # As that of the raw histories.
    "history": FLAGS.data.history,
    "day_feature": "user",
    "lr": 0.3,
    "epochs": 2,
    "embedding_dim": 8,
    "batch_size": 500,
}


def test_the_day_feature_cannot_be_used_with_a_stream() -> None:
    with pytest.raises(UserError, match="--day_feature cannot be used with --stream"):
        parse_args(["--day_feature", "user", "--split", "random", "--stream"])


def test_a_served_model_scores_as_the_trained_one(
    small_folder: Path, context: RuntimeContext, tmp_path: Path
) -> None:
    config = Config.of(**SMALL, data_path=str(small_folder), save_dir=str(tmp_path / "dumps"), dump=True)
    with open_data(config, context) as data:
        columns = data.columns
        with checkpointing(columns, config, context) as checkpointer:
            loop = Training(data, config, context, checkpointer)
            loop.run(make_model, make_loss)
        evaluator = PredictionEvaluator(
            loop.task, BatchFeed(data.loader), columns, context, Users(columns, [])
        )
        expected = evaluator.predict(loop.train_state.model, "test", 0)
    model = ServedModel.open(tmp_path / "dumps", "best", model=make_model)
    few = slice(0, 200)
    told = {**raw_features(columns, config), **raw_days(columns), **raw_histories(columns)}
    values = {name: given[few] for name, given in told.items()}
    found = model.score(values)
    torch.testing.assert_close(found, torch.from_numpy(expected[few]), rtol=0, atol=2e-6)
    # The day says something.
    without = {name: given for name, given in values.items() if name != "user_day"}
    assert (model.score(without) - found).abs().max() > 0.01


def test_a_training_on_two_ranks_is_loaded_on_three_and_resumed_with_its_own_flags(
    small_folder: Path, tmp_path: Path
) -> None:
    data = ("--data_path", small_folder, "--save_dir", tmp_path / "dumps")
    flags = [word for name, value in SMALL.items() for word in (f"--{name}", value)]
    said = succeeded(torchrun(2, EXAMPLE, "--inc_dump", *flags, *data))
    last = next(line for line in said.splitlines() if line.startswith("| this model, "))
    loaded = succeeded(torchrun(3, EXAMPLE, "--load", *data))
    again = next(line for line in loaded.splitlines() if line.startswith("| this model, step"))
    assert [float(cell) for cell in again.split("|")[2:6]] == pytest.approx(
        [float(cell) for cell in last.split("|")[2:6]], abs=1.5e-4
    )
    resumed = succeeded(torchrun(3, EXAMPLE, "--inc_dump", "--resume", "--epochs", 3, *data))
    assert "--lr 0.3" in resumed
    assert "--day_feature user" in resumed
