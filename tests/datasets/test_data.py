"""The data of a run: read by one rank of a machine, the same to the last byte on all machines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.opening import _check_same_data, check_same_flags, with_machine_flags
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError
from tests.support.launch import SUPPORT, succeeded, torchrun


def test_one_rank_of_a_machine_reads_the_files_and_machines_with_other_data_are_refused(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(synthetic_folder, other, ignore=shutil.ignore_patterns(".columns"))
    ratings = (other / "ratings.dat").read_bytes()
    user, movie, stars, time = ratings.splitlines()[0].split(b"::")
    changed = b"::".join([user, movie, b"1" if stars == b"5" else b"5", time])
    # One rating has other stars: the counts and the tables are alike.
    (other / "ratings.dat").write_bytes(ratings.replace(ratings.splitlines()[0], changed, 1))
    script = SUPPORT / "data_ranks.py"
    output = succeeded(torchrun(2, script, synthetic_folder, other, timeout=60))
    said = sorted(line for line in output.splitlines() if line.startswith(("digests of rank ", "rank ")))
    assert said[0].startswith("digests of rank 0: ")
    assert int(said[0].split()[-1]) > 10
    assert said[1] == "digests of rank 1: 0"
    sentence = said[2].removeprefix("rank 0: ")
    assert said[3] == f"rank 1: {sentence}"
    assert "Ranks 1 on " in sentence
    assert "have other data than rank 0 on " in sentence
    assert str(other) in sentence
    assert "rows.npy" in sentence
    assert sentence.endswith("differ; give all machines the same files.")


def test_machines_whose_vocabularies_alone_differ_are_refused(synthetic_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(synthetic_folder, other, ignore=shutil.ignore_patterns(".columns"))
    for name in ("users.dat",):
        lines = (other / name).read_text().splitlines()
        # The same number of genders, with another name for one of them.
        (other / name).write_text("\n".join(line.replace("::F::", "::A::") for line in lines) + "\n")
    here, there = (open_columns(Config.of(data_path=str(folder))) for folder in (synthetic_folder, other))
    assert here.digest == there.digest
    machines: list[tuple[str, Columns]] = [("alpha", here), ("alpha", here), ("beta", there), ("beta", there)]
    with pytest.raises(
        UserError, match=r"Ranks 2, 3 on beta .* rank 0 on alpha: .* and vocabulary.json differ"
    ):
        _check_same_data(machines)
    agreeing: Any = [("alpha", here), ("beta", open_columns(Config.of(data_path=str(synthetic_folder))))]
    _check_same_data(agreeing)


def test_machines_with_other_flags_are_refused_and_their_own_folders_and_workers_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = Config.of(lr=0.04, data_path="here"), Config.of(lr=0.02, data_path="there", num_workers=2)

    def all_gather_object(mine: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        return [mine(), {**mine(), "lr": 0.02}]

    monkeypatch.setattr("recsuite.datasets.opening.all_gather_object", all_gather_object)
    with pytest.raises(UserError, match=r"^--lr is 0.02 on rank 1 and 0.04 on rank 0; give the same flags"):
        check_same_flags(here)
    monkeypatch.setattr("recsuite.datasets.opening.all_gather_object", lambda mine: [mine(), mine()])
    check_same_flags(here)
    decided = with_machine_flags(there, here)
    assert (decided.optimizer.lr, decided.data.data_path, decided.loader.num_workers) == (0.04, "there", 2)
