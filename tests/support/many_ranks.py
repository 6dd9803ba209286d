"""Program of many ranks in `test_many_ranks.py`: many_ranks.py RESULTS DATA FOLDER RANKS processes|threads.

Each rank joins, trains through both exchanges, evaluates, writes checkpoints and restores one, as a training
does. RESULTS gets, for each of these, the most that a rank has sent, and what it takes of memory.

Processes are forks of one that has imported; what they send is what the kernel says of their connections.
Threads exchange through the memory of one process, without a launch: 256 of them take a few GiB, where as
many processes take more than 20.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pickle
import pickletools
import queue
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from example import make_loss, make_model
from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.folder import full_name
from recsuite.checkpoint.restore import restore
from recsuite.checkpoint.writer import tensors_of
from recsuite.config.config import Config
from recsuite.datasets import batching
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime import peers
from recsuite.runtime.host import die_with_parent
from recsuite.runtime.process import (
    RuntimeContext,
    broadcast_from_rank0,
    end_process,
    end_with,
    init_runtime,
    once_per_node,
)
from recsuite.sharding import cpu_tables, exchange
from recsuite.sharding.exchange import Exchange, map_file, open_exchange
from recsuite.training.progress import Progress
from recsuite.training.state import build_train_state
from tests.support.dump_ranks import begin_checkpointer
from tests.support.launch import free_port
from tests.support.trainings import advance, digests, evaluate, gather

STEPS, BATCH_SIZE = 3, 8
BYTES_OF_A_BROADCAST = 2**20
# More ranks are on several machines, as far as they share memory.
LARGEST_MACHINE = 64
# Each rank reads a part of each file, so here the time of a restore grows with the square of the ranks.
MOST_READERS = 64
# Linux's description of a connection: in it the bytes sent, and the segments with data.
TCP_INFO, COUNTERS = 11, (("Q", 200), ("I", 156))
# Each thread maps the buffers of all for itself, so these must be smaller than those of processes.
SLOT_BYTES_OF_A_THREAD = 2**20


def config_of(data: str) -> Config:
    """The flags. Tables by id are split over all ranks, whatever their size; others are whole."""
    return Config.of(data_path=data, batch_size=BATCH_SIZE, vocabulary="dynamic", timeout=1200)


# --- what a rank sends ---


class Meter:
    """Costs of each part of a run for this rank. parts_of_votes: numbers of values in what it gave to all."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}
        self.parts_of_votes: list[int] = []
        self.is_counting = False

    @contextlib.contextmanager
    def part(self, name: str, times: int = 1) -> Iterator[None]:
        """Measure a block that does something so many times."""
        was_counting, self.is_counting = self.is_counting, False
        before, begin = self._state(), time.monotonic()
        self.is_counting = True
        yield
        self.is_counting = False
        seconds = time.monotonic() - begin
        after = self._state()
        costs = {key: value - before[key] for key, value in after.items()}
        costs |= {key: costs[key] / times for key in self.sent()}
        self.found[name] = {**costs, "seconds": seconds / times}
        self.is_counting = was_counting

    def sent(self) -> dict[str, float]:
        """Bytes and messages so far, and those from the store of rank 0."""
        raise NotImplementedError

    def _state(self) -> dict[str, float]:
        if dist.is_initialized():
            dist.barrier()
        found = {**self.sent(), **self.memory()}
        if dist.is_initialized():
            dist.barrier()
        return found

    def memory(self) -> dict[str, float]:
        """MiB of this process alone, and of its page tables."""
        rollup = Path("/proc/self/smaps_rollup").read_text().splitlines()
        found = {line.split()[0]: int(line.split()[1]) / 1024 for line in rollup[1:]}
        status = Path("/proc/self/status").read_text()
        tables = int(status.partition("VmPTE:")[2].split()[0]) / 1024
        return {"private MiB": found["Private_Dirty:"], "page tables MiB": tables}


