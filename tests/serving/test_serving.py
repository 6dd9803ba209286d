"""A model in one process: it scores as the sharded one, follows a trainer, and believes nothing unchecked."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from example import make_model
from recsuite.checkpoint.chain import describe_choice
from recsuite.checkpoint.folder import (
    archive_checkpoints,
    deltas_in,
    full_checkpoints_in,
    publish,
    remove_checkpoint,
    step_of,
)
from recsuite.checkpoint.format import (
    CONFIG,
    FEATURES_FILE,
    MANIFEST,
    VOCABULARY,
    Manifest,
    read_manifest,
    write_manifest,
)
from recsuite.checkpoint.recorded import with_recorded
from recsuite.config.parser import parse_given
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.schema import SCHEMA_FILE
from recsuite.errors import UserError
from recsuite.files import digest_of, sealed
from recsuite.serving import request
from recsuite.serving import served as serving
from recsuite.serving.export import MODEL, export
from recsuite.serving.followers import _has_learned
from recsuite.serving.reader import ModelChange, read_change
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import Snapshot
from recsuite.training.progress import Progress
from tests.support.launch import EXAMPLE, python, succeeded
from tests.support.meanwhile import meanwhile
from tests.support.published import copied, flip, publish_state, reseal, state
from tests.support.raw_values import raw_test_values
from tests.support.states import FLAGS

# The launch runs within the first test.

FEW = 300


@dataclasses.dataclass(frozen=True)
class Trained:
    """Checkpoints, what the sharded model predicts with each, by step, and the raw values of the test."""

    save_dir: Path
    predictions: dict[int, np.ndarray]
    values: dict[str, list[Any]]

    @property
    def few(self) -> dict[str, list[Any]]:
        """The values of the first test ratings."""
        return {name: given[:FEW] for name, given in self.values.items()}

    def step_of(self, scores: torch.Tensor) -> int:
        """The step whose state predicts the first test ratings so."""
        close = [
            step
            for step, wanted in self.predictions.items()
            if np.abs(scores.numpy() - wanted[:FEW]).max() <= 1e-6
        ]
        assert len(close) == 1, f"the scores are those of no state, or of several: {close}"
        return close[0]


@pytest.fixture(scope="module")
def trained(synthetic_folder: Path, trained_folder: Path) -> Trained:
    found = np.load(trained_folder / "predictions.npz")
    predictions = {int(step): found[step] for step in found}
    assert sorted(predictions) == [0, 2, 4, 6, 8, 10, 12, 14, 16]
    return Trained(trained_folder / "dumps", predictions, raw_test_values(synthetic_folder))


@pytest.fixture(scope="module")
def written(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of the checkpoint after step 14."""
    folder = tmp_path_factory.mktemp("exports")
    save_dir = copied(trained.save_dir, folder / "until-14", 14)
    export(CheckpointConfig(save_dir=str(save_dir), checkpoint="latest"), folder / "exported", make_model)
    return folder / "exported"


@pytest.fixture
def exported(written: Path, tmp_path: Path) -> Path:
    """A copy of the export for a test alone."""
    return Path(shutil.copytree(written, tmp_path / "exported"))


@pytest.fixture(scope="module")
def model(trained: Trained) -> ServedModel:
    """The best model, which no test changes."""
    return ServedModel.open(trained.save_dir, model=make_model)


# --- scores -------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_sharded_model_for_every_checkpoint(trained: Trained) -> None:
    differences: dict[Any, float] = {}
    for step, wanted in trained.predictions.items():
        model = ServedModel.open(state(trained.save_dir, step), model=make_model)
        assert model.progress.step == step
        differences[step] = float(np.abs(model.score(trained.values).numpy() - wanted).max())
    # Of one rating torch multiplies a vector instead of a matrix, and rounds differently.
    few = trained.few
    single = [model.score({name: [given[place]] for name, given in few.items()}) for place in range(30)]
    differences["single"] = float(np.abs(torch.cat(single).numpy() - wanted[:30]).max())
    print(f"largest difference: {max(differences.values()):.1e}")
    assert max(differences.values()) <= 1e-6
    # The checkpoints themselves are told apart.
    assert trained.step_of(ServedModel.open(trained.save_dir, model=make_model).score(trained.few)) == 16


