"""The MovieLens formats, and a sentence with file, line and content for each way in which they break."""

from __future__ import annotations

import bz2
import codecs
import gzip
import json
import lzma
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import RawData
from recsuite.datasets.source import locate
from recsuite.datasets.tables.files import schema_path
from recsuite.errors import UserError
from tests.support.raw_ids import items_of, users_of

USERS_1M = "1::F::1::10::48067\n2::M::56::16::70072\n"
MOVIES_1M = "1::Toy Story (1995)::Animation|Comedy\n2::Mis\u00e9rables, Les: a::b\u00e9 (1998)::Drama\n"


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode("iso-8859-1"))
    return folder


@pytest.fixture
def ml_1m(tmp_path: Path) -> Path:
    ratings = "1::1::5::978300760\n1::2::3::978302109\n2::1::4::978301968\n"
    movies = MOVIES_1M.replace("a::b\u00e9", "Part")
    return write(tmp_path / "ml", {"ratings.dat": ratings, "movies.dat": movies, "users.dat": USERS_1M})


@pytest.fixture
def ml_csv(tmp_path: Path) -> Path:
    movies = 'movieId,title,genres\n1,"Story, A (1995)",Drama|War\n7,Untitled,(no genres listed)\n'
    ratings = "userId,movieId,rating,timestamp\n5,1,4.0,964982703\n5,7,0.5,964981247\n9,1,2.5,964982224\n"
    return write(tmp_path / "ml", {"ratings.csv": ratings, "movies.csv": movies.encode()})


def load(folder: Path, **options: str | float) -> RawData:
    config = Config.of(data_path=str(folder), **options)
    return read(locate(config.data, config.runtime.seed), config.data)


def refusal(folder: Path, **options: str | float) -> str:
    with pytest.raises(UserError) as error:
        load(folder, **options)
    sentence = str(error.value)
    assert "\n" not in sentence
    return sentence


def test_ml_1m_is_read_whole(ml_1m: Path) -> None:
    raw = load(ml_1m)
    assert users_of(raw).tolist() == [1, 1, 2]
    assert items_of(raw).tolist() == [1, 2, 1]
    assert raw.events.label.tolist() == [5, 3, 4]
    assert raw.events.time.tolist() == [978300760, 978302109, 978301968]
    assert raw.items["title"].tolist() == ["Toy Story (1995)", "Mis\u00e9rables, Les: Part (1998)"]
    assert raw.items["year"].tolist() == [1995, 1998]
    assert raw.items["genres"].tolist() == [["Animation", "Comedy"], ["Drama"]]
    assert raw.users.to_dict("list") == {
        "user_id": [1, 2],
        "gender": ["F", "M"],
        "age": [1, 56],
        "occupation": ["10", "16"],
    }


def test_ml_10m_has_half_stars_utf_8_titles_and_no_users_file(ml_1m: Path) -> None:
    (ml_1m / "users.dat").unlink()
    (ml_1m / "ratings.dat").write_text("8::1::0.5::1\n3::2::4.5::2\n")
    (ml_1m / "movies.dat").write_bytes("1::Am\u00e9lie (2001)::Comedy\n2::B (1999)::Drama\n".encode())
    raw = load(ml_1m)
    assert raw.events.label.tolist() == [0.5, 4.5]
    assert raw.items["title"][0] == "Am\u00e9lie (2001)"
    assert raw.users["user_id"].tolist() == [3, 8]


def test_the_csv_sets_are_read_whole(ml_csv: Path) -> None:
    raw = load(ml_csv)
    assert raw.events.label.tolist() == [4.0, 0.5, 2.5]
    assert raw.items["title"].tolist() == ["Story, A (1995)", "Untitled"]
    assert raw.items["genres"].tolist() == [["Drama", "War"], []]
    assert raw.items["year"].isna().tolist() == [False, True]


@pytest.fixture
def ml_100k(tmp_path: Path) -> Path:
    flags = ["0"] * 19
    flags[1] = flags[3] = "1"
    item = "|".join(["1", "Toy Story (1995)", "01-Jan-1995", "", "http://x", *flags])
    unknown = "|".join(["2", "unknown", "", "", "", "1", *["0"] * 18])
    return write(
        tmp_path / "ml",
        {
            "u.data": "1\t1\t5\t10\n2\t2\t3\t20\n1\t2\t1\t30\n",
            "u.item": f"{item}\n{unknown}\n",
            "u.user": "1|24|M|technician|85711\n2|53|F|other|94043\n",
            "u1.base": "1\t1\t5\t10\n2\t2\t3\t20\n",
            "u1.test": "1\t2\t1\t5\n",
        },
    )


