"""A transformer over packed histories sees, list by list, what is before and nothing else; and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torchrec.sparse.jagged_tensor import JaggedTensor

from recsuite.config.sections import BLOCKS, ModelConfig
from recsuite.datasets.batching import OLDEST, time_buckets_of
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.datasets.schema import HISTORY, ITEM, USER, Feature
from recsuite.models import losses as loss_module
from recsuite.models import sequences as sequence_head
from recsuite.models.inputs import Inputs, Members
from recsuite.models.losses import drawn_softmax, sampled_softmax
from recsuite.models.rows import FeatureRows
from recsuite.models.sequences import (
    Attention,
    AttentionWindow,
    Dropout,
    PointwiseAttention,
    SequenceHead,
    dropout_mask,
    separate_histories,
)
from recsuite.models.tasks import ModelData
from recsuite.training.steps import with_histories
from sequential import make_model
from tests.support.feature_rows import feature_rows

DIM, WIDTH, HEADS = 8, 5, 2
# Some are longer than what an item looks back, and blocks end within lists.
LENGTHS = [4, 0, 1, 13, 5, 0, 3, 6]
NUMBER = sum(LENGTHS)
FEATURES = [
    Feature("user", USER, "user"),
    Feature("movie", ITEM, "movie"),
    Feature(HISTORY, HISTORY, "movie", multi=True),
]


def random_ages(lengths: Sequence[int], seed: int = 0) -> torch.Tensor:
    """Of each list from old to new, int32."""
    rng = np.random.default_rng(seed)
    lists = [np.sort((2 ** (31 * rng.random(length))).astype(np.int64) - 1)[::-1] for length in lengths]
    return torch.tensor(np.concatenate(lists).clip(0, OLDEST).astype(np.int32))


def window_of(lengths: Sequence[int], ages: torch.Tensor) -> AttentionWindow:
    return AttentionWindow(torch.tensor(lengths, dtype=torch.int64), ages, WIDTH)


def randomized(module: torch.nn.Module, seed: int = 0) -> Any:
    """With parameters none of which is zero by chance."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return module


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_head(block: str, dropout: float = 0.0) -> SequenceHead:
    args = ModelConfig("sequence", DIM, (16,), block=block, num_heads=HEADS, dropout=dropout)
    return randomized(make_model(ModelData(SCHEMA, FEATURES, history=WIDTH), args))


def pairs() -> list[tuple[int, int]]:
    """Return (query, key) of concatenated lists: an item attends to those before it, and to itself."""
    firsts = np.cumsum([0, *LENGTHS])
    return [
        (first + query, first + key)
        for first, length in zip(firsts, LENGTHS, strict=False)
        for query in range(length)
        for key in range(max(0, query - WIDTH + 1), query + 1)
    ]


def place_in_window(query: int, key: int) -> tuple[int, int, int]:
    block = query // WIDTH
    return block, query % WIDTH, key - (block - 1) * WIDTH


# --- the window ---


def test_an_item_sees_the_items_before_it_of_its_own_list_and_itself() -> None:
    window = window_of(LENGTHS, random_ages(LENGTHS))
    found = {tuple(each) for each in window.is_seen.nonzero().tolist()}
    assert found == {place_in_window(*pair) for pair in pairs()}
    for query, key in pairs():
        _, row, column = place_in_window(query, key)
        assert int(window.distances[row, column]) == query - key


def test_the_bucket_of_each_pair_is_that_of_the_seconds_to_the_event_that_follows() -> None:
    for seed in range(30):
        ages = random_ages(LENGTHS, seed)
        window, ends = window_of(LENGTHS, ages), set(np.cumsum(LENGTHS).tolist())
        seconds = [
            int(ages[key]) - (0 if query + 1 in ends else int(ages[query + 1])) for query, key in pairs()
        ]
        found = [int(window.gaps[place_in_window(*pair)]) for pair in pairs()]
        assert found == time_buckets_of(np.array(seconds)).tolist()


