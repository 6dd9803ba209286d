"""The scripts of clicks and purchases: their models on 1, 2 and 3 processes, their data, what is served."""

from __future__ import annotations

import functools
import gzip
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch

import recsuite as rs
from tests.support.documents import blocks
from tests.support.launch import ROOT, python, read_json, succeeded, torchrun
from tests.support.published import differing_tensors

sys.path.append(str(ROOT / "example"))
import criteo_log
import ctr
import multitask
import shop_log

CTR = ROOT / "example" / "ctr.py"
METRICS = ("log_loss", "auc", "calibration")
FEW = ("--num_workers", 0, "--embedding_dim", 8)
DUMPING = ("--epochs", 1, "--batch_size", 512, "--dump", "--inc_dump", "--dump_every", 5, "--keep", 100)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small synthetic log."""
    folder = tmp_path_factory.mktemp("ctr") / "log"
    criteo_log.write_log(folder, 6_000)
    return folder


def metrics_of(report: Path, script: Script | None = None) -> dict[str, float]:
    """The test metrics of a training."""
    found: dict[str, float] = read_json(report / "metrics.json")["test"]
    prefixes = ["", "click_"] if script and script.model is multitask.MMoE else [""]
    return {f"{prefix}{name}": found[f"{prefix}{name}"] for prefix in prefixes for name in METRICS}


def raw_values(file: Path) -> dict[str, list[Any]]:
    """The columns of a log as a caller of a served model gives them."""
    rows = [line.split("\t") for line in file.read_text().splitlines()]
    columns = dict(zip(criteo_log.COLUMNS, map(list, zip(*rows, strict=True)), strict=True))
    del columns["label"]
    values: dict[str, list[Any]] = {
        name: [text or None for text in column] for name, column in columns.items()
    }
    for name in criteo_log.NUMBERS:
        values[name] = [None if text is None else float(text) for text in values[name]]
    return {"user": ["all"] * len(rows), "item": ["all"] * len(rows), **values}


class Script(NamedTuple):
    """A script, its flags, the model that it trains, its tables, and what a caller gives of their test."""

    flags: tuple[str | Path, ...]
    model: type[torch.nn.Module]
    write: Callable[[Path], None]
    values: Callable[[Path], dict[str, list[Any]]]
    # Columns of the test, by the beginning of the names of their metrics.
    labels: Callable[[Path], dict[str, np.ndarray]]


def clicks(log: Path) -> dict[str, np.ndarray]:
    lines = (log / "test.tsv").read_text().splitlines()
    return {"": np.array([line.startswith("1") for line in lines])}


def purchases_and_clicks(shop: Path) -> dict[str, np.ndarray]:
    events = pandas.read_csv(shop / "test.csv")
    return {"": events["purchase"].to_numpy(), "click_": events["click"].to_numpy()}


def impressions(shop: Path) -> dict[str, list[Any]]:
    events = pandas.read_csv(shop / "test.csv")[["user", "item"]]
    for name in ("user", "item"):
        events = events.merge(pandas.read_csv(shop / f"{name}s.csv"), on=name)
    return {str(name): column.tolist() for name, column in events.items()}


def ctr_script(model: str) -> Script:
    write, values = (
        functools.partial(criteo_log.write_log, rows=6_000),
        lambda log: raw_values(log / "test.tsv"),
    )
    return Script((CTR, "--model", model), ctr.MODELS[model], write, values, clicks)


SCRIPTS = {
    "dlrm": ctr_script("dlrm"),
    "dcn": ctr_script("dcn"),
    "mmoe": Script(
        (CTR.with_name("multitask.py"),),
        multitask.MMoE,
        functools.partial(shop_log.write_log, rows=6_000),
        impressions,
        purchases_and_clicks,
    ),
}


class Trained(NamedTuple):
    """A training of a script on two processes: its folder has its "log", "dumps" and "report"."""

    name: str
    folder: Path

    @property
    def script(self) -> Script:
        return SCRIPTS[self.name]

    @property
    def flags(self) -> tuple[object, ...]:
        """All but the modes and what belongs to a training."""
        return (*self.script.flags, "--data_path", self.folder / "log", *FEW)


@pytest.fixture(scope="module", params=["dlrm", pytest.param("dcn", marks=pytest.mark.soak), "mmoe"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A training with full checkpoints and deltas."""
    found = Trained(request.param, tmp_path_factory.mktemp("trained"))
    found.script.write(found.folder / "log")
    more = ("--save_dir", found.folder / "dumps", "--report_dir", found.folder / "report")
    assert "to the best possible (0." in succeeded(torchrun(2, *found.flags, *DUMPING, *more))
    return found


# test_any_ranks.py compares trainings on one and more processes.
@pytest.mark.parametrize("trained", ["mmoe"], indirect=True)
def test_three_processes_load_the_checkpoint_of_two(trained: Trained) -> None:
    found = metrics_of(trained.folder / "report", trained.script)
    loaded = succeeded(torchrun(3, *trained.flags, "--load", "--save_dir", trained.folder / "dumps"))
    row = re.search(r"^\| this model, step [^|]*\|(.*)\|$", loaded, re.MULTILINE)
    assert row is not None, loaded
    assert [*map(float, row[1].split("|"))] == pytest.approx([*found.values()], abs=1e-4)


