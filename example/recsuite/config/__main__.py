"""Check a command line, and exit; with status 2 after an error message.

python -m recsuite.config --epochs 0
"""

from __future__ import annotations

import sys

from recsuite.config.parser import parse_given
from recsuite.errors import UserError, with_script_name
from recsuite.runtime.console import end_when_pipe_closes

if __name__ == "__main__":
    # The reader of `--help`, such as head, may close the pipe early.
    end_when_pipe_closes()
    try:
        parse_given()
    except UserError as error:
        print(with_script_name(error), file=sys.stderr)
        sys.exit(2)
