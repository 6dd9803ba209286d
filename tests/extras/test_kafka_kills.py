"""Kills of a training that follows a topic while messages arrive: nothing is learned twice or lost."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from typing_extensions import override

from tests.support.kafka import SCHEMA, MockKafka, as_json, ratings
from tests.support.stream_kills import NUMBER, Events, kill

pytestmark = pytest.mark.soak

PARTITIONS = 3


class Messages(Events):
    """Messages of two topics."""

    following = ("--follow_data", "--partition_delay", "2d")

    def __init__(self, folder: Path, kafka: MockKafka) -> None:
        super().__init__(folder)
        self.kafka, self.values = kafka, as_json(ratings(NUMBER))
        for topic in ("whole", "killed"):
            kafka.create(topic, PARTITIONS)
            (folder / topic).mkdir()
            (folder / topic / "schema.toml").write_text(SCHEMA)

    @override
    def add(self, name: str, begin: int, end: int) -> None:
        self.kafka.send(name, self.values[begin:end], PARTITIONS)

    @override
    def source(self, name: str) -> tuple[object, ...]:
        return "--data_path", self.folder / name, "--stream", self.kafka.address(name)


def test_a_training_that_is_killed_fifty_times_equals_the_undisturbed_one(tmp_path: Path) -> None:
    with contextlib.closing(MockKafka()) as kafka:
        kill(Messages(tmp_path, kafka))
