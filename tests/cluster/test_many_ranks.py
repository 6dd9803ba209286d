"""Many ranks: what a rank sends, and keeps in memory, grows no faster than their number.

9 ranks as threads of one process; under `soak` 64 as processes, and 256 as threads. Each does what a
training does (`many_ranks.py`), and is compared with the ranks of a smaller launch of the same kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.testing._internal.distributed.multi_threaded_pg import ProcessLocalGroup

from recsuite.checkpoint.format import check_files, read_manifest
from recsuite.datasets.movielens.synthetic import write_synthetic
from tests.support.launch import SUPPORT, python, read_json, succeeded

# Kind of the ranks, their number, that of the smaller launch, and seconds of the larger one.
LAUNCHES = [
    pytest.param(("threads", 9, 3, 30), id="9"),
    pytest.param(("processes", 64, 16, 120), id="64", marks=pytest.mark.soak),
    # All in one process, on one core: 32 take three times as long as 16.
    pytest.param(("threads", 256, 64, 7_200), id="256", marks=pytest.mark.soak),
]
# Of bytes, for what does not depend on the ranks in the same way: ids that two ranks both request.
MARGIN = 1.1
# Of memory, which is allocated in pages and arenas.
MEMORY_MARGIN = 1.5
# Of a shard file in a manifest: name, size and digest.
LEAST_BYTES, MOST_BYTES = 100, 130


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int, int], dict[str, Any]]:
    """Launches so many ranks of a kind, once, and returns what they found."""
    folder = tmp_path_factory.mktemp("many")
    write_synthetic(folder / "data", 3_000, seed=0)

    @functools.cache
    def run(kind: str, ranks: int, seconds: int) -> dict[str, Any]:
        results, dumps = folder / f"{kind}-{ranks}.json", folder / f"{kind}-{ranks}"
        script = SUPPORT / "many_ranks.py"
        succeeded(python(script, results, folder / "data", dumps, ranks, kind, timeout=seconds))
        found: dict[str, Any] = read_json(results)
        return {**found, "folder": str(dumps)}

    return run


@pytest.fixture(params=LAUNCHES, scope="module")
def both(
    request: pytest.FixtureRequest, launch: Callable[[str, int, int], dict[str, Any]]
) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """Results of the fewer and of the more ranks, and their numbers."""
    kind, ranks, fewer, seconds = request.param
    if kind == "threads" and not hasattr(ProcessLocalGroup, "all_to_all_single"):
        pytest.skip("the ranks as threads of torch 2.11 exchange no rows")
    found = launch(kind, fewer, seconds), launch(kind, ranks, seconds), fewer, ranks
    for number, each in zip((fewer, ranks), found[:2], strict=True):
        print_costs(kind, number, each)
    return found


def print_costs(kind: str, ranks: int, found: dict[str, Any]) -> None:
    """Print the costs of each part as a table; `pytest -s` shows it."""
    print(f"\n{ranks} {kind}; manifest {found['manifest']:,} bytes, {found['connections']} connections")
    for part, costs in found["costs"].items():
        print(f"{part:<16}", *(f"{value:>12,.2f} {name}" for name, value in costs.items()))


def test_what_a_rank_sends_grows_no_faster_than_the_number_of_ranks(both: Any) -> None:
    few, many, fewer, ranks = both
    # A message to each other rank. A cost that grew with the square would grow by the square of this.
    growth = (ranks - 1) / (fewer - 1)
    for part, costs in many["costs"].items():
        # What shares memory in the smaller launch sends through gloo between machines in the larger one.
        is_mixed = part == "step" and many["kind"] != few["kind"]
        before = few["costs"]["step by gloo" if is_mixed else part]
        assert costs["messages"] <= MARGIN * growth * before["messages"], part
        assert costs["bytes"] <= MARGIN * growth * before["bytes"], part


def test_a_vote_has_as_many_values_on_any_number_of_ranks(both: Any) -> None:
    few, many, *_ = both
    assert len(many["votes"]) >= 15
    # 256 ranks restore nothing.
    assert many["votes"] == few["votes"][: len(many["votes"])]


def test_a_broadcast_sends_no_copy_for_each_rank(both: Any) -> None:
    few, many, fewer, ranks = both
    # Along a tree of the ranks: rank 0 sends as many copies as the tree has levels.
    for found, number in ((few, fewer), (many, ranks)):
        copies = found["costs"]["broadcast"]["bytes"] / found["broadcast"]
        assert 1 <= copies <= MARGIN * number.bit_length()


def test_a_manifest_grows_by_one_file_for_each_rank(both: Any) -> None:
    few, many, fewer, ranks = both
    assert LEAST_BYTES < (many["manifest"] - few["manifest"]) / (ranks - fewer) < MOST_BYTES
    newest = max(Path(many["folder"]).glob("step-*[0-9]"))
    manifest = read_manifest(newest)
    assert manifest.world_size == ranks
    assert sum(entry.name.endswith(".safetensors") for entry in manifest.files) == ranks
    check_files(newest, manifest)


def test_memory_of_a_rank_grows_no_faster_than_the_number_of_ranks(both: Any) -> None:
    few, many, fewer, ranks = both
    for kind in ("private MiB", "page tables MiB"):
        after, before = (
            sum(max(0.0, costs[kind]) for costs in found["costs"].values()) for found in (many, few)
        )
        assert after <= MEMORY_MARGIN * ranks / fewer * before


def test_many_ranks_train_and_restore_what_they_wrote(both: Any) -> None:
    _, many, _, ranks = both
    assert many["kind"] == ("SharedExchange" if ranks <= many["machine"] else "MixedExchange")
    # Squares of errors of ratings from 1 to 5.
    assert all(0 < loss < 5 for loss in many["losses"])
    if states := many["states"]:
        written, restored = states
        assert written == restored
        assert len(written) > 15
