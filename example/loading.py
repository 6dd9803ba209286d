"""The way back: a state of a folder of dumps, held against everything, and put into a learner."""

from __future__ import annotations

import contextlib
from pathlib import Path

from checkpoint import check_fit, read_parts, shapes_of, tensors_of
from columns import Columns
from config import NEWEST, Config
from errors import UserError
from incremental import apply_delta
from manifest import Manifest, check_files, read_manifest
from runtime import RuntimeContext, decided, together
from save_dir import NAME, State, check_chain, deltas_in, dumps_in, newest_in, state_at, step_of
from train import Learner


def choose_state(config: Config) -> State:
    """The state that --load and --until name.

    Raises:
        UserError: when there is none.
    """
    return find_state(Path(config.save_dir if config.load == NEWEST else config.load), config.until)


def find_state(folder: Path, until: int = -1) -> State:
    """`state_at`, whose refusal names the newest good dump beside the one that is refused.

    Raises:
        UserError: see `state_at`.
    """
    try:
        return state_at(folder, until)
    except UserError as error:
        there = folder.resolve()
        save_dir = there.parent if NAME.fullmatch(there.name) else there
        if newest_in(save_dir) is None:
            raise
        raise UserError(f"{str(error).rstrip('.')}; {_suggestion(save_dir, folder)}.") from None


def load_state(state: State, learner: Learner, columns: Columns, context: RuntimeContext) -> Manifest:
    """Put a learner into a state, after all of it was checked. Collective: every rank.

    Raises:
        UserError: on every rank, when anything is missing, damaged, or made for another model; the learner is
            as it was. Where something is damaged it names the newest good state of the same folder.
    """
    tensors = tensors_of(learner)
    shapes = shapes_of(tensors)
    try:
        manifest: Manifest = together(lambda: _check_whole(state, context.rank, context.world_size))
    except UserError as error:
        suggestion = decided(lambda: _suggestion(state.base.parent, state.folder))
        raise UserError(f"{str(error).rstrip('.')}; {suggestion}.") from None
    together(lambda: check_fit(state.folder, manifest, shapes, columns))
    read_parts(state.base, tensors)
    for delta in state.deltas:
        apply_delta(delta, read_manifest(delta), tensors)
    context.say(_describe_load(state, manifest, set(shapes)))
    return manifest


def _check_whole(state: State, rank: int = 0, world_size: int = 1) -> Manifest:
    """The manifest of a state whose chain was checked; the ranks share the work of reading every byte."""
    last = check_chain(state)
    for folder in (state.base, *state.deltas):
        check_files(folder, read_manifest(folder), rank, world_size)
    return last


def _describe_load(state: State, manifest: Manifest, names: set[str]) -> str:
    tables = {name: shape for name, (shape, _) in manifest.tensors.items() if name.startswith("tables.")}
    rows = [shape[0] for name, shape in tables.items() if name.endswith(".weight")]
    states = [shape[0] for name, shape in tables.items() if name.endswith(".momentum1")]
    replayed = f" and {len(state.deltas)} increments after it" if state.deltas else ""
    missing, unexpected = len(names - manifest.tensors.keys()), len(manifest.tensors.keys() - names)
    return (
        f"loaded {state.base}{replayed}: {len(rows)} tables with {sum(rows):,} rows and {sum(states):,} "
        f"optimizer rows, {len(names)} tensors, missing {missing}, unexpected {unexpected}; step "
        f"{manifest.position.step:,}, written by {manifest.world_size} ranks"
    )


def _suggestion(save_dir: Path, refused: Path) -> str:
    """The newest state of a folder that is whole, but for one that was refused."""
    there = sorted([*dumps_in(save_dir), *deltas_in(save_dir)], key=step_of, reverse=True)
    for folder in (path for path in there if path != refused):
        with contextlib.suppress(UserError):
            _check_whole(state_at(folder))
            return f"the newest good one there is {folder}; to --resume from it, remove what is newer"
    return f"there is no good one in {save_dir}"
