"""Co-occurrence features: the flags that exclude them; a trained model of them is saved and served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from recsuite.checkpoint.checkpointer import checkpointing
from recsuite.config.config import Config
from recsuite.config.parser import parse_args
from recsuite.config.presets import PRESETS
from recsuite.datasets.opening import open_data
from recsuite.datasets.schema import HISTORY, ITEM_HISTORY
from recsuite.errors import UserError
from recsuite.runtime.process import RuntimeContext
from recsuite.serving.served import ServedModel
from recsuite.training.evaluation import PredictionEvaluator
from recsuite.training.loop import Training
from recsuite.training.steps import InputPipeline
from tests.support.launch import EXAMPLE, succeeded, torchrun
from tests.support.raw_values import raw_days, raw_features, raw_lists

# As --split random takes it, but small, and with whole lists, as a served model is told them.
SMALL = {
    **PRESETS["co_occurrence"][1],
    "co_occurrence": 1_000,
    "epochs": 2,
    "embedding_dim": 8,
    "batch_size": 4_000,
}


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            ("--co_occurrence", "5"),
            "--co_occurrence 5 requires --split random or an official split, got --split time",
        ),
        (
            ("--co_occurrence", "5", "--split", "random", "--task", "ranking"),
            "--co_occurrence requires --task rating, got ranking",
        ),
        (
            ("--item_history", "5", "--task", "response"),
            "--item_history requires --task rating, got response",
        ),
        (("--co_occurrence", "5", "--stream"), "--co_occurrence 5"),
        (
            ("--day_feature", "user", "--split", "random", "--stream"),
            "--day_feature cannot be used with --stream",
        ),
    ],
)
def test_impossible_history_flags_are_refused_with_one_message(flags: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse_args([*flags])


def test_a_served_model_scores_as_the_trained_one(
    synthetic_folder: Path, context: RuntimeContext, tmp_path: Path
) -> None:
    config = Config.of(**SMALL, data_path=str(synthetic_folder), save_dir=str(tmp_path / "dumps"), dump=True)
    with open_data(config, context) as data:
        columns = data.columns
        with checkpointing(columns, config, context) as checkpointer:
            loop = Training(data, config, context, checkpointer)
            loop.run()
        evaluator = PredictionEvaluator(loop.task, InputPipeline(data.loader), columns, context)
        expected = evaluator.predict(loop.train_state.model, "test", 0)
    model = ServedModel.open(tmp_path / "dumps", "best")
    assert {HISTORY, ITEM_HISTORY} <= model.snapshot.tables.keys()
    # What was learned of the prior goes with the weights: a training that is resumed holds rows as before.
    assert torch.equal(model.snapshot.head.spreads, loop.train_state.head.spreads)
    assert loop.train_state.head.spreads.abs().min() > 0
    few = slice(0, 200)
    told = {**raw_features(columns, config), **raw_days(columns), **raw_lists(columns)}
    values = {name: given[few] for name, given in told.items()}
    found = model.score(values)
    torch.testing.assert_close(found, torch.from_numpy(expected[few]), rtol=0, atol=2e-6)
    # The lists and the days say something.
    for left_out in (ITEM_HISTORY, "user_day"):
        without = {name: given for name, given in values.items() if name != left_out}
        assert (model.score(without) - found).abs().max() > 0.01


def test_a_training_on_two_ranks_is_loaded_on_three_and_resumed_with_its_own_flags(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    data = ("--data_path", synthetic_folder, "--save_dir", tmp_path / "dumps")
    flags = ("--split", "random", "--embedding_dim", 4, "--lr", 0.3, "--epochs", 2, "--batch_size", 2_000)
    said = succeeded(torchrun(2, EXAMPLE, "--inc_dump", *flags, *data))
    lists = "--co_occurrence 200 --day_feature user"
    shown = f"--task rating {lists} --weight_decay 0.0 --mlp_dims none --patience 10"
    assert f"--preset co_occurrence sets {shown}, as it fits --task rating --split random;" in said
    last = next(line for line in said.splitlines() if line.startswith("| this model, epoch"))
    loaded = succeeded(torchrun(3, EXAMPLE, "--load", *data))
    again = next(line for line in loaded.splitlines() if line.startswith("| this model, step"))
    assert [float(cell) for cell in again.split("|")[2:6]] == pytest.approx(
        [float(cell) for cell in last.split("|")[2:6]], abs=1.5e-4
    )
    resumed = succeeded(torchrun(3, EXAMPLE, "--inc_dump", "--resume", "--epochs", 3, *data))
    assert "--lr 0.3" in resumed
    assert "--preset co_occurrence --" in resumed
    assert "--preset co_occurrence sets" not in resumed
