"""End of a process: after a failure, and after a SIGTERM or Ctrl-C, on which all ranks end at the same step.

torchrun ends all ranks as soon as one has exited, and its report ends with the rank that left the oldest
error file. So a rank that fails only because another rank failed waits before it prints or exits.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from recsuite.config.config import Config
from recsuite.errors import LINES, BrokenLaunchError, LostPeerError, UserError, escaped, with_script_name
from recsuite.runtime.peers import ALL_ANSWER, in_silence, leave_for_torchrun
from recsuite.runtime.process import after_lost_peer, lost_peers, read_launch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Seconds after which another rank of a machine may print the same message as the first one.
SAME_MISTAKE_SECONDS = 5.0
# torchrun signals the other ranks some tenths of a second after the exit of a rank; on a busy machine, a
# second or two. No longer, because on other machines this is added to --timeout and to torchrun's own time.
LOST_PEER_SECONDS = 4.0
# Type names of torch's exceptions for a lost peer; others are RuntimeErrors with these words.
LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
LOST_PEER_WORDS = ("gloo/transport", "Application timeout caused pair closure")


def report_mistake(sentence: str) -> None:
    """Print a user's mistake once for all ranks of a machine, and record it for torchrun's report.

    The first rank of a machine prints at once. Another rank prints only if it is still alive some seconds
    later: then the mistake was on that rank only.
    """
    # Recorded before the wait, in which torchrun may end this rank.
    leave_for_torchrun(sentence, sentence)
    try:
        local_rank = read_launch().local_rank
    except UserError:
        # The mistake may be in the launch environment itself.
        local_rank = 0
    if local_rank != 0:
        time.sleep(SAME_MISTAKE_SECONDS)
    print(with_script_name(sentence), file=sys.stderr, flush=True)


def report_lost_worker(screen: str) -> None:
    """Print the failure of a data worker on its rank, without a traceback, which would add nothing."""
    leave_for_torchrun(screen, screen)
    print(escaped(screen, LINES), file=sys.stderr, flush=True)


def identify_lost_peers(error: Exception, config: Config) -> None:
    """Find the lost rank, its machine and how to continue, if an exception says only that a rank is lost.

    Raises:
        BrokenLaunchError: with that, from the exception.
        LostPeerError: when all others are there, so that one of them may wait by mistake.
    """
    if not is_lost_peer(error):
        return
    fault = "" if isinstance(error, BrokenLaunchError) else lost_peers()
    # No rank is lost, so no sentence can explain it: the traceback shows where this rank waited.
    if fault == ALL_ANSWER:
        raise LostPeerError(fault) from error
    if fault:
        fault = in_silence(fault, config.runtime.timeout) if _is_silence(error) else fault
    elif isinstance(error, LostPeerError):
        fault = str(error)
    else:
        return
    raise BrokenLaunchError(f"{fault}. {after_lost_peer(config)}") from error


def report_broken_launch(error: BrokenLaunchError) -> None:
    """Print the lost ranks once for all ranks of this machine, and record them for the launcher.

    As with a mistake, a rank that is not the first of its machine prints only if it is still alive later.
    """
    if not _is_silence(error):
        time.sleep(LOST_PEER_SECONDS)
    if read_launch().local_rank != 0:
        time.sleep(SAME_MISTAKE_SECONDS)
    print(with_script_name(error), file=sys.stderr, flush=True)
    # After printing, so that no message is marked as printed before it is.
    leave_for_torchrun(str(error), str(error), is_said=True)


def record_crash(error: BaseException) -> None:
    """Record the traceback of an exception for torchrun's report, and return."""
    if is_lost_peer(error) and not _is_silence(error):
        time.sleep(LOST_PEER_SECONDS)
    leave_for_torchrun(f"{type(error).__name__}: {error}", traceback.format_exc())


def is_lost_peer(error: BaseException) -> bool:
    """True if an exception says only that another rank is lost or silent."""
    if isinstance(error, LostPeerError) or type(error).__name__ in LOST_PEER_TYPES:
        return True
    return any(words in str(error) for words in LOST_PEER_WORDS)


def is_out_of_memory(error: BaseException) -> bool:
    """True if the system gave this process no memory; torch's allocator raises a RuntimeError then."""
    words = ("DefaultCPUAllocator: can't allocate memory", "Cannot allocate memory")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _is_silence(error: BaseException) -> bool:
    """True if a peer is silent, not gone: it left no error to print first, and --timeout is over."""
    # The first exception has the library's text; exceptions raised from it may have another.
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A second Ctrl-C within this time is the same one: a shell and a launcher may both pass it on.
SAME_SECONDS = 0.5
ANSWER = "received Ctrl-C: writing a checkpoint first; a second Ctrl-C ends at once, without one"
ENDED = "ended by Ctrl-C"
# Longest wait for a reader of standard error: nothing may keep a process from ending.
MESSAGE_SECONDS = 1.0


