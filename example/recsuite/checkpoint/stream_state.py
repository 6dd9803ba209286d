"""Opening of a stream's data with the stream state of a checkpoint. Imports no torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from recsuite.checkpoint.chain import chain_at
from recsuite.checkpoint.folder import newest_in
from recsuite.checkpoint.format import OTHER_CHECKPOINT, VOCABULARY, read_manifest
from recsuite.config.config import Config
from recsuite.datasets.loader import BatchLoader, build_dataloader
from recsuite.datasets.opening import Data, open_data
from recsuite.datasets.streams import EMPTY_STREAM_STATE, StreamState
from recsuite.files import explained
from recsuite.places import folder_at
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0


@contextlib.contextmanager
def reopen_data(
    config: Config,
    context: RuntimeContext,
    trains: bool,
    build: Callable[..., BatchLoader] = build_dataloader,
) -> Iterator[Data]:
    """Call `open_data` with the stream state of the checkpoint that is continued or read.

    trains: for a training. Collective: every rank.

    Raises:
        UserError: as `open_data`, and when a checkpoint that is needed cannot be read.
    """
    section, state = config.checkpoint, EMPTY_STREAM_STATE
    if config.stream.stream and (section.resume or not trains):
        folder = folder_at(section.save_dir if trains or section.compact else section.folder_to_load)
        # One rank reads: on a network file system ranks see a new checkpoint at different moments.
        state = broadcast_from_rank0(lambda: _read(folder))
    with open_data(config, context, state, build) as data:
        yield data


def _read(folder: Path) -> StreamState:
    # A --resume without a checkpoint begins a new training.
    if newest_in(folder) is None and not (folder / "manifest.json").is_file():
        return EMPTY_STREAM_STATE
    chain = chain_at(folder)
    with explained(f"Cannot read {chain.base}", OTHER_CHECKPOINT):
        vocabulary = (chain.base / VOCABULARY).read_text()
    stream = read_manifest(chain.folder).progress.stream
    if stream is None:
        return EMPTY_STREAM_STATE
    return StreamState(vocabulary, stream.late, stream.events_per_file, stream.learned)
