"""A stream is read in segments: each event once, with the histories and sums of all events before it."""

from __future__ import annotations

import dataclasses
import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recsuite.config.config import Config
from recsuite.datasets.batches import EventBatches, Request
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation import stream_reader
from recsuite.datasets.schema import ITEM, USER
from recsuite.datasets.streams import FilePosition, Frontier, StreamPosition, StreamState
from recsuite.datasets.tables import parts
from recsuite.datasets.tables.files import File
from recsuite.errors import UserError
from tests.support.batches import lists_of
from tests.support.stream_reader import append, read, reader_of, sizes

DAY = 86_400
FIRST = 1_600_000_000
NUM_USERS, NUM_ITEMS = 9, 25


def rows_of(number: int, texts: bool = False, seed: int = 0) -> list[tuple[Any, ...]]:
    """Events in the order of time; several are of one second."""
    draw = np.random.default_rng(seed)
    times = (FIRST + np.sort(draw.integers(0, 40, number)) * 10).tolist()
    users, items = draw.integers(0, NUM_USERS, number).tolist(), draw.integers(0, NUM_ITEMS, number).tolist()
    labels = draw.integers(1, 6, number).tolist()
    name = "u{}".format if texts else int
    return [
        (name(user), item, label, time)
        for user, item, label, time in zip(users, items, labels, times, strict=True)
    ]


def config_of(folder: Path, **flags: Any) -> Config:
    settings = {"vocabulary": "dynamic", "capacity": 100, "history": 3, "batch_size": 8, "window": "8"}
    return Config.of(data_path=str(folder), stream=True, **{**settings, **flags})


def batches_of(columns: Columns, config: Config) -> list[dict[str, list[Any]]]:
    """Features of the events of columns as ids, event by event."""
    dataset = EventBatches(columns, config, 0, 1)
    found = []
    for begin in range(0, columns.num_train, 8):
        window = (begin, min(begin + 8, columns.num_train))
        batch = dataset[Request("validation", 0, 0, window=window)]
        listed = lists_of(columns.tables, batch)
        for place in range(window[1] - begin):
            event = {name: lists[place].tolist() for name, lists in listed.items()}
            found.append(event | {"label": [float(batch.labels[place])]})
    return found


def past_of(columns: Columns) -> dict[str, Any]:
    """The sums before columns, by the place of the first event of each user and item."""
    events = columns.events("train")
    return {
        entity: [columns.column(f"past_{entity}")[place].tolist() for place in events[entity][:20].tolist()]
        for entity in (USER, ITEM)
    }


@pytest.mark.parametrize("texts", [False, True])
def test_any_segments_give_the_events_histories_and_sums_of_the_whole(texts: bool, tmp_path: Path) -> None:
    rows = rows_of(120, texts)
    whole = tmp_path / "whole"
    whole.mkdir()
    append(whole / "a.csv", rows)
    config = config_of(whole)
    expected = batches_of(read(reader_of(config), config), config)
    parts = tmp_path / "parts"
    parts.mkdir()
    config = config_of(parts)
    found, segments, learned = [], reader_of(config), 0
    for begin, end in ((0, 40), (40, 41), (41, 80), (80, 120)):
        append(parts / ("b.csv" if end > 80 else "a.csv"), rows[begin:end])
        segments.advance(learned)
        columns = read(segments, config)
        assert columns.segment is not None
        assert (columns.segment.first, columns.segment.first + columns.num_train) == (learned, end)
        of_users = past_of(columns)[USER]
        before = [row for row in rows[:learned] if row[0] == rows[learned][0]]
        assert of_users[0] == [sum(row[2] for row in before), len(before)]
        # All but the last events are learned: those are read again with the next ones.
        kept = end - learned if end == 120 else max(1, end - learned - 3)
        found += batches_of(columns, config)[:kept]
        learned += kept
    assert found == expected


def test_a_reader_begins_where_another_one_was(tmp_path: Path) -> None:
    rows = rows_of(90)
    config = config_of(tmp_path)
    append(tmp_path / "a.csv", rows[:50])
    first = reader_of(config)
    columns = read(first, config)
    first.advance(30)
    append(tmp_path / "a.csv", rows[50:])
    columns = read(first, config)
    assert columns.segment is not None
    vocabulary = Path(columns.folder, "vocabulary.json").read_text()
    # Of the file, only what follows the first reading is before the mark: 20 of its rows are not learned.
    position = dataclasses.replace(columns.segment.position, files={"a.csv": FilePosition(read=50)})
    second = reader_of(config, StreamState(vocabulary, 30, position))
    second.recent = first.recent
    again = read(second, config)
    assert batches_of(again, config) == batches_of(columns, config)
    assert again.num_train == 60


