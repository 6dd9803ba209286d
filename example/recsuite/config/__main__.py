"""Checks a command line and exits, with status 2 after a sentence on what is wrong with it.

python -m recsuite.config --epochs 0
"""

from __future__ import annotations

import sys

from recsuite.config.parser import parse_args
from recsuite.errors import UserError, signed
from recsuite.runtime.console import end_when_unread

if __name__ == "__main__":
    # `--help` may be read by a program that closes its end early, such as head.
    end_when_unread()
    try:
        parse_args()
    except UserError as error:
        print(signed(error), file=sys.stderr)
        sys.exit(2)