def test_the_bucket_changes_at_the_very_second_however_long_ago() -> None:
    edges = sorted({max(0, 2**power - 1 + by) for power in range(31) for by in (-1, 0, 1)} | {OLDEST})
    window = window_of([1] * len(edges), torch.tensor(edges, dtype=torch.int32))
    found = [int(window.gaps[place_in_window(place, place)]) for place in range(len(edges))]
    assert found == time_buckets_of(np.array(edges)).tolist()


# --- attention and blocks ---


@pytest.mark.parametrize("kind", [Attention, PointwiseAttention])
def test_attention_over_packed_lists_is_that_of_each_list_by_itself(kind: type[Attention]) -> None:
    attention = randomized(kind(DIM, HEADS, WIDTH))
    window = window_of(LENGTHS, random_ages(LENGTHS))
    query, key, value = (normal(NUMBER, DIM, seed=seed) for seed in range(3))
    bias, seen = attention.bias(window), pairs()
    expected, size = torch.zeros(NUMBER, DIM), DIM // HEADS
    for item in range(NUMBER):
        others = [other for one, other in seen if one == item]
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            scores = []
            for other in others:
                block, row, column = place_in_window(item, other)
                product = query[item, part] @ key[other, part]
                scores.append(product / size**0.5 + bias[block, head, row, column])
            if kind is PointwiseAttention:
                weights = torch.nn.functional.silu(torch.stack(scores)) / len(others) ** 0.5
            else:
                weights = torch.stack(scores).softmax(0)
            expected[item, part] = weights @ value[others, part]
    torch.testing.assert_close(attention(query, key, value, window), expected)


def states(head: SequenceHead, rows: torch.Tensor, lengths: Sequence[int], ages: torch.Tensor) -> Any:
    return head._states(rows, torch.tensor(lengths), ages, draws=ages)


@pytest.mark.parametrize("block", BLOCKS)
def test_states_over_packed_lists_are_those_of_each_list_by_itself(block: str) -> None:
    # As lists of a batch are: no longer than what is read.
    lengths = [min(length, WIDTH) for length in LENGTHS]
    head, ages, rows = make_head(block), random_ages(lengths), normal(sum(lengths), DIM)
    cut = zip(rows.split(lengths), lengths, ages.split(lengths), strict=True)
    alone = [states(head, mine, [length], age) for mine, length, age in cut if length]
    torch.testing.assert_close(states(head, rows, lengths, ages), torch.cat(alone))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_later_item_and_one_of_another_list_change_nothing(block: str) -> None:
    head, ages, rows = make_head(block), random_ages(LENGTHS), normal(NUMBER, DIM)
    before = states(head, rows, LENGTHS, ages)
    firsts = np.cumsum([0, *LENGTHS])
    for item in range(NUMBER):
        changed = rows.clone()
        changed[item] += 1
        differs = (states(head, changed, LENGTHS, ages) != before).any(dim=1)
        end = int(firsts[np.searchsorted(firsts, item, side="right")])
        assert bool(differs[item])
        assert not differs[:item].any()
        assert not differs[end:].any()


# --- dropout ---


def test_dropout_depends_on_the_draw_and_the_layer_alone() -> None:
    draws = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 20_000).astype(np.int32))
    for share in (0.1, 0.2, 0.5):
        found = dropout_mask(draws, 64, 3, share)
        assert torch.equal(found[100:200], dropout_mask(draws[100:200], 64, 3, share))
        assert abs(float((~found).float().mean()) - share) < 0.01 * share
        # By columns and rows too: no number is dropped more often than another.
        assert float(((~found).float().mean(0) - share).abs().max()) < 0.02
        assert (
            abs(
                float((found == dropout_mask(draws, 64, 4, share)).float().mean())
                - 1
                + 2 * share * (1 - share)
            )
            < 0.01
        )
    layer, items = Dropout(0.5, 0), normal(200, 8)
    dropped = layer(items, draws[:200])
    assert torch.equal(dropped, torch.where(dropout_mask(draws[:200], 8, 0, 0.5), 2 * items, 0.0))
    assert torch.equal(layer.eval()(items, draws[:200]), items)


