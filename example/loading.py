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
from runtime import RuntimeContext, together
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
        raise UserError(f"{str(error).rstrip('.')}; {_suggestion(save_dir)}.") from None


def load_checked(state: State, learner: Learner, columns: Columns, context: RuntimeContext) -> Manifest:
    """`load_state`, whose refusal names the newest good dump beside the one that is refused. Collective.

    Raises:
        UserError: see `load_state`.
    """
    try:
        return load_state(state, learner, columns, context)
    except UserError as error:
        raise UserError(f"{str(error).rstrip('.')}; {_suggestion(state.base.parent)}.") from None


def load_state(state: State, learner: Learner, columns: Columns, context: RuntimeContext) -> Manifest:
    """Put a learner into a state, after all of it was checked. Collective: every rank.

    Raises:
        UserError: on every rank, when anything is missing, damaged, or made for another model; the learner is
            as it was.
    """
    tensors = tensors_of(learner)
    shapes = shapes_of(tensors)
    manifest: Manifest = together(lambda: _checked(state, shapes, columns, context))
    read_parts(state.base, tensors)
    for delta in state.deltas:
        apply_delta(delta, read_manifest(delta), tensors)
    context.say(_describe_load(state, manifest))
    return manifest


def _checked(
    state: State, shapes: dict[str, tuple[list[int], str]], columns: Columns, context: RuntimeContext
) -> Manifest:
    """The manifest of the state, after everything was held against it, this model and these data."""
    last = check_chain(state)
    check_fit(state.folder, last, shapes, columns)
    # The ranks share the work of reading every byte.
    for folder in (state.base, *state.deltas):
        check_files(folder, read_manifest(folder), context.rank, context.world_size)
    return last


def _describe_load(state: State, manifest: Manifest) -> str:
    tables = {name: shape for name, (shape, _) in manifest.tensors.items() if name.startswith("tables.")}
    rows = [shape[0] for name, shape in tables.items() if name.endswith(".weight")]
    states = [shape[0] for name, shape in tables.items() if name.endswith(".momentum1")]
    replayed = f" and {len(state.deltas)} increments after it" if state.deltas else ""
    return (
        f"loaded {state.base}{replayed}: {len(rows)} tables with {sum(rows):,} rows and {sum(states):,} "
        f"optimizer rows, {len(manifest.tensors)} tensors, missing 0, unexpected 0; step "
        f"{manifest.position.step:,}, written by {manifest.about['world_size']} ranks"
    )


def _suggestion(save_dir: Path) -> str:
    """The newest state of a folder that is whole."""
    for folder in sorted([*dumps_in(save_dir), *deltas_in(save_dir)], key=step_of, reverse=True):
        with contextlib.suppress(UserError):
            other = state_at(folder)
            check_chain(other)
            for path in (other.base, *other.deltas):
                check_files(path, read_manifest(path))
            return f"the newest good one there is {folder}"
    return f"there is no good one in {save_dir}"
