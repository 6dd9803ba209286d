"""Batch scoring: the same files from any number of processes, the server's scores, and work that goes on."""

from __future__ import annotations

import codecs
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from example import make_model
from recsuite.errors import UserError
from recsuite.extras import scoring
from recsuite.extras.scoring import JOB, BatchScoring, begin, describe_lists, described, end
from recsuite.places import ObjectError
from recsuite.serving import followers
from recsuite.serving.served import ServedModel
from tests.support.launch import ROOT, python, succeeded, torchrun

SCORE = ROOT / "example" / "score.py"


@pytest.fixture(scope="module")
def model(trained_folder: Path, synthetic_folder: Path) -> ServedModel:
    return ServedModel.open(trained_folder / "dumps", model=make_model, data_path=synthetic_folder)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "BLOCK", 7)


def write(batch: BatchScoring, folder: Path, world_size: int = 1) -> pandas.DataFrame:
    """Score in a folder, as this many ranks do, and return all rows."""
    partial = begin(folder, batch.job())
    assert partial is not None
    for rank in range(world_size):
        batch.write(partial, rank, world_size, lambda done: None)
    end(partial, folder)
    return pandas.read_parquet(folder)


def inodes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.glob("part-*")}


def test_any_number_of_ranks_writes_what_is_recommended(model: ServedModel, tmp_path: Path) -> None:
    assert model.data is not None
    users = model.data.users.ids
    parts = {
        number: write(BatchScoring(model, None, 5), tmp_path / str(number), number) for number in (1, 2, 3)
    }
    pandas.testing.assert_frame_equal(parts[1], parts[2])
    pandas.testing.assert_frame_equal(parts[1], parts[3])
    assert len(inodes(tmp_path / "3")) == -(-len(users) // 7)
    found = parts[1]
    assert [*found.columns] == ["user_id", "rank", "movie_id", "score"]
    wanted = model.recommend(users, 5)
    flat = [
        (user, rank, *pair)
        for user, pairs in zip(users, wanted, strict=True)
        for rank, pair in enumerate(pairs, start=1)
    ]
    assert [*found.iloc[:, :3].itertuples(index=False, name=None)] == [each[:3] for each in flat]
    np.testing.assert_allclose(found["score"], [each[3] for each in flat], atol=1e-6)


def test_the_lists_are_described_by_their_items(model: ServedModel, tmp_path: Path) -> None:
    data = model.data
    assert data is not None
    found = write(BatchScoring(model, None, 5), tmp_path / "recs", 2)
    counts = dict(zip(data.items.ids, data.item_counts().tolist(), strict=True))
    known = [item for item in data.items.ids if model.knows("movie", item)]
    line = describe_lists(tmp_path / "recs", model)
    assert f"{found['movie_id'].nunique()} of {len(known)} movies are in a list (coverage " in line
    popular = sorted(counts, key=lambda item: -counts[item])[: round(0.01 * len(known))]
    assert f"{found['movie_id'].isin(popular).mean():.1%} of the entries are of the 1% most popular" in line
    shares = (found["movie_id"].map(counts) + 1) / (sum(counts.values()) + len(counts))
    assert f"novelty {-np.log2(shares).mean():.2f} bits" in line
    assert line.count(f"({found['movie_id'].value_counts().max()})")


def test_pairs_get_the_scores_of_a_request_and_keep_their_columns(model: ServedModel, tmp_path: Path) -> None:
    assert model.data is not None
    users, movies = model.data.users.ids, model.data.items.ids
    draw = np.random.default_rng(0)
    pairs = pandas.DataFrame(
        {
            "note": [f"row {row}" for row in range(50)],
            "movie_id": draw.choice(movies, 50),
            "user_id": draw.choice(users, 50),
        }
    )
    for ending in ("csv", "parquet", "feather", "jsonl"):
        path = tmp_path / f"pairs.{ending}"
        if ending == "csv":
            pairs.to_csv(path, index=False)
        elif ending == "jsonl":
            pairs.to_json(path, orient="records", lines=True)
        else:
            getattr(pairs, f"to_{ending}")(path)
        found = write(BatchScoring(model, path, None), tmp_path / ending, 2)
        pandas.testing.assert_frame_equal(found[[*pairs.columns]], pairs)
        line = BatchScoring(model, path, None).describe_inputs()
        assert line == "scores depend on the columns user_id, movie_id, not on note"
        wanted = model.score({"user": pairs["user_id"].tolist(), "movie": pairs["movie_id"].tolist()})
        np.testing.assert_allclose(found["score"], wanted, atol=1e-6)


def test_an_interrupted_run_writes_only_what_is_missing(model: ServedModel, tmp_path: Path) -> None:
    batch, folder = BatchScoring(model, None, 3), tmp_path / "recs"
    whole, before = write(batch, folder), inodes(folder)
    # As a kill leaves it: two parts are missing, and one of them is half written.
    partial = folder.rename(tmp_path / ".recs.partial")
    for number in (1, 2):
        (partial / f"part-{number:08d}.parquet").unlink()
    (partial / ".part-00000001.parquet.99").write_bytes(b"half")
    again = BatchScoring(model, None, 3)
    pandas.testing.assert_frame_equal(write(again, folder, 2), whole)
    after = inodes(folder)
    assert {name for name in before if before[name] != after[name]} <= {
        "part-00000001.parquet",
        "part-00000002.parquet",
    }
    assert (again.counts.rows, again.counts.there) == (14, batch.counts.rows - 14)
    assert {path.name for path in folder.iterdir()} == {*before, JOB}


def test_what_another_job_left_unfinished_is_not_used(model: ServedModel, tmp_path: Path) -> None:
    other, wanted = BatchScoring(model, None, 3), BatchScoring(model, None, 4)
    partial = begin(tmp_path / "recs", other.job())
    assert partial is not None
    other.write(partial, 0, 1, lambda done: None)
    found = write(wanted, tmp_path / "recs")
    assert found["rank"].max() == 4
    assert wanted.counts.there == 0


def test_changed_data_are_another_job(
    trained_folder: Path, synthetic_folder: Path, model: ServedModel, tmp_path: Path
) -> None:
    write(BatchScoring(model, None, 3), tmp_path / "recs")
    shutil.copytree(synthetic_folder, tmp_path / "data", ignore=shutil.ignore_patterns(".columns"))
    ratings = tmp_path / "data" / "ratings.dat"
    *lines, last = ratings.read_text().splitlines()
    user, movie, stars, time = last.split("::")
    ratings.write_text("\n".join([*lines, f"{user}::{movie}::{1 + int(stars) % 5}::{time}"]) + "\n")
    changed = ServedModel.open(trained_folder / "dumps", model=make_model, data_path=tmp_path / "data")
    with pytest.raises(UserError, match="holds scores of another model, data, input, --k or rules"):
        begin(tmp_path / "recs", BatchScoring(changed, None, 3).job())


def test_a_folder_of_other_scores_or_files_is_refused_and_kept(model: ServedModel, tmp_path: Path) -> None:
    folder, foreign = tmp_path / "recs", tmp_path / "mine"
    write(BatchScoring(model, None, 3), folder)
    before = inodes(folder), (folder / JOB).read_text()
    with pytest.raises(
        UserError, match="holds scores of another model, data, input, --k or rules; give another"
    ):
        begin(folder, BatchScoring(model, None, 4).job())
    assert before == (inodes(folder), (folder / JOB).read_text())
    assert begin(folder, BatchScoring(model, None, 3).job()) is None
    foreign.mkdir()
    (foreign / "notes.txt").touch()
    for taken in (foreign, foreign / "notes.txt"):
        with pytest.raises(UserError, match="exists already, and holds no scores; give another --output"):
            begin(taken, {})


@pytest.mark.parametrize(
    ("name", "text", "k", "words"),
    [
        (
            "users.csv",
            "user\n1\n",
            5,
            "has the columns user, and no user_id; name the columns of ids",
        ),
        ("users.txt", "1\n", 5, "must end in one of .parquet, .csv, .arrow, .feather, .jsonl"),
        ("users.csv", "user_id\nx\n", 5, "Cannot read .*users.csv: In CSV column #0: .*'x'.* Fix: correct"),
        ("users.csv", "", 5, "Cannot read .*users.csv"),
        ("users.parquet", "no parquet", 5, "Cannot read .*users.parquet"),
        ("pairs.csv", "user_id,movie_id,score\n1,2,3\n", None, "has a column score already; leave it out"),
        ("users.csv", "user_id\n", 5, "There is no row to score; give a file with some"),
        (
            "users.csv",
            "user_id,x\n1,2\n,3\n",
            5,
            "has a row without user_id, row 2 below its header; remove it",
        ),
        ("users.csv", "user_id\n1\n", 0, "k must be a whole number of at least 1, got 0"),
    ],
)
def test_a_file_that_cannot_be_scored_is_refused_with_one_sentence(
    model: ServedModel, tmp_path: Path, name: str, text: str, k: int | None, words: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        write(BatchScoring(model, tmp_path / name, k), tmp_path / "recs")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
@pytest.mark.parametrize(
    ("name", "text"), [("users.csv", "user_id\n1\n"), ("users.jsonl", '{"user_id": 1}\n')]
)
def test_a_file_in_another_encoding_is_refused_with_one_sentence(
    model: ServedModel, tmp_path: Path, encoding: str, name: str, text: str
) -> None:
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    (tmp_path / name).write_bytes(mark + text.encode(encoding))
    with pytest.raises(
        UserError, match=rf"Cannot read .*{name}: it is text in UTF-16 or UTF-32.* Fix: convert"
    ):
        BatchScoring(model, tmp_path / name, 5)


@pytest.mark.parametrize("ending", ["arrow", "parquet"])
def test_texts_of_any_type_of_arrow_are_scored_and_kept(
    model: ServedModel, tmp_path: Path, ending: str
) -> None:
    assert model.data is not None
    users, path = model.data.users.ids[:3], tmp_path / f"pairs.{ending}"
    notes = pyarrow.array(["a", "a text of more than twelve characters", "c"], pyarrow.string_view())
    pairs = pyarrow.table({"user_id": users, "movie_id": model.data.items.ids[:3], "note": notes})
    if ending == "arrow":
        with pyarrow.ipc.new_file(path, pairs.schema) as file:
            file.write_table(pairs)
    else:
        pyarrow.parquet.write_table(pairs, path)
    found = write(BatchScoring(model, path, None), tmp_path / "recs")
    assert found["note"].tolist() == notes.to_pylist()
    of_views = pyarrow.table({"user_id": pyarrow.array(map(str, users)).cast(pyarrow.string_view())})
    assert scoring._with_plain_texts(of_views)["user_id"].to_pylist() == [*map(str, users)]


def test_an_empty_id_is_refused_with_its_row_as_a_missing_one(model: ServedModel, tmp_path: Path) -> None:
    for ending, where in (("csv", "row 10 below its header;"), ("parquet", "row 10;")):
        path = tmp_path / f"users.{ending}"
        batch = BatchScoring(model, None, 5)
        batch.path = path
        for missing in ("", None):
            with pytest.raises(UserError, match=f"{path.name} has a row without user_id, {where} remove it"):
                batch.scored(pyarrow.table({"user_id": ["a", "b", missing]}), first=7)


def test_a_damaged_record_of_a_job_is_named_and_the_job_starts_anew(
    model: ServedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, folder = BatchScoring(model, None, 3), tmp_path / "recs"
    for content in (b"", b"{", b"\0" * 100, b"\xff"):
        partial = begin(folder, batch.job())
        assert partial is not None
        (partial / JOB).write_bytes(content)
        capsys.readouterr()
        assert begin(folder, batch.job()) == partial
        assert f"{partial / JOB} is damaged, as after a power cut" in capsys.readouterr().out
    partial = begin(folder, batch.job())
    assert partial is not None
    batch.write(partial, 0, 1, lambda done: None)
    (partial / JOB).write_bytes(content)
    again = BatchScoring(model, None, 3)
    write(again, folder)
    assert again.counts.there == 0
    for content in (b"", b"{", b"\0" * 100, b"\xff"):
        (folder / JOB).write_bytes(content)
        with pytest.raises(UserError, match=rf"{JOB} is damaged, so nothing says what the scores .*; remove"):
            begin(folder, batch.job())


def test_a_missing_file_is_refused(model: ServedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Cannot read .*gone.csv: No such file or directory"):
        BatchScoring(model, tmp_path / "gone.csv", 5)


def test_unknown_users_and_items_are_counted(model: ServedModel, tmp_path: Path) -> None:
    pairs = pandas.DataFrame({"user_id": [1, 10**9, 10**9 + 1], "movie_id": [10**9, 1, 1]})
    pairs.to_parquet(tmp_path / "pairs.parquet")
    batch = BatchScoring(model, tmp_path / "pairs.parquet", None)
    write(batch, tmp_path / "scored")
    line = described([batch.counts], Path("scored"), 2.0, batch.noun)
    assert line.startswith("scored 3 pairs in 2.00 s, 2 pairs/s; ")
    assert line.endswith("; 2 with an unknown user, 1 with an unknown movie; scored is complete")


def test_the_script_scores_on_two_processes_goes_on_and_refuses_on_all(
    trained_folder: Path, synthetic_folder: Path, tmp_path: Path
) -> None:
    flags: tuple[Any, ...] = ("--save_dir", trained_folder / "dumps", "--data_path", synthetic_folder)
    output = tmp_path / "recs.parquet"
    two = succeeded(torchrun(2, SCORE, *flags, "--users", "all", "--k", 5, "--output", output))
    assert two.count("titles and ratings are those of") == two.count("is complete") == 1
    again = succeeded(python(SCORE, *flags, "--users", "all", "--k", 5, "--output", output))
    assert f"{output} is complete already: nothing was scored" in again
    one = tmp_path / "one.parquet"
    succeeded(python(SCORE, *flags, "--users", "all", "--k", 5, "--output", one))
    pandas.testing.assert_frame_equal(pandas.read_parquet(one), pandas.read_parquet(output))
    mistaken = torchrun(2, SCORE, *flags, "--users", "all", "--k", 6, "--output", output)
    assert mistaken.returncode
    assert (
        mistaken.stderr.count(f"score.py: {output} holds scores of another model, data, input, --k or rules")
        == 1
    )


def test_a_failed_request_before_the_first_model_is_repeated_and_said_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(followers, "POLL_SECONDS", 0.001)
    failures = [ObjectError("s3://b/x", "timeout") for _ in range(3)]

    def ask() -> str:
        if failures:
            raise failures.pop()
        return "model"

    assert followers.retried(ask) == "model"
    assert capsys.readouterr().out.count("Retrying for 60 s") == 1
    monkeypatch.setattr(followers, "STORE_SECONDS", -1.0)
    failures.append(ObjectError("s3://b/x", "timeout"))
    with pytest.raises(ObjectError):
        followers.retried(ask)


def test_two_scorings_into_one_folder_exclude_each_other_and_leave_no_lock(tmp_path: Path) -> None:
    with scoring.writing(tmp_path / "out"):
        with (
            pytest.raises(UserError, match="Another process is scoring into"),
            scoring.writing(tmp_path / "out"),
        ):
            pass
        assert [path.name for path in tmp_path.iterdir()] == [".out.lock"]
    assert not [*tmp_path.iterdir()]
