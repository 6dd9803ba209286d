"""torchrun, but ended by a signal it says so in a sentence and exits with 128 and the number of the signal.

python launcher.py --standalone --nproc_per_node=2 example.py --dump
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main


def launch() -> int:
    """Launch as torchrun does; returns the exit status."""
    try:
        main()
    except SignalException as error:
        print(f"launcher.py: ended by {error.sigval.name}, after the ranks had ended", file=sys.stderr)
        return 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(launch())
