"""Scripts that a user could have written, outside the repository: each trains, is loaded, and is served."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import recsuite as rs
from recsuite.config.sections import CheckpointConfig
from recsuite.extras.chain.cases import cases_of_models
from recsuite.metrics import Measured
from recsuite.serving.export import export
from recsuite.training.observers import observing
from recsuite.training.progress import Progress
from tests.support.documents import PAGES, blocks
from tests.support.launch import python, read_json, succeeded, torchrun
from tests.support.published import differing_tensors, tensors_of

OWN = Path(__file__).parent
SCRIPTS = ("deepfm", "seconds")
WANDB = "class WandB"
# A script as it is, and beside its metrics one that keeps what it was given on rank 0.
KEEPING = """
import numpy as np, os, recsuite as rs, {name} as own

def kept(predictions, labels):
    if os.environ["RANK"] == "0":
        np.save(f"{{len(labels)}}.npy", predictions)
    return 0.0

own.METRICS["kept"] = kept
if __name__ == "__main__":
    rs.run_script(own.main)
"""
SCHEMA = """
[files]
events = "events.csv"
users = "users.csv"
items = "videos.csv"
[user]
column = "user"
[item]
column = "video"
noun = "video"
[label]
column = "seconds"
kind = "rating"
noun = "view"
[timestamp]
column = "time"
format = "unix"
[features.country]
of = "user"
column = "country"
kind = "category"
[features.length]
of = "item"
column = "length"
kind = "number"
input = "dense"
"""
FEW = ("--dataset", "synthetic", "--synthetic_ratings", 2000, "--batch_size", 128, "--num_workers", 0)
VIDEOS = ("--data_path", "videos", "--batch_size", 32, "--num_workers", 0, "--history", 0)


def place(name: str, folder: Path) -> ModuleType:
    """Put a script and `KEEPING` into a folder; returns the script as a module."""
    shutil.copy(OWN / f"{name}.py", folder)
    (folder / "keeping.py").write_text(KEEPING.format(name=name))
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


def write_videos(folder: Path) -> dict[str, list[Any]]:
    """Write tables of views, in the order of time; returns the features of each view."""
    folder.mkdir()
    draw = np.random.default_rng(0)
    # Each user watches each video once.
    users, videos = (each.ravel() for each in np.indices((40, 25)))
    order = draw.permutation(1000)
    users, videos = users[order], videos[order]
    lengths, countries = draw.integers(30, 900, 25).tolist(), ["NL", "PE"] * 20
    seconds = np.round(np.array(lengths)[videos] * draw.uniform(0.1, 1, 40)[users], 1)
    rows = zip(users, videos, seconds, strict=True)
    lines = [f"{user},{video},{label},{60 * time}" for time, (user, video, label) in enumerate(rows)]
    tables = {
        "events": ["user,video,seconds,time", *lines],
        "users": ["user,country", *(f"{user},{country}" for user, country in enumerate(countries))],
        "videos": ["video,length", *(f"{video},{length}" for video, length in enumerate(lengths))],
    }
    for name, table in tables.items():
        (folder / f"{name}.csv").write_text("\n".join([*table, ""]))
    (folder / "schema.toml").write_text(SCHEMA)
    return {
        "user": users.tolist(),
        "video": videos.tolist(),
        "country": [countries[user] for user in users],
        "length": [lengths[video] for video in videos],
    }


def test_a_deepfm_with_a_loss_a_metric_and_a_callback_of_its_own_trains_loads_on_three_and_is_served(
    tmp_path: Path,
) -> None:
    own, data = place("deepfm", tmp_path), tmp_path / "data"
    flags = (*FEW, "--data_path", data)
    trained = torchrun(
        2, "keeping.py", "--dump", "--save_dir", "dumps", "--report_dir", "report", "--epochs", 2, *flags,
        cwd=tmp_path,
    )  # fmt: skip
    report = read_json(tmp_path / "report" / "metrics.json")
    assert "within one" in succeeded(trained)
    assert report["metrics"]["within one"] == "within one"
    # The callback saw what the report has.
    *epochs, test = map(json.loads, (tmp_path / "lines.jsonl").read_text().splitlines())
    assert [epoch["rmse"] for epoch in epochs] == [each["validation"]["rmse"] for each in report["epochs"]]
    assert test["within one"] == report["test"]["within one"]
    load = ("--load", "--save_dir", "dumps", "--data_path", data, "--by", "history_length")
    loaded = succeeded(torchrun(3, "deepfm.py", *load, cwd=tmp_path))
    assert f"{report['test']['within one']:.4f}" in loaded
    # Each segment has the metric too; the heading is cut within its first column.
    lines = loaded[loaded.index("by history_length") :].partition("\n[")[0].splitlines()
    heading, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    column = [each.startswith("within one") for each in heading].index(True)
    shares = [int(row[1].replace(",", "")) * float(row[column + 1]) for row in rows if len(row) > 1]
    assert sum(shares) / report["data"]["num_test"] == pytest.approx(report["test"]["within one"], abs=1e-4)
    # Served with the histories of the data, also from an export.
    predictions = np.load(tmp_path / f"{report['data']['num_test']}.npy")
    model = rs.ServedModel.open(tmp_path / "dumps", model=own.make_model)
    _, cases = cases_of_models([model], str(data))
    described = model._data.of_items(model.snapshot)
    places = [described["movie"].index(item) for item in cases.items]
    names = model.snapshot.names_of(("user", "history"))
    values = {name: given for name, given in cases.values.items() if name in names}
    of_items = {name: [given[place] for place in places] for name, given in described.items()}
    scores = model.score({**values, **of_items}).numpy()
    assert scores == pytest.approx(predictions, abs=1e-6)
    exported = ("--export", "exported", "--save_dir", "dumps")
    succeeded(python("deepfm.py", *exported, cwd=tmp_path))
    copy = rs.ServedModel.open(tmp_path / "exported", model=own.make_model)
    assert copy.score({**values, **of_items}).numpy() == pytest.approx(scores, abs=0)
    # Items are ranked by their scores, and what needs vectors says so.
    user = {name: given[:2] for name, given in values.items()}
    ids = [item for item in described["movie"] if model.knows("movie", item)]
    items = {
        name: [given[described["movie"].index(item)] for item in ids] for name, given in described.items()
    }
    for number, found in enumerate(model.recommend(user, len(ids), exclude=None)):
        one = {name: [given[number]] * len(ids) for name, given in user.items()}
        wanted = dict(zip(ids, model.score({**one, **items}).tolist(), strict=True))
        assert dict(found) == pytest.approx(wanted, abs=1e-6)
        assert [score for _, score in found] == sorted((score for _, score in found), reverse=True)
    for method, given in (
        ("similar_items", [cases.items[0]]),
        ("item_vectors", [cases.items[0]]),
        ("user_vectors", user),
        ("search", [[0.0]]),
    ):
        with pytest.raises(rs.UserError, match=rf"{method} requires vectors .* recsuite\.TwoSided"):
            getattr(model, method)(given)
    # Caps need no vectors: of each year at most the best movie, in the order of all.
    years = {item: year for item, year in zip(ids, items["year"], strict=True) if year is not None}
    (whole, _), (capped, _) = (
        model.recommend(user, len(ids), exclude=None, at_most=caps) for caps in (None, {"year": 1})
    )
    first = {years.get(item, -item): (item, score) for item, score in reversed(whole)}
    assert capped == [pair for pair in whole if pair in first.values()]
    assert len(capped) < len(whole)
    with pytest.raises(rs.UserError, match=r"least_distance requires vectors .* recsuite\.TwoSided"):
        model.recommend(user, least_distance=0.2)
    with pytest.raises(rs.UserError, match="leave approximate out"):
        model.recommend(user, approximate=True)


def test_a_loop_an_optimizer_and_a_label_of_its_own_resume_bit_for_bit_and_are_served(tmp_path: Path) -> None:
    own = place("seconds", tmp_path)
    values = write_videos(tmp_path / "videos")
    flags = (*VIDEOS, "--epochs", 2, "--dump", "--dump_every", 4, "--keep", 100)
    trained = torchrun(2, "keeping.py", *flags, "--save_dir", "dumps", cwd=tmp_path)
    assert "median error" in succeeded(trained)
    # At step 4 gradients wait for step 6, so a checkpoint does.
    steps = sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "dumps").glob("step-*"))
    last = steps[-1]
    assert steps[:2] == [6, 9]
    (tmp_path / "resumed").mkdir()
    shutil.copytree(tmp_path / "dumps" / f"step-{9:09d}", tmp_path / "resumed" / f"step-{9:09d}")
    succeeded(torchrun(2, "seconds.py", *flags, "--save_dir", "resumed", "--resume", cwd=tmp_path))
    resumed, whole = (tmp_path / name / f"step-{last:09d}" for name in ("resumed", "dumps"))
    assert any("momentum_buffer" in name for name in tensors_of(whole))
    assert differing_tensors(resumed, whole) == []
    # One rank wrote to the tracker, and the resumed training continued its run.
    lines: list[Any] = [*map(json.loads, (tmp_path / "track.jsonl").read_text().splitlines())]
    begins, logged = ([line for line in lines if name in line] for name in ("begin", "loss"))
    assert [line["step"] for line in begins] == [1, 10]
    assert len({line["begin"] for line in begins}) == 1
    assert [line["step"] for line in logged] == [*range(1, last + 1), *range(10, last + 1)]
    assert [line["loss"] for line in logged[9:last]] == [line["loss"] for line in logged[last:]]
    assert [line["end"] for line in lines if "end" in line] == ["finished"] * 2
    # Another optimizer is refused by both names.
    other = (tmp_path / "seconds.py").read_text().replace('"dense": momentum, ', "")
    (tmp_path / "other.py").write_text(other)
    load = ("--load", "--save_dir", "dumps", *VIDEOS)
    refused = python("other.py", *load, cwd=tmp_path)
    assert refused.returncode == 2
    assert "SGD for the dense part" in refused.stderr
    assert "AdamW for the dense part" in refused.stderr
    assert "median error" in succeeded(python("seconds.py", *load, cwd=tmp_path))
    # Seconds, not their logarithm; the newest 200 views are the test.
    model = rs.ServedModel.open(tmp_path / "dumps", model=own.make_model)
    scores = model.score({name: given[-200:] for name, given in values.items()}).numpy()
    assert scores == pytest.approx(np.load(tmp_path / "200.npy"), rel=1e-6)
    export(CheckpointConfig(save_dir=str(tmp_path / "dumps")), tmp_path / "exported", own.make_model)
    copy = rs.ServedModel.open(tmp_path / "exported", model=own.make_model)
    assert copy.score({name: given[-200:] for name, given in values.items()}).tolist() == scores.tolist()
    # The videos have a width of their own, which a model of another one is not given.
    assert model.snapshot.tables["video"].matrix.shape == (26, 16)
    assert model.snapshot.tables["user"].matrix.shape == (41, 32)

    def narrower(data: rs.ModelData, args: rs.ModelConfig) -> Any:
        made = own.make_model(data, args)
        made.embedding_dims = {"video": 8}
        return made

    for folder in ("dumps", "exported"):
        with pytest.raises(rs.UserError, match=r"has 16 numbers in a row of video, and its model 8; .*\)\.$"):
            rs.ServedModel.open(tmp_path / folder, model=narrower)


(PAGE,) = [page for page in PAGES if page.name == "own_training.md"]


def test_each_excerpt_of_the_page_is_of_these_scripts() -> None:
    lines = {line.strip() for name in SCRIPTS for line in (OWN / f"{name}.py").read_text().splitlines()}
    shown = {
        line.strip() for block in blocks(PAGE, "python") if WANDB not in block for line in block.splitlines()
    }
    commands = {line for line in shown if line.startswith("# torchrun ")}
    assert len(shown) > 30
    assert shown - commands <= lines


def test_a_tracker_of_ten_lines_logs_to_another_service(monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = [block for block in blocks(PAGE, "python") if WANDB in block]
    assert len(block.splitlines()) <= 10
    calls: list[Any] = []

    def init(**given: Any) -> Any:
        calls.append((given["id"], given["config"]["epochs"]))
        return SimpleNamespace(
            log=lambda values, step: calls.append((step, values)),
            finish=lambda exit_code: calls.append(exit_code),
        )

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    found: dict[str, Any] = {"rs": rs}
    exec(f"import wandb\n{block}", found)
    context: Any = SimpleNamespace(rank=0, say=print)
    with observing(rs.Config(), context, trackers=[found["WandB"]()]) as observers:
        for callback in observers.callbacks:
            callback.on_begin(Progress(4), "name")
            callback.on_step(rs.Step(Progress(5), torch.tensor(0.5), {"dense": 0.25}))
            validation = Measured({"rmse": 0.75})
            callback.on_epoch(rs.Epoch(Progress(5, 1), np.array([0.5]), 0.5, validation, 1.0, 9.0, 0.0))
    assert calls[0] == ("name", 8)
    assert calls[1][0] == 5
    assert calls[1][1].items() >= {"loss": 0.5, "learning_rate/dense": 0.25, "validation/rmse": 0.75}.items()
    assert calls[2:] == [0]


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_and_imports_the_public_names_alone(name: str) -> None:
    code = (OWN / f"{name}.py").read_text()
    assert len(code.splitlines()) <= 100
    assert "import recsuite as rs" in code
    assert "recsuite." not in code
