"""A new model each week in an object store: moto's server, with the faults of `support/store.py`.

Where it does not matter what a training learns, its reports are written in its place.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from example import make_model
from recsuite.errors import UserError
from recsuite.extras import retrain as program
from recsuite.extras.retrain import FINAL, LOCK, PROMOTED, VERDICT, claimed, promoted_in
from recsuite.extras.stores.objects import FsspecPath
from recsuite.extras.stores.urls import filesystem
from recsuite.places import folder_at
from recsuite.serving.followers import wait_for_first
from recsuite.serving.served import Follower, ServedModel
from tests.support.launch import EXAMPLE, python, started, succeeded
from tests.support.store import BUCKET, KILLS, SECRET, Store, ended_after
from tests.support.weeks import SMALL, retrain, write_weeks


@pytest.fixture
def models(store: Store, request: pytest.FixtureRequest) -> Any:
    """A place of the test alone."""
    return folder_at(f"s3://{BUCKET}/{re.sub('[^a-z0-9]', '-', request.node.name.lower())}")


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weeks(tmp_path_factory.mktemp("weeks") / "shop", 1)


def runs_in(models: Any) -> list[str]:
    return [path.name for path in models.iterdir() if path.name.startswith("run-")]


def test_a_better_model_is_promoted_and_followed(models: FsspecPath, store: Store, tmp_path: Path) -> None:
    shop = write_weeks(tmp_path / "shop", 1)
    output = succeeded(retrain(shop, models, env=store.env))
    assert f"promoted {models}/run-000001: it is the first" in output
    wait_for_first(folder_at(f"{models}/{PROMOTED}"))
    follower = Follower(f"{models}/{PROMOTED}", model=make_model)
    before = follower.model.run
    assert not follower.refresh()
    write_weeks(shop, 2)
    output += succeeded(retrain(shop, models, "--warm", env=store.env))
    verdict = json.loads((models / "run-000002" / VERDICT).read_text())
    assert verdict["new"] < verdict["promoted"]
    assert f"began with {models}/run-000001/step-" in output
    assert (
        f"promoted {models}/run-000002: test RMSE {verdict['new']:.4f} and {verdict['promoted']:.4f}"
        in output
    )
    assert (models / PROMOTED).is_file()
    assert (models / PROMOTED).resolve() == models / "run-000002" / FINAL
    # The link changes when all else is written.
    assert {"best", "latest", "report", "before"} <= {path.name for path in (models / "run-000002").iterdir()}
    changes = [
        key for method, key, _ in store.requests if method == "PUT" and key.startswith(f"/{models.url[5:]}/")
    ]
    assert changes[-1].endswith(f"/{PROMOTED}")
    assert follower.refresh()
    assert follower.model.run != before
    assert follower.model.knows("item", "p39")
    # What follows or reads the link gets the new run.
    data = ("--data_path", shop)
    output += succeeded(python(EXAMPLE, "--load", models / PROMOTED, *data, env=store.env))
    assert f"loaded {models}/run-000002/{FINAL}/step-" in output
    score = ("--users", "all", "--k", 3, "--output", tmp_path / "best.parquet")
    command = (EXAMPLE.parent / "score.py", "--save_dir", models / PROMOTED, *data, *score)
    output += succeeded(python(*command, env=store.env))
    assert (tmp_path / "best.parquet").exists()
    assert SECRET not in output


# --- without trainings ---


def reports(
    monkeypatch: pytest.MonkeyPatch, new: float, old: float, after: Callable[[str], Any] = str
) -> None:
    """Write the reports of trainings and tests in their place. after: called with the name of each."""

    def launch(flags: Any, script: str, words: Any) -> int:
        if "--report_dir" not in words:
            # The training on all events.
            assert {"--split=none", "--epochs=2", "--batch_size=64"} <= {*words}
            return 0
        report = folder_at(words[[*words].index("--report_dir") + 1])
        is_test = "--other_data" in words
        name = "test.json" if is_test else "metrics.json"
        content = {
            "main_metric": "rmse",
            "metrics": {"rmse": "RMSE"},
            "test": {"rmse": old if is_test else new},
        }
        data = {"data": {"num_test": 7}, "baselines": {}, "drift": {}, "test_digest": "the same"}
        config = {"config": {"task": "rating", "test_fraction": 1.0, "batch_size": 64}}
        found = {**content, **data, **config, "events": "stars", "test_epoch": 2}
        of_users = [[float(content["test"]["rmse"]) ** 2] * 512, [1.0] * 512]  # type: ignore[index]
        groups = {"test": of_users, "segments": {}}
        for file, written in (("groups.json", groups), (name, found)):
            (report / file).put(json.dumps(written).encode())  # type: ignore[attr-defined]
        after(name)
        return 0

    monkeypatch.setattr(program, "launch", launch)


def call(shop: Path, models: object, *flags: object) -> int:
    return program.retrain(*program.parse([*map(str, ("--save_dir", models, "--data_path", shop, *flags))]))


def test_a_worse_model_is_not_promoted_and_old_runs_are_removed_but_the_promoted_one(
    models: FsspecPath, shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (models / "run-000001" / "other.txt").put(b"of another program")
    reports(monkeypatch, new=0.9, old=1.0)
    assert call(shop, models) == 0
    assert (models / PROMOTED).resolve() == models / "run-000002" / FINAL
    reports(monkeypatch, new=1.1, old=1.0)
    for _ in range(3):
        assert call(shop, models, "--keep_runs", 1) == 0
    assert f"did not promote {models}/run-000005: test RMSE 1.1000 and 1.0000" in capsys.readouterr().out
    assert (models / PROMOTED).resolve() == models / "run-000002" / FINAL
    assert runs_in(models) == ["run-000001", "run-000002", "run-000005"]
    # Also the newest run, and its number is not used again.
    call(shop, models, "--keep_runs", 0)
    call(shop, models)
    assert runs_in(models) == ["run-000001", "run-000002", "run-000007"]
    assert (models / "run-000001" / "other.txt").exists()


@pytest.mark.parametrize("when", ["metrics.json", "test.json", VERDICT])
def test_a_retrain_that_was_overtaken_promotes_nothing(
    models: FsspecPath, shop: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports(monkeypatch, new=1.0, old=2.0)
    call(shop, models)
    newer: list[Any] = []

    def overtake(name: str) -> None:
        if name == when and not newer:
            newer.append(program.begin(models, contextlib.ExitStack())[0])  # type: ignore[arg-type]

    def write(path: Any, content: bytes) -> None:
        path.put(content)
        overtake(path.name)

    reports(monkeypatch, new=0.5, old=1.0, after=overtake)
    monkeypatch.setattr(program, "write_whole", write)
    sentence = f"at work in {models}, on run-000003, so run-000002 is not promoted; wait for it."
    with pytest.raises(UserError, match=sentence):
        call(shop, models)
    assert (models / PROMOTED).resolve() == models / "run-000001" / FINAL
    assert runs_in(models) == ["run-000001", "run-000003"]
    call(shop, models)
    assert (models / PROMOTED).resolve() == models / "run-000004" / FINAL


def test_two_that_begin_at_the_same_time_get_runs_of_their_own(
    models: FsspecPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = claimed(models)
    (models / LOCK).unlink()
    monkeypatch.setattr(FsspecPath, "exists", lambda path: False)
    assert [first.name, claimed(models).name] == ["run-000001", "run-000002"]


@pytest.mark.parametrize(("kind", "every"), KILLS)
def test_a_store_that_fails_after_any_request_leaves_the_promoted_model(
    models: Any, shop: Path, store: Store, kind: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a store, a kill at any instant is the end of requests after any one of them."""
    models = folder_at(models.url.replace("s3", kind, 1))
    begun = models / "begun"
    for new in (3.0, 2.0):
        reports(monkeypatch, new=new, old=2.5)
        call(shop, begun)
    # As after a kill.
    (claimed(begun) / "file").put(b"")  # type: ignore[attr-defined]
    fs, path = filesystem(models.url)
    reports(monkeypatch, new=1.0, old=2.0)
    number, finished, promoted = 0, False, []
    while not finished:
        here: Any = models / f"at-{number}"
        fs.copy(f"{path}/begun/", f"{path}/at-{number}/", recursive=True)
        sentence = ""
        with ended_after(number, models, store) as fault:
            try:
                call(shop, here, "--keep_runs", 0)
            except UserError as error:
                sentence = str(error)
        finished = fault.number == 10**9
        assert finished or "this login is not allowed to do it, or has expired" in sentence
        assert "Fix: " in sentence or not sentence
        run = promoted_in(here)
        assert run is not None
        assert (run / VERDICT).exists()
        promoted.append(run.name)
        assert call(shop, here, "--keep_runs", 0, "--margin", -1) == 0
        assert runs_in(here) == [promoted_in(here).name]  # type: ignore[union-attr]
        number += every
    # It changes once: what is after it removes old runs.
    assert promoted == sorted(promoted)
    assert {*promoted} == {"run-000002", "run-000004"}
    assert number > 50


