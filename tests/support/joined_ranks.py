"""Program of each rank that shows what the ranks exchange over: python joined_ranks.py RESULT."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from recsuite.config.config import Config
from recsuite.runtime.process import all_gather_object, cleanup_runtime, end_process, init_runtime


def main() -> None:
    """Add up and exchange tensors on the devices; rank 0 writes the backend and the names of the devices."""
    import torch
    import torch.distributed as dist

    context = init_runtime(Config.of(timeout=60))
    total = torch.ones(1000, device=context.device)
    dist.all_reduce(total)
    others = torch.empty(context.world_size, device=context.device)
    dist.all_to_all_single(others, torch.full_like(others, context.rank))
    assert total.unique().tolist() == [context.world_size]
    assert others.tolist() == [*range(context.world_size)]
    is_gpu = context.device.type == "cuda"
    name = torch.cuda.get_device_name(context.device) if is_gpu else "CPU"
    devices = dict(all_gather_object(lambda: (str(context.device), name)))
    found = {"backend": dist.get_backend(), "devices": devices}
    cleanup_runtime()
    if context.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
    end_process(0)
