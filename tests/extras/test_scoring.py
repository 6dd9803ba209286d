"""Batch scoring: the same files from any number of processes, the server's scores, and work that goes on."""

from __future__ import annotations

import codecs
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
import torch

import score
from example import make_model
from recsuite.errors import UserError
from recsuite.extras import scoring
from recsuite.extras.scoring import (
    JOB,
    BatchScoring,
    ListRules,
    begin,
    describe_lists,
    describe_short,
    described,
    end,
)
from recsuite.places import ObjectError
from recsuite.serving import followers
from recsuite.serving.served import ServedModel
from recsuite.serving.training_data import TrainingFeatures, data_at
from tests.support.launch import ROOT, python, succeeded, torchrun

SCORE = ROOT / "example" / "score.py"


@pytest.fixture(scope="module")
def model(trained_folder: Path, synthetic_folder: Path) -> ServedModel:
    return ServedModel.open(trained_folder / "dumps", model=make_model, data_path=synthetic_folder)


@pytest.fixture(scope="module")
def stocked(trained_folder: Path, synthetic_folder: Path) -> ServedModel:
    """The model, with a further column of the movies' table: every third one has a stock, one has none."""
    served = ServedModel.open(trained_folder / "dumps", model=make_model)
    data = data_at(served.snapshot, str(synthetic_folder), "")
    data.raw.items["stock"] = [None, *(f"{2 * (row % 3 == 1)}.0" for row in range(1, len(data.raw.items)))]
    served.tell(TrainingFeatures(data.raw, served.snapshot.schema, data.features.longest))
    return served


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


