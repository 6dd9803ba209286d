"""A checkpoint answers through the model that wrote it: another with the same parameters is refused."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import recsuite as rs
from recsuite.checkpoint.folder import newest_in
from recsuite.checkpoint.format import read_manifest, write_manifest
from recsuite.checkpoint.origin import EQUAL_MODELS, ORIGIN, ModelOrigin, check_origin, origin_of
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.extras.chain.cases import cases_of_models
from recsuite.files import plain
from recsuite.serving.export import export
from tests.support.launch import EXAMPLE, python, succeeded
from tests.support.trained import Trained

# The model of example.py with one formula changed, whose parameters have the same names and shapes.
FORMULA = "self.mean_rating + score + self.mlp"
CHANGED = FORMULA.replace("score", "0.5 * score")
KEEPING = """
def kept(predictions, labels):
    import numpy as np
    np.save(f"{len(labels)}.npy", predictions)
    return 0.0
"""
FEW = ("--dataset", "synthetic", "--synthetic_ratings", 2000, "--batch_size", 128, "--num_workers", 0)
MINE, OTHER = "mine.RatingModel", "example.RatingModel"


def written(path: Path, *edits: tuple[str, str]) -> Path:
    """A copy of example.py with that formula and some edits, which keeps what it predicts."""
    text = EXAMPLE.read_text()
    given = ("dense=dense_optimizer,", 'dense=dense_optimizer, metrics={"kept": kept},')
    for before, after in (
        (FORMULA, CHANGED),
        given,
        ("\ndef make_model", f"{KEEPING}\n\ndef make_model"),
        *edits,
    ):
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text)
    return path


def loaded(path: Path, name: str = "") -> Any:
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name or path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    return module


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mine.py, and a full checkpoint and a delta that it wrote into dumps."""
    folder = tmp_path_factory.mktemp("place")
    written(folder / "mine.py")
    flags = (*FEW, "--epochs", 1, "--inc_dump", "--data_path", "data", "--save_dir", "dumps")
    succeeded(python("mine.py", *flags, cwd=folder))
    return folder


def names_both(sentence: str, *others: str) -> None:
    """One sentence with both models."""
    assert [word for word in (MINE, "Fix: ", *others) if word not in sentence] == []
    assert "Traceback" not in sentence


def test_only_the_model_that_was_trained_scores_as_it_did(place: Path) -> None:
    dumps, own = place / "dumps", loaded(place / "mine.py")
    with pytest.raises(rs.UserError) as refused:
        rs.ServedModel.open(dumps)
    names_both(str(refused.value), "model=", "mine.py")
    with pytest.raises(rs.UserError) as refused:
        rs.ServedModel.open(dumps, model=loaded(EXAMPLE).make_model)
    names_both(str(refused.value), OTHER, "another source")
    model = rs.ServedModel.open(dumps, model=own.make_model)
    _, cases = cases_of_models([model], str(place / "data"))
    described = model._data.of_items(model.snapshot)
    places = [described["movie"].index(item) for item in cases.items]
    names = model.snapshot.names_of(("user", "history"))
    values = {name: given for name, given in cases.values.items() if name in names}
    of_items = {name: [given[each] for each in places] for name, given in described.items()}
    wanted = np.load(place / f"{len(cases.items)}.npy")
    assert model.score({**values, **of_items}).numpy() == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize(
    "command",
    [
        ("serve.py", "--port", 0),
        ("score.py", "--users", "all", "--output", "scored"),
        ("example.py", "--load"),
        ("example.py", "--resume"),
        ("example.py", "--compact"),
        ("example.py", "--export", "exported"),
        ("example.py", "--recommend", "--user", 1),
        ("example.py", *FEW, "--epochs", 1, "--dump", "--warm_start", "dumps", "--save_dir", "warm"),
    ],
    ids=lambda command: " ".join(map(str, command[:2])),
)
def test_each_command_refuses_a_model_that_was_not_trained(place: Path, command: tuple[Any, ...]) -> None:
    script, *flags = command
    data = () if "--export" in flags else ("--data_path", "data")
    save_dir = () if "--warm_start" in flags else ("--save_dir", "dumps")
    ended = python(EXAMPLE.with_name(script), *flags, *data, *save_dir, cwd=place)
    assert ended.returncode == 2
    names_both(ended.stderr.splitlines()[-1], "dumps", OTHER, "--accept_changed_model")
    assert not (place / "exported").exists()
    assert not (place / "scored").exists()


