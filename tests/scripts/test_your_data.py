"""People's own tables, end to end, on a shop of which it is known what there is to learn."""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.tables.description import read_schema, write_schema
from recsuite.datasets.tables.proposal import propose
from tests.support.launch import EXAMPLE, ROOT, python, read_json, succeeded, torchrun

# The steps are those of one process with batches of 1,024.
GLOBAL_BATCH = 1_024
NUMBERS, OF_EVENTS = {"price"}, {"device", "weekday", "hour"}
# Of what an effect is worth to whoever knows it, a model that has to learn it from 39,000 ratings finds this.
FOUND = 0.5
# Of the eight that are the default, which the walk of docs/your_data.md trains: what is planted shows sooner.
EPOCHS = ("--epochs", 5)
# For claims that hold of any number of events.
FEW = ("--events", "10000")
Shops = Callable[..., Path]


@pytest.fixture(scope="module")
def shops(tmp_path_factory: pytest.TempPathFactory) -> Shops:
    """Writes a shop, each once: flags of the script -> its folder."""
    written: dict[tuple[str, ...], Path] = {}

    def write(*flags: str) -> Path:
        if flags not in written:
            written[flags] = tmp_path_factory.mktemp("shops") / "shop"
            succeeded(python(ROOT / "benchmarks" / "shop.py", written[flags], *flags))
            schema = propose(written[flags]).path
            # The device is known before the label, which a guess cannot know.
            switched = re.sub(
                r"^# (\[features.device\])((?:\n# .*)+)", _switched, schema.read_text(), flags=re.M
            )
            schema.write_text(switched)
        return written[flags]

    return write


def _switched(section: re.Match[str]) -> str:
    return section[0].removeprefix("# ").replace("\n# ", "\n")


def trained(folder: Path, report: Path, num_ranks: int = 1, *flags: object) -> Any:
    """What a training on a folder of tables reports."""
    batch = GLOBAL_BATCH // num_ranks
    command = [EXAMPLE, "--data_path", folder, "--batch_size", batch, *flags, "--report_dir", report]
    succeeded(torchrun(num_ranks, *command, timeout=250) if num_ranks > 1 else python(*command, timeout=250))
    return read_json(report / "metrics.json")


def without(folder: Path, features: set[str], other: Path) -> Path:
    """A copy of a shop whose schema.toml does not name some features."""
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns(".*"))
    schema = read_schema(folder / "schema.toml")
    assert features <= {*schema.features}
    left = {name: feature for name, feature in schema.features.items() if name not in features}
    (other / "schema.toml").unlink()
    write_schema(dataclasses.replace(schema, features=left), other / "schema.toml")
    return other


@pytest.mark.soak
def test_numbers_and_features_of_the_event_find_what_was_planted(shops: Shops, tmp_path: Path) -> None:
    folder = shops()
    oracle = read_json(folder / "oracle.json")
    full = trained(folder, tmp_path / "full", 1, *EPOCHS)["test"]["rmse"]
    for name, features in (("without_numbers", NUMBERS), ("without_events", OF_EVENTS)):
        poorer = without(folder, features, tmp_path / name)
        found = trained(poorer, tmp_path / f"{name}_report", 1, *EPOCHS)
        planted = oracle[name] - oracle["all"]
        assert FOUND * planted < found["test"]["rmse"] - full < 1.1 * planted, name
        # Nothing that knows as little can be better.
        assert found["test"]["rmse"] > oracle[name]
    assert oracle["all"] < full < oracle["without_numbers"]


@pytest.mark.soak
def test_two_processes_learn_as_much_as_one(shops: Shops, tmp_path: Path) -> None:
    shop = shops(*FEW)
    one, two = (trained(shop, tmp_path / str(ranks), ranks, "--epochs", 2) for ranks in (1, 2))
    assert one["epochs"][0]["train_loss"] == pytest.approx(two["epochs"][0]["train_loss"], abs=1e-4)
    assert one["test"]["rmse"] == pytest.approx(two["test"]["rmse"], abs=0.01)


def test_packed_csv_gives_the_columns_of_parquet(shops: Shops) -> None:
    files = []
    for flags in ((), ("--format", "csv.gz")):
        columns = open_columns(Config.of(data_path=str(shops(*FEW, *flags))))
        files.append(columns.files)
        assert columns.notes
    assert files[0] == files[1]


@pytest.mark.soak
def test_yes_and_no_are_predicted_as_probabilities_better_than_biases_do(
    shops: Shops, tmp_path: Path
) -> None:
    folder = shops("--label", "yes_no")
    report = trained(folder, tmp_path, 1, *EPOCHS)
    oracle = read_json(folder / "oracle.json")
    found, biases = (each["log_loss"] for each in (report["test"], report["baselines"]["biases"]))
    assert report["config"]["task"] == "response"
    assert oracle["all"] < found < oracle["nothing"] - FOUND * (oracle["nothing"] - oracle["all"])
    assert found < biases - 0.05


@pytest.mark.soak
def test_clicks_are_ranked_better_than_by_popularity_by_what_was_planted(
    shops: Shops, tmp_path: Path
) -> None:
    folder = shops("--label", "clicks")
    report = trained(folder, tmp_path)
    oracle = read_json(folder / "oracle.json")
    popularity, found = (each["ndcg_at_10"] for each in (report["baselines"]["popularity"], report["test"]))
    assert report["config"]["task"] == "ranking"
    # Popularity is a count of clicks, so it is known to the last digit.
    assert popularity == pytest.approx(oracle["nothing"], abs=2e-6)
    assert FOUND * (oracle["all"] - popularity) < found - popularity < oracle["all"] - popularity


def test_a_click_that_was_repeated_counts_as_often_where_the_last_one_does(
    shops: Shops,
) -> None:
    folder = shops(*FEW, "--label", "clicks")
    events = pd.read_parquet(folder / "events.parquet")
    clicks = events.groupby(["user_id", "product_id"]).size()
    columns = open_columns(Config.of(data_path=str(folder), duplicates="last"))
    # Positions are those of the sorted ids.
    users = np.sort(events["user_id"].unique())
    items = np.sort(pd.read_parquet(folder / "items.parquet")["product_id"])
    rows = columns.column("rows")
    user, item = rows["user"], rows["item"]
    expected = clicks.loc[pd.MultiIndex.from_arrays([users[user], items[item]])].to_numpy()
    assert len(expected) == len(clicks)
    assert expected.max() > 2
    expected_mean = expected[: columns.num_train].mean()
    assert rows["weight"] == pytest.approx(expected / expected_mean, rel=1e-5)