def test_the_server_needs_neither_torchrec_nor_the_trainer(exported: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from example import make_model\n"
        "from recsuite.serving.served import ServedModel\n"
        f"model = ServedModel.open(Path({str(exported)!r}), model=make_model)\n"
        "model.score({'user': [1], 'movie': [2]}); model.similar_items([2])\n"
        "model.recommend(events=[[(2, 4.5)]], k=3)\n"
        "import torch; assert not torch.distributed.is_initialized()\n"
        "print(*sys.modules)"
    )
    modules = succeeded(python("-c", program)).split()
    assert "recsuite.checkpoint.format" in modules
    heavy = {"torchrec", "fbgemm_gpu", "pandas", "pyarrow"}
    trainers = {
        f"recsuite.{name}"
        for name in ("training.state", "sharding", "checkpoint.writer", "checkpoint.restore")
    }
    assert not (heavy | trainers) & set(modules)


def test_missing_and_unseen_values_count_as_unknown(model: ServedModel) -> None:
    short = {"user": [7, 7], "movie": [3, 4]}
    unseen: dict[str, list[Any]] = {
        "user": [7, 7],
        "gender": ["?", None],
        "age": [-1, float("nan")],
        "occupation": ["", "none"],
        "movie": [3, 4],
        "year": [1.5, None],
        "genres": [[], ["No such genre"]],
        "history": [[], []],
        "history_ratings": [[], []],
    }
    assert torch.equal(model.score(short), model.score(unseen))
    assert model.score(short).dtype == torch.float32
    assert not torch.equal(model.score(short), model.score({"user": [-7, -7], "movie": [3, 4]}))
    assert len(model.score({"user": [], "movie": []})) == 0
    with pytest.raises(UserError, match="score requires the feature movie, the movies to score"):
        model.score({"user": [7]})
    assert model.knows("movie", 3)
    assert not model.knows("movie", -3)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"usr": [1]}, "There is no feature usr; the model has"),
        ({}, "There is no feature nothing"),
        ({"user": [1, 2], "movie": [3]}, "'user': 2, 'movie': 1"),
        ({"user": [1], "history": [[3, 4]]}, "must be given together"),
        ({"user": [1], "history": [[3, 4]], "history_ratings": [[5.0]]}, "2 .*history_ratings.* 1 "),
        (
            {"user": [1], "history": [3], "history_ratings": [5.0]},
            "history takes a list for each rating, and got 3",
        ),
        ({"user": [1], "history": [["a"]], "history_ratings": [[5.0]]}, "values of type int, not 'a'"),
        ({"user": [1], "history": [[3]], "history_ratings": [["5"]]}, "history_ratings.* 0.5 and 5.*got '5'"),
        ({"user": [1], "history": [[3]], "history_ratings": [[float("nan")]]}, "history_ratings.*got nan"),
        ({"user": 1, "movie": 2}, "user takes a list with an entry for each rating, and got 1"),
        ({"user": torch.tensor([1])}, r"user takes values of type int, not tensor\(1\)"),
        ({"gender": [1]}, "gender takes values of type str, not 1"),
        ({3: [1]}, "There is no feature 3; the model has"),
        ([("user", [1])], "A dictionary from features to lists of values is required, got a list; the model"),
    ],
)
def test_values_that_do_not_belong_together_are_refused(
    model: ServedModel, values: Any, sentence: str
) -> None:
    with pytest.raises(UserError, match=sentence):
        model.score(values)


