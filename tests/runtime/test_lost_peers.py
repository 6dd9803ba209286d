"""Ranks answer each other, and who does not is named with its machine."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from recsuite.errors import LostPeerError
from recsuite.runtime import peers
from recsuite.runtime.peers import Peers, RemoteRank

HOST = socket.gethostname()


def meet(world_size: int, came: int, seconds: float = 5) -> list[Peers]:
    """Ranks of one machine, of which only the first ones come."""
    store, deadline = dist.HashStore(), time.monotonic() + seconds
    with ThreadPoolExecutor(came) as pool:
        made = pool.map(
            lambda rank: Peers(store, rank, world_size, "localhost", False, deadline), range(came)
        )
        return list(made)


def test_every_remaining_rank_names_an_ended_rank_and_its_machine() -> None:
    ranks = meet(4, 4)
    assert ranks[0].fault() == "all other ranks answer, and one is late"
    ranks[1].close()
    assert ranks[0].fault() == f"rank 1 on {HOST} has ended; seen by rank 0 on {HOST}"
    ranks[3].close()
    assert ranks[2].fault() == f"ranks 1, 3 on {HOST} have ended; seen by rank 2 on {HOST}"


def test_faults_are_grouped_by_machine_and_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.2)
    (alone,) = meet(1, 1)
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = [server.getsockname()[1] for server in (mute, closed)]
        closed.close()
        # Of a name that no resolver knows, as of a machine that is not there.
        alone.others = [
            RemoteRank(1, HOST, "127.0.0.1", ports[0]),
            RemoteRank(2, HOST, "127.0.0.1", ports[1]),
            RemoteRank(3, f"{HOST}.invalid", "127.0.0.1", ports[0]),
            RemoteRank(4, f"{HOST}.invalid", "127.0.0.1", ports[1]),
        ]
        assert alone.fault() == (
            f"rank 1 on {HOST} does not answer; rank 2 on {HOST} has ended; "
            f"ranks 3, 4 on {HOST}.invalid cannot be reached; seen by rank 0 on {HOST}"
        )


def test_a_silent_rank_is_silent_to_all_of_many_ranks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(Peers, "_answer", lambda self: None)
    monkeypatch.setattr(Peers, "_meet", lambda *arguments: [])
    silent = Peers(dist.HashStore(), 0, 200, "localhost", False, 0)
    with ThreadPoolExecutor(199) as pool:
        faults = pool.map(lambda _: silent.mine.fault(), range(199))
        assert {*faults} == {"does not answer"}
    silent.close()


def test_ranks_that_never_join_are_named() -> None:
    sentence = f"ranks 1, 2 of 3 did not connect: rank 0 on {HOST} waited 1 s"
    with pytest.raises(LostPeerError, match=sentence):
        meet(3, 1, seconds=1)


def test_a_rank_answers_while_its_main_thread_waits_and_ends_its_thread() -> None:
    before = threading.active_count()
    ranks = meet(2, 2)
    release = threading.Event()
    waiting = threading.Thread(target=release.wait)
    waiting.start()
    assert ranks[0].fault() == "all other ranks answer, and one is late"
    release.set()
    waiting.join()
    for rank in ranks:
        rank.close()
    deadline = time.monotonic() + 5
    while threading.active_count() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
