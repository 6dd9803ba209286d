"""The script of retrieval on any ranks: an index that is exported, follows, is measured and shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from example import make_model
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.serving.served import Follower, ServedModel
from tests.support.launch import ROOT, python, read_json, succeeded, torchrun
from tests.support.learned import check_learned, share_in

pytest.importorskip("faiss")
RETRIEVAL = ROOT / "example" / "retrieval.py"
FLAGS = ("--batch_size", 120, "--embedding_dim", 16, "--history", 10, "--epochs", 1)


def test_two_epochs_learn_the_order_and_the_taste_of_synthetic_users(tmp_path: Path) -> None:
    write_synthetic(tmp_path / "ratings", 30_000, seed=0)
    # The batches are those of the default in proportion to the data.
    flags = ("--data_path", tmp_path / "ratings", "--report_dir", tmp_path, "--batch_size", 150)
    output = succeeded(python(RETRIEVAL, "--epochs", 2, "--train", *flags))
    check_learned(read_json(tmp_path / "metrics.json"), 0.6)
    assert share_in(output) > 0.6


@pytest.mark.parametrize(
    "num_ranks", [pytest.param(1, marks=pytest.mark.soak), pytest.param(2, marks=pytest.mark.soak), 3]
)
def test_the_index_of_a_training_on_any_ranks_is_exported_followed_and_shown(
    num_ranks: int, tmp_path: Path
) -> None:
    write_synthetic(tmp_path / "ratings", 6_000, seed=0)
    dumps = tmp_path / "dumps"
    more = ("--dump_every", 10, "--save_dir", dumps)
    flags = (RETRIEVAL, "--data_path", tmp_path / "ratings", *FLAGS, *more)
    output = succeeded(python(*flags) if num_ranks == 1 else torchrun(num_ranks, *flags))
    (export,) = dumps.glob("export-*")
    assert f"with its index, to {export}: " in output
    found = re.search(r"the index finds (\S+) of the 100 best of (\d+) movies", output)
    assert found is not None
    assert float(found[1]) == 1
    # The model and the index that a server opens are those of the sharded training.
    served, best = ServedModel.open(export, model=make_model), ServedModel.open(dumps, model=make_model)
    assert served.snapshot.lists is not None
    assert served.recommend([1, 2], approximate=True) == best.recommend([1, 2])
    follower = Follower(dumps, model=make_model, start=export, checkpoint="latest")
    follower.refresh()
    latest = ServedModel.open(dumps, "latest", model=make_model)
    assert follower.model.recommend([1, 2], approximate=True) == latest.recommend([1, 2])
    # What a person sees: what the user had, and ten movies with their titles.
    page = output[output.index("user ") :] if "rated" in output else ""
    assert re.search(r"user \d+ rated \d+ movies, and liked most:", page)
    assert len(re.findall(r"\| +\d+ \| .+ \(\d{4}\) +\| +\S+ \|$", page, re.MULTILINE)) == 10
