"""What a user is told when a data worker fails: one screen that says who, doing what, why, and what to do."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Any

from recsuite.errors import script_name
from recsuite.runtime.host import memory_in_words, mib, shared_memory

# What multiprocessing says of a forked worker that its server no longer can speak for.
SERVER_GONE = 255
# Of /dev/shm. Not 1: some of it may have been freed since the signal.
NEARLY_FULL = 0.9


@dataclass(frozen=True)
class WorkerFailure:
    """Which worker, which batch, and the memory that batches lie in."""

    rank: int
    worker_id: int
    pid: int
    # The oldest one that it had not answered.
    request: Any
    ring_bytes: int
    num_slots: int
    local_world_size: int
    mp_context: str

    def __str__(self) -> str:
        doing = f"with {self.request}" if self.request is not None else "with no batch to make"
        return f"data worker {self.worker_id} of rank {self.rank} (pid {self.pid}), {doing}"


class WorkerError(Exception):
    """A worker failed, and its pool is of no use any more. The text is the screen."""


class WorkerRaisedError(WorkerError):
    """A worker raised an exception."""

    # In words, as the worker sent it: an exception need not be picklable.
    def __init__(self, failure: WorkerFailure, traceback: str) -> None:
        super().__init__(
            f"An exception in {failure}.\n"
            f"{traceback.rstrip()}\n"
            "What to do: the last line says what went wrong; --num_workers 0 raises it in the main process, "
            "where a debugger can stop at it."
        )


class WorkerDiedError(WorkerError):
    """A worker is gone without a word."""

    def __init__(self, failure: WorkerFailure, exitcode: int | None, stack: str) -> None:
        what, remedy = _explain(failure, exitcode)
        lines = [f"Lost {failure}.", what, *([f"Where it was:\n{stack.rstrip()}"] if stack else [])]
        super().__init__("\n".join([*lines, f"What to do: {remedy}"]))
        self.exitcode = exitcode


class WorkerSilentError(WorkerError):
    """A worker lives, but has not answered in time."""

    def __init__(self, failure: WorkerFailure, timeout: float, stack: str) -> None:
        where = (
            f"Where it is:\n{stack.rstrip()}"
            if stack
            else "It did not say where it is: it has not begun yet, or it is stopped."
        )
        super().__init__(
            f"Nothing for {timeout:g} s from {failure}.\n{where}\n"
            "What to do: if a batch may take that long, give a larger --worker_timeout; if not, the stack "
            "shows what it waits for."
        )


def _explain(failure: WorkerFailure, exitcode: int | None) -> tuple[str, str]:
    """What an exit code means, with the facts that matter to it, and the remedy."""
    if exitcode is None:
        return (
            "Its connection broke although it is still running.",
            "start again; if it comes back, give --num_workers 0.",
        )
    if exitcode == SERVER_GONE and failure.mp_context == "forkserver":
        return (
            "The server that forks workers is gone, and took the worker with it.",
            "find out who ended it (a signal to the whole process group, most often), and start again.",
        )
    if exitcode >= 0:
        return (
            f"It exited with code {exitcode} by itself.",
            "if it never made a batch, its start failed: the traceback above says why, and a script that "
            'starts workers needs `if __name__ == "__main__":` around what it runs. Else something in the '
            "data set called exit.",
        )
    number = -exitcode
    # Real-time signals have no names.
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    fact = f"It was killed by signal {number} ({name})"
    if number == signal.SIGKILL:
        return (
            f"{fact}: most often the kernel, when the memory limit is reached.\n{memory_in_words()}",
            "give a smaller --batch_size, --prefetch_factor or --num_workers, or raise the memory limit; "
            "`dmesg` names what the kernel killed. "
            "Where memory is left, somebody else sent the signal: start again.",
        )
    if number == signal.SIGBUS:
        used, size = shared_memory()
        full = used > NEARLY_FULL * size
        return (
            f"{fact}: a page of mapped memory could not be had. Either a file was cut while it was read, or "
            f"the memory is full.\n{shared_memory_in_words(failure)}\n{memory_in_words()}",
            "leave the files of the data set alone while it is used (those cut are made again at the next "
            "start); where memory is full, give a smaller --batch_size, --prefetch_factor or --num_workers"
            + ("; /dev/shm is full: make room, or docker run --shm-size=1g." if full else "."),
        )
    # Python raises none of these by itself. They come from compiled code.
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE):
        return (
            f"{fact}: a crash in native code.",
            "the stack shows the call; packages that do not belong together are the usual reason: "
            f"{script_name()} --doctor checks them.",
        )
    return f"{fact}, which somebody sent.", "find out who sent it, and start again."


def shared_memory_in_words(failure: WorkerFailure) -> str:
    """The state of /dev/shm, beside what the batches need."""
    used, size = shared_memory()
    slot = failure.ring_bytes // failure.num_slots
    need = failure.ring_bytes * failure.local_world_size
    return (
        f"/dev/shm: {mib(used)} of {mib(size)} in use, by others: the batches lie in anonymous memory, "
        f"{failure.num_slots} slots of at most {mib(slot)} for each of {failure.local_world_size} ranks, "
        f"{mib(need)} in all."
    )
