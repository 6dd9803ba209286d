"""Runs sections one after the other, each a process with a time of its own, and keeps at once what they find.

Knows nothing of GPUs. A section that fails, crashes or takes too long leaves its error beside what it found
until then, and the next one begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any

# Not begun with less left: to import TorchRec alone takes as long.
FEWEST_SECONDS = 10.0
# Of what a process wrote to its errors before it died.
LAST_CHARACTERS = 2_000


@dataclass(frozen=True)
class Section:
    """A part of a measurement: command: prints what it finds in lines of JSON; seconds: after which it is
    ended.
    """

    name: str
    command: Callable[[float], Sequence[str]]
    seconds: float


def run_sections(
    sections: Sequence[Section],
    seconds: float,
    keep: Callable[[str, dict[str, Any]], None],
    fewest_seconds: float = FEWEST_SECONDS,
) -> None:
    """Run all within so many seconds. keep: is given a section's name and all that it has found so far, each
    time that it finds something, and once more, with the seconds that it took, when it has ended.
    """
    end = time.monotonic() + seconds
    for section in sections:
        left = min(section.seconds, end - time.monotonic())
        if left < min(fewest_seconds, section.seconds):
            keep(section.name, {"results": [], "error": f"not begun: the {seconds:.0f} s were used up"})
            continue
        _run(section, left, keep)


def _run(section: Section, seconds: float, keep: Callable[[str, dict[str, Any]], None]) -> None:
    """Run one of them."""
    found: dict[str, Any] = {"results": []}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            section.command(seconds),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # All that it starts is ended with it.
            start_new_session=True,
        )
        try:
            for line in _lines(process, began + seconds):
                result = _parsed(line)
                if "error" in result:
                    found["error"] = result["error"]
                else:
                    found["results"].append(result)
                keep(section.name, found)
            status = process.poll() if process.poll() is not None else _waited(process)
            if status is None:
                found["error"] = f"ended after {seconds:.0f} s, its time"
            elif status != 0:
                found.setdefault("error", f"status {status}")
                found["output"] = _last(errors)
        finally:
            _kill(process)
    found["seconds"] = round(time.monotonic() - began, 1)
    keep(section.name, found)


def _lines(process: subprocess.Popen[str], end: float) -> Any:
    """What a process prints, until it ends or its time is over."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    # A thread: a read waits for as long as the process lives.
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while (line := lines.get(timeout=max(0.0, end - time.monotonic()))) is not None:
            yield line


def _parsed(line: str) -> dict[str, Any]:
    """What a line says; one that is none of ours is kept as it is."""
    try:
        result = json.loads(line)
    except ValueError:
        result = None
    return result if isinstance(result, dict) else {"printed": line.rstrip("\n")}


def _waited(process: subprocess.Popen[str]) -> int | None:
    """The status of a process that closed its output; None where it goes on all the same."""
    try:
        return process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return None


def _kill(process: subprocess.Popen[str]) -> None:
    # Its session may have others in it when it is gone itself.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _last(errors: IO[str]) -> str:
    errors.seek(0)
    return errors.read()[-LAST_CHARACTERS:]
