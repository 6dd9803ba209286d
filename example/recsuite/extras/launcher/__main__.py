"""torchrun, with an exit status for how the ranks ended: by a signal, by a user's mistake, or by a fault.

    python -m recsuite.extras.launcher --standalone --nproc_per_node=2 example.py --dump

The exit status is 128 plus the number of a signal, and 2 for a mistake. In both cases torchrun's report is
omitted, because a rank has printed one sentence. After a fault torchrun's report follows, with status 1.
Launchers of several machines that lose each other print a sentence, with status 1: torchrun polls its store
without a deadline, and neither a signal nor the end of its ranks would reach it then.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from recsuite.config.config import Config
from recsuite.config.parser import parse_given
from recsuite.errors import LINES, UserError, counted, escaped
from recsuite.runtime.console import UNREAD, end_when_pipe_closes
from recsuite.runtime.host import (
    LAUNCHER,
    ONE_MACHINE,
    allowed_cores,
    allowed_memory,
    check_limits,
    describe_memory,
    shown_bytes,
)
from recsuite.runtime.peers import is_said, state_of
from recsuite.runtime.process import end_process, recovery_advice


def say(sentence: object) -> None:
    """Write a message to standard error, flushed and in one write."""
    # The ranks write there too, and a line of theirs could come in between.
    sys.stderr.write(f"launcher: {escaped(sentence, LINES)}\n")
    sys.stderr.flush()


# Added to --timeout: time for the ranks to find the fault themselves, and to print why they end.
PATIENCE = 25.0
# Added to --timeout, so that the other ranks first report which rank it is.
STOPPED_SECONDS = 3.0
# torchrun waits a minute for the machine with the store, before it starts ranks.
MEETING_SECONDS = 60.0
LOOK_SECONDS = 1.0


def start_watchdog(script_args: Sequence[str]) -> None:
    """Start a thread that ends this launcher when its main thread is stuck.

    It is stuck if it is inside one call for longer than the ranks' --timeout and their time to end. The
    kernel then ends the remaining ranks. The thread also ends a rank that was stopped for --timeout, because
    a rank alone on its machine has no other rank that notices.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The ranks refuse a value that is not a number.
    parser.add_argument("--timeout", default=Config().runtime.timeout)
    given = parser.parse_known_args(list(script_args))[0].timeout
    # A user's script may have another meaning of --timeout.
    timeout = float(given) if str(given).isdigit() else float(Config().runtime.timeout)
    threading.Thread(target=_watch, args=(timeout,), name="stuck", daemon=True).start()


def _watch(timeout: float) -> None:
    seen = time.monotonic()
    pulse = _Pulse()
    stopped: dict[int, float] = {}
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        ranks = _children()
        if pulse.was_taken():
            seen = now
        elif now - seen > timeout + PATIENCE + (0.0 if ranks else MEETING_SECONDS):
            _end(now - seen)
        stopped = {pid: stopped.get(pid, now) for pid in ranks if state_of(pid) == "T"}
        for pid, since in stopped.items():
            if now - since > timeout + STOPPED_SECONDS:
                say(f"process {pid} was stopped for --timeout {timeout:.0f} seconds, and is ended")
                os.kill(pid, signal.SIGKILL)


class _Pulse:
    """Check that the main thread runs: it executes a pending call between two of its instructions.

    A signal would work too, but would interrupt the system calls of a healthy thread. CPU time of the thread
    does not tell: a `TCPStore` that retries a connection inside one call uses some.
    """

    def __init__(self) -> None:
        self._is_taken = True
        self._note = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._take)

    def _take(self, _: int | None) -> int:
        self._is_taken = True
        return 0

    def was_taken(self) -> bool:
        """Return true if the main thread has run since this last returned true."""
        if self._is_taken:
            self._is_taken = False
            # Requested again only after the last one ran: requests would pile up behind a stuck main thread.
            ctypes.pythonapi.Py_AddPendingCall(self._note, None)
            return True
        return False


