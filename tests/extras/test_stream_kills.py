"""Kills of a training that follows files while these grow: nothing is learned twice or lost."""

from __future__ import annotations

from pathlib import Path

import boto3
import pytest
from typing_extensions import override

from tests.support.kafka import SCHEMA, ratings
from tests.support.store import BUCKET, Store
from tests.support.stream_kills import NUMBER, Events, kill

pytestmark = pytest.mark.soak

HEAD = "user,item,rating,timestamp\n"
LINES = [",".join(map(str, rating.values())) + "\n" for rating in ratings(NUMBER)]
# Files grow, and new ones come.
ROWS_OF_FILE = 600


class Files(Events):
    """Events in files of two folders."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for name in ("whole", "killed"):
            (folder / name).mkdir()
            (folder / name / "schema.toml").write_text(SCHEMA)

    @override
    def add(self, name: str, begin: int, end: int) -> None:
        path = self.folder / name / f"{begin // ROWS_OF_FILE:03}.csv"
        is_new = not path.exists()
        with path.open("a") as file:
            file.write(HEAD * is_new + "".join(LINES[begin:end]))

    @override
    def source(self, name: str) -> tuple[object, ...]:
        return "--data_path", self.folder / name, "--stream"


class Objects(Events):
    """Events in objects below two prefixes of a store, which has the checkpoints too."""

    def __init__(self, folder: Path, store: Store) -> None:
        super().__init__(folder)
        self.client = boto3.client("s3", endpoint_url=store.url)
        (folder / "schema.toml").write_text(SCHEMA)

    @override
    def add(self, name: str, begin: int, end: int) -> None:
        content = (HEAD + "".join(LINES[begin:end])).encode()
        self.client.put_object(Bucket=BUCKET, Key=f"{name}/{begin:05}.csv", Body=content)

    @override
    def source(self, name: str) -> tuple[object, ...]:
        return "--data_path", f"s3://{BUCKET}/{name}", "--stream", "--cache_dir", self.folder / "cache"

    @override
    def dumps(self, name: str) -> str:
        return f"s3://{BUCKET}/{name}-dumps"


def test_a_training_that_follows_files_and_is_killed_equals_the_undisturbed_one(tmp_path: Path) -> None:
    kill(Files(tmp_path))


def test_a_training_that_follows_a_store_and_is_killed_equals_the_undisturbed_one(
    store: Store, tmp_path: Path
) -> None:
    kill(Objects(tmp_path, store))
