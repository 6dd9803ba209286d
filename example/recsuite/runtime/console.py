"""Output of a process: lines that begin with their rank, and the progress of long work.

Long work shows a bar on a terminal, elsewhere a line before ten seconds of silence are over:

    with shown():                                 once in a process; without it stages say nothing
        with stage("drawing", 20_000_000, "ratings") as reached:
            reached(4_096)

A thread speaks, so work that is one long call into a library is not silent either. A process ends when nobody
reads its output. Importing this changes nothing, and imports nothing heavy.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from recsuite.errors import LINES, duration, harmless

# The status of a program that ended because nobody read its lines.
UNREAD = 128 + signal.SIGPIPE
# Of the program's own lines.
LOGGER = "recsuite"
# What torchrec 1.6 and 1.8 make torch say of torchrec's own code, and fbgemm 1.6 of a torch that its table
# does not know: that the two belong together is checked at every start, see `versions.py`.
NOISE = (
    "_fbgemm_torch_compat_table has no entry for",
    "`_get_pg_default_device` will be deprecated",
    "Multiple backends are registered with this ProcessGroup.",
    "`broadcast_buffers` is deprecated. Use `forward_sync_buffers` instead.",
    "Please use DTensor instead and we are deprecating ShardedTensor.",
    "is_fx_tracing will return true for both fx.symbolic_trace and torch.export.",
)
# The one without a name is that of all others.
NOISY_LOGGERS = ("torch.fx._symbolic_trace", "")
# What stands before the words: lines, and the colours of a terminal.
MARGIN = re.compile(r"(\s|\x1b\[\d+m)*")


class TaggedFormatter(logging.Formatter):
    """Begins each line of a message with who says it, where that is known."""

    def __init__(self, tag: str = "") -> None:
        super().__init__()
        self.prefix = f"[{tag}] " if tag else ""

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter`; a record whose attribute `tagged` is false stays as it is."""
        text = super().format(record)
        return self.tagged(text) if getattr(record, "tagged", True) else text

    def tagged(self, text: str) -> str:
        """A text as it is shown."""
        return "\n".join(self.prefix + line for line in text.split("\n"))


