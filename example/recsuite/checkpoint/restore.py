"""Restoring of a train state from a checkpoint, after all of it was checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from recsuite.checkpoint.delta import apply_delta
from recsuite.checkpoint.dynamic import DynamicTables, check_room, check_tables, load_tables
from recsuite.checkpoint.full import Tensors, check_fit, dynamic_of, read_full, shapes_of, tensors_of
from recsuite.checkpoint.storage.chain import CheckpointChain, chain_at, check_whole
from recsuite.checkpoint.storage.choice import (
    asked_for,
    chosen_chain,
    describe_choice,
    settled,
    suggesting,
    suggestion,
)
from recsuite.checkpoint.storage.directory import others_in
from recsuite.checkpoint.storage.dynamic import opened
from recsuite.checkpoint.storage.manifest import Manifest
from recsuite.checkpoint.storage.shards import check_shard_files, reading
from recsuite.config.sections import CheckpointConfig, ModelConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError, counted
from recsuite.models.tasks import TASKS
from recsuite.runtime.process import RuntimeContext, all_gather_object, broadcast_from_rank0, raise_on_all
from recsuite.training.progress import Progress, describe_step
from recsuite.training.state import ShardedModel


class _DamagedError(UserError):
    """Error of a checkpoint that is not whole; another one in its folder may be whole."""

    def __init__(self, sentence: str, chain: CheckpointChain) -> None:
        super().__init__(sentence)
        self.chain = chain


def restore(
    chain: CheckpointChain, train_state: ShardedModel, columns: Columns, context: RuntimeContext
) -> Manifest:
    """Restore a train state from a checkpoint, after a check of all of it, and print a line about it.

    Collective: every rank.

    Raises:
        UserError: on every rank, when anything is missing, damaged, or made for another model; the train
            state is as it was. Where something is damaged it names the newest whole checkpoint of the folder.
    """
    return _suggesting_together(context, lambda: _load(chain, train_state, columns, context, describe_step))


def _suggesting_together(context: RuntimeContext, load: Callable[[], Manifest]) -> Manifest:
    """Load like `choice.suggesting`. Collective.

    The ranks share the reading of other checkpoints, as they do for the one that is loaded: if one rank read
    everything, the others might wait for longer than --timeout.
    """
    try:
        return load()
    except _DamagedError as error:
        chain = error.chain
        others = broadcast_from_rank0(lambda: others_in(chain.base.parent, chain.folder))
        good = suggestion(others, lambda other: raise_on_all(lambda: _check_shared(chain_at(other), context)))
        raise UserError(f"{str(error).rstrip('.')}; {good}.") from None


def _check_shared(chain: CheckpointChain, context: RuntimeContext) -> list[Manifest]:
    """Call `check_whole` for this rank's share of a checkpoint. Not collective."""
    return check_whole(chain, context.rank, context.world_size)


def _load(
    chain: CheckpointChain,
    train_state: ShardedModel,
    columns: Columns,
    context: RuntimeContext,
    describe: Callable[[Progress], str],
) -> Manifest:
    """Restore like `restore`, without the suggestion."""
    tensors, dynamic = tensors_of(train_state), dynamic_of(train_state)
    shapes, optimizer = shapes_of(tensors), train_state.optimizer_name
    widths = train_state.model.module.recommender.widths
    # Each check ends on all ranks before the next begins, and all end before a byte is changed: otherwise one
    # rank could load the checkpoint while another refuses it.
    try:
        manifests: list[Manifest] = raise_on_all(lambda: _check_shared(chain, context))
    except UserError as error:
        raise _DamagedError(str(error), chain) from None
    raise_on_all(lambda: check_fit(chain.folder, manifests[-1], shapes, columns, optimizer, widths))
    # With right digests, a forged file may still hold other tensors than its manifest names.
    raise_on_all(lambda: _check_shards(chain, manifests))
    raise_on_all(lambda: _check_dynamic(chain, manifests, dynamic))
    raise_on_all(lambda: _read(chain, manifests, tensors))
    _load_dynamic(chain, manifests, tensors, dynamic, context)
    context.say(_describe_load(chain, manifests[-1], set(shapes), describe))
    return manifests[-1]


