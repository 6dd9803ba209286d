"""Run a command, and print the largest peak memory of its processes in KiB: python peak.py COMMAND..."""

from __future__ import annotations

import argparse
import resource
import subprocess

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("command", nargs=argparse.REMAINDER)
subprocess.run(parser.parse_args().command or parser.error("COMMAND is missing"), check=True)
print("peak", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
