"""Measure a stream of a Kafka topic beside one of files: events a second, and the delay to a served model.

    python benchmarks/kafka.py --write                              docs/kafka.json and a page: minutes
    python benchmarks/kafka.py --events 20000 --chunks 2

The brokers are librdkafka's mock cluster in this process, on the same cores. Events go to the topic in rounds
of a million, because a mock broker retains 5 MiB of a partition, and after each round the time is measured
until they are in columns; then they count as learned. For the delay, a training follows the topic, and a
server the training. A chunk is sent, and the time is measured until the served model has learned it; then the
same with a file of the same events.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow
from common import DOCS, EXAMPLE, describe, finish, make_parser, origin, table
from online_serving import wait_until

from example import make_model
from recsuite.config.config import Config
from recsuite.datasets.preparation.recent import RecentEvents
from recsuite.datasets.preparation.stream_reader import StreamReader
from recsuite.datasets.streams import EMPTY_STREAM_STATE
from recsuite.extras.kafka import Topic
from recsuite.serving.followers import wait_for_first
from recsuite.serving.served import Follower

PAGE = DOCS / "extras" / "kafka.md"
SCHEMA = (
    '[user]\ncolumn = "user"\n[item]\ncolumn = "item"\n'
    '[timestamp]\ncolumn = "timestamp"\nformat = "unix"\n'
    '[label]\nkind = "rating"\ncolumn = "rating"\nlowest = 1\nhighest = 5\n'
)
# Partitions that a mock broker gives to a new topic; messages of a round, and rows of an Arrow message.
PARTITIONS, ROUND, ROWS = 4, 1_000_000, 100
NUM_USERS, NUM_ITEMS, FIRST_TIME = 100_000, 20_000, 1_700_000_000
NAMES = ("user", "item", "rating", "timestamp")
TOPIC, FILE = "a topic", "a file"


def main() -> None:
    """Measure and show, and write if that is asked for."""
    parser = make_parser(__doc__, "confluent-kafka")
    parser.add_argument("--events", type=int, default=10_000_000, help="of a topic (default: 10,000,000)")
    parser.add_argument("--chunks", type=int, default=30, help="chunks, one after the other (default: 30)")
    parser.add_argument("--chunk", type=int, default=256, help="events of a chunk (default: 256)")
    finish("kafka", parser.parse_args(), measure, None, render, PAGE)


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All results of a run."""
    brokers = Brokers()
    with tempfile.TemporaryDirectory() as folder:
        # What is imported and compiled once is not measured.
        throughput(brokers, next(iter(MESSAGES)), argparse.Namespace(events=2_000), Path(folder, "warm"))
        return {
            **describe(),
            "events": flags.events,
            "chunk": flags.chunk,
            "throughput": {kind: throughput(brokers, kind, flags, Path(folder, kind)) for kind in MESSAGES},
            "delays": {
                TOPIC: delays(brokers, flags, Path(folder, "topic")),
                FILE: delays(None, flags, Path(folder, "file")),
            },
        }


