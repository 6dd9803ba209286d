"""Growing files are read when they are complete, and a file that is waited for is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.datasets import opening
from recsuite.datasets.opening import FileWatcher
from recsuite.runtime.process import RuntimeContext

HEADER, LINE = "user,item,rating,timestamp\n", "1,2,3.5,86400\n"


class Followed:
    """A folder of tables and who looks at it, for whom a moment is already a while."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.said = folder, list[str]()
        (folder / "schema.toml").write_text(
            '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n[timestamp]\ncolumn = "timestamp"\n'
            '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 1\nhighest = 5\n'
        )
        self.write("b.csv", HEADER + LINE)
        self.following = FileWatcher(Config.of(data_path=str(folder)), self.said.append)

    def write(self, name: str, text: str) -> None:
        with (self.folder / name).open("a") as file:
            file.write(text)

    def looks(self, number: int) -> list[bool]:
        return [self.following.has_grown() for _ in range(number)]


@pytest.fixture
def followed(tmp_path: Path, context: RuntimeContext, monkeypatch: pytest.MonkeyPatch) -> Followed:
    monkeypatch.setattr(opening, "SAID_AFTER", 0.0)
    return Followed(tmp_path)


def test_a_file_that_grew_is_read_once_after_it_stops_growing(followed: Followed) -> None:
    assert followed.looks(2) == [False, False]
    followed.write("b.csv", LINE)
    assert followed.looks(3) == [False, True, False]
    followed.write("a.csv", HEADER + LINE)
    assert followed.looks(3) == [False, True, False]


def test_an_unfinished_last_line_is_not_read_and_is_reported_once(followed: Followed) -> None:
    followed.write("b.csv", LINE[:-1])
    assert followed.looks(4) == [False] * 4
    assert followed.said[-1] == "b.csv does not end with a whole line; waiting for its end"
    assert len(followed.said) == len(set(followed.said))
    followed.write("b.csv", "\n")
    assert followed.looks(2) == [False, True]


def test_an_empty_new_file_is_not_read_yet(followed: Followed) -> None:
    followed.write("c.csv", "")
    assert followed.looks(3) == [False] * 3
    assert followed.said[-1] == "c.csv does not end with a whole line; waiting for its end"
    followed.write("c.csv", HEADER + LINE)
    assert followed.looks(2) == [False, True]


def test_a_file_that_grows_without_pause_is_reported(followed: Followed) -> None:
    for _ in range(3):
        followed.write("b.csv", LINE)
        assert followed.looks(1) == [False]
    assert followed.said == ["b.csv is still being written; waiting"]


def test_a_removed_file_is_a_change(followed: Followed) -> None:
    followed.write("a.csv", HEADER + LINE)
    assert followed.looks(2) == [False, True]
    (followed.folder / "a.csv").unlink()
    assert followed.looks(2) == [False, True]
