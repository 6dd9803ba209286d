"""Several labels of an event: sections of a schema, columns, weights in a batch, metrics."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import recsuite as rs
from example import make_model
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.opening import open_data
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.tables.schema_file import parse_schema
from recsuite.errors import UserError
from recsuite.extras.guess.proposal import propose
from recsuite.extras.guess.writer import text_of
from recsuite.metrics import measure_probabilities
from recsuite.runtime.process import RuntimeContext
from recsuite.training.evaluation import make_evaluator
from recsuite.training.loop import Training
from recsuite.training.steps import BatchFeed

NUM_EVENTS = 400
IDS = '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
FIRST = '[[label]]\nkind = "yes_no"\ncolumn = "bought"\n'
SECOND = '[[label]]\nkind = "yes_no"\ncolumn = "clicked"\nweight = "trust"\ndrop = "-1"\n'
THIRD = '[[label]]\nkind = "rating"\ncolumn = "stars"\nlowest = 1.0\nhighest = 5.0\n'
SCHEMA = IDS + FIRST + SECOND + THIRD + '[weight]\ncolumn = "weight"\n'


def events() -> pandas.DataFrame:
    """One event of each pair; a quarter lack clicks, half of them by a -1, and a third lack stars."""
    draw = np.random.default_rng(0)
    stars = draw.integers(1, 6, NUM_EVENTS).astype(float)
    stars[::3] = np.nan
    clicked = draw.integers(0, 2, NUM_EVENTS).astype(float)
    clicked[::8], clicked[4::8] = np.nan, -1
    return pandas.DataFrame(
        {
            "user": np.arange(NUM_EVENTS) // 20,
            "item": np.arange(NUM_EVENTS) % 20,
            "bought": draw.integers(0, 2, NUM_EVENTS),
            "clicked": clicked,
            "stars": stars,
            "trust": draw.integers(1, 4, NUM_EVENTS).astype(float),
            "weight": draw.integers(1, 4, NUM_EVENTS).astype(float),
        }
    )


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("labels")
    events().to_csv(folder / "events.csv", index=False)
    (folder / "schema.toml").write_text(SCHEMA)
    flags: dict[str, Any] = {"data_path": str(folder), "batch_size": 48, "history": 0, "task": "response"}
    return Config.of(**flags, split="random", validation_fraction=0.3, num_workers=0)


def test_labels_are_read_in_their_order_and_written_back() -> None:
    schema = parse_schema(SCHEMA)
    assert schema.schema().label_names == ("bought", "clicked", "stars")
    assert parse_schema(text_of(schema)) == schema


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (FIRST + FIRST, r"\[label 2\] noun = \"bought\" is the name of another label"),
        (FIRST + '[[label]]\nkind = "clicks"\n', r"\[label 2\] kind = \"clicks\" has no values of its own"),
        (FIRST + '[[label]]\ncolumn = "clicked"\n', r"\[label 2\] has no kind; write one"),
        (FIRST + 'weight = "w"\n', r"\[label\] weight = \"w\" is for the labels after the first"),
        (FIRST + SECOND.replace("weight", "wait"), r"\[label 2\] wait = .* did you mean \"weight\"\?"),
        (
            FIRST + SECOND + '[features.x]\nof = "event"\ncolumn = "clicked"\nkind = "number"\n',
            "is to be predicted",
        ),
        (
            FIRST + FIRST + 'noun = "other"\n',
            r"\[label 2\] column = \"bought\" is the column of another label",
        ),
        ("label = []\n", r"\[label\] is \(a list\), and not a section"),
        ('[label]\nkind = "clicks"\nweight = "w"\n', r'weight = "w" says nothing where kind = "clicks"'),
    ],
)
def test_a_fault_of_labels_gives_one_message(text: str, sentence: str) -> None:
    parts = (text + IDS) if text.startswith("label =") else IDS + text
    with pytest.raises(UserError, match=sentence):
        parse_schema(parts)


def test_a_guess_completes_a_schema_of_labels_alone(tmp_path: Path) -> None:
    events().to_csv(tmp_path / "events.csv", index=False)
    (tmp_path / "schema.toml").write_text(FIRST + SECOND)
    found = propose(tmp_path).schema
    assert found.schema().label_names == ("bought", "clicked")
    assert (found.user.column, found.item.column) == ("user", "item")
    assert not {"clicked", "trust", "bought"} & {each.column for each in found.features.values()}


def test_a_batch_has_all_labels_and_the_weight_of_one_that_is_lacking_is_0(config: Config) -> None:
    columns = open_columns(config)
    assert "100 of 400 events lack the label clicked" in " ".join(columns.notes)
    assert "134 of 400 events lack the label stars" in " ".join(columns.notes)
    dataset = EventBatches(columns, config, 0, 1)
    request = Request("train", 0, 0)
    batch = BatchFeed.to_model_input(_pipeline(dataset), dataset[request])
    positions, _ = dataset._positions_of_step(request)
    rows = events().set_index(["user", "item"])
    mean = rows["weight"].loc[_pairs(columns, range(columns.num_train))].mean()
    of_batch = rows.loc[_pairs(columns, positions)]
    lacks = of_batch["clicked"].isna() | (of_batch["clicked"] == -1)
    wanted = np.stack(
        [of_batch["bought"], of_batch["clicked"].mask(lacks, 0), of_batch["stars"].fillna(0)], axis=1
    )
    np.testing.assert_array_equal(batch.all_labels.numpy(), wanted)
    weight = of_batch["weight"] / mean
    weights = [weight, weight * of_batch["trust"] * ~lacks, weight * of_batch["stars"].notna()]
    np.testing.assert_allclose(batch.all_weights.numpy(), np.stack(weights, axis=1), rtol=1e-6)
    # What is measured counts each event once, with the weights that its labels have of their own.
    batch = BatchFeed.to_model_input(_pipeline(dataset), dataset[Request("test", 0, 1)])
    assert columns.num_test == 48 + 32
    assert batch.all_weights[32:].abs().sum() == 0
    assert batch.all_weights[:32, 0].tolist() == [48 / 32] * 32


def _pipeline(dataset: EventBatches) -> Any:
    pipeline = BatchFeed.__new__(BatchFeed)
    pipeline.keys = [table.name for table in dataset.tables]
    pipeline.item = pipeline.share = None
    return pipeline


def _pairs(columns: Columns, positions: Iterable[int]) -> list[tuple[int, int]]:
    """The raw ids of events, which are those of their positions in the tables."""
    rows = columns.column("rows")[[*positions]]
    return [*zip(rows["user"].tolist(), rows["item"].tolist(), strict=True)]


class ThreeOutputs(nn.Module):
    """Chances of a purchase and a click, and stars, by the position of the item."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(1.0))

    def forward(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        first = self.slope * rows["item"][:, 0]
        return torch.stack([first, 2 * first, 3 + first], dim=1)

    def predictions(self, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([output[:, :2].sigmoid(), output[:, 2:]], dim=1)


class OfVectors(rs.TwoSided):
    """The same of vectors of users and items."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.all = ThreeOutputs()
        self.predictions = self.all.predictions

    def user_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        return rows["user"]

    def item_vectors(self, rows: rs.FeatureRows, batch: rs.Inputs) -> torch.Tensor:
        return rows["item"]

    def score_pairs(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.all({"item": items}, None)
        return outputs


class FirstLoss(nn.Module):
    def forward(self, output: torch.Tensor, batch: rs.ModelInput) -> torch.Tensor:
        return (batch.all_weights * output.square()).mean()


@pytest.mark.parametrize("maker", [ThreeOutputs, OfVectors])
def test_each_label_is_measured_on_the_events_that_have_it(
    config: Config, context: RuntimeContext, maker: Any
) -> None:
    with open_data(config, context) as data, Training(data, config, context) as training:
        shapes = {"labels": lambda predictions, labels: float(predictions.shape[1] + labels.shape[1])}
        model = training.shard(maker, loss=FirstLoss(), metrics=shapes)
        evaluator: Any = make_evaluator(BatchFeed(data.loader), data.columns, config, context)
        predictions = evaluator.predict(model.model, "test", 0)
        found = evaluator.test(model.model, 0)
        validated = evaluator.validate(model.model, 0)
        pairs = _pairs(data.columns, data.columns.range_of("test"))
    rows = events().set_index(["user", "item"]).loc[pairs]
    assert predictions.shape == (len(rows), 3)
    has = rows["clicked"].isin([0, 1]).to_numpy()
    wanted = measure_probabilities(predictions[has, 1], rows["clicked"].to_numpy()[has] == 1)
    for name in ("log_loss", "auc", "calibration"):
        assert found[f"clicked_{name}"] == pytest.approx(wanted[name])
    errors = (predictions[:, 2] - rows["stars"]).dropna()
    assert found["stars_rmse"] == pytest.approx(np.sqrt((errors**2).mean()), rel=1e-6)
    assert found["stars_mae"] == pytest.approx(errors.abs().mean(), rel=1e-6)
    assert found["auc"] == measure_probabilities(predictions[:, 0], rows["bought"].to_numpy() == 1)["auc"]
    assert {"clicked_auc", "stars_rmse"} <= validated.values.keys()
    assert found["labels"] == 6


def test_a_model_of_the_first_label_alone_is_taken_and_reported(
    config: Config, context: RuntimeContext, capsys: pytest.CaptureFixture[str]
) -> None:
    with open_data(config, context) as data, Training(data, config, context) as training:
        model = training.shard(make_model)
        evaluator = make_evaluator(BatchFeed(data.loader), data.columns, config, context)
        found = evaluator.test(model.model, 0)
    assert "the model predicts only bought: clicked, stars not evaluated" in capsys.readouterr().out
    assert not {name for name in found.values if name.startswith(("clicked", "stars"))}


def test_another_number_of_outputs_than_labels_is_refused(config: Config, context: RuntimeContext) -> None:
    class Two(ThreeOutputs):
        def predictions(self, output: torch.Tensor) -> torch.Tensor:
            return output[:, :2]

    with open_data(config, context) as data, Training(data, config, context) as training:
        model = training.shard(Two, loss=FirstLoss())
        evaluator = make_evaluator(BatchFeed(data.loader), data.columns, config, context)
        with pytest.raises(
            ValueError, match=r"or 3, of the labels bought, clicked, stars, got the shape \[48, 2\]"
        ):
            evaluator.test(model.model, 0)


def test_labels_of_several_kinds_require_a_model_that_names_its_labels(
    config: Config, context: RuntimeContext
) -> None:
    class Silent(ThreeOutputs):
        predictions = None  # type: ignore[assignment]

    with open_data(config, context) as data, Training(data, config, context) as training:
        model = training.shard(Silent, loss=FirstLoss())
        evaluator = make_evaluator(BatchFeed(data.loader), data.columns, config, context)
        with pytest.raises(ValueError, match=r"labels of several kinds .rating, yes_no. must say"):
            evaluator.test(model.model, 0)


def test_a_weight_may_be_missing_where_its_label_is(config: Config, tmp_path: Path) -> None:
    rows = events()
    rows.loc[rows["clicked"].isna(), "trust"] = np.nan
    rows.to_csv(tmp_path / "events.csv", index=False)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    config = config.replaced(data_path=str(tmp_path))
    columns = open_columns(config)
    assert columns.num_skipped == 0
    batch = EventBatches(columns, config, 0, 1)[Request("train", 0, 0)]
    assert bool(torch.isfinite(batch.more_weights).all())


def test_a_value_of_a_label_without_its_weight_is_refused(config: Config, tmp_path: Path) -> None:
    rows = events()
    rows.loc[rows["clicked"].isin([0, 1]).to_numpy().nonzero()[0][:3], "trust"] = np.nan
    rows.to_csv(tmp_path / "events.csv", index=False)
    (tmp_path / "schema.toml").write_text(SCHEMA)
    with pytest.raises(
        UserError, match=r"3 values of the label clicked must have a weight in the column trust"
    ):
        open_columns(config.replaced(data_path=str(tmp_path)))