def test_ml_100k_is_read_whole(ml_100k: Path) -> None:
    raw = load(ml_100k)
    assert raw.events.label.tolist() == [5, 3, 1]
    assert raw.items["genres"].tolist() == [["Action", "Animation"], []]
    assert raw.users["age"].tolist() == [24, 53]
    assert raw.users["occupation"].tolist() == ["technician", "other"]


def test_an_official_split_tests_on_its_own_file(ml_100k: Path) -> None:
    raw = load(ml_100k, split="u1")
    assert raw.official_test is not None
    assert raw.official_test.tolist() == [False, False, True]
    columns = open_columns(Config.of(data_path=str(ml_100k), split="u1"))
    assert columns.labels("train").tolist() == [5, 3]
    assert columns.labels("test").tolist() == [1]


def test_an_official_split_without_its_files_is_refused_by_name(ml_100k: Path) -> None:
    assert f"{ml_100k / 'ua.base'} is not there; put the events there" in refusal(ml_100k, split="ua")


# What a bad row of any table is told is in tests/datasets/tables; these are of this schema and separator.
BAD_ROWS = [
    ("1::1::5", "3 fields instead of 4: '1::1::5'"),
    ("1:7:1::5::978300760", "3 fields instead of 4: '1:7:1::5::978300760'"),
    ("1::1.5::5::978300760", "movie_id '1.5' is not a whole number of up to 18 digits"),
    ("1::1::5.1::978300760", "rating '5.1' is outside of the scale from 0.5 to 5"),
    ("1::1::::978300760", "rating is missing"),
    ("\xff\xfe1::1::5::1", "user_id '\xff\xfe1' is not a whole number"),
    # In milliseconds.
    ("1::1::5::978300760000", "timestamp '978300760000' is in another unit than unix"),
    ("1::1::5::978300760::" + "0" * 2_000_000, "5 fields instead of 4: '1::1::5::978300760::000"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_rating_is_named_with_file_line_and_content_or_skipped_on_request(
    ml_1m: Path, row: str, reason: str
) -> None:
    lines = (ml_1m / "ratings.dat").read_text().splitlines()
    write(ml_1m, {"ratings.dat": "\n".join([lines[0], row, *lines[1:]])})
    sentence = refusal(ml_1m)
    assert f"{ml_1m / 'ratings.dat'}, line 2: {reason}" in sentence
    assert "--bad_rows skip" in sentence
    raw = load(ml_1m, bad_rows="skip", max_bad_rows=0.5)
    assert raw.events.label.tolist() == [5, 3, 4]
    (note,) = raw.skipped
    assert note.startswith("skipped 1 bad row of ratings.dat, the first being line 2 (")
    assert reason.partition(": ")[0] in note
    config = Config.of(data_path=str(ml_1m), bad_rows="skip", max_bad_rows=0.5, test_fraction=0.4)
    assert open_columns(config).notes[0] == note


def test_a_rating_of_an_unknown_movie_or_user_is_read_with_a_note(ml_1m: Path) -> None:
    with (ml_1m / "ratings.dat").open("a") as file:
        file.write("2::99::4::978301969\n98::1::3::978301970\n")
    raw = load(ml_1m)
    assert items_of(raw).tolist() == [1, 2, 1, 99, 1]
    assert users_of(raw).tolist() == [1, 1, 2, 2, 98]
    assert raw.items["title"].tolist()[-1] == "99"
    assert "1 user of the events has no row in the table of users" in raw.skipped[0]
    assert "1 item of the events has no row in the table of items" in raw.skipped[1]
    columns = open_columns(Config.of(data_path=str(ml_1m), test_fraction=0.4))
    assert columns.num_items == 3


def test_columns_made_with_another_limit_are_not_used(ml_1m: Path) -> None:
    lines = (ml_1m / "ratings.dat").read_text()
    write(ml_1m, {"ratings.dat": lines + "bad\n"})
    config = Config.of(data_path=str(ml_1m), bad_rows="skip", max_bad_rows=0.5, test_fraction=0.4)
    open_columns(config)
    with pytest.raises(UserError, match=r"--max_bad_rows 0\.01 allows 0"):
        open_columns(config.replaced(max_bad_rows=0.01))


@pytest.mark.parametrize(
    ("file", "row", "reason"),
    [
        ("movies.dat", "3::No genres (1990)", "2 fields instead of 3: '3::No genres (1990)'"),
        ("movies.dat", "x::Title (1990)::Drama", "movie_id 'x' is not a whole number"),
        ("users.dat", "3::M::25", "3 fields instead of 5: '3::M::25'"),
        ("users.dat", "3::M::old::1::2", "age 'old' is not a whole number"),
        ("users.dat", "3::M::::1::2", "age is missing"),
    ],
)
def test_a_bad_movie_or_user_is_named(ml_1m: Path, file: str, row: str, reason: str) -> None:
    with (ml_1m / file).open("ab") as opened:
        opened.write(f"{row}\n".encode())
    assert f"{ml_1m / file}, line 3: {reason}" in refusal(ml_1m)
    raw = load(ml_1m, bad_rows="skip", max_bad_rows=0.5)
    assert len(raw.items) == len(raw.users) == 2
    assert file in raw.skipped[0]


def test_a_movie_listed_twice_has_its_last_title_and_a_note(ml_1m: Path) -> None:
    with (ml_1m / "movies.dat").open("a") as file:
        file.write("1::Again (1990)::Drama\n")
    raw = load(ml_1m)
    assert raw.items["title"][0] == "Again (1990)"
    assert raw.items["year"][0] == 1990
    assert raw.skipped[0].startswith("title varies within 1 item: ")


@pytest.mark.parametrize("name", ["ratings.dat", "movies.dat"])
def test_an_empty_or_missing_file_is_refused_by_name(ml_1m: Path, name: str) -> None:
    (ml_1m / name).write_text("\n")
    assert f"Cannot read {ml_1m / name}: it has no first line" in refusal(ml_1m)
    (ml_1m / name).write_text("")
    assert f"Cannot read {ml_1m / name}: it is empty. Fix: " in refusal(ml_1m)
    (ml_1m / name).unlink()
    assert f"{ml_1m / name} is not there" in refusal(ml_1m)


@pytest.mark.parametrize(
    "encode",
    [
        gzip.compress,
        lambda text: text.decode("latin-1").encode("utf-16"),
        lambda text: codecs.BOM_UTF8 + text,
        lambda text: text.replace(b"\n", b"\r\n") + b"\r\n\r\n",
    ],
    ids=["gzip", "utf-16", "utf-8 mark", "windows"],
)
def test_files_without_a_header_may_be_packed_or_written_differently(
    ml_1m: Path, encode: Callable[[bytes], bytes]
) -> None:
    expected = load(ml_1m)
    for path in (ml_1m / name for name in ("ratings.dat", "movies.dat", "users.dat")):
        path.write_bytes(encode(path.read_bytes()))
    found = load(ml_1m)
    assert items_of(found).tolist() == items_of(expected).tolist()
    assert found.items.equals(expected.items)
    assert found.users.equals(expected.users)


@pytest.mark.parametrize(("encode", "name"), [(bz2.compress, "bzip2"), (lzma.compress, "xz")])
def test_a_file_of_an_unsupported_compression_is_refused_with_its_name(
    ml_csv: Path, encode: Callable[[bytes], bytes], name: str
) -> None:
    (ml_csv / "ratings.csv").write_bytes(encode((ml_csv / "ratings.csv").read_bytes()))
    assert f"Cannot read {ml_csv / 'ratings.csv'}: it is compressed by {name}. Fix: " in refusal(ml_csv)


def test_a_csv_without_its_header_is_read_and_one_with_another_is_refused(ml_csv: Path) -> None:
    header, rows = (ml_csv / "ratings.csv").read_text().split("\n", 1)
    write(ml_csv, {"ratings.csv": rows})
    assert load(ml_csv).events.label.tolist() == [4.0, 0.5, 2.5]
    write(ml_csv, {"ratings.csv": header.replace("userId", "who") + "\n" + rows})
    assert "ratings.csv, line 1: user_id 'who' is not a whole number" in refusal(ml_csv)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00\x10\x00{'descr': '<f4', ",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }",
        np.zeros(3),
        np.zeros((3, 1), "f4"),
    ],
    ids=["empty", "cut", "too long", "float64", "two dimensions"],
)
def test_a_damaged_oracle_is_refused_by_name(ml_1m: Path, content: bytes | np.ndarray) -> None:
    if isinstance(content, bytes):
        (ml_1m / "oracle.npy").write_bytes(content)
    else:
        np.save(ml_1m / "oracle.npy", content)
    assert f"{ml_1m / 'oracle.npy'} is damaged" in refusal(ml_1m)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff"])
def test_a_damaged_description_of_a_synthetic_set_is_refused(ml_1m: Path, content: bytes) -> None:
    (ml_1m / "oracle.json").write_bytes(content)
    assert "holds other ratings than" in refusal(ml_1m, dataset="synthetic")


def _unknown(line: bytes, files: dict[str, bytes]) -> bool:
    user, movie, *_ = line.split(b"::")
    known_users, known_movies = (
        {int(row.split(b"::")[0]) for row in files[name].splitlines()} for name in ("users.dat", "movies.dat")
    )
    return int(user) not in known_users or int(movie) not in known_movies


def test_random_damage_is_never_silent(synthetic_folder: Path, tmp_path: Path) -> None:
    files = {name: (synthetic_folder / name).read_bytes() for name in ("movies.dat", "users.dat")}
    lines = (synthetic_folder / "ratings.dat").read_bytes().splitlines()[:200]
    load(write(tmp_path / "ml", {**files, "ratings.dat": b"\n".join(lines)}))
    draw = np.random.default_rng(0)
    # What damage can leave a rating: other digits.
    pattern = re.compile(rb"\d+::\d+::[1-5]::\d+")
    for _ in range(60):
        damaged = list(lines)
        line = int(draw.integers(len(lines)))
        place = int(draw.integers(len(lines[line])))
        damaged[line] = lines[line][:place] + bytes([draw.integers(33, 127)]) + lines[line][place + 1 :]
        write(tmp_path / "ml", {"ratings.dat": b"\n".join(damaged)})
        if pattern.fullmatch(damaged[line]) and not _unknown(damaged[line], files):
            continue
        said = f"ratings.dat, line {line + 1}: "
        try:
            # An id that no table has, or a time with a fraction, which is then long ago.
            said, found = "the events| event has a time before", load(tmp_path / "ml").skipped[0]
        except UserError as error:
            found = str(error)
        assert re.search(said, found)


def test_a_folder_without_ratings_is_refused(tmp_path: Path) -> None:
    assert "holds no table of events; give a file or a folder" in refusal(tmp_path)


def test_a_folder_below_a_file_is_refused_with_one_message(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"Cannot make .*: File name too long. Fix: give a --data_path that can"
    ):
        locate(DataConfig(dataset="synthetic", data_path=str(tmp_path / ("a" * 1000))), seed=0)


def test_a_folder_of_another_set_is_refused(ml_csv: Path) -> None:
    assert "does not hold ml-1m but ratings.csv" in refusal(ml_csv, dataset="ml-1m")


def test_a_set_with_the_wrong_number_of_ratings_is_refused(ml_1m: Path) -> None:
    with pytest.raises(UserError, match="holds 3 ratings, but ml-1m has 1,000,209; remove the folder"):
        open_columns(Config.of(data_path=str(ml_1m), dataset="ml-1m", test_fraction=0.4))


def test_a_synthetic_folder_of_another_size_is_refused(synthetic_folder: Path) -> None:
    sentence = refusal(synthetic_folder, dataset="synthetic")
    assert "holds other ratings than --synthetic_ratings 1000000 --seed 0" in sentence


def test_a_synthetic_folder_of_another_version_is_refused(synthetic_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "synthetic"
    shutil.copytree(synthetic_folder, folder)
    about = json.loads((folder / "oracle.json").read_text())
    (folder / "oracle.json").write_text(json.dumps({**about, "format": 1}))
    flags = {"dataset": "synthetic", "synthetic_ratings": about["num_ratings"], "seed": about["seed"]}
    with pytest.raises(UserError, match="synthetic was drawn by another version of this program"):
        open_columns(Config.of(data_path=str(folder), **flags))


@pytest.mark.real_data
def test_real_movielens_is_read_whole(real_folder: Path) -> None:
    raw = load(real_folder, dataset="ml-latest-small")
    assert len(raw.events.label) == 100_836
    assert len(raw.users) == 610
    assert len(raw.items) == 9_742
    assert float(raw.events.label.mean()) == pytest.approx(3.5016, abs=1e-4)


@pytest.mark.parametrize("path", ["ml/ratings.csv", "."])
def test_a_single_file_or_a_parent_folder_of_movielens_is_refused_without_a_schema(
    tmp_path: Path, path: str
) -> None:
    folder = tmp_path / "ml"
    folder.mkdir()
    (folder / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,4.0,10\n1,2,3.0,20\n")
    (folder / "movies.csv").write_text("movieId,title,genres\n1,A (1990),Drama\n2,B (1991),Drama\n")
    config = Config.of(data_path=str(tmp_path / path))
    with pytest.raises(UserError, match=f"the folder of the MovieLens set in {re.escape(str(folder))}"):
        locate(config.data, 0)
    assert not list(tmp_path.rglob("schema.toml"))
    events = "ratings.csv" if path != "." else "ml/ratings.csv"
    schema_path(config.data.data_path).write_text(
        f'[files]\nevents = "{events}"\n[user]\ncolumn = "userId"\n[item]\ncolumn = "movieId"\n'
        '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 0.5\nhighest = 5\n'
    )
    assert len(locate(config.data, 0).read().events.user) == 2
