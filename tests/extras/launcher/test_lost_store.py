"""Ranks get a moment to end by themselves when the launcher with the store has ended before theirs."""

from __future__ import annotations

import time

import pytest
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler

from recsuite.extras.launcher import rendezvous


def test_a_lost_store_is_tolerated_for_some_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[int | None] = [2, 0, None, None]

    def ask(handler: object) -> int:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if answer is None:
            raise RendezvousConnectionError("The connection to the C10d store has failed.")
        return answer

    monkeypatch.setattr(DynamicRendezvousHandler, "num_nodes_waiting", ask)
    monkeypatch.setattr(rendezvous, "SECONDS", 0.2)
    rendezvous.tolerate_lost_store()
    handler = object.__new__(DynamicRendezvousHandler)
    assert [handler.num_nodes_waiting() for _ in range(4)] == [2, 0, 0, 0]
    time.sleep(0.3)
    with pytest.raises(RendezvousConnectionError):
        handler.num_nodes_waiting()
