"""What becomes of a program when nobody reads its lines any more, as after `| head`: it ends as `yes` does,
quietly and with status 141; a training that dumps ends as after a SIGTERM, with a dump. Importing it changes
nothing.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from typing import Any

UNREAD = 128 + signal.SIGPIPE


class _Pipe(io.FileIO):
    """A stream of this process, which nobody has to read."""

    def __init__(self, descriptor: int, dumps_first: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._dumps_first = dumps_first

    def write(self, data: Any) -> int:
        """Write, or end this process: in the middle of a dump, a line must not raise."""
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nobody:
                os.dup2(nobody.fileno(), self.fileno())
        handler = signal.getsignal(signal.SIGTERM)
        if not (self._dumps_first and callable(handler)):
            os._exit(UNREAD)
        handler(int(signal.SIGPIPE), None)
        return len(data)


def end_when_unread(dumps_first: bool = False) -> None:
    """Have this program end when it writes to a pipe that nobody reads.

    dumps_first: a handler of SIGTERM sees to the end, where there is one.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It was closed before the program began.
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
            continue
        raw = _Pipe(stream.fileno(), dumps_first)
        whole: Any = raw if stream.write_through else io.BufferedWriter(raw)
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, stream.errors, **options))
