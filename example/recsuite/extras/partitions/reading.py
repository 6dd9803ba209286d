"""Data sets of partitions: each rank reads the files of its own, and prepares columns of them.

    FOLDER/schema.toml
    FOLDER/events/part=00000/split=train/*.parquet    all events of some users; also split=validation and test
    FOLDER/users/part=00000/*.parquet                 or users.parquet, which every rank reads
    FOLDER/items.parquet                              which every rank reads

Rank r of R reads the partitions p with p % R == r. What must be the same on all ranks is exchanged before the
columns are made: the items, the vocabulary, the encodings of numbers, and sums. A position of an item and a
table row mean the same on all ranks; a position of a user or an event is one of this rank alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsuite.config.config import Config
from recsuite.datasets.columns import Columns, load_columns
from recsuite.datasets.preparation.cache import (
    COLUMNS,
    is_due,
    mark_of,
    name_of_columns,
    newest_of,
    report_kept_folder,
    with_history,
)
from recsuite.datasets.preparation.reading import read
from recsuite.datasets.schema import ITEM
from recsuite.datasets.source import DATA_DEADLINE, look, with_flags
from recsuite.datasets.tables.files import schema_path
from recsuite.datasets.tables.source import TableFile, TableSource
from recsuite.errors import UserError, counted, printable
from recsuite.extras.partitions.digests import KnownDigests
from recsuite.extras.partitions.exchange import PartitionExchange, together
from recsuite.extras.partitions.sampler import Batches, PartColumns
from recsuite.files import digest_of_bytes, explained, locked, place_for, replace_file
from recsuite.runtime.console import hiding_progress, say, stage
from recsuite.runtime.process import RuntimeContext, broadcast_from_rank0, launch_name

__all__ = ["Batches", "open_columns"]

# Notes of other ranks than the first that are shown.
MOST_NOTES = 20


@dataclass(frozen=True)
class PartitionSource(TableSource):
    """Tables of the partitions of one rank. exchange: with the other ranks; own: folder of this rank."""

    exchange: PartitionExchange
    own: Path

    @property
    def files(self) -> list[TableFile]:
        """Files of the data set that `read` reads."""
        return [file for file in super().files if Path(file.file.path).parent != self.own]

    def read(self, parts_folder: Path | None = None) -> Any:
        """Read the files of this rank, with the items of all ranks. Collective: every rank."""
        from recsuite.datasets.tables.reading import read_tables
        from recsuite.extras.partitions import folders, merging

        # Parts of other ranks must stay, and the split may have no test on this rank.
        config = dataclasses.replace(self.config, split="time", cache_dir=str(self.own))
        raw = merging.with_split(
            read_tables(self.tables, self.table_schema, config, parts_folder), self.exchange
        )
        raw = merging.with_all_items(raw, self.schema, self.exchange)
        rows_of = folders.ids_of_users(self.tables, self.table_schema)
        self.exchange.num_users = merging.check_users(raw, self.schema, rows_of, self.exchange)
        # A table of all users has no partitions.
        if any(self.exchange.gathered(bool(rows_of))):
            there = {folders.number_of(name) for name in raw.events_per_file}
            if missing := sorted(str(part) for part in there - {*rows_of}):
                raw.skipped.append(f"no users are in the partition {', '.join(missing)}, which has events")
        return raw


def open_columns(config: Config, context: RuntimeContext) -> Columns:
    """Return the columns of the partitions of this rank. Collective: every rank.

    Raises:
        UserError: on every rank, when a partition is missing, doubled or of another schema, a user is in two
            of them, or a file cannot be read or changes meanwhile.
    """
    advice = "give --cache_dir a folder with space that can be written"
    # One rank of a machine shows its progress.
    hidden = hiding_progress() if context.local_rank else contextlib.nullcontext()
    with (
        hidden,
        together(context) as exchange,
        explained("Cannot write the columns of the partitions", advice),
    ):
        source, key = _located(config, exchange)
        launch = broadcast_from_rank0(launch_name) if config.data.rebuild else ""
        rebuilds = is_due(config.data, source.own, COLUMNS, launch)
        known = KnownDigests(source.own, every_byte=rebuilds)
        mine = known.of_files(source.files)
        # The name has the digests of all ranks: a change of any file makes new columns on each of them.
        named = name_of_columns(_digests_of_all(mine, exchange), key, config.data, config.runtime.seed)
        folder = newest_of(source.own, named)
        columns, fault = _found(folder, source, known)
        if fault:
            say(f"the columns in {folder} are damaged and are made again: {fault}")
        if any(exchange.gathered(columns is None or rebuilds)):
            _make(folder, source, mine, config, columns, known, exchange)
            # Every byte was read for its digest when it was written.
            newest, there = newest_of(source.own, named), columns
            columns, _ = load_columns(newest, source.folder, source.schema, every_byte=False)
            assert columns is not None
            known.keep(columns)
            if rebuilds:
                report_kept_folder(folder, newest, there)
                replace_file(mark_of(source.own, COLUMNS), launch.encode())
        known.write()
        assert columns is not None
        return with_history(_joined(columns, named, config, exchange), config)


def _found(folder: Path, source: PartitionSource, known: KnownDigests) -> tuple[Columns | None, str]:
    """Return the columns of a folder, or None and the reason for refusing them, "" if there are none."""
    columns, fault = load_columns(folder, source.folder, source.schema, every_byte=False)
    if columns is not None and (fault := known.fault_of(columns)):
        columns = None
    return columns, fault


def _located(config: Config, exchange: PartitionExchange) -> tuple[PartitionSource, list[Any]]:
    """Return the tables of this rank, and all that its columns depend on beside files, for JSON."""
    # A rank with existing columns needs Arrow too: for the schema of each file.
    from recsuite.datasets.tables.formats import columns_of
    from recsuite.datasets.tables.validation import validate
    from recsuite.datasets.tables.values import wanted_of
    from recsuite.extras.partitions import folders

    section, data = config.extras["partitions"], config.data
    number = int(vars(section)["partitions"])
    if data.split != "files":
        raise UserError(
            f"--partitions requires --split files, got {data.split}; the split is in the folders "
            "split=train, split=validation and split=test of each partition."
        )
    if exchange.size > number:
        raise UserError(
            f"--partitions must be at least the number of processes, {exchange.size}, got {number}; start "
            "fewer processes, or write more partitions."
        )
    found = look(data, config.runtime.seed)[1]
    if found is None:
        raise UserError(
            f"--partitions requires a whole schema.toml, and {printable(schema_path(data.data_path))} is "
            f"none; write it, ./run.sh schema {data.data_path}, and look through it."
        )
    found = with_flags(found, config.tables, data)
    if found.schema.event_types:
        raise UserError(
            "--partitions does not support events of several types; remove [events] of schema.toml."
        )
    home = Path(data.cache_dir) if data.cache_dir else place_for(found.folder, COLUMNS)
    own = home / f"{exchange.rank + 1}-of-{exchange.size}"
    own.mkdir(parents=True, exist_ok=True)
    tables = folders.tables_of_rank(found.tables, number, exchange.rank, exchange.size, own)
    columns = columns_of(tables)
    validate(found.table_schema, columns, schema_path(data.data_path))
    wanted = wanted_of(found.table_schema, columns)
    for each in wanted["events"]:
        if each.of == ITEM and each.kind != "id":
            raise UserError(
                "--partitions requires the features of items in a table of items, and "
                f"{printable(each.column)} is a column of the events; write it into items.parquet."
            )
    folders.check_schemas(tables, exchange)
    source = PartitionSource(**{**vars(found), "tables": tables}, exchange=exchange, own=own)
    return source, [found.key, number, vars(section)["min_count"]]


def _digests_of_all(mine: Mapping[str, str], exchange: PartitionExchange) -> dict[str, str]:
    """Return the digests of the files of all ranks, by name. mine: of the files that this rank reads."""
    digests: dict[str, str] = {}
    for rank, others in enumerate(exchange.gathered(mine)):
        for name, digest in others.items():
            if digests.setdefault(name, digest) != digest:
                raise UserError(
                    f"{name} of rank {rank} differs from that of another rank; give all machines the same "
                    "files."
                )
    return dict(sorted(digests.items()))


def _make(
    folder: Path,
    source: PartitionSource,
    digests: Mapping[str, str],
    config: Config,
    there: Columns | None,
    known: KnownDigests,
    exchange: PartitionExchange,
) -> None:
    """Make the columns of this rank, at the same time as all others. digests: of the files."""
    from recsuite.datasets.preparation.making import make_columns
    from recsuite.extras.partitions.totals import with_shared

    data = config.data
    with contextlib.ExitStack() as stack:
        # Rank 0 first: two launches that each hold some of the locks would wait for each other.
        for is_first in (True, False):
            if (exchange.rank == 0) == is_first:
                doing = f"writing columns to {source.own}"
                stack.enter_context(locked(source.own / ".lock", doing, DATA_DEADLINE))
            exchange.gathered(None)
        # Another launch may have made them meanwhile.
        if not data.rebuild and all(exchange.gathered(_found(folder, source, known)[0] is not None)):
            return
        if exchange.rank == 0:
            others = " and likewise for the other ranks" if exchange.size > 1 else ""
            say(f"reading {source.folder}; writing columns to {source.own}{others}")
        with stage("reading the files"):
            raw = read(source, data, source.own)
        if known.of_files(source.files) != digests:
            raise UserError(f"The files in {source.folder} changed while they were read; start again.")
        min_count = int(vars(config.extras["partitions"])["min_count"])
        # One rank has the values of all events, unless some of them are cut.
        shared = None
        if exchange.size > 1 or min_count > 1:
            raw, data, shared = with_shared(raw, source.schema, data, min_count, exchange)
        make_columns(folder, raw, source.schema, data, config.runtime.seed, there, shared=shared)


def _joined(columns: Columns, name: str, config: Config, exchange: PartitionExchange) -> PartColumns:
    """Return the columns of this rank with the sizes of all ranks."""
    mine = columns.num_train, columns.num_validation, columns.num_test
    others = exchange.gathered((mine, columns.num_skipped, columns.longest_history, columns.notes))
    sizes, skipped, longest, notes = zip(*others, strict=True)
    num_train, num_validation, num_test = (sum(each) for each in zip(*sizes, strict=True))
    shown = _shown(notes)
    if exchange.size > 1 and config.model.preset == "rating" and "train" in config.modes:
        # A training imports TorchRec anyway.
        from recsuite.training.weights import MOST_FOR_BIASES

        if num_train <= MOST_FOR_BIASES:
            shown.append("the initial rows have no solved biases, which require all events in one piece")
    return PartColumns(
        **{
            **vars(columns),
            "num_train": num_train,
            "num_validation": num_validation,
            "num_test": num_test,
            "num_skipped": sum(skipped),
            "longest_history": max(longest),
            "notes": tuple(shown),
            # The same for any number of ranks.
            "digest": f"{digest_of_bytes(name.encode())}-{num_train}-{num_validation}",
        },
        sizes=sizes,
        rank=exchange.rank,
    )


def _shown(notes: Sequence[Sequence[str]]) -> list[str]:
    """Return the notes of all ranks: those of all of them once, and others with the rank."""
    common = [note for note in notes[0] if all(note in others for others in notes)]
    own = [f"rank {rank}: {note}" for rank, those in enumerate(notes) for note in those if note not in common]
    more = [f"{counted(len(own) - MOST_NOTES, 'more note')} of ranks"] if len(own) > MOST_NOTES else []
    return [*common, *own[:MOST_NOTES], *more]
