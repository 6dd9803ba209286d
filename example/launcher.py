"""torchrun, with an end that fits how the ranks ended: by a signal, by a mistake of the user, or by a fault.

    python launcher.py --standalone --nproc_per_node=2 example.py --dump

A signal makes the exit status 128 and its number, a mistake 2; what torchrun would report of those is left
out, as a rank has said all in one sentence. After a fault torchrun's report follows, with status 1.
"""

from __future__ import annotations

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import parse_args, run

# The statuses with which example.py ends after a mistake of the user, and after a SIGTERM to a rank of any
# machine; the ranks have said all there is to say.
EXPLAINED = (2, 128 + signal.SIGTERM)


def launch() -> int:
    """Launch as torchrun does; returns the exit status."""
    # It would tell of each process that it ends in turn.
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    try:
        run(parse_args(sys.argv[1:]))
    except SignalException as error:
        print(f"launcher.py: ended by {error.sigval.name}, after the ranks had ended", file=sys.stderr)
        return 128 + error.sigval
    except ChildFailedError as error:
        _, first = error.get_first_failure()
        if first.exitcode in EXPLAINED:
            return int(first.exitcode)
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(launch())