def restore_chosen(
    config: CheckpointConfig,
    model: ModelConfig,
    train_state: ShardedModel,
    columns: Columns,
    context: RuntimeContext,
) -> Manifest:
    """Call `restore` for the checkpoint that --load, --checkpoint and --until name. Collective: every rank.

    If a trainer removes it meanwhile, another one is chosen.

    Raises:
        UserError: see there; not all of a checkpoint may have been read by then.
    """
    folder, kind, until = Path(config.folder_to_load), config.checkpoint, config.until
    asked = asked_for(folder, kind, until)

    def describe(progress: Progress) -> str:
        chosen = describe_choice(progress, asked, TASKS[model.task].main_label)
        is_other = until not in (-1, progress.step)
        return f"{chosen}, the newest up to --until {until}" if is_other else chosen

    def load() -> Manifest:
        # One rank chooses: on a network file system ranks see a new checkpoint at different times, and could
        # mix two of them.
        chain = broadcast_from_rank0(lambda: suggesting(folder, lambda: chosen_chain(folder, kind, until)))
        manifest = _load(chain, train_state, columns, context, describe)
        if manifest.progress.stream is None and manifest.ratings != columns.digest:
            context.say(
                f"the {columns.schema.labels} are not those of the training, or split otherwise: it may have "
                "learned from some of the test"
            )
        return manifest

    return _suggesting_together(context, lambda: settled(folder, load, broadcast_from_rank0))


def _check_shards(chain: CheckpointChain, manifests: Sequence[Manifest]) -> None:
    for folder, manifest in zip(chain.folders, manifests, strict=True):
        check_shard_files(folder, manifest)


def _read(chain: CheckpointChain, manifests: Sequence[Manifest], tensors: Tensors) -> None:
    """Fill this rank's shards. After the checks, this only fails if a folder was removed. Not collective."""
    try:
        with reading(chain.folder):
            read_full(chain.base, tensors)
            # In order: the later of two deltas with the same row counts.
            for delta, manifest in zip(chain.deltas, manifests[1:], strict=True):
                apply_delta(delta, manifest, tensors)
    except CheckpointException as error:
        # torch raises the same error for a removed folder as for a bug of the program.
        gone = next((folder for folder in chain.folders if not folder.is_dir()), None)
        if gone is None:
            raise
        raise UserError(f"{gone} was removed while it was read.") from error


def _check_dynamic(chain: CheckpointChain, manifests: Sequence[Manifest], dynamic: DynamicTables) -> None:
    records = manifests[-1].dynamic
    check_tables(chain.folder, records, dynamic)
    with reading(chain.folder), opened(chain.folders, manifests) as files:
        check_room(chain.folder, files, records, dynamic)


def _load_dynamic(
    chain: CheckpointChain,
    manifests: Sequence[Manifest],
    tensors: Tensors,
    dynamic: DynamicTables,
    context: RuntimeContext,
) -> None:
    """Load this rank's rows of dynamic tables, and print how many found no place.

    Collective if there are dynamic tables.
    """
    if not dynamic:
        return
    scale = next(float(value) for name, value in tensors.items() if name.endswith("row_scale"))

    def load() -> dict[str, int]:
        with reading(chain.folder), opened(chain.folders, manifests) as files:
            return load_tables(files, manifests[-1].dynamic, dynamic, scale)

    everyones: list[dict[str, int]] = all_gather_object(load)
    for name, table in dynamic.tables.items():
        dropped = sum(mine[name] for mine in everyones)
        if dropped:
            spec = table.rows.spec
            context.say(
                f"{dropped:,} of {manifests[-1].dynamic[name].live:,} rows of {name} found no place among "
                f"{spec.capacity:,} and were left out by --eviction {spec.evict}"
            )


def _describe_load(
    chain: CheckpointChain, manifest: Manifest, names: set[str], describe: Callable[[Progress], str]
) -> str:
    tables = {name: shape for name, (shape, _) in manifest.tensors.items() if name.startswith("tables.")}
    live = [record.live for record in manifest.dynamic.values()]
    rows = [*(shape[0] for name, shape in tables.items() if name.endswith(".weight")), *live]
    optimizer_rows = [*(shape[0] for name, shape in tables.items() if name.endswith(".momentum1")), *live]
    replayed = f" and {counted(len(chain.deltas), 'delta')} after it" if chain.deltas else ""
    missing, unexpected = len(names - manifest.tensors.keys()), len(manifest.tensors.keys() - names)
    return (
        f"loaded {chain.base}{replayed}: {counted(len(rows), 'table')} with {sum(rows):,} rows and "
        f"{sum(optimizer_rows):,} optimizer rows, {len(names)} tensors, missing {missing}, unexpected "
        f"{unexpected}; {describe(manifest.progress)}, written by {counted(manifest.world_size, 'rank')}"
    )
