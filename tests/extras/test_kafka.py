"""Messages of a Kafka topic become files: each message once, up to the end offsets, whatever breaks."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.datasets.streams import FilePosition, StreamPosition
from recsuite.errors import UserError
from recsuite.extras import kafka as topics
from recsuite.extras.doctor.doctor import check_data
from recsuite.extras.kafka import COPY, RECORD, Topic, file_of, lines_of
from tests.support.kafka import KafkaError, MockKafka, as_arrow, as_json, config_of, ratings
from tests.support.stream_reader import read, reader_of, sizes


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


def copied(config: Config) -> list[str]:
    with contextlib.closing(Topic(config)) as topic:
        return topic.copy(topic.offsets())


def lines_in(folder: Path) -> dict[str, list[bytes]]:
    paths = sorted((folder / COPY).glob("partition-*"))
    return {path.name: path.read_bytes().splitlines() for path in paths}


def test_each_message_is_copied_once_in_the_order_of_offsets(
    kafka: MockKafka, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topics, "OFFSETS_IN_FILE", 100)
    values = as_json(ratings(900))
    kafka.send(name, values, 3)
    config = config_of(kafka.address(name), tmp_path)
    assert copied(config) == []
    found = lines_in(tmp_path)
    assert [*found] == [file_of(partition, offset) for partition in range(3) for offset in (0, 100, 200)]
    for partition in range(3):
        mine = [found[file_of(partition, offset)] for offset in (0, 100, 200)]
        assert [len(lines) for lines in mine] == [100, 100, 100]
        assert [line for lines in mine for line in lines] == values[partition::3]
    copied(config)
    assert lines_in(tmp_path) == found


def test_a_copy_ends_at_the_given_offsets_and_the_next_one_begins_there(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    values = as_json(ratings(300))
    kafka.send(name, values[:150], 3)
    with contextlib.closing(Topic(config_of(kafka.address(name), tmp_path))) as topic:
        offsets = topic.offsets()
        assert offsets == {0: (0, 50), 1: (0, 50), 2: (0, 50)}
        kafka.send(name, values[150:], 3)
        topic.copy(offsets)
        assert [len(lines) for lines in lines_in(tmp_path).values()] == [50, 50, 50]
        topic.copy(topic.offsets())
    assert [*lines_in(tmp_path).values()] == [values[k::3] for k in range(3)]


def test_what_a_killed_process_wrote_after_the_record_is_cut_off(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    values = as_json(ratings(300))
    kafka.send(name, values[:150], 3)
    config = config_of(kafka.address(name), tmp_path)
    copied(config)
    for text in ('{"user": "half', '{"user": "whole", "item": 1, "rating": 1, "timestamp": 1}\n'):
        with (tmp_path / COPY / file_of(1, 0)).open("a") as file:
            file.write(text)
    (tmp_path / COPY / file_of(1, topics.OFFSETS_IN_FILE)).write_text("{}\n")
    kafka.send(name, values[150:], 3)
    copied(config)
    assert [*lines_in(tmp_path).values()] == [values[k::3] for k in range(3)]


def columns_of(config: Config) -> Columns:
    """The columns of a new stream of all events."""
    return read(reader_of(config), config)


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
        config = config_of(kafka.address(each), tmp_path / each)
        copied(config)
        found.append(columns_of(config))
    files = config_of("", tmp_path / "files").replaced(stream=True)
    (tmp_path / "files" / "rows.jsonl").write_bytes(b"\n".join(as_json(rows)) + b"\n")
    found.append(columns_of(files))
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
    assert copied(config) == [f"skipped 2 messages without a value of {kafka.address(name)}"]
    with pytest.raises(UserError, match=r"events/partition-00000\S+, line 35: rating is missing\. Fix"):
        columns_of(config)
    columns = columns_of(config.replaced(bad_rows="skip", max_bad_rows=0.1))
    assert columns.num_train == 290
    assert sum("partition-0000" in note and "not a JSON object" in note for note in columns.notes) == 2


def test_a_lost_broker_and_moved_leaders_lose_no_message(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    values = as_json(ratings(3_000))
    kafka.send(name, values[:1_500], 3)
    with contextlib.closing(Topic(config_of(kafka.address(name), tmp_path))) as topic:
        topic.copy(topic.offsets())
        kafka.send(name, values[1_500:], 3)
        offsets = topic.offsets()
        for broker in (1, 2):
            kafka.stop(broker)
        copying = threading.Thread(target=topic.copy, args=(offsets,))
        copying.start()
        time.sleep(1)
        assert copying.is_alive()
        for partition in range(3):
            kafka.move(name, partition, 3)
        copying.join(30)
        assert not copying.is_alive()
        for broker in (1, 2):
            kafka.start(broker)
    assert [*lines_in(tmp_path).values()] == [values[k::3] for k in range(3)]


def test_a_broker_that_stays_away_is_reported_and_ends_a_copy_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(topics, "ASK_SECONDS", 0.3)
    monkeypatch.setattr(topics, "SAID_AFTER", 0.5)
    with contextlib.closing(MockKafka(1)) as kafka:
        kafka.create("away", 1)
        kafka.send("away", as_json(ratings(10)), 1)
        with contextlib.closing(Topic(config_of(kafka.address("away"), tmp_path, timeout=4))) as topic:
            offsets = topic.offsets()
            kafka.stop(1)
            with pytest.raises(
                UserError, match=r"Cannot read kafka://\S+/away: no message has come for 2 s, "
            ):
                topic.copy(offsets)
            with pytest.raises(UserError, match=r"no answer for . s \(.*\)\. Fix: check the address"):
                topic.offsets()
            assert capsys.readouterr().out.count(f"waiting for an answer of {topic.address}: ") == 1
            kafka.start(1)
            topic.copy(topic.offsets())
    assert len(lines_in(tmp_path)[file_of(0, 0)]) == 10


def test_no_broker_and_no_such_topic_are_one_sentence_each(kafka: MockKafka, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"^kafka://\S+/none does not exist: the brokers have no topic none\.$"
    ):
        copied(config_of(kafka.address("none"), tmp_path))
    with pytest.raises(UserError, match=r"^Cannot read kafka://localhost:1/x: no answer for . s"):
        copied(config_of("kafka://localhost:1/x", tmp_path, timeout=2))


def test_a_topic_without_messages_is_refused(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no message with a value"):
        copied(config_of(kafka.address(name), tmp_path))


def test_removed_messages_are_counted_or_refused_if_they_were_learned(
    kafka: MockKafka, name: str, tmp_path: Path
) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    config = config_of(kafka.address(name), tmp_path)
    with contextlib.closing(Topic(config)) as topic:
        topic.copy(dict.fromkeys(range(3), (0, 10)))
        of_files = sizes(config)
        before = StreamPosition({name: FilePosition(10, of_files[name], "", 10) for name in of_files})
        # As if the topic retained only the messages from these offsets on.
        notes = topic.copy({0: (15, 20), 1: (5, 20), 2: (0, 20)})
        assert notes == [
            f"the offsets 10 to 14 of partition 0 of {topic.address} are skipped, because the topic removed "
            "them before they were copied"
        ]
        assert [len(lines) for lines in lines_in(tmp_path).values()] == [15, 20, 20]
        topic.check_retained(before, sizes(config))
        for path in (tmp_path / COPY).iterdir():
            path.unlink()
        topic.copy({0: (15, 20), 1: (0, 20), 2: (0, 20)})
        with pytest.raises(
            UserError, match=r"partition 0 of \S+ before offset 15, and .* Fix: put the earlier"
        ):
            topic.check_retained(before, sizes(config))


def test_a_copy_of_something_else_is_refused(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    config = config_of(kafka.address(name), tmp_path)
    copied(config)
    record = tmp_path / COPY / RECORD
    good = record.read_text()
    for text, message in (
        (good.replace(name, "other"), "has the messages of the topic other; give another --data_path"),
        (good[:-5], "is damaged: .* Fix: remove"),
        (good.replace('"0": 20', '"0": 25'), "Partition 0 of .* ends at offset 20, .* before offset 25"),
        (good.replace(".jsonl", ".jsonl0", 1), "is not as it was written. Fix: put it back"),
    ):
        record.write_text(text)
        with pytest.raises(UserError, match=message):
            copied(config)
    record.unlink()
    with pytest.raises(UserError, match=r"is not of a copy of .*, which needs this folder for itself"):
        copied(config)


def test_events_beside_the_copy_are_refused_or_not_read(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    config = config_of(kafka.address(name), tmp_path)
    copied(config)
    (tmp_path / "sample.jsonl").write_bytes(b"\n".join(as_json(ratings(9))) + b"\n")
    assert columns_of(config).num_train == 60
    with (tmp_path / "schema.toml").open("a") as file:
        file.write('[files]\nevents = "sample.jsonl"\n')
    with pytest.raises(
        UserError, match=r"sample.jsonl would be read as events too. Fix: write events = \"events\""
    ):
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
        (
            "security.protocol=sasl_plaintext\nsasl.mechanism=PLAIN\nsasl.username=u\nsasl.password=secret",
            "the brokers refuse this client .* the login in the file that KAFKA_CONFIG",
        ),
    ):
        path.write_text(text)
        with pytest.raises(UserError, match=message) as refused:
            copied(config)
        assert "secret" not in str(refused.value)
    path.write_text("client.id = mine\nsasl.password=secret\n")
    assert copied(config) == []
    assert "secret" not in json.dumps(config.flags) + (tmp_path / "data" / COPY / RECORD).read_text()


def test_the_doctor_counts_the_messages_of_a_topic(kafka: MockKafka, name: str, tmp_path: Path) -> None:
    kafka.send(name, as_json(ratings(60)), 3)
    address = kafka.address(name)
    assert check_data(config_of(address, tmp_path)) == f"{address}: 60 messages in 3 partitions"


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "confluent_kafka", None)
    with pytest.raises(UserError, match=r"requires confluent-kafka, .* pip install confluent-kafka"):
        Topic(config_of("kafka://localhost:1/x", tmp_path)).offsets()


class Compacted:
    """A client of one partition of which a topic has removed messages."""

    def __init__(self, offsets: list[int], end: int) -> None:
        self.offsets, self.end, self.assigned = offsets, end, list[int]()

    def assign(self, partitions: list[Any]) -> None:
        self.assigned = [partition.offset for partition in partitions]

    def consume(self, number: int, seconds: float) -> list[Any]:
        found = [(offset, None) for offset in self.offsets if offset >= self.assigned[-1]]
        return [message(*each) for each in (*found, (self.end, KafkaError._PARTITION_EOF))]

    def incremental_unassign(self, partitions: list[Any]) -> None:
        pass

    def unassign(self) -> None:
        pass


def message(offset: int, error: int | None) -> Any:
    found = None if error is None else SimpleNamespace(code=lambda: error)
    value = None if error else as_json(ratings(1, first=offset))[0]
    return SimpleNamespace(
        error=lambda: found, partition=lambda: 0, offset=lambda: offset, value=lambda: value
    )


def test_offsets_without_a_message_are_passed_over_and_the_end_is_kept(tmp_path: Path) -> None:
    topic = Topic(config_of("kafka://localhost:1/x", tmp_path))
    # Of the last offsets no message is left.
    topic._consumer = Compacted([0, 3, 7], end=9)
    for end, left, begin in ((5, [0, 3], 0), (9, [0, 3, 7], 5)):
        topic.copy({0: (0, end)})
        assert topic._consumer.assigned == [begin]
        assert lines_in(tmp_path) == {file_of(0, 0): [as_json(ratings(1, first=each))[0] for each in left]}
        assert json.loads((tmp_path / COPY / RECORD).read_text())["next"] == {"0": end}