@pytest.mark.parametrize("trained", ["dlrm"], indirect=True)
def test_a_resumed_training_equals_an_uninterrupted_one(trained: Trained, tmp_path: Path) -> None:
    dumps = trained.folder / "dumps"
    base, *_, last = sorted(dumps.glob("step-*"))
    for folder in (base, min(dumps.glob("delta-*"))):
        shutil.copytree(folder, tmp_path / folder.name)
    succeeded(torchrun(2, *trained.flags, *DUMPING, "--save_dir", tmp_path, "--resume"))
    assert differing_tensors(tmp_path / last.name, last) == []


def test_an_export_has_the_test_scores_of_the_training(trained: Trained, tmp_path: Path) -> None:
    script, dumps, log = trained.script, trained.folder / "dumps", trained.folder / "log"
    succeeded(python(*script.flags, "--export", tmp_path / "exported", "--save_dir", dumps))
    values = script.values(log)
    served = rs.ServedModel.open(tmp_path / "exported", model=script.model)
    scores = served.score(values).numpy()
    of_checkpoint = rs.ServedModel.open(dumps, model=script.model)
    assert scores == pytest.approx(of_checkpoint.score(values).numpy(), abs=1e-6)
    if trained.name == "dlrm":
        (tmp_path / "dumps").mkdir()
        (tmp_path / "dumps" / "ctr").symlink_to(dumps)
        (tmp_path / "served.py").write_text(blocks(ROOT / "docs" / "ctr.md", "python")[0])
        shown = succeeded(python("served.py", cwd=tmp_path, env={"PYTHONPATH": str(CTR.parent)}))
        assert 0 < float(shown.strip("[]\n")) < 1
    # What the training said of the same rows, as sharp as a metric of all of them is.
    said = metrics_of(trained.folder / "report", script)
    for (prefix, labels), of_label in zip(
        script.labels(log).items(), scores.reshape(len(scores), -1).T, strict=True
    ):
        losses = -np.log(np.where(labels, of_label, 1 - of_label))
        assert losses.mean() == pytest.approx(said[f"{prefix}log_loss"], abs=1e-6)
    if trained.name == "mmoe":
        # The first label is what recommendations go by.
        (best, score), *_ = served.recommend({"user": [7]}, k=1)[0]
        assert score == pytest.approx(float(served.score({"user": [7], "item": [best]})[0, 0]), abs=1e-6)


def test_a_log_of_one_file_is_read_with_all_that_is_missing(log: Path, tmp_path: Path) -> None:
    lines = (log / "train.tsv").read_text().splitlines()[:1500]
    rows = [line.split("\t") for line in lines]
    draw = np.random.default_rng(0)
    for row in rows:
        for place in draw.choice(np.arange(1, 40), 12, replace=False):
            row[place] = ""
    # Criteo's I2 goes down to -2, and one column may have no value at all.
    rows[3][2], rows[4][2] = "-2", "-1"
    for row in rows:
        row[39] = ""
    with gzip.open(tmp_path / "day_0.gz", "wt") as file:
        file.writelines("\t".join(row) + "\n" for row in rows)
    report = tmp_path / "report"
    flags = ("--data_path", tmp_path / "day_0.gz", *FEW, "--epochs", 1, "--report_dir", report)
    output = succeeded(python(CTR, "--model", "dcn", *flags))
    assert "1,500" not in output.split("skipped")[0] or "skipped" not in output
    data = read_json(report / "metrics.json")["data"]
    assert data["num_train"] + data["num_validation"] + data["num_test"] == 1_500
    assert all(np.isfinite(value) for value in metrics_of(report).values())
    assert 'events = "day_0.gz"' in (tmp_path / "schema.toml").read_text()


@pytest.mark.parametrize("number", [39, 41])
def test_another_number_of_columns_is_refused_with_one_message_and_nothing_is_written(
    tmp_path: Path, number: int
) -> None:
    file = tmp_path / "train.txt"
    file.write_text("".join("\t".join(["1"] * number) + "\n" for _ in range(3)))
    ended = python(CTR, "--data_path", file)
    assert ended.returncode == 2
    assert f"{file} must have 40 columns with tabs between" in ended.stderr
    assert f"got {number} in line 1" in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1
    assert [*tmp_path.iterdir()] == [file]


def test_the_log_records_the_best_auc_with_and_without_crosses(tmp_path: Path) -> None:
    criteo_log.write_log(tmp_path / "a", 20_000)
    criteo_log.write_log(tmp_path / "b", 20_000)
    for name in ("train.tsv", "test.tsv", criteo_log.ORACLE):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    oracle = read_json(tmp_path / "a" / criteo_log.ORACLE)
    assert 0.5 < oracle["without_crosses"] < oracle["auc"] - 0.05 < 0.9
    with pytest.raises(rs.UserError, match=r"--rows must be at least 1,000, got 999"):
        criteo_log.write_log(tmp_path / "c", 999)


# The figures of docs/ctr.md, on the log that the script draws.
@pytest.mark.soak
def test_crosses_are_learned_to_within_two_thousandths_of_the_best_auc(tmp_path: Path) -> None:
    criteo_log.write_log(tmp_path / "log")
    best, found = read_json(tmp_path / "log" / criteo_log.ORACLE)["auc"], {}
    for model in ctr.MODELS:
        report = tmp_path / model
        flags = ("--model", model, "--data_path", tmp_path / "log", "--report_dir", report)
        succeeded(python(CTR, *flags, timeout=250))
        found[model] = metrics_of(report)["auc"]
    assert best - 0.002 < found["dlrm"] <= best + 0.001
    assert best - 0.002 < found["dcn"] <= best + 0.001
    assert found["linear"] < best - 0.01
