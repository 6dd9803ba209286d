"""Flags that a checkpoint was trained with, for loading it or continuing from it.

One rule: flags that decide results (data, model and learning) come from the checkpoint, but a flag on the
command line takes precedence. Another model is refused. At a resume, other data are refused too, and other
learning flags are allowed. Folders, workers and all other flags that change no result come only from the
command line: a checkpoint may come from anywhere, and must not decide where to read and write.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from pathlib import Path
from typing import Any, get_type_hints

from recsuite.checkpoint.chain import (
    ChoiceError,
    chain_at,
    check_complete,
    retrying_if_moved,
    with_suggestion,
)
from recsuite.checkpoint.folder import newest_in
from recsuite.checkpoint.format import CONFIG, FEATURES_FILE, read_config, read_manifest
from recsuite.config.config import Config, extra_data_flags, flag_names, sections
from recsuite.config.presets import as_given, in_words
from recsuite.config.sections import ModelConfig, OptimizerConfig, check_given_flags
from recsuite.errors import UserError, printable, require
from recsuite.files import LARGEST, typed
from recsuite.places import folder_at
from recsuite.runtime.console import say

# Names of the ratings. Another folder does not mean other data: their digest tells.
NAME_FLAGS = ("dataset", "synthetic_ratings", "synthetic_kind")
# Flags for the split of the ratings and their order.
DATA_FLAGS = (
    "split",
    "order",
    "test_fraction",
    "validation_fraction",
    "bad_rows",
    "max_bad_rows",
    "duplicates",
    "seen",
    "new_items",
    "seed",
    "stream",
)
# Data flags that only set a limit: with a higher share of bad rows accepted, the ratings are the same, as
# their digest tells, or there were none. So another value may be given. Without one, the recorded value
# counts, because with the default the same files might be refused. --bad_rows and --duplicates change the
# ratings.
TOLERANCES = ("max_bad_rows",)
# Lists and days are flags of the data, but they decide which tables a model has.
MODEL_FLAGS = (
    *(field.name for field in dataclasses.fields(ModelConfig)),
    "history",
    "day_feature",
    "vocabulary",
)
# Flags for the ids with rows in dynamic tables, for a load too: the ids of a stream cannot be counted anew.
# The places of rows are planned anew, so these flags may change.
TABLE_FLAGS = (
    "capacity",
    "admission_threshold",
    "eviction",
    "ttl",
    "half_life",
    "max_load_factor",
    "max_growth",
)
LEARNING_FLAGS = (
    "epochs",
    "patience",
    "batch_size",
    *(field.name for field in dataclasses.fields(OptimizerConfig)),
    # Both steps give the same results except for rounding, and a training must continue bit for bit.
    "cpu_tables",
    "row_precision",
    # Lists of one length are added up in another order.
    "data_device",
    "precision",
    # A window that was begun is finished with the old length; the next ones use the flag.
    "window",
)


def with_recorded(config: Config, given: Collection[str]) -> Config:
    """Return the flags for a checkpoint to load, compact or resume: those given, else those of its training.

    Prints the flags of its training that are not the defaults. Not collective, so call it on one rank: a
    trainer may write there meanwhile.

    Raises:
        UserError: when the checkpoint is not there or cannot be read, or when flags were given that are not
            those of its model or, for a resume, of its data.
    """
    section = config.checkpoint
    # With both a resume and a load, the flags of the checkpoint that is resumed count.
    folder = folder_at(section.save_dir if section.resume else section.folder_to_load)
    before = with_suggestion(
        folder, lambda: retrying_if_moved(folder, lambda: _read_before(folder, config)), _check_readable
    )
    if before is None:
        return config
    folder, recorded = before[0], _with_global_batch(before[0], checked_flags(*before))
    topic = _topic_in(before[1])
    if topic and config.checkpoint.compact and not config.stream.topic:
        # Deltas are merged without reading it.
        recorded["stream"] = topic
    # Only the brokers may have another address.
    elif topic and topic.rpartition("/")[2] != config.stream.topic.rpartition("/")[2]:
        given_topic = f", not from those of {config.stream.topic}" if config.stream.topic else ""
        raise UserError(
            f"{folder} has learned from the messages of {printable(topic)}{given_topic}. Fix: give --stream "
            f"{printable(topic)}, or another address of this topic."
        )
    data = (*(name for name in DATA_FLAGS if name not in TOLERANCES), *NAME_FLAGS[1:], *extra_data_flags())
    # The progress of a resume is a position in the order of the ratings, so the data are fixed too.
    fixed = (*MODEL_FLAGS, *data) if config.checkpoint.resume else MODEL_FLAGS
    _refuse_others(folder, fixed, recorded, config, given)
    # A compacted checkpoint may be resumed: its flags are written anew.
    is_continued = config.checkpoint.resume or config.checkpoint.compact
    tables = TABLE_FLAGS if is_continued or recorded.get("vocabulary") == "dynamic" else ()
    names = (*MODEL_FLAGS, *tables, *(LEARNING_FLAGS if is_continued else ()))
    _say_differences(folder, (*names, *NAME_FLAGS, *DATA_FLAGS), recorded)
    chosen = _open(names, recorded, given) | data_flags_of(folder, recorded, given)
    if config.loader.local_batch_size:
        chosen.pop("batch_size", None)
    others = {name: value for name, value in chosen.items() if value != config.flags[name]}
    if others:
        say(f"as in the training: {in_words(others)}")
    merged_config = merged(folder, config, others)
    check_given_flags(merged_config.stream.stream, given, merged_config.data.duplicates)
    precision = merged_config.tables.row_precision
    if precision == "fp16" != recorded.get("row_precision", "fp32"):
        # Rounded rows would differ from those of the base of the next delta.
        require(
            not is_continued,
            f"--row_precision fp16 does not fit {folder}, which has rows of fp32; leave it out, or begin "
            "another training with --warm_start",
        )
        say(f"--row_precision fp16 rounds the rows of {folder}")
    return merged_config


def merged(folder: Path, config: Config, recorded: dict[str, Any]) -> Config:
    """Return checked flags together with the flags of a checkpoint.

    Raises:
        UserError: when they cannot be together.
    """
    merged_config = config.replaced(**recorded)
    try:
        merged_config.validate()
    except UserError as error:
        raise UserError(f"Cannot use the flags in {folder / CONFIG}: {error}") from None
    return merged_config


def read_recorded(folder: Path) -> dict[str, Any]:
    """Return the flags of the training that wrote a folder, with any other values written with them.

    Raises:
        UserError: when they are not what was written, or one is of another type than the flag.
    """
    return _with_global_batch(folder, checked_flags(folder, read_config(folder)))


def _with_global_batch(folder: Path, flags: dict[str, Any]) -> dict[str, Any]:
    """Return recorded flags with the batch of all processes: before --local_batch_size it was that of one."""
    if "local_batch_size" in flags or not isinstance(flags.get("batch_size"), int):
        return flags
    return {**flags, "batch_size": flags["batch_size"] * read_manifest(folder).world_size}


def checked_flags(folder: Path, recorded: dict[str, Any]) -> dict[str, Any]:
    """Check flags that were read, as `read_recorded` does, and return them."""
    kinds = {name: kind for section in sections().values() for name, kind in get_type_hints(section).items()}
    flags: dict[str, Any] = {}
    # Older files have no sections, or other ones.
    for name, value in recorded.items():
        is_section = isinstance(value, dict) and (name in sections() or name not in kinds)
        flags.update(value if is_section else {name: value})
    # Flags of other versions of the program have no type here; `_say_differences` names them.
    for name in flags.keys() & kinds.keys():
        try:
            # A flag may be negative.
            typed(kinds[name], flags[name], name, least=-LARGEST)
        except (TypeError, ValueError):
            raise UserError(
                f"{folder / CONFIG} has {printable(repr(flags[name]))} for --{name}, which takes "
                f"{getattr(kinds[name], '__name__', kinds[name])}; load it with the program that wrote it."
            ) from None
    # Like a folder, the address of a topic is not taken from a checkpoint.
    return {name: _plain(bool(value) if name == "stream" else value) for name, value in flags.items()}


def _topic_in(recorded: dict[str, Any]) -> str:
    """Return the address of the topic of a stream in flags by section; empty for a stream of files."""
    section = recorded.get("stream")
    topic = section.get("stream") if isinstance(section, dict) else section
    return topic if isinstance(topic, str) else ""


def _say_differences(folder: Path, names: Collection[str], recorded: dict[str, Any]) -> None:
    """Print the flags that another version of the program wrote or did not write."""
    strange = recorded.keys() - flag_names().keys()
    if strange:
        shown = ", ".join(sorted(printable(name) for name in strange))
        say(f"skipped in {folder / CONFIG}, because this program has no such flag: {shown}")
    missing = [name for name in names if name not in recorded]
    if missing:
        shown = ", ".join(f"--{name}" for name in missing)
        say(f"{folder / CONFIG} does not have {shown}; the given values or the defaults are used")


def _read_before(folder: Path, config: Config) -> tuple[Path, dict[str, Any]] | None:
    """Return the checkpoint of a folder whose flags count, and its flags; None if a training begins."""
    # A --resume without a checkpoint begins a training. A --load after a training reads the checkpoint of
    # that training, so its flags are those of the command line.
    begins = newest_in(folder) is None if config.checkpoint.resume else "train" in config.modes
    if begins:
        return None
    checkpoint = chain_at(folder, config.checkpoint.until).folder
    if (checkpoint / FEATURES_FILE).is_file():
        raise ChoiceError(
            f"{checkpoint} is an export, without optimizer and flags of its training. Fix: --load the folder "
            f"of checkpoints that it was made from, or give --recommend --save_dir {checkpoint} with --user "
            "and --data_path."
        )
    return checkpoint, read_config(checkpoint)


def _check_readable(folder: Path) -> None:
    """Refuse a checkpoint that is not complete, or whose flags cannot be read."""
    # The flags of a suggested checkpoint are read next, so their file must be whole too.
    check_complete(folder)
    read_config(chain_at(folder).folder)


def _refuse_others(
    folder: Path, names: Collection[str], recorded: dict[str, Any], config: Config, given: Collection[str]
) -> None:
    for name in names:
        # Another address may be of the same topic.
        value = bool(config.flags[name]) if name == "stream" else config.flags[name]
        if name in given and name in recorded and _plain(recorded[name]) != value:
            raise UserError(
                f"--{name} {as_given(config.flags[name])} does not fit {folder}, which was trained with "
                f"--{name} {as_given(_plain(recorded[name]))}; leave it out, or train again with "
                "--move_aside instead of --resume."
            )


def data_flags_of(folder: Path, recorded: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the data flags of a training that were not given.

    If other files are given, the flags that name its files are not returned.

    Raises:
        UserError: when nothing names the files, and the training read some that have no name.
    """
    elsewhere = "dataset" in given or "data_path" in given
    if recorded.get("data_path") and not elsewhere:
        raise UserError(
            f"{folder} was trained on the files in {recorded['data_path']}, and no path is taken from a "
            "checkpoint; give --data_path, the folder of the same files."
        )
    names = (*DATA_FLAGS, *extra_data_flags())
    return _open(names if elsewhere else (*NAME_FLAGS, *names), recorded, given)


def _open(names: Collection[str], recorded: dict[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the recorded flags that were not given."""
    return {name: _plain(recorded[name]) for name in names if name not in given and name in recorded}


def _plain(value: Any) -> Any:
    # JSON has no tuples.
    return tuple(value) if isinstance(value, list) else value
