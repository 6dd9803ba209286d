"""Flags that a stream cannot use are refused, each with its message."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.config.parser import parse_args
from recsuite.errors import UserError


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--stream --epochs 8", "--epochs cannot be used with --stream: a stream has one pass"),
        ("--stream --patience 2", "--patience cannot be used with --stream"),
        ("--stream --split time", "--split cannot be used with --stream"),
        ("--stream --test_fraction 0.2", "--test_fraction cannot be used with --stream"),
        ("--stream --validation_fraction 0", "--validation_fraction cannot be used with --stream"),
        ("--stream --duplicates last", "--stream requires --duplicates keep, got last"),
        ("--stream --task ranking", "--task ranking cannot be used with --stream"),
        ("--stream --window 0", "--window must be longer than 0, got 0"),
        ("--stream --window fast", "--window must be a time such as 12h or 90d"),
        ("--window 2d", "--window requires --stream"),
        ("--follow_data", "--follow_data requires --stream"),
        ("--stream kafka://a/b", "--stream kafka:// requires --data_path, a folder of this machine"),
        (
            "--stream kafka://a/b --data_path s3://c",
            "--stream kafka:// requires --data_path, a folder of this machine",
        ),
        ("--stream clicks", "--stream must be without a value, or kafka://HOST:PORT/TOPIC"),
        ("--stream kafka://a/..", "--stream must be without a value, or kafka://HOST:PORT/TOPIC"),
        (
            "--stream kafka://me:secret@a/b",
            "--stream must be without a value, or .*; a login belongs in the file",
        ),
        ("--stream --follow_data --load", "--follow_data requires a training; give --train too"),
    ],
)
def test_flags_that_a_stream_cannot_use_are_refused(line: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        parse_args(line.split())


def test_a_stream_has_windows_of_a_day_by_default() -> None:
    config = parse_args(["--stream", "--duplicates", "keep"])
    assert (config.stream.span.amount, config.stream.span.is_time) == (86_400, True)


def test_a_stream_may_have_a_topic(tmp_path: Path) -> None:
    line = ["--data_path", str(tmp_path), "--window", "2d"]
    config = parse_args(["--stream", "kafka://one:9092,two:9092/shop.clicks", *line])
    assert config.stream.topic == "kafka://one:9092,two:9092/shop.clicks"
    assert parse_args(["--stream", *line]).stream.topic == ""
