"""Loads the newest checkpoint of a folder, and writes it in full into another one, without any training.

python dump_again.py FROM TO
"""

from __future__ import annotations

import sys
from pathlib import Path

from recsuite.checkpoint.folder import newest_in
from recsuite.checkpoint.recorded import read_recorded
from recsuite.config.config import Config
from recsuite.runtime.process import cleanup_runtime, end_process, init_runtime


def main() -> None:
    """Load and dump."""
    source, target = sys.argv[1:]
    newest = newest_in(Path(source))
    assert newest is not None
    config = Config.of(**{**read_recorded(newest), "save_dir": target})
    context = init_runtime(config)

    from example import make_loss, make_model
    from recsuite.checkpoint.chain import chain_at
    from recsuite.checkpoint.restore import restore
    from recsuite.checkpoint.writer import CheckpointWriter
    from recsuite.datasets.opening import open_data
    from recsuite.training.state import build_train_state

    with open_data(config, context) as data:
        train_state = build_train_state(
            data.columns, config, context, make_model, make_loss(data.columns, config)
        )
        manifest = restore(chain_at(newest), train_state, data.columns, context)
        writer = CheckpointWriter(train_state, manifest.run, None, data.columns, config, context)
        writer.write_full(manifest.progress)
        writer.close()
    cleanup_runtime()


if __name__ == "__main__":
    main()
    end_process(0)
