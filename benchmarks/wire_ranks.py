"""The example's training on synthetic ratings, as its defaults are: a rank of benchmarks/wire.py.

    wire_ranks.py FOLDER

Also counts, of what a rank sends in a step, the bytes that no other layout of the same step could leave out.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest import mock

from train_here import Here
from train_team import serve, take_answers

from recsuite.config.config import Config
from recsuite.datasets.preparation.cache import open_columns
from recsuite.runtime.process import end_process, init_runtime

# A key of 4 bytes is the shortest that a table of any size can have.
BYTES_OF_A_KEY = 4


class Wired(Here):
    """The example's training, and what it sends."""

    def bytes_needed(self, number: int, batch_size: int) -> dict[str, float]:
        """What this rank has to send in a step: keys, rows, gradients of rows and of the dense part."""
        from torchrec.optim.optimizers import in_backward_optimizer_filter

        from recsuite.sharding.cpu_tables import CpuTables, RowLookup

        (tables,) = (module for module in self.state.model.modules() if isinstance(module, CpuTables))
        rank, ranks = self.context.rank, self.context.world_size
        row_bytes = 4 * tables._embedding_dim
        sent = dict.fromkeys(("keys", "rows", "gradients of rows", "dense gradients"), 0.0)
        looked_up = RowLookup.apply

        def look_up(anchor: Any, owner: Any, request: Any) -> Any:
            wanted = sum(request.sent) - request.sent[rank]
            given = sum(request.received) - request.received[rank]
            sent["keys"] += wanted * BYTES_OF_A_KEY
            sent["rows"] += given * row_bytes
            sent["gradients of rows"] += wanted * row_bytes
            return looked_up(anchor, owner, request)

        with mock.patch.object(RowLookup, "apply", look_up):
            self.steps(number, batch_size)
        dense = [value for _, value in in_backward_optimizer_filter(self.state.model.named_parameters())]
        # Each number of a sum has to leave every rank but one, and to come back to it.
        sent["dense gradients"] = number * 2 * (ranks - 1) / ranks * 4 * sum(value.numel() for value in dense)
        return {name: size / number for name, size in sent.items()}

    def parts(self, number: int, batch_size: int) -> dict[str, float]:
        """Median seconds of the parts of a step, and bytes that a rank has to send in one, by kind."""
        needed = {f"bytes, {name}": size for name, size in self.bytes_needed(number, batch_size).items()}
        return {**super().parts(number, batch_size), **needed}


def main() -> None:
    """Serve orders."""
    answers = take_answers()
    # Made before: the ranks only map the columns.
    config = Config.of(data_path=sys.argv[1])
    columns = open_columns(config)
    context = init_runtime(config)
    import torch.distributed as dist

    def keep_threads(number: int) -> None:
        """What `init_runtime` has set is what is measured."""

    serve(answers, lambda name: Wired(columns, context, config), dist.barrier, keep_threads)


if __name__ == "__main__":
    main()
    end_process(0)
