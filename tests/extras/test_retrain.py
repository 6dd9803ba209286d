"""A new model each week: promoted if it is better, and whatever goes wrong leaves the old one served."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from example import make_model
from recsuite.checkpoint.folder import set_link
from recsuite.config.config import Config
from recsuite.errors import UserError
from recsuite.extras.retrain import (
    FINAL,
    LOCK,
    PROMOTED,
    VERDICT,
    begin,
    check_comparable,
    compare,
    parse,
    promoted_in,
)
from recsuite.files import held
from recsuite.serving.served import Follower, ServedModel
from tests.support.launch import EXAMPLE, python, read_json, started, succeeded, torchrun
from tests.support.weeks import SCHEMA, SMALL, retrain, shop, write_weeks


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the data of two weeks and the model of the first."""
    folder = tmp_path_factory.mktemp("weeks")
    output = succeeded(retrain(write_weeks(folder / "shop", 1), folder / "models"))
    assert f"promoted {folder / 'models' / 'run-000001'}: it is the first" in output
    write_weeks(folder / "shop", 2)
    return folder


@pytest.fixture
def weeks(first: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(first, tmp_path / "weeks", symlinks=True))


def promoted(weeks: Path) -> str:
    """Name of the promoted run; its model is that of all events."""
    model = (weeks / "models" / PROMOTED).resolve()
    assert model.name == FINAL
    return model.parent.name


def test_a_better_model_is_promoted_and_followed(weeks: Path) -> None:
    models = weeks / "models"
    follower = Follower(models / PROMOTED, model=make_model)
    before = follower.model.run
    output = succeeded(retrain(weeks / "shop", models))
    assert promoted(weeks) == "run-000002"
    verdict = read_json(models / "run-000002" / VERDICT)
    assert verdict["new"] < verdict["promoted"]
    assert f"test RMSE {verdict['new']:.4f} and {verdict['promoted']:.4f}, new and promoted" in output
    assert "| newest events and training |" in output
    # The model that is served has learned the events of the test too.
    sizes = r"([\d,]+) stars for training, ([\d,]+) for validation, ([\d,]+) for the test \(--split"
    tested, *_, all_events = re.findall(sizes, output)
    assert int(all_events[0].replace(",", "")) == sum(int(size.replace(",", "")) for size in tested)
    # A training learns anew unless --warm is given.
    assert "began with" not in output
    assert follower.refresh()
    assert follower.model.run != before
    # The first week's model knows no item of the second week, and is measured by what it is served with.
    assert not ServedModel.open(models / "run-000001", model=make_model).knows("item", "p39")
    assert follower.model.knows("item", "p39")


def test_a_worse_model_is_not_promoted(weeks: Path) -> None:
    frame = shop()
    # A bad week: what the training sees is noise, and the newest events are right.
    known = frame.index < len(frame) * 2 // 3 * 0.8
    frame.loc[known, "stars"] = np.random.default_rng(1).integers(1, 6, known.sum()).astype(float)
    output = succeeded(retrain(write_weeks(weeks / "shop", 2, frame), weeks / "models"))
    assert promoted(weeks) == "run-000001"
    assert f"did not promote {weeks / 'models' / 'run-000002'}: test RMSE " in output
    assert f"{weeks / 'models' / 'run-000001'} stays promoted" in output
    assert not read_json(weeks / "models" / "run-000002" / VERDICT)["is_better"]


