"""Processes that wait for orders, so that benchmarks/train.py can measure variants of a training in turns.

An order is a line of JSON on the input of every rank, and each answers with a line. Ranks that have no order
sleep.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

DIM = 64
MLP_DIMS = (64, 32)
MEAN_RATING = 3.0
# Behind the name of an optimizer of plain PyTorch.
COMPILED = ", compiled"


@dataclass(frozen=True)
class Order:
    """Train for some steps: variant: which one, see `Variant`; batch_size: of each rank."""

    variant: str
    batch_size: int
    threads: int
    steps: int


class Trained(Protocol):
    """A variant that has been made."""

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps; the last loss."""

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Median seconds that the parts of a step take; empty where it does not know them."""


class Team:
    """Some ranks of one script, started without torchrun. arguments: of the script; python: what runs it."""

    def __init__(self, script: str, num_ranks: int, *arguments: str, python: str = sys.executable) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.ranks: list[subprocess.Popen[str]] = []
        for rank in range(num_ranks):
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
            env = {name: str(value) for name, value in names.items()}
            env |= {"MASTER_ADDR": "127.0.0.1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
            command = [python, str(Path(__file__).with_name(script)), *arguments]
            # Started here, because each needs an input of its own for orders, which torchrun would not give
            # it.
            self.ranks.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, what: str, order: Order) -> Any:
        """What rank 0 answers when all have done it."""
        line = json.dumps({"what": what, **dataclasses.asdict(order)})
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{line}\n")
            rank.stdin.flush()
        # All of them, so that no rank is still at work when the next team has its turn.
        answers = [self._answer(rank) for rank in self.ranks]
        return answers[0]

    def _answer(self, rank: subprocess.Popen[str]) -> Any:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with status {rank.wait()}")
        return json.loads(line)

    def peak_bytes(self) -> int:
        """The most memory that each rank had so far, but for what files back, added up."""
        shared = [_bytes_of(rank.pid, "RssShmem") for rank in self.ranks]
        alone = [_bytes_of(rank.pid, "VmHWM") - _bytes_of(rank.pid, "RssFile") for rank in self.ranks]
        # Ranks have mapped the same buffers of the exchange, which are there once.
        return sum(alone) - sum(shared) + max(shared)

    def kill(self) -> None:
        """End the ranks."""
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def _bytes_of(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(f"{name}:")))


@contextlib.contextmanager
def teams(started: dict[str, Team]) -> Iterator[dict[str, Team]]:
    """Have none of the teams outlive the measurement."""
    try:
        yield started
    finally:
        for team in started.values():
            team.kill()


def take_answers() -> TextIO:
    """Where answers go; from now on what is printed goes to the errors, so that it looks like none."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: TextIO,
    make: Callable[[str], Trained],
    barrier: Callable[[], Any],
    set_threads: Callable[[int], None],
) -> None:
    """Do what a team's orders say until there are no more. make: the variant of a name."""
    variants: dict[str, Trained] = {}
    for line in sys.stdin:
        fields = json.loads(line)
        what = fields.pop("what")
        order = Order(**fields)
        set_threads(order.threads)
        # Kept, because tables of ten million rows take seconds to make.
        if order.variant not in variants:
            variants[order.variant] = make(order.variant)
        variant = variants[order.variant]
        if what == "parts":
            found: Any = variant.parts(order.steps, order.batch_size)
        else:
            barrier()
            start = time.perf_counter()
            loss = variant.steps(order.steps, order.batch_size)
            barrier()
            found = {"seconds": time.perf_counter() - start, "loss": loss}
        answers.write(f"{json.dumps(found)}\n")
        answers.flush()
