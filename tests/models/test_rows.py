"""Users and items summed over the distinct rows of a batch: as if each value had a copy of its row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.errors import UserError
from recsuite.models.inputs import DistinctRows
from recsuite.models.layers import means
from recsuite.models.rows import FeatureRows, JoinedRows, PaddedListError, SharedRows

DIM, NUM_EVENTS = 3, 4
# Of a user, of an item, of a list of the item's and of a list of the user's: rows that events share, rows
# that come twice in one list, and a list that is empty.
PLACES = {
    "user": [0, 1, 0, 2],
    "movie": [3, 4, 4, 4],
    "genres": [5, 6, 5, 5, 6, 5],
    "history": [7, 7, 8, 9, 8],
}
COUNTS = {"user": [1] * 4, "movie": [1] * 4, "genres": [2, 1, 2, 1], "history": [3, 0, 1, 1]}
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0, -1.0], dtype=torch.float64)
SIDES = (["user", "history"], ["movie", "genres"])


def rows() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(10, DIM, generator=generator, dtype=torch.float64).requires_grad_()


def shared(of: torch.Tensor) -> SharedRows:
    """Return the rows of the tables for the four events."""
    found = {
        name: DistinctRows(
            of, torch.tensor(places), torch.tensor(COUNTS[name], dtype=torch.int32), COUNTS[name] == [1] * 4
        )
        for name, places in PLACES.items()
    }
    values = torch.cat([each.places for each in found.values()])
    counts = values.bincount(minlength=len(of))
    order, starts = values.argsort(stable=True).to(torch.int32), (counts.cumsum(0) - counts).to(torch.int32)
    return SharedRows(found, of, lambda: (order, starts))


def sums_of(rows: SharedRows, sides: Sequence[Sequence[str]] = SIDES) -> tuple[torch.Tensor, ...]:
    """The sums of some sides, where the history has weights."""
    found = FeatureRows(rows, torch.ones((), dtype=torch.float64), ("genres", "history"))
    return tuple(found.sum(names, {"history": WEIGHTS}) for names in sides)


def one_by_one(of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with a copy of its row for each value."""
    found = {name: of[torch.tensor(places)] for name, places in PLACES.items()}
    counts = {name: torch.tensor(numbers) for name, numbers in COUNTS.items()}
    ones = torch.ones(len(PLACES["genres"]), dtype=torch.float64)
    return (
        found["user"] + means(found["history"], WEIGHTS, counts["history"]),
        found["movie"] + means(found["genres"], ones, counts["genres"]),
    )


def test_sums_are_those_of_rows_that_are_copied_for_each_value() -> None:
    for sums, wanted in zip(sums_of(shared(rows())), one_by_one(rows()), strict=True):
        torch.testing.assert_close(sums, wanted)


def test_gradients_are_those_of_rows_that_are_copied_for_each_value() -> None:
    generator = torch.Generator().manual_seed(1)
    given = [torch.randn(NUM_EVENTS, DIM, generator=generator, dtype=torch.float64) for _ in SIDES]
    found, wanted = rows(), rows()
    torch.autograd.backward(sums_of(shared(found)), given)
    torch.autograd.backward(one_by_one(wanted), given)
    torch.testing.assert_close(found.grad, wanted.grad)
    assert torch.autograd.gradcheck(lambda of: sums_of(shared(of)), rows())


def test_stacked_rows_and_their_gradients_are_those_of_each_feature() -> None:
    one, other = rows(), rows()
    for names in (["movie", "user"], ["user", "genres", "movie"]):
        found, wanted = (
            FeatureRows(shared(of), torch.tensor(0.5, dtype=torch.float64), ("genres", "history"))
            for of in (one, other)
        )
        stacked, each = found.stack(names), torch.stack([wanted[name] for name in names], dim=1)
        assert stacked.shape == (NUM_EVENTS, len(names), DIM)
        torch.testing.assert_close(stacked, each)
        (stacked**2).sum().backward()
        (each**2).sum().backward()
        torch.testing.assert_close(one.grad, other.grad)


def test_features_of_several_widths_are_summed_and_stacked_by_width() -> None:
    one, other = shared(rows()), shared(torch.ones(10, 8, dtype=torch.float64))
    # As tables of two widths give them.
    parts = [
        SharedRows({name: of[name] for name in side}, of.rows, of.in_order)
        for of, side in zip((one, other), SIDES, strict=True)
    ]
    scale, lists = torch.tensor(0.5, dtype=torch.float64), ("genres", "history")
    joined, alone = (FeatureRows(found, scale, lists) for found in (JoinedRows(parts), one))
    torch.testing.assert_close(joined.sum(SIDES[0]), alone.sum(SIDES[0]))
    torch.testing.assert_close(joined.stack(SIDES[0]), alone.stack(SIDES[0]))
    assert joined["genres"].shape == (NUM_EVENTS, 8)
    for join in (joined.sum, joined.stack):
        with pytest.raises(
            UserError, match=r"must have one width, got user 3, genres 8\. Fix: .* torch\.cat"
        ):
            join(["user", "genres"])


def test_a_feature_that_is_on_no_side_gets_no_gradient() -> None:
    found = rows()
    (of_items,) = sums_of(shared(found), SIDES[1:])
    of_items.sum().backward()
    assert found.grad is not None
    assert not found.grad[[0, 1, 2, 7, 8, 9]].any()
    assert found.grad[3:7].all()


def test_a_feature_of_two_sums_and_its_single_rows_get_all_their_gradients() -> None:
    found, wanted = rows(), rows()
    of = shared(found)
    sums, others = sums_of(of), sums_of(of, (["genres"], ["genres", "movie"]))
    torch.cat([*sums, *others, of["history"].values()]).sum().backward()
    (users, items), genres = one_by_one(wanted), one_by_one(wanted)[1] - wanted[torch.tensor(PLACES["movie"])]
    values = wanted[torch.tensor(PLACES["history"])]
    torch.cat([users, items, genres, one_by_one(wanted)[1], values]).sum().backward()
    torch.testing.assert_close(found.grad, wanted.grad)


def test_nothing_of_a_step_stays_when_it_is_done() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        found = shared(rows())
        sums = sums_of(found)
        gone = weakref.ref(found)
        del found, sums
        # Not found by Python's search for circles, which comes much later, but at once.
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "read",
    [lambda rows: rows["price"], lambda rows: rows.jagged("price"), lambda rows: rows.stack(["price"])],
)
def test_a_dense_feature_without_rows_is_refused_with_the_place_of_its_numbers(
    read: Callable[[FeatureRows], object],
) -> None:
    found = FeatureRows(shared(rows()), torch.ones((), dtype=torch.float64), ("genres", "history"))
    with pytest.raises(
        KeyError, match=r"no feature 'price' .* give one of user, movie, .* of batch\.numbers"
    ):
        read(found)


def test_slots_of_lists_with_one_budget_are_not_those_of_padded_lists() -> None:
    found = {"tags": JaggedTensor(torch.ones(6, 4), lengths=torch.tensor([0, 0, 6]))}
    counts = {"tags": torch.tensor([3, 0, 1], dtype=torch.int32)}
    rows = FeatureRows(found, torch.tensor(1.0), ["tags"], counts, ["tags"])
    for read in (rows.jagged, rows.slots, rows.used):
        with pytest.raises(PaddedListError):
            read("tags")
