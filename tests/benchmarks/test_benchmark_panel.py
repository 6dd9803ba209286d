"""The panel of sets: planted shops, ratios and bars of known results, and a run in miniature."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from recsuite.config.parser import parse_args
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.datasets.preparation.cache import open_columns
from recsuite.metrics import finite
from tests.support.benchmarks import benchmark
from tests.support.launch import EXAMPLE, read_json, succeeded, torchrun

for package in ("implicit", "myfm", "recbole"):
    if find_spec(package) is None:
        pytest.skip(f"needs {package}, of requirements-dev.txt for this Python", allow_module_level=True)

ABOUT = {"machine": "a machine", "versions": {}, "date": "2026-11-26", "iterations": 8}


@pytest.fixture(scope="module")
def panel() -> Any:
    return benchmark("panel")


def run(data: str, system: str, value: float, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    """Result of one system on a set of ratings, or with a task another one."""
    about = {"data": data, "system": system, "task": "ratings", "split": "random", "seed": 0, "num_train": 9}
    metric = "rmse" if more.get("task", "ratings") == "ratings" else "ndcg_at_10"
    return {**about, "metrics": {metric: value}, "seconds": seconds, **more}


def ratings(
    data: str, solved: float, seconds: float = 2.0, split: str = "random", seed: int = 0, drawn: float = 0.9
) -> list[dict[str, Any]]:
    """Results on a set with the biases 1.0, plain factors 0.9, and myFM 0.8 in 2 s with ids, 0.9 in 4 s with
    both sides.
    """
    peers = {"biases": (1.0, 0.1), "plain factors": (0.9, 1.0)}
    machines = {"myFM, ids": (0.8, 2.0), "myFM, who rated what": (0.9, 4.0)}
    systems = {"this": (drawn, 1.0), "this, solved": (solved, seconds), **peers, **machines}
    return [run(data, name, *values, split=split, seed=seed) for name, values in systems.items()]


def ranks(data: str, **systems: float) -> list[dict[str, Any]]:
    """Results on a set of clicks or rankings."""
    return [run(data, name, value, task="rankings", split="leave_one_out") for name, value in systems.items()]


def options(data: Path, **more: Any) -> argparse.Namespace:
    """Flags of a run on one set."""
    known = {"real": [data], "only_real": True, "seeds": 2, "tasks": ["ratings", "rankings"], "sets": []}
    return argparse.Namespace(
        **{**known, "iterations": 8, "ranks": 1, "also": [], "only_this": False, "report": None, **more}
    )


# --- shops ---


def test_the_planted_rank_and_noise_are_those_of_a_shop(panel: Any) -> None:
    events, score = panel.Shop(60, 40, 40_000, rank=5, noise=0.5).draw()
    planted = np.full((60, 40), np.nan)
    user, item = (events[name].str[1:].astype(int) for name in ("customer", "product_id"))
    planted[user, item] = score
    assert not np.isnan(planted).any()
    # Without the price, an effect of the item.
    assert np.linalg.matrix_rank(planted - planted.mean(axis=0)) == 5
    # Far from the ends of the scale; rounding adds the variance 1/12.
    is_inside = (score > 2.5) & (score < 3.5)
    errors = (events["stars"] - score)[is_inside]
    assert float(np.var(errors)) == pytest.approx(0.5**2 + 1 / 12, rel=0.05)
    assert float(errors.mean()) == pytest.approx(0, abs=0.02)
    assert set(events["stars"]) == {1, 2, 3, 4, 5}


def test_items_are_equally_popular_without_a_tail(panel: Any) -> None:
    def shares(tail: float | None) -> np.ndarray:
        events, _ = panel.Shop(60, 40, 40_000, rank=2, tail=tail).draw()
        return np.sort(events["product_id"].value_counts(normalize=True))[::-1]

    assert shares(None) == pytest.approx(np.full(40, 1 / 40), abs=0.005)
    # Zipf's law: 1 / zeta(2) of the first item.
    assert shares(2.0)[0] == pytest.approx(6 / np.pi**2, abs=0.01)


def test_the_three_sizes_have_known_numbers_of_pairs(panel: Any) -> None:
    numbers = [
        len(panel.SHOPS[name].draw()[0].drop_duplicates(["customer", "product_id"]))
        for name in ("small", "wide", "dense")
    ]
    assert numbers == [21_089, 67_763, 51_078]


def test_drawn_shops_cover_the_ranges_and_depend_on_the_seed_alone(panel: Any) -> None:
    shops = panel.drawn_shops()
    assert [*shops] == ["1", "2", "3", "4", "5", "6"]
    assert sorted(shop.rank for shop in shops.values()) == [2, 4, 6, 8, 10, 12]
    assert all(0.2 <= shop.noise <= 0.8 and 300 <= shop.users <= 8000 for shop in shops.values())
    assert sum(shop.tail is None for shop in shops.values()) == 3
    assert shops == panel.drawn_shops()
    assert shops != panel.drawn_shops(seed=1)


def test_a_shop_is_read_as_ratings_without_any_flag(panel: Any, tmp_path: Path) -> None:
    panel.Shop(60, 40, 1_000, rank=2).write(tmp_path / "shop")
    flags = ["--data_path", str(tmp_path / "shop"), "--cache_dir", str(tmp_path / "columns")]
    config = parse_args(flags)
    columns = open_columns(config)
    written = pd.read_parquet(tmp_path / "shop" / "events.parquet")
    pairs = len(written.drop_duplicates(["customer", "product_id"]))
    assert (config.model.task, config.data.split) == ("rating", "time")
    assert columns.num_train + columns.num_validation + columns.num_test == pairs


# --- the panel ---


def test_each_set_has_its_half_and_its_flags(panel: Any, tmp_path: Path) -> None:
    flags = options(tmp_path / "ml-latest-small", only_real=False)
    sets = {each.name: each for each in panel.panel_sets(flags, tmp_path)}
    assert set(panel.CHOSEN) < sets.keys()
    others = sets.keys() - set(panel.CHOSEN)
    assert others == {
        *(f"shop {number}" for number in range(1, 7)),
        "shop small, time",
        *(f"world {name}, {split}" for name in panel.SHOWN_WORLDS for split in ("random", "time")),
        *("ml-latest-small, clicks", "ml-100k, ranking", "ml-100k, clicks", "ml-100k, sequences"),
    }
    assert sets["shop small, time"].flags == ()
    assert sets["shop small"].flags == ("--split", "random", "--test_fraction", "0.2")
    # Fewer factors than planted ones would be a handicap of myFM.
    planted = {name: shop.rank for name, shop in panel.SHOPS.items()}
    assert all(sets[f"shop {name}"].factors == max(10, rank) for name, rank in planted.items())


def test_sets_are_selected_by_task_and_by_the_start_of_their_names(panel: Any, tmp_path: Path) -> None:
    def names(tasks: list[str], *starts: str) -> list[str]:
        sets = panel.panel_sets(options(tmp_path / "ml"), tmp_path)
        return [each.name for each in panel.selected(sets, tasks, starts)]

    assert names(["ratings"], "ml", "shop small") == [
        "ml, random",
        "ml, time",
        "shop small",
        "shop small, time",
    ]
    assert names(["rankings"]) == ["ml, ranking", "ml, clicks"]
    assert names(["sequences"]) == ["ml, sequences"]
    with pytest.raises(
        ValueError, match=r"--sets requires the start of one of these names: .*Got shop smal1"
    ):
        names(["ratings"], "shop smal1")
    with pytest.raises(ValueError, match="--tasks requires some of ratings, rankings, sequences, got rating"):
        names(["rating"])


def test_every_system_has_the_same_events_and_seconds_include_the_start(
    monkeypatch: pytest.MonkeyPatch, panel: Any, tmp_path: Path
) -> None:
    peers, plain = benchmark("peers"), benchmark("plain_factors")
    trained = []

    def train(*flags: str, ranks: int) -> dict[str, Any]:
        config = parse_args([*flags])
        kind = "predictions" if config.model.task == "rating" else "ranks"
        baselines = {name: finite(value) for name, value in open_columns(config).baselines[kind].items()}
        trained.append((config.model.task, config.data.split, config.runtime.seed, ranks))
        test = {"rmse": 0.9} if config.model.task == "rating" else {"hr_at_10": 0.5, "ndcg_at_10": 0.3}
        epochs = [{"seconds": 1.0}, {"seconds": 2.0}]
        return {"baselines": baselines, "test": test, "epochs": epochs, "initial_rows_seconds": 0.5}

    monkeypatch.setattr(peers, "train", train)
    monkeypatch.setattr(plain, "EPOCHS", 2)
    for name, few in (("FACTORS", (8,)), ("REGULARIZATIONS", (0.1,)), ("ALPHAS", (1.0,))):
        monkeypatch.setattr(peers, name, few)
    write_synthetic(tmp_path / "tiny", 3_000, seed=0)
    found = panel.measure(options(tmp_path / "tiny", sets=["tiny"]))
    assert trained == [
        *(("rating", split, seed, 1) for split in ("random", "time") for seed in (0, 1) for _ in range(2)),
        *(("ranking", "leave_one_out", seed, 1) for _ in ("ranking", "clicks") for seed in (0, 1)),
    ]
    systems = {name: [*each.systems] for name, each in _results(panel, found).items()}
    machines = [
        *("this", "this, solved", "biases", "plain factors"),
        *("myFM, ids", "myFM, who rated what"),
    ]
    ranked = ["this", "popularity", "least squares", "EASE"]
    assert systems == {
        **{f"tiny, {split}": machines for split in ("random", "time")},
        **{f"tiny, {task}": ranked for task in ("ranking", "clicks")},
    }
    for each in _results(panel, found).values():
        assert all(len(runs) == 2 for runs in each.systems.values())
        assert each.seconds("this") == 3.5
    events = {name: each.first["num_train"] for name, each in _results(panel, found).items()}
    # A fifth is more than a tenth, and not every rating is a click.
    assert events["tiny, time"] < events["tiny, random"] < 0.9 * 3_000
    assert events["tiny, clicks"] < events["tiny, ranking"]
    (tmp_path / "panel.json").write_text(json.dumps(found))
    one = options(tmp_path / "tiny", sets=["tiny, time"], only_this=True, also=[tmp_path / "panel.json"])
    trained.clear()
    monkeypatch.setattr(panel, "compare_ratings", lambda *_: pytest.fail("another system is trained"))
    again = panel.measure(one)
    assert trained == [("rating", "time", seed, 1) for seed in (0, 0, 1, 1)]
    assert panel.judge(again) == panel.judge(found)
    with pytest.raises(ValueError, match="--only_this requires results of tiny, time in --also"):
        panel.measure(options(tmp_path / "tiny", sets=["tiny, time"], only_this=True))
    printed = panel.render(found)
    assert "| tiny, time | confirmed |" in printed
    assert "2 seeds; 8 draws of myFM" in printed


def test_plain_factors_find_planted_ones_with_the_setting_of_the_best_validation(
    panel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, peers = benchmark("plain_factors"), benchmark("peers")
    monkeypatch.setattr(plain, "SETTINGS", ((1, 5.0), (8, 0.05)))
    draw = np.random.default_rng(0)
    of_users, of_items = draw.normal(size=(200, 2)), draw.normal(size=(60, 2))
    pairs = draw.choice(200 * 60, 6_000, replace=False)
    users, items = np.divmod(pairs, 60)
    labels = 3 + (of_users[users] * of_items[items]).sum(axis=1) + 0.3 * draw.normal(size=6_000)
    parts = (slice(0, 4_500), slice(4_500, 5_000), slice(5_000, 6_000))
    train, validation, test = (
        peers.Ratings(users[part], items[part], labels[part], (200, 60)) for part in parts
    )
    found = plain.plain_factors(train, validation, test, seed=0)
    # The biases find nothing: the spread of the labels is 1.45, and 0.3 is the noise.
    assert 0.3 < found.rmse < 0.6
    assert found.rmse == plain.plain_factors(train, validation, test, seed=0).rmse


def test_sequences_are_those_of_their_own_benchmark_under_the_names_of_the_panel(
    monkeypatch: pytest.MonkeyPatch, panel: Any, tmp_path: Path
) -> None:
    commands = []

    def compared(cases: list[Any], flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
        for case in cases:
            commands.append(case.command)
            for system, ndcg in (("popularity", 0.1), ("SASRec, recbole", 0.2), ("this", 0.25)):
                yield case.run(system, {"ndcg_at_10": ndcg, "hr_at_10": 0.5}, 1.0)

    monkeypatch.setattr(benchmark("sequences"), "compared", compared)
    write_synthetic(tmp_path / "tiny", 3_000, seed=0)
    found = panel.measure(options(tmp_path / "tiny", tasks=["sequences"], sets=["tiny"], report=tmp_path))
    # An interrupted run goes on from the sets that it has measured.
    again = options(tmp_path / "tiny", tasks=["ratings"], sets=[], also=[tmp_path / "panel.json"])
    monkeypatch.setattr(panel, "selected", lambda *_: ())
    assert panel.measure(again)["runs"] == found["runs"]
    assert [command[:4] for command in commands] == 2 * [["--task", "sequence", "--split", "leave_one_out"]]
    (each,) = panel.results_of(found, "sequences")
    assert (each.name, each.rival, each.ratio()) == (
        "tiny, sequences",
        "SASRec, recbole",
        pytest.approx(1.25),
    )
    assert each.first["split"] == "leave_one_out"
    # Of each user all but the newest event, without the validation.
    assert 0 < each.first["num_train"] < 3_000


def _results(panel: Any, found: dict[str, Any]) -> dict[str, Any]:
    """Results of sets by name."""
    return {each.name: each for task in panel.TASKS for each in panel.results_of(found, task)}


# --- results ---


def test_a_set_is_compared_with_the_better_machine_of_all_seeds(panel: Any) -> None:
    runs = [*ratings("a set", 0.80), *ratings("a set", 0.84, seconds=6.0, seed=1)]
    (each,) = panel.results_of({"runs": runs}, "ratings")
    assert each.rival == "myFM, ids"
    assert each.ratio("this, solved") == pytest.approx(0.82 / 0.8)
    assert each.ratio("this, solved", "myFM, who rated what") == pytest.approx(0.82 / 0.9)
    assert each.slowness == pytest.approx(4 / 2)
    # Of drawn rows, the default.
    assert each.ratio(other="plain factors") == 1
    assert each.under_biases == pytest.approx(0.1)
    (each,) = panel.results_of({"runs": ranks("clicks", this=0.3, popularity=0.1, EASE=0.2)}, "rankings")
    assert (each.rival, each.ratio()) == ("EASE", pytest.approx(1.5))


def test_bars_are_judged_over_the_sets(panel: Any) -> None:
    runs = [
        *ratings("ml-100k, random", 0.8),
        *ratings("ml-latest-small, random", 0.81),
        *ratings("shop small", 0.84, seconds=4.0),
        *ratings("ml-latest-small, time", 0.7, split="time", drawn=0.975),
        *ratings("shop small, time", 0.7, split="time", drawn=1.01),
        *ranks("ml-100k, ranking", this=0.19, popularity=0.1, EASE=0.2),
        *ranks("ml-100k, clicks", this=0.2, EASE=0.2),
    ]
    bars = {bar["name"]: (bar["measured"], bar["bar"], bar["reached"]) for bar in panel.judge({"runs": runs})}
    assert bars == {
        # Sets split by time are no part of it.
        "random splits, RMSE of solved rows / better myFM, median": ("1.0125", "at most 1.01", False),
        "random splits, RMSE of solved rows / better myFM, worst": (
            "1.0500 on shop small",
            "at most 1.03",
            False,
        ),
        "ratings, seconds of solved rows / better myFM, worst": ("2.00 on shop small", "at most 1.5", False),
        "ratings, RMSE / plain factors, worst": ("1.1222 on shop small, time", "at most 1.0", False),
        "ml-100k, random, RMSE of solved rows / myFM, who rated what": ("0.8889", "at most 0.995", True),
        "ml-latest-small, random, RMSE of solved rows / myFM, who rated what": (
            "0.9000",
            "at most 0.97",
            True,
        ),
        "ml-latest-small, time, RMSE under the biases": ("0.0250", "at least 0.02", True),
        "shop small, time, RMSE under the biases": ("-0.0100", "at least 0.0", False),
        "ml-100k, ranking, NDCG@10 / EASE": ("0.950", "at least 1.0", False),
        "ml-100k, clicks, NDCG@10 / EASE": ("1.000", "at least 1.0", True),
    }
    # Of what was not measured there is no bar.
    assert [bar["name"] for bar in panel.judge({"runs": ranks("a, clicks", this=1, EASE=1)})] == [
        "a, clicks, NDCG@10 / EASE"
    ]


def test_the_five_parts_of_ml_100k_have_bars_of_their_own(panel: Any) -> None:
    runs = [
        run
        for part in range(1, 6)
        for run in ratings(
            f"ml-100k, u{part}", 0.86 + 0.01 * part, split=f"u{part}", drawn=0.89 + 0.01 * part
        )
    ]
    bars = {bar["name"]: (bar["measured"], bar["reached"]) for bar in panel.judge({"runs": runs})}
    assert bars["ml-100k, u1, RMSE"] == ("0.9000", True)
    assert bars["ml-100k, u1 to u5, mean RMSE"] == ("0.9200", False)
    assert bars["ml-100k, u1, RMSE of solved rows"] == ("0.8700", True)
    assert bars["ml-100k, u1 to u5, mean RMSE of solved rows"] == ("0.8900", False)
    # They are one set, and no random splits.
    assert not any("median" in name for name in bars)


def test_results_without_a_system_of_today_are_not_joined(panel: Any) -> None:
    runs = ratings("a set", 0.8)
    panel.check_systems(runs)
    with pytest.raises(ValueError, match="a set was measured without plain factors"):
        panel.check_systems([run for run in runs if run["system"] != "plain factors"])


def test_tables_and_picture_show_every_set_the_first_half_first(panel: Any, tmp_path: Path) -> None:
    runs = [
        *ratings("shop 1", 0.84, seconds=4.0),
        *ratings("ml-latest-small, time", 0.98, split="time", drawn=0.93),
        *ranks("ml-100k, clicks", this=0.3, popularity=0.1, EASE=0.2),
    ]
    printed = panel.render({**ABOUT, "runs": runs})
    lines = [line for line in printed.splitlines() if line.startswith("|") and "---" not in line]
    assert lines == [
        "| ratings, RMSE | half | training events | biases | plain factors | myFM, ids "
        "| myFM, who rated what | this | / plain factors | seconds | this, solved | / better myFM | seconds "
        "| / better myFM |",
        "| ml-latest-small, time | chosen | 9 | 1.0000 | 0.9000 | 0.8000 | 0.9000 | **0.9300** | 1.033 | 1.0 "
        "| **0.9800** | 1.225 | 2.0 | 1.00 |",
        "| shop 1 | confirmed | 9 | 1.0000 | 0.9000 | 0.8000 | 0.9000 | **0.9000** | 1.000 | 1.0 "
        "| **0.8400** | 1.050 | 4.0 | 2.00 |",
        "| rankings, NDCG@10 | half | training events | popularity | EASE | this | / best other | seconds |",
        "| ml-100k, clicks | confirmed | 9 | 0.1000 | 0.2000 | **0.3000** | 1.500 | 1.0 |",
    ]
    panel.draw({**ABOUT, "runs": runs}, tmp_path / "panel.png")
    assert (tmp_path / "panel.png").read_bytes().startswith(b"\x89PNG")


def test_earlier_results_are_joined_and_those_of_another_call_are_refused(panel: Any, tmp_path: Path) -> None:
    common = benchmark("common")
    (tmp_path / "panel.json").write_text('{"ranks": 2, "shops": {}, "runs": [{"data": "a"}]}')
    assert common.measured_before(tmp_path / "panel.json", {"ranks": 2, "shops": {}}) == [{"data": "a"}]
    with pytest.raises(ValueError, match=r"panel\.json differs in ranks, iterations; measure it again"):
        common.measured_before(tmp_path / "panel.json", {"ranks": 1, "iterations": 300, "shops": {}})


def test_a_table_of_17_000_ratings_alone_is_learned_as_well_as_by_gibbs_sampling(
    panel: Any, tmp_path: Path
) -> None:
    peers = benchmark("peers")
    panel.SHOPS["small"].write(tmp_path / "shop")
    flags = ("--data_path", tmp_path / "shop", "--preset", "solved")
    succeeded(torchrun(2, EXAMPLE, *flags, "--report_dir", tmp_path / "report", timeout=240))
    report = read_json(tmp_path / "report" / "metrics.json")
    columns = open_columns(parse_args([*map(str, flags)]))
    known, test = (peers.ratings_of(columns, *splits) for splits in (("train", "validation"), ("test",)))
    gibbs = peers.factorization_machine(known, test, seed=0, sets=False, iterations=150)
    assert report["test"]["rmse"] < 1.03 * gibbs.rmse
    # Most of the labels' spread is there to be learned.
    assert gibbs.rmse < 0.85 * report["baselines"]["global mean"]["rmse"]