def test_events_that_come_into_a_window_under_way_are_late(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    rows = [(1, place, 3, FIRST + 10 * place) for place in range(6)]
    append(tmp_path / "a.csv", rows)
    vocabulary = Path(read(reader_of(config), config).folder, "vocabulary.json").read_text()
    # Two events are learned, and the next two were predicted when the training ended.
    learned, predicted = (Frontier(FIRST + 10 * place, "a.csv", place) for place in (1, 3))
    position = StreamPosition({"a.csv": FilePosition(read=6)}, learned, predicted, FIRST)
    append(tmp_path / "b.csv", [(2, 7, 3, FIRST + 15), (2, 8, 3, FIRST + 25), (2, 9, 3, FIRST + 35)])
    columns = read(reader_of(config, StreamState(vocabulary, 2, position)), config)
    assert columns.column("time").tolist() == [FIRST + second for second in (20, 30, 35, 40, 50)]
    assert columns.segment is not None
    assert columns.segment.position.num_late == 2


def test_only_new_bytes_of_a_file_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "a.csv", rows_of(40))
    segments = reader_of(config)
    read(segments, config)
    segments.advance(40)
    before = (tmp_path / "a.csv").stat().st_size
    append(tmp_path / "a.csv", [(1, 2, 3, FIRST + 400)])
    parts: list[tuple[int, int] | None] = []

    def noted(source: Any, *others: Any) -> Any:
        parts.extend(file.part for file in source.tables.events)
        return actual(source, *others)

    actual = stream_reader.read
    monkeypatch.setattr(stream_reader, "read", noted)
    assert read(segments, config).num_train == 1
    assert parts == [(before, (tmp_path / "a.csv").stat().st_size)]


def test_late_events_are_skipped_and_counted_once(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "b.csv", [(1, 1, 5, FIRST), (2, 2, 5, FIRST + 20), (2, 3, 5, FIRST + 20)])
    segments = reader_of(config)
    read(segments, config)
    segments.advance(2)
    # Older, of the very second of the newest learned event in a file before and after it, and newer.
    append(tmp_path / "a.csv", [(1, 9, 1, FIRST + 10), (1, 8, 1, FIRST + 20)])
    append(tmp_path / "c.csv", [(1, 7, 1, FIRST + 20), (1, 6, 1, FIRST + 30), (1, 5, 1, FIRST + 1)])
    columns = read(segments, config)
    assert columns.segment is not None
    assert columns.segment.position.num_late == 3
    assert any(note.startswith("3 ") and "older than the trained events" in note for note in columns.notes)
    items = columns.ids_of("item")
    assert items is not None
    row = columns.column("item_features")["features"][:, columns.place_of(ITEM)]
    assert items[row[columns.events("train")[ITEM]]].tolist() == [3, 7, 6]
    segments.advance(5)
    append(tmp_path / "c.csv", [(1, 4, 1, FIRST + 40)])
    columns = read(segments, config)
    assert columns.segment is not None
    assert (columns.num_train, columns.segment.position.num_late) == (1, 3)


def test_an_event_of_a_wrong_clock_is_held_back_and_read_when_it_is_not_new_any_more(tmp_path: Path) -> None:
    config = config_of(tmp_path, history=0)
    days = [(place % 9, place % 7, 1 + place % 5, FIRST + DAY * place) for place in range(40)]
    append(tmp_path / "a.csv", [*days[:20], (1, 1, 1, 4_000_000_000), *days[20:]])
    segments = reader_of(config)
    columns = read(segments, config)
    assert columns.num_train == 40
    (note,) = (note for note in columns.notes if "held back" in note)
    assert note == (
        "1 rating is held back until others are as new, as of a wrong clock: rating 21 of a.csv has the time "
        "2096-10-02T07:06:40, and the newest before it 2020-10-22T12:26:40; a --resume "
        "skips 1 over a day ahead of the clock"
    )
    segments.advance(40)
    append(tmp_path / "a.csv", [(1, 1, 1, FIRST + DAY * 40 + second) for second in range(5)])
    columns = read(segments, config)
    assert columns.segment is not None
    assert (columns.num_train, columns.segment.position.num_late) == (5, 0)
    # It is not read again after a resume: what was read up to it counts as learned.
    assert max(mark.position.rows for mark in columns.segment.marks if mark.learned_at <= 40) == 41