def _children() -> list[int]:
    """Return the process ids of the started ranks not yet waited for; none if the system has no such list."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _end(seconds: float) -> None:
    # The stack shows which call of torchrun does not return.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    sys.stderr.write("".join(traceback.format_stack(frame)))
    say(
        f"waited {seconds:.0f} s for the machine with the rendezvous, which may be cut off; this "
        "launcher ends, and its ranks end with it"
    )
    os._exit(1)


# Exit statuses of a script after a user's mistake, and after a SIGTERM or a Ctrl-C to a rank of any machine.
# The ranks have printed the message already.
EXPLAINED = (2, UNREAD, 128 + signal.SIGTERM, 128 + signal.SIGINT)
# A process with all imports and without data: its memory, and the core seconds of its start.
RANK_BYTES = 300 * 2**20
START_SECONDS = 3.0
CPP_LEVEL = "TORCH_CPP_LOG_LEVEL"


def launch() -> int:
    """Launch as torchrun does, but on one machine without a port. Return the exit status."""
    try:
        # Before torch is imported, which takes memory.
        check_limits()
    except UserError as error:
        say(error)
        return 2
    os.environ[LAUNCHER] = str(os.getpid())
    # If the launcher with the store ends first, the C++ code of others prints warnings with stacks. torch
    # reads this when it is imported; ranks keep the user's level.
    is_mine = CPP_LEVEL not in os.environ
    os.environ.setdefault(CPP_LEVEL, "ERROR")
    from torch.distributed.run import parse_args

    if is_mine:
        del os.environ[CPP_LEVEL]
    # These import torch.
    from recsuite.extras.launcher.rendezvous import (
        is_on_one_machine,
        tolerate_lost_store,
        use_folder_rendezvous,
    )

    # The first would log the end of each process, the second that the launcher with the rendezvous ended
    # before this one.
    for name in ("multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    arguments = parse_args(sys.argv[1:])
    try:
        _check_processes(arguments)
    except UserError as error:
        say(error)
        return 2
    if arguments.nnodes not in ONE_MACHINE:
        # A launcher's store outlives a restart, and the number of restarts, which separates attempts there,
        # differs between machines. So rank 0 makes a store for each attempt.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        tolerate_lost_store()
        say(
            f"meets the other machines at {arguments.rdzv_endpoint} and waits for them, 600 s "
            "at most unless --rdzv_conf says otherwise; Ctrl-C ends it"
        )
    start_watchdog(arguments.training_script_args)
    # Only its owner can access it.
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        # Files that torchrun would leave in the temporary folder.
        arguments.log_dir = arguments.log_dir or name
        # With LOGLEVEL above INFO torchrun records no events, so no restart is printed.
        events = logging.getLogger(f"torchelastic-events-{arguments.event_log_handler}")
        events.addHandler(_RestartNotice(arguments.nnodes))
        if is_on_one_machine(arguments):
            use_folder_rendezvous(folder, arguments)
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    """Launch with torchrun's arguments. Return the exit status."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import (
        RendezvousClosedError,
        RendezvousConnectionError,
        RendezvousTimeoutError,
    )
    from torch.distributed.run import run

    try:
        run(arguments)
    except (SignalException, UnboundLocalError) as error:
        # torch's prof (elastic/metrics/api.py) raises the second one if a signal arrives just before it reads
        # the clock.
        ending = error if isinstance(error, SignalException) else error.__context__
        if not isinstance(ending, SignalException):
            raise
        say(f"ended by {ending.sigval.name}, after the ranks had ended")
        return 128 + ending.sigval
    except KeyboardInterrupt:
        # torchrun handles signals only after it has started ranks.
        say("ended by SIGINT, while it waited for the other machines")
        return 128 + signal.SIGINT
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        # Times of failures have whole seconds: the first may be one that torchrun ended for another's.
        if first.exitcode == -signal.SIGTERM:
            explained = (failure for failure in error.failures.values() if failure.exitcode in EXPLAINED)
            first = next(explained, first)
        if first.exitcode in EXPLAINED:
            return int(first.exitcode)
        # A killed rank cannot print anything, so this launcher prints what is known.
        if first.exitcode == -signal.SIGKILL:
            ranks = [rank for rank, failure in error.failures.items() if failure is first]
            say(_killed_rank(ranks, first.pid, arguments))
            return 1
        # torchrun's own report, with the traceback that the rank has left.
        if not is_said(first.message):
            print(error, file=sys.stderr)
        return 1
    except (RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError) as error:
        say(_lost_rendezvous(error, arguments))
        return 1
    return 0


