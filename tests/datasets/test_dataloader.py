"""Batches as a pure function of position: the same for any pool, each rating once for any number of ranks."""

from __future__ import annotations

import itertools
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recsuite.config.config import Config
from recsuite.datasets import loader as loader_module
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.batching import Batch
from recsuite.datasets.columns import Columns
from recsuite.datasets.loader import EpochSampler, build_dataloader, choose_num_workers
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import UNKNOWN_ROW
from recsuite.datasets.source import locate
from recsuite.errors import UserError, counted
from tests.support.batches import lists_of
from tests.support.launch import GPUS, python, succeeded
from tests.support.starting import REAL_WORKERS

# Of a model that reads the order of events, and draws items beside them.
SEQUENCE = {"task": "sequence", "history": 5, "negatives": 100}
# Flags of batches with different contents.
KINDS: dict[str, dict[str, Any]] = {
    "no history": {"history": 0},
    "history": {"history": 5},
    "ages": {"task": "ranking", "history": 5, "history_weights": "learned"},
    "drawn items": {"task": "ranking", "negatives": 30, "history": 2},
    "sequence": SEQUENCE,
    "days": {"split": "random", "day_feature": "user", "history": 5},
    "dynamic ids": {"vocabulary": "dynamic", "history": 5},
}
# Numbers of workers and start methods; the soak combines all with all kinds of batches.
POOLS = [*itertools.product((1, 2, 4), ("spawn", "forkserver", "fork"))]
SOME_POOLS = {"no history": (2, "spawn"), "history": (1, "fork"), "sequence": (4, "forkserver")}


@pytest.fixture(scope="module")
def config(synthetic_folder: Path) -> Config:
    return Config.of(data_path=str(synthetic_folder), batch_size=256, history=0)


@pytest.fixture(scope="module")
def columns(config: Config) -> Columns:
    return open_columns(config)


@pytest.mark.parametrize(
    ("kind", "pool"),
    [
        pytest.param(kind, pool, marks=() if SOME_POOLS.get(kind) == pool else pytest.mark.soak)
        for kind, pool in itertools.product(KINDS, POOLS)
    ],
)
def test_batches_are_the_same_bits_for_any_number_of_workers_and_start_method(
    config: Config, kind: str, pool: tuple[int, str]
) -> None:
    config = config.replaced(**KINDS[kind])
    dataset = EventBatches(open_columns(config), config, rank=0, world_size=1)
    sampler = EpochSampler(dataset)
    alone = build_dataloader(dataset, sampler, config)
    pooled_config = config.replaced(num_workers=pool[0], mp_context=pool[1])
    with build_dataloader(dataset, sampler, pooled_config) as pooled:
        for sampler.split, sampler.epoch in (("train", 1), ("test", 0)):
            expected, found = list(alone), list(pooled)
            assert len(expected) == len(found) > 1
            for one, other in zip(expected, found, strict=True):
                for tensor, same in zip(one, other, strict=True):
                    assert tensor.dtype == same.dtype
                    assert torch.equal(tensor, same)


@pytest.mark.parametrize("split", ["train", "validation", "test"])
def test_every_rating_is_used_once_per_epoch_for_1_2_and_3_ranks(
    columns: Columns, config: Config, split: str
) -> None:
    expected = np.sort(columns.labels(split))
    for world_size in (1, 2, 3):
        ratings, steps = [], set()
        for rank in range(world_size):
            dataset = EventBatches(columns, config, rank, world_size)
            steps.add(dataset.num_steps(split))
            for step in range(dataset.num_steps(split)):
                batch = dataset[Request(split, 4, step)]
                assert len(batch.labels) == len(batch.weights) == dataset.local_batch_size
                ratings.append(batch.labels[batch.weights > 0].numpy())
        assert len(steps) == 1
        np.testing.assert_array_equal(np.sort(np.concatenate(ratings)), expected)


