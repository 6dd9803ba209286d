"""Ranks of the example on the machines of a cluster, forked from a process that has imported all.

    servers = [ForkServer(machine) for machine in cluster.machines]
    ranks = launch(servers, [1, 1], ["--epochs", 1])
    assert [rank.wait(30) for rank in ranks] == [0, 0]

An import of TorchRec takes seconds, and a matrix of machines, ranks and faults starts many ranks. A rank runs
what `python example.py` runs, in the environment that torchrun would make, without the launcher.

As a script this is the process on the machine: it reads a request per line, and writes the exit status of a
rank into a file beside its output.
"""

from __future__ import annotations

import importlib
import json
import os
import secrets
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests.cluster.machines import Machine, Running
from tests.support.launch import ROOT
from tests.support.preloaded import IMPORTED

# Below those that the kernel gives to connections.
FIRST_PORT, NUM_PORTS = 20_000, 10_000


class ForkServer:
    """Forks ranks on a machine. env: for all of them, beside what `launch` is given.

    CLOCK_OFFSET in it is by how many seconds their clock is wrong, if `clock.c` could be compiled.
    """

    def __init__(self, machine: Machine, clock: Path | None = None) -> None:
        self.machine = machine
        self.env: dict[str, str] = {}
        self.ranks: list[ForkedRank] = []
        env = {"PYTHONPATH": str(ROOT), **({"LD_PRELOAD": str(clock)} if clock else {})}
        self._process = machine.start([sys.executable, "-u", __file__], env)

    @property
    def is_running(self) -> bool:
        """Whether it was not killed with its machine."""
        return self._process.poll() is None

    def fork(self, argv: Sequence[object], env: dict[str, str], cores: int) -> ForkedRank:
        """A rank with some arguments, on so many of the cores."""
        self._process.wait_for("ready")
        rank = ForkedRank(self, self.machine.folder / f"rank-{secrets.token_hex(8)}")
        self.ranks.append(rank)
        self.ask(rank, argv=list(map(str, argv)), env={**env, **self.env}, cores=cores)
        return rank

    def ask(self, rank: ForkedRank, **request: Any) -> None:
        """Have something done with a rank."""
        self._process.write(json.dumps({"path": str(rank.path), **request}))


class ForkedRank(Running):
    """A rank of the example."""

    def __init__(self, server: ForkServer, path: Path) -> None:
        super().__init__(path)
        self.server = server

    def poll(self) -> int | None:
        """As that of `Running`."""
        status = _status_of(self.path)
        return int(status.read_text()) if status.exists() else None

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.server.ask(self, signal=number)


def launch(
    servers: Sequence[ForkServer],
    nprocs: Sequence[int],
    argv: Sequence[object],
    late: float = 0,
) -> list[ForkedRank]:
    """Ranks, so many on each machine; rank 0 of the first one has the store.

    late: by how many seconds all machines but the first come later.
    Every rank has as many threads as on one machine, on which results depend to the last bit.
    """
    port = FIRST_PORT + secrets.randbelow(NUM_PORTS)
    common = {"MASTER_ADDR": servers[0].machine.name, "MASTER_PORT": str(port)}
    ranks: list[ForkedRank] = []
    for server, nproc in zip(servers, nprocs, strict=True):
        time.sleep(late if ranks else 0)
        for local_rank in range(nproc):
            mine = {
                "RANK": len(ranks),
                "LOCAL_RANK": local_rank,
                "WORLD_SIZE": sum(nprocs),
                "LOCAL_WORLD_SIZE": nproc,
            }
            given = {**common, **{key: str(value) for key, value in mine.items()}}
            ranks.append(server.fork(argv, given, cores=nproc))
    return ranks


# --- the process on a machine ---


def serve() -> None:
    """Fork ranks until the standard input ends."""
    for name in (*IMPORTED, "example"):
        importlib.import_module(name)
    print("ready", flush=True)
    ranks: dict[int, Path] = {}
    while True:
        while select.select([sys.stdin], [], [], 0.02)[0]:
            line = os.read(sys.stdin.fileno(), 2**20).decode()
            for request in map(json.loads, line.splitlines()):
                _obey(request, ranks)
        _reap(ranks)


def _obey(request: dict[str, Any], ranks: dict[int, Path]) -> None:
    path = Path(request["path"])
    if "signal" in request:
        for pid in [pid for pid, other in ranks.items() if other == path]:
            os.kill(pid, request["signal"])
        return
    pid = os.fork()
    if pid == 0:
        _be_rank(request)
    ranks[pid] = path


def _be_rank(request: dict[str, Any]) -> NoReturn:
    import traceback

    import example
    from recsuite.runtime.process import end_process

    output = os.open(request["path"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.setsid()
    os.environ.update(request["env"])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: request["cores"]])
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    status = 1
    try:
        status = example.main(request["argv"])
    except BaseException:
        traceback.print_exc()
    end_process(status)


def _reap(ranks: dict[int, Path]) -> None:
    for pid, path in list(ranks.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del ranks[pid]
            making = path.with_suffix(".making")
            making.write_text(str(os.waitstatus_to_exitcode(status)))
            making.rename(_status_of(path))


def _status_of(path: Path) -> Path:
    return path.with_suffix(".status")


if __name__ == "__main__":
    serve()
