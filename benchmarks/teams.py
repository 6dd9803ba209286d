"""Teams of processes that wait for jobs, so that variants of a training can be measured in turns.

A job is a line of JSON on the standard input of every rank, and each rank answers with a line. A team without
a job sleeps. Imports nothing of the library and no torch: sequences_rectools.py runs in another environment.
"""

from __future__ import annotations

import argparse
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


@dataclass(frozen=True)
class Job:
    """Training steps of a variant; batch_size: of each rank; threads: of each rank."""

    variant: str
    batch_size: int
    threads: int = 1
    steps: int = 0


class Variant(Protocol):
    """Training that makes steps on request.

    One that knows the parts of its steps also has `parts(number, batch_size)`, which returns their seconds.
    """

    def steps(self, number: int, batch_size: int) -> float:
        """Train for some steps and return the last loss."""


class Team:
    """Ranks of a script, started without torchrun.

    Args:
        script: beside this file.
        arguments: of the script.
        python: interpreter that runs it.
    """

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
            # torchrun would not give each rank a standard input of its own.
            self.ranks.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def ask(self, what: str, job: Job) -> Any:
        """Have all ranks do a job and return the answer of rank 0.

        Args:
            what: "steps" for their seconds and the loss, "parts" for the seconds of the parts of a step.

        Raises:
            RuntimeError: when a rank has ended.
        """
        line = json.dumps({"what": what, **dataclasses.asdict(job)})
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
        """Peak memory of each rank so far, without mapped files, added up."""
        shared = [_bytes_of(rank.pid, "RssShmem") for rank in self.ranks]
        alone = [_bytes_of(rank.pid, "VmHWM") - _bytes_of(rank.pid, "RssFile") for rank in self.ranks]
        # Ranks map the same buffers of the exchange, which exist once.
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
    """End all teams when the measurement ends."""
    try:
        yield started
    finally:
        for team in started.values():
            team.kill()


def arguments(doc: str | None, *names: str) -> list[str]:
    """Return the arguments of a script that another one starts; --help shows its docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in names:
        parser.add_argument(name, help="from the benchmark that starts this one")
    return [*vars(parser.parse_args()).values()]


def take_answers() -> TextIO:
    """Stream for answers; all that is printed from now on goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def serve(
    answers: TextIO,
    make: Callable[[str], Variant],
    barrier: Callable[[], Any],
    set_threads: Callable[[int], Any],
) -> None:
    """Do the jobs of a team until its input ends.

    Args:
        answers: of `take_answers`.
        make: returns the variant of a name; called once for each.
    """
    variants: dict[str, Any] = {}
    for line in sys.stdin:
        fields = json.loads(line)
        what = fields.pop("what")
        job = Job(**fields)
        set_threads(job.threads)
        # Kept, because tables of ten million rows take seconds to make.
        if job.variant not in variants:
            variants[job.variant] = make(job.variant)
        variant = variants[job.variant]
        if what == "parts":
            found = variant.parts(job.steps, job.batch_size) if hasattr(variant, "parts") else {}
        else:
            barrier()
            start = time.perf_counter()
            loss = variant.steps(job.steps, job.batch_size)
            barrier()
            found = {"seconds": time.perf_counter() - start, "loss": loss}
        answers.write(f"{json.dumps(found)}\n")
        answers.flush()
