"""An end for a launcher that waits inside a library.

torchrun asks its store without a deadline, and the store of a machine that is cut off never answers; neither
a signal nor the end of its ranks would reach it then.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from recsuite.config.config import Config
from recsuite.launcher.console import say
from recsuite.runtime.peers.heartbeat import state_of

# Beyond --timeout: the ranks have that long, to find out by themselves and to say why they end.
PATIENCE = 25.0
# Beyond --timeout, so that the others say first which rank it is.
STOPPED_SECONDS = 3.0
# torchrun waits a minute for the machine with the store, before there are ranks.
MEETING_SECONDS = 60.0
LOOK_SECONDS = 1.0


def end_when_stuck(script_args: Sequence[str]) -> None:
    """Have a thread end this launcher when its main thread is inside one call for longer than --timeout, as
    the ranks are given it, and their time to end; the kernel ends ranks that are left with it. It also
    ends a rank that was stopped for --timeout: it may be alone on its machine, with nobody to notice.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # The ranks refuse what is not a number.
    parser.add_argument("--timeout", default=Config().runtime.timeout)
    given = parser.parse_known_args(list(script_args))[0].timeout
    # A script of the user's may mean something else by --timeout.
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
    """Whether the main thread runs: it does what Python is asked to do between two of its instructions.

    A signal would do too, but would interrupt the calls of a thread that does well.
    """

    def __init__(self) -> None:
        self._is_taken = True
        self._note = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._take)

    def _take(self, _: int | None) -> int:
        self._is_taken = True
        return 0

    def was_taken(self) -> bool:
        """Whether the main thread has run since the last time that this said so."""
        if self._is_taken:
            self._is_taken = False
            # Asked again only when the last one was done: requests would pile up behind a main thread that is
            # stuck.
            ctypes.pythonapi.Py_AddPendingCall(self._note, None)
            return True
        return False


def _children() -> list[int]:
    """The ranks that were started and have not been waited for; none where there is no such list."""
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    except OSError:
        return []


def _end(seconds: float) -> None:
    # It shows which call of torchrun's does not return.
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    sys.stderr.write("".join(traceback.format_stack(frame)))
    say(
        f"waited {seconds:.0f} s for the machine with the rendezvous, which may be cut off; this "
        "launcher ends, and its ranks end with it"
    )
    os._exit(1)