# --- the head ---


def members_of(ages: torch.Tensor, sources: Sequence[int] = (), reads: Sequence[int] = ()) -> Members:
    nothing = torch.zeros(0, dtype=torch.int32)
    read = torch.tensor(sources, dtype=torch.int64), torch.tensor(reads, dtype=torch.int32)
    return Members(torch.ones(len(ages)), nothing, nothing, ages, ages, *read)


def looked_up(lengths: Sequence[int], rows: torch.Tensor, seed: int = 5) -> dict[str, JaggedTensor]:
    ones = torch.ones(len(lengths), dtype=torch.int32)
    found = {
        name: JaggedTensor(normal(len(lengths), DIM, seed=seed + place), lengths=ones)
        for place, name in enumerate(("user", "movie"))
    }
    return {**found, HISTORY: JaggedTensor(rows, lengths=torch.tensor(lengths, dtype=torch.int32))}


@pytest.mark.parametrize("block", BLOCKS)
def test_events_of_a_run_have_the_vectors_that_each_would_have_alone(block: str) -> None:
    head = make_head(block)
    # A run of three events, the first of which reads nothing; one event that reads a list, and a new user.
    ages, rows = random_ages([2, 4]), normal(6, DIM)
    packed = looked_up([2, 0, 0, 4, 0], rows)
    members, numbers = members_of(ages, [0, 0, 0, 3, 4], [0, 1, 2, 4, 0]), torch.zeros(5, 0)
    found = head.user_vectors(feature_rows(packed), Inputs(members, numbers))
    # The event that reads one item came when the second one did.
    own_ages = torch.cat([ages[:1] - ages[1:2], ages])
    own = looked_up([0, 1, 2, 4, 0], torch.cat([rows[:1], rows]))
    alone = head.user_vectors(feature_rows(own), Inputs(members_of(own_ages), numbers))
    torch.testing.assert_close(found, alone)
    assert len({*map(tuple, found.tolist())}) == 5


