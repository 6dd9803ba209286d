"""The ranks' rows: through shared memory and through gloo each rank gets the same."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from recsuite.errors import LostPeerError
from recsuite.sharding import exchange
from recsuite.sharding.exchange import (
    HEADER_BYTES,
    Exchange,
    SharedExchange,
    data_of,
    header_of,
    map_file,
    slot_number,
    sum_in_order,
)
from tests.support.exchange_ranks import NUM_RANKS, STEPS, numbers_of
from tests.support.launch import SUPPORT, succeeded, torchrun


def test_each_way_gives_the_rows_and_keys_that_gloo_gives(tmp_path: Path) -> None:
    succeeded(torchrun(NUM_RANKS, SUPPORT / "exchange_ranks.py", tmp_path))
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        kinds = [found[f"{name} kind"] for name in ("gloo", "shared", "mixed", "narrow")]
        # Through gloo if one rank cannot map its own buffer.
        assert kinds == ["Exchange", "SharedExchange", "MixedExchange", "Exchange"]
        for by_gloo, shared, mixed in zip(found["gloo"], found["shared"], found["mixed"], strict=True):
            assert torch.equal(by_gloo, shared)
            assert torch.equal(by_gloo, mixed)
            assert {int(row) // 1000 % 100 for row in shared[:, 0]} == {0, 1, 2} - {rank}
        # To the last bit: the order is that of the ranks.
        of_steps = [[numbers_of(other, step) for other in range(NUM_RANKS)] for step in range(STEPS)]
        expected = [first + second + third for first, second, third in of_steps]
        assert not all(
            torch.equal(total, third + second + first)
            for total, (first, second, third) in zip(expected, of_steps, strict=True)
        )
        for name in ("gloo", "shared", "mixed"):
            assert all(map(torch.equal, found[f"{name} sums"], expected))
            # Fewer numbers than ranks.
            assert found[f"{name} few"].tolist() == [0.5 + 1.5 + 2.5]
        headers_and_keys = (found[f"{name} keys"] for name in ("gloo", "shared", "mixed"))
        for by_gloo, shared, mixed in zip(*headers_and_keys, strict=True):
            for other in (shared, mixed):
                assert [*map(torch.equal, by_gloo, other)] == [True, True]
            header, keys = shared
            assert len(keys) == header[:, 1:].sum()
            # Each header says where in its rank's keys those begin that come from there, one after the other.
            parts = zip(header[:, 0].tolist(), keys.split(header[:, 1:].sum(1).tolist()), strict=True)
            assert all(torch.equal(part % 10_000, start + torch.arange(len(part))) for start, part in parts)


@pytest.mark.parametrize("num_ranks", [3, 5, 8, 20])
def test_the_rounding_of_an_ordered_sum_does_not_depend_on_the_position(num_ranks: int) -> None:
    numbers = torch.randn(num_ranks, 1_003, generator=torch.Generator().manual_seed(0))
    expected = [sum_in_order(numbers[:, [place]].unbind()) for place in range(1_003)]
    assert torch.equal(sum_in_order(numbers.unbind()), torch.cat(expected))
    # The sum of torch is another one from five ranks on, and the reason why this function exists.
    assert torch.equal(numbers.sum(0), torch.cat(expected)) == (num_ranks < 5)


def test_a_rank_does_not_map_a_foreign_file(tmp_path: Path) -> None:
    path = tmp_path / "buffer"
    path.write_bytes(b"mine")
    (tmp_path / "link").symlink_to(path)
    for other in (path, tmp_path / "link", tmp_path / "nothing"):
        assert map_file(str(other), "exchange-1") is None
    assert path.read_bytes() == b"mine"


def alone_with(
    buffers: list[torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    timeout: float = 60,
    pids: Sequence[int] = (),
) -> Exchange:
    """The first of some ranks, whose buffers are these, without a group."""
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(buffers))
    return SharedExchange(None, buffers, timeout, pids)


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The buffers of two ranks, with small slots."""
    monkeypatch.setattr(exchange, "SLOT_BYTES", 64 + HEADER_BYTES)
    return [torch.zeros(15 * (64 + HEADER_BYTES), dtype=torch.uint8) for _ in range(2)]


def test_a_silent_rank_is_waited_for_until_the_timeout(
    buffers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = alone_with(buffers, monkeypatch, timeout=0.05)
    wait = chosen.exchange_rows(chosen.outgoing("rows", (2, 4)), [1, 1], [1, 1])
    with pytest.raises(RuntimeError, match="rank 1 has sent no rows for 0 s"):
        wait()


def test_a_rank_that_has_ended_is_not_waited_for(
    buffers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen(["sleep", "60"])
    chosen = alone_with(buffers, monkeypatch, pids=[os.getpid(), child.pid])
    wait = chosen.exchange_rows(chosen.outgoing("rows", (2, 4)), [1, 1], [1, 1])
    # Killed while it is waited for; nobody asks the system how it ended.
    threading.Timer(0.2, child.kill).start()
    start = time.monotonic()
    with pytest.raises(LostPeerError, match="rank 1 has ended"):
        wait()
    # Of the 60 s that it would be waited for if it lived.
    assert time.monotonic() - start < 30
    child.wait()


def test_a_sum_reads_the_numbers_of_all_ranks_where_they_are(
    buffers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A copy of the numbers of all ranks would take the memory of the dense part as often as there are ranks.
    chosen = alone_with(buffers, monkeypatch)
    taken: list[torch.Tensor] = []
    wait = chosen.add_up(torch.ones(4))
    slot = slot_number("dense", 1)
    data_of(buffers[1], slot, torch.Size([4]), torch.float32).fill_(2)
    header_of(buffers[1], slot)[0] = 1

    def sum_of_taken(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        taken.extend(parts)
        return sum_in_order(parts)

    monkeypatch.setattr(exchange, "sum_in_order", sum_of_taken)
    assert wait().tolist() == [3.0] * 4
    places = [[each.untyped_storage().data_ptr() for each in some] for some in (taken, buffers)]
    assert places[0] == places[1]


def test_more_than_a_slot_takes_is_refused(
    buffers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = alone_with(buffers[:1], monkeypatch)
    assert chosen.outgoing("rows", (4, 4)).rows.shape == (4, 4)
    with pytest.raises(ValueError, match="80 bytes exceeds the 64 of a slot"):
        chosen.outgoing("rows", (5, 4))