def test_what_cannot_be_is_one_sentence(
    models: FsspecPath, shop: Path, monkeypatch: pytest.MonkeyPatch, store: Store
) -> None:
    reports(monkeypatch, new=1.0, old=2.0)
    with pytest.raises(
        UserError, match="Cannot write to --save_dir s3://no-such-bucket/models: The specified"
    ):
        call(shop, "s3://no-such-bucket/models")
    (models / PROMOTED).put(b"no link")
    with pytest.raises(UserError, match="promoted must be a link to a run, and is none; move it away"):
        call(shop, models)
    (models / PROMOTED).link_to("run-000009")
    call(shop, models)
    assert promoted_in(models) == models / "run-000002"  # type: ignore[arg-type]
    monkeypatch.setattr(program, "launch", lambda *_: 0)
    with pytest.raises(UserError, match=r"Cannot finish .*/run-000003: it is not there\. Fix: call retrain"):
        call(shop, models)


# --- with two trainings at the same time ---


@pytest.mark.soak
def test_a_newer_retrain_beside_a_training_ends_the_older_one_with_a_sentence(
    models: FsspecPath, store: Store, tmp_path: Path
) -> None:
    shop = write_weeks(tmp_path / "shop", 1)
    succeeded(retrain(shop, models, env=store.env))
    write_weeks(shop, 2)
    words = ("--save_dir", models, "--data_path", shop, *SMALL, "--epochs", 40)
    command = [sys.executable, "-m", "recsuite.extras.retrain", *map(str, words)]
    with started(command, env=store.env) as older:
        deadline = time.monotonic() + 300
        while not (models / "run-000002" / "latest").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        output = succeeded(retrain(shop, models, env=store.env))
        said, errors = older.communicate(timeout=600)
    assert older.returncode == 2
    assert f"Another retrain is at work in {models}, on run-000003, so run-000002 is not promoted" in errors
    assert "Traceback" not in said + errors
    assert f"removing {models}/run-000002, which was not finished" in output
    assert runs_in(models) == ["run-000001", "run-000003"]
    assert (models / PROMOTED).resolve() == models / "run-000003" / FINAL
    ServedModel.open(f"{models}/{PROMOTED}", model=make_model)
