"""A size is a number of bytes with a unit; a rate may be in bits."""

from __future__ import annotations

import pytest

from recsuite.config.units import size_of
from recsuite.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [("512MB", 512_000_000), ("1.5 TB", 1_500_000_000_000), ("8GiB", 2**33), ("1kB", 1000), ("7B", 7)],
)
def test_a_size_is_in_decimal_or_binary_units(text: str, size: int) -> None:
    assert size_of(text, "hbm") == size
    assert size_of(text, "disk", is_rate=True) == size


@pytest.mark.parametrize(("text", "rate"), [("2GB/s", 2 * 10**9), ("400Gb", 5 * 10**10), ("8Kib/s", 1024)])
def test_a_rate_may_be_in_bits_and_of_a_second(text: str, rate: int) -> None:
    assert size_of(text, "network", is_rate=True) == rate
    with pytest.raises(UserError, match=f"--hbm must be a size such as 512MB, 8GB or 16GiB, got {text}"):
        size_of(text, "hbm")


@pytest.mark.parametrize("text", ["", "8", "8gb", "-1GB", "0GB", "1e9B", "8iB", "GB", "9" * 16 + "B"])
def test_an_invalid_size_is_refused_with_the_flag(text: str) -> None:
    for is_rate in (False, True):
        with pytest.raises(UserError, match=r"--hbm must be a (size|rate) such as"):
            size_of(text, "hbm", is_rate)