class ProcessMeter(Meter):
    """Meter of a process, by its connections; those of the heartbeat send by the clock and are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self._ignored: set[str] = set()

    def sent(self) -> dict[str, float]:
        """See `Meter`."""
        found = {"bytes": 0.0, "messages": 0.0, "bytes of the store": 0.0}
        for name, (num_bytes, number, is_of_store) in _connections().items():
            if is_of_store:
                found["bytes of the store"] += num_bytes
            elif name not in self._ignored:
                found["bytes"] += num_bytes
                found["messages"] += number
        return found

    def begin_beats(self, heartbeat: Any) -> None:
        """Begin the heartbeat."""
        before = _connections().keys()
        BEGIN(heartbeat)
        self._ignored = {*_connections().keys() - before}


BEGIN = peers.Heartbeat.begin


def _connections() -> dict[str, tuple[int, int, bool]]:
    """Bytes and messages that this process has sent, and whether it was as the store, by connection."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        # One that was closed meanwhile, or is no connection.
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/self/fd/{name}")
            if link.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 512)
                    port = connection.getsockname()[1]
                sent = [struct.unpack_from(kind, info, place)[0] for kind, place in COUNTERS]
                found[link] = (*sent, str(port) == os.environ["MASTER_PORT"])
    return found


class ThreadMeter(Meter):
    """Meter of a thread, by what it gives to the collectives."""

    def __init__(self, world_size: int) -> None:
        super().__init__()
        self.world_size = world_size
        self._sent = {"bytes": 0.0, "messages": 0.0}

    def sent(self) -> dict[str, float]:
        """See `Meter`."""
        return dict(self._sent)

    def memory(self) -> dict[str, float]:
        """See `Meter`; the mean over ranks, which share one process."""
        if dist.is_initialized() and dist.get_rank():
            return {}
        return {name: value / self.world_size for name, value in super().memory().items()}

    def send(self, num_bytes: float, messages: int) -> None:
        """Count what is sent."""
        if self.is_counting:
            self._sent["bytes"] += num_bytes
            self._sent["messages"] += messages


# The meter of each rank, which has a thread.
CURRENT = threading.local()


def counted(gather_objects: Any) -> Any:
    """A function like `all_gather_object` that counts the values in what is given."""

    def count(everyones: list[Any], mine: Any, **options: Any) -> None:
        if CURRENT.meter.is_counting:
            operations = pickletools.genops(pickle.dumps(mine))
            CURRENT.meter.parts_of_votes.append(sum(1 for _ in operations))
        gather_objects(everyones, mine, **options)

    return count


# --- ranks ---


def main(results: str, data: str, folder: str, world_size: str, kind: str) -> int:
    """Run the ranks, and write what they cost; return the exit status."""
    for name in ("training.evaluation", "checkpoint.checkpointer"):
        importlib.import_module(f"recsuite.{name}")
    open_columns(config_of(data))
    run_ranks = {"processes": run_processes, "threads": run_threads}[kind]
    with (
        mock.patch.object(dist, "all_gather_object", counted(dist.all_gather_object)),
        mock.patch.object(cpu_tables, "open_exchange", opened),
    ):
        return run_ranks(Path(results), data, Path(folder), int(world_size))


def run_processes(results: Path, data: str, folder: Path, world_size: int) -> int:
    """Fork the ranks, and end them all when one fails.

    Forks share the memory of what was imported; a launcher would refuse so many processes.
    """
    gc.freeze()
    ranks = {}
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(free_port()), WORLD_SIZE=str(world_size))
    for rank in range(world_size):
        if (pid := os.fork()) == 0:
            die_with_parent()
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size))
            end_with(lambda: run_process(results, data, folder))
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        rank = ranks.pop(pid)
        if status:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
            print(f"rank {rank} has ended with {status}", file=sys.stderr)
            return 1
    return 0


def run_process(results: Path, data: str, folder: Path) -> int:
    """Run one rank as a process; return the exit status."""
    meter = CURRENT.meter = ProcessMeter()
    with mock.patch.object(peers.Heartbeat, "begin", lambda self: meter.begin_beats(self)):
        with meter.part("join"):
            context = init_runtime(config_of(data))
        run(results, data, folder, context)
    return 0