@pytest.mark.soak
def test_a_warm_ranking_begins_with_the_rows_of_the_promoted_model(weeks: Path) -> None:
    ranking = ("--task", "ranking", "--split", "time", "--margin", "-1", "--keep_runs", "0")
    shutil.rmtree(weeks / "models")
    succeeded(retrain(write_weeks(weeks / "shop", 1), weeks / "models", *ranking))
    output = succeeded(retrain(write_weeks(weeks / "shop", 2), weeks / "models", *ranking, "--warm"))
    assert f"began with {weeks / 'models' / 'run-000001'}" in output
    assert "new values: " in output
    assert "promoted" in output
    # New values are unknown to a server, so nothing that is drawn may count.
    write_weeks(weeks / "shop", 3)
    tests = []
    for seed in (0, 1):
        report = weeks / f"seed-{seed}"
        newer = ("--data_path", weeks / "shop", "--task", "ranking", "--seed", seed, "--report_dir", report)
        run = weeks / "models" / promoted(weeks)
        output = succeeded(torchrun(1, EXAMPLE, "--load", run, "--other_data", *newer))
        assert re.search(r"new values: [\d,]+ of ", output)
        tests.append(read_json(report / "test.json")["test"])
    assert tests[0] == tests[1]
    # Only the promoted run is left.
    assert [path.name for path in (weeks / "models").glob("run-*")] == [promoted(weeks)] == ["run-000002"]


def test_what_fails_or_is_killed_leaves_the_promoted_model(weeks: Path) -> None:
    models = weeks / "models"
    failed = retrain(weeks / "shop", models, "--lr", "1e30")
    assert failed.returncode == 2
    assert "the training failed with status 2" in failed.stderr + failed.stdout
    assert promoted(weeks) == "run-000001"
    words = ("--nproc_per_node", 1, "--save_dir", models, "--data_path", weeks / "shop", *SMALL)
    with started([sys.executable, "-m", "recsuite.extras.retrain", *map(str, words)]) as process:
        deadline = time.monotonic() + 90
        while not [*(models / "run-000003").glob("step-*")] and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.wait(30)
        # Its training ends with it.
        while names_of_processes(str(models)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert names_of_processes(str(models)) == []
    # The system takes a moment to end a process that has no name any more, and holds its lock until then.
    with held(models / LOCK, "the killed retrain still runs", deadline=60):
        pass
    assert promoted(weeks) == "run-000001"
    ServedModel.open(models / PROMOTED, model=make_model)
    output = succeeded(retrain(weeks / "shop", models))
    assert f"removing {models / 'run-000003'}, which was not finished" in output
    # No number is used again: what is left of the killed one may still write into its run.
    assert promoted(weeks) == "run-000004"


def test_a_folder_is_taken_until_the_last_rank_of_a_killed_retrain_has_ended(tmp_path: Path) -> None:
    # As a retrain starts its training, but the ranks do not die with it.
    script = (
        "import contextlib, pathlib, sys, types\n"
        "from recsuite.extras import retrain\n"
        "retrain.die_with_parent = lambda: None\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "retrain.shared_folder = lambda: folder\n"
        "with contextlib.ExitStack() as stack:\n"
        "    run, lock = retrain.begin(folder, stack)\n"
        "    flags = types.SimpleNamespace(nproc_per_node='2', lock=lock)\n"
        "    retrain.launch(flags, 'rank.py', [])\n"
    )
    scripts = tmp_path / "example"
    scripts.mkdir()
    (scripts / "rank.py").write_text(
        "import os, pathlib, time\n"
        "ready = pathlib.Path(__file__).with_name(f'ready.{os.environ[\"RANK\"]}')\n"
        "ready.write_text(f'{os.getpid()} {os.getppid()}')\n"
        "time.sleep(300)\n"
    )
    ready = [scripts / f"ready.{rank}" for rank in range(2)]
    with started([sys.executable, "-c", script, str(tmp_path)]) as process:
        deadline = time.monotonic() + 90
        while not all(each.exists() and each.read_text() for each in ready):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ranks, (launcher, _) = zip(*([*map(int, each.read_text().split())] for each in ready), strict=True)
        for number in (process.pid, launcher):
            os.kill(number, signal.SIGKILL)
        process.wait(30)
        for rank in ranks:
            with (
                contextlib.ExitStack() as stack,
                pytest.raises(UserError, match="Another retrain, or a training that it has started, is at"),
            ):
                begin(tmp_path, stack)
            os.kill(rank, signal.SIGKILL)
        run = None
        # The system takes a moment to end a process.
        while run is None and time.monotonic() < deadline:
            with contextlib.ExitStack() as stack, contextlib.suppress(UserError):
                run = begin(tmp_path, stack)[0]
        assert run == tmp_path / "run-000002"


def test_a_promoted_run_stays_whatever_is_missing_in_it(weeks: Path) -> None:
    models = weeks / "models"
    (models / "run-000001" / VERDICT).unlink()
    with contextlib.ExitStack() as stack:
        assert begin(models, stack)[0] == models / "run-000002"
    assert promoted_in(models) == (models / "run-000001").resolve()


def test_a_link_to_itself_names_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / PROMOTED).symlink_to(PROMOTED)
    (tmp_path / "run-000001").mkdir()
    assert promoted_in(tmp_path) is None
    assert f"{PROMOTED} names {PROMOTED}, which is not there" in capsys.readouterr().out
    with contextlib.ExitStack() as stack:
        run, _ = begin(tmp_path, stack)
    assert run == tmp_path / "run-000002"
    run.mkdir()
    set_link(run, PROMOTED)
    assert promoted_in(tmp_path) == run