class ConsoleHandler(logging.Handler):
    """Writes records to what is standard output at that moment."""

    # The moment of the last line, by the monotonic clock.
    when = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`; what a stream refuses is an error here, as it is for `print`."""
        self.when = time.monotonic()
        # Of one piece: where output is not buffered, the line of another rank could come before its end.
        sys.stdout.write(f"{self.format(record)}\n")
        sys.stdout.flush()


class TaggedPrint:
    """A `print` for the lines of others, tagged like the program's own; it keeps the one it stands in for."""

    def __init__(self, original: Callable[..., None], tag: str) -> None:
        self.original = original
        self.formatter = TaggedFormatter(tag)

    def __call__(
        self, *values: object, sep: str | None = " ", end: str | None = "\n", **options: Any
    ) -> None:
        """Print to the terminal with the tag, flushed; to any other file as it is."""
        if options.get("file") not in (None, sys.stdout, sys.stderr):
            self.original(*values, sep=sep, end=end, **options)
            return
        # Joined here, so that the second line of a value with several is tagged too.
        text = self.formatter.tagged((" " if sep is None else sep).join(map(str, values)))
        console().when = time.monotonic()
        # In one piece too.
        self.original(text + ("\n" if end is None else end), **{**options, "end": "", "flush": True})


@functools.cache
def console() -> ConsoleHandler:
    """What writes the program's own lines, made when it is first needed: an import changes no logger.

    Whoever wants the lines elsewhere too adds a handler to the logger "recsuite".
    """
    handler = ConsoleHandler()
    handler.setFormatter(TaggedFormatter())
    log = logging.getLogger(LOGGER)
    log.setLevel(logging.INFO)
    # A library that configures the root logger would have each line twice.
    log.propagate = False
    log.addHandler(handler)
    return handler


def say(text: str, tagged: bool = True) -> None:
    """Write a line of the program's own; tagged: whether it begins with who says it. Without that it may be
    several.
    """
    console()
    text = harmless(text, "" if tagged else LINES)
    # An attribute of the record: a handler that somebody has added receives lines without a tag too.
    logging.getLogger(LOGGER).info("%s", text, extra={"tagged": tagged})


def seconds_of_silence() -> float:
    """Since the last line of this process that was tagged or the program's own."""
    return time.monotonic() - console().when


def install_tag(tag: str) -> None:
    """Have all lines begin with a tag, also those of `print`; a second one replaces the first."""
    remove_tag()
    console().setFormatter(TaggedFormatter(tag))
    builtins.print = TaggedPrint(builtins.print, tag)


def remove_tag() -> None:
    """Give back the `print` that `install_tag` found."""
    console().setFormatter(TaggedFormatter())
    if isinstance(builtins.print, TaggedPrint):
        builtins.print = builtins.print.original


class _Pipe(io.FileIO):
    """A stream of this process, which nobody has to read."""

    def __init__(self, descriptor: int, checkpoint_first: bool) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._checkpoint_first = checkpoint_first

    def write(self, data: Any) -> int:
        """Write, or end this process: a line must not raise while a checkpoint is written."""
        # Not by the signal's own action, which would also end this process when it writes to any socket
        # whose other end has gone; Python ignores it therefore, and has an exception instead.
        try:
            return super().write(data)
        except BrokenPipeError:
            with open(os.devnull, "wb") as nobody:
                os.dup2(nobody.fileno(), self.fileno())
        handler = signal.getsignal(signal.SIGTERM)
        # Where a handler takes SIGTERM, the training ends after a step and a checkpoint. It may still print:
        # into nothing from now on.
        if not (self._checkpoint_first and callable(handler)):
            os._exit(UNREAD)
        handler(int(signal.SIGPIPE), None)
        return len(data)


def end_when_unread(checkpoint_first: bool = False) -> None:
    """Have this program end when it writes to a pipe that nobody reads.

    checkpoint_first: a handler of SIGTERM sees to the end, where there is one.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            # It was closed before the program began.
            setattr(sys, name, io.TextIOWrapper(io.FileIO(os.devnull, "w")))
            continue
        raw = _Pipe(stream.fileno(), checkpoint_first)
        # A buffer between, unless the user wants none (python -u): else each line would be a call of the
        # kernel.
        whole: Any = raw if stream.write_through else io.BufferedWriter(raw)
        options = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(whole, stream.encoding, stream.errors, **options))


def quieten_libraries() -> None:
    """Filter, by the words they begin with, messages that come on every run and that no user can mend."""
    # PyTorch's profiler says on standard error that it begins and ends, at a level of its own above errors.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    for message in NOISE:
        warnings.filterwarnings("ignore", message=re.escape(message))
    for logger in NOISY_LOGGERS:
        logging.getLogger(logger).addFilter(_is_no_noise)


def _is_no_noise(record: logging.LogRecord) -> bool:
    return not MARGIN.sub("", record.getMessage(), count=1).startswith(NOISE)


# Of silence; what looks whether they are over comes by ten times as often.
INTERVAL_SECONDS = 8.0


class Stage:
    """One part of the work: how much there is, in which unit, and how much is done; 0 is not known."""

    def __init__(self, title: str, total: int, unit: str, done: int) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, done
        # It says nothing of the rate.
        self.done_before = done
        self.start = time.monotonic()
        self.bar: Any = None
        # A log would hold every state of the bar, one after the other.
        if sys.stderr.isatty():
            from tqdm import tqdm

            # A bar needs an end.
            shape = {} if total else {"bar_format": "{desc}: {elapsed}"}
            self.bar = tqdm(
                total=total, desc=title, unit=f" {unit}", unit_scale=True, leave=False, initial=done, **shape
            )

    def reached(self, done: int) -> None:
        """So much is done in all."""
        if self.bar is not None:
            self.bar.update(done - self.done)
        self.done = done

    def __str__(self) -> str:
        seconds = time.monotonic() - self.start
        now = self.done - self.done_before
        so_far = f"{duration(seconds)} so far" if seconds >= 1 else "begun just now"
        if not self.total or not now:
            return f"{self.title}: {so_far}"
        left, rate = (self.total - self.done) * seconds / now, now / seconds
        return (
            f"{self.title}: {self.done:,} of {self.total:,} {self.unit}, {rate:,.{0 if rate >= 10 else 2}f} "
            f"{self.unit}/s, about {duration(left)} left"
        )


class Clock:
    """The stages that this process is in, and when it last said something."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self.stages: list[Stage] = []
        self._ended = threading.Event()
        self._start = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Say nothing any more; returns when nothing can follow."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.interval / 10):
            # The list may change at any moment, but not the copy. Of nested stages the innermost knows most.
            for innermost in self.stages[-1:]:
                if innermost.bar is not None:
                    innermost.bar.refresh()
                elif min(time.monotonic() - self._start, seconds_of_silence()) >= self.interval:
                    say(str(innermost))


# So that code deep in the work can report without being handed a clock.
_clock: ContextVar[Clock | None] = ContextVar("clock", default=None)


@contextlib.contextmanager
def shown(interval: float = INTERVAL_SECONDS) -> Iterator[None]:
    """Have the stages of this process be seen, unless somebody around sees to it already."""
    if _clock.get() is not None:
        yield
        return
    clock = Clock(interval)
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)
        clock.end()


@contextlib.contextmanager
def stage(
    title: str, total: int = 0, unit: str = "", *, done: int = 0, quiet: bool = False
) -> Iterator[Callable[[int], None]]:
    """A part of the work, which may lie in another one; gives what is to be called with how much is done.

    total: 0 where that is not known; done: before this process began; quiet: as ranks beside 0 are.
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
        if mine.bar is not None:
            mine.bar.close()