def test_segments_end_where_kept_users_are_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_reader, "PRUNE_EVERY", 50)
    rows = rows_of(120)
    append(tmp_path / "a.csv", rows)
    for ids in ("dynamic", "fixed"):
        config = config_of(tmp_path, vocabulary=ids, window="16")
        segments = reader_of(config)
        columns = read(segments, config)
        ends, found = [], []
        while True:
            assert columns.segment is not None
            ends.append((columns.segment.first + columns.num_train, columns.segment.num_left))
            found += batches_of(columns, config)
            if not columns.segment.num_left:
                break
            segments.advance(ends[-1][0])
            columns = segments.columns()
        # Windows of 16 events: the first one that reaches a multiple of 50, and so on.
        assert ends == [(64, 56), (112, 8), (120, 0)]
        monkeypatch.setattr(stream_reader, "PRUNE_EVERY", 1_000)
        whole = batches_of(read(reader_of(config), config), config)
        monkeypatch.setattr(stream_reader, "PRUNE_EVERY", 50)
        assert found == whole


def test_users_and_items_that_are_not_kept_are_forgotten(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "a.csv", [(1, 1, 5, FIRST), (2, 2, 4, FIRST), (2, 3, 3, FIRST + 1)])
    segments = reader_of(config)
    read(segments, config)
    assert segments.ids_of(USER, 3).tolist() == [1, 2]
    segments.keep(USER, np.array([True, False]))
    assert segments.ids_of(ITEM, 3).tolist() == [1, 2, 3]
    # The history of user 1 has item 1.
    segments.keep(ITEM, np.array([False, False, True]))
    assert [*segments.recent.items.slot_of] == [1, 3]
    append(tmp_path / "a.csv", [(2, 4, 1, FIRST + 9), (1, 4, 1, FIRST + 9)])
    events = batches_of(read(segments, config), config)
    assert [event["history"] for event in events] == [[], [1]]


def changed(path: Path) -> None:
    path.write_text(path.read_text().replace(",3,", ",4,"))


