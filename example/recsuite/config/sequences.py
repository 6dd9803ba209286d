"""The flags with which it is learned best what comes next in the order of what a user had.

docs/sequential.md says how they were chosen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from recsuite.config.config import Config
from recsuite.config.sections.model import SAS

# Chosen on the validation parts of ml-100k and ml-latest-small.
SEQUENCES = {
    # What comes next is the next event of a user, and not one of all that come until the end.
    "split": "leave_one_out",
    "history": 50,
    "embedding_dim": 64,
    "mlp_dims": (128,),
    "negatives": 1024,
    "batch_size": 1024,
    "epochs": 8,
    # The rate falls to nothing: a pass that is no better may have better ones behind it.
    "patience": 0,
    "lr": 0.08,
    "weight_decay": 0.6,
    "dense_weight_decay": 0.01,
}


def sequences(config: Config, given: Collection[str]) -> dict[str, Any]:
    """What of `SEQUENCES` a configuration is to take; nothing where something else is learned.

    given: the flags that stay as they are.
    """
    if not config.model.reads_order:
        return {}
    found = {name: value for name, value in SEQUENCES.items() if name not in given}
    if config.model.block != SAS and "mlp_dims" in found:
        # Only the other block has layers of its own.
        found["mlp_dims"] = ()
    return found