def names_of_processes(word: str) -> list[str]:
    """Command lines with a word in them."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode())
    return [line for line in found if word in line]


def report(value: float | None, metric: str) -> dict[str, Any]:
    content = {"main_metric": metric, "metrics": {metric: metric.upper()}, "test": {metric: value}}
    baselines = {"global mean": {"rmse": 0.97}, "popularity": {"ndcg": 0.05}, "oracle": {metric: 0.5}}
    return {**content, "data": {"num_test": 7}, "baselines": baselines}


def groups(metric: str, value: float, users: int = 200, spread: float = 0.0) -> dict[str, Any]:
    """Return the groups.json of a model with this value, which changes by chance for each user."""
    # Users differ much more than the models do.
    means = (value**2 if metric == "rmse" else value) * np.linspace(0.5, 1.5, users)
    means += spread * np.random.default_rng(0).normal(size=users)
    of_users = [np.pad(each, (0, 512 - users)).tolist() for each in (means * 5, np.full(users, 5.0))]
    return {"test": of_users, "segments": {"country": {"de": of_users}}}


@pytest.mark.parametrize(
    ("new", "old", "margin", "metric", "is_better"),
    [
        (0.8, 0.9, 0.0, "rmse", True),
        # Each user is a little better off, by far less than users differ.
        (0.899, 0.9, 0.0, "rmse", True),
        (0.9, 0.9, 0.0, "rmse", False),
        (0.89, 0.9, 0.02, "rmse", False),
        (0.2, 0.1, 0.05, "ndcg", True),
        (0.1, 0.2, 0.0, "ndcg", False),
        (0.95, 0.9, -0.1, "rmse", True),
        (0.95, 0.9, -0.01, "rmse", False),
        (None, 0.9, 0.0, "rmse", False),
        (0.9, None, 0.0, "rmse", True),
        # Better than the old one, and worse than the mean, or popularity.
        (0.98, 1.2, 0.0, "rmse", False),
        (0.98, 1.2, -1.0, "rmse", False),
        (0.04, 0.01, 0.0, "ndcg", False),
    ],
)
def test_a_model_is_better_if_the_interval_of_the_difference_is_above_the_margin(
    new: float | None, old: float | None, margin: float, metric: str, is_better: bool
) -> None:
    both = [groups(metric, value or 1.0) for value in (new, old)]
    verdict = compare(report(new, metric), report(old, metric), both, margin)
    assert verdict["is_better"] == is_better
    simple = {0.98: "the new one is worse than global mean, 0.97", 0.04: "is worse than popularity, 0.05"}
    assert simple.get(new or 0.0, "test ") in verdict["reason"]
    if None not in (new, old):
        assert verdict["interval"][0] <= verdict["gain"] <= verdict["interval"][1]
        assert [*verdict["worse"]] == (["country de"] if verdict["interval"][1] < 0 else [])


@pytest.mark.parametrize(
    ("users", "spread", "is_better", "words"),
    [
        (200, 0.01, True, "95 % interval of the gain 0.00"),
        # The same gain, by chance: of some users it is much more, and of others a loss.
        (200, 0.2, False, "not above the margin of 0"),
        (19, 0.0, False, "of fewer than 20 users, too few to compare"),
    ],
)
def test_a_gain_that_chance_explains_promotes_nothing(
    users: int, spread: float, is_better: bool, words: str
) -> None:
    both = groups("ndcg", 0.21, users, spread), groups("ndcg", 0.2, users)
    verdict = compare(report(0.21, "ndcg"), report(0.2, "ndcg"), both, 0.0)
    assert verdict["is_better"] == is_better
    assert words in verdict["reason"]


def test_models_that_cannot_be_compared_are_refused_before_the_training(tmp_path: Path) -> None:
    (tmp_path / "report").mkdir()
    flags = {"task": "rating", "test_fraction": 0.1}
    (tmp_path / "report" / "metrics.json").write_text(json.dumps({"config": flags}))
    check_comparable(Config.of(test_fraction=0.1), tmp_path)
    for changes, words in (
        ({"split": "random"}, "on the newest events, and the split is random"),
        ({"task": "response", "test_fraction": 0.1}, "is of --task rating, and this training of response"),
        ({"test_fraction": 0.2}, "has learned; give at most 0.1"),
    ):
        with pytest.raises(UserError, match=words):
            check_comparable(Config.of(**changes), tmp_path)
    with pytest.raises(UserError, match="must be a link to a run, and is none"):
        promoted_in(folder_with_promoted(tmp_path))


def folder_with_promoted(tmp_path: Path) -> Path:
    (tmp_path / "models" / PROMOTED).mkdir(parents=True)
    return tmp_path / "models"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--dataset", "ml-100k", "--resume"), "--resume is set by retrain itself; leave it out."),
        (("--dataset", "ml-100k", "--doctor"), "--doctor is set by retrain itself; leave it out."),
        (("--dataset", "ml-100k", "--keep_runs", "-1"), "--keep_runs must be at least 0, got -1."),
        (("--dataset", "ml-100k", "--margin", "nan"), "--margin must be a number, got nan."),
        (("--epochs", "3"), "retrain requires the data as they are now; give --data_path or --dataset."),
    ],
)
def test_flags_that_cannot_be_are_refused(words: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(words)
    assert str(caught.value) == sentence


# --- a checkpoint on other data ---


def test_a_checkpoint_on_newer_data_predicts_as_it_is_served(weeks: Path) -> None:
    run, data = weeks / "models" / "run-000001", weeks / "shop"
    found = []
    for ranks in (1, 3):
        load = ("--load", run, "--other_data", "--data_path", data, "--report_dir", weeks / str(ranks))
        output = succeeded(torchrun(ranks, EXAMPLE, *load))
        assert "new values: " in output
        found.append(read_json(weeks / str(ranks) / "test.json")["test"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    refused = torchrun(2, EXAMPLE, "--load", run, "--data_path", data)
    assert re.search("was trained (on other data|with other features) than", refused.stderr)


def test_features_of_one_side_alone_are_named_and_another_dense_part_is_refused(weeks: Path) -> None:
    schema, models = weeks / "shop" / "schema.toml", weeks / "models"
    flags = ("--data_path", weeks / "shop", "--dump", "--save_dir", weeks / "new", *SMALL)
    start = ("--initial_rows", "random", "--warm_start", models / PROMOTED)
    schema.write_text(SCHEMA.replace("features.price", "features.cost"))
    output = succeeded(python(EXAMPLE, *flags, *start))
    assert "features only there, omitted: price" in output
    assert "features only here, as drawn: cost" in output
    schema.write_text(SCHEMA.replace('"buckets"', '"dense"'))
    result = python(EXAMPLE, *flags, *start, "--move_aside")
    assert result.returncode == 2
    assert "has nothing for dense.numbers." in result.stderr