@pytest.mark.parametrize(
    "first", [5_000, *(pytest.param(first, marks=pytest.mark.soak) for first in (1, 15_199))]
)
def test_a_resumed_pass_gives_the_remaining_events_for_any_number_of_ranks(
    columns: Columns, config: Config, first: int
) -> None:
    whole = EventBatches(columns, config.replaced(batch_size=columns.num_train), 0, 1)
    expected = whole[Request("train", 3, 0)].labels[first:]
    for world_size, num_workers in ((1, 1), (2, 0), (3, 0)):
        parts = []
        for rank in range(world_size):
            dataset = EventBatches(columns, config, rank, world_size)
            sampler = EpochSampler(dataset)
            sampler.epoch, sampler.first = 3, first
            pooled = config.replaced(num_workers=num_workers)
            with build_dataloader(dataset, sampler, pooled) as loader:
                parts.append([batch.labels[batch.weights > 0].clone() for batch in loader])
        in_order = [batch for step in zip(*parts, strict=True) for batch in step]
        assert torch.equal(torch.cat(in_order), expected)
        assert sum(dataset.step_sizes("train", first)) == len(expected)


def test_ranks_share_the_global_batch_of_one_rank(columns: Columns, config: Config) -> None:
    # Of 600 events 7 ranks have 86 each and the last one 84; of 5 events 8 ranks have one each, or none.
    for batch_size, sizes in ((600, (2, 3, 7, 8)), (5, (3, 8))):
        one = config.replaced(batch_size=batch_size)
        whole = EventBatches(columns, one, 0, 1)
        for world_size in sizes:
            parts = [EventBatches(columns, one, rank, world_size) for rank in range(world_size)]
            assert {part.local_batch_size for part in parts} == {-(-batch_size // world_size)}
            for step in (0, whole.num_steps("train") - 1):
                request = Request("train", 2, step)
                batches, expected = [part[request] for part in parts], whole[request]
                joined = torch.cat([batch.labels for batch in batches])
                assert torch.equal(joined[:batch_size], expected.labels)
                assert not joined[batch_size:].any()
                masked = torch.cat(
                    [users_of(part, batch) for part, batch in zip(parts, batches, strict=True)]
                )
                assert torch.equal(masked[:batch_size], users_of(whole, expected))


def users_of(dataset: EventBatches, batch: Batch) -> torch.Tensor:
    """The table rows of the users of a batch, 0 where they are masked."""
    return batch.values.split(batch.lengths.view(len(dataset.tables), -1).sum(1).tolist())[0]


def test_an_event_has_the_weight_1_in_a_window_of_any_size(columns: Columns, config: Config) -> None:
    size = 256
    # Also in the second step of a window, in a resumed one, and on the second of two ranks.
    for number, step, first, rank, world_size, num_real in (
        (1, 0, 0, 0, 1, 1),
        (2 * size, 0, 0, 0, 1, size),
        (size + 7, 1, 0, 0, 1, 7),
        (size + 7, 0, size, 0, 1, 7),
        (size // 2 + 7, 0, 0, 1, 2, 7),
    ):
        request = Request("train", 0, step, first, window=(100, 100 + number))
        batch = EventBatches(columns, config, rank, world_size)[request]
        rows = size // world_size
        assert batch.weights.tolist() == [1.0] * num_real + [0.0] * (rows - num_real)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 40])
def test_an_event_of_a_window_counts_as_one_of_a_full_batch_on_any_number_of_ranks(
    columns: Columns, config: Config, world_size: int
) -> None:
    config = config.replaced(batch_size=32)
    for number in (7, 32):
        request = Request("train", 0, 0, window=(100, 100 + number))
        parts = [EventBatches(columns, config, rank, world_size)[request] for rank in range(world_size)]
        means = [float(part.weights.mean()) for part in parts]
        assert np.mean(means) == pytest.approx(number / 32)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 40])
@pytest.mark.parametrize("is_last", [False, True])
def test_weights_make_the_mean_over_ranks_the_mean_over_real_rows(
    columns: Columns, config: Config, world_size: int, is_last: bool
) -> None:
    # The last batch has 8 of 15,200 events, and of 40 ranks some have none of a full one either.
    config = config.replaced(batch_size=36)
    parts = [EventBatches(columns, config, rank, world_size) for rank in range(world_size)]
    step = parts[0].num_steps("train") - 1 if is_last else 0
    batches = [part[Request("train", 0, step)] for part in parts]
    real = torch.cat([batch.labels[batch.weights > 0] for batch in batches])
    assert len(real) == (15_200 % 36 if is_last else 36)
    mean = torch.stack([(batch.weights * batch.labels).mean() for batch in batches]).mean()
    assert float(mean) == pytest.approx(float(real.mean()), rel=1e-6)