class Termination:
    """Vote of the ranks, at each step, on whether any of them got a signal to end. Collective: every rank.

    deadline: the longest time that a vote waits for the slowest rank.
    """

    def __init__(self, deadline: timedelta) -> None:
        import torch.distributed as dist

        # Always on the CPU, and in parallel with the collectives of the training. A separate group also keeps
        # votes apart from other collectives, whose order relative to them may differ between ranks.
        self._group = dist.new_group(backend="gloo", timeout=deadline)
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        # Number of the signal to end that this process received.
        self.asked = 0
        self._interrupt: Callable[[int, FrameType | None], object] | None = None

    @contextlib.contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Record a SIGTERM or a Ctrl-C instead of ending this process at once. Not collective.

        If Ctrl-C has a handler, such as Python's own, it belongs to the calling program. Then the first
        Ctrl-C raises KeyboardInterrupt after a step, because an exception inside a callback from C++ is lost;
        a second one calls the handler at once. Outside the main thread no signal is recorded, because Python
        allows no handler there.

        Raises:
            SystemExit: when this process received a signal, and the ranks to agree with on it are gone.
            KeyboardInterrupt: see above.
        """
        import torch.distributed as dist

        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._note) for number in SIGNALS if is_main}
        handler = before.get(signal.SIGINT)
        self._interrupt = handler if callable(handler) and handler is not _leave_to_thread else None
        try:
            with contextlib.ExitStack() as stack:
                if is_main and self._interrupt is None:
                    stack.enter_context(_ending_on_second_ctrl_c(speaks=dist.get_rank() == 0))
                yield
        except SystemExit as ended:
            if self._interrupt and ended.code == exit_status_of_signal(signal.SIGINT):
                raise KeyboardInterrupt from None
            raise
        except Exception as error:
            # Another rank that received a signal may have exited first. That end was requested, and is no
            # fault.
            if self.asked and is_lost_peer(error):
                raise SystemExit(exit_status_of_signal(self.asked)) from error
            raise
        finally:
            for number, earlier in before.items():
                signal.signal(number, earlier)

    def vote(self) -> int:
        """Return the signal that any rank had received one call ago, or 0. Ranks compute during the vote."""
        import torch
        import torch.distributed as dist

        voted = 0
        # The vote had a whole step to arrive, so waiting for it costs next to nothing.
        if self._vote is not None:
            vote, work = self._vote
            work.wait()
            voted = int(vote.item())
        vote = torch.tensor(int(self.asked))
        # The highest number: 0 if no rank got a signal, else one signal for all ranks.
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._vote = (vote, work)
        return voted

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupt and number == self.asked == signal.SIGINT:
            self._interrupt(number, frame)
        # Only the first one counts: a batch system's SIGTERM after a Ctrl-C, or a repeated one, is ignored.
        self.asked = self.asked or number


def exit_status_of_signal(number: int) -> int:
    """Return the exit status of a process that a signal ended."""
    return 128 + number


@contextlib.contextmanager
def _ending_on_second_ctrl_c(speaks: bool) -> Iterator[None]:
    """End this process at once on any signal to end after a Ctrl-C, even inside a blocking call."""
    thread, writer, before = _start_thread(_await_second, speaks)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()


def _start_thread(
    await_signal: Callable[[int, bool], None], speaks: bool
) -> tuple[threading.Thread, int, int]:
    """Start a thread that gets the numbers of signals. Return it, the pipe to it, and the earlier pipe."""
    # Python runs a handler between two of its own instructions, so never while a call into a library waits.
    # But it writes the number of the signal to a pipe at once, and a thread reads that.
    reader, writer = os.pipe()
    # `set_wakeup_fd` requires this: a signal must not wait for room in a pipe.
    os.set_blocking(writer, False)

    def run() -> None:
        await_signal(reader, speaks)
        os.close(reader)

    thread = threading.Thread(target=run, name="ctrl-c", daemon=True)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    return thread, writer, before


def end_on_ctrl_c() -> None:
    """End this process at once on a Ctrl-C from now on, even inside a blocking call, with one sentence.

    A handler that is set later takes precedence while it is there. Of the ranks of a machine the first one
    prints.
    """
    signal.signal(signal.SIGINT, _leave_to_thread)
    try:
        speaks = read_launch().local_rank == 0
    except UserError:
        # The parser of the flags reports it.
        speaks = True
    _start_thread(_await_first, speaks)


def _leave_to_thread(number: int, frame: FrameType | None) -> None:
    # Meanwhile the thread of `end_on_ctrl_c` ends the process. The main thread must not reach its end first.
    time.sleep(2 * MESSAGE_SECONDS)
    os._exit(exit_status_of_signal(number))


def _await_first(reader: int, speaks: bool) -> None:
    while number := os.read(reader, 1):
        if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is _leave_to_thread:
            if speaks:
                _write_message(with_script_name(ENDED))
            os._exit(exit_status_of_signal(signal.SIGINT))


def _write_message(sentence: str) -> None:
    # Not with Python's streams, which the main thread may have locked while it waits.
    with contextlib.suppress(OSError, ValueError):
        if select.select([], [2], [], MESSAGE_SECONDS)[1]:
            # The line of a terminal has ^C, and maybe a bar.
            os.write(2, f"{chr(10) * os.isatty(2)}{sentence}{chr(10)}".encode())


def _await_second(reader: int, speaks: bool) -> None:
    first = None
    while number := os.read(reader, 1):
        now = time.monotonic()
        if first is None and number[0] == signal.SIGINT:
            first = now
            if speaks:
                _write_message(ANSWER)
        elif first is not None and number[0] in SIGNALS and now - first > SAME_SECONDS:
            os._exit(exit_status_of_signal(signal.SIGINT))
