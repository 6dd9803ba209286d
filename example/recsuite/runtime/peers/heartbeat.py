"""Each rank shows the others that it lives, and looks whether they and its launcher still do.

The waits of a training have --timeout as their deadline. But while data are prepared or a checkpoint is
written a rank may wait for hours, and some calls into libraries have no deadline at all. A rank that waits
there for a process that was stopped, or for a machine that was cut off, is ended by this thread.
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
from typing import TYPE_CHECKING, Any, NoReturn

from recsuite.errors import signed
from recsuite.runtime.host import stat_fields
from recsuite.runtime.peers.error_file import leave_for_torchrun
from recsuite.runtime.peers.rollcall import ALL_ANSWER, ANSWER_SECONDS, Peers

if TYPE_CHECKING:
    import torch

BEAT_SECONDS = 0.5
# Between the looks of a rank that waits to leave.
LEAVING_SECONDS = 0.02
# Beyond --timeout, so that a wait that ends in time ends.
MARGIN_SECONDS = 0.5
# Beyond --timeout, for calls in which the slowest rank is waited for and then something is done.
CALL_SECONDS = 2.0
# A pipe takes so much at once, whoever reads it.
LONGEST_TEXT = 4096


class Heartbeat:
    """The thread of one rank. timeout: the seconds for which a process may be silent; advice: tells what to
    do when one is lost.

    A peer that is gone is not a silent one: the launcher ends the ranks of its machine, and connections to
    other machines break. A rank that does not wait for any of them may continue for that long.
    """

    def __init__(self, timeout: float, local_rank: int, advice: Callable[[], str] = str) -> None:
        self.timeout = timeout
        self.advice = advice
        self.local_rank = local_rank
        # Of torchrun's kind. Another parent, such as a shell, may end or be stopped as it likes.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._stopped_since: float | None = None
        self._call: tuple[float, str] | None = None
        # Who says which rank it is that is silent.
        self.peers: Peers | None = None
        self._fault = ""
        # Since when a connection to some rank is broken.
        self._gone_since: float | None = None
        self._group: Any = None
        # The collective that is under way, and since when.
        self._round: tuple[torch.Tensor, Any, float] | None = None
        self._is_leaving = False
        self._over = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def within(self, doing: str) -> Iterator[None]:
        """End this process if the block takes much longer than --timeout."""
        self._call = time.monotonic() + self.timeout + CALL_SECONDS, doing
        try:
            yield
        finally:
            # Whoever has an exception to tell of is given the time for it.
            self._call = None

    def begin(self) -> None:
        """Show the other ranks from now on that this one lives. Collective: every rank."""
        import torch.distributed as dist

        # Not gloo is to say that time is up, but this thread.
        deadline = timedelta(seconds=self.timeout + 20 * MARGIN_SECONDS)
        self._group = dist.new_group(backend="gloo", timeout=deadline)

    def fault(self) -> str:
        """Which ranks do not answer, and on which machines, as found already or asked now; takes seconds."""
        return self._fault or (self.peers.fault() if self.peers else "")

    def leave(self) -> None:
        """Wait until every rank is here, however long, or one is gone. Collective: every rank."""
        # Told to the others by the next round; the thread looks more often from now on, so that the end is
        # quick.
        self._is_leaving = True
        if self._group is not None:
            self._over.wait()

    def stop(self) -> None:
        """End the thread; harmless twice."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(LEAVING_SECONDS if self._is_leaving else BEAT_SECONDS):
                self._look_at_launcher()
                # A copy: the main thread may end the block in between.
                call = self._call
                if call is not None and time.monotonic() > call[0]:
                    self._die(f"{call[1]} took longer than --timeout {self.timeout:.0f}")
                gone = self._gone_since
                if gone is not None and time.monotonic() - gone > self.timeout:
                    # Nobody else may tell it to: launchers of several machines do not.
                    fault = self.fault()
                    self._end_without(
                        fault, f"it continued alone for --timeout {self.timeout:.0f} seconds: {fault}"
                    )
                if not self._over.is_set() and self._group is not None and not self._beat():
                    self._over.set()
        finally:
            # Whatever this thread ends by, nobody may wait for it.
            self._over.set()

    def _beat(self) -> bool:
        """One look at the round of all ranks that is under way; whether there is another one to come."""
        import torch
        import torch.distributed as dist

        if self._round is not None:
            all_leave, work, begin = self._round
            # Looked at, not waited for: a thread that waits in gloo could see neither the launcher nor the
            # clock.
            if not work.is_completed():
                self._look_at_silence(time.monotonic() - begin)
                return True
            self._fault = ""
            try:
                work.wait()
            except RuntimeError:
                # A rank is gone. This one may still do what needs no other; see the class.
                self._gone_since = time.monotonic()
                return False
            if all_leave.item():
                return False
        all_leave = torch.tensor(int(self._is_leaving))
        # The least of all: 1 only when every rank is leaving.
        work = dist.all_reduce(all_leave, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._round = (all_leave, work, time.monotonic())
        return True

    def _look_at_silence(self, seconds: float) -> None:
        """Find out who is silent while there is time left, as that takes some; end when there is none."""
        if not self._fault and seconds > max(self.timeout - ANSWER_SECONDS, self.timeout / 2):
            self._fault = self.peers.fault() if self.peers else "a process was stopped"
        # Else the main thread has found out by itself, and says where it waited.
        is_here = not self._end.is_set()
        if self._fault and seconds > self.timeout + MARGIN_SECONDS and is_here:
            self._end_without(self._fault, in_silence(self._fault, self.timeout))

    def _look_at_launcher(self) -> None:
        """End with a launcher that is gone, and end one that was stopped for too long: nothing else would."""
        if not self._launcher:
            return
        # On Linux the kernel has ended this rank by now (`die_with_parent`); other systems have nothing else.
        if os.getppid() != self._launcher:
            os._exit(1)
        now = time.monotonic()
        if state_of(self._launcher) != "T":
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or now
        # The first rank speaks, and ends all of the machine; another one only if that one cannot.
        late = 0.0 if self.local_rank == 0 else CALL_SECONDS
        if now - self._stopped_since > self.timeout + late:
            _say(f"the launcher was stopped for --timeout {self.timeout:.0f} seconds, and is ended")
            # The kernel ends its ranks with it.
            os.kill(self._launcher, signal.SIGKILL)

    def _end_without(self, fault: str, sentence: str) -> NoReturn:
        """End because of ranks that are lost: a sentence says it, where it is known which they are."""
        if self.peers is None or fault == ALL_ANSWER:
            self._die(sentence)
        sentence = f"{sentence}. {self.advice()}"
        # The launcher ends the others meanwhile, and each would say the same.
        time.sleep(0.0 if self.local_rank == 0 else CALL_SECONDS)
        _say(sentence)
        leave_for_torchrun(sentence, sentence, is_said=True)
        os._exit(1)

    def _die(self, sentence: str) -> NoReturn:
        # Where the main thread is, for it cannot say so itself: it waits inside a library.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame))
        leave_for_torchrun(sentence, stack)
        _say(sentence, f"This rank is here, and ends:\n{stack}")
        os._exit(1)


def in_silence(fault: str, timeout: float) -> str:
    """What is said of ranks that do not answer when they have been waited for."""
    return f"a rank has shown no sign of life for --timeout {timeout:.0f} seconds: {fault}"


def state_of(pid: int) -> str:
    """The letter that the kernel has for what a process does; none where it cannot be had."""
    return next(iter(stat_fields(pid)), "")


def _say(sentence: str, explanation: str = "") -> None:
    """Say it past Python's streams, which the main thread may hold; not at all where nobody reads it."""
    text = f"{explanation}{signed(sentence)}\n"
    if select.select([], [2], [], 0)[1]:
        os.write(2, text.encode()[-LONGEST_TEXT:])
