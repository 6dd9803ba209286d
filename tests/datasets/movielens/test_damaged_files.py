"""Files and archives damaged at random: each is read as data, or refused in one sentence.

The short form draws from one seed; `./run.sh soak` continues drawing for SOAK_SECONDS.
"""

from __future__ import annotations

import io
import os
import shutil
import stat
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.movielens import source
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.source import locate, read
from recsuite.datasets.tables.values import FIRST_SECOND, LAST_SECOND
from recsuite.errors import UserError

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
SHORT = 200
RATINGS = [(1 + k % 4, 1 + k * k % 5, 1 + k % 5, 978300760 + 7 * k) for k in range(40)]
FLAGS = "|".join("01"[k % 2] for k in range(19))
FORMATS: dict[str, dict[str, str]] = {
    "100k": {
        "u.data": "".join("\t".join(map(str, row)) + "\n" for row in RATINGS),
        "u.item": "".join(f"{k}|Title {k} (199{k})|01-Jan-1995||http://a|{FLAGS}\n" for k in range(6)),
        "u.user": "".join(f"{k}|2{k}|F|artist|5536{k}\n" for k in range(5)),
        "u.genre": "".join(f"Genre{k}|{k}\n" for k in range(19)),
    },
    "1m": {
        "ratings.dat": "".join("::".join(map(str, row)) + "\n" for row in RATINGS),
        "movies.dat": "".join(f"{k}::Am\u00e9lie {k} (199{k})::Drama|War\n" for k in range(6)),
        "users.dat": "".join(f"{k}::M::2{k}::{k}::5536{k}\n" for k in range(5)),
    },
    "csv": {
        "ratings.csv": "userId,movieId,rating,timestamp\n"
        + "".join(",".join(map(str, row)) + "\n" for row in RATINGS),
        "movies.csv": "movieId,title,genres\n"
        + "".join(f'{k},"Title, {k} (199{k})",Drama|War\n' for k in range(6)),
    },
}
ABSURD = (
    b"9" * 23,
    b"9" * 5000,
    b"-1",
    b"-9223372036854775809",
    b"1e400",
    b"nan",
    b"0x10",
    b"",
    b"1_0",
    b"\xd9\xa1",
)

Draw = np.random.Generator
Damage = Callable[[Draw, bytes], bytes]


def flip(draw: Draw, content: bytes) -> bytes:
    damaged = bytearray(content)
    for _ in range(draw.integers(1, 4)):
        damaged[draw.integers(len(damaged))] = draw.integers(256)
    return bytes(damaged)


def cut(draw: Draw, content: bytes) -> bytes:
    return content[: draw.integers(len(content))]


def cut_out(draw: Draw, content: bytes) -> bytes:
    first, last = sorted(draw.integers(len(content), size=2))
    return content[:first] + content[last:]


def repeat(draw: Draw, content: bytes) -> bytes:
    first, last = sorted(draw.integers(len(content), size=2))
    return content[:last] + content[first:]


def insert(draw: Draw, content: bytes, what: bytes) -> bytes:
    place = draw.integers(len(content) + 1)
    return content[:place] + what + content[place:]


def insert_special(draw: Draw, content: bytes) -> bytes:
    specials = (b"\0", b"\r", b"\n", b'"', b"::", b",", b"\t", b"|", b"\xff", b"\xef\xbb\xbf", b"\x1a", b" ")
    return insert(draw, content, specials[draw.integers(len(specials))])


def insert_long(draw: Draw, content: bytes) -> bytes:
    return insert(draw, content, b"1a9"[draw.integers(3) :][:1] * int(2 ** draw.integers(10, 22)))


def lose_a_line(draw: Draw, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    del lines[draw.integers(len(lines))]
    return b"".join(lines)


def double_a_line(draw: Draw, content: bytes) -> bytes:
    lines = content.splitlines(keepends=True)
    return b"".join([*lines, lines[draw.integers(len(lines))]])


def separator_of(content: bytes) -> bytes:
    return next(found for found in (b"::", b"\t", b"|", b",") if found in content)


def swap_columns(draw: Draw, content: bytes) -> bytes:
    separator = separator_of(content)
    rows = [line.split(separator) for line in content.splitlines()]
    first, second = draw.choice(min(map(len, rows)), size=2, replace=False)
    for row in rows if draw.integers(2) else rows[:1]:
        row[first], row[second] = row[second], row[first]
    return b"\n".join(separator.join(row) for row in rows)


def put_absurd(draw: Draw, content: bytes) -> bytes:
    separator = separator_of(content)
    rows = [line.split(separator) for line in content.splitlines()]
    row = rows[draw.integers(len(rows))]
    row[draw.integers(len(row))] = ABSURD[draw.integers(len(ABSURD))]
    return b"\n".join(separator.join(row) for row in rows)


def other_line_ends(draw: Draw, content: bytes) -> bytes:
    return content.replace(b"\n", (b"\r\n", b"\r", b"\n\n", b"\n\r", b"\n \n")[draw.integers(5)])


def no_last_line_end(_: Draw, content: bytes) -> bytes:
    return content.rstrip(b"\n")


def recode(draw: Draw, content: bytes) -> bytes:
    codes = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "iso-8859-1")
    return content.decode("utf-8", "replace").encode(codes[draw.integers(len(codes))], "replace")


def empty(*_: object) -> bytes:
    return b""


def noise(draw: Draw, _: bytes) -> bytes:
    return draw.bytes(int(draw.integers(1, 300)))


