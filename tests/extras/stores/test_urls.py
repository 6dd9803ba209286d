"""Files behind URLs: read as local ones are, with a deadline, and without a secret in any message."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import RawData
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.sections import ItemColumn, LabelColumn, TableSchema, UserColumn
from recsuite.errors import UserError
from recsuite.extras.stores import urls
from recsuite.places import shown
from tests.support.launch import PATIENCE
from tests.support.object_server import Server, serving
from tests.support.tables import ENDS, write

SCHEMA = TableSchema(UserColumn("user"), ItemColumn("item"), LabelColumn("clicks"))
EVENTS = {"user": ["a", "b", "a"], "item": [3, 1, 1]}
SECRETS = ("hunter2", "AKIASECRET", "topsecret", "tok3n")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with serving(tmp_path / "served") as found:
        yield found


@pytest.fixture
def s3(server: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The same as a server of S3, with keys as the environment has them."""
    # It keeps the address of the server before.
    pytest.importorskip("s3fs").S3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIASECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "topsecret")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server.address}")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return server


def read(url: str, cache: Path) -> RawData:
    return read_tables(find_tables(url), SCHEMA, DataConfig(cache_dir=str(cache)))


@pytest.mark.parametrize("end", ENDS)
def test_a_file_is_read_over_http(server: Server, tmp_path: Path, end: str) -> None:
    write(server.folder / f"a.{end}", EVENTS)
    raw = read(f"http://{server.address}/a.{end}?token=tok3n::and", tmp_path)
    assert raw.users["user"].tolist() == ["a", "b"]
    assert (raw.events.user.tolist(), raw.events.item.tolist()) == ([0, 1, 0], [1, 0, 0])


def test_the_proxy_of_the_environment_is_used(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", f"http://{server.address}")
    write(server.folder / "a.csv", EVENTS)
    assert read("http://tables.invalid/a.csv", tmp_path).events.user.tolist() == [0, 1, 0]


def test_day_partitions_are_read_from_s3(s3: Server, tmp_path: Path) -> None:
    for day in (20, 21):
        write(s3.folder / f"bucket/log/date=2026-11-{day}/a.parquet", EVENTS)
    write(s3.folder / "bucket/log/users.csv", {"user": ["c"]})
    tables = find_tables("s3://bucket/log")
    assert [file.name for file in tables.files] == [
        "s3://bucket/log/date=2026-11-20/a.parquet",
        "s3://bucket/log/date=2026-11-21/a.parquet",
        "s3://bucket/log/users.csv",
    ]
    assert tables.events[0].partitions == (("date", "2026-11-20"),)
    raw = read("s3://bucket/log", tmp_path)
    assert raw.events.user.tolist() == [0, 1, 0] * 2
    assert raw.users["user"].tolist() == ["a", "b", "c"]
    # The login is used, and is not what anybody sees.
    assert any("AKIASECRET" in headers.get("Authorization", "") for _, _, headers in s3.requests)


def test_a_file_that_did_not_change_is_not_read_again(server: Server, tmp_path: Path) -> None:
    path, url = server.folder / "a.csv", f"http://{server.address}/a.csv"
    write(path, EVENTS)
    read(url, tmp_path)
    (part,) = (tmp_path / "parts").rglob("part.json")
    made = part.stat().st_mtime_ns
    read(url, tmp_path)
    assert part.stat().st_mtime_ns == made
    write(path, {"user": ["new"], "item": [1]})
    assert read(url, tmp_path).users["user"].tolist() == ["new"]


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (401, "it asks for a login"),
        (403, "this login is not allowed to do it, or has expired"),
        (404, "it is not there"),
        (418, "the server answers with status 418"),
    ],
)
def test_no_message_or_log_holds_a_secret(
    server: Server, status: int, sentence: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO)
    write(server.folder / "a.csv", EVENTS)
    url = f"http://user:hunter2@{server.address}/a.csv?X-Amz-Signature=tok3n&key=AKIASECRET#topsecret"
    tables = find_tables(url)
    server.status = status
    with pytest.raises(UserError) as raised:
        read_tables(tables, SCHEMA, DataConfig(cache_dir=str(tmp_path)))
    text = str(raised.value)
    assert text == (
        f"Cannot read http://{server.address}/a.csv: {sentence}. Fix: check the address, the login and the "
        "network, or copy the file to this machine."
    )
    assert raised.value.__cause__ is None
    for found in (text, repr(tables), str(tables), caplog.text, *(str(file) for file in tables.files)):
        assert not any(secret in found for secret in (*SECRETS, "secret words"))


@pytest.mark.parametrize(
    ("url", "without"),
    [
        ("https://user:hunter2@host:81/a b.csv?sig=tok3n", "https://host:81/a b.csv"),
        ("s3://AKIASECRET:topsecret@bucket/key", "s3://bucket/key"),
        ("https://user:hunter2@[bad/a.csv", "https://..."),
        ("https://us@er:hunter2@host/a.csv", "https://host/a.csv"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, without: str) -> None:
    assert shown(url) == without


def test_a_silent_server_is_given_up_with_one_message(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urls, "SILENT_SECONDS", 0.5)
    server.silent = True
    start = time.monotonic()
    with pytest.raises(UserError, match=r"Cannot read .*a\.csv: the server was silent for"):
        find_tables(f"http://{server.address}/a.csv")
    assert time.monotonic() - start < 20 * PATIENCE


def test_a_silent_store_is_given_up_with_one_message(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "SILENT_SECONDS", 0.5)
    s3.silent = True
    start = time.monotonic()
    with pytest.raises(UserError, match=r"Cannot read s3://bucket/log: the server was silent for"):
        find_tables("s3://bucket/log")
    assert time.monotonic() - start < 20 * PATIENCE


def test_a_refused_connection_is_reported() -> None:
    with pytest.raises(UserError, match=r"Cannot read http://127\.0\.0\.1:9/a\.csv: the connection failed"):
        find_tables("http://127.0.0.1:9/a.csv")


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    # A file system that was used before is kept there.
    monkeypatch.delitem(sys.modules["fsspec.registry"].__dict__["_registry"], "s3", raising=False)
    with pytest.raises(
        UserError, match=r"s3://bucket/a\.csv requires s3fs, which is not installed\. Fix: pip install s3fs"
    ):
        find_tables("s3://bucket/a.csv")


def test_an_unknown_kind_of_address_is_refused() -> None:
    with pytest.raises(UserError, match="is of an unknown kind; give a folder, a file, s3:// or https://"):
        find_tables("nonsense://host/a.csv")
