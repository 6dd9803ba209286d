"""Who looks at a training, as the flags ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from recsuite.config.config import Config
from recsuite.config.runtime import MonitoringConfig
from recsuite.monitoring.stopwatch import Stopwatch
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Callback


@contextlib.contextmanager
def observing(config: Config, context: RuntimeContext) -> Iterator[tuple[Stopwatch, list[Callback]]]:
    """A stopwatch for this rank, and the callbacks of its training: the stopwatch first and then, on rank 0,
    what the flags ask for. Closed with the context; not collective.

    Raises:
        UserError: before anything is trained, when what is seen could not be written.
    """
    stopwatch = Stopwatch()
    callbacks: list[Callback] = [stopwatch]
    with contextlib.ExitStack() as stack:
        if context.rank == 0:
            callbacks += _asked_for(config.monitoring, config, context, stack)
        yield stopwatch, callbacks


def _asked_for(
    flags: MonitoringConfig, config: Config, context: RuntimeContext, stack: contextlib.ExitStack
) -> Iterator[Callback]:
    if flags.report_dir:
        from recsuite.monitoring.report import make_report_dir

        make_report_dir(config)
    if flags.profile:
        from recsuite.monitoring.profiler import Profile

        yield Profile(flags.profile, Path(flags.report_dir or "."), context)
    if flags.tensorboard:
        from recsuite.monitoring.event_log import EventLog

        log = EventLog(Path(flags.report_dir, "tensorboard"), config)
        stack.callback(log.close)
        yield log
