"""The launcher, with less patience for ranks that do not end, and for a rendezvous that does not answer:
python hasty_launcher.py SECONDS ARGS...
"""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.api import PContext

from recsuite.extras.launcher import __main__ as launcher
from recsuite.runtime.process import end_process

if __name__ == "__main__":
    patience = int(sys.argv.pop(1))
    # After a fault torchrun leaves the others its default of 30 seconds, whatever it is told.
    PContext.close.__defaults__ = (None, patience)
    launcher.PATIENCE = float(patience)
    end_process(launcher.launch())
