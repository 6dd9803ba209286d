"""The benchmark of training, in its short form: all is measured; how long it took is not looked at."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.support.benchmarks import benchmark, measured
from tests.support.documents import short_form
from tests.support.launch import ROOT, read_json

BARS = ("2 processes / plain", "2 processes / 1 process, 256", "2 processes / 1 process, 512", "peak memory")
# Numbers in a row, and the rows of all tables: the default model has features and a history too.
MODELS = {"default": (32, 2001 + 2 * 1001 + 3 + 8 + 22 + 82 + 19), "two_tables": (64, 2001 + 1001)}


# It measures for long; nothing but its own script depends on it.
@pytest.mark.soak
def test_the_benchmark_of_training_shows_every_bar_and_leaves_a_picture(tmp_path: Path) -> None:
    found, printed = measured("train", tmp_path, *short_form("train"))
    assert {"date", "machine", "versions", "device"} <= set(found)
    assert found["models"].keys() == MODELS.keys()
    for name, (dim, num_rows) in MODELS.items():
        model = found["models"][name]
        for bar in BARS:
            assert any(bar in each["name"] and model["title"] in each["name"] for each in found["bars"]), bar
        (size,) = model["sizes"]
        assert size["table bytes"] == num_rows * (dim + 1) * 4
        assert all(rate > 0 for rates in size["rates"].values() for rate in rates)
        # What a step has to do takes its time whatever else it does.
        assert 0 < size["work"]["rows"] <= size["work"]["ids"]
        assert all(rate > 0 for rates in size["machine"].values() for rate in rates)
        # Two ranks exchange, and one has nobody to exchange with.
        alone, together = (size["parts"][f"here, {name}"] for name in ("1 process", "2 processes"))
        assert alone.keys() == together.keys()
        assert alone["output exchange"] < together["output exchange"]
        assert all(together[part] > 0 for part in ("feed", "dense", "backward", "optimizer"))
    tables = [line for line in printed.splitlines() if line.startswith("|")]
    assert {line.count("|") for line in tables} == {3, 4}
    for part in together:
        assert sum(line.startswith(f"| {part} |") for line in tables) == len(MODELS), part
    assert (tmp_path / "train.png").stat().st_size > 10_000


def gpus(number: int) -> dict[str, Any]:
    return {"kind": "cuda", "name": "GPU", "number": number, "bytes a second": 3e12}


def test_one_gpu_has_one_process_and_is_compared_at_the_same_batch_size() -> None:
    train = benchmark("train")
    cpu = {"kind": "cpu"}
    planned = [train.num_processes(device) for device in (cpu, gpus(1), gpus(2))]
    assert planned == [(2, 1), (1,), (2, 1)]
    model = train.MODELS["two_tables"]
    for device, teams, batch in ((cpu, {"here 2", "here 1"}, 8192), (gpus(1), {"here 1"}, 4096)):
        variants = train.variants_of(model, 9992, [], device)
        assert {team for team, _ in variants.values() if team.startswith("here")} == teams
        assert {order.batch_size for team, order in variants.values() if team == "plain 1"} == {batch}
        assert ("plain, DDP, 2 processes" in variants) == (len(teams) == 2)


def test_a_report_of_one_gpu_explains_the_missing_second_process(tmp_path: Path) -> None:
    train = benchmark("train")
    result = {**read_json(ROOT / "docs" / "train.json"), "device": gpus(1)}
    for model in result["models"].values():
        for size in model["sizes"]:
            alone = {name: rates for name, rates in size["rates"].items() if "2 processes" not in name}
            size.update({"rates": alone, "parts": {"here, 1 process": {}}, "machine": {}})
    text = train.render(result)
    assert "2 processes" not in text
    assert "With one GPU there is one process" in text
    # Of both models: each of the three sizes.
    for model in result["models"].values():
        rates = [median(size["rates"]["here, 1 process"]) for size in model["sizes"]]
        assert " | ".join(f"**{round(rate, -3):,.0f}**" for rate in rates) in text
    assert "peak memory of 1 process" in text
    bars = train.judge(result)
    assert bars
    assert not [bar for bar in bars if "2 processes" in bar["name"]]
    assert any("here, 1 process / plain" in bar["name"] for bar in bars)
    # Neither a second process nor parts of a step.
    train.draw(result, tmp_path / "train.png")
    assert (tmp_path / "train.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_has_the_fastest_variant_of_each_kind() -> None:
    train = benchmark("train")
    kind, fast = "plain, dense Adam", "plain, dense Adam, compiled, 2 threads"
    size = {"rates": {f"{kind}, 1 thread": [2.0], fast: [3.0], f"{kind}, large": [9.0], "here": [5.0]}}
    assert sorted(train._rates_of(size, kind)) == [2.0, 3.0]
    assert train._rates_of(size, "plain, SparseAdam") == []
