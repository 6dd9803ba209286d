"""Presets: named groups of values for flags, chosen by --preset.

docs/log/2026-11.md says how their values were chosen, on the validation parts of ml-100k, ml-latest-small and
shops with a planted rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from recsuite.errors import UserError

if TYPE_CHECKING:
    from recsuite.config.config import Config

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


def fitting_preset(config: Config, given: Collection[str]) -> str:
    """Return the name of the preset that fits a configuration; "none" without one.

    given: the names of the flags that were given; some of them rule a preset out.
    """
    data, model = config.data, config.model
    if model.reads_order:
        return "sequence"
    if config.stream.stream:
        return NONE
    if model.in_batch_negatives:
        is_equal = "history_weights" in given and not model.learns_history_weights
        return NONE if is_equal or ("history" in given and data.history == 0) else "ranking"
    return "rating" if model.task == "rating" else NONE


def preset_flags(config: Config, given: Collection[str]) -> dict[str, Any]:
    """Return the flags that the preset of a configuration sets: those that are not given.

    given: names of flags.
    """
    _, values = PRESETS.get(config.model.preset, ("", {}))
    found = {name: value for name, value in values.items() if name not in given}
    if "mlp_dims" in found and config.model.block != "sas":
        # Only blocks of this kind have layers of these widths.
        found["mlp_dims"] = ()
    return found


def with_preset(config: Config, given: Collection[str]) -> Config:
    """Return a configuration with the flags of its preset, checked; see `preset_flags`.

    Raises:
        UserError: when a flag is impossible, or not possible with the preset.
    """
    flags = preset_flags(config, given)
    found = config.replaced(**flags)
    try:
        found.validate()
    except UserError as error:
        named = {name: value for name, value in flags.items() if f"--{name} " in str(error)}
        if not named:
            raise
        raise UserError(
            f"--preset {config.model.preset} sets {in_words(named)}, but {error} Give another value, or "
            "--preset none."
        ) from None
    return found


def in_words(flags: Mapping[str, Any]) -> str:
    """Return flags as on a command line."""
    return " ".join(f"--{name} {as_given(value)}" for name, value in flags.items())