class Brokers:
    """Three mock brokers, and a producer."""

    def __init__(self) -> None:
        settings = {"bootstrap.servers": "mock", "test.mock.num.brokers": 3, "log_level": 0}
        packed = {"compression.type": "zstd", "linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
        import confluent_kafka

        self.producer: Any = confluent_kafka.Producer({**settings, **packed})
        found = self.producer.list_topics(timeout=10).brokers.values()
        self.servers = ",".join(f"{broker.host}:{broker.port}" for broker in found)

    def send(self, topic: str, values: Iterator[bytes]) -> None:
        """Append messages, in turn to each partition."""
        for place, value in enumerate(values):
            while True:
                try:
                    self.producer.produce(topic, value, partition=place % PARTITIONS)
                    break
                except BufferError:
                    self.producer.poll(0.05)
        self.producer.flush()


def rows_of(begin: int, number: int) -> list[tuple[int, ...]]:
    """Events from a position on: user, item, rating and time."""
    generator = np.random.default_rng(begin)
    user, item = generator.integers(NUM_USERS, size=number), generator.integers(NUM_ITEMS, size=number)
    rating = generator.integers(1, 6, size=number)
    times = FIRST_TIME + np.arange(begin, begin + number)
    return list(zip(user.tolist(), item.tolist(), rating.tolist(), times.tolist(), strict=True))


def json_messages(rows: Sequence[tuple[int, ...]]) -> Iterator[bytes]:
    """Yield a message for each row."""
    return (json.dumps(dict(zip(NAMES, row, strict=True))).encode() for row in rows)


def arrow_messages(rows: Sequence[tuple[int, ...]]) -> Iterator[bytes]:
    """Yield a message for ROWS rows."""
    for begin in range(0, len(rows), ROWS):
        columns = [pyarrow.array(column) for column in zip(*rows[begin : begin + ROWS], strict=True)]
        batch, sink = (
            pyarrow.RecordBatch.from_arrays(columns, names=list(NAMES)),
            pyarrow.BufferOutputStream(),
        )
        with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield sink.getvalue().to_pybytes()


MESSAGES: dict[str, Callable[[Sequence[tuple[int, ...]]], Iterator[bytes]]] = {
    "JSON, one event each": json_messages,
    "Arrow, 100 events each": arrow_messages,
}


def config_of(folder: Path, stream: str | bool) -> Config:
    """Flags of a stream; the folder gets a schema."""
    folder.mkdir()
    (folder / "schema.toml").write_text(SCHEMA)
    return Config.of(stream=stream, data_path=str(folder), duplicates="keep")


def throughput(brokers: Brokers, kind: str, flags: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Seconds from the brokers to columns for all events of a topic."""
    name, number = folder.name.partition(",")[0], 0
    config, seconds = config_of(folder, f"kafka://{brokers.servers}/{name}"), 0.0
    brokers.producer.list_topics(name, timeout=10)
    with contextlib.closing(Topic(config)) as topic:
        recent = RecentEvents(config.data.history)
        reader = StreamReader(config, topic, EMPTY_STREAM_STATE, recent, "benchmark")
        for begin in range(0, flags.events, ROUND):
            brokers.send(name, MESSAGES[kind](rows_of(begin, min(ROUND, flags.events - begin))))
            start = time.perf_counter()
            reader.read(topic.ends())
            columns = reader.columns()
            seconds += time.perf_counter() - start
            number += columns.num_train
            reader.advance(number)
    assert number == flags.events
    return {"columns": seconds}


def delays(brokers: Brokers | None, flags: argparse.Namespace, folder: Path) -> list[float]:
    """Seconds from each chunk to a served model that has learned it; without brokers, of a file."""
    folder.mkdir()
    config = config_of(folder / "data", f"kafka://{brokers.servers}/delay" if brokers else True)
    path, begin = folder / "data" / "events.jsonl", 100 * flags.chunk
    if brokers:
        brokers.producer.list_topics("delay", timeout=10)

    def send(rows: Sequence[tuple[int, ...]]) -> None:
        if brokers:
            brokers.send("delay", json_messages(rows))
            return
        with path.open("ab") as file:
            file.write(b"".join(message + b"\n" for message in json_messages(rows)))

    send(rows_of(0, begin))
    stream = ("--stream", config.stream.topic) if brokers else ("--stream",)
    places = ("--data_path", folder / "data", "--save_dir", folder / "dumps")
    tables = ("--vocabulary", "dynamic", "--capacity", 200_000)
    more = ("--follow_data", "--inc_dump", "--window", flags.chunk)
    command = [sys.executable, EXAMPLE, *places, *stream, *more, *tables]
    seconds = []
    with subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for_first(folder / "dumps")
            follower = Follower(folder / "dumps", model=make_model, checkpoint="latest")
            wait_until(follower, begin)
            for _ in range(flags.chunks):
                send(rows_of(begin, flags.chunk))
                begin += flags.chunk
                seconds.append(wait_until(follower, begin))
        finally:
            process.terminate()
    return seconds


def render(result: dict[str, Any]) -> str:
    """Events a second, and the delays."""
    events = result["events"]
    lines = [
        [kind, f"{events / sum(seconds.values()):,.0f}"] for kind, seconds in result["throughput"].items()
    ]
    header = [f"{events:,} events", "events/s, brokers to columns"]
    said = ", ".join(
        f"{median(seconds):.2f} s (median), {max(seconds):.2f} s (longest) from {name}"
        for name, seconds in result["delays"].items()
    )
    number = len(result["delays"][TOPIC])
    return (
        f"{table(header, lines)}\n\nFrom {result['chunk']} events to a served model that has learned from "
        f"them: {said}; {number} chunks. Mock brokers on the same cores. {origin(result)}."
    )


if __name__ == "__main__":
    main()
