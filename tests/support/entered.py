"""Enter a group of processes, and run a script in it: python entered.py GROUP SCRIPT [FLAGS]."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
    del sys.argv[:2]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
