"""Restoring of a train state from a checkpoint, after all of it was checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from recsuite.checkpoint.chain import (
    CheckpointChain,
    chain_at,
    check_whole,
    chosen_chain,
    describe_choice,
    requested_kind,
    retrying_if_moved,
    suggestion,
    with_suggestion,
)
from recsuite.checkpoint.folder import others_in
from recsuite.checkpoint.format import CONFIG, DynamicRecord, Manifest, recorded_in
from recsuite.checkpoint.origin import check_origin
from recsuite.checkpoint.shards import RowReader, check_shard_files, reading, widths_in
from recsuite.checkpoint.writer import (
    dense_of,
    digest_of_vocabulary,
    features_of,
    shapes_of,
    tensors_of,
)
from recsuite.config.sections import CheckpointConfig, ModelConfig
from recsuite.datasets.columns import Columns
from recsuite.errors import UserError, counted, printable
from recsuite.models.tasks import TASKS
from recsuite.places import folder_at
from recsuite.runtime.process import RuntimeContext, all_gather_object, broadcast_from_rank0, raise_on_all
from recsuite.sharding.table import EmbeddingTable
from recsuite.training.progress import Progress, describe_step
from recsuite.training.state import ShardedModel

Tables = Mapping[str, EmbeddingTable]


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
    return _with_suggestion_on_all(
        context, lambda: _load(chain, train_state, columns, context, describe_step)
    )


def _with_suggestion_on_all(context: RuntimeContext, load: Callable[[], Manifest]) -> Manifest:
    """Load like `chain.with_suggestion`. Collective."""
    try:
        return load()
    except _DamagedError as error:
        chain, ranks = error.chain, (context.rank, context.world_size)
        others = broadcast_from_rank0(lambda: others_in(chain.base.parent, chain.folder))
        # The ranks share the reading: if one rank read everything, the others might wait for longer than
        # --timeout.
        good = suggestion(others, lambda other: raise_on_all(lambda: check_whole(chain_at(other), *ranks)))
        raise UserError(f"{str(error).rstrip('.')}; {good}.") from None


def _load(
    chain: CheckpointChain,
    train_state: ShardedModel,
    columns: Columns,
    context: RuntimeContext,
    describe: Callable[[Progress], str],
) -> Manifest:
    """Restore like `restore`, without the suggestion."""
    tables = train_state.tables
    shapes, optimizer = shapes_of(tensors_of(train_state)), train_state.optimizer_name
    widths = train_state.model.module.recommender.widths
    # Each check ends on all ranks before the next begins, and all end before a byte is changed: otherwise one
    # rank could load the checkpoint while another refuses it.
    try:
        manifests: list[Manifest] = raise_on_all(lambda: check_whole(chain, context.rank, context.world_size))
    except UserError as error:
        raise _DamagedError(str(error), chain) from None
    shapes = recorded_in(manifests[-1], shapes)
    accepts = train_state.accepts_changed_model
    line = raise_on_all(lambda: check_origin(chain.folder, manifests[-1], train_state.head, accepts))
    raise_on_all(lambda: check_fit(chain.folder, manifests[-1], shapes, columns, optimizer, widths))
    # With right digests, a forged file may still hold other tensors than its manifest names.
    raise_on_all(lambda: [*map(check_shard_files, chain.folders, manifests)])
    reader = RowReader(chain.folders, manifests)
    raise_on_all(lambda: check_tables(chain.folder, reader, tables))
    dense = recorded_in(manifests[-1], dense_of(train_state))
    everyones = all_gather_object(lambda: _read(chain, reader, train_state, tables, dense))
    for name in tables:
        dropped = sum(mine[name] for mine in everyones)
        if dropped:
            record = reader.record(name)
            context.say(_describe_dropped(name, dropped, record, tables[name]))
    if line:
        context.say(line)
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
    folder, kind, until = folder_at(config.folder_to_load), config.checkpoint, config.until
    asked = requested_kind(folder, kind, until)

    def describe(progress: Progress) -> str:
        chosen = describe_choice(progress, asked, TASKS[model.task].main_label)
        is_other = until not in (-1, progress.step)
        return f"{chosen}, the newest up to --until {until}" if is_other else chosen

    def load() -> Manifest:
        # One rank chooses: on a network file system ranks see a new checkpoint at different times, and could
        # mix two of them.
        chain = broadcast_from_rank0(
            lambda: with_suggestion(folder, lambda: chosen_chain(folder, kind, until))
        )
        manifest = _load(chain, train_state, columns, context, describe)
        if manifest.progress.stream is None and manifest.ratings != columns.digest:
            context.say(
                f"the {columns.schema.labels} differ from those of the training, or their split does: "
                "the model may have learned from the test set"
            )
        return manifest

    return _with_suggestion_on_all(context, lambda: retrying_if_moved(folder, load, broadcast_from_rank0))


def _read(
    chain: CheckpointChain,
    reader: RowReader,
    train_state: ShardedModel,
    tables: Tables,
    dense: Mapping[str, torch.Tensor],
) -> dict[str, int]:
    """Fill the dense part and this rank's rows; return the number of rows of each table without a place."""
    # Not collective: after the checks, this fails only if a folder was removed.
    with reading(chain.folder):
        # In place: the model and its optimizer hold these tensors.
        reader.fill({name: value.detach() for name, value in dense.items()})
        scale = float(train_state.row_scale)
        return {name: table.load(reader, scale) for name, table in tables.items()}


