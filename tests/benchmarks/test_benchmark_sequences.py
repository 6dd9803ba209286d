"""The comparison of what comes next: what its peers know and learn, recbole's metrics, runs in miniature."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.columns import Columns
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.metrics import measure_ranks
from tests.support.benchmarks import benchmark, measured
from tests.support.csv_ratings import write_ratings

for package in ("implicit", "recbole"):
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}, of requirements-dev.txt", allow_module_level=True)

# User, movie, star and second: two who go from 1 to 2 to 3, and one who goes from 2 to 4.
LINES = [
    (1, 1, 10),
    (1, 2, 20),
    (1, 3, 30),
    (1, 5, 90),
    (2, 1, 11),
    (2, 2, 12),
    (2, 3, 13),
    (2, 4, 80),
    (3, 5, 14),
    (3, 2, 15),
    (3, 4, 16),
    (3, 1, 70),
]


@pytest.fixture(scope="module")
def sequences() -> Any:
    return benchmark("sequences")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "tiny"
    write_synthetic(folder, 1_000, seed=0)
    return folder


def columns_of(folder: Path, lines: list[tuple[int, int, int]], validation: float = 0.0) -> Columns:
    """Of users, movies and seconds; the last line of each user is the test."""
    write_ratings(folder, ((user, movie, 4.0, time) for user, movie, time in lines))
    flags = ["--split", "leave_one_out", "--validation_fraction", str(validation), "--data_path", str(folder)]
    return open_columns(parse_args(flags))


@pytest.fixture(scope="module")
def columns(tmp_path_factory: pytest.TempPathFactory) -> Columns:
    return columns_of(tmp_path_factory.mktemp("lines"), LINES)


def test_metrics_equal_those_of_recbole(sequences: Any) -> None:
    ranks = np.random.default_rng(0).integers(1, 25, 1_000)
    recommended = np.tile(np.arange(1, 11), (1_000, 1))
    found = sequences.metrics_of(recommended, ranks)
    ours = measure_ranks(ranks)
    assert found == pytest.approx({name: ours[name] for name in found}, abs=1e-12)
    assert found.keys() == {"hr_at_10", "ndcg_at_10"}
    # By hand: one in the first place, one in the third, and one in none.
    found = sequences.metrics_of(recommended[:3], np.array([1, 3, 11]))
    assert found == pytest.approx({"hr_at_10": 2 / 3, "ndcg_at_10": (1 + 1 / 2) / 3})


def test_stubs_of_missing_packages_are_removed_afterwards(sequences: Any) -> None:
    missing = [name for name in sequences.UNCALLED if find_spec(name.partition(".")[0]) is None]
    sequences.load("evaluator.metrics")
    assert not [name for name in missing if name in sys.modules]


def test_known_events_are_in_time_order(sequences: Any, columns: Columns) -> None:
    users, items = sequences.known_before(columns, "test")
    assert list(zip(users.tolist(), items.tolist(), strict=True)) == [
        *((0, 0), (1, 0), (1, 1), (1, 2), (2, 4), (2, 1), (2, 3), (0, 1), (0, 2)),
    ]


def test_recent_popularity_uses_the_newest_events(sequences: Any, columns: Columns) -> None:
    of_late = sequences._recent(columns, "test", 3)[0]
    # The last three are of movies 4, 2 and 3; movie 2 has more in all, and so has 1, but none of late.
    assert np.argsort(-of_late).tolist()[:3] == [1, 2, 3]
    assert of_late[0] < 1


def test_a_counted_chain_counts_successors(sequences: Any, tmp_path: Path) -> None:
    columns = columns_of(tmp_path, [*LINES, (4, 4, 1), (4, 3, 2), (4, 2, 95)])
    # From 4 user 4 went to 3: before it was level with 1 for user 3, whose movie 1 is now behind it. From 3
    # nothing came as before, and user 4 is left with 1, which two had, 2, which three had, and 5.
    ranks = np.array([2, 1, 2, 1])
    assert sequences.counted_chain(columns).metrics == pytest.approx(measure_ranks(ranks).values)


def test_sequences_end_before_the_item_to_predict(sequences: Any, columns: Columns) -> None:
    sequences = sequences.Sequences.of(columns, "test")
    begins, ends = sequences.nexts()
    batch = sequences.batch(begins, ends)
    shown = [
        ([item for item in row if item], length, int(sequences.items[end]) + 1)
        for row, length, end in zip(
            batch["item_id_list"].tolist(), batch["item_length"].tolist(), ends.tolist(), strict=True
        )
    ]
    assert shown == [
        *(([1], 1, 2), ([1, 2], 2, 3)),
        *(([1], 1, 2), ([1, 2], 2, 3)),
        *(([5], 1, 2), ([5, 2], 2, 4)),
    ]


def test_sasrec_reads_the_last_items_alone(sequences: Any) -> None:
    sequences = sequences.Sequences(np.arange(80, dtype=np.int32), np.array([0, 80]))
    batch = sequences.batch(np.array([0]), np.array([70]))
    assert batch["item_id_list"].tolist() == [[*range(21, 71)]]
    assert batch["item_length"].tolist() == [50]


def test_windows_predict_each_event_except_the_first_of_a_user_once(sequences: Any) -> None:
    lengths = np.array([1, 2, 130, 51, 300])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sequences = sequences.Sequences(np.arange(offsets[-1], dtype=np.int32), offsets)
    begins, ends = sequences.windows(np.random.default_rng(0))
    assert (ends - begins).max() == 50
    foreseen = np.concatenate([np.arange(begin, end) + 1 for begin, end in zip(begins, ends, strict=True)])
    assert sorted(foreseen.tolist()) == sorted({*range(offsets[-1])} - {*offsets[:-1].tolist()})
    # None reaches from one user to another.
    assert (np.searchsorted(offsets, begins, "right") == np.searchsorted(offsets, ends, "right")).all()
    assert sequences.windows(np.random.default_rng(1))[0].tolist() != begins.tolist()


def test_batched_positions_equal_those_of_the_package_per_sequence(sequences: Any) -> None:
    import torch

    torch.manual_seed(0)
    model = sequences.sasrec(20).eval()
    items = torch.randint(1, 21, (1, 50))
    states = sequences.states_of(model, items)[0]
    for length in (1, 7, 50):
        padded = items * (torch.arange(50) < length)
        (found,) = model.forward(padded, torch.tensor([length]))
        assert states[length - 1].tolist() == pytest.approx(found.tolist(), abs=1e-5)


def test_sasrec_of_the_package_learns_the_next_item(sequences: Any, tmp_path: Path) -> None:
    # Everybody goes round a circle of 30 movies, each from somewhere else.
    lines = [(user, (user + step) % 30 + 1, step) for user in range(1, 41) for step in range(6)]
    columns = columns_of(tmp_path, lines, validation=0.1)
    dropped = {"hidden_dropout_prob": 0.0, "attn_dropout_prob": 0.0}
    found = sequences.sasrec_of(columns, dropped, seed=0, epochs=30, patience=30)
    assert found.metrics["ndcg_at_10"] > 0.6
    assert found.seconds > 0


def test_results_are_compared_with_the_best_other_system_and_the_oracle(sequences: Any) -> None:

    def runs(split: str, **systems: float) -> list[dict[str, Any]]:
        return [
            {"data": "set", "task": split, "system": name, "metrics": {"ndcg_at_10": value, "hr_at_10": 1.0}}
            for name, value in systems.items()
        ]

    judged = sequences.judge(
        {"runs": [*runs("leave_one_out", EASE=0.1, SASRec=0.2, this=0.3), *runs("time", EASE=1, this=0)]}
    )
    assert [(bar["name"], bar["measured"], bar["reached"]) for bar in judged] == [
        ("set, leave one out, NDCG@10 / SASRec", "1.500", True)
    ]
    (known,) = sequences.judge({"runs": runs("leave_one_out", oracle=0.5, popularity=0.1, this=0.4)})
    assert (known["name"], known["measured"], known["reached"]) == (
        "set, leave one out, NDCG@10 / oracle",
        "0.800",
        False,
    )


def test_a_planted_order_is_shown_between_popularity_and_its_oracle(tmp_path: Path) -> None:
    short = ["--planted", "--ratings", 1_000, "--seeds", 1]
    found, printed = measured(
        "sequences", tmp_path, *short, "--train", "--epochs", 2, result="sequences_planted"
    )
    systems = ["a random order", "popularity", "oracle", "counted chain", "this"]
    assert [run["system"] for run in found["runs"]] == systems
    (this,) = (run for run in found["runs"] if run["system"] == "this")
    # What was served is what was evaluated, by the code of another program.
    assert this["recbole differs by"] <= 1e-9
    assert "| synthetic, leave one out, 1 seed | oracle |" in printed


# They measure for long; nothing but their own script depends on them.
@pytest.mark.soak
def test_all_systems_are_shown_on_splits_that_were_measured_one_after_the_other(
    data: Path, tmp_path: Path
) -> None:
    short = ["--only_real", "--real", data, "--seeds", 1, "--epochs", 1, "--task", "ranking"]
    for split, also in (("leave_one_out", ()), ("time", ("--also", tmp_path / "sequences.json"))):
        more = ("--splits", split, *also, "--train", "--epochs", 1)
        found, printed = measured("sequences", tmp_path, *short, *more)
    names = ["popularity", "most recent", "EASE", "least squares", "counted chain", "SASRec, recbole", "this"]
    for split, shown in (("leave_one_out", "leave one out"), ("time", "newest fifth")):
        runs = [run for run in found["runs"] if run["task"] == split]
        assert [run["system"] for run in runs] == names
        assert all(f"| tiny, {shown}, 1 seed | {name} |" in printed for name in names)


@pytest.mark.soak
def test_the_speed_is_shown_beside_that_of_the_package(tmp_path: Path) -> None:
    short = ["--ratings", 1_000, "--rounds", 1, "--batch", 16, "--steps", 1, "--task", "ranking"]
    found, printed = measured("sequences_speed", tmp_path, *short, "--train", "--epochs", 1)
    assert found["rates"].keys() == {"this, 1 process", "this, 2 processes", "recbole"}
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
    assert [bar["name"] for bar in found["bars"]] == ["this / recbole, one process each", "2 processes / 1"]
    assert "| recbole |" in printed