def test_a_batch_holds_the_features_of_the_files(
    columns: Columns, config: Config, synthetic_folder: Path
) -> None:
    raw = read(locate(config.data, config.runtime.seed), config.data)
    vocabulary = json.loads((Path(columns.folder) / "vocabulary.json").read_text())
    batch = EventBatches(columns, config, 0, 1)[Request("test", 0, 0)]
    # The first test rating is the oldest of the newest fifth.
    oldest = np.argsort(raw.events.time, kind="stable")[columns.range_of("test").start]
    user, movie = raw.users.iloc[raw.events.user[oldest]], raw.items.iloc[raw.events.item[oldest]]
    expected: dict[str, list[object]] = {
        "user": [user["user_id"]],
        "gender": [user["gender"]],
        "age": [user["age"]],
        "occupation": [user["occupation"]],
        "movie": [movie["movie_id"]],
        "year": [movie["year"]],
        "genres": movie["genres"],
    }
    for name, lists in lists_of(columns.tables, batch).items():
        rows = lists[0].tolist()
        names = [vocabulary[name][row - 1] if row != UNKNOWN_ROW else None for row in rows]
        assert names == list(expected[name])


def test_a_pass_keeps_to_the_epoch_that_it_began_with(columns: Columns, config: Config) -> None:
    dataset = EventBatches(columns, config, 0, 1)
    for num_workers in (0, 2):
        sampler = EpochSampler(dataset)
        with build_dataloader(dataset, sampler, config.replaced(num_workers=num_workers)) as loader:
            batches = iter(loader)
            sampler.epoch, sampler.split = 7, "test"
            for step, batch in enumerate(batches):
                assert torch.equal(batch.values, dataset[Request("train", 0, step)].values)
            assert step + 1 == dataset.num_steps("train")


@pytest.mark.parametrize("flags", [KINDS["days"], SEQUENCE])
def test_the_data_set_pickles_to_less_than_64_kib_after_it_was_read(
    config: Config, flags: dict[str, Any]
) -> None:
    config = config.replaced(**flags)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    dataset[Request("train", 0, 0)]
    assert len(pickle.dumps(dataset)) < 64 * 1024


SCRIPT = """
print("the script is imported")
import torch
from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns

for method in "spawn", "forkserver":
    config = Config.of(data_path={data!r}, batch_size=4000, num_workers=1, mp_context=method)
    dataset = EventBatches(open_columns(config), config, 0, 1)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        print(len(list(loader)), "batches")
"""


def test_a_worker_does_not_import_the_script_which_needs_no_guard(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(data=str(synthetic_folder)))
    lines = succeeded(python(script, env=REAL_WORKERS)).splitlines()
    assert lines.count("the script is imported") == 1
    assert [line.endswith(" batches") for line in lines[-2:]] == [True, True]


PROBE = """
import json, multiprocessing, os, sys
import numpy as np
from recsuite.config.config import Config
from recsuite.datasets.batches import Batch, EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader

HEAVY = ("torch", "torchrec", "fbgemm_gpu", "pandas", "pyarrow", "fsspec")
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "ARROW_IO_THREADS")

class Probe(EventBatches):
    def make(self, request, empty=np.empty):
        print("this is a line")
        # Whatever is imported where it is needed is there.
        super().make(request, empty)
        found = {{
            "heavy": [name for name in HEAVY if name in sys.modules],
            "threads": [os.environ.get(name) for name in THREADS],
            "num_threads": len(os.listdir("/proc/self/task")),
            "method": multiprocessing.get_start_method(allow_none=True), "pid": os.getpid(),
        }}
        return [np.frombuffer(json.dumps(found).encode(), np.uint8)] * len(Batch._fields)

if __name__ == "__main__":
    from recsuite.datasets.preparation.cache import open_columns
    from recsuite.runtime.process import init_runtime, cleanup_runtime
    import example
    from recsuite.training import loop
    config = Config.of(data_path={data!r}, batch_size=4000, num_workers=2, mp_context={method!r}, **{flags!r})
    context = init_runtime(config)
    dataset = Probe(open_columns(config), config, 0, 1)
    with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
        for found in loader:
            sys.stdout.write(found[0].numpy().tobytes().decode() + "\\n")
    cleanup_runtime()
"""


