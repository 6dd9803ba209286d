"""Compiled loops give what PyTorch's functions give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from recsuite.sharding.cpu_tables import distinct
from recsuite.sharding.kernels import clean_pages
from recsuite.sharding.table_rules import RowWiseAdagrad, TableRule

LEAST, MOST = -(2**63), 2**63 - 1
KEYS = {
    "none": [],
    "one": [7],
    "equal ones": [5, 5, 5],
    "signs": [3, -1, 0, -1, 3, -5],
    "the extremes": [MOST, LEAST, 0, -1, LEAST, MOST, 1],
    "equal low bits": [1 << 40, 1 << 41, 0, 1 << 40],
    "many small ones": torch.randint(100, (5000,), generator=torch.Generator().manual_seed(0)).tolist(),
    "many large ones": torch.randint(
        LEAST, MOST, (5000,), generator=torch.Generator().manual_seed(0)
    ).tolist(),
}


@pytest.mark.parametrize("kind", KEYS)
def test_distinct_keys_are_those_of_torch_and_equal_keys_stay_in_their_order(kind: str) -> None:
    keys = torch.tensor(KEYS[kind], dtype=torch.int64)
    found = distinct(keys)
    expected, inverse, counts = torch.unique(keys, return_inverse=True, return_counts=True)
    assert found.keys.tolist() == expected.tolist()
    assert found.inverse.tolist() == inverse.tolist()
    assert found.order.tolist() == keys.argsort(stable=True).tolist()
    assert found.starts.tolist() == (counts.cumsum(0) - counts).tolist()


def test_distinct_keys_of_a_strided_tensor_are_those_of_its_copy() -> None:
    keys = torch.tensor([[4, 1], [2, 1], [4, 1]])[:, 0]
    assert distinct(keys).keys.tolist() == [2, 4]


class Halved(RowWiseAdagrad):
    name = "half of row-wise Adagrad"

    def step(self, gradients: torch.Tensor, state: Any, rate: torch.Tensor, number: int) -> torch.Tensor:
        return super().step(gradients, state, rate, number) / 2


@pytest.mark.parametrize("rule", [RowWiseAdagrad(0.1), Halved(0.1)], ids=["default", "derived"])
def test_a_compiled_update_makes_the_step_of_its_rule(rule: RowWiseAdagrad) -> None:
    draw = torch.Generator().manual_seed(0)
    weights, gradients = (torch.randn(size, 12, generator=draw) for size in (9, 4))
    # A row that never had a gradient, and has none now, stays.
    gradients[1] = 0
    sums, rows = torch.rand(9, generator=draw), torch.tensor([0, 3, 4, 8])
    sums[3] = 0
    expected, expected_sums = weights.clone(), sums.clone()
    arguments = rows, gradients.clone(), torch.tensor(0.1), 1
    TableRule.update(rule, expected, {"momentum1": expected_sums}, *arguments)
    rule.update(weights, {"momentum1": sums}, rows, gradients, torch.tensor(0.1), 1)
    torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(sums, expected_sums)


def test_changed_rows_of_a_page_beyond_the_room_for_them_stay_changed() -> None:
    # Row r is in slot r; pages of four rows; all but row 1 are changed.
    slot_of, dirty = np.arange(8, dtype=np.int32), np.ones(8, bool)
    dirty[1] = False
    others, slots = np.full(4, -1, np.int64), np.full(4, -1, np.int64)
    assert clean_pages(np.array([0, 5]), 4, slot_of, dirty, others, slots) == 4
    assert others.tolist() == slots.tolist() == [0, 2, 3, 4]
    assert dirty.nonzero()[0].tolist() == [5, 6, 7]
    assert clean_pages(np.array([1]), 4, slot_of, dirty, others, slots) == 0