def test_values_of_a_wrong_type_are_refused_and_not_unknown(model: ServedModel) -> None:
    for feature, value in (("usr", 1), ("user", "1"), ("user", [1]), ("gender", 1)):
        with pytest.raises(UserError, match=f"feature {feature}"):
            model.knows(feature, value)
    names: list[Any] = [["user"], 3, None, "a\x1bb"]
    for name in names:
        with pytest.raises(UserError, match=r"There is no feature .*; the model has") as refusal:
            model.knows(name, 1)
        assert str(refusal.value).isprintable()
    assert model.knows("history", 3)


def test_types_of_long_histories_are_checked_quickly(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(type):
        asked = 0

        def __subclasscheck__(cls, kind: type[Any]) -> bool:
            Counted.asked += 1
            return kind in (int, float)

        def __instancecheck__(cls, value: Any) -> bool:
            return cls.__subclasscheck__(type(value))

    class Real(metaclass=Counted):
        pass

    monkeypatch.setattr(request, "numbers", SimpleNamespace(Real=Real))
    Counted.asked = 0
    history: dict[str, list[Any]] = {"history": [[3] * 1_000] * 8, "history_ratings": [[4.0] * 1_000] * 8}
    assert len(model.score({"movie": [4] * 8, **history})) == 8
    # Not once for each of 16,000 numbers.
    assert 0 < Counted.asked < 30


def test_folders_may_be_texts_and_an_unknown_checkpoint_is_refused(trained: Trained) -> None:
    assert ServedModel.open(str(trained.save_dir), model=make_model).progress.step == 16
    assert Follower(str(trained.save_dir), model=make_model, checkpoint="latest").refresh() in (True, False)
    with pytest.raises(UserError, match="checkpoint 'newest' is not known; give best or latest"):
        ServedModel.open(trained.save_dir, "newest", model=make_model)


# --- export -------------------------------------------------------------------------------------------


def test_an_export_scores_as_the_checkpoint_that_it_was_made_of(trained: Trained, exported: Path) -> None:
    model = ServedModel.open(exported, model=make_model)
    assert trained.step_of(model.score(trained.few)) == model.progress.step == 14
    assert model.run == read_manifest(state(trained.save_dir, 14)).run
    assert model.age == pytest.approx(
        ServedModel.open(state(trained.save_dir, 14), model=make_model).age, abs=5
    )
    names = {path.name for path in exported.iterdir()}
    assert names == {MODEL, VOCABULARY, SCHEMA_FILE, FEATURES_FILE, MANIFEST}
    tensors = load_file(exported / MODEL)
    assert {name for name in tensors if name.startswith("tables.")} == {
        f"tables.{name}.weight" for name in trained.values if name != "history_ratings"
    }
    assert sum(name.startswith("dense.") for name in tensors) == len(tensors) - 8 == 8
    assert digest_of(exported / VOCABULARY) == read_manifest(exported).vocabulary


def test_export_reports_its_files_and_refuses_a_used_folder(trained: Trained, tmp_path: Path) -> None:
    command = (EXAMPLE, "--export", tmp_path / "new" / "model", "--save_dir", trained.save_dir)
    line = succeeded(python(*command))
    best = r"best: epoch 2, validation RMSE \d\.\d{4} \(step 16\)"
    assert re.match(rf"exported {state(trained.save_dir, 16)}, {best}, to {tmp_path}/new/model: ", line)
    taken = f"{tmp_path}/new/model exists already; give a new folder, or remove that one."
    with pytest.raises(UserError, match=f"^{re.escape(taken)}$"):
        export(CheckpointConfig(save_dir=str(trained.save_dir)), tmp_path / "new" / "model", make_model)


def test_a_load_refuses_an_export_and_names_the_flags_that_read_it(exported: Path) -> None:
    words = f"{exported} .*--load .*--recommend --save_dir {exported} "
    with pytest.raises(UserError, match=words):
        with_recorded(*parse_given(["--load", str(exported)]))


def test_a_refusal_of_damage_names_a_checkpoint_that_can_be_read(trained: Trained, tmp_path: Path) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 16)
    asked = {
        CONFIG: lambda: with_recorded(*parse_given(["--load", "--save_dir", str(save_dir)])),
        "part-00001.safetensors": lambda: ServedModel.open(save_dir, model=make_model),
    }
    for name, ask in asked.items():
        (save_dir / "step-000000016" / name).write_bytes(b"{")
        with pytest.raises(
            UserError, match=r"the newest complete one there is .*000014; give that folder"
        ) as refusal:
            ask()
        good = Path(str(refusal.value).partition("complete one there is ")[2].partition(";")[0])
        assert ServedModel.open(good, model=make_model).progress.step == 14
        found = with_recorded(*parse_given(["--load", str(good), "--data_path", str(tmp_path)]))
        assert found.data.history == FLAGS.data.history
        shutil.copy(trained.save_dir / "step-000000016" / name, save_dir / "step-000000016" / name)


