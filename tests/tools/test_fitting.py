"""`recsuite.fit`: from frames to a model, on one process and on two."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

import recsuite
from recsuite.errors import UserError
from recsuite.serving.served import ServedModel
from tests.support.launch import succeeded, torchrun

FLAGS = {"epochs": 1, "batch_size": 256, "embedding_dim": 8, "mlp_dims": (8,)}
SCRIPT = """
import json, sys
import pandas, recsuite

if __name__ == "__main__":
    events, items = (pandas.read_parquet(sys.argv[1] + f"/{name}.parquet") for name in ("events", "items"))
    model = recsuite.fit(events, items=items, epochs=1, batch_size=128, embedding_dim=8, mlp_dims=(8,))
    found = {"scores": model.score(events.head(5)).tolist(), "best": model.recommend(["user-3"], k=4)}
    print("FOUND " + json.dumps(found))
"""


def frames(number: int = 3_000) -> tuple[pandas.DataFrame, pandas.DataFrame]:
    """Events of 60 users and 40 items, whose stars follow the price of the item and the device."""
    draw = np.random.default_rng(0)
    user, item = draw.integers(60, size=number), draw.integers(40, size=number)
    price = np.exp(draw.normal(3, 1, 40)).round(2)
    device = draw.choice(["phone", "desktop"], number)
    stars = (
        3
        + np.where(price[item] < 20, 1, -1)
        + np.where(device == "phone", 1, 0)
        + draw.normal(0, 0.3, number)
    )
    events = pandas.DataFrame(
        {
            "user_id": [f"user-{each}" for each in user],
            "product_id": [f"SKU-{each:02}" for each in item],
            "stars": stars.round().clip(1, 5).astype(int),
            "device": device,
            "timestamp": pandas.Timestamp("2026-11-01") + pandas.to_timedelta(np.arange(number) * 600, "s"),
        }
    )
    ids = [f"SKU-{each:02}" for each in range(40)]
    return events, pandas.DataFrame(
        {"product_id": ids, "name": [f"Thing {each}" for each in ids], "price": price}
    )


@pytest.fixture(scope="module")
def model() -> recsuite.FittedModel:
    events, items = frames()
    return recsuite.fit(events, items=items, **FLAGS)


def test_a_model_of_frames_scores_their_rows_on_the_scale_of_the_labels(model: recsuite.FittedModel) -> None:
    events, _ = frames()
    scores = model.score(events).numpy()
    assert scores.shape == (len(events),)
    assert 1 <= scores.min() < scores.max() <= 5
    assert np.corrcoef(scores, events["stars"])[0, 1] > 0.5
    assert set(model.metrics) == {"rmse", "mae", "auc", "log_loss"}


def test_what_a_user_had_is_known_and_not_recommended(model: recsuite.FittedModel) -> None:
    events, _ = frames()
    had = set(events.loc[events["user_id"] == "user-7", "product_id"])
    ((*found,), (*everything,)) = model.recommend(["user-7", "nobody"], k=40)
    assert {item for item, _ in found} == set(events["product_id"]) - had
    assert {item for item, _ in everything} == set(events["product_id"])


def test_the_coming_event_is_part_of_what_is_scored(model: recsuite.FittedModel) -> None:
    (phone,), (desktop,) = (
        model.recommend(["nobody"], k=1, event={"device": name}) for name in ("phone", "desktop")
    )
    assert phone[0][1] > desktop[0][1] + 0.1
    with pytest.raises(UserError, match="There is no feature devise"):
        model.recommend(["nobody"], event={"devise": "phone"})


def test_a_saved_model_scores_the_same_without_the_tables(
    model: recsuite.FittedModel, tmp_path: Path
) -> None:
    model.save(tmp_path / "served")
    values: dict[str, list[Any]] = {
        "user": ["user-1"],
        "item": ["SKU-05"],
        "device": ["phone"],
        "price": [12.5],
        "hour": [3],
    }
    served = ServedModel.open(tmp_path / "served")
    assert served.score(values).item() == pytest.approx(model.score(values).item(), abs=1e-6)
    with pytest.raises(UserError, match="is there already"):
        model.save(tmp_path / "served")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ({"epoch": 1}, "fit takes no flag epoch .did you mean epochs"),
        ({"data_path": "x"}, "fit takes no flag data_path"),
        ({"epochs": 0}, "--epochs 0"),
    ],
)
def test_a_flag_that_cannot_be_is_one_sentence(flags: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        recsuite.fit(frames(50)[0], **flags)


def test_what_is_no_frame_is_one_sentence() -> None:
    with pytest.raises(UserError, match="events takes a pandas"):
        recsuite.fit([1, 2, 3])


def test_the_same_call_on_two_ranks_gives_every_rank_the_same_model(tmp_path: Path) -> None:
    for name, frame in zip(("events", "items"), frames(), strict=True):
        frame.to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "script.py").write_text(SCRIPT)
    output = succeeded(torchrun(2, tmp_path / "script.py", tmp_path))
    found = [json.loads(line.split("FOUND ")[1]) for line in output.splitlines() if "FOUND " in line]
    assert len(found) == 2
    assert found[0] == found[1]
    assert len(found[0]["best"][0]) == 4


def test_a_good_call_follows_one_that_was_refused() -> None:
    events, items = frames(300)
    with pytest.raises(UserError, match="no rows"):
        recsuite.fit(events.head(0), items=items, **FLAGS)
    assert recsuite.fit(events, items=items, **FLAGS).metrics["rmse"] > 0
