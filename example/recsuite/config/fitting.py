"""The preset that fits a configuration, and the flags that it sets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from recsuite.config.config import Config
from recsuite.config.presets import NONE, PRESETS, in_words
from recsuite.errors import UserError


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
    flags = {name: value for name, value in values.items() if name not in given}
    if "mlp_dims" in flags and config.model.block != "sas":
        # Only blocks of this kind have layers of these widths.
        flags["mlp_dims"] = ()
    return flags


def with_preset(config: Config, given: Collection[str]) -> Config:
    """Return a configuration with the flags of its preset, checked; see `preset_flags`.

    Raises:
        UserError: when a flag is impossible, or not possible with the preset.
    """
    flags = preset_flags(config, given)
    completed = config.replaced(**flags)
    try:
        completed.validate()
    except UserError as error:
        named = {name: value for name, value in flags.items() if f"--{name} " in str(error)}
        if not named:
            raise
        raise UserError(
            f"--preset {config.model.preset} sets {in_words(named)}, but {error} Give another value, or "
            "--preset none."
        ) from None
    return completed