def test_a_comment_is_loaded_in_silence_and_a_formula_only_if_it_is_accepted(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(place / "data", tmp_path / "data")
    shutil.copytree(place / "dumps", tmp_path / "dumps", symlinks=True)
    base = newest_in(tmp_path / "dumps")
    load = ("mine.py", "--load", "--save_dir", "dumps", "--data_path", "data")
    written(
        tmp_path / "mine.py", ('    """Predict a rating: ', "    # A comment.\n" + '    """Predict stars: ')
    )
    assert "another source" not in succeeded(python(*load, cwd=tmp_path))
    written(tmp_path / "mine.py", ("0.5 * score", "0.25 * score"))
    own = loaded(tmp_path / "mine.py")
    resume = ("mine.py", "--resume", "--inc_dump", "--epochs", 2, *load[2:])
    for command in (load, resume):
        ended = python(*command, cwd=tmp_path)
        assert ended.returncode == 2
        names_both(ended.stderr.splitlines()[-1], "--accept_changed_model")
    follower = rs.Follower(
        tmp_path / "dumps", checkpoint="latest", model=loaded(place / "mine.py").make_model
    )
    said = succeeded(python(*resume, "--accept_changed_model", cwd=tmp_path))
    assert "accepted by --accept_changed_model" in said
    # The deltas go on from the base, with the model that now trains.
    newest = newest_in(tmp_path / "dumps")
    assert newest is not None
    assert base is not None
    assert newest.name > base.name
    assert read_manifest(newest).about[ORIGIN] != read_manifest(base).about[ORIGIN]
    with pytest.raises(rs.UserError, match="another source"):
        follower.refresh()
    assert rs.ServedModel.open(tmp_path / "dumps", "latest", model=own.make_model).progress.epoch == 2
    before = loaded(place / "mine.py").make_model
    with pytest.raises(rs.UserError, match="another source"):
        rs.ServedModel.open(tmp_path / "dumps", "latest", model=before)
    capsys.readouterr()
    rs.ServedModel.open(tmp_path / "dumps", "latest", model=before, accept_changed_model=True)
    assert capsys.readouterr().out.count("accepted by --accept_changed_model") == 1
    unread = python("mine.py", "--train", "--accept_changed_model", cwd=tmp_path)
    assert unread.returncode == 2
    assert "--accept_changed_model requires" in unread.stderr


def test_merging_and_exports_of_exports_keep_the_record(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "dumps", tmp_path / "dumps", symlinks=True)
    own, compact = loaded(place / "mine.py"), ("--compact", "--save_dir", tmp_path / "dumps")
    record = read_manifest(newest_in(tmp_path / "dumps") or tmp_path).about[ORIGIN]
    assert (record["module"], record["name"], record["is_library"]) == ("mine", "RatingModel", False)
    succeeded(python("mine.py", *compact, "--data_path", "data", cwd=place))
    merged = newest_in(tmp_path / "dumps")
    assert merged is not None
    assert read_manifest(merged).link is None
    export(CheckpointConfig(save_dir=str(tmp_path / "dumps")), tmp_path / "first", own.make_model)
    export(CheckpointConfig(save_dir=str(tmp_path / "first")), tmp_path / "second", own.make_model)
    for folder in (merged, tmp_path / "first", tmp_path / "second"):
        assert read_manifest(folder).about[ORIGIN] == record
    with pytest.raises(rs.UserError, match=MINE):
        rs.ServedModel.open(tmp_path / "second", model=loaded(EXAMPLE).make_model)


@pytest.mark.parametrize("name", ["RatingModel", "ResponseModel"])
def test_what_earlier_versions_wrote_is_read_by_the_first_script(trained: Trained, name: str) -> None:
    kind, data = getattr(loaded(EXAMPLE), name), rs.ModelData(SCHEMA, SCHEMA.features, 0.5)
    model, manifest = kind(data, 8, (4,)), read_manifest(trained.folder / "step-000000002")
    ours = origin_of(model)
    (equal,) = (equal for equal in EQUAL_MODELS if (ours.name, ours.digest) in equal)
    for their_name, digest in equal:
        theirs = dataclasses.replace(ours, name=their_name, digest=digest)
        if is_library := digest == "library":
            theirs = ModelOrigin("recsuite.models.heads", their_name, "", is_library)
        about = dataclasses.replace(manifest, about={ORIGIN: plain(theirs)})
        assert check_origin(trained.folder, about, model, accepts_changed=False) == ""
        # One that was edited since is not equal to it, but may be accepted.
        with pytest.MonkeyPatch.context() as edited:
            edited.setattr(
                "recsuite.checkpoint.origin.origin_of", lambda model: dataclasses.replace(ours, digest="1")
            )
            with pytest.raises(rs.UserError, match="another source"):
                check_origin(trained.folder, about, model, accepts_changed=False)
            assert "accepted" in check_origin(trained.folder, about, model, accepts_changed=True)
    about = dataclasses.replace(manifest, about={ORIGIN: plain(dataclasses.replace(ours, digest="0"))})
    with pytest.raises(rs.UserError, match="another source"):
        check_origin(trained.folder, about, model, accepts_changed=False)


def test_a_checkpoint_from_before_the_record_opens_and_says_so(
    trained: Trained, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in trained.folder.glob("step-*"):
        manifest = read_manifest(folder)
        about = {name: value for name, value in manifest.about.items() if name != ORIGIN}
        write_manifest(folder, dataclasses.replace(manifest, about=about))
    folder = trained.folder / "step-000000002"
    own = loaded(written(tmp_path / "mine.py"))
    for model in (loaded(EXAMPLE).make_model, own.make_model):
        assert rs.ServedModel.open(folder, model=model).progress.step == 2
        assert "did not record the class of its model" in capsys.readouterr().out
    trained.load(folder)
    assert "did not record the class of its model" in capsys.readouterr().out


MODEL = """
from __future__ import annotations
import math
import torch
from torch import nn
import layers
from layers import halved
from constants import SHARE

SCALE = 2.0

def scaled(x: torch.Tensor) -> torch.Tensor:
    return SCALE * x

def unused(x):
    return x

class Base(nn.Module):
    def after(self, x):
        return x + 1

class Mine(Base):
    def __init__(self):
        super().__init__()
        self.part = layers.Part()

    def forward(self, x):
        rest = math.pi
        return self.after(halved(scaled(x))) * SHARE + rest
"""
LAYERS = """
from torch import nn

class Part(nn.Module):
    def forward(self, x):
        return x

def halved(x):
    return x / 2
"""

MADE = """
from torch import nn

class Mine(nn.Module):
    pass

def make_half():
    model = Mine()
    model.score_pairs = lambda users, items: users * items / 2
    return model

def make_third():
    model = Mine()
    model.score_pairs = lambda users, items: users * items / 3
    return model
"""


@pytest.mark.parametrize(
    ("before", "after", "is_same"),
    [
        ("SCALE = 2.0\n", "SCALE = 2.0  # A comment.\n\n", True),
        (
            "def forward(self, x):\n        rest",
            'def forward(self, x):\n        """Text."""\n        rest',
            True,
        ),
        ("def scaled(x: torch.Tensor) -> torch.Tensor:", "def scaled(x):", True),
        ("halved(scaled(x))", "halved(\n            scaled(x)\n        )", True),
        ("def unused(x):\n    return x", "def unused(x):\n    return 3 * x", True),
        ("SCALE = 2.0", "SCALE = 3.0", False),
        ("SHARE = 1.5", "SHARE = 1.25", False),
        ("return SCALE * x", "return SCALE + x", False),
        ("return x + 1", "return x + 2", False),
        ("return x / 2", "return x / 3", False),
        ("        return x\n", "        return -x\n", False),
        ("+ rest", "- rest", False),
    ],
)
def test_a_digest_changes_with_the_formula_and_all_that_it_uses_and_with_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, after: str, is_same: bool
) -> None:
    files = {"model.py": MODEL, "layers.py": LAYERS, "constants.py": "SHARE = 1.5\n"}
    assert sum(text.count(before) for text in files.values()) == 1

    def digest(folder: Path, change: Callable[[str], str]) -> str:
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(change(text))
        with monkeypatch.context() as patched:
            patched.syspath_prepend(str(folder))
            for name in ("layers", "constants"):
                patched.delitem(sys.modules, name, raising=False)
            return origin_of(loaded(folder / "model.py").Mine()).digest

    one = digest(tmp_path / "one", lambda text: text)
    assert (digest(tmp_path / "two", lambda text: text.replace(before, after)) == one) is is_same
    assert one


def test_a_function_that_a_script_gives_to_its_model_is_a_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(MADE)
    made = loaded(tmp_path / "made.py")
    assert len({origin_of(each()).digest for each in (made.Mine, made.make_half, made.make_third)}) == 3


def test_a_class_without_a_source_is_compared_by_its_name(trained: Trained, tmp_path: Path) -> None:
    # As of a cell of a notebook.
    cell = ModuleType("cell")
    exec((written(tmp_path / "mine.py").read_text()), vars(cell))
    served = rs.ServedModel.open(trained.folder, model=loaded(EXAMPLE).make_model)
    own = origin_of(served.snapshot.head)
    manifest = read_manifest(trained.folder / "step-000000002")
    manifest = dataclasses.replace(manifest, about={ORIGIN: plain(own)})
    config, data = trained.config.model, served.snapshot
    in_cell = cell.make_model(rs.ModelData(data.schema, data.features), config)
    assert dataclasses.astuple(origin_of(in_cell)) == ("cell", "RatingModel", "", False)
    assert "cannot be read" in check_origin(trained.folder, manifest, in_cell, False)
    with pytest.raises(rs.UserError, match=r"example\.RatingModel.* cell\.RatingLoss"):
        check_origin(trained.folder, manifest, cell.RatingLoss(0.0), False)


def test_the_class_is_that_of_the_model_in_the_wrappers_of_torch() -> None:
    wrapped = torch.compile(torch.nn.DataParallel(torch.nn.Linear(1, 1)))
    assert origin_of(wrapped) == origin_of(torch.nn.Linear(1, 1))


class Holder(torch.nn.Module):
    """Model with an attribute."""

    def __init__(self, thing: Any) -> None:
        super().__init__()
        self.act = thing


def twice(rows: torch.Tensor) -> torch.Tensor:
    return 2 * rows


class Called:
    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        return rows


def test_what_a_model_of_equal_source_holds_is_a_part_of_it() -> None:
    things = (
        *(torch.relu, torch.tanh, functools.partial(torch.relu), functools.partial(twice), [twice], Called()),
        *(torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.Tanh()), None),
    )
    digests = [origin_of(Holder(thing)).digest for thing in things]
    assert "" not in digests
    # A partial function and a list are what they hold.
    assert len({*digests}) == len(things) - 2
    # The same again, and a number may be one of the data.
    assert [origin_of(Holder(thing)).digest for thing in (torch.relu, 3)] == [digests[0], digests[-1]]
    mine, theirs = (
        torch.nn.Sequential(torch.nn.Linear(1, 1), each) for each in (torch.nn.ReLU(), torch.nn.Tanh())
    )
    assert origin_of(mine).digest != origin_of(theirs).digest
