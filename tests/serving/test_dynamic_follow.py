"""A user who did not exist yesterday: from the file that grows to what is recommended, without a restart."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from example import make_model
from recsuite.serving.served import Follower
from tests.support.launch import EXAMPLE, started


def append(path: Path, days: range, users: list[str], items: list[str]) -> None:
    """Events of some days, one every ten minutes."""
    draw = np.random.default_rng(days.start)
    times = pandas.date_range(f"2026-01-{days.start:02}", f"2026-01-{days.stop:02}", freq="10min")[:-1]
    frame = pandas.DataFrame(
        {
            "user_id": draw.choice(users, len(times)),
            "item_id": draw.choice(items, len(times)),
            "stars": draw.integers(1, 6, len(times)),
            "date": times,
        }
    )
    frame.to_csv(path, mode="a", header=not path.exists(), index=False)


def next_page(stream: Any) -> str:
    """All lines until the last row of a table of three."""
    lines: list[str] = []
    while not lines or not lines[-1].startswith("|    3 |"):
        line = stream.readline()
        assert line, "".join(lines)
        lines.append(line)
    return "".join(lines)


@pytest.mark.soak
def test_a_new_user_of_a_stream_is_known_after_the_next_delta(tmp_path: Path) -> None:
    data, dumps = tmp_path / "shop", tmp_path / "dumps"
    data.mkdir()
    users, items = [f"u{user}" for user in range(12)], [f"i{item}" for item in range(60)]
    append(data / "events.csv", range(1, 4), users, items)
    own = [*map(str, (EXAMPLE, "--data_path", data, "--save_dir", dumps))]
    training = [*own, "--stream", "--vocabulary", "dynamic", "--window", "1d", "--inc_dump", "--follow_data"]
    training += ["--capacity", "1000"]
    training += ["--batch_size", "48", "--embedding_dim", "4", "--mlp_dims", "4", "--history", "0"]
    asking = [*own, "--recommend", "--user", "newcomer", "--top", "3", "--follow"]
    with started([sys.executable, *training]) as trainer, started([sys.executable, *asking]) as viewer:
        page = next_page(viewer.stdout)
        assert "the model knows no user newcomer; these are the popular items" in page
        follower = Follower(dumps, model=make_model, checkpoint="latest")
        assert not follower.model.knows("user", "newcomer")
        append(data / "events.csv", range(4, 7), [*users, "newcomer"], [*items, "novelty"])
        while "knows no user" in page:
            page = next_page(viewer.stdout)
        assert re.search(r"user newcomer rated \d+ items", page)
        for process in (viewer, trainer):
            process.send_signal(signal.SIGINT)
        _, errors = viewer.communicate(timeout=60)
        trainer.communicate(timeout=60)
    assert errors == ""
    assert follower.refresh()
    model = follower.model
    assert model.knows("user", "newcomer")
    ((first, *_),) = model.recommend(["newcomer"], k=1)
    assert first[0] in {*items, "novelty"}
    # Also of who came with a delta the text is known.
    assert sorted(item for item, _ in model.recommend(["newcomer"], k=99)[0]) == sorted([*items, "novelty"])