class _RestartNotice(logging.Handler):
    """Read torchrun's events from their logger, and print each start of ranks except the first.

    nnodes: as torchrun's.
    """

    def __init__(self, nnodes: str) -> None:
        super().__init__()
        self._nnodes = nnodes
        self._attempt = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Handle an event of torchrun."""
        event = json.loads(record.getMessage())
        about = json.loads(event["metadata"]["metadata"])
        if not event["name"].endswith(".START") or about["local_rank"] != [0]:
            return
        self._attempt += 1
        if self._attempt > 1:
            ranks, machines = about["role_world_size"][0], about["group_world_size"]
            say(
                f"restarting the ranks: attempt {self._attempt} on this machine, with "
                f"{counted(ranks, 'rank')} on {counted(machines, 'machine')} of --nnodes {self._nnodes}"
            )


def _check_processes(arguments: argparse.Namespace) -> None:
    """Print the cost of the requested processes on this machine; refuse more than its memory holds."""
    # Else it is "auto", "cpu" or "gpu", from which torchrun derives a number.
    if not arguments.nproc_per_node.isdecimal():
        return
    number, cores, memory = int(arguments.nproc_per_node), allowed_cores(), allowed_memory()
    if number * RANK_BYTES > memory:
        raise UserError(
            f"{number} processes need {shown_bytes(number * RANK_BYTES)} of memory before they have any "
            f"data, and this machine gives {shown_bytes(memory)}; give at most {memory // RANK_BYTES} "
            "(NPROC of ./run.sh)."
        )
    if number > cores:
        say(
            f"{number} processes share {cores} cores: their start takes about "
            f"{number * START_SECONDS / cores:.0f} s, and their steps wait for each other; more than {cores} "
            "are no faster without GPUs (NPROC of ./run.sh)"
        )


def _killed_rank(ranks: list[int], pid: int, arguments: argparse.Namespace) -> str:
    """Return why a rank was probably killed, the available memory, and how to continue."""
    return (
        f"rank {', '.join(map(str, ranks))} (pid {pid}) was killed by signal 9 (SIGKILL), most often by the "
        "kernel when the memory limit is reached; `dmesg` names what it killed.\n"
        f"{describe_memory()}\n"
        "What to do: where memory was short give fewer processes, a smaller --batch_size or a higher limit; "
        f"{_how_to_continue(arguments)}."
    )


def _how_to_continue(arguments: argparse.Namespace) -> str:
    """Return how a launch with the same arguments can continue."""
    try:
        return recovery_advice(parse_given(arguments.training_script_args)[0])
    except UserError:
        # A user's script with flags of its own.
        return recovery_advice(None)


def _lost_rendezvous(error: Exception, arguments: argparse.Namespace) -> str:
    """Return the message on a lost rendezvous of the launchers, and what to do."""
    from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError

    if isinstance(error, RendezvousClosedError):
        return (
            "another machine has ended this launch, with or without success; its output says why, and "
            "--resume continues from the last checkpoint"
        )
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"--nnodes requires {arguments.nnodes} machines, and fewer reached {arguments.rdzv_endpoint} in "
            "time; start one launcher on each, with the same endpoint"
        )
    return (
        f"the launcher at the rendezvous, {arguments.rdzv_endpoint}, has ended or cannot be reached; if it "
        "gives no reason, start again with the address of a machine that is there, and --resume to continue "
        "from the last checkpoint"
    )


if __name__ == "__main__":
    end_when_pipe_closes()
    # Python's normal exit takes a second or two on a busy machine.
    end_process(launch())
