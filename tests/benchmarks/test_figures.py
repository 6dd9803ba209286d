"""Committed results of benchmarks: documents have their tables, and bars are those that the code computes."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.benchmarks import benchmark
from tests.support.launch import ROOT, python, read_json, succeeded

DOCS = ROOT / "docs"
# Benchmark, its results, and the word of the marks in its page.
TABLES = [
    *(
        (name, name, name)
        for name in ("results", "checkpoint", "feed", "train", "quality", "precision", "clicks", "panel")
    ),
    ("dynamic", "dynamic", "costs"),
    ("dynamic_delta", "dynamic_delta", "delta"),
    ("dynamic_quality", "dynamic_quality", "capacity"),
    ("dynamic_train", "dynamic_train", "training"),
    ("online_quality", "online_quality", "online quality"),
    ("online_serving", "online_serving", "online"),
    ("kafka", "kafka", "kafka"),
    ("stream_cost", "stream_cost", "stream cost"),
    ("partitions", "partitions", "partitions"),
    ("sequences", "sequences", "sequences"),
    ("sequences", "sequences_planted", "sequences_planted"),
    ("sequences_speed", "sequences_speed", "speed"),
    ("chained", "pipeline", "pipeline"),
    ("ctr_auc", "ctr_auc", "ctr"),
    ("multitask_auc", "multitask_auc", "multitask"),
    ("nearest", "nearest", "nearest"),
    ("recommend", "recommend", "limits"),
    ("scoring", "scoring", "scoring"),
    ("export", "export", "export"),
    ("object_store", "object_store", "object_store"),
    ("storage", "storage", "storage"),
    ("event_types", "event_types", "event types"),
    ("ingest", "ingest_texts", "ingest_texts"),
    ("ingest", "ingest_numbers", "ingest_numbers"),
]
NEEDS_OTHER_SYSTEMS = ("clicks", "panel", "sequences", "sequences_speed")
# Results of which every bar is reached, but for those that are named.
REACHED = {
    "feed": (),
    "exchange": (),
    "clicks": (),
    "precision": (),
    "quality": ("time 80/20, RMSE under the biases",),
}

FIGURES = ("curves", "checkpoint", "feed", "train", "nearest", "panel")


@pytest.mark.parametrize(("name", "results", "mark"), TABLES, ids=[results for _, results, _ in TABLES])
def test_the_table_in_a_page_is_that_of_the_committed_results(name: str, results: str, mark: str) -> None:
    if name in NEEDS_OTHER_SYSTEMS and find_spec("implicit") is None:
        pytest.skip("needs the package implicit, of requirements-dev.txt")
    script, found = benchmark(name), read_json(DOCS / f"{results}.json")
    assert benchmark("common").text_between(script.PAGE, mark) == script.render(found)
    if hasattr(script, "judge"):
        assert script.judge(found) == found["bars"]


@pytest.mark.parametrize("name", REACHED)
def test_the_committed_results_reach_their_bars(name: str) -> None:
    bars = read_json(DOCS / f"{name}.json")["bars"]
    assert [bar["name"] for bar in bars if not bar["reached"]] == [*REACHED[name]]


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_a_picture(name: str) -> None:
    assert (DOCS / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_page_without_the_marks_of_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"README\.md requires the marks <!-- costs -->"):
        benchmark("common").text_between(ROOT / "README.md", "costs")


def test_the_benchmark_of_the_readme_explains_itself() -> None:
    output = succeeded(python(ROOT / "benchmarks" / "results.py", "--help"))
    assert "Make the picture and the table" in output
