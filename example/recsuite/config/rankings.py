"""The flags with which it is learned best which item a user chooses.

docs/quality.md says how they were chosen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from recsuite.config.config import Config
from recsuite.config.sections.model import LEARNED

# Chosen on the validation parts of ml-100k and ml-latest-small.
RANKINGS = {
    "history": 50,
    "history_weights": LEARNED,
    "embedding_dim": 128,
    "mlp_dims": (),
    "batch_size": 512,
    "epochs": 4,
    "weight_decay": 0.6,
    "dense_lr": 0.005,
    "dense_weight_decay": 0.0,
}


def rankings(config: Config, given: Collection[str]) -> dict[str, Any]:
    """What of `RANKINGS` a configuration is to take; nothing where labels are predicted, or flags say that
    histories count otherwise.

    given: the flags that stay as they are.
    """
    counts_otherwise = ("history" in given and config.data.history == 0) or (
        "history_weights" in given and not config.model.learns_history_weights
    )
    if config.model.competitors == 0 or config.stream.stream or counts_otherwise:
        return {}
    return {name: value for name, value in RANKINGS.items() if name not in given}