def test_rules_are_those_of_a_request_from_any_number_of_ranks(stocked: ServedModel, tmp_path: Path) -> None:
    assert stocked.data is not None
    users, movies = stocked.data.users.ids, stocked.data.items.ids
    known, draw = [movie for movie in movies if stocked.knows("movie", movie)], np.random.default_rng(0)
    new = next(movie for movie in movies if not stocked.knows("movie", movie))
    # With an item twice, one without an event, and two that nothing knows.
    candidates = [*draw.choice(known, len(known) // 2, replace=False).tolist(), known[0], known[0], -7, -8]
    candidates.append(new)
    pandas.DataFrame({"note": "x", "movie_id": candidates}).to_csv(tmp_path / "stock.csv", index=False)
    excluded = pandas.DataFrame({"user_id": draw.choice(users, 3000), "movie_id": draw.choice(known, 3000)})
    excluded.loc[3000] = [10**9, known[0]]
    excluded.loc[3001] = [users[0], -9]
    excluded.to_parquet(tmp_path / "excluded.parquet")
    rules = ListRules(
        tmp_path / "stock.csv", "", tmp_path / "excluded.parquet", {"genres": 2, "stock": 4}, 0.02
    )
    parts = {
        number: write(BatchScoring(stocked, None, 5, rules), tmp_path / str(number), number)
        for number in (1, 2, 3)
    }
    pandas.testing.assert_frame_equal(parts[1], parts[2])
    pandas.testing.assert_frame_equal(parts[1], parts[3])
    elsewhere = BatchScoring(stocked, None, 5, rules)
    elsewhere.device = torch.device("cpu")
    pandas.testing.assert_frame_equal(parts[1], write(elsewhere, tmp_path / "elsewhere"))
    of_users = excluded.groupby("user_id")["movie_id"].agg(list)
    wanted = stocked.recommend(
        users,
        5,
        candidates=[movie for movie in candidates if movie > 0],
        also_exclude=[of_users.get(user, []) for user in users],
        at_most={"genres": 2, "stock": 4},
        least_distance=0.02,
    )
    flat = [(user, item) for user, mine in zip(users, wanted, strict=True) for item, _ in mine]
    assert [*parts[1][["user_id", "movie_id"]].itertuples(index=False, name=None)] == flat
    pairs = {*excluded.itertuples(index=False, name=None)}
    without = zip(users, stocked.recommend(users, 5), strict=True)
    assert {(user, item) for user, mine in without for item, _ in mine} & pairs
    assert not {*flat} & pairs
    line = BatchScoring(stocked, None, 5, rules).describe_inputs()
    assert "stock.csv has 2 unknown movies; " in line
    assert f"{len({*candidates}) - 2:,} of {len(movies):,} movies are candidates" in line
    assert "excludes 3,002 pairs, 1 unknown user, 1 unknown movie" in line


@pytest.mark.gpu
@pytest.mark.parametrize("rules", [None, ListRules(at_most={"genres": 2}, least_distance=0.02)])
def test_a_gpu_finds_the_items_of_the_cpu(
    stocked: ServedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: ListRules | None
) -> None:
    monkeypatch.setattr(scoring, "BLOCK", 4096)
    found = []
    for device in ("cpu", "cuda"):
        batch = BatchScoring(stocked, None, 5, rules)
        assert ("GPU" in batch.use(torch.device(device))) == (device == "cuda")
        found.append(write(batch, tmp_path / device))
    on_cpu, on_gpu = found
    assert np.abs(on_cpu["score"] - on_gpu["score"]).max() < 1e-5
    # Rounding may swap items of nearly the same score.
    assert (on_cpu["movie_id"] == on_gpu["movie_id"]).mean() > 0.99


def test_a_device_is_used_for_lists_of_a_model_with_vectors_alone(model: ServedModel, tmp_path: Path) -> None:
    pandas.DataFrame({"user_id": [1], "movie_id": [1]}).to_csv(tmp_path / "pairs.csv", index=False)
    lists, pairs = BatchScoring(model, None, 5), BatchScoring(model, tmp_path / "pairs.csv", None)
    gpu = torch.device("cuda")
    assert "GPU" in lists.use(gpu)
    assert "CPU" in pairs.use(gpu)
    assert (lists.device, pairs.device) == (gpu, None)
    again = BatchScoring(model, None, 5)
    assert (again.use(torch.device("cpu")), again.device) == ("", None)


def test_movies_in_stock_are_candidates_and_short_lists_are_counted(
    stocked: ServedModel, tmp_path: Path
) -> None:
    assert stocked.data is not None
    stock = dict(zip(stocked.data.items.ids, stocked.data.items.others["stock"], strict=True))
    there = {movie for movie, number in stock.items() if number == "2.0" and stocked.knows("movie", movie)}
    batch = BatchScoring(stocked, None, 5, ListRules(in_stock="stock"))
    found = write(batch, tmp_path / "recs")
    assert {*found["movie_id"]} <= there
    assert f"; {len(there):,} of " in batch.describe_inputs()
    assert "1 movie without stock: not in stock" in batch.describe_inputs()
    assert describe_short(tmp_path / "recs", batch) == ""
    few, others = sorted(there)[:5], [movie for movie, number in stock.items() if number != "2.0"]
    pandas.DataFrame({"movie_id": [*few, *others]}).to_json(
        tmp_path / "few.jsonl", orient="records", lines=True
    )
    batch = BatchScoring(stocked, None, 5, ListRules(tmp_path / "few.jsonl", "stock"))
    found = write(batch, tmp_path / "short")
    assert {*found["movie_id"]} <= {*few}
    # Coverage is of the candidates.
    assert describe_lists(tmp_path / "short", stocked, few).startswith("5 of 5 movies are in a list")
    short = len(stocked.data.users.ids) - (found["rank"] == 5).sum()
    assert short > 0
    assert describe_short(tmp_path / "short", batch).startswith(f"{short:,} users got fewer than 5 movies")


def test_other_rules_or_another_content_of_their_files_are_another_job(
    stocked: ServedModel, tmp_path: Path
) -> None:
    assert stocked.data is not None
    movies, path = stocked.data.items.ids, tmp_path / "pairs.csv"
    pairs = pandas.DataFrame({"user_id": stocked.data.users.ids[:9], "movie_id": movies[:9]})
    pairs.to_csv(path, index=False)

    def job(**rules: Any) -> dict[str, Any]:
        return BatchScoring(stocked, None, 3, ListRules(**rules)).job()

    def all_jobs() -> list[dict[str, Any]]:
        caps: list[dict[str, int]] = [{"genres": 2}, {"genres": 3}, {"stock": 2}]
        files: list[dict[str, Any]] = [{"candidates": path}, {"exclude": path}]
        others: list[dict[str, Any]] = [
            {"in_stock": "stock"},
            *({"least_distance": number} for number in (0.1, 0.2)),
        ]
        return [job(), *(job(at_most=each) for each in caps), *(job(**each) for each in (*files, *others))]

    first = all_jobs()
    assert first[0] == BatchScoring(stocked, None, 3).job()
    assert all(mine != other for mine, other in itertools.combinations(first, 2))
    pairs[:8].to_csv(path, index=False)
    assert [mine == other for mine, other in zip(first, all_jobs(), strict=True)] == [True] * 4 + [
        False
    ] * 2 + [True] * 3
    # A job of other rules is neither continued nor taken for this one.
    write(BatchScoring(stocked, None, 3, ListRules(at_most={"genres": 2})), tmp_path / "recs")
    with pytest.raises(UserError, match="data, input, --k or rules; give another"):
        begin(tmp_path / "recs", first[2])


@pytest.mark.parametrize(
    ("rules", "text", "words"),
    [
        ({"candidates": "a.csv"}, "movie_id\n-1\n-2\n", "a.csv allow none of the .* movies that the model"),
        ({"candidates": "a.csv"}, "movie_id\n", "a.csv allow none of the .* movies that the model can list"),
        ({"candidates": "a.csv"}, "movie\n1\n", "has the columns movie, and no movie_id"),
        ({"candidates": "a.csv"}, "movie_id\nx\n", "Cannot read .*a.csv: In CSV column #0"),
        ({"candidates": "a.csv"}, "movie_id,x\n1,1\n,2\n", "a row without movie_id, row 2 below its header"),
        ({"candidates": "a.txt"}, "1\n", "a.txt must end in one of .parquet"),
        ({"exclude": "a.csv"}, "movie_id\n1\n", "has the columns movie_id, and no user_id"),
        ({"at_most": {"brand": 2}}, "", "The movies have no feature or column brand; they have .*genres"),
        ({"at_most": {"genres": 0}}, "", "at_most of genres must be a whole number of at least 1, got 0"),
        ({"least_distance": -0.1}, "", r"least_distance must be between 0 and 2, got -0\.1"),
        ({"in_stock": "title"}, "", "The column title must have yes or no, or numbers, got"),
    ],
)
def test_rules_that_cannot_be_followed_are_refused_with_one_sentence(
    stocked: ServedModel, tmp_path: Path, rules: dict[str, Any], text: str, words: str
) -> None:
    for name in ("candidates", "exclude"):
        if name in rules:
            rules = {**rules, name: tmp_path / rules[name]}
            rules[name].write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        BatchScoring(stocked, None, 5, ListRules(**rules))
    assert "\n" not in str(caught.value)


def test_flags_of_rules_are_checked_before_anything_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    users = ["--users", "all", "--output", "x"]
    flags = score.parse([*users, "--at_most", "genres=2,year=3", "--at_most", "a=b=1"])
    assert flags.at_most == {"genres": 2, "year": 3, "a=b": 1}
    cases = (
        (["--pairs", "a.csv", "--output", "x", "--at_most", "a=1"], "--at_most is for --users; leave it out"),
        (["--pairs", "a.csv", "--output", "x", "--in_stock", "a"], "--in_stock is for --users; leave it out"),
        (["--pairs", "a.csv", "--output", "x", "--least_distance", "0"], "--least_distance is for --users;"),
        ([*users, "--at_most", "a"], "--at_most takes FEATURE=N, such as brand=2, and got 'a'"),
        ([*users, "--at_most", "a=1.5"], "--at_most takes FEATURE=N, such as brand=2, and got 'a=1.5'"),
        ([*users, "--at_most", "a=1,a=2"], "--at_most has a twice; give it once"),
    )
    for given, words in cases:
        assert score.main(given) == 2
        assert words in capsys.readouterr().err


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
    flags = (*flags, "--at_most", "genres=1")
    two = succeeded(torchrun(2, SCORE, *flags, "--users", "all", "--k", 5, "--output", output))
    assert two.count("titles and ratings are those of") == two.count("is complete") == 1
    assert two.count("got fewer than 5 movies") <= 1
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
