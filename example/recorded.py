"""The flags with which a dump was trained, for whoever goes on with it: data and model must be the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from config import NEWEST, Config
from manifest import read_config
from save_dir import newest_in, state_at

# Which ratings, and in what order they stand.
DATA_FLAGS = (
    "dataset",
    "data_path",
    "cache_dir",
    "synthetic_ratings",
    "split",
    "test_fraction",
    "validation_fraction",
    "bad_rows",
    "seed",
)
MODEL_FLAGS = ("task", "embedding_dim", "mlp_dims", "history")


def with_recorded(config: Config) -> Config:
    """The flags for loading, folding or resuming a state, those of its training where none were given.

    Says which they are. Not collective, so let one rank decide: a training may go on there.

    Raises:
        UserError: when the state that --load names is not there or cannot be read.
    """
    named = config.load not in ("", NEWEST)
    folder = Path(config.load if named else config.save_dir)
    if not named and newest_in(folder) is None:
        # A training that begins here, or a load that will say so.
        return config
    recorded = read_config(state_at(folder, config.until).folder)
    chosen = {name: _plain(recorded[name]) for name in MODEL_FLAGS if _is_open(name, config, recorded)}
    chosen |= data_flags_of(recorded, config)
    if chosen:
        shown = " ".join(f"--{name} {_shown(value)}" for name, value in chosen.items())
        print(f"as in the training: {shown}")
    return dataclasses.replace(config, **chosen)


def data_flags_of(recorded: dict[str, Any], config: Config) -> dict[str, Any]:
    """The data flags of a training, as far as they were not given; none where other data are named."""
    if config.dataset or config.data_path:
        return {}
    return {name: recorded[name] for name in DATA_FLAGS if _is_open(name, config, recorded)}


def _is_open(name: str, config: Config, recorded: dict[str, Any]) -> bool:
    """Whether a flag was not given, and was in the training."""
    default = getattr(Config, name)
    return getattr(config, name) == default and name in recorded and _plain(recorded[name]) != default


def _plain(value: Any) -> Any:
    # JSON has no tuples.
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
