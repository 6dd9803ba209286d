"""Commands for a stream: load and compact its checkpoints, follow its files, resume."""

from __future__ import annotations

import dataclasses
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from recsuite.checkpoint.folder import deltas_in, newest_in, step_of
from recsuite.checkpoint.format import read_manifest, write_manifest
from recsuite.datasets.movielens.synthetic import write_synthetic
from recsuite.extras.drifting import DriftingWorld
from recsuite.training.progress import StreamProgress
from tests.support.launch import EXAMPLE, python, started, succeeded, wait_for

NUM_RATINGS, NUM_OLD = 1_500, 1_200
DYNAMIC = ("--vocabulary", "dynamic", "--capacity", 1_000)
STREAM = ("--stream", "--inc_dump", "--window", "90d", "--batch_size", 128, "--embedding_dim", 8)


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world that moves."""
    folder = tmp_path_factory.mktemp("data") / "ratings"
    write_synthetic(folder, NUM_RATINGS, seed=0, world=DriftingWorld())
    return folder


@pytest.fixture(scope="module")
def dumps(ratings: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a stream along all of it."""
    folder = tmp_path_factory.mktemp("stream") / "dumps"
    succeeded(example(ratings, folder, *STREAM))
    return folder


@pytest.fixture
def growing(ratings: Path, tmp_path: Path) -> tuple[Path, list[str]]:
    """A folder with the oldest ratings, and the lines of the others."""
    folder = tmp_path / "growing"
    shutil.copytree(ratings, folder, ignore=shutil.ignore_patterns(".*", "oracle.*", "first_day.npy"))
    lines = (folder / "ratings.dat").read_text().splitlines(keepends=True)
    lines.sort(key=lambda line: int(line.rpartition(":")[2]))
    (folder / "ratings.dat").write_text("".join(lines[:NUM_OLD]))
    return folder, lines[NUM_OLD:]


def example(data: Path, save_dir: Path, *flags: object) -> subprocess.CompletedProcess[str]:
    return python(EXAMPLE, "--data_path", data, "--save_dir", save_dir, *flags)


def stream_in(save_dir: Path) -> StreamProgress:
    """Progress of the stream in the newest checkpoint."""
    newest = newest_in(save_dir)
    assert newest is not None
    stream = read_manifest(newest).progress.stream
    assert stream is not None
    return stream


def test_a_load_prints_the_error_of_a_model_on_events_that_it_has_not_learned(
    ratings: Path, dumps: Path
) -> None:
    output = succeeded(example(ratings, dumps, "--load"))
    assert "all 1,500 ratings of the stream: none is left to predict" in output
    middle = deltas_in(dumps)[5]
    stream = read_manifest(middle).progress.stream
    assert stream is not None
    output = succeeded(example(ratings, dumps, "--load", "--until", step_of(middle)))
    said = re.search(r"step \d+: (\S+) ratings after it, not trained on, predicted with RMSE (\S+)", output)
    assert said is not None
    assert int(said[1].replace(",", "")) == NUM_RATINGS - stream.end
    assert 0.8 < float(said[2]) < 1.5


@pytest.mark.soak
@pytest.mark.parametrize(
    ("writes", "reads"),
    [("torchrec", "vectorised"), ("vectorised", "torchrec")],
)
def test_dynamic_tables_of_either_implementation_are_those_of_the_other(
    ratings: Path, tmp_path: Path, writes: str, reads: str
) -> None:
    save_dir = tmp_path / "dumps"
    succeeded(example(ratings, save_dir, *STREAM, *DYNAMIC, "--cpu_tables", writes))
    said = []
    for tables in (writes, reads):
        load = ("--load", "--until", step_of(deltas_in(save_dir)[5]), "--cpu_tables", tables)
        said += re.findall(r"predicted with RMSE (\S+)", succeeded(example(ratings, save_dir, *load)))
    assert len(said) == 2
    assert said[0] == said[1]


