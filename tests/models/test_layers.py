"""The arithmetic of lists: what a loop over them gives, and the gradient that it has."""

from __future__ import annotations

import torch

from recsuite.models.layers import biased_products, means, scaled


def test_means_of_weighted_lists_are_those_of_a_loop_and_empty_lists_give_zeros() -> None:
    rows, weights = torch.randn(6, 4), torch.randn(6)
    found = means(rows, weights, torch.tensor([2, 0, 3, 1, 0], dtype=torch.int32))
    lists = [range(2), range(0), range(2, 5), range(5, 6), range(0)]
    for mean, places in zip(found, lists, strict=True):
        expected = sum((rows[place] * weights[place] for place in places), torch.zeros(4))
        torch.testing.assert_close(mean, expected / max(1, len(places)))


def test_the_gradient_of_means_is_the_one_of_finite_differences() -> None:
    rows = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights, lengths = torch.randn(6, dtype=torch.float64), torch.tensor([2, 0, 3, 1])
    assert torch.autograd.gradcheck(lambda rows: means(rows, weights, lengths), rows)


def test_scaled_rows_pass_their_gradient_on_unscaled() -> None:
    held = torch.ones(2, 3, requires_grad=True)
    rows = scaled(held, torch.tensor(0.5))
    assert rows.tolist() == [[0.5] * 3] * 2
    rows.sum().backward()
    assert held.grad is not None
    assert (held.grad == 1).all()


def test_a_score_is_both_biases_and_the_product_of_the_factors() -> None:
    users, items = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([[10.0, 5.0, -1.0]])
    for of in (users, users.clone().requires_grad_()):
        score, products, squares = biased_products(of, items)
        assert score.tolist() == [1 + 10 + 2 * 5 - 3 * 1]
        assert products.tolist() == [[10, 10, -3]]
        assert squares.tolist() == [1 + 4 + 9 + 100 + 25 + 1]


def test_the_gradient_of_a_score_is_the_one_of_finite_differences() -> None:
    users, items = (torch.randn(4, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(biased_products, (users, items))


def test_compiled_scores_and_gradients_are_those_of_torch() -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.manual_seed(0)
        users, items = (torch.randn(5, 32).to(dtype).requires_grad_() for _ in range(2))
        given = [torch.randn(size).to(dtype) for size in ((5,), (5, 32), (5,))]
        results = biased_products(users, items)
        torch.autograd.backward(results, given)
        found.append([*results, users.grad, items.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other.float())


def test_vectors_of_one_item_are_multiplied_with_those_of_all_users() -> None:
    for users, items in ((torch.randn(4, 8), torch.randn(1, 8)), (torch.randn(1, 8), torch.randn(4, 8))):
        users.requires_grad_()
        one, other = biased_products(users, items)[0], (users.double() * items)[:, 1:].sum(1)
        torch.testing.assert_close(one, (other + users[:, 0] + items[:, 0]).float())


def test_a_gradient_of_the_gradient_is_that_of_torch() -> None:
    users, items = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    (gradient,) = torch.autograd.grad(biased_products(users, items)[0].sum(), users, create_graph=True)
    gradient.square().sum().backward()
    assert items.grad is not None
    torch.testing.assert_close(items.grad[:, 1:], 2 * items.detach()[:, 1:])