@pytest.mark.parametrize(
    ("progress", "asked", "words"),
    [
        (Progress(1_234, 3, 0, 0.87654), "best", "best: epoch 3, validation RMSE 0.8765 (step 1,234)"),
        (Progress(1_234, 3), "best", "best: epoch 3, not validated (step 1,234)"),
        (Progress(1_234, 3, 7, 0.87654), "best", "latest: step 1,234"),
        (Progress(1_234, 3, 0, 0.87654), "latest", "latest: step 1,234"),
        (Progress(1_234, 3, 0, 0.87654), "", "step 1,234"),
        (Progress(), "", "step 0, untrained"),
        (Progress(best=0.87654), "best", "best: epoch 0, validation RMSE 0.8765 (step 0, initial rows)"),
    ],
)
def test_which_checkpoint_was_taken_is_reported(progress: Progress, asked: str, words: str) -> None:
    assert describe_choice(progress, asked, "RMSE") == words


def test_an_export_into_a_folder_that_is_invalid_is_refused_with_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*: File name too long\. Fix: "):
        export(CheckpointConfig(), tmp_path / ("a" * 1000), make_model)


def test_a_failed_export_leaves_nothing(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("recsuite.serving.export.write_shard_file", fail)
    with pytest.raises(UserError, match=r"Cannot write .*: No space left on device\. Fix: "):
        export(CheckpointConfig(save_dir=str(trained.save_dir)), tmp_path / "model", make_model)
    assert list(tmp_path.iterdir()) == []


def change_json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    """A change of a file that the manifest then agrees with."""

    def damage(folder: Path) -> None:
        changed = change(json.loads((folder / name).read_bytes()))
        (folder / name).write_text(json.dumps(sealed(changed) if name == MANIFEST else changed))
        if name != MANIFEST:
            reseal(folder)

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(folder / MODEL),
        lambda folder: (folder / MODEL).unlink(),
        lambda folder: (folder / MANIFEST).unlink(),
        change_json(MANIFEST, lambda found: {**found, "about": {"follows": {"base": 1}}}),
        change_json(VOCABULARY, lambda found: {**found, "movie": found["movie"][1:]}),
        change_json(VOCABULARY, lambda found: [1, 2]),
        change_json(FEATURES_FILE, lambda found: {"tables": [{"name": "user"}]}),
    ],
)
def test_a_damaged_or_hostile_export_is_refused(exported: Path, damage: Callable[[Path], None]) -> None:
    damage(exported)
    with pytest.raises(UserError, match=str(exported)):
        ServedModel.open(exported, model=make_model)


# --- deltas ---------------------------------------------------------------------------------------


def test_deltas_applied_in_place_equal_opening_the_checkpoint_again(trained: Trained, exported: Path) -> None:
    model = ServedModel.open(state(trained.save_dir, 8), model=make_model)
    for step in (10, 12, 14):
        assert model.apply(state(trained.save_dir, step))
        anew = ServedModel.open(state(trained.save_dir, step), model=make_model)
        assert model.progress == anew.progress
        for name, table in model.snapshot.tables.items():
            assert torch.equal(table.matrix, anew.snapshot.tables[name].matrix)
        assert torch.equal(model.score(trained.few), anew.score(trained.few))
        # Once more changes nothing.
        assert not model.apply(state(trained.save_dir, step))
    assert not ServedModel.open(exported, model=make_model).apply(state(trained.save_dir, 12))


