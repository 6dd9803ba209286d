"""The flags with which a checkpoint was trained, for whoever loads it or goes on with it.

One rule: what decides results, which is data, model and learning, is as in the checkpoint; a flag that is
given on the command line goes first. Another model is refused, and so are other data at a resume; other
learning flags are allowed there. Folders, workers and all else that changes no result come from the command
line alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any

from config import NEWEST, Config, validate
from errors import UserError
from manifest import read_config
from save_dir import newest_in, state_at

# Where the ratings are. Another place is no other data: their digest tells.
PLACE_FLAGS = ("dataset", "data_path", "cache_dir", "synthetic_ratings")
# Which ratings are for what, and in what order they stand.
DATA_FLAGS = ("split", "test_fraction", "validation_fraction", "bad_rows", "max_bad_rows", "seed")
MODEL_FLAGS = ("task", "embedding_dim", "mlp_dims", "history")
LEARNING_FLAGS = (
    "epochs",
    "patience",
    "batch_size",
    "lr",
    "dense_lr",
    "weight_decay",
    "dense_weight_decay",
)


def with_recorded(config: Config, given: Collection[str]) -> Config:
    """The flags for loading, folding or resuming a state: those given, and of its training where none were.

    Says which those are that are not the defaults. Not collective, so let one rank decide: a training may go
    on there.

    Raises:
        UserError: when the state is not there or cannot be read, or when flags were given that are not those
            of its model or, for a resume, of its data.
    """
    folder = _trained_before(config)
    if folder is None:
        return config
    recorded = read_config(folder)
    fixed = (*MODEL_FLAGS, *DATA_FLAGS, "synthetic_ratings") if config.resume else MODEL_FLAGS
    _refuse_others(folder, fixed, recorded, config, given)
    names = (*MODEL_FLAGS, *(LEARNING_FLAGS if config.resume else ()))
    chosen = _open(names, recorded, given) | data_flags_of(recorded, given)
    others = {name: value for name, value in chosen.items() if value != getattr(config, name)}
    if others:
        shown = " ".join(f"--{name} {_shown(value)}" for name, value in others.items())
        print(f"as in the training: {shown}")
    merged = dataclasses.replace(config, **others)
    validate(merged)
    return merged


def _trained_before(config: Config) -> Path | None:
    """The state whose flags count; None where a training begins, or nothing is there, as a load will say."""
    if "train" in config.modes and not config.resume:
        return None
    if config.load not in ("", NEWEST) and not config.resume:
        return state_at(Path(config.load), config.until).folder
    save_dir = Path(config.save_dir)
    return None if newest_in(save_dir) is None else state_at(save_dir, config.until).folder


def _refuse_others(
    folder: Path, names: Collection[str], recorded: dict[str, Any], config: Config, given: Collection[str]
) -> None:
    for name in names:
        if name in given and name in recorded and _plain(recorded[name]) != getattr(config, name):
            raise UserError(
                f"--{name} {_shown(getattr(config, name))} does not fit {folder}, which was trained with "
                f"--{name} {_shown(_plain(recorded[name]))}; leave it out, or train anew without --resume."
            )


def data_flags_of(recorded: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The data flags of a training, as far as they were not given; where other files are named, not those
    that say where its files were.
    """
    elsewhere = "dataset" in given or "data_path" in given
    return _open(DATA_FLAGS if elsewhere else (*PLACE_FLAGS, *DATA_FLAGS), recorded, given)


def _open(names: Collection[str], recorded: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """The flags that were not given, and are recorded."""
    return {name: _plain(recorded[name]) for name in names if name not in given and name in recorded}


def _plain(value: Any) -> Any:
    # JSON has no tuples.
    return tuple(value) if isinstance(value, list) else value


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