def shortened(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


@pytest.mark.parametrize("change", [changed, shortened])
def test_a_file_that_changed_before_its_new_rows_is_refused(change: Any, tmp_path: Path) -> None:
    config, path = config_of(tmp_path), tmp_path / "a.csv"
    append(path, rows_of(40))
    segments = reader_of(config)
    read(segments, config)
    segments.advance(40)
    content = path.read_bytes()
    change(path)
    if change is changed:
        append(path, [(1, 2, 3, FIRST + 400)])
    with pytest.raises(
        UserError, match=r"a\.csv, which has .* are not those that this stream has learned from"
    ):
        segments.read(sizes(config))
    # Nothing was changed by it.
    path.write_bytes(content)
    append(path, [(1, 2, 3, FIRST + 400)])
    assert read(segments, config).num_train == 1


def test_learned_files_may_be_removed_and_others_not(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "a.csv", rows_of(40))
    newest = Frontier(FIRST + 500, "z.csv", 6)
    position = StreamPosition({"z.csv": FilePosition(7, 99, "", 7)}, newest, newest, FIRST)
    vocabulary = Path(read(reader_of(config), config).folder, "vocabulary.json").read_text()
    # All events of a.csv are older: none is left, and an empty segment is made.
    assert read(reader_of(config, StreamState(vocabulary, 7, position)), config).num_train == 0
    position = dataclasses.replace(position, files={"z.csv": FilePosition(5, 66, "", 7)})
    with pytest.raises(UserError, match=r"z\.csv is gone, and 2 of its rows may not be learned"):
        reader_of(config, StreamState(vocabulary, 7, position)).read(sizes(config))


def test_a_stream_that_has_learned_all_goes_on_after_a_resume(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "a.csv", rows_of(40))
    (tmp_path / "b.csv").write_text("user,item,rating,timestamp\n")
    first = reader_of(config)
    columns = read(first, config)
    first.advance(40)
    position = dataclasses.replace(first.position, files={"a.csv": first._marks["a.csv"][-1]})
    state = StreamState(Path(columns.folder, "vocabulary.json").read_text(), 40, position)
    resumed = reader_of(config, state)
    assert read(resumed, config).num_train == 0
    append(tmp_path / "a.csv", [(1, 2, 3, FIRST + 400)])
    append(tmp_path / "b.csv", [(1, 2, 3, FIRST + 401)])
    assert read(resumed, config).num_train == 2


def test_a_last_line_without_its_end_is_read_when_it_has_come(tmp_path: Path) -> None:
    config, path = config_of(tmp_path, follow_data=True), tmp_path / "a.csv"
    append(path, rows_of(20))
    with path.open("a") as file:
        file.write(f"1,2,3,{str(FIRST + 999)[:9]}")
    reader = reader_of(config)
    assert read(reader, config).num_train == 20
    reader.advance(20)
    with path.open("a") as file:
        file.write(f"{str(FIRST + 999)[9:]}\n")
    assert read(reader, config).column("time").tolist() == [FIRST + 999]


def test_a_line_that_goes_on_where_it_was_read_is_refused(tmp_path: Path) -> None:
    config, path = config_of(tmp_path), tmp_path / "a.csv"
    append(path, rows_of(20))
    path.write_text(path.read_text().rstrip("\n"))
    reader = reader_of(config)
    read(reader, config)
    reader.advance(20)
    content = path.read_text()
    path.write_text(f"{content}7\n")
    with pytest.raises(UserError, match=r"a\.csv that was read without its end goes on at byte"):
        reader.read(sizes(config))
    path.write_text(f"{content}\n1,2,3,{FIRST + 400}\n")
    assert read(reader, config).num_train == 1


def test_a_reading_whose_columns_cannot_be_made_is_undone(tmp_path: Path) -> None:
    config, path = config_of(tmp_path, vocabulary="fixed"), tmp_path / "a.csv"
    append(path, rows_of(20))
    reader = reader_of(config)
    read(reader, config)
    reader.advance(20)
    content = path.read_text()
    append(path, [("guest", 2, 3, FIRST + 400)])
    with pytest.raises(UserError, match="must be whole numbers of 64 bits"):
        read(reader, config)
    path.write_text(content)
    append(path, [(1, 2, 3, FIRST + 400)])
    assert read(reader, config).num_train == 1


def test_what_is_kept_does_not_depend_on_the_pieces_in_which_it_was_learned(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "a.csv", rows_of(60))
    once, in_pieces = reader_of(config), reader_of(config)
    for reader in (once, in_pieces):
        read(reader, config)
    for position in (7, 30, 31, 60):
        in_pieces.advance(position)
    once.advance(60)
    append(tmp_path / "a.csv", [(user, 1, 2, FIRST + 500) for user in range(9)])
    files = [read(reader, config).files for reader in (once, in_pieces)]
    assert files[0] == files[1]
    assert once.ids_of(USER, 60).tolist() == in_pieces.ids_of(USER, 60).tolist()


@pytest.mark.parametrize(
    "pack",
    [
        gzip.compress,
        lambda text: text.decode().encode("utf-16"),
        lambda text: text.replace(b"\n", b"\r"),
    ],
    ids=["gzip without its suffix", "utf-16 with a mark", "carriage returns"],
)
def test_a_text_that_cannot_be_cut_is_read_again_and_only_its_new_rows_are_taken(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    config, path, reader = config_of(tmp_path), tmp_path / "a.csv", None
    new = (1, 2, 3, FIRST + 400)
    for rows in (rows_of(20), [*rows_of(20), new]):
        path.unlink(missing_ok=True)
        append(path, rows)
        path.write_bytes(pack(path.read_bytes()))
        reader = reader or reader_of(config)
        columns = read(reader, config)
        reader.advance(len(rows))
    assert columns.column("time").tolist() == [FIRST + 400]


def test_bad_rows_are_counted_in_what_was_read_of_a_file_and_not_in_its_end(tmp_path: Path) -> None:
    config, path = config_of(tmp_path, bad_rows="skip", max_bad_rows=0.1), tmp_path / "a.csv"
    append(path, rows_of(40))
    reader = reader_of(config)
    read(reader, config)
    reader.advance(40)
    append(path, [(1, 2, "bad", FIRST + 400), (1, 2, 3, FIRST + 401)])
    assert read(reader, config).num_train == 1


def test_users_and_items_are_parsed_again_only_when_they_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(tmp_path)
    append(tmp_path / "events.csv", rows_of(40))
    (tmp_path / "items.csv").write_text("item\n" + "".join(f"{item}\n" for item in range(50)))
    reader = reader_of(config)
    read(reader, config)
    parsed: list[str] = []
    make = parts.make_part

    def counted(folder: Path, file: File, *rest: Any) -> parts.Part:
        parsed.append(Path(file.path).name)
        return make(folder, file, *rest)

    monkeypatch.setattr(parts, "make_part", counted)
    for second in range(3):
        append(tmp_path / "events.csv", [(1, 2, 3, FIRST + 400 + second)])
        assert read(reader, config).num_train == 40 + second + 1
    assert (parsed.count("items.csv"), parsed.count("events.csv")) == (1, 3)
    reader.close()
    assert [path.name for path in (tmp_path / ".columns").iterdir() if "reading" in path.name] == []
