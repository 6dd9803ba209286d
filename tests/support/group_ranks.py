"""Ranks in a process group of the calling program, in a thread, as another launcher starts them.

python group_ranks.py RESULTS RANKS STOP_AFTER FLAGS...

Without the variables of a launcher. Trains with `train_worker` of ray_train.py; after STOP_AFTER epochs, if
not 0, rank 1 requests the end. RESULTS gets for each rank the metrics, the exit status, and what is left.
"""

from __future__ import annotations

import builtins
import json
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.append(str(Path(__file__).resolve().parents[2] / "example"))


def train(rank: int, ranks: int, folder: str, stop_after: int, flags: list[str]) -> None:
    """One process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    found: dict[str, Any] = {"metrics": [], "status": 0}
    printed = builtins.print
    thread = threading.Thread(target=run, args=(flags, stop_after, found))
    thread.start()
    thread.join()
    found["keeps_print"] = builtins.print is printed
    # The group works as before.
    everyones: list[Any] = [None] * ranks
    dist.all_gather_object(everyones, found)
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(everyones))
    dist.destroy_process_group()


def run(flags: list[str], stop_after: int, found: dict[str, Any]) -> None:
    """Train in this thread."""
    import ray_train

    def must_stop() -> bool:
        return dist.get_rank() == 1 and 0 < stop_after == len(found["metrics"])

    try:
        ray_train.train_worker(flags, found["metrics"].append, must_stop)
    except SystemExit as ended:
        found["status"] = ended.code


if __name__ == "__main__":
    results, ranks, stop_after, *flags = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (int(ranks), folder, int(stop_after), flags), nprocs=int(ranks))
        Path(results).write_text((Path(folder) / "results.json").read_text())
