"""Tables in common forms: columns that are used, asked about, or left to the user."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.config.sections import DataConfig
from recsuite.datasets.opening import fitted_to_tables
from recsuite.datasets.preparation.cache import open_columns
from recsuite.datasets.tables import source
from recsuite.datasets.tables.sections import Files, LabelColumn
from recsuite.errors import UserError
from recsuite.extras.guess.proposal import Proposal, propose
from tests.support.found_tables import CASES, ROWS, TIME_FORMS, write_case

COMPUTED = {"weekday", "hour"}


def proposed(name: str, folder: Path) -> Proposal:
    """The schema of a case, which its own reading takes."""
    return propose(write_case(name, folder))


def features(proposal: Proposal) -> set[str]:
    """The columns that are features, without those computed from the time."""
    return {*proposal.schema.features} - COMPUTED


def not_taken(proposal: Proposal) -> dict[str, str]:
    return {each.feature.column: each.why for each in proposal.left_out}


def roles(proposal: Proposal) -> tuple[str, str, str, str]:
    """Label kind, and the columns of label, user and item."""
    schema = proposal.schema
    return schema.label.kind, schema.label.column, schema.user.column, schema.item.column


@pytest.mark.parametrize("form", TIME_FORMS)
def test_times_of_every_form_are_the_times_of_the_events(form: str, tmp_path: Path) -> None:
    proposal = proposed(f"time_{form}", tmp_path)
    assert roles(proposal) == ("rating", "score", "user_id", "movie")
    assert proposal.schema.timestamp is not None
    raw = source.locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    day = 86_400
    assert (raw.events.time[0] // day, len(raw.events.time)) == (1_552_385_700 // day, ROWS)
    assert (raw.events.time[1:] >= raw.events.time[:-1]).all()


@pytest.mark.parametrize(
    ("name", "columns", "found"),
    [
        ("headline", ("rating", "rating", "user_id", "asin"), set[str]()),
        ("outcomes", ("yes_no", "is_click", "user_id", "video_id"), {"tab", "duration_ms"}),
        ("hyphen", ("rating", "Book-Rating", "User-ID", "ISBN"), set[str]()),
        ("spaces", ("rating", "rating", "user", "item"), set[str]()),
        ("recbole", ("rating", "rating", "user_id", "item_id"), set[str]()),
        ("same_columns", ("count", "Feedback", "User_ID", "Toy_ID"), {"price"}),
        ("one_contradiction", ("rating", "label", "user", "item"), {"genre"}),
        ("trailing", ("clicks", "", "user-id", "game-title"), set[str]()),
        ("na_user", ("clicks", "", "userId", "itemId"), set[str]()),
        ("few_items", ("clicks", "", "user_id", "item_id"), set[str]()),
        ("float_ids", ("rating", "rating", "user_id", "item_id"), set[str]()),
        ("jsonl", ("rating", "rating", "user_id", "asin"), set[str]()),
        ("minus_one", ("rating", "rating", "user_id", "anime_id"), set[str]()),
        ("movie_word", ("rating", "rating", "user_id", "movie_id"), set[str]()),
        ("own_splits", ("rating", "rating", "user_id", "item_id"), set[str]()),
    ],
)
def test_roles_are_those_of_unambiguous_names_and_columns_of_the_event_are_no_features(
    name: str, columns: tuple[str, str, str, str], found: set[str], tmp_path: Path
) -> None:
    proposal = proposed(name, tmp_path)
    assert (roles(proposal), features(proposal)) == (columns, found)
    # What is written is what its own reading takes.
    config = DataConfig(data_path=str(tmp_path), bad_rows="skip", max_bad_rows=1.0)
    assert len(source.locate(config, tmp_path).read().events.user)


def test_every_case_is_tested() -> None:
    (mark,) = test_roles_are_those_of_unambiguous_names_and_columns_of_the_event_are_no_features.pytestmark  # type: ignore[attr-defined]
    assert {each[0] for each in mark.args[1]} | {"latin", "noheader"} == {*CASES}


@pytest.mark.parametrize(
    ("name", "columns"),
    [
        ("headline", {"title"}),
        ("outcomes", {"is_like", "long_view", "play_time_ms"}),
        ("jsonl", {"helpful_vote"}),
    ],
)
def test_a_column_that_may_reveal_the_label_is_written_as_a_comment_and_shown(
    name: str, columns: set[str], tmp_path: Path
) -> None:
    proposal = proposed(name, tmp_path)
    assert columns <= not_taken(proposal).keys()
    for column in columns:
        assert f'# column = "{column}"' in proposal.path.read_text()
        assert re.search(rf"^not taken +{column} ", proposal.overview, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "told", "line"),
    [
        ("hyphen", "750 of 1,500 values are 0", 'drop = "0"'),
        ("minus_one", "300 of 1,500 values are -1, apart from the scale", 'drop = "-1"'),
        ("na_user", "has no id in 996 of 1,500 events", '[user] column = "sessionId"'),
        ("float_ids", "has no id in 3 of 1,500 events", "--bad_rows skip"),
        (
            "one_contradiction",
            "in 1 event of 1,500 it differs from most of the same item",
            "whose value counts",
        ),
        ("same_columns", "toy_history.dat has users and items too", 'events = "toy_history.dat"'),
    ],
)
def test_unusual_values_are_counted_with_the_line_to_write(
    name: str, told: str, line: str, tmp_path: Path
) -> None:
    notes = proposed(name, tmp_path).notes
    assert [note for note in notes if told in note and line in note]


def test_a_scale_is_that_of_the_values_that_are_answers(tmp_path: Path) -> None:
    label = proposed("minus_one", tmp_path).schema.label
    assert (label.lowest, label.highest, label.drop) == (1.0, 10.0, "-1")
    raw = source.locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    assert (len(raw.events.label), float(raw.events.label.min())) == (ROWS - 300, 2.0)


def advised(name: str, sentence: str, line: str, folder: Path) -> Proposal:
    """The schema of a case that is refused, once the line that the sentence names is written."""
    write_case(name, folder)
    with pytest.raises(UserError, match=sentence) as refused:
        propose(folder)
    found = re.search(line, str(refused.value))
    assert found
    (folder / "schema.toml").write_text(f"[files]\n{found[0]}\n")
    return propose(folder)


def test_a_file_without_a_header_is_read_after_following_its_message(tmp_path: Path) -> None:
    proposal = advised("noheader", r"Line 1 of .* looks like data", r"columns = \[.*?\]", tmp_path)
    assert roles(proposal) == ("rating", "rating", "user", "item")
    assert proposal.schema.timestamp is not None
    assert len(source.locate(DataConfig(data_path=str(tmp_path)), tmp_path).read().events.user) == ROWS


def test_a_latin_1_file_is_read_after_following_its_message(tmp_path: Path) -> None:
    proposal = advised("latin", 'write encoding = "latin-1"', 'encoding = ".*?"', tmp_path)
    assert roles(proposal) == ("rating", "Rating", "User-ID", "Product")
    assert features(proposal) == {"town"}
    raw = source.locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    assert {*raw.users["Town"]} == {"München", "Málaga", "Oslo"}


def test_train_valid_and_test_files_are_the_split(tmp_path: Path) -> None:
    write_case("own_splits", tmp_path)
    config = fitted_to_tables(Config.of(data_path=str(tmp_path)), [])
    columns = open_columns(config)
    assert config.data.split == "files"
    assert (columns.num_train, columns.num_validation, columns.num_test) == (400, 400, 400)
    rows = (tmp_path / "test.csv").read_text().splitlines()[1:]
    expected = Counter((int(stars), int(time)) for _, _, stars, time in (row.split(",") for row in rows))
    labels, times = (columns.column(name)[-400:].tolist() for name in ("rating", "time"))
    assert Counter((int(stars), int(time)) for stars, time in zip(labels, times, strict=True)) == expected


def test_events_without_an_id_are_bad_rows_that_can_be_skipped(tmp_path: Path) -> None:
    proposed("float_ids", tmp_path)
    with pytest.raises(
        UserError, match=r"item_id is missing\. Fix: correct the file, or give --bad_rows skip"
    ):
        source.locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    config = DataConfig(data_path=str(tmp_path), bad_rows="skip")
    assert source.locate(config, tmp_path).read().num_skipped == 3


def test_unnamed_columns_are_skipped_and_counted(tmp_path: Path) -> None:
    proposal = proposed("trailing", tmp_path)
    assert proposal.schema.files == Files()
    assert proposal.schema.label == LabelColumn("clicks")
    raw = source.locate(DataConfig(data_path=str(tmp_path)), tmp_path).read()
    assert any("1 column without a name skipped" in note for note in raw.skipped)