def test_an_export_accepts_later_deltas(trained: Trained, tmp_path: Path) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "until-10", 10)
    export(CheckpointConfig(save_dir=str(save_dir), checkpoint="latest"), tmp_path / "model", make_model)
    model = ServedModel.open(tmp_path / "model", model=make_model)
    assert model.apply(state(trained.save_dir, 12))
    assert trained.step_of(model.score(trained.few)) == 12


def test_a_delta_out_of_order_is_refused(trained: Trained, tmp_path: Path) -> None:
    model = ServedModel.open(state(trained.save_dir, 8), model=make_model)
    before = model.score(trained.few)
    with pytest.raises(UserError, match=r"number 2 from step 10, expected number 1 from step 8"):
        model.apply(state(trained.save_dir, 12))
    with pytest.raises(UserError, match=r"builds on a step-000000000 .* the model on a step-000000008"):
        model.apply(state(trained.save_dir, 2))
    with pytest.raises(UserError, match="is a full checkpoint, not a delta"):
        model.apply(state(trained.save_dir, 16))
    other = tmp_path / "delta-000000010"
    shutil.copytree(state(trained.save_dir, 10), other)
    reseal(other, run="another")
    with pytest.raises(UserError, match="is of run another, and the model of run"):
        model.apply(other)
    assert model.progress.step == 8
    assert torch.equal(model.score(trained.few), before)


def shorten(tensors: dict[str, torch.Tensor]) -> None:
    tensors["tables.movie.weight"] = tensors["tables.movie.weight"][1:].contiguous()


@pytest.mark.parametrize("damage", [shorten, None])
def test_a_damaged_delta_leaves_the_model_as_it_was(
    trained: Trained, tmp_path: Path, damage: Callable[[dict[str, torch.Tensor]], None] | None
) -> None:
    model = ServedModel.open(state(trained.save_dir, 8), model=make_model)
    before = model.score(trained.few)
    delta = tmp_path / "delta-000000010"
    shutil.copytree(state(trained.save_dir, 10), delta)
    part = delta / "part-00001.safetensors"
    tensors = load_file(part)
    if damage:
        damage(tensors)
        save_file(tensors, part)
        reseal(delta)
    else:
        save_file({name: value + 1 for name, value in tensors.items()}, part)
    with pytest.raises(UserError, match=str(delta)):
        model.apply(delta)
    assert torch.equal(model.score(trained.few), before)


# --- following ----------------------------------------------------------------------------------------


def test_a_follower_takes_deltas_full_checkpoints_and_compactions(trained: Trained, tmp_path: Path) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 2)
    follower = Follower(save_dir, model=make_model, checkpoint="latest")
    assert not follower.refresh()
    for step in (4, 6, 8, 10):
        matrix = follower.model.snapshot.tables["user"].matrix
        publish_state(trained.save_dir, step, save_dir)
        assert follower.refresh()
        assert not follower.refresh()
        assert trained.step_of(follower.model.score(trained.few)) == step
        # A full checkpoint is read as a whole, a delta changes the tables in place.
        assert (follower.model.snapshot.tables["user"].matrix is matrix) == (step != 8)
    # The trainer removes what nobody needs any more.
    for folder in (*reversed(deltas_in(save_dir)[:3]), full_checkpoints_in(save_dir)[0]):
        remove_checkpoint(folder)
    assert not follower.refresh()
    publish_state(trained.save_dir, 14, save_dir)
    with pytest.raises(UserError, match=r"Delta 2 after .* is missing"):
        follower.refresh()
    assert trained.step_of(follower.model.score(trained.few)) == 10
    publish_state(trained.save_dir, 12, save_dir)
    assert follower.refresh()
    assert follower.model.progress.step == 14


