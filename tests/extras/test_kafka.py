"""Messages of a Kafka topic as events of a stream: each once, up to the end offsets, whatever breaks."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.preparation.stream_reader import StreamReader
from recsuite.datasets.streams import EMPTY_STREAM_STATE, FilePosition, Frontier, StreamPosition, StreamState
from recsuite.errors import UserError
from recsuite.extras import kafka as topics
from recsuite.extras.doctor.doctor import check_data
from recsuite.extras.kafka import Topic, lines_of
from tests.support.kafka import (
    KafkaError,
    MockKafka,
    as_arrow,
    as_json,
    config_of,
    confluent_kafka,
    ratings,
)
from tests.support.stream_reader import read, reader_of

FIRST = 1_700_000_000


@pytest.fixture(scope="module")
def kafka() -> Iterator[MockKafka]:
    with contextlib.closing(MockKafka()) as found:
        yield found


@pytest.fixture
def name(kafka: MockKafka, request: pytest.FixtureRequest) -> str:
    """An empty topic with three partitions, for one test alone."""
    found = f"t{abs(hash(request.node.nodeid))}"
    kafka.create(found, 3)
    return found


@contextlib.contextmanager
def opened(config: Config, state: StreamState = EMPTY_STREAM_STATE) -> Iterator[tuple[Topic, StreamReader]]:
    with contextlib.closing(Topic(config)) as topic:
        reader = reader_of(config, state, topic)
        with contextlib.closing(reader):
            yield topic, reader


def columns_of(config: Config) -> Columns:
    """The columns of a new stream of all events."""
    with opened(config) as (topic, reader):
        return read(reader, config, topic.ends())


def times_in(columns: Columns) -> list[int]:
    """Times of the events, as places in `ratings`."""
    return [(time - FIRST) // 900 for time in columns.column("time").tolist()]


def test_each_message_is_read_once_up_to_the_given_ends_and_nothing_stays(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    values = as_json(ratings(300))
    kafka.send(name, values[:150], 3)
    config = config_of(kafka.address(name), tmp_path)
    with opened(config) as (topic, reader):
        ends = topic.ends()
        assert ends == {f"partition-0000{number}": (0, 50) for number in range(3)}
        kafka.send(name, values[150:], 3)
        assert times_in(read(reader, config, ends)) == [*range(150)]
        reader.advance(100)
        columns = read(reader, config, topic.ends())
        assert times_in(columns) == [*range(100, 300)]
        assert columns.segment is not None
        assert {(mark.file, mark.position.bytes) for mark in columns.segment.marks} == {
            (partition, offset) for partition in ends for offset in (0, 50, 100)
        }
        assert read(reader, config, topic.ends()).num_train == 200
        reader.advance(300)
        assert not [*tmp_path.rglob("*.jsonl")]
    assert [path.name for path in tmp_path.iterdir()] == [".columns", "schema.toml"]
    assert [path.name for path in (tmp_path / ".columns").iterdir()] == [".lock"]


def test_json_and_arrow_messages_give_the_same_columns_as_a_file_of_the_same_rows(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    rows, found = ratings(240), []
    kafka.create(f"{name}-arrow", 3)
    # In turn to the partitions, ten rows to each.
    kafka.send(
        name,
        as_json([rows[k + 10 * (p % 3) + 30 * r] for r in range(8) for k in range(10) for p in range(3)]),
        3,
    )
    kafka.send(f"{name}-arrow", as_arrow(rows, 10), 3)
    for each in (name, f"{name}-arrow"):
        found.append(columns_of(config_of(kafka.address(each), tmp_path / each)))
    files = config_of("", tmp_path / "files").replaced(stream=True)
    (tmp_path / "files" / "rows.jsonl").write_bytes(b"\n".join(as_json(rows)) + b"\n")
    found.append(read(reader_of(files), files))
    assert found[0].num_train == 240
    # The digests of all columns, except those of the place of an event in its file.
    digests = [
        {name: each.files[name] for name in each.files if not name.startswith("file")} for each in found
    ]
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        (b'{"a": 1}', b'{"a": 1}\n'),
        (b'{"a":\r\n 1}\n', b'{"a":  1}\n'),
        (b' {"a": "\\n"}', b'{"a": "\\n"}\n'),
        (b'{"a": 1', b'{"a": 1\n'),
        (b'{"a": "\n"}', b'"{\\"a\\": \\"\\n\\"}"\n'),
        (b"[1, 2]", b'"[1, 2]"\n'),
        (b"", b'""\n'),
        (b'{"a": "\xff"}', b'"{\\"a\\": \\"\\\\xff\\"}"\n'),
        (b"\xff\xff\xff\xffno", b'"\\\\xff\\\\xff\\\\xff\\\\xffno"\n'),
    ],
)
def test_a_message_is_one_line_and_a_wrong_one_is_the_line_of_a_bad_row(value: bytes, lines: bytes) -> None:
    assert lines_of(value) == lines


def test_a_message_that_no_reader_of_lines_takes_is_the_line_of_a_bad_row() -> None:
    table = pa.table({"a": ["one", "two"]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    message = sink.getvalue().to_pybytes()
    offsets = (0).to_bytes(4, "little") + (3).to_bytes(4, "little") + (6).to_bytes(4, "little")
    assert message.count(offsets) == 1
    wrong = [
        message.replace(b"onetwo", b"\xff\xfe\xfdtwo"),
        message.replace(offsets, offsets[:8] + (2**30).to_bytes(4, "little")),
        message.replace(offsets, offsets[:4] + (-9).to_bytes(4, "little", signed=True) + offsets[8:]),
        b'{"a": "\\ud800"}',
        b'{"a": "' + b"x" * 2**22 + b'"}',
    ]
    assert lines_of(message) == b'{"a": "one"}\n{"a": "two"}\n'
    assert lines_of(b'{"a": "\\ud83d\\ude00"}') == b'{"a": "\\ud83d\\ude00"}\n'
    for each in wrong:
        (line,) = lines_of(each).splitlines()
        assert isinstance(json.loads(line), str)


def test_bad_messages_are_bad_rows_and_messages_without_a_value_are_counted(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    rows: list[bytes | None] = [*as_json(ratings(290))]
    rows[100:100] = [b"no json", None, b'{"user": "u1", "item": 1}', b"\xff", b'[{"user": 1}]', None]
    kafka.send(name, rows, 3)
    config = config_of(kafka.address(name), tmp_path)
    with pytest.raises(UserError, match=r"/partition-00000 from offset 0, line 35: rating is missing\. Fix"):
        columns_of(config)
    config = config.replaced(bad_rows="skip", max_bad_rows=0.1)
    with opened(config) as (topic, reader):
        ends = topic.ends()
        assert reader.read(ends) == ["skipped 2 messages without a value"]
        columns = reader.columns()
        assert columns.num_train == 290
        assert sum("partition-0000" in note and "not a JSON object" in note for note in columns.notes) == 2
        # Nothing to parse, but the position moves.
        kafka.send(name, [None, None, None], 3)
        assert reader.read(topic.ends()) == ["skipped 3 messages without a value"]
        assert reader.read(topic.ends()) == []
        # A reading may have bad messages alone, or lack columns.
        kafka.send(name, [b"no json", *as_json([{"user": "u1"}])], 3)
        reader.read(topic.ends())
        columns = reader.columns()
        assert columns.num_train == 290
        assert [note for note in columns.notes if "not a JSON object" in note or "is missing" in note]


def test_a_lost_broker_and_moved_leaders_lose_no_message(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    values = as_json(ratings(3_000))
    kafka.send(name, values[:1_500], 3)
    config = config_of(kafka.address(name), tmp_path)
    with opened(config) as (topic, reader):
        reader.read(topic.ends())
        kafka.send(name, values[1_500:], 3)
        ends = topic.ends()
        for broker in (1, 2):
            kafka.stop(broker)
        reading = threading.Thread(target=reader.read, args=(ends,))
        reading.start()
        time.sleep(1)
        assert reading.is_alive()
        for partition in range(3):
            kafka.move(name, partition, 3)
        reading.join(30)
        assert not reading.is_alive()
        for broker in (1, 2):
            kafka.start(broker)
        assert times_in(reader.columns()) == [*range(3_000)]


def test_a_broker_that_stays_away_is_reported_and_ends_a_reading_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(topics, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(topics, "SAID_AFTER", 0.5)
    with contextlib.closing(MockKafka(1)) as kafka:
        kafka.create("away", 1)
        kafka.send("away", as_json(ratings(10)), 1)
        with opened(config_of(kafka.address("away"), tmp_path, timeout=4)) as (topic, reader):
            ends = topic.ends()
            kafka.stop(1)
            with pytest.raises(
                UserError, match=r"Cannot read kafka://\S+/away: no message has come for 2 s, "
            ):
                reader.read(ends)
            with pytest.raises(UserError, match=r"no answer for . s \(.*\)\. Fix: check the address"):
                topic.ends()
            assert capsys.readouterr().out.count(f"waiting for an answer of {topic.address}: ") == 1
            kafka.start(1)
            reader.read(topic.ends())
            assert reader.columns().num_train == 10


def test_no_broker_no_such_topic_and_no_message_are_one_sentence_each(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"^kafka://\S+/none does not exist: the brokers have no topic none\.$"
    ):
        columns_of(config_of(kafka.address("none"), tmp_path))
    with pytest.raises(UserError, match=r"^Cannot read kafka://localhost:1/x: no answer for . s"):
        columns_of(config_of("kafka://localhost:1/x", tmp_path, timeout=2))
    with pytest.raises(UserError, match="has no message with a value"):
        columns_of(config_of(kafka.address(name), tmp_path))


def learned(kafka: MockKafka, name: str, config: Config) -> StreamState:
    """The state of a stream with 30 learned messages of 60 that were read, 20 in each partition."""
    kafka.send(name, as_json(ratings(60)), 3)
    with opened(config) as (topic, reader):
        vocabulary = Path(read(reader, config, topic.ends()).folder, "vocabulary.json").read_text()
    newest = Frontier(FIRST + 900 * 29, "partition-00002", 9)
    files = {f"partition-0000{number}": FilePosition(5, 5, "", 20, 20) for number in range(3)}
    return StreamState(vocabulary, 30, StreamPosition(files, newest, newest, FIRST))


def test_a_resume_reads_from_the_offsets_of_the_checkpoint_and_counts_removed_messages(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    config = config_of(kafka.address(name), tmp_path)
    state = learned(kafka, name, config)
    with opened(config, state) as (topic, reader):
        # What is removed before offset 5 is learned.
        assert reader.read({**topic.ends(), "partition-00000": (5, 20)}) == []
        assert times_in(reader.columns()) == [*range(30, 60)]
    kafka.send(name, as_json(ratings(1, first=2)), 1)
    with opened(config, state) as (topic, reader):
        # As if the topic had removed messages. Of partition 2 one is learned, and all of 1 are removed.
        lows = {"partition-00000": (15, 21), "partition-00001": (20, 20), "partition-00002": (9, 20)}
        assert reader.read({**topic.ends(), **lows}) == [
            f"partition-0000{number} begins at offset {low}: the topic removed {low - 5} offsets from 5 on, "
            "of which those that are not learned are skipped"
            for number, low in ((0, 15), (2, 9), (1, 20))
        ]
        columns = reader.columns()
        left = {*range(32, 60, 3), *range(45, 60, 3)}
        assert times_in(columns) == sorted(left)
        # The rows are those of before, so the last learned one is known, and one of those that came is late.
        assert columns.segment is not None
        assert columns.segment.position.num_late == 1
        rows = dict(zip(times_in(columns), columns.column("file_row").tolist(), strict=True))
        assert (rows[45], rows[32]) == (15, 10)


def test_messages_that_are_removed_before_they_are_read_count_as_removed(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    config = config_of(kafka.address(name), tmp_path)
    # Brokers keep 5 MiB of a partition.
    for line in as_json(ratings(13)):
        kafka.send(name, [line[:-1] + b', "more": "' + b"." * 500_000 + b'"}'], 1)
    with opened(config) as (topic, reader):
        low, end = topic.ends()["partition-00000"]
        assert 0 < low < end == 13
        reader.read({"partition-00000": (0, 13)})
        assert times_in(reader.columns()) == [*range(low, 13)]


def test_new_and_removed_partitions_and_another_topic_are_told_or_refused(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    config = config_of(kafka.address(name), tmp_path)
    state = learned(kafka, name, config)

    def read_with(change: Mapping[str, tuple[int, int] | None], state: StreamState) -> list[str]:
        with opened(config, state) as (topic, reader):
            ends = {**topic.ends(), **change}
            return reader.read({name: end for name, end in ends.items() if end is not None})

    with pytest.raises(UserError, match=r"/partition-00001 is gone, and 15 of its rows may not be learned"):
        read_with({"partition-00001": None}, state)
    with pytest.raises(
        UserError, match=r"partition-00002 of .* ends at offset 19, .* before offset 20: it is another topic"
    ):
        read_with({"partition-00002": (0, 19)}, state)
    files = {name: position for name, position in state.position.files.items() if "1" not in name}
    position = StreamPosition(files, state.position.frontier, state.position.predicted, FIRST)
    assert read_with({}, StreamState(state.vocabulary, 30, position)) == [
        "partition-00001 is new, and is read from offset 0 on"
    ]


def test_a_stream_that_has_learned_all_goes_on_after_a_resume(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    config = config_of(kafka.address(name), tmp_path)
    state = learned(kafka, name, config)
    newest = Frontier(FIRST + 900 * 59, "partition-00002", 19)
    files = {name: FilePosition(20, 20, "", 20, 20) for name in state.position.files}
    state = StreamState(state.vocabulary, 60, StreamPosition(files, newest, newest, FIRST))
    with opened(config, state) as (topic, reader):
        # Also if the topic has removed all messages.
        assert read(reader, config, dict.fromkeys(topic.ends(), (20, 20))).num_train == 0
        kafka.send(name, as_json(ratings(6, first=60)), 3)
        assert times_in(read(reader, config, topic.ends())) == [*range(60, 66)]


def test_another_consumer_of_the_group_changes_nothing(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    settings = {
        **{"bootstrap.servers": kafka.address(name)[8:].split("/")[0], "group.id": "recsuite"},
        **{"auto.offset.reset": "earliest", "enable.auto.commit": True},
    }
    config = config_of(kafka.address(name), tmp_path)
    with contextlib.closing(confluent_kafka.Consumer(settings)) as other:
        other.subscribe([name])
        assert len(other.consume(30, 10)) > 0
        other.commit(asynchronous=False)
        with opened(config) as (topic, reader):
            assert times_in(read(reader, config, topic.ends())) == [*range(60)]


def lagging(kafka: MockKafka, name: str, folder: Path, **flags: Any) -> Config:
    """A topic that is followed. Its third partition ends half an hour before the others."""
    rows = ratings(9)
    kafka.send(name, [*as_json(rows[:7]), None, None], 3)
    kafka.send(name, as_json(rows[7:]), 2)
    return config_of(kafka.address(name), folder, **{"follow_data": True, "window": "15m", **flags})


@pytest.mark.parametrize(
    ("flags", "held", "late"),
    [
        ({}, 3, ["partition-00002"]),
        ({"partition_delay": "14m"}, 1, ["partition-00000", "partition-00002"]),
        ({"window": "4"}, 0, []),
        ({"follow_data": False}, 0, []),
    ],
)
def test_events_after_the_newest_of_a_late_partition_are_held_back_up_to_a_delay(
    kafka: MockKafka, name: str, tmp_path: Path, flags: dict[str, Any], held: int, late: list[str]
) -> None:
    config = lagging(kafka, name, tmp_path, **{"partition_delay": "9h", **flags})
    if not config.stream.follow_data:
        config = config.replaced(partition_delay="5m")
    with opened(config) as (topic, reader):
        notes = reader.read(topic.ends())
        # The newest events are those of places 7, 8, 5.
        assert times_in(reader.columns()) == [*range(9 - held)]
        waits = [note for note in notes if note.startswith("a window waits until ")]
        assert len(waits) == bool(late)
        assert all(f"{', '.join(late)} has a newer event, or others are" in note for note in waits)
        if held == 3:
            kafka.send(name, [None, None, *as_json(ratings(1, first=7))], 3)
            assert times_in(read(reader, config, topic.ends())) == [0, 1, 2, 3, 4, 5, 6, 7, 7]


def test_a_window_ends_when_an_event_is_newer_by_the_delay_and_not_one_event_later(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    flags = {"follow_data": True, "window": "1h", "partition_delay": "5m"}
    config = config_of(kafka.address(name), tmp_path, **flags)
    begin, dues = FIRST // 3_600 * 3_600, []
    with opened(config) as (topic, reader):
        # The other partitions are idle.
        for place, second in enumerate((0, 1_800, 3_600, 3_899, 3_900)):
            event = {"user": "u", "item": place, "rating": 1 + place, "timestamp": begin + second}
            kafka.send(name, as_json([event]), 1)
            reader.read(topic.ends())
            dues.append(reader.is_due)
        assert dues == [False, False, False, False, True]
        columns = reader.columns()
        assert columns.segment is not None
        assert (columns.num_train, columns.segment.until) == (3, begin + 3_600)
        # What stays as the stream begins is that of all events that were read, not of the first window.
        assert json.loads(Path(columns.folder, "vocabulary.json").read_text())["item"] == [*range(5)]
        assert columns.mean_label == 3.0


def test_events_of_files_beside_a_topic_are_told_and_named_ones_refused(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    config = config_of(kafka.address(name), tmp_path)
    (tmp_path / "sample.jsonl").write_bytes(b"\n".join(as_json(ratings(9))) + b"\n")
    with opened(config) as (topic, reader):
        assert reader.read(topic.ends()) == [
            f"not read: sample.jsonl; the events are the messages of {topic.address}"
        ]
        assert reader.columns().num_train == 60
    with (tmp_path / "schema.toml").open("a") as file:
        file.write('[files]\nevents = "sample.jsonl"\n')
    with pytest.raises(UserError, match=r'schema.toml names the events "?sample.jsonl"?, .* remove the line'):
        columns_of(config)


def test_settings_come_from_a_file_and_are_not_shown(
    kafka: MockKafka, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    config, path = (
        config_of(kafka.address(name), tmp_path / "data", timeout=20),
        tmp_path / "kafka.properties",
    )
    monkeypatch.setenv(topics.SETTINGS, str(path))
    for text, message in (
        ("sasl.password", "line 1: must be key=value"),
        (
            "# ours\n\nno.such.key=1",
            'KAFKA_CONFIG has a wrong setting: No such configuration property: "no.such',
        ),
        ("enable.auto.commit=true", "enable.auto.commit in KAFKA_CONFIG is set by --stream; remove the line"),
        ("isolation.level=read_uncommitted", "isolation.level in KAFKA_CONFIG is set by --stream"),
        (
            "security.protocol=sasl_plaintext\nsasl.mechanism=PLAIN\nsasl.username=u\nsasl.password=secret",
            "the brokers refuse this client .* the login in the file that KAFKA_CONFIG",
        ),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message) as refused:
            columns_of(config)
        assert "secret" not in str(refused.value)
    path.write_text("client.id = mine\nsasl.password=secret\n")
    assert columns_of(config).num_train == 60
    assert "secret" not in json.dumps(config.flags)


def test_the_doctor_counts_the_messages_of_a_topic(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    address = kafka.address(name)
    assert check_data(config_of(address, tmp_path)) == f"{address}: 60 messages in 3 partitions"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UserError, match=r"requires confluent-kafka, .* pip install confluent-kafka"):
        Topic(config_of("kafka://localhost:1/x", tmp_path)).ends()


class Transactional:
    """A client of one partition of which some offsets have no message, in batches of a few offsets."""

    def __init__(self, offsets: list[int]) -> None:
        self.offsets, self.end, self.begin = offsets, 0, 0

    def list_topics(self, name: str, timeout: float) -> Any:
        return SimpleNamespace(topics={name: SimpleNamespace(error=None, partitions=[0])})

    def get_watermark_offsets(self, partition: Any, timeout: float) -> tuple[int, int]:
        return 0, self.end

    def assign(self, partitions: list[Any]) -> None:
        (self.begin,) = (partition.offset for partition in partitions)

    def consume(self, number: int, seconds: float) -> list[Any]:
        # A broker gives nothing behind the last stable offset, and then tells the end.
        found = [offset for offset in self.offsets if self.begin <= offset < self.end]
        return [*(message(offset, None) for offset in found), message(self.end, KafkaError._PARTITION_EOF)]

    def incremental_unassign(self, partitions: list[Any]) -> None:
        pass

    def unassign(self) -> None:
        pass

    def close(self) -> None:
        pass


def message(offset: int, error: int | None) -> Any:
    found = None if error is None else SimpleNamespace(code=lambda: error)
    value = None if error else as_json(ratings(1, first=offset))[0]
    return SimpleNamespace(
        error=lambda: found, partition=lambda: 0, offset=lambda: offset, value=lambda: value
    )


def test_aborted_and_removed_messages_are_passed_over_and_an_open_transaction_ends_a_reading(
    tmp_path: Path,
) -> None:
    config = config_of("kafka://localhost:1/x", tmp_path)
    # A transaction of offsets 4 to 7 is open; then it is committed. That of 8 to 11 is aborted.
    client = Transactional([0, 2, 4, 6])
    with opened(config) as (topic, reader):
        topic._consumer = client
        for end, times in ((4, [0, 2]), (8, [0, 2, 4, 6]), (12, [0, 2, 4, 6])):
            client.end = end
            assert times_in(read(reader, config, topic.ends())) == times
        client.offsets.append(12)
        client.end = 14
        assert times_in(read(reader, config, topic.ends())) == [0, 2, 4, 6, 12]
        assert client.begin == 12
