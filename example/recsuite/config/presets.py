"""Presets: named groups of values for flags, chosen by --preset.

docs/log/2026-11.md says how their values were chosen, on the validation parts of ml-100k, ml-latest-small and
shops with a planted rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Values of --preset that are not the name of one: the preset that fits, and none.
AUTO, NONE = "auto", "none"


def as_given(value: Any) -> str:
    """Return the value of a flag as text for the command line."""
    return ",".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)


# name: (sentence, {flag: value}).
PRESETS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "rating": (
        "Ratings: drawn rows, of few ratings with solved biases, held by a decay in proportion to events.",
        {
            "task": "rating",
            "lr": 0.25,
            "dense_lr": 0.0003,
            # Each event shrinks its rows, and each pass all rows alike. The first alone takes too much of
            # rows with many events, the second alone too much of those with few.
            "l2": 0.05,
            "weight_decay": 1.5,
            "decay_power": 1.0,
            "epochs": 12,
            "patience": 3,
        },
    ),
    "solved": (
        "Ratings, up to some ten million: the initial rows are those of a Gaussian model, which is solved "
        "before the first epoch. Epochs follow while they help; they train the rows of histories.",
        {
            "task": "rating",
            "initial_rows": "gaussian",
            "day_feature": "user",
            "embedding_dim": 12,
            # An MLP would learn from training events that the solved rows know too well.
            "mlp_dims": (),
            "lr": 0.005,
            "weight_decay": 0.0,
            "epochs": 4,
            "patience": 1,
        },
    ),
    "ranking": (
        "Ranking of the items that a user may choose, with learned weights of the items of a user history.",
        {
            "task": "ranking",
            "history": 50,
            "history_weights": "learned",
            "embedding_dim": 128,
            "mlp_dims": (),
            "epochs": 4,
            "weight_decay": 0.6,
            "dense_lr": 0.005,
            "dense_weight_decay": 0.0,
        },
    ),
    "sequence": (
        "Ranking of the next item, by a transformer over the order of a user history.",
        {
            "task": "sequence",
            # The next item is that of the user's next event, not of all events until the end.
            "split": "leave_one_out",
            "history": 50,
            "embedding_dim": 64,
            "mlp_dims": (128,),
            "negatives": 1024,
            "epochs": 8,
            # The rate falls to zero, so a better epoch may follow one that is no better.
            "patience": 0,
            "lr": 0.08,
            "weight_decay": 0.6,
            "dense_weight_decay": 0.01,
        },
    ),
}


def in_words(flags: Mapping[str, Any]) -> str:
    """Return flags as on a command line."""
    return " ".join(f"--{name} {as_given(value)}" for name, value in flags.items())
