"""Archives damaged at random: each is unpacked, or refused in one sentence.

The short form draws from one seed; `./run.sh soak` continues drawing for SOAK_SECONDS.
"""

from __future__ import annotations

import io
import itertools
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

from recsuite.errors import UserError
from recsuite.extras.stores import download

SECONDS = float(os.environ.get("SOAK_SECONDS", "600"))
SHORT = 200
RATINGS = "userId,movieId,rating,timestamp\n" + "".join(
    f"{1 + k % 4},{1 + k * k % 5},{1 + k % 5},{978300760 + 7 * k}\n" for k in range(40)
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


def empty(*_: object) -> bytes:
    return b""


def noise(draw: Draw, _: bytes) -> bytes:
    return draw.bytes(int(draw.integers(1, 300)))


DAMAGES: tuple[Damage, ...] = (flip, cut, cut_out, repeat, empty, noise)


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


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("ml/ratings.csv", RATINGS)
        zipped.writestr("ml/movies.csv", "movieId,title,genres\n")
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
        zipped.writestr("ml/ratings.csv", RATINGS)
        member = zipfile.ZipInfo(names[draw.integers(len(names))])
        kinds = (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFREG, stat.S_IFDIR)
        member.external_attr = (kinds[draw.integers(len(kinds))] | 0o777) << 16
        zipped.writestr(member, "/etc")
    return buffer.getvalue()


def unpack_damaged(draw: Draw, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Take a damaged archive for one that was downloaded with the right digest, unpack and read it."""
    if draw.integers(10) == 0:
        content = hostile(draw)
    else:
        content = DAMAGES[draw.integers(len(DAMAGES))](draw, archive())
    monkeypatch.setattr(download, "_fetch", lambda url, file, end: file.write(content))
    monkeypatch.setattr(download, "_md5", lambda file: download.ARCHIVES["ml-1m"][0])
    folder.mkdir()
    (folder / "around").mkdir()
    target = folder / "around" / "ml"

    def act() -> None:
        download.download("ml-1m", target)
        assert target.is_dir()

    found = outcome(act)
    # Nothing beside it and, after a refusal, nothing at all.
    assert [path.name for path in folder.iterdir()] == ["around"]
    assert [path.name for path in (folder / "around").iterdir()] == (["ml"] if found == "data" else [])
    assert not Path("/evil").exists()
    assert not any(path.is_symlink() or not (path.is_dir() or path.is_file()) for path in target.rglob("*"))
    return found


def unpack_all(seeds: Iterator[int], folder: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts[unpack_damaged(np.random.default_rng(seed), folder / str(seed), monkeypatch)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        shutil.rmtree(folder / str(seed))
    return counts


def test_a_damaged_archive_is_read_or_refused_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert unpack_all(iter(range(SHORT)), tmp_path, monkeypatch)["sentence"] > 10


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_damaged_archives_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = time.monotonic() + SECONDS
    unpack_all(
        itertools.takewhile(lambda _: time.monotonic() < end, itertools.count(SHORT)), tmp_path, monkeypatch
    )
