"""Watch the anonymous memory of a process, from beside it: python peak.py PID

Prints the bytes that it has now and, when the input ends, the most that it had since.
"""

from __future__ import annotations

import re
import select
import sys
from pathlib import Path

# Short, because a copy of the tables may live for some hundredths of a second.
SECONDS_BETWEEN = 0.002


def main() -> None:
    """Print, watch, print."""
    status = Path(f"/proc/{sys.argv[1]}/status")
    most = anonymous(status)
    print(most, flush=True)
    while not select.select([sys.stdin], [], [], SECONDS_BETWEEN)[0]:
        most = max(most, anonymous(status))
    print(most)


def anonymous(status: Path) -> int:
    """Bytes that no file backs."""
    found = re.search(r"RssAnon:\s*(\d+) kB", status.read_text())
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    main()
