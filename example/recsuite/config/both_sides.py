"""The flags with which ratings are learned best where what came later is no secret: with who had what on both
sides, and rows that are held by a prior. docs/quality.md says how they were chosen.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from recsuite.config.config import Config

# Chosen on the validation parts of ml-100k and ml-latest-small.
BOTH_SIDES = {
    "others": 200,
    "days": "user",
    "lr": 0.15,
    "weight_decay": 0.0,
    "mlp_dims": (),
    "epochs": 20,
    "patience": 10,
}


def both_sides(config: Config, given: Collection[str]) -> dict[str, Any]:
    """What of `BOTH_SIDES` a configuration is to take; nothing where time counts, something else is learned,
    or flags say that lists end before an event.

    given: the flags that stay as they are.
    """
    is_wanted = config.model.task == "rating" and config.data.is_unordered and not config.stream.stream
    if not is_wanted or {"history", "audience"} & {*given}:
        return {}
    if "others" in given and config.data.others == 0:
        return {}
    return {name: value for name, value in BOTH_SIDES.items() if name not in given}
