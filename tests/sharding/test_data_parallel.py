"""Gradients of the dense part over ranks: the same buckets in every backward.

Three ranks train, and go on from a dump, in test_dumps.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from recsuite.sharding.data_parallel import GradientMean, buckets_of

NUM_RANKS = 3


class SumOfEqualRanks:
    """The sum over ranks that all send the same, and what was sent."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def __call__(self, numbers: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.sent.append(numbers.clone())
        return lambda: NUM_RANKS * numbers


def model_of(*values: list[float]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.tensor(value)) for value in values]


def test_buckets_hold_the_last_parameters_first_and_slightly_exceed_their_size() -> None:
    first, second, third = model_of([1.0] * 3, [2.0] * 5, [3.0])
    found = buckets_of([first, second, third], most_bytes=8)
    assert [[len(parameter) for parameter in bucket] for bucket in found] == [[1, 5], [3]]
    assert buckets_of([], 8) == []


def test_gradients_have_the_same_offsets_for_any_order_of_arrival() -> None:
    first, second = model_of([1.0, 2.0], [3.0])
    add_up = SumOfEqualRanks()
    GradientMean(buckets_of([first, second], 100), NUM_RANKS, add_up).attach()
    for early, late in ((first, second), (second, first)):
        first.grad = second.grad = None
        # What is used last in the forward gets its gradient first.
        (torch.cat([late * 6, early * 6]).sum() + (early * early).sum()).backward()
        assert first.grad is not None
        assert second.grad is not None
        own = 6 * torch.ones(2) + (2 * first.detach() if early is first else 0)
        torch.testing.assert_close(first.grad, own)
    assert [len(flat) for flat in add_up.sent] == [3, 3]
    torch.testing.assert_close(add_up.sent[0], torch.tensor([6, 8, 10]) / 3)
    torch.testing.assert_close(add_up.sent[1], torch.tensor([12, 6, 6]) / 3)


def test_a_parameter_without_a_gradient_does_not_block_the_exchange() -> None:
    used, unused, last = model_of([1.0], [2.0], [3.0])
    add_up = SumOfEqualRanks()
    GradientMean(buckets_of([used, unused, last], 1), NUM_RANKS, add_up).attach()
    for _ in range(2):
        used.grad = last.grad = None
        (used * last).sum().backward()
        assert [float(flat) * 3 for flat in add_up.sent[-3:]] == pytest.approx([1, 0, 3])
        assert [parameter.grad for parameter in (used, unused, last)] == [
            torch.tensor([3.0]),
            None,
            torch.tensor([1.0]),
        ]
