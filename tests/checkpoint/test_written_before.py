"""A full checkpoint and a delta that an older program wrote on two ranks can be loaded on three.

written_before/ was written on two ranks with --dataset synthetic --synthetic_ratings 1000 --embedding_dim 4
--mlp_dims 4 --batch_size 64 --epochs 1 --inc_dump, before flags had sections and progress had its name. Its
ratings are in written_before_data/. That program printed these metrics when it loaded the two, and a log
loss, for which there are too few events.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from tests.support.launch import EXAMPLE, ROOT, succeeded, torchrun

WRITTEN = ROOT / "tests" / "checkpoint" / "written_before"
RATINGS = WRITTEN.with_name("written_before_data")
METRICS = r"\| this model, step 7 +\| +1\.1088 \| +0\.9307 \| +0\.5764 \| +- \|"


def test_checkpoints_of_an_older_program_have_the_same_metrics_on_another_number_of_ranks(
    tmp_path: Path,
) -> None:
    shutil.copytree(WRITTEN, tmp_path / "dumps")
    shutil.copytree(RATINGS, tmp_path / "data")
    data = ("--data_path", tmp_path / "data")
    said = succeeded(torchrun(3, EXAMPLE, "--load", "--save_dir", tmp_path / "dumps", *data))
    assert re.search(METRICS, said)
    assert (
        "missing 0, unexpected 0; best: epoch 1, validation RMSE 0.8357 (step 7), written by 2 ranks" in said
    )
