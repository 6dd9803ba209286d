"""Program of each rank of a launch in `test_rebuild.py`: python rebuild_ranks.py DATA.

Opens the data twice, as two modes do, with --rebuild; fails at the first attempt.
"""

from __future__ import annotations

import os
import sys

from recsuite.config.config import Config
from recsuite.runtime.process import cleanup_runtime, end_process, init_runtime


def main() -> None:
    """Open the data twice."""
    context = init_runtime(Config())
    from recsuite.datasets.opening import open_data

    for _ in range(2):
        with open_data(Config.of(data_path=sys.argv[1], rebuild=True), context) as data:
            sys.stdout.write(f"rank {context.rank} opened {data.columns.folder}\n")
            sys.stdout.flush()
    cleanup_runtime()


if __name__ == "__main__":
    main()
    end_process(int(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"))
