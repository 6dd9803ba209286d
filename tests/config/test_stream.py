"""What a stream cannot have is refused, each with its sentence."""

from __future__ import annotations

import pytest

from recsuite.config.parser import parse_args
from recsuite.errors import UserError


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--stream --epochs 8", "--epochs and --stream exclude each other, because a stream is learned from"),
        ("--stream --patience 2", "--patience and --stream exclude each other"),
        ("--stream --split time", "--split and --stream exclude each other"),
        ("--stream --test_fraction 0.2", "--test_fraction and --stream exclude each other"),
        ("--stream --validation_fraction 0", "--validation_fraction and --stream exclude each other"),
        ("--stream --duplicates last", "--duplicates last would choose among ratings"),
        ("--stream --task ranking", "--task ranking and --stream exclude each other"),
        ("--stream --window 0", "--window 0 holds nothing; give 1d, say"),
        ("--stream --window fast", "--window fast is neither a time nor a number"),
        ("--window 2d", "--window says how a stream is followed, and none is"),
        ("--follow_data", "--follow_data says how a stream is followed, and none is"),
        ("--stream --follow_data --load", "--follow_data waits for more to train on"),
    ],
)
def test_what_a_stream_cannot_have_is_refused(line: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^{sentence}"):
        parse_args(line.split())


def test_a_stream_has_windows_of_a_day_and_takes_every_rating() -> None:
    config = parse_args(["--stream", "--duplicates", "keep"])
    assert (config.stream.span.amount, config.stream.span.is_time) == (86_400, True)
