"""Opening of a stream's data where a checkpoint ends. Imports no torch."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

from recsuite.checkpoint.chain import chain_at, chosen_chain
from recsuite.checkpoint.folder import newest_in
from recsuite.checkpoint.format import (
    MANIFEST,
    OTHER_CHECKPOINT,
    STREAM_FILE,
    VOCABULARY,
    parsing,
    read_manifest,
)
from recsuite.config.config import Config
from recsuite.config.sections import CheckpointConfig
from recsuite.datasets.loader import BatchLoader, build_dataloader
from recsuite.datasets.opening import Data, open_data
from recsuite.datasets.preparation.cache import owner_of
from recsuite.datasets.preparation.growing_files import StreamFiles
from recsuite.datasets.preparation.recent import RecentEvents
from recsuite.datasets.preparation.stream_reader import StreamReader
from recsuite.datasets.streams import EMPTY_STREAM_STATE, StreamState
from recsuite.errors import UserError
from recsuite.files import check_file, explained
from recsuite.places import folder_at
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, launch_name, raise_on_all


@contextlib.contextmanager
def reopen_data(
    config: Config,
    context: RuntimeContext,
    trains: bool,
    build: Callable[..., BatchLoader] = build_dataloader,
) -> Iterator[Data]:
    """Call `open_data`, for a stream after the events that a checkpoint has learned.

    It is the one that is continued or read. trains: for a training. Collective: every rank.

    Raises:
        UserError: as `open_data`, and when a checkpoint that is needed cannot be read.
    """
    with open_data(config, context, lambda files: _reader(config, files, context, trains), build) as data:
        yield data


def _reader(config: Config, files: StreamFiles, context: RuntimeContext, trains: bool) -> StreamReader | None:
    """Return the reader of a stream on the first rank of each machine. Collective: every rank."""
    section, state, folders = config.checkpoint, EMPTY_STREAM_STATE, ()
    if section.resume or not trains:
        # One rank reads: on a network file system ranks see a new checkpoint at different moments.
        state, folders = broadcast_from_rank0(lambda: _read(section, trains))
    # The columns are those of one training: two on the same data must not remove each other's.
    is_kept = trains and section.writes
    name = broadcast_from_rank0(
        lambda: str(folder_at(section.save_dir).absolute()) if is_kept else launch_name()
    )
    recent = RecentEvents(config.data.history, keeps_changes=trains and section.inc_dump)
    if context.local_rank == 0:
        # Machines may share the folder of the columns.
        made = StreamReader(config, files, state, recent, owner_of(f"{name} {context.rank}"), trains)
    raise_on_all(lambda: _restore(recent, folders) if context.local_rank == 0 else None)
    return made if context.local_rank == 0 else None


def _read(section: CheckpointConfig, trains: bool) -> tuple[StreamState, tuple[Path, ...]]:
    """Return the state of the stream of a checkpoint, and the folders of its chain."""
    is_newest = trains or section.compact
    folder = folder_at(section.save_dir if is_newest else section.folder_to_load)
    # A --resume without a checkpoint begins a new training.
    if newest_in(folder) is None and not (folder / MANIFEST).is_file():
        return EMPTY_STREAM_STATE, ()
    chain = chain_at(folder) if is_newest else chosen_chain(folder, section.checkpoint, section.until)
    with explained(f"Cannot read {chain.base}", OTHER_CHECKPOINT):
        vocabulary = (chain.base / VOCABULARY).read_text()
    stream = read_manifest(chain.folder).progress.stream
    if stream is None:
        return StreamState(vocabulary if section.compact else ""), ()
    position = stream.position
    # A position of an earlier version does not say how far its files were read.
    is_complete = all(each.read_bytes >= each.bytes for each in position.files.values())
    if stream.begin and not (position.frontier.file and is_complete):
        raise UserError(
            f"{chain.folder} is of a stream of an earlier version, without the position in its files: it can "
            "be served, and not be continued or evaluated. Fix: train again with --move_aside "
            "instead of --resume."
        )
    # To merge deltas no events are needed.
    position = dataclasses.replace(position, files={}) if section.compact else position
    return StreamState(vocabulary, stream.begin, position), chain.folders


def _restore(recent: RecentEvents, folders: tuple[Path, ...]) -> None:
    """Restore what a stream keeps of its learned events from a full checkpoint and its deltas, in order."""
    from safetensors.numpy import load

    for folder in folders:
        entry = next((entry for entry in read_manifest(folder).files if entry.name == STREAM_FILE), None)
        if entry is None:
            continue
        with explained(f"Cannot read {folder / STREAM_FILE}", OTHER_CHECKPOINT):
            check_file(folder, entry)
            content = (folder / STREAM_FILE).read_bytes()
        with parsing(str(folder / STREAM_FILE)):
            recent.add_arrays(load(content))
