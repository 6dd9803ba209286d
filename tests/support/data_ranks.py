"""Program of each rank of a launch in `test_data.py`: python data_ranks.py DATA OTHER_DATA.

Says how many digests it took to open the data, and what is said of two machines with different data.
"""

from __future__ import annotations

import dataclasses
import sys
from unittest import mock

from recsuite import files
from recsuite.config.config import Config
from recsuite.errors import UserError
from recsuite.runtime.process import cleanup_runtime, end_process, init_runtime


def main() -> None:
    """Open the same data on one machine, and different data on two."""
    context = init_runtime(Config())
    from recsuite.datasets.opening import open_data

    config = Config.of(data_path=sys.argv[1])
    with (
        mock.patch.object(files, "digest_of", side_effect=files.digest_of) as digest_of,
        open_data(config, context),
    ):
        sys.stdout.write(f"digests of rank {context.rank}: {digest_of.call_count}\n")
    # Two machines are one rank each, which is the first one of its own.
    alone = dataclasses.replace(context, local_rank=0, local_world_size=1)
    try:
        with open_data(config.replaced(data_path=sys.argv[1 + context.rank]), alone):
            sentence = "no difference was found"
    except UserError as error:
        sentence = str(error)
    sys.stdout.write(f"rank {context.rank}: {sentence}\n")
    sys.stdout.flush()
    cleanup_runtime()


if __name__ == "__main__":
    main()
    end_process(0)
