"""torchrun, with an end that fits how the ranks ended: by a signal, by a mistake of the user, or by a fault.

    python launcher.py --standalone --nproc_per_node=2 example.py --dump

A signal makes the exit status 128 and its number, a mistake 2; what torchrun would report of those is left
out, as a rank has said all in one sentence. After a fault torchrun's report follows, with status 1. Launchers
of several machines that cannot find each other any more say so in a sentence, with status 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousTimeoutError,
)
from torch.distributed.run import parse_args, run

from runtime import end_process
from stuck import end_when_stuck

# The statuses with which example.py ends after a mistake of the user, and after a SIGTERM or a Ctrl-C to a
# rank of any machine; the ranks have said all there is to say.
EXPLAINED = (2, 128 + signal.SIGTERM, 128 + signal.SIGINT)


def launch() -> int:
    """Launch as torchrun does; returns the exit status."""
    # The first would tell of each process that it ends in turn, the second that the launcher with the
    # rendezvous ended before this one.
    for name in ("multiprocessing.api", "rendezvous.dynamic_rendezvous"):
        logging.getLogger(f"torch.distributed.elastic.{name}").setLevel(logging.CRITICAL)
    arguments = parse_args(sys.argv[1:])
    if arguments.nnodes != "1":
        # Ranks would meet in a store of a launcher that outlives a restart, and the number of restarts, which
        # keeps attempts apart there, differs between machines. So rank 0 makes a store for each attempt.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    end_when_stuck(arguments.training_script_args)
    try:
        run(arguments)
    except SignalException as error:
        print(f"launcher.py: ended by {error.sigval.name}, after the ranks had ended", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode in EXPLAINED:
            return int(first.exitcode)
        print(error, file=sys.stderr)
        return 1
    except (RendezvousClosedError, RendezvousConnectionError, RendezvousTimeoutError) as error:
        print(f"launcher.py: {_lost_rendezvous(error, arguments)}", file=sys.stderr)
        return 1
    return 0


def _lost_rendezvous(error: Exception, arguments: argparse.Namespace) -> str:
    """What became of the meeting of the launchers, and what to do."""
    if isinstance(error, RendezvousClosedError):
        return (
            "another machine has ended this launch, with or without success; its output says why, and "
            "--resume goes on from the last checkpoint"
        )
    if isinstance(error, RendezvousTimeoutError):
        return (
            f"fewer machines than --nnodes {arguments.nnodes} asks for came to {arguments.rdzv_endpoint} in "
            "time; start one launcher on each, with the same endpoint"
        )
    return (
        f"the launcher at the rendezvous, {arguments.rdzv_endpoint}, has ended or cannot be reached; if it "
        "gives no reason, start again with the address of a machine that is there, and --resume to go on "
        "from the last checkpoint"
    )


if __name__ == "__main__":
    # Python's own end takes a second or two on a busy machine.
    end_process(launch())