@pytest.mark.parametrize(("method", "flags"), [("forkserver", {}), ("spawn", SEQUENCE)])
def test_a_worker_is_light_and_untouched_by_the_runtime(
    synthetic_folder: Path, tmp_path: Path, method: str, flags: dict[str, Any]
) -> None:
    script = tmp_path / "probe.py"
    script.write_text(PROBE.format(data=str(synthetic_folder), method=method, flags=flags))
    lines = succeeded(python(script, env=REAL_WORKERS)).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{")]
    assert len({probe["pid"] for probe in found}) == 2
    for probe in found:
        # Without torch there is no CUDA, no process group and no thread that it could have.
        assert probe["heavy"] == []
        assert probe["method"] == method
        assert probe["threads"] == ["1"] * 4
        assert probe["num_threads"] == 1
    # Their print has a tag of their own, not the trainer's.
    tags = {line.split("]")[0] for line in lines if line.endswith("this is a line")}
    assert tags == {"[RANK 0 W 0", "[RANK 0 W 1"}


def test_a_pool_survives_the_epochs_and_gives_each_its_own_order(columns: Columns, config: Config) -> None:
    dataset = EventBatches(columns, config.replaced(num_workers=1), 0, 1)
    sampler = EpochSampler(dataset)
    firsts, workers = [], set()
    with build_dataloader(dataset, sampler, config.replaced(num_workers=1)) as loader:
        assert loader.pool is not None
        for epoch in range(3):
            sampler.epoch = epoch
            batches = list(loader)
            assert len(batches) == dataset.num_steps("train")
            firsts.append(batches[0].values)
            workers.update(loader.pool.pids)
    assert not torch.equal(firsts[0], firsts[1])
    assert not torch.equal(firsts[1], firsts[2])
    assert len(workers) == 1


PINNED = """
from pathlib import Path

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches
from recsuite.datasets.loader import EpochSampler, build_dataloader
from recsuite.datasets.preparation.cache import open_columns
from recsuite.errors import UserError

if __name__ == "__main__":
    import torch

    # Before the workers start: one that inherited the device would have it too.
    torch.zeros(1, device="cuda")
    for flags in {{"num_workers": 0}}, {{"num_workers": 1}}, {{"num_workers": 1, "mp_context": "forkserver"}}:
        # With a history: a tensor without elements has no memory that could be pinned.
        config = Config.of(data_path={data!r}, history=3, **flags)
        dataset = EventBatches(open_columns(config), config, 0, 1)
        with build_dataloader(dataset, EpochSampler(dataset), config) as loader:
            for batch in loader:
                assert all(tensor.is_pinned() for tensor in batch if tensor.numel())
            for pid in loader.pool.pids if loader.pool else ():
                files = Path(f"/proc/{{pid}}/maps").read_text()
                assert "libcuda" not in files and "libtorch" not in files
    try:
        build_dataloader(dataset, EpochSampler(dataset), config.replaced(mp_context="fork"))
    except UserError as error:
        print(error)
"""


@pytest.mark.gpu
def test_with_a_device_batches_are_pinned_and_no_worker_has_it(
    synthetic_folder: Path, tmp_path: Path
) -> None:
    script = tmp_path / "pinned.py"
    script.write_text(PINNED.format(data=str(synthetic_folder)))
    output = succeeded(python(script, env=GPUS, real=True))
    assert "--mp_context fork cannot be used once CUDA is initialised" in output


@pytest.mark.parametrize(
    ("batch", "step", "cores", "ranks", "number", "words"),
    [
        (0.0001, 0.0200, 8, 2, 0, "waiting takes only 0.5% of the time"),
        (0.0100, 0.0100, 2, 2, 0, "there is no core for one"),
        (0.0100, 0.0100, 8, 2, 1, "1 keep pace"),
        (0.0350, 0.0100, 16, 2, 4, "4 keep pace"),
        (0.0350, 0.0100, 8, 2, 3, "4 would keep pace but there is no core for more"),
        (0.0100, 0.0000, 4, 1, 3, "would keep pace but there is no core for more"),
    ],
)
def test_the_number_of_workers_follows_from_the_costs_and_the_cores(
    batch: float, step: float, cores: int, ranks: int, number: int, words: str
) -> None:
    found, why = choose_num_workers(batch, step, cores, ranks)
    assert found == number
    assert words in why
    assert (
        f"{batch * 1e3:.2f} ms and a step {step * 1e3:.2f} ms; {cores} cores for {counted(ranks, 'rank')} "
        in why
    )


class Clock:
    """A time that continues when it is told to, so that a busy machine is no part of what is measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        """Seconds, as of `time`."""
        return self.now


class SlowBatches(EventBatches):
    """Takes 10 ms for a batch."""

    clock: Clock

    def make(self, request: Request, empty: Any = np.empty) -> Any:
        """The batch, late."""
        self.clock.now += 0.01
        return super().make(request, empty)


def test_auto_measures_the_batch_apart_from_the_step(
    columns: Columns, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[float, float]] = []

    def choose(batch_seconds: float, step_seconds: float, *_: int) -> tuple[int, str]:
        told.append((batch_seconds, step_seconds))
        return 0, "0"

    monkeypatch.setattr(loader_module, "choose_num_workers", choose)
    dataset = SlowBatches(columns, config, 0, 1)
    dataset.clock = clock = Clock()
    monkeypatch.setattr(loader_module, "time", clock)
    chosen = config.replaced(num_workers="auto")
    with build_dataloader(dataset, EpochSampler(dataset), chosen) as loader:
        for _ in loader:
            clock.now += 0.03
    assert told == [(pytest.approx(0.01), pytest.approx(0.03))]


def test_automatic_workers_give_the_same_batches_as_no_workers(
    columns: Columns, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = EventBatches(columns, config, 0, 1)
    sampler = EpochSampler(dataset)
    expected = list(build_dataloader(dataset, sampler, config))
    monkeypatch.setattr(loader_module, "choose_num_workers", lambda *costs: (2, "2, as it was told"))
    with build_dataloader(dataset, sampler, config.replaced(num_workers="auto")) as loader:
        for _ in range(2):
            for one, other in zip(expected, loader, strict=True):
                assert all(map(torch.equal, one, other))
        assert loader.pool is not None
        assert len(loader.pool.pids) == 2
    assert capsys.readouterr().out == "--num_workers auto: 2, as it was told\n"


def test_fork_is_refused_once_cuda_is_initialised_and_warned_about_before(
    columns: Columns, config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forked = config.replaced(num_workers=1, mp_context="fork")
    dataset = EventBatches(columns, config, 0, 1)
    with build_dataloader(dataset, EpochSampler(dataset), forked):
        assert "--mp_context fork: workers inherit the locks" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(UserError, match="--mp_context fork cannot be used once CUDA is initialised"):
        build_dataloader(dataset, EpochSampler(dataset), forked)


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_needs_no_more_memory_than_stated(config: Config, kind: str) -> None:
    # In a batch of one event each row may have a list of its own.
    for batch_size in (256, 7, 1):
        one = config.replaced(**KINDS[kind], batch_size=batch_size)
        dataset = EventBatches(open_columns(one), one, 0, 1)
        sizes = [
            sum(array.nbytes for array in dataset.make(Request(split, 0, step)))
            for split in ("train", "validation", "test", "catalogue")
            for step in range(min(20, dataset.num_steps(split)))
        ]
        assert max(sizes) <= dataset.batch_bytes
        assert (kind, batch_size) != ("no history", 256) or dataset.batch_bytes < 3 * max(sizes)


def test_small_batches_are_the_parts_of_a_large_one(columns: Columns, config: Config) -> None:
    # The positions of several steps are shuffled together; which, depends on the size of the batch alone.
    large = EventBatches(columns, config.replaced(batch_size=1000), 0, 1)
    small = EventBatches(columns, config.replaced(batch_size=10), 0, 1)
    whole = large[Request("train", 1, 3)].labels
    parts = [small[Request("train", 1, step)].labels for step in (399, 300, *range(300, 400))][2:]
    assert torch.equal(torch.cat(parts), whole)
