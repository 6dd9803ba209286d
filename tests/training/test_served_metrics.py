"""The metrics that a training reports are those of what is served."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pandas
import pytest

import recsuite
from example import make_loss, make_model
from recsuite.extras.chain.cases import cases_of_models
from recsuite.serving.served import ServedModel


def world_with_repeats(folder: Path) -> Path:
    """Clicks of users who come back to few items."""
    draw = np.random.default_rng(0)
    users = draw.integers(0, 40, 1500)
    again = (users * 7 + draw.integers(0, 3, 1500)) % 30
    items = np.where(draw.random(1500) < 0.7, again, draw.integers(0, 30, 1500))
    times = 1_600_000_000 + 60 * np.arange(1500)
    lines = [f"{user},{item},{time}" for user, item, time in zip(users, items, times, strict=True)]
    (folder / "events.csv").write_text("\n".join(["user_id,item_id,timestamp", *lines]))
    (folder / "schema.toml").write_text(
        '[files]\nevents = "events.csv"\n[user]\ncolumn = "user_id"\n[item]\ncolumn = "item_id"\n'
        '[label]\nkind = "clicks"\n[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n'
    )
    return folder


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ({}, "allow"),
        ({"task": "sequence", "seen": "exclude"}, "exclude"),
    ],
)
def test_reported_metrics_of_data_with_repeated_pairs_equal_those_of_the_served_model(
    flags: dict[str, str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, dumps = world_with_repeats(tmp_path), tmp_path / "dumps"
    sizes = {"epochs": 1, "batch_size": 256, "embedding_dim": 8, "mlp_dims": (), "history": 20}
    fitted = recsuite.fit(
        data,
        model=make_model,
        loss=make_loss,
        duplicates="keep",
        save_dir=dumps,
        validation_fraction=0.05,
        **sizes,
        **flags,
    )
    guessed = r"--seen allow: [\d.]+% of the training clicks repeat an item of their user \(limit: 10%\)"
    assert bool(re.search(guessed, capsys.readouterr().out)) == ("seen" not in flags)
    # The checkpoint tells the rule, and so does an export.
    fitted.save(tmp_path / "export")
    assert ServedModel.open(tmp_path / "export", model=make_model).snapshot.schema.seen == rule
    model = ServedModel.open(dumps, model=make_model)
    _, test = cases_of_models([model], str(data))
    assert test.metrics(model.recommend) == pytest.approx(dict(fitted.metrics), abs=1e-12)
    # Without a word about it, a user is shown what the rule says.
    (of_all, by_rule, unseen) = (
        {item for item, _ in model.recommend([test.values["user"][0]], 30, **asked)[0]}
        for asked in ({"exclude": None}, {}, {"exclude": "seen"})
    )
    assert unseen < of_all
    assert by_rule == (of_all if rule == "allow" else unseen)


@pytest.mark.parametrize("vocabulary", ["fixed", "dynamic"])
def test_items_that_nobody_chose_change_no_metric_and_are_in_no_list(vocabulary: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    events = pandas.DataFrame(
        {"user": draw.integers(0, 80, 700), "item": 3 * np.minimum(99, draw.geometric(0.04, 700))}
    ).drop_duplicates()
    events["timestamp"] = 1_600_000_000 + 60 * np.arange(len(events))
    sizes = {"epochs": 2, "embedding_dim": 8, "split": "random", "vocabulary": vocabulary, "batch_size": 128}
    sizes |= {"new_items": "exclude"}
    found, lists = [], []
    for number, some in (("large", np.arange(0, 1200)), ("cut", np.unique(events["item"]))):
        items = pandas.DataFrame({"item": some, "colour": np.array(["red", "blue", "green"])[some % 3]})
        folder = tmp_path / number
        flags = {**sizes, "task": "ranking", "report_dir": folder / "report", "save_dir": folder / "dumps"}
        found.append(recsuite.fit(events, model=make_model, loss=make_loss, items=items, **flags).metrics)
        lists.append(json.loads((folder / "report" / "metrics.json").read_text())["lists"])
    assert found[0] == found[1]
    assert lists[0].pop("novelty") == pytest.approx(lists[1].pop("novelty"), abs=1e-9)
    assert lists[0] == lists[1]
    trained = {*ServedModel.open(tmp_path / "large" / "dumps", model=make_model).items().ids}
    # Validation has some of them.
    assert 0 < lists[0]["missed"] <= (~events["item"].isin(trained)).sum()
    assert lists[0]["ranked"] == len(trained)
    assert {int(item) for item, _ in lists[0]["most"]} <= trained
