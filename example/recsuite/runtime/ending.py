"""End of a process: after a failure, and after a SIGTERM or Ctrl-C, which all ranks obey at one step.

torchrun ends all ranks as soon as one has exited, and its report ends with the rank that left the oldest
error file. So a rank that only suffers from another's failure holds still before it speaks or exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from recsuite.errors import LINES, BrokenLaunchError, LostPeerError, UserError, harmless, signed
from recsuite.runtime.peers import ALL_ANSWER, in_silence, leave_for_torchrun
from recsuite.runtime.process import Recovery, lost_peers, read_launch

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# A rank may say the same as the first one of its machine some seconds later than it.
SAME_MISTAKE_SECONDS = 5.0
# Between the exit of a rank and torchrun's signal to the others lie some tenths of a second, on a busy one
# a second or two. No longer: on other machines this is added to what --timeout and torchrun take.
LOST_PEER_SECONDS = 4.0
# Of torch's exceptions, which are RuntimeErrors otherwise.
LOST_PEER_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError")
LOST_PEER_WORDS = ("gloo/transport", "Application timeout caused pair closure")


def report_mistake(sentence: str) -> None:
    """Say a user's mistake, once for all ranks of a machine that find it, and leave it for torchrun's own
    report.

    The first rank of a machine speaks at once. Another rank speaks only if it is still alive some seconds
    later: then the mistake was its own.
    """
    # Before the wait, in which torchrun may end this rank.
    leave_for_torchrun(sentence, sentence)
    try:
        local_rank = read_launch().local_rank
    except UserError:
        # The mistake may be in the environment itself.
        local_rank = 0
    if local_rank != 0:
        time.sleep(SAME_MISTAKE_SECONDS)
    print(signed(sentence), file=sys.stderr, flush=True)


def report_lost_worker(screen: str) -> None:
    """Show what became of a data worker, on the rank that it belonged to; no traceback could say more."""
    leave_for_torchrun(screen, screen)
    print(harmless(screen, LINES), file=sys.stderr, flush=True)


def name_lost_peers(error: Exception, timeout: float, recovery: Recovery) -> None:
    """Find out, where an exception says only that another rank went away, which one, on which machine, and
    how to continue.

    Raises:
        BrokenLaunchError: with that, from the exception.
        LostPeerError: when all others are there, so that one of them may wait by mistake.
    """
    if not is_lost_peer(error):
        return
    fault = "" if isinstance(error, BrokenLaunchError) else lost_peers()
    # Nobody is lost, so no sentence can explain it: the traceback shows where this rank waited.
    if fault == ALL_ANSWER:
        raise LostPeerError(fault) from error
    if fault:
        fault = in_silence(fault, timeout) if _is_silence(error) else fault
    elif isinstance(error, LostPeerError):
        fault = str(error)
    else:
        return
    raise BrokenLaunchError(f"{fault}. {recovery.after_lost_peer()}") from error


def report_broken_launch(error: BrokenLaunchError) -> None:
    """Say which ranks are lost, once for all ranks of this machine, and leave it for the launcher.

    As with a mistake, a rank that is not the first of its machine speaks only if nobody has ended it.
    """
    if not _is_silence(error):
        time.sleep(LOST_PEER_SECONDS)
    if read_launch().local_rank != 0:
        time.sleep(SAME_MISTAKE_SECONDS)
    print(signed(error), file=sys.stderr, flush=True)
    # After it, so that nothing is marked as said that was not.
    leave_for_torchrun(str(error), str(error), is_said=True)


def record_crash(error: BaseException) -> None:
    """Leave the traceback of an exception for torchrun's report, and let it pass on."""
    if is_lost_peer(error) and not _is_silence(error):
        time.sleep(LOST_PEER_SECONDS)
    leave_for_torchrun(f"{type(error).__name__}: {error}", traceback.format_exc())


def is_lost_peer(error: BaseException) -> bool:
    """Whether an exception says only that another rank went away, or is silent."""
    if isinstance(error, LostPeerError) or type(error).__name__ in LOST_PEER_TYPES:
        return True
    return any(words in str(error) for words in LOST_PEER_WORDS)


def _is_silence(error: BaseException) -> bool:
    """Whether a peer is silent, and not gone: it has left nothing to be read first, and --timeout is over."""
    # The first exception has the library's words; what was made of it may have others.
    while error.__cause__ is not None:
        error = error.__cause__
    text = str(error).lower()
    return "timed out" in text or "timeout" in text


