"""What torchrun does with ranks that have ended: it starts them again, and says nothing of it.

Both are hooks that torchrun has for others: its events go to a logger, its metrics to a handler.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.metrics import MetricData, MetricHandler, configure
from torch.distributed.elastic.multiprocessing.api import SignalException

from errorfile import told_to_end


class Restarts(logging.Handler):
    """Says on each machine that its ranks are started again, whatever the reason. nnodes: as torchrun's."""

    def __init__(self, nnodes: str) -> None:
        super().__init__()
        self._nnodes = nnodes
        self._attempt = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take an event of torchrun's."""
        event = json.loads(record.getMessage())
        if not event["name"].endswith(".START"):
            return
        found = json.loads(event["metadata"]["metadata"])
        self._attempt += found["local_rank"] == [0]
        if found["local_rank"] == [0] and self._attempt > 1:
            sys.stderr.write(
                f"launcher.py: the ranks are started again: attempt {self._attempt} on this machine, with "
                f"{found['role_world_size'][0]} ranks on {found['group_world_size']} machines of --nnodes "
                f"{self._nnodes}\n"
            )


class ToldToEnd(MetricHandler):
    """Ends this launcher, instead of a restart, when its ranks were told to end, on whichever machine.

    log_dir: where torchrun has the error files of ranks.
    """

    def __init__(self, log_dir: Path) -> None:
        self._log_dir, self._begin = log_dir, time.time()

    def emit(self, metric_data: MetricData) -> None:
        """Take a metric of torchrun's, which tells of ranks that ended before it acts on that.

        Raises:
            SignalException: what torchrun raises when it gets that signal itself.
        """
        if metric_data.name.endswith(".failed") and (number := told_to_end(self._log_dir, self._begin)):
            raise SignalException("the ranks were told to end", signal.Signals(number))


def watch_restarts(nnodes: str, event_log_handler: str, log_dir: Path) -> None:
    """Have torchrun tell of restarts, and restart no ranks that were told to end."""
    logging.getLogger(f"torchelastic-events-{event_log_handler}").addHandler(Restarts(nnodes))
    configure(ToldToEnd(log_dir))