def test_a_follower_changes_to_a_new_run_after_its_validation(trained: Trained, tmp_path: Path) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 10)
    follower = Follower(save_dir, model=make_model, checkpoint="latest")
    archive_checkpoints(save_dir)
    assert not follower.refresh()
    assert follower.model.progress.step == 10
    before = follower.model.snapshot
    publish_state(trained.save_dir, 0, save_dir, run="another")
    assert not follower.refresh()
    publish_linked(trained, 2, save_dir, "another", digest_of(full_checkpoints_in(save_dir)[0] / MANIFEST))
    assert not follower.refresh()
    assert follower.model.snapshot is before
    publish_state(trained.save_dir, 8, save_dir, run="another")
    assert follower.refresh()
    assert (follower.model.run, follower.model.progress.step) == ("another", 8)
    publish_linked(trained, 10, save_dir, "another", digest_of(full_checkpoints_in(save_dir)[1] / MANIFEST))
    assert follower.refresh()


def test_a_follower_changes_to_the_initial_rows_of_a_new_run_if_they_were_validated(
    trained: Trained, tmp_path: Path
) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 10)
    follower = Follower(save_dir, model=make_model)
    archive_checkpoints(save_dir)
    making = save_dir / ".making-0"
    shutil.copytree(state(trained.save_dir, 0), making)
    write_manifest(
        making, dataclasses.replace(read_manifest(making), run="another", progress=Progress(best=0.5))
    )
    publish(making, save_dir / f"step-{0:09d}", keep=9)
    latest = Follower(trained.save_dir, model=make_model, checkpoint="latest")
    latest.save_dir = save_dir
    assert not latest.refresh()
    assert follower.refresh()
    assert (follower.model.run, follower.model.progress.step) == ("another", 0)
    assert _has_learned(save_dir, "best")
    assert not _has_learned(save_dir, "latest")


def test_an_untrained_checkpoint_is_served_only_by_its_name(trained: Trained, tmp_path: Path) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 0)
    for use in (Follower, ServedModel.open):
        with pytest.raises(
            UserError, match="holds only step-000000000, which is untrained; wait for the next"
        ):
            use(save_dir)
    export(CheckpointConfig(save_dir=str(state(trained.save_dir, 0))), tmp_path / "model", make_model)
    assert ServedModel.open(tmp_path / "model", model=make_model).progress.step == 0


def test_a_folder_stands_for_its_best_checkpoint_unless_the_latest_is_requested(
    trained: Trained, tmp_path: Path
) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 14)
    for checkpoint, step in (("best", 8), ("latest", 14)):
        assert ServedModel.open(save_dir, checkpoint, model=make_model).progress.step == step
        export(
            CheckpointConfig(save_dir=str(save_dir), checkpoint=checkpoint), tmp_path / checkpoint, make_model
        )
        assert ServedModel.open(tmp_path / checkpoint, model=make_model).progress.step == step
    assert Follower(save_dir, model=make_model, checkpoint="latest").model.progress.step == 14


def test_a_follower_continues_from_an_export(trained: Trained, exported: Path, tmp_path: Path) -> None:
    follower = Follower(
        copied(trained.save_dir, tmp_path / "dumps", 12),
        model=make_model,
        start=exported,
        checkpoint="latest",
    )
    assert not follower.refresh()
    # The folder is behind the export, of the same run.
    assert follower.model.progress.step == 14
    publish_state(trained.save_dir, 16, follower.save_dir)
    assert follower.refresh()
    assert trained.step_of(follower.model.score(trained.few)) == 16


def test_a_reader_writes_nothing(trained: Trained, tmp_path: Path) -> None:
    def listing() -> list[tuple[str, int]]:
        return [(str(path), path.stat().st_mtime_ns) for path in sorted(save_dir.rglob("*"))]

    save_dir = copied(trained.save_dir, tmp_path / "dumps", 14)
    before = [(str(save_dir), save_dir.stat().st_mtime_ns), *listing()]
    Follower(save_dir, model=make_model, checkpoint="latest").refresh()
    assert [(str(save_dir), save_dir.stat().st_mtime_ns), *listing()] == before


