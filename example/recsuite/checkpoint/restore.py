"""A checkpoint put into a learner, after all of it was checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from recsuite.checkpoint.delta import apply_delta
from recsuite.checkpoint.full import Tensors, check_fit, read_full, shapes_of, tensors_of
from recsuite.checkpoint.storage.chain import CheckpointChain, chain_at, check_whole
from recsuite.checkpoint.storage.choice import (
    asked_for,
    chosen_chain,
    describe_choice,
    describe_step,
    settled,
    suggesting,
    suggestion,
)
from recsuite.checkpoint.storage.directory import others_in
from recsuite.checkpoint.storage.manifest import Manifest, Progress
from recsuite.checkpoint.storage.shards import check_shard_files, reading
from recsuite.config.checkpoint import NEWEST
from recsuite.config.config import Config
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError, counted
from recsuite.models.tasks.task import task_named
from recsuite.runtime.collectives import broadcast_from_rank0, raise_on_all
from recsuite.runtime.process import RuntimeContext
from recsuite.training.state import TrainState


class _DamagedError(UserError):
    """Of a state that is not whole; another one of its folder may be."""

    def __init__(self, sentence: str, state: CheckpointChain) -> None:
        super().__init__(sentence)
        self.state = state


def choose_chain(config: Config) -> CheckpointChain:
    """The state that --load, --checkpoint and --until name.

    Raises:
        UserError: when there is none.
    """
    folder = _named(config)
    return suggesting(
        folder, lambda: chosen_chain(folder, config.checkpoint.checkpoint, config.checkpoint.until)
    )


def _named(config: Config) -> Path:
    return Path(config.checkpoint.save_dir if config.checkpoint.load == NEWEST else config.checkpoint.load)


def find_chain(folder: Path, until: int = -1) -> CheckpointChain:
    """`chain_at`, whose refusal names the newest good checkpoint beside the one that is refused.

    Raises:
        UserError: see `chain_at`.
    """
    return suggesting(folder, lambda: chain_at(folder, until))


def restore(
    state: CheckpointChain,
    learner: TrainState,
    columns: Columns,
    context: RuntimeContext,
    describe: Callable[[Progress], str] = describe_step,
) -> Manifest:
    """Put a learner into a state, after all of it was checked, and say which. Collective: every rank.

    Raises:
        UserError: on every rank, when anything is missing, damaged, or made for another model; the learner is
            as it was. Where something is damaged it names the newest whole state of the same folder.
    """
    return _suggesting(context, lambda: _load(state, learner, columns, context, describe))


def _suggesting(context: RuntimeContext, load: Callable[[], Manifest]) -> Manifest:
    """As `save_dir.suggesting`, of a load. Collective.

    The ranks share the reading of other states as they do that of the one that is loaded: one rank that read
    all of it could keep the others waiting for longer than --timeout.
    """
    try:
        return load()
    except _DamagedError as error:
        state = error.state
        others = broadcast_from_rank0(lambda: others_in(state.base.parent, state.folder))
        good = suggestion(others, lambda other: raise_on_all(lambda: _check_shared(chain_at(other), context)))
        raise UserError(f"{str(error).rstrip('.')}; {good}.") from None


def _check_shared(state: CheckpointChain, context: RuntimeContext) -> list[Manifest]:
    """`check_whole` of this rank's share of a state. Not collective."""
    return check_whole(state, context.rank, context.world_size)


def _load(
    state: CheckpointChain,
    learner: TrainState,
    columns: Columns,
    context: RuntimeContext,
    describe: Callable[[Progress], str],
) -> Manifest:
    """`restore` without the suggestion."""
    tensors = tensors_of(learner)
    shapes = shapes_of(tensors)
    try:
        manifests: list[Manifest] = raise_on_all(lambda: _check_shared(state, context))
    except UserError as error:
        raise _DamagedError(str(error), state) from None
    raise_on_all(lambda: check_fit(state.folder, manifests[-1], shapes, columns))
    raise_on_all(lambda: _check_parts(state, manifests))
    raise_on_all(lambda: _read(state, manifests, tensors))
    context.say(_describe_load(state, manifests[-1], set(shapes), describe))
    return manifests[-1]


def restore_chosen(
    config: Config, learner: TrainState, columns: Columns, context: RuntimeContext
) -> Manifest:
    """`restore` of what `choose_chain` finds, which is another one where a trainer removes that meanwhile.
    Collective: every rank.

    Raises:
        UserError: see there; not all of a state may have been read by then.
    """

    checkpoint = asked_for(_named(config), config.checkpoint.checkpoint, config.checkpoint.until)

    def describe(progress: Progress) -> str:
        chosen = describe_choice(progress, checkpoint, task_named(config.model.task).main_label)
        is_other = config.checkpoint.until not in (-1, progress.step)
        return f"{chosen}, the newest up to --until {config.checkpoint.until}" if is_other else chosen

    def load() -> Manifest:
        return _load(broadcast_from_rank0(lambda: choose_chain(config)), learner, columns, context, describe)

    return _suggesting(context, lambda: settled(_named(config), load, broadcast_from_rank0))


def _check_parts(state: CheckpointChain, manifests: Sequence[Manifest]) -> None:
    for folder, manifest in zip(state.folders, manifests, strict=True):
        check_shard_files(folder, manifest)


def _read(state: CheckpointChain, manifests: Sequence[Manifest], tensors: Tensors) -> None:
    """Fill this rank's shards. What was checked can only fail if it is no longer there. Not collective."""
    try:
        with reading(state.folder):
            read_full(state.base, tensors)
            for delta, manifest in zip(state.deltas, manifests[1:], strict=True):
                apply_delta(delta, manifest, tensors)
    except CheckpointException as error:
        # Of a folder that is gone torch says what it says of a fault of the program.
        gone = next((folder for folder in state.folders if not folder.is_dir()), None)
        if gone is None:
            raise
        raise UserError(f"{gone} was removed while it was read.") from error


def _describe_load(
    state: CheckpointChain, manifest: Manifest, names: set[str], describe: Callable[[Progress], str]
) -> str:
    tables = {name: shape for name, (shape, _) in manifest.tensors.items() if name.startswith("tables.")}
    rows = [shape[0] for name, shape in tables.items() if name.endswith(".weight")]
    states = [shape[0] for name, shape in tables.items() if name.endswith(".momentum1")]
    replayed = f" and {counted(len(state.deltas), 'delta')} after it" if state.deltas else ""
    missing, unexpected = len(names - manifest.tensors.keys()), len(manifest.tensors.keys() - names)
    return (
        f"loaded {state.base}{replayed}: {counted(len(rows), 'table')} with {sum(rows):,} rows and "
        f"{sum(states):,} optimizer rows, {len(names)} tensors, missing {missing}, unexpected {unexpected}; "
        f"{describe(manifest.progress)}, written by {counted(manifest.world_size, 'rank')}"
    )