def test_a_stream_continues_after_its_deltas_were_compacted(
    ratings: Path, dumps: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "dumps"
    shutil.copytree(dumps, copy, symlinks=True)
    number = len(deltas_in(dumps))
    assert f"replaces {number} deltas" in succeeded(example(ratings, copy, "--compact"))
    assert not deltas_in(copy)
    assert stream_in(copy) == stream_in(dumps)
    assert "none is left to predict" in succeeded(example(ratings, copy, "--load"))
    assert f"trained on {number} windows of the stream" in succeeded(example(ratings, copy, "--resume"))


@pytest.mark.parametrize(
    "ids",
    [
        pytest.param(("--vocabulary", "fixed"), id="vocabulary", marks=pytest.mark.soak),
        pytest.param(DYNAMIC, id="dynamic"),
    ],
)
def test_a_stream_resumes_with_grown_files_also_without_the_flag_stream(
    growing: tuple[Path, list[str]], dumps: Path, tmp_path: Path, ids: tuple[object, ...]
) -> None:
    (data, more), save_dir = growing, tmp_path / "dumps"
    succeeded(example(data, save_dir, *STREAM, *ids))
    before = stream_in(save_dir)
    assert before.end == NUM_OLD
    with (data / "ratings.dat").open("a") as file:
        file.writelines(more)
    output = succeeded(example(data, save_dir, "--resume"))
    assert "--stream True" in output
    after = stream_in(save_dir)
    assert (after.end, after.counts["rmse"]) == (NUM_RATINGS, NUM_RATINGS)
    assert after.sums["rmse"] > before.sums["rmse"]
    # The baseline knows all earlier events. Of an uninterrupted stream one window is another.
    baseline = after.overall_biases()["rmse"]
    assert baseline == pytest.approx(stream_in(dumps).overall_biases()["rmse"], rel=0.002)
    assert re.search(rf"\| biases of all earlier events *\| *{baseline:.4f} ", output)


def test_a_stream_with_changed_earlier_events_is_refused(ratings: Path, dumps: Path, tmp_path: Path) -> None:
    data, save_dir = tmp_path / "ratings", tmp_path / "dumps"
    shutil.copytree(ratings, data, ignore=shutil.ignore_patterns(".*"))
    shutil.copytree(dumps, save_dir, symlinks=True)
    lines = (data / "ratings.dat").read_text().splitlines(keepends=True)
    (data / "ratings.dat").write_text("".join(lines[1:]))
    for what in ("--resume", "--load"):
        refused = example(data, save_dir, what)
        assert refused.returncode == 2
        assert "are not those that this stream has learned from" in refused.stderr


def test_a_position_that_does_not_say_how_far_its_files_were_read_is_refused(
    ratings: Path, dumps: Path, tmp_path: Path
) -> None:
    save_dir = tmp_path / "dumps"
    shutil.copytree(dumps, save_dir, symlinks=True)
    newest, stream = newest_in(save_dir), stream_in(save_dir)
    assert newest is not None
    files = {name: dataclasses.replace(each, read_bytes=0) for name, each in stream.position.files.items()}
    stream = dataclasses.replace(stream, position=dataclasses.replace(stream.position, files=files))
    manifest = read_manifest(newest)
    progress = dataclasses.replace(manifest.progress, stream=stream)
    write_manifest(newest, dataclasses.replace(manifest, progress=progress))
    refused = example(ratings, save_dir, "--resume")
    assert refused.returncode == 2
    assert "earlier version" in refused.stderr


def test_a_training_that_follows_its_data_learns_appended_events_until_a_signal_ends_it(
    growing: tuple[Path, list[str]], tmp_path: Path
) -> None:
    (data, more), save_dir = growing, tmp_path / "dumps"
    flags = ("--data_path", data, "--save_dir", save_dir, *STREAM, *DYNAMIC, "--follow_data")
    command = [sys.executable, "-u", str(EXAMPLE), *map(str, flags)]
    with started(command) as process:
        wait_for(process, "dynamic tables: ")
        wait_for(process, "waiting for more ratings")
        first = stream_in(save_dir).end
        # The window that is not over is not taken yet.
        assert 0 < first < NUM_OLD
        ratings, user = data / "ratings.dat", more[99].split("::")[0]
        right = f"{user}::99999::{more[99].split('::', 2)[2]}"
        # A row that cannot be read, which is fixed then.
        later = [*more[:100], right.replace("::", "::?", 2)]
        for part in (later, more[100:]):
            with ratings.open("a") as file:
                file.writelines(part)
            if part is later:
                wait_for(process, "The stream waits until the files change again.")
                ratings.write_text(ratings.read_text().replace(later[-1], right))
            wait_for(process, "new ratings")
            wait_for(process, "waiting for more ratings")
        # What was read meanwhile is for this training alone, and the last of it is all that is left of it.
        assert len(list((data / ".columns").glob("stream_*"))) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    followed = stream_in(save_dir)
    assert first < followed.end < NUM_RATINGS
    succeeded(example(data, save_dir, "--resume"))
    assert stream_in(save_dir).end == NUM_RATINGS + 1
    assert not list((data / ".columns").glob("stream_*"))


def test_a_stream_resumes_when_any_of_its_files_has_grown_and_new_files_were_added(
    growing: tuple[Path, list[str]], tmp_path: Path
) -> None:
    (dat, more), save_dir = growing, tmp_path / "dumps"
    data = tmp_path / "tables"
    data.mkdir()
    old = [line.strip().split("::") for line in (dat / "ratings.dat").read_text().splitlines()]
    new = [line.strip().split("::") for line in more]

    def append(name: str, rows: list[list[str]]) -> None:
        is_new = not (data / name).exists()
        with (data / name).open("a") as file:
            file.writelines(
                f"{','.join(row)}\n" for row in [["user", "item", "rating", "timestamp"]][:is_new]
            )
            file.writelines(f"{','.join(row)}\n" for row in rows)

    append("b.csv", old[:600])
    append("d.csv", old[600:])
    succeeded(example(data, save_dir, *STREAM))
    late = [[*old[0][:3], str(int(old[0][3]) - 1)]]
    append("a.csv", new[:50])
    append("b.csv", new[50:100] + late)
    append("c.csv", new[100:200])
    output = succeeded(example(data, save_dir, "--resume"))
    assert "1 rating is older than the trained events" in output
    assert stream_in(save_dir).end == NUM_OLD + 200
    append("z.csv", [["guest", *new[200][1:]]])
    refused = example(data, save_dir, "--resume")
    assert refused.returncode == 2
    assert (
        "The values of user must be whole numbers of 64 bits, as when this stream was last read, got 'guest'"
    ) in refused.stderr
    (data / "z.csv").unlink()
    append("a.csv", new[200:])
    succeeded(example(data, save_dir, "--resume"))
    assert stream_in(save_dir).end == NUM_RATINGS
