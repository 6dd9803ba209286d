"""The flags with which it is learned best what comes next in the order of what a user had.

docs/sequential.md says how they were chosen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from recsuite.config.config import Config
from recsuite.config.sections.model import SAS

# Chosen on the validation parts of ml-100k and ml-latest-small.
SEQUENCES: dict[str, Any] = {
    # What comes next is the next event of a user, and not one of all that come until the end.
    "split": "leave_one_out",
    "history": 50,
    "embedding_dim": 64,
    "mlp_dims": (128,),
    "negatives": 1024,
    # Of all processes together: how well these events are learned depends on it.
    "batch_size": 1024,
    "epochs": 8,
    # The rate falls to nothing: a pass that is no better may have better ones behind it.
    "patience": 0,
    "lr": 0.08,
    "weight_decay": 0.6,
    "dense_weight_decay": 0.01,
}


def sequences(config: Config, given: Collection[str], world_size: int) -> dict[str, Any]:
    """What of `SEQUENCES` a configuration is to take; nothing where something else is learned.

    given: the flags that stay as they are; world_size: how many processes share a step.
    """
    if not config.model.reads_order:
        return {}
    values = {**SEQUENCES, "batch_size": max(1, SEQUENCES["batch_size"] // world_size)}
    found = {name: value for name, value in values.items() if name not in given}
    if config.model.block != SAS and "mlp_dims" in found:
        # Only the other block has layers of its own.
        found["mlp_dims"] = ()
    return found