class Slowly(dict[str, Any]):
    """Tables between which time passes, as in a large delta."""

    def items(self) -> Any:
        for item in super().items():
            time.sleep(0.003)
            yield item


@contextlib.contextmanager
def hammered(model: ServedModel, values: dict[str, list[Any]]) -> Iterator[list[torch.Tensor]]:
    """The different scores that another thread sees meanwhile, in their order."""
    seen = [model.score(values)]

    def score() -> None:
        scores = model.score(values)
        if not torch.equal(scores, seen[-1]):
            seen.append(scores)

    with meanwhile(score):
        yield seen


def test_a_reader_only_ever_sees_a_whole_model(
    trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_slowly(delta: Path, snapshot: Snapshot) -> ModelChange | None:
        change = read_change(delta, snapshot)
        return change and dataclasses.replace(change, tables=Slowly(change.tables))

    monkeypatch.setattr(serving, "read_change", read_slowly)
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 2)
    follower = Follower(save_dir, model=make_model, checkpoint="latest")
    with hammered(follower.model, trained.few) as seen:
        for step in (4, 6, 8, 10, 12, 14, 16):
            publish_state(trained.save_dir, step, save_dir)
            follower.refresh()
            deadline = time.monotonic() + 100
            while np.abs(seen[-1].numpy() - trained.predictions[step][:FEW]).max() > 1e-6:
                assert time.monotonic() < deadline
                time.sleep(0.001)
    # Each checkpoint as soon as it was there, and nothing in between.
    assert [trained.step_of(scores) for scores in seen] == [2, 4, 6, 8, 10, 12, 14, 16]


def test_a_follower_survives_the_removal_of_files_during_a_read(trained: Trained, tmp_path: Path) -> None:
    save_dir = copied(trained.save_dir, tmp_path / "dumps", 2)
    follower = Follower(save_dir, model=make_model, checkpoint="latest")
    trainer = threading.Thread(target=train_on, args=(trained, save_dir))
    trainer.start()
    seen = set()
    while trainer.is_alive():
        follower.refresh()
        seen.add(trained.step_of(follower.model.score(trained.few)))
    trainer.join()
    follower.refresh()
    assert trained.step_of(follower.model.score(trained.few)) == 16
    assert follower.model.run == "round 4"
    assert len(seen) > 1


def train_on(trained: Trained, save_dir: Path) -> None:
    """Five runs, one after the other, each with full checkpoints, deltas and compactions."""
    for number in range(5):
        archive_checkpoints(save_dir)
        for step in (0, 8, 16):
            publish_state(trained.save_dir, step, save_dir, run=f"round {number}")
            digest = digest_of(full_checkpoints_in(save_dir)[-1] / MANIFEST)
            for delta in (2, 4, 6) if step == 0 else (10, 12, 14) if step == 8 else ():
                publish_linked(trained, delta, save_dir, f"round {number}", digest)
            for folder in (*reversed(deltas_in(save_dir)), *full_checkpoints_in(save_dir)[:-1]):
                if step_of(folder) <= step:
                    remove_checkpoint(folder)


def publish_linked(trained: Trained, step: int, save_dir: Path, run: str, base_digest: str) -> None:
    """Publish a delta of a run whose checkpoint has another digest than the one that was trained."""
    making = save_dir / f".making-{step}"
    shutil.copytree(state(trained.save_dir, step), making)
    manifest: Manifest = read_manifest(making)
    assert manifest.link is not None
    link = dataclasses.replace(manifest.link, base_digest=base_digest)
    write_manifest(making, dataclasses.replace(manifest, run=run, link=link))
    publish(making, save_dir / f"delta-{step:09d}", keep=9)
