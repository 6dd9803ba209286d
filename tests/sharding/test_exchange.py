"""The ranks' rows: through shared memory and through gloo each rank gets the same."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from recsuite.errors import LostPeerError
from recsuite.sharding import shared_memory
from recsuite.sharding.exchange import Exchange, starts_of
from recsuite.sharding.shared_exchange import SharedExchange, open_exchange
from recsuite.sharding.shared_memory import HEADER_BYTES, SLOTS, map_file

NUM_RANKS = 3
STEPS = 2 * SLOTS


def give_and_take(rank: int, folder: str) -> None:
    """What a rank of the test does: swap rows through all kinds, and store what came."""
    store = dist.FileStore(f"{folder}/store", NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    found: dict[str, Any] = {}
    for name, chosen in (
        ("gloo", Exchange(dist.group.WORLD)),
        ("shared", open_exchange(dist.group.WORLD, 60)),
        ("mixed", with_rank_1_on_another_machine(rank)),
    ):
        found[name] = [swapped(chosen, rank, step) for step in range(STEPS)]
        found[f"{name} keys"] = sent_keys(chosen, rank)
        found[f"{name} kind"] = type(chosen).__name__
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)


def with_rank_1_on_another_machine(rank: int) -> Exchange:
    """The exchange of ranks of which the one in the middle shares no memory with the others."""
    others = iter(range(NUM_RANKS))

    def map_here(path: str, name: str) -> torch.Tensor | None:
        return map_file(path, name) if (next(others) == 1) == (rank == 1) else None

    with mock.patch.object(shared_memory, "map_file", map_here):
        return open_exchange(dist.group.WORLD, 60)


def swapped(chosen: Exchange, rank: int, step: int) -> torch.Tensor:
    """Rank r gives rank s as many rows as r + s + step, or none where r is s; each says from where it is."""
    num_out, num_in = (
        [(rank != other) * (rank + other + step) for other in range(NUM_RANKS)] for _ in range(2)
    )
    # Now this rank is the slow one, now that.
    time.sleep(0.01 * ((rank + step) % NUM_RANKS))
    outgoing = chosen.outgoing("rows", (sum(num_out), 4))
    outgoing.rows.copy_(torch.arange(4 * sum(num_out)).view(-1, 4) + 1000 * rank + 100_000 * step)
    return chosen.swap(outgoing, num_out, num_in)()


def sent_keys(chosen: Exchange, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The headers and keys that a rank gets in steps with none, few, many and fewer keys, two at once."""
    found, on_the_way = [], []
    for step, many in enumerate((0, 3, 1000, 4, 1200, 5)):
        counts = torch.tensor([[(rank != 1) * many + other, other] for other in range(NUM_RANKS)])
        keys = chosen.outgoing("keys", (int(counts.sum()),), torch.int32)
        keys.rows.copy_(torch.arange(len(keys.rows)) + 10_000 * rank + 100_000 * step)
        firsts = torch.tensor(starts_of(counts.sum(1).tolist())).unsqueeze(1)
        time.sleep(0.01 * ((rank + step) % NUM_RANKS))
        on_the_way.append(chosen.send_keys(keys, torch.cat([firsts, counts], dim=1)))
        if step:
            first = on_the_way.pop(0)
            found.append((first.counts().clone(), first.keys().clone()))
    return found


def test_each_way_gives_the_rows_and_keys_that_gloo_gives(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(give_and_take, (str(tmp_path),), nprocs=NUM_RANKS)
    for rank in range(NUM_RANKS):
        found = torch.load(tmp_path / f"{rank}.pt")
        kinds = [found[f"{name} kind"] for name in ("gloo", "shared", "mixed")]
        assert kinds == ["Exchange", "SharedExchange", "MixedExchange"]
        for by_gloo, shared, mixed in zip(found["gloo"], found["shared"], found["mixed"], strict=True):
            assert torch.equal(by_gloo, shared)
            assert torch.equal(by_gloo, mixed)
            assert {int(row) // 1000 % 100 for row in shared[:, 0]} == {0, 1, 2} - {rank}
        headers_and_keys = (found[f"{name} keys"] for name in ("gloo", "shared", "mixed"))
        for by_gloo, shared, mixed in zip(*headers_and_keys, strict=True):
            for other in (shared, mixed):
                assert [*map(torch.equal, by_gloo, other)] == [True, True]
            header, keys = shared
            assert len(keys) == header[:, 1:].sum()
            # Each header says where in its rank's keys those begin that come from there, one after the other.
            parts = zip(header[:, 0].tolist(), keys.split(header[:, 1:].sum(1).tolist()), strict=True)
            assert all(torch.equal(part % 10_000, start + torch.arange(len(part))) for start, part in parts)


def test_a_rank_takes_no_file_for_the_buffer_of_another(tmp_path: Path) -> None:
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


def test_a_rank_that_sends_nothing_is_waited_for_as_long_as_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 64 + HEADER_BYTES)
    buffers = [torch.zeros(12 * (64 + HEADER_BYTES), dtype=torch.uint8) for _ in range(2)]
    chosen = alone_with(buffers, monkeypatch, timeout=0.05)
    wait = chosen.swap(chosen.outgoing("rows", (2, 4)), [1, 1], [1, 1])
    with pytest.raises(RuntimeError, match="rank 1 has sent no rows for 0 s"):
        wait()


def test_a_rank_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 64 + HEADER_BYTES)
    buffers = [torch.zeros(12 * (64 + HEADER_BYTES), dtype=torch.uint8) for _ in range(2)]
    child = subprocess.Popen(["sleep", "60"])
    chosen = alone_with(buffers, monkeypatch, pids=[os.getpid(), child.pid])
    wait = chosen.swap(chosen.outgoing("rows", (2, 4)), [1, 1], [1, 1])
    # Killed while it is waited for; nobody asks the system how it ended.
    threading.Timer(0.2, child.kill).start()
    start = time.monotonic()
    with pytest.raises(LostPeerError, match="rank 1 has ended, and its rows are missing"):
        wait()
    assert time.monotonic() - start < 5
    child.wait()


def test_more_than_a_slot_takes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "SLOT_BYTES", 64 + HEADER_BYTES)
    buffer = torch.zeros(12 * (64 + HEADER_BYTES), dtype=torch.uint8)
    chosen = alone_with([buffer], monkeypatch)
    assert chosen.outgoing("rows", (4, 4)).rows.shape == (4, 4)
    with pytest.raises(ValueError, match="moves 80 bytes at once, and a slot takes 64"):
        chosen.outgoing("rows", (5, 4))
