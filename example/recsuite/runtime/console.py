"""Output of a process: lines that begin with their rank, and the progress of long work.

Long work shows one line in place on a terminal, and elsewhere a line at least every ten seconds:

    with shown():                                 once in a process; without it stages print nothing
        with stage("drawing", 20_000_000, "ratings") as reached:
            reached(4_096)

A thread prints, so one long call into a library shows progress too. A process ends when its output pipe is
closed. Importing this module has no side effects and imports nothing heavy.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import os
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TextIO

from recsuite.errors import LINES, escaped, format_duration

# Exit status of a program that ended because its output pipe was closed.
UNREAD = 128 + signal.SIGPIPE
# Logger of the program's own lines.
LOGGER = "recsuite"
# Warnings of torch about torchrec 1.6 and 1.8, and of fbgemm 1.6 about a torch that its table does not list.
# Every start checks that the two belong together, see `check_versions`.
NOISE = (
    "_fbgemm_torch_compat_table has no entry for",
    "`_get_pg_default_device` will be deprecated",
    "Multiple backends are registered with this ProcessGroup.",
    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead.",
    "Please use DTensor instead and we are deprecating ShardedTensor.",
    "is_fx_tracing will return true for both fx.symbolic_trace and torch.export.",
)
# The logger without a name is the root logger.
NOISY_LOGGERS = ("torch.fx._symbolic_trace", "")
# Erases the line of a terminal, which may show the progress of another rank.
ERASE = "\r\x1b[K"
# Whitespace and terminal colours before the text.
MARGIN = re.compile(r"(\s|\x1b\[\d+m)*")


class TaggedFormatter(logging.Formatter):
    """Begin each line of a message with the tag of its process, if it has one."""

    def __init__(self, tag: str = "") -> None:
        super().__init__()
        self.prefix = f"[{tag}] " if tag else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record; without the tag if its attribute `tagged` is false."""
        text = super().format(record)
        return self.tagged(text) if getattr(record, "tagged", True) else text

    def tagged(self, text: str) -> str:
        """Return a text with the tag on each line."""
        return "\n".join(self.prefix + line for line in text.split("\n"))


class ConsoleHandler(logging.Handler):
    """Write records to the current standard output."""

    # Time of the last line, by the monotonic clock; True if it has no end yet, which `print` may write.
    when = 0.0
    is_open = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record; a failed write raises an error, as it does with `print`."""
        self.when = time.monotonic()
        # In one write: if output is not buffered, the line of another rank could come before its end.
        sys.stdout.write(f"{_erase(sys.stdout)}{self.format(record)}\n")
        sys.stdout.flush()
        self.is_open = False


class TaggedPrint:
    """A `print` that tags the lines of other code like the program's own; it keeps the original `print`."""

    def __init__(self, original: Callable[..., None], tag: str) -> None:
        self.original = original
        self.formatter = TaggedFormatter(tag)
        functools.update_wrapper(self, original)
        # Libraries look up builtins by name; numba does at its import. The original may be another library's.
        self.__module__, self.__name__ = "builtins", "print"

    def __call__(
        self, *values: object, sep: str | None = " ", end: str | None = "\n", **options: Any
    ) -> None:
        """Print to the terminal with the tag, flushed; to any other file unchanged."""
        if options.get("file") not in (None, sys.stdout, sys.stderr):
            self.original(*values, sep=sep, end=end, **options)
            return
        # Joined here, so that every line of a multi-line value is tagged.
        text = self.formatter.tagged((" " if sep is None else sep).join(map(str, values)))
        text = _erase(options.get("file") or sys.stdout) + text
        text += "\n" if end is None else end
        console().when, console().is_open = time.monotonic(), not text.endswith("\n")
        # In one write too.
        self.original(text, **{**options, "end": "", "flush": True})


def is_terminal(stream: TextIO) -> bool:
    """Return True if a stream is a terminal in which a line can be replaced."""
    # A stream of another library may have no more than `write`.
    return getattr(stream, "isatty", bool)() and os.environ.get("TERM", "dumb") != "dumb"


def _erase(stream: TextIO) -> str:
    return ERASE if is_terminal(stream) and not console().is_open else ""


