"""Who looks at a training, as the flags ask for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext
from recsuite.training.callbacks import Callback


@contextlib.contextmanager
def callbacks_of(config: Config, context: RuntimeContext) -> Iterator[list[Callback]]:
    """The callbacks that the configuration asks for, all of them on rank 0; closed with the context.

    Raises:
        UserError: when what is seen cannot be written.
    """
    callbacks: list[Callback] = []
    with contextlib.ExitStack() as stack:
        if context.rank == 0 and config.monitoring.profile:
            from recsuite.monitoring.profiler import Profile

            folder = Path(config.monitoring.report_dir or ".")
            callbacks.append(Profile(config.monitoring.profile, folder, context))
        if context.rank == 0 and config.monitoring.tensorboard:
            from recsuite.monitoring.event_log import EventLog

            log = EventLog(Path(config.monitoring.report_dir, "tensorboard"), config)
            stack.callback(log.close)
            callbacks.append(log)
        yield callbacks
