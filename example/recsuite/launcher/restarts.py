"""Says that torchrun starts ranks again, which it does without a word."""

from __future__ import annotations

import json
import logging
import sys

from recsuite.errors import counted


class RestartNotice(logging.Handler):
    """Takes torchrun's events, which go to a logger, and says each start of ranks but the first.

    nnodes: as torchrun's.
    """

    def __init__(self, nnodes: str) -> None:
        super().__init__()
        self._nnodes = nnodes
        self._attempt = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take an event of torchrun's."""
        event = json.loads(record.getMessage())
        about = json.loads(event["metadata"]["metadata"])
        if not event["name"].endswith(".START") or about["local_rank"] != [0]:
            return
        self._attempt += 1
        if self._attempt > 1:
            ranks, machines = about["role_world_size"][0], about["group_world_size"]
            sys.stderr.write(
                f"launcher.py: the ranks are started again: attempt {self._attempt} on this machine, with "
                f"{counted(ranks, 'rank')} on {counted(machines, 'machine')} of --nnodes {self._nnodes}\n"
            )


def say_restarts(nnodes: str, event_log_handler: str) -> None:
    """Have a line written for each restart, whatever its reason.

    With LOGLEVEL above INFO torchrun records no events, and none is written.
    """
    logging.getLogger(f"torchelastic-events-{event_log_handler}").addHandler(RestartNotice(nnodes))