@functools.cache
def console() -> ConsoleHandler:
    """Return the handler of the program's own lines. It is made on first use: an import changes no logger.

    To send the lines elsewhere too, add a handler to the logger "recsuite".
    """
    handler = ConsoleHandler()
    handler.setFormatter(TaggedFormatter())
    log = logging.getLogger(LOGGER)
    log.setLevel(logging.INFO)
    # If a library configures the root logger, each line would appear twice.
    log.propagate = False
    log.addHandler(handler)
    return handler


def say(text: str, tagged: bool = True) -> None:
    """Write a line of the program's own. tagged: with the tag; without it the text may have several lines."""
    console()
    text = escaped(text, "" if tagged else LINES)
    # An attribute of the record: a handler that the user added receives lines without a tag too.
    logging.getLogger(LOGGER).info("%s", text, extra={"tagged": tagged})


def seconds_since_output() -> float:
    """Return the seconds since this process last wrote a line that was tagged or the program's own."""
    return time.monotonic() - console().when


def install_tag(tag: str) -> None:
    """Begin all lines with a tag, including those of `print`; a second tag replaces the first."""
    remove_tag()
    console().setFormatter(TaggedFormatter(tag))
    builtins.print = TaggedPrint(builtins.print, tag)


def remove_tag() -> None:
    """Restore the `print` that `install_tag` replaced."""
    console().setFormatter(TaggedFormatter())
    if isinstance(builtins.print, TaggedPrint):
        builtins.print = builtins.print.original