SIGNALS = (signal.SIGTERM, signal.SIGINT)
# What comes so soon after a Ctrl-C is the same one: a shell and a launcher may both pass it on.
SAME_SECONDS = 0.5
ANSWER = (
    "told to end: a checkpoint is written first; a second Ctrl-C ends the training at once, without one\n"
)


class Termination:
    """Ranks vote, step by step, on whether any of them was told to end. Collective: every rank.

    deadline: how long a vote may wait for the slowest rank.
    """

    def __init__(self, deadline: timedelta) -> None:
        import torch.distributed as dist

        # On the CPU, whatever the ranks compute on, and beside the collectives of the training. A group of
        # its own also keeps votes from being taken for other collectives, which need not lie in the same
        # order between them on every rank.
        self._group = dist.new_group(backend="gloo", timeout=deadline)
        self._vote: tuple[torch.Tensor, dist.Work] | None = None
        # The number of the signal that told this process to end.
        self.asked = 0
        self._interrupt: Callable[[int, FrameType | None], object] | None = None

    @contextlib.contextmanager
    def obeyed(self) -> Iterator[None]:
        """Have a SIGTERM or a Ctrl-C be noted here instead of ending this process at once. Not collective.

        A Ctrl-C that has a handler, such as that of KeyboardInterrupt, belongs to the program that called
        this: it raises KeyboardInterrupt after a step, because an exception that comes up inside a callback
        from C++ is lost; a second one calls the handler at once. In another thread than the main one no
        signal is noted, as Python allows no handler to be set there.

        Raises:
            SystemExit: when this process was told to end, and cannot agree on it with ranks that are gone.
            KeyboardInterrupt: see above.
        """
        import torch.distributed as dist

        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.signal(number, self._note) for number in SIGNALS if is_main}
        found = before.get(signal.SIGINT)
        self._interrupt = found if callable(found) else None
        try:
            with contextlib.ExitStack() as stack:
                if is_main and self._interrupt is None:
                    stack.enter_context(_second_ctrl_c_ends(speaks=dist.get_rank() == 0))
                yield
        except SystemExit as ended:
            if self._interrupt and ended.code == status_of(signal.SIGINT):
                raise KeyboardInterrupt from None
            raise
        except Exception as error:
            # A rank that was told to end, too, may have gone first. That is the end that was asked for, and
            # no fault.
            if self.asked and is_lost_peer(error):
                raise SystemExit(status_of(self.asked)) from error
            raise
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agreed(self) -> int:
        """The signal with which any rank had been told to end one call ago, or 0: nobody waits, for ranks
        compute meanwhile.
        """
        import torch
        import torch.distributed as dist

        found = 0
        # It had a whole step to arrive, so waiting for it costs next to nothing.
        if self._vote is not None:
            vote, work = self._vote
            work.wait()
            found = int(vote.item())
        vote = torch.tensor(int(self.asked))
        # The highest number: 0 where nobody was told, and else one signal for all ranks to end with.
        work = dist.all_reduce(vote, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._vote = (vote, work)
        return found

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupt and number == self.asked == signal.SIGINT:
            self._interrupt(number, frame)
        # The first one: a batch system's SIGTERM after a Ctrl-C, or again, changes nothing.
        self.asked = self.asked or number


def status_of(number: int) -> int:
    """The exit status of a process that a signal ended."""
    return 128 + number


@contextlib.contextmanager
def _second_ctrl_c_ends(speaks: bool) -> Iterator[None]:
    """Have any signal to end, after a Ctrl-C, end this process at once, whatever it waits for.

    Python runs a handler between two of its own instructions, so never while a call into a library waits;
    the number of the signal, however, is written to a pipe at once, and a thread reads that.
    """
    reader, writer = os.pipe()
    # As `set_wakeup_fd` asks for: a signal must not wait for room in a pipe.
    os.set_blocking(writer, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=_await_second, args=(reader, speaks), name="ctrl-c", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)


def _await_second(reader: int, speaks: bool) -> None:
    first = None
    while number := os.read(reader, 1):
        now = time.monotonic()
        if first is None and number[0] == signal.SIGINT:
            first = now
            # Past Python's streams, which the main thread may hold while it waits.
            if speaks:
                os.write(2, ANSWER.encode())
        elif first is not None and number[0] in SIGNALS and now - first > SAME_SECONDS:
            os._exit(status_of(signal.SIGINT))
