"""Mock cluster of librdkafka, which lives in this process; other processes connect to its address."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from recsuite.config.config import Config

confluent_kafka = pytest.importorskip(
    "confluent_kafka", reason="needs confluent-kafka, of requirements-dev.txt"
)

KafkaError: Any = confluent_kafka.KafkaError

SCHEMA = (
    '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
    '[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n'
    '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 1\nhighest = 5\n'
)
# Place of the handle of librdkafka in an object of the package, after the head of the object.
HANDLE = 16


class MockKafka:
    """Brokers, numbered from 1, that lose their messages with this object."""

    def __init__(self, num_brokers: int = 3) -> None:
        settings = {"bootstrap.servers": "mock", "test.mock.num.brokers": num_brokers, "log_level": 0}
        self._producer: Any = confluent_kafka.Producer({**settings, "linger.ms": 5})
        folder = Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs"
        self._library = ctypes.CDLL(str(next(folder.glob("librdkafka-*"))))
        handle = ctypes.c_void_p.from_address(id(self._producer) + HANDLE)
        self._library.rd_kafka_handle_mock_cluster.restype = ctypes.c_void_p
        self._cluster = ctypes.c_void_p(self._library.rd_kafka_handle_mock_cluster(handle))
        self._library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        self.servers = self._library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def close(self) -> None:
        """End the brokers."""
        self._producer.flush(10)
        del self._producer

    def address(self, topic: str) -> str:
        """Value of --stream."""
        return f"kafka://{self.servers}/{topic}"

    def create(self, topic: str, partitions: int) -> None:
        """Make a topic."""
        self._call("topic_create", topic.encode(), partitions, 1)

    def send(self, topic: str, values: Sequence[bytes | None], partitions: int) -> None:
        """Append messages, in turn to each partition."""
        for place, value in enumerate(values):
            while True:
                try:
                    self._producer.produce(topic, value, partition=place % partitions)
                    break
                except BufferError:
                    self._producer.poll(0.1)
        assert self._producer.flush(60) == 0

    def move(self, topic: str, partition: int, broker: int) -> None:
        """Make a broker the leader of a partition."""
        self._call("partition_set_leader", topic.encode(), partition, broker)

    def stop(self, broker: int) -> None:
        """Break the connections of a broker, and refuse new ones."""
        self._call("broker_set_down", broker)

    def start(self, broker: int) -> None:
        """Let a broker answer again."""
        self._call("broker_set_up", broker)

    def _call(self, name: str, *arguments: Any) -> None:
        assert getattr(self._library, f"rd_kafka_mock_{name}")(self._cluster, *arguments) == 0


def ratings(number: int, first: int = 0, users: int = 20) -> list[dict[str, Any]]:
    """Ratings in the order of time, one each quarter of an hour."""
    return [
        {
            "user": f"u{place * 7 % users}",
            "item": place * place % 31,
            "rating": 1 + place * 3 % 5,
            "timestamp": 1_700_000_000 + 900 * place,
        }
        for place in range(first, first + number)
    ]


def as_json(rows: Sequence[dict[str, Any]]) -> list[bytes]:
    """One message for each row."""
    return [json.dumps(row).encode() for row in rows]


def as_arrow(rows: Sequence[dict[str, Any]], number: int = 1) -> list[bytes]:
    """One message for so many rows."""
    found = []
    for begin in range(0, len(rows), number):
        table, sink = pyarrow.Table.from_pylist(rows[begin : begin + number]), pyarrow.BufferOutputStream()
        with pyarrow.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        found.append(sink.getvalue().to_pybytes())
    return found


def config_of(address: str, folder: Path, **flags: Any) -> Config:
    """Flags of a stream; the folder gets a schema."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "schema.toml").write_text(SCHEMA)
    return Config.of(
        **{"stream": address, "data_path": str(folder), "duplicates": "keep", "timeout": 60, **flags}
    )
