"""Check a command line, and exit; with status 2 after an error message.

python -m recsuite.config --epochs 0
"""

from __future__ import annotations

import sys

from recsuite.config.parser import parse_given
from recsuite.errors import UserError, signed
from recsuite.runtime.console import end_when_unread

if __name__ == "__main__":
    # The reader of `--help`, such as head, may close the pipe early.
    end_when_unread()
    try:
        # Without the warning about former names of flags, which the run itself prints.
        parse_given()
    except UserError as error:
        print(signed(error), file=sys.stderr)
        sys.exit(2)
