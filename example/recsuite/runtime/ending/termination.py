"""SIGTERM and Ctrl-C to ranks that must end together: whoever was told to, all learn of it at one step."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist

from recsuite.runtime.ending.failures import is_lost_peer

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
