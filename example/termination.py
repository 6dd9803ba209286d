"""SIGTERM to ranks that must end together: whoever was told to end, all learn of it at the same step."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

# The status of a process that a SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM


class Termination:
    """Ranks vote, step by step, on whether any of them was told to end. Collective: every rank.

    deadline: how long a vote may wait for the slowest rank.
    """

    def __init__(self, deadline: timedelta) -> None:
        # On the CPU, whatever the ranks compute on, and beside the collectives of the training.
        self._group = dist.new_group(backend="gloo", timeout=deadline)
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        self.asked = False

    @contextlib.contextmanager
    def obeyed(self) -> Iterator[None]:
        """Have a SIGTERM be noted here instead of ending this process at once. Not collective."""
        before = signal.signal(signal.SIGTERM, self._note)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def agreed(self) -> bool:
        """Whether any rank had been told to end one call ago: nobody waits, for ranks compute meanwhile."""
        found = False
        if self._vote is not None:
            vote, work = self._vote
            work.wait()
            found = bool(vote.item())
        vote = torch.tensor(int(self.asked))
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._vote = (vote, work)
        return found

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