@pytest.mark.parametrize("block", BLOCKS)
def test_an_evaluation_by_some_histories_at_once_is_that_of_all(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = [min(length, WIDTH) for length in LENGTHS]
    head, ages, rows = make_head(block, 0.5).eval(), random_ages(lengths), normal(sum(lengths), DIM)
    given = feature_rows(looked_up(lengths, rows)), Inputs(members_of(ages), torch.zeros(len(lengths), 0))
    whole = head.user_vectors(*given)
    for at_once in (1, 2 * WIDTH, 3 * WIDTH):
        monkeypatch.setattr(sequence_head, "ITEMS_AT_ONCE", at_once)
        with torch.no_grad():
            torch.testing.assert_close(head.user_vectors(*given), whole.detach())


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("lengths", [[0, 0, 0], [0], [1, 0, 2]])
def test_losses_and_gradients_are_finite_without_histories(block: str, lengths: list[int]) -> None:
    head, ages = make_head(block, 0.2), random_ages(lengths)
    rows = normal(sum(lengths), DIM).requires_grad_()
    inputs = Inputs(members_of(ages), torch.zeros(len(lengths), 0))
    user, item = head(feature_rows(looked_up(lengths, rows)), inputs).unbind(1)
    # All of it pads.
    for weight in (0.0, 1.0):
        loss = (weight * drawn_softmax(user, item, item, torch.eye(len(item)).bool())).mean()
        assert loss.isfinite()
        gradients = torch.autograd.grad(loss, [*head.parameters()], retain_graph=True)
        assert all(gradient.isfinite().all() for gradient in gradients)


class NothingFromEmpty(TorchDispatchMode):
    """Refuses to read from no rows, as a GPU does and "meta" does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.index_select.default:
            assert args[0].size(args[1]) or not len(args[2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_rank_on_a_gpu_may_have_no_history_in_a_batch(block: str) -> None:
    def there(part: Any) -> Any:
        return part.to("meta") if isinstance(part, torch.Tensor) else part

    head, numbers = make_head(block).to("meta"), torch.zeros(3, 0)
    rows = {
        name: JaggedTensor(there(each.values()), lengths=there(each.lengths()))
        for name, each in looked_up([0, 0, 0], normal(0, DIM)).items()
    }
    members = members_of(random_ages([0]), [0, 1, 2], [0, 0, 0])
    with NothingFromEmpty():
        given = FeatureRows(rows, torch.tensor(1.0), [HISTORY])
        found = head(given, Inputs(*tree_map(there, (members, numbers))))
        gradients = torch.autograd.grad(found.sum(), [*head.parameters()], allow_unused=True)
    assert found.shape == (3, 2, DIM)
    assert all(gradient is not None for gradient in gradients)


def test_threads_change_no_bit_of_a_gradient() -> None:
    # Many events read the same states.
    number = 40_000
    head, lengths = make_head("sas"), [200] + [0] * (number - 1)
    ages, rows = random_ages(lengths[:1]), normal(200, DIM).requires_grad_()
    members = members_of(ages, [0] * number, [event % 201 for event in range(number)])
    inputs = Inputs(members, torch.zeros(number, 0))
    weights, found = normal(number, DIM, seed=4), []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(5):
            vectors = head.user_vectors(feature_rows(looked_up(lengths, rows)), inputs)
            found.append(torch.autograd.grad((vectors * weights).sum(), [rows, head.start, head.following]))
    finally:
        torch.set_num_threads(threads)
    for again in found[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found[0], again, strict=True))


def test_appended_histories_are_separated_again() -> None:
    lengths = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
    values = {"user": torch.arange(4), "movie": torch.arange(10, 14), HISTORY: torch.arange(20, 26)}
    ones = torch.ones(4, dtype=torch.int32)
    of_keys = {"user": ones, "movie": ones, HISTORY: lengths}
    keys, joined, counts = with_histories(
        [*values], torch.cat([*values.values()]), torch.cat([*of_keys.values()]), "movie"
    )
    assert keys == ["user", "movie"]
    assert joined.tolist() == [0, 1, 2, 3, 10, 20, 21, 11, 12, 22, 23, 24, 13, 25]
    assert counts.tolist() == [1, 1, 1, 1, 3, 1, 4, 2]
    rows = {"movie": JaggedTensor(joined[4:].unsqueeze(1).float(), lengths=counts[4:])}
    found = separate_histories(rows, "movie")
    assert found["movie"].values().flatten().tolist() == values["movie"].tolist()
    assert found["movie"].lengths().tolist() == [1] * 4
    assert found[HISTORY].values().flatten().tolist() == values[HISTORY].tolist()
    assert found[HISTORY].lengths().tolist() == lengths.tolist()
    # What is apart stays so.
    assert separate_histories(found, "movie") is found


# --- the losses ---


def test_the_gradients_of_a_softmax_over_items_drawn_are_its_derivatives() -> None:
    vectors = [normal(n, DIM, seed=n).double().requires_grad_() for n in (5, 5, 7)]
    is_none = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) < 0.3
    # Of one event nothing that was drawn competes.
    is_none[2] = True
    arguments: Any = (*vectors, is_none, 1.5)
    assert torch.autograd.gradcheck(drawn_softmax, arguments)


def test_a_loss_computed_in_parts_equals_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, weights = normal(6 + 7, 2, DIM).requires_grad_(), torch.tensor([1.0, 2, 1, 0.5, 1, 1, 0])
    items = JaggedTensor(
        torch.tensor([0, 1, 2, 3, 4, 5, 3, 9, 9, 0, 7, 8, 0]), lengths=torch.ones(13, dtype=torch.int32)
    )
    seen_bits = torch.tensor([[1], [0], [63], [5], [2], [0], [0]], dtype=torch.uint8)
    batch: Any = SimpleNamespace(features={"movie": items}, weights=weights, seen_bits=seen_bits)
    losses = []
    for number in (1, 3, 7, 100):
        monkeypatch.setattr(loss_module, "EVENTS_AT_ONCE", number)
        loss = loss_module.SampledSoftmax("movie", torch.ones(10))(vectors, batch)
        losses.append(torch.cat([loss.view(1), *torch.autograd.grad(loss, vectors)[0].flatten(1)]))
    for each in losses[1:]:
        torch.testing.assert_close(each, losses[0])


@pytest.mark.parametrize("group", [0, 1])
def test_what_a_history_adds_counts_like_a_product_with_one_number_for_each_item(group: int) -> None:
    num_drawn, number, num_items = 6, 7, 10
    vectors, own = normal(num_drawn + number, 2, DIM).requires_grad_(), normal(9, seed=5).requires_grad_()
    rows = torch.tensor([0, 1, 2, 3, 4, 5, 3, 9, 9, 0, 7, 8, 0])
    # The fourth event has one item twice, its own one; the drawn items have no history.
    counts = torch.tensor([0] * num_drawn + [2, 0, 1, 3, 0, 2, 1])
    history = torch.tensor([3, 1, 4, 0, 0, 2, 8, 6, 5])
    ones = torch.ones(len(rows), dtype=torch.int32)
    features = {
        "movie": JaggedTensor(rows, lengths=ones),
        HISTORY: JaggedTensor(history, lengths=counts.int()),
    }
    batch: Any = SimpleNamespace(
        features=features,
        weights=torch.tensor([1.0, 2, 1, 0.5, 1, 1, 0]),
        seen_bits=torch.zeros(number, group + 1, dtype=torch.uint8),
        first=0,
        gathered=lambda each: each,
        counts={},
    )
    loss = loss_module.SampledSoftmax("movie", torch.linspace(0.1, 1, num_items))
    events = torch.arange(len(rows)).repeat_interleave(counts)
    added = torch.zeros(len(rows), num_items).index_put((events, history), own, accumulate=True)
    each_item = torch.stack([added, torch.eye(num_items)[rows]], dim=1)
    for_found, for_wanted = (
        (found, *torch.autograd.grad(found, (vectors, own)))
        for found in (
            loss(loss_module.WithOwn(vectors, own), batch),
            loss(torch.cat([vectors, each_item], dim=2), batch),
        )
    )
    for one, other in zip(for_found, for_wanted, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0.01
    # Lists of one length, whose unused slots add nothing.
    slots, used = int(counts.max()), torch.arange(3) < counts[num_drawn:].unsqueeze(1)
    place = used.view(-1).cumsum(0) - 1
    features[HISTORY] = JaggedTensor(
        history[place.clamp(min=0)], lengths=torch.tensor([0] * num_drawn + [slots] * number)
    )
    batch.counts = {HISTORY: counts[num_drawn:]}
    added_there = torch.where(used.view(-1), own[place.clamp(min=0)], 0.0)
    again = loss(loss_module.WithOwn(vectors, added_there), batch)
    for one, other in zip((again, *torch.autograd.grad(again, (vectors, own))), for_found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(("num_drawn", "has_own"), [(0, False), (6, False), (6, True)])
def test_groups_that_are_computed_at_once_have_the_same_loss(
    monkeypatch: pytest.MonkeyPatch, num_drawn: int, has_own: bool
) -> None:
    # Two whole groups of 8 events, and one of 4; histories of two items.
    number, draw = 20, torch.Generator().manual_seed(3)
    vectors, own = normal(num_drawn + number, 2, DIM).requires_grad_(), normal(2 * number).requires_grad_()
    rows = torch.randint(0, 10, (num_drawn + number,), generator=draw)
    lengths = torch.tensor([0] * num_drawn + [2] * number, dtype=torch.int32)
    features = {
        "movie": JaggedTensor(rows, lengths=torch.ones_like(lengths)),
        HISTORY: JaggedTensor(torch.randint(0, 10, (2 * number,), generator=draw), lengths=lengths),
    }
    batch: Any = SimpleNamespace(
        features=features,
        weights=torch.rand(number, generator=draw).index_fill(0, torch.tensor([19]), 0),
        seen_bits=torch.randint(0, 255, (number, 1 + (num_drawn > 0)), generator=draw, dtype=torch.uint8),
        first=0,
        gathered=lambda each: each,
        counts={HISTORY: lengths[num_drawn:]},
    )
    loss, found = loss_module.SampledSoftmax("movie", torch.linspace(0.1, 1, 10)), []
    wanted = (vectors, own) if has_own else (vectors,)
    for devices in (("cpu",), ()):
        monkeypatch.setattr(loss_module, "GROUP_AFTER_GROUP", devices)
        total = loss(loss_module.WithOwn(vectors, own) if has_own else vectors, batch)
        found.append([total, *torch.autograd.grad(total, wanted)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
        assert one.abs().max() > 0.01


def test_a_rank_beyond_the_global_batch_has_gradients_of_all_parts() -> None:
    vectors, own = normal(2, 2, DIM).requires_grad_(), normal(3, seed=5).requires_grad_()
    rows, ones = torch.tensor([1, 2]), torch.ones(2, dtype=torch.int32)
    features = {
        "movie": JaggedTensor(rows, lengths=ones),
        HISTORY: JaggedTensor(torch.tensor([3, 1, 4]), lengths=torch.tensor([2, 1], dtype=torch.int32)),
    }
    batch: Any = SimpleNamespace(
        features=features,
        weights=torch.zeros(2),
        seen_bits=torch.zeros(2, 1, dtype=torch.uint8),
        # The batch of all ranks has two events, which are of another one.
        first=2,
        gathered=lambda each: each,
        counts={},
    )
    loss = loss_module.SampledSoftmax("movie", torch.linspace(0.1, 1, 10))
    loss(loss_module.WithOwn(vectors, own), batch).backward()
    assert vectors.grad is not None
    assert own.grad is not None
    assert own.grad.abs().max() == 0


def test_masked_items_are_no_negatives() -> None:
    users, items, drawn = normal(2, DIM, seed=2), normal(2, DIM, seed=3), normal(4, DIM, seed=4)
    is_none = torch.tensor([[True, False, False, True], [False] * 4])
    found = drawn_softmax(users, items, drawn, is_none)
    for row, others in ((0, [1, 2]), (1, [0, 1, 2, 3])):
        own = users[row] @ items[row]
        scores = torch.cat([own.view(1), drawn[others] @ users[row]])
        torch.testing.assert_close(found[row], -scores.log_softmax(0)[0])


def test_drawn_negatives_extend_in_batch_negatives() -> None:
    users, items, log_expected = normal(2, DIM, seed=2), normal(5, DIM, seed=3), normal(5, seed=4)
    # The own item stays, whatever is marked.
    is_real = torch.ones(5, dtype=torch.bool)
    marked = torch.ones(2, 5, dtype=torch.bool)
    assert sampled_softmax(users, items, torch.arange(5), log_expected, is_real, marked).isfinite().all()
    # The first item that is drawn is the second event's own, and the last one the first user had.
    rows, seen_bits = torch.tensor([4, 6, 6, 8, 9]), torch.zeros(2, 5, dtype=torch.bool)
    seen_bits[0, 4] = True
    found = sampled_softmax(users, items, rows, log_expected, is_real, seen_bits)
    for row, others in ((0, [0, 1, 2, 3]), (1, [1, 0, 3, 4])):
        scores = (items @ users[row] - log_expected)[others]
        torch.testing.assert_close(found[row], -scores.log_softmax(0)[0])
