"""An end for a launcher that waits inside a library.

torchrun asks its store without a deadline, and the store of a machine that is cut off never answers; neither
a signal nor the end of its ranks would reach it then.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from config import Config

# Beyond --timeout: the ranks have that long, to find out by themselves and to say why they end.
PATIENCE = 25.0
# torchrun waits a minute for the machine with the store, before there are ranks.
MEETING_SECONDS = 60.0
LOOK_SECONDS = 1.0


def end_when_stuck(script_args: Sequence[str]) -> None:
    """Have a thread end this launcher when its main thread is inside one call for longer than --timeout, as
    the ranks are given it, and their time to end; the kernel ends ranks that are left with it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    # What is no number is for the ranks to refuse.
    parser.add_argument("--timeout", default=Config.timeout)
    given = parser.parse_known_args(list(script_args))[0].timeout
    timeout = float(given) if str(given).isdigit() else float(Config.timeout)
    threading.Thread(target=_watch, args=(timeout + PATIENCE,), name="stuck", daemon=True).start()


def _watch(limit: float) -> None:
    seen = time.monotonic()
    pulse = _Pulse()
    while True:
        time.sleep(LOOK_SECONDS)
        now = time.monotonic()
        if pulse.was_taken():
            seen = now
        elif now - seen > limit + (0.0 if _has_children() else MEETING_SECONDS):
            _end(now - seen)


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
            ctypes.pythonapi.Py_AddPendingCall(self._note, None)
            return True
        return False


def _has_children() -> bool:
    """Whether ranks were started that have not been waited for."""
    try:
        return bool(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
    except OSError:
        return True


def _end(seconds: float) -> None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    sys.stderr.write(
        "".join(traceback.format_stack(frame))
        + f"launcher.py: waited {seconds:.0f} s for the machine with the rendezvous, which may be cut off; "
        "ends, and its ranks with it\n"
    )
    sys.stderr.flush()
    os._exit(1)
