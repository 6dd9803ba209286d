"""Run a command, and print the largest peak memory of its processes in KiB: python peak.py COMMAND..."""

from __future__ import annotations

import resource
import subprocess
import sys

subprocess.run(sys.argv[1:], check=True)
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