def run_threads(results: Path, data: str, folder: Path, world_size: int) -> int:
    """Run the ranks as threads."""
    from torch.testing._internal.distributed import multi_threaded_pg

    store, new_group = dist.HashStore(), dist.new_group
    mail: dict[tuple[int, int], queue.Queue[torch.Tensor]] = defaultdict(queue.Queue)

    def run_thread(rank: int) -> None:
        try:
            CURRENT.meter = ThreadMeter(world_size)
            dist.init_process_group("threaded", store=store, rank=rank, world_size=world_size)
            run(results, data, folder, RuntimeContext(rank, rank, world_size, world_size, CPU, 1))
        except BaseException:
            # The others would wait for it.
            traceback.print_exc()
            os._exit(1)

    def isend(tensor: torch.Tensor, group: Any, group_dst: int) -> Any:
        CURRENT.meter.send(tensor.nbytes, 1)
        mail[dist.get_rank(), group_dst].put(tensor.clone())
        return mock.Mock()

    def irecv(tensor: torch.Tensor, group: Any, group_src: int) -> Any:
        box = mail[group_src, dist.get_rank()]
        return mock.Mock(wait=lambda: tensor.copy_(box.get()))

    # Each thread has its own groups, by the same names.
    groups: Any = torch._C._distributed_c10d
    groups._set_thread_isolation_mode(True)
    multi_threaded_pg._install_threaded_pg()
    with (
        counting_group(multi_threaded_pg),
        # Of the same kind as the first group, which is there already.
        mock.patch.object(dist, "new_group", lambda backend, timeout: new_group(timeout=timeout)),
        # It fails for groups of threads.
        mock.patch.object(dist, "destroy_process_group", return_value=None),
        # Or they would open more files than a process may.
        mock.patch.object(batching, "MappedColumn", functools.cache(batching.MappedColumn)),
        # Else torch keeps each seed, with the stack, for a GPU that it may find.
        mock.patch.object(torch.cuda, "_is_in_bad_fork", return_value=True),
        mock.patch.object(dist, "isend", isend),
        mock.patch.object(dist, "irecv", irecv),
        mock.patch.object(exchange, "SLOT_BYTES", SLOT_BYTES_OF_A_THREAD),
        mock.patch.object(exchange, "BUFFER_BYTES", 15 * SLOT_BYTES_OF_A_THREAD),
        # Threads that look often keep those they wait for from running.
        mock.patch.object(exchange, "SPIN_SECONDS", 0),
        mock.patch.object(exchange, "NAP_SECONDS", 0.05),
    ):
        threads = [threading.Thread(target=run_thread, args=(rank,)) for rank in range(world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return 0


CPU = torch.device("cpu")


@contextlib.contextmanager
def counting_group(module: Any) -> Iterator[None]:
    """Within this, threads count what they give to collectives, as gloo sends it."""
    group = module.ProcessLocalGroup
    exchange_all, gather_all, reduce, broadcast = (
        getattr(group, name) for name in ("all_to_all_single", "allgather", "allreduce", "broadcast")
    )

    def to_all(self: Any, outgoing: Any, incoming: torch.Tensor, *arguments: Any) -> Any:
        # All but the rank's own part.
        sizes = arguments[1] or [len(incoming) // self.size()] * self.size()
        rows = sum(sizes) - sizes[self.rank()]
        CURRENT.meter.send(rows * incoming.nbytes / max(1, len(incoming)), self.size() - 1)
        return exchange_all(self, outgoing, incoming, *arguments)

    def gather(self: Any, outgoing: Any, incoming: Any, *arguments: Any) -> Any:
        CURRENT.meter.send(incoming[0].nbytes * (self.size() - 1), self.size() - 1)
        return gather_all(self, outgoing, incoming, *arguments)

    def add(self: Any, tensor_list: Any, *arguments: Any) -> Any:
        CURRENT.meter.send(2 * tensor_list[0].nbytes, 2 * (self.size() - 1))
        return reduce(self, tensor_list, *arguments)

    def send(self: Any, tensors: Any, *arguments: Any) -> Any:
        CURRENT.meter.send(tensors[0].nbytes, 1)
        return broadcast(self, tensors, *arguments)

    # torch's own copy each message by itself, which takes 256 threads seconds.
    @torch.no_grad()
    def copy_to_all(self: Any, data: list[Any]) -> None:
        parts = [incoming.split(sizes or len(incoming) // len(data)) for _, incoming, _, sizes in data]
        for rank, (outgoing, *_) in enumerate(data):
            torch.cat([of_rank[rank] for of_rank in parts], out=outgoing.detach())

    @torch.no_grad()
    def copy_gathered(self: Any, data: list[Any]) -> None:
        incoming = [mine.reshape(outgoing[0][rank].shape) for rank, (outgoing, (mine,)) in enumerate(data)]
        for (outgoing,), _ in data:
            torch._foreach_copy_(outgoing, incoming)

    with (
        mock.patch.object(module.AllToAllBase, "work", copy_to_all),
        mock.patch.object(module.AllGather, "work", copy_gathered),
        mock.patch.object(group, "all_to_all_single", to_all),
        mock.patch.object(group, "allgather", gather),
        mock.patch.object(group, "allreduce", add),
        mock.patch.object(group, "broadcast", send),
    ):
        yield


def opened(group: Any, timeout: float) -> Exchange:
    """The exchange of a rank, which shares memory with the ranks of its machine alone."""
    others, here = iter(range(dist.get_world_size())), dist.get_rank() // LARGEST_MACHINE

    def map_here(path: str, name: str) -> torch.Tensor | None:
        return map_file(path, name) if next(others) // LARGEST_MACHINE == here else None

    CURRENT.map_file = map_here
    with CURRENT.meter.part("exchange"):
        found = open_exchange(group, timeout)
    # The dense part keeps this function for the whole training.
    CURRENT.add_up = type(found).add_up
    mine: Any = found
    mine.add_up = lambda numbers: CURRENT.add_up(found, numbers)
    return found


def run(results: Path, data: str, folder: Path, context: RuntimeContext) -> None:
    """Do each part once; rank 0 writes what it cost."""
    meter, config = CURRENT.meter, config_of(data)
    with meter.part("data"):
        columns = once_per_node(context, lambda: open_columns(config), deadline=1200)[context.rank]
    with meter.part("broadcast"):
        found: dict[str, Any] = {"broadcast": len(broadcast_from_rank0(lambda: bytes(BYTES_OF_A_BROADCAST)))}
    with meter.part("model"):
        train_state = build_train_state(columns, config, context, make_model, make_loss(columns, config))
    (tables,) = (each for each in train_state.model.modules() if isinstance(each, cpu_tables.CpuTables))
    found |= {"kind": type(tables.exchange).__name__, "losses": [], "states": []}
    checkpointer = begin_checkpointer(folder, "inc_dump", train_state, columns, config, context)
    progress = Progress()
    for name, chosen in (("step", tables.exchange), ("step by gloo", Exchange(dist.group.WORLD))):
        tables.exchange, CURRENT.add_up = chosen, type(chosen).add_up
        with meter.part(name, STEPS):
            losses, progress = advance(progress, STEPS, train_state, columns, config, context)
        found["losses"] += losses
    with meter.part("evaluation"):
        found["metrics"] = evaluate(train_state, columns, config, context)
    with meter.part("delta"):
        checkpointer.writer.write_delta(progress)
    with meter.part("full checkpoint"):
        checkpointer.writer.write_full(progress)
    newest = folder / full_name(progress.step)
    # In each of its groups gloo has one to each other rank.
    found["connections"] = len(_connections())
    found["manifest"] = (newest / "manifest.json").stat().st_size
    if context.world_size <= MOST_READERS:
        found["states"].append(digests(tensors_of(train_state), context))
        with meter.part("restore"):
            restore(chain_at(newest), train_state, columns, context)
        found["states"].append(digests(tensors_of(train_state), context))
    everyones = gather([meter.found, meter.parts_of_votes], context)
    if context.rank == 0:
        costs = {
            part: {key: max(of_rank[part].get(key, 0) for of_rank, _ in everyones) for key in costs}
            for part, costs in meter.found.items()
        }
        votes = [max(numbers) for numbers in zip(*(votes for _, votes in everyones), strict=True)]
        results.write_text(json.dumps({**found, "costs": costs, "votes": votes, "machine": LARGEST_MACHINE}))
    dist.barrier()


if __name__ == "__main__":
    exchange.map_file = lambda path, name: CURRENT.map_file(path, name)
    end_process(main(*sys.argv[1:]))
