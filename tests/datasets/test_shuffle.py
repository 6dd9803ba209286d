"""The order of training: a permutation, any part of which can be had alone, and no trace of the file's."""

from __future__ import annotations

import numpy as np
import pytest

from recsuite.datasets.batching import shuffled

NUMBER = 100_000


@pytest.mark.parametrize("number", [1, 2, 7, 1000, 80_669])
def test_a_shuffle_is_a_permutation_and_differs_by_epoch_and_seed(number: int) -> None:
    everything = np.arange(number)
    orders = [shuffled(everything, number, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (0, 0))]
    for order in orders:
        np.testing.assert_array_equal(np.sort(order), everything)
    np.testing.assert_array_equal(orders[0], orders[3])
    if number >= 10:
        assert (orders[0] != orders[1]).any()
        assert (orders[0] != orders[2]).any()


def test_a_part_of_a_shuffle_needs_no_other_part() -> None:
    whole = shuffled(np.arange(10_000), 10_000, 3, 7)
    np.testing.assert_array_equal(shuffled(np.arange(5000, 5100), 10_000, 3, 7), whole[5000:5100])


def test_the_largest_number_stays_in_range_and_repeats_nothing() -> None:
    number = 2**31 - 1
    places = shuffled(np.arange(number - 200_000, number), number, 0, 0)
    assert places.min() >= 0
    assert places.max() < number
    assert len(np.unique(places)) == 200_000


def test_a_shuffle_is_uncorrelated_with_the_order() -> None:
    order = shuffled(np.arange(NUMBER), NUMBER, 0, 0)
    # Each bound is more than four standard deviations of a uniform permutation.
    assert abs(np.corrcoef(np.arange(NUMBER), order)[0, 1]) < 0.013
    rises = np.diff(order) > 0
    assert abs(rises.mean() - 0.5) < 0.005
    # Runs: of three neighbours the middle one is the largest or the smallest in two cases of three.
    assert abs((rises[1:] != rises[:-1]).mean() - 2 / 3) < 0.006


@pytest.mark.parametrize("lag", [1, 2, 3, 316, 317, 1000])
def test_neighbours_do_not_stay_neighbours(lag: int) -> None:
    order = shuffled(np.arange(NUMBER), NUMBER, 0, 0)
    distance = np.abs(order[lag:] - order[:-lag])
    # Two are expected at each distance; the grid has 316 or so rows.
    for near in (1, 2, 316, 317):
        assert (distance == near).sum() < 14


def test_every_batch_is_a_fair_sample_of_the_whole_order() -> None:
    size, bins = 4096, 64
    order = shuffled(np.arange(800_000), 800_000, 1, 0)
    statistics = []
    for first in range(0, len(order) - size, size):
        counts = np.bincount(order[first : first + size] * bins // len(order), minlength=bins)
        statistics.append(((counts - size / bins) ** 2 / (size / bins)).sum())
    # Chi-square with 63 degrees of freedom: mean 63, deviation 11.2; here the mean of 195 of them. With two
    # rounds it is about 300.
    assert abs(np.mean(statistics) - (bins - 1)) < 4
    assert 8 < np.std(statistics) < 15


def test_two_epochs_have_nothing_in_common() -> None:
    first, second = (shuffled(np.arange(NUMBER), NUMBER, 0, epoch) for epoch in (0, 1))
    assert (first == second).sum() < 8
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.013
