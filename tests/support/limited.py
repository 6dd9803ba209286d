"""A program that may open few files, as `ulimit -n FILES` would have it:
python limited.py FILES SCRIPT ARGS... or python limited.py FILES -m MODULE ARGS...
"""

from __future__ import annotations

import resource
import runpy
import sys

from tests.support.program import run_module

if __name__ == "__main__":
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), most))
    del sys.argv[:2]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        run_module(sys.argv[0])
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