class _Pipe(io.FileIO):
    """An output stream of this process that may have no reader."""

    def __init__(self, descriptor: int, checkpoint_first: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._checkpoint_first = checkpoint_first

    def write(self, data: Any) -> int:
        """Write, or end this process: a line must not raise while a checkpoint is written."""
        # Not by the default action of SIGPIPE, which would also end this process when it writes to a closed
        # socket. So Python ignores the signal, and raises an exception instead.
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as sink:
                os.dup2(sink.fileno(), self.fileno())
        handler = signal.getsignal(signal.SIGTERM)
        # If SIGTERM has a handler, the training ends after a step and a checkpoint. Its further output is
        # discarded.
        if not (self._checkpoint_first and callable(handler)):
            os._exit(UNREAD)
        handler(int(signal.SIGPIPE), None)
        return len(data)


def end_when_pipe_closes(checkpoint_first: bool = False) -> None:
    """End this program when it writes to a pipe without a reader.

    checkpoint_first: end by the handler of SIGTERM, if there is one.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # The stream was closed before the program began.
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
            continue
        raw = _Pipe(stream.fileno(), checkpoint_first)
        # Buffered, unless the user wants no buffer (python -u): else each write would be a call of the
        # kernel.
        whole: Any = raw if stream.write_through else io.BufferedWriter(raw)
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, stream.errors, **options))


def filter_library_messages() -> None:
    """Filter messages that come on every run and that the user cannot fix, by their first words."""
    # PyTorch's profiler logs its start and end to standard error, at a level of its own above errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for message in NOISE:
        warnings.filterwarnings("ignore", message=re.escape(message))
    for logger in NOISY_LOGGERS:
        logging.getLogger(logger).addFilter(_is_relevant)


def _is_relevant(record: logging.LogRecord) -> bool:
    return not MARGIN.sub("", record.getMessage(), count=1).startswith(NOISE)


# Seconds of silence; the thread checks ten times as often. On a terminal, seconds between two drawings.
INTERVAL_SECONDS, DRAW_SECONDS = 8.0, 0.2
# Seconds that are measured before a rate is told.
MEASURED_SECONDS = 2.0


class Stage:
    """One part of the work: its total, its unit, and how much is done.

    A total of 0 is unknown; with the unit "" only shares of the total are shown.
    """

    def __init__(self, title: str, total: int, unit: str, done: int) -> None:
        self.title, self.total, self.unit = title, total, unit
        self.start = time.monotonic()
        # Amount and time of the first report and of the last one, and the amount between the last two. In one
        # tuple, because another thread reads them.
        self._reports = done, 0.0, done, 0.0, 0

    def reached(self, done: int) -> None:
        """Set the total amount of work done so far."""
        first, first_time, last, _, _ = self._reports
        now = time.monotonic()
        if not first_time:
            # The work before the first report tells nothing about the rate: another process may have done it,
            # and workers start and code is compiled then.
            self._reports = done, now, done, now, 0
        elif done > last:
            self._reports = first, first_time, done, now, done - last

    def estimate(self) -> tuple[float, float] | None:
        """Return the amount in a second and the seconds that are left; None before they are known.

        After a report the work goes on at its mean rate, by as much as was between the last two reports. So
        the seconds left fall with the clock, and rise only while a report is late.
        """
        first, first_time, last, last_time, between = self._reports
        if not self.total or last <= first or last_time - first_time < MEASURED_SECONDS:
            return None
        now = time.monotonic()
        more = min((last - first) * (now - last_time) / (last_time - first_time), between, self.total - last)
        rate = (last + more - first) / (now - first_time)
        return rate, (self.total - last - more) / rate

    def __str__(self) -> str:
        words, known, seconds = [], self.estimate(), time.monotonic() - self.start
        if self.total:
            share = f"{100 * self._reports[2] // self.total}%"
            words.append(f"{share} of {self.total:,} {self.unit}" if self.unit else share)
        if known and self.unit:
            words.append(f"{known[0]:,.{0 if known[0] >= 10 else 2}f} {self.unit}/s")
        if known:
            words.append(_left(known[1]))
        else:
            words.append(f"{format_duration(seconds)} so far" if seconds >= 1 else "begun just now")
        return f"{self.title}: {', '.join(words)}"


def _left(seconds: float) -> str:
    return f"about {format_duration(seconds)} left"


class StageClock:
    """The open stages of this process, and the time of its last line."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.stages: list[Stage] = []
        # Kept: a part of the program may redirect its output.
        self._terminal = sys.stdout if is_terminal(sys.stdout) else None
        self._drawn = ""
        self._ended = threading.Event()
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop printing; after the return no line follows."""
        self._ended.set()
        self._thread.join()
        self._draw("")

    def _run(self) -> None:
        while not self._ended.wait(self.interval / 10 if self._terminal is None else DRAW_SECONDS):
            # The list may change at any moment, but not the copy.
            stages = [*self.stages]
            if self._terminal is not None:
                self._draw(_line(stages) if stages else "")
            elif stages and min(time.monotonic() - self._start, seconds_since_output()) >= self.interval:
                say(_line(stages))

    def _draw(self, line: str) -> None:
        # Nothing is erased twice, for another rank may have drawn there.
        if self._terminal is not None and (line or self._drawn) and not console().is_open:
            width = shutil.get_terminal_size().columns - 1
            self._terminal.write(f"{ERASE}{escaped(line)[:width]}")
            self._terminal.flush()
        self._drawn = line


def _line(stages: Sequence[Stage]) -> str:
    """Return the innermost stage, which is the most specific, and the time left of one around it."""
    *around, innermost = stages
    # The innermost is a part of it, so it lasts as long at least.
    least = (innermost.estimate() or (0.0, 0.0))[1]
    known = ((stage.title, stage.estimate()) for stage in around)
    more = [f"; {title}: {_left(max(found[1], least))}" for title, found in known if found]
    return f"{innermost}{''.join(more[:1])}"


# Global, so that code deep in the work can report without a clock argument.
_clock: ContextVar[StageClock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def showing_progress(interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Show the stages of this process, unless an outer call shows them already."""
    if _clock.get() is not None:
        yield
        return
    clock = StageClock(interval)
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)
        clock.end()


@contextlib.contextmanager
def hiding_progress() -> Iterator[None]:
    """Show no stages of this process, as on ranks whose work is that of another one."""
    token = _clock.set(None)
    try:
        yield
    finally:
        _clock.reset(token)


@contextlib.contextmanager
def stage(
    title: str, total: int = 0, unit: str = "", *, done: int = 0, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """Begin a part of the work, which may be nested. Gives a function to call with the amount done so far.

    total: 0 if unknown; done: before this process began; quiet: print nothing, as on ranks other than 0.
    """
    clock = _clock.get()
    if clock is None or quiet:
        yield lambda done: None
        return
    mine = Stage(title, total, unit, done)
    clock.stages.append(mine)
    try:
        yield mine.reached
    finally:
        clock.stages.remove(mine)