OF_BYTES: tuple[Damage, ...] = (flip, cut, cut_out, repeat, insert_special, insert_long, empty, noise)
OF_TEXT: tuple[Damage, ...] = (
    *OF_BYTES,
    lose_a_line,
    double_a_line,
    swap_columns,
    put_absurd,
    other_line_ends,
    no_last_line_end,
    recode,
)


def outcome(act: Callable[[], None]) -> str:
    """Return "data" or "sentence" for the result of a read; anything else is raised."""
    try:
        act()
    except UserError as error:
        sentence = str(error)
        assert sentence.isprintable()
        assert sentence.endswith(".")
        assert len(sentence) < 1500
        return "sentence"
    return "data"


def read_damaged(draw: Draw, folder: Path) -> str:
    """Write one set with one file damaged, and read it."""
    name = str(draw.choice(list(FORMATS)))
    files = {file: text.encode() for file, text in FORMATS[name].items()}
    file = str(draw.choice(list(files)))
    for _ in range(draw.integers(1, 3)):
        # What a first damage left without rows, a second cannot take for a table.
        damages = OF_TEXT if has_rows(files[file]) else OF_BYTES
        if files[file]:
            files[file] = damages[draw.integers(len(damages))](draw, files[file])
    folder.mkdir()
    for file, content in files.items():
        (folder / file).write_bytes(content)
    skip = bool(draw.integers(2))
    config = Config.of(
        data_path=str(folder), bad_rows="skip" if skip else "error", max_bad_rows=0.5 if skip else 0.01
    )
    every_column = draw.integers(5) == 0

    def act() -> None:
        raw = read(locate(config.data, config.runtime.seed), config.data)
        assert len(raw.events.label) > 0
        assert SCHEMA.lowest_label <= raw.events.label.min() <= raw.events.label.max() <= SCHEMA.highest_label
        assert FIRST_SECOND <= raw.events.time.min() <= raw.events.time.max() <= LAST_SECOND
        assert skip or not any("bad row" in note for note in raw.skipped)
        if every_column:
            open_columns(config)

    return outcome(act)


def has_rows(content: bytes) -> bool:
    separators = (b"::", b"\t", b"|", b",")
    found = next((separator for separator in separators if separator in content), None)
    return found is not None and all(found in line for line in content.splitlines())


def archive_of(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        for file, text in FORMATS[name].items():
            zipped.writestr(f"ml/{file}", text)
    return buffer.getvalue()


def hostile(draw: Draw) -> bytes:
    """A zip that is whole, with a member that no set has."""
    buffer = io.BytesIO()
    names = (
        "../evil",
        "/evil",
        "ml/../../evil",
        "ml/a\\..\\evil",
        "ml/" + "n" * 300,
        "ml/a\0b",
        "evil",
        "ml/\x1b[2J",
    )
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("ml/ratings.csv", FORMATS["csv"]["ratings.csv"])
        member = zipfile.ZipInfo(names[draw.integers(len(names))])
        kinds = (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFREG, stat.S_IFDIR)
        member.external_attr = (kinds[draw.integers(len(kinds))] | 0o777) << 16
        zipped.writestr(member, "/etc")
    return buffer.getvalue()


def unpack_damaged(draw: Draw, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take a damaged archive for one that was downloaded with the right digest, unpack and read it."""
    name = str(draw.choice(list(FORMATS)))
    if draw.integers(10) == 0:
        content = hostile(draw)
    else:
        content = OF_BYTES[draw.integers(len(OF_BYTES))](draw, archive_of(name))
    monkeypatch.setattr(source, "_fetch", lambda url, file, end: file.write(content))
    monkeypatch.setattr(source, "_md5", lambda file: source.ARCHIVES["ml-1m"][0])
    folder.mkdir()
    (folder / "around").mkdir()
    target = folder / "around" / "ml"

    def act() -> None:
        source.download("ml-1m", target)
        assert target.is_dir()

    found = outcome(act)
    # Nothing beside it and, after a refusal, nothing at all.
    assert [path.name for path in folder.iterdir()] == ["around"]
    assert [path.name for path in (folder / "around").iterdir()] == (["ml"] if found == "data" else [])
    assert not Path("/evil").exists()
    assert not any(path.is_symlink() or not (path.is_dir() or path.is_file()) for path in target.rglob("*"))
    return found


def counted(draws: Iterator[int], act: Callable[[Draw, Path], str], folder: Path) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in draws:
        try:
            counts[act(np.random.default_rng(seed), folder / str(seed))] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        shutil.rmtree(folder / str(seed))
    print(dict(counts))
    return counts


def seeds() -> Iterator[int]:
    """New ones until SOAK_SECONDS are over."""
    seed, end = SHORT, time.monotonic() + SECONDS / 2
    while time.monotonic() < end:
        yield seed
        seed += 1


def test_a_damaged_file_is_read_or_refused_with_one_message(tmp_path: Path) -> None:
    counts = counted(iter(range(SHORT)), read_damaged, tmp_path)
    assert counts["data"] > 10
    assert counts["sentence"] > 10


def test_a_damaged_archive_is_read_or_refused_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = counted(
        iter(range(SHORT)), lambda draw, folder: unpack_damaged(draw, folder, monkeypatch), tmp_path
    )
    assert counts["sentence"] > 10


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_damaged_files_for_long(tmp_path: Path) -> None:
    counted(seeds(), read_damaged, tmp_path)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_damaged_archives_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted(seeds(), lambda draw, folder: unpack_damaged(draw, folder, monkeypatch), tmp_path)
