"""Program of each rank of a launch in `test_any_ranks.py`: scripts_on_ranks.py FOLDER NAMES.

Runs each of the scripts as its command line does, with the process group of the launch for all of them.
FOLDER has their data, and gets a report of each.
"""

from __future__ import annotations

import importlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from recsuite.runtime.process import end_process

DYNAMIC = ("--vocabulary", "dynamic", "--capacity", "2000")
# Name, script and flags of each training. All but three have the batch that the number of events gives.
SCRIPTS = {
    "rating": ("example", "--epochs", "1"),
    "stream": ("example", "--stream", "--window", "240d", *DYNAMIC, "--batch_size", "100"),
    # Items of a history add to their own scores.
    "ranking": ("example", "--task", "ranking", "--seen", "allow", "--epochs", "1", "--embedding_dim", "16"),
    # Two groups of negatives, which begin and end in the middle of a rank's events.
    "retrieval": (
        *("retrieval", "--train", *DYNAMIC, "--seen", "allow", "--epochs", "1", "--batch_size", "301"),
    ),
    # Of eight ranks the last one has no events.
    "few": ("example", "--task", "ranking", "--preset", "none", "--epochs", "1", "--batch_size", "49"),
    "sequential": ("sequential", "--train", "--epochs", "1", "--embedding_dim", "16", "--negatives", "64"),
    "ctr": ("ctr", "--epochs", "1", "--embedding_dim", "8"),
    "multitask": ("multitask", "--epochs", "1", "--embedding_dim", "8"),
}
DATA = {"ctr": "clicks", "multitask": "shop"}


def main() -> None:
    """Run the scripts of the names."""
    folder, examples = Path(sys.argv[1]), Path(__file__).parents[2] / "example"
    sys.path.append(str(examples))
    # The name of the machine may have no address.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    for name in sys.argv[2:]:
        script, *flags = SCRIPTS[name]
        data, report = folder / DATA.get(script, "ratings"), folder / f"{name} {dist.get_world_size()}"
        common = ("--data_path", str(data), "--report_dir", str(report), "--num_workers", "0")
        status = importlib.import_module(script).main([*flags, *common])
        if status:
            end_process(status)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    end_process(0)
