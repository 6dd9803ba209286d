"""Models whose tables take ids in, as they are served: users and items come and go with the deltas."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from example import make_model
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.schema import SCHEMA_FILE
from recsuite.errors import UserError
from recsuite.serving.export import export
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import IdTable
from tests.support.meanwhile import meanwhile
from tests.support.published import copied, publish_state, reseal, state
from tests.support.raw_values import raw_test_values

STEPS = (0, 2, 4, 6, 8, 10, 12, 14, 16)


@pytest.fixture(scope="module")
def dumps(dynamic_folder: Path) -> Path:
    return dynamic_folder / "dumps"


@pytest.fixture(scope="module")
def values(synthetic_folder: Path) -> dict[str, list[Any]]:
    return raw_test_values(synthetic_folder)


def ids_at(dumps: Path, step: int, feature: str) -> set[int]:
    """Return the ids with a row after a step, from the files."""
    table = ServedModel.open(state(dumps, step), model=make_model).snapshot.tables[feature]
    assert isinstance(table, IdTable)
    return {*table.ids.tolist()}


def test_scores_equal_those_of_the_training(dynamic_folder: Path, values: dict[str, list[Any]]) -> None:
    predictions = np.load(dynamic_folder / "predictions.npz")
    assert sorted(map(int, predictions)) == [*STEPS]
    for step in STEPS:
        model = ServedModel.open(state(dynamic_folder / "dumps", step), model=make_model)
        scores = model.score(values).numpy()
        assert np.abs(scores - predictions[str(step)]).max() <= 1e-6, step
    # Not all of the test are known.
    known = model.snapshot.known("user", values["user"])
    assert 0 < int(known.sum()) < len(known)


def test_deltas_applied_in_place_equal_opening_the_checkpoint_again(
    dumps: Path, values: dict[str, list[Any]]
) -> None:
    few = {name: given[:500] for name, given in values.items()}
    for base, steps in ((0, (2, 4, 6)), (8, (10, 12, 14))):
        model = ServedModel.open(state(dumps, base), model=make_model)
        for step in steps:
            assert model.apply(state(dumps, step))
            assert not model.apply(state(dumps, step))
            anew = ServedModel.open(state(dumps, step), model=make_model)
            assert torch.equal(model.score(few), anew.score(few))
            assert model.recommend([1, 2, 3]) == anew.recommend([1, 2, 3])


def test_a_new_user_of_a_delta_is_known_after_a_refresh(dumps: Path, tmp_path: Path) -> None:
    came = sorted(ids_at(dumps, 10, "user") - ids_at(dumps, 8, "user"))
    left = sorted(ids_at(dumps, 8, "user") - ids_at(dumps, 10, "user"))
    follower = Follower(copied(dumps, tmp_path / "dumps", 8), model=make_model, checkpoint="latest")
    model = follower.model
    before = model.recommend([came[0], -1])
    # Whoever is unknown is recommended what any other is.
    assert before[0] == before[1]
    assert [model.knows("user", user) for user in (came[0], left[0])] == [False, True]
    publish_state(dumps, 10, follower.save_dir)
    assert follower.refresh()
    assert [model.knows("user", user) for user in (came[0], left[0])] == [True, False]
    mine, others, leaver = model.recommend([came[0], -1, left[0]])
    assert mine != others == leaver


def test_a_new_item_is_recommended_and_an_evicted_one_is_not(dumps: Path) -> None:
    model = ServedModel.open(state(dumps, 8), model=make_model)
    came_ever, left_ever = set(), set()
    everything = sorted({item for step in STEPS for item in ids_at(dumps, step, "movie")})
    described = ServedModel.open(state(dumps, 8), model=make_model)
    described.describe_items({"movie": [*map(float, reversed(everything)), -1]})
    for step in (10, 12, 14):
        before, live = ids_at(dumps, model.progress.step, "movie"), ids_at(dumps, step, "movie")
        for each in (model, described):
            each.apply(state(dumps, step))
            (found,) = each.recommend([1], k=10_000)
            assert sorted(item for item, _ in found) == sorted(live)
            assert {type(item) for item, _ in found} == {int}
        came_ever |= live - before
        left_ever |= before - live
    assert came_ever
    assert left_ever
    gone = min(left_ever - live)
    with pytest.raises(UserError, match=f"movie {gone}"):
        model.similar_items([gone])
    assert model.recommend([1], candidates=[gone]) == [[]]
    assert len(model.similar_items([min(live)], k=3)[0]) == 3


def test_serving_inserts_no_ids(dumps: Path, values: dict[str, list[Any]]) -> None:
    model = ServedModel.open(dumps, model=make_model)
    tables = model.snapshot.tables
    before = {name: each.ids.clone() for name, each in tables.items() if isinstance(each, IdTable)}
    assert {"user", "movie", "history"} <= before.keys()
    strangers: dict[str, list[Any]] = {"user": [-5, 2**62], "movie": [-9, -8], "history": [[-1], [-2, -3]]}
    scores = model.score({**strangers, "history_ratings": [[4.0], [4.0, 4.0]]})
    nobody: dict[str, list[Any]] = {"user": [None, float("nan")], "movie": [None, None]}
    nobody |= {"history": [[None], [None, None]], "history_ratings": [[4.0], [4.0, 4.0]]}
    unknown = model.score(nobody)
    assert torch.equal(scores, unknown)
    assert not torch.equal(scores, model.score({"user": values["user"][:2], "movie": values["movie"][:2]}))
    model.recommend([-5], events=[[(-9, 3.0)]])
    for name, ids in before.items():
        after = model.snapshot.tables[name]
        assert isinstance(after, IdTable)
        assert torch.equal(after.ids, ids)


def test_an_export_serves_the_same_scores(dumps: Path, values: dict[str, list[Any]], tmp_path: Path) -> None:
    save_dir = copied(dumps, tmp_path / "dumps", 12)
    export(CheckpointConfig(save_dir=str(save_dir), checkpoint="latest"), tmp_path / "exported", make_model)
    exported = ServedModel.open(tmp_path / "exported", model=make_model)
    whole = ServedModel.open(state(dumps, 12), model=make_model)
    assert torch.equal(exported.score(values), whole.score(values))
    assert exported.recommend([1, 2]) == whole.recommend([1, 2])


def test_a_damaged_delta_leaves_the_model_as_it_was(
    dumps: Path, values: dict[str, list[Any]], tmp_path: Path
) -> None:
    model = ServedModel.open(state(dumps, 8), model=make_model)
    before = model.score(values)
    delta = tmp_path / "delta-000000010"
    shutil.copytree(state(dumps, 10), delta)
    tensors = load_file(delta / "part-00001.safetensors")
    del tensors["dynamic.user.gone"]
    save_file(tensors, delta / "part-00001.safetensors")
    reseal(delta)
    with pytest.raises(UserError, match=str(delta)) as found:
        model.apply(delta)
    assert "\n" not in str(found.value)
    assert torch.equal(model.score(values), before)


def test_a_schema_with_other_dynamic_tables_is_refused(dumps: Path, tmp_path: Path) -> None:
    base = tmp_path / "step-000000008"
    shutil.copytree(state(dumps, 8), base)
    text = (base / SCHEMA_FILE).read_text()
    (base / SCHEMA_FILE).write_text(text.replace('"ids": "dynamic"', '"ids": "vocabulary"', 1))
    reseal(base)
    with pytest.raises(UserError, match=f"{base} has the dynamic tables age, .*, and its schema names"):
        ServedModel.open(base, model=make_model)


def test_requests_during_deltas_use_one_snapshot(
    dumps: Path, values: dict[str, list[Any]], tmp_path: Path
) -> None:
    few = {name: given[:300] for name, given in values.items()}
    wanted, best = {}, {}
    for step in STEPS[1:]:
        model = ServedModel.open(state(dumps, step), model=make_model)
        wanted[step], best[step] = model.score(few), model.recommend([1, 2], k=5)
    follower = Follower(copied(dumps, tmp_path / "dumps", 2), model=make_model, checkpoint="latest")
    seen: list[torch.Tensor] = []
    lists: list[Any] = []

    def ask() -> None:
        seen.append(follower.model.score(few))
        lists.append(follower.model.recommend([1, 2], k=5))

    with meanwhile(ask, 2):
        for step in STEPS[2:]:
            publish_state(dumps, step, follower.save_dir)
            assert follower.refresh()
            number, deadline = len(seen), time.monotonic() + 100
            while len(seen) < number + 3:
                assert time.monotonic() < deadline
                time.sleep(0.001)
    of_steps = [[step for step, scores in wanted.items() if torch.equal(scores, found)] for found in seen]
    assert all(of_steps), "scores of no checkpoint"
    assert {step for steps in of_steps for step in steps} >= {*STEPS[2:]}
    assert all(found in best.values() for found in lists)
