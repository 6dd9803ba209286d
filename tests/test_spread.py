"""The spread of lists over the catalogue."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.metrics import Spread, spread_of


def test_lists_are_described_by_the_share_of_items_the_popular_and_the_surprise() -> None:
    # 200 items, of which 2 are popular; the last one cannot be listed.
    had = np.array([50, 6, *[1] * 197, 90])
    listed = np.zeros(200, np.int64)
    listed[[0, 1, 5]] = 5, 1, 4
    is_ranked = np.arange(200) < 199
    # One of the listed items is new.
    has_row = np.arange(200) != 5
    found = spread_of(listed, had, is_ranked, has_row, lambda place: f"p{place}")
    assert found is not None
    assert found.coverage == 3 / 199
    assert found.popular_share == 6 / 10
    assert found.new_share == 4 / 10
    total = 50 + 6 + 197 + 199
    bits = 5 * np.log2(total / 51) + np.log2(total / 7) + 4 * np.log2(total / 2)
    assert found.novelty == pytest.approx(bits / 10)
    line = found.described("products", "few")
    assert line.startswith(
        "3 of 199 products are in a list (coverage 0.015); 60.0% of the entries are of the 1% most popular, "
        "40.0% of new products; "
    )
    assert line.endswith("most often: p0 (5), p5 (4), p1 (1)")
    assert spread_of(0 * listed, had, is_ranked, has_row, str) is None


@pytest.mark.parametrize(
    ("listed", "ranked", "entries", "is_few"),
    [(42, 7_844, 6_100, True), (306, 7_844, 6_100, False), (4, 100, 10**6, True), (5, 100, 10**6, False)],
)
def test_lists_of_few_of_the_items_that_they_could_hold_come_with_advice(
    listed: int, ranked: int, entries: int, is_few: bool
) -> None:
    line = Spread(listed, ranked, entries, 0.5, 0.0, 5.0, (("p0", 3),)).described("products", "train longer")
    assert line.endswith("p0 (3); train longer" if is_few else "p0 (3)")