def _describe_dropped(name: str, dropped: int, record: DynamicRecord, table: EmbeddingTable) -> str:
    ours = table.record() or {}
    return (
        f"{dropped:,} of {record.live:,} rows of {name} had no place among {ours['capacity']:,} and were "
        f"skipped by --eviction {ours['evict']}"
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


# --- checks ---


# The fix for data other than those of the training, and the maximum number of features in a message.
SAME_DATA, MOST_NAMED = f"give the --data_path that its {CONFIG} names", 5


def check_fit(
    folder: Path,
    manifest: Manifest,
    shapes: Mapping[str, tuple[list[int], str]],
    columns: Columns,
    optimizer: str,
    widths: Mapping[str, int],
) -> None:
    """Refuse a checkpoint of another model, optimizer or data than these.

    shapes: see `shapes_of`; widths: numbers in a row of each table.

    Raises:
        UserError: names both sides.
    """
    # The state of another optimizer may have the same names and shapes.
    if manifest.optimizer != optimizer:
        raise UserError(
            f"{folder} was trained with {manifest.optimizer}, and this program has {optimizer}. Fix: give "
            "shard or restore the same tables= and dense=."
        )
    theirs, ours = manifest.features, features_of(columns)
    if others := [*(theirs.keys() ^ ours.keys())]:
        parts = [f"{printable(name)} only {'there' if name in theirs else 'here'}" for name in sorted(others)]
        shown = ", ".join(parts[:MOST_NAMED])
        raise UserError(
            f"{folder} was trained with other features than {columns.source} has: {shown}; "
            f"{SAME_DATA}, write the same [features] into schema.toml, or train again."
        )
    # Equal shapes are not enough: a table may be of another column with the same number of values.
    for name, feature in ours.items():
        if theirs[name] != feature:
            raise UserError(
                f"{folder} has the feature {name} as {printable(theirs[name])}, and this program has it as "
                f"{feature}; {SAME_DATA}, or train again."
            )
    # Rows have only numbers, and with other raw values row 7 belongs to another value.
    if manifest.vocabulary != digest_of_vocabulary(columns):
        raise UserError(
            f"{folder} was trained on other data than {columns.source}: {_describe_rows(manifest, shapes)}; "
            f"{SAME_DATA}, with the same --split and --seed; for new ids train again on all files, or from "
            "the start with --vocabulary dynamic, and with --stream to continue with new files."
        )
    # Before the check of all tensors: this message is clearer than one about shapes of the dense part.
    recorded = widths_in(manifest)
    for name, width in widths.items():
        if recorded.get(name, width) != width:
            raise UserError(
                f"{folder} has {recorded[name]} numbers in a row of {name}, and this model has {width}; give "
                "the --embedding_dim of its training, and a model of your own the same embedding_dims."
            )
    for name in sorted({*manifest.tensors, *shapes}):
        if manifest.tensors.get(name) != shapes.get(name):
            raise UserError(
                f"{folder} has {_shown(manifest.tensors.get(name))} for {name}, and this model has "
                f"{_shown(shapes.get(name))}; give the flags and the data that its {CONFIG} names, "
                "or load it with the script whose model it is."
            )


def _describe_rows(manifest: Manifest, shapes: Mapping[str, tuple[list[int], str]]) -> str:
    """Describe the first table whose number of rows differs."""
    for table in manifest.features:
        name = f"tables.{table}.weight"
        # A dynamic table has no tensor.
        rows, here = (tensors[name][0][0] if name in tensors else 0 for tensors in (manifest.tensors, shapes))
        if rows != here:
            return f"its table {table} has {rows:,} rows, and here there are {here:,}"
    return "the ids differ"


def _shown(tensor: tuple[list[int], str] | None) -> str:
    return "nothing" if tensor is None else f"{tensor[1]} {tensor[0]}"


def check_tables(folder: Path, reader: RowReader, tables: Tables) -> None:
    """Refuse a checkpoint whose tables by id are not those of a model, or have too many rows for it.

    Raises:
        UserError: names both sides.
    """
    records = reader.manifests[-1].dynamic.keys()
    ours = {name for name, table in tables.items() if table.record() is not None}
    if records != ours:
        theirs, mine = (", ".join(sorted(names)) or "none" for names in (records, ours))
        raise UserError(
            f"{folder} has the dynamic tables {theirs}, and this model has {mine}; give the --vocabulary of "
            "its training."
        )
    with reading(folder):
        for name in records:
            tables[name].check(reader, folder)
