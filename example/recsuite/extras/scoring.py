"""Scores of many users, or of many pairs of a user and an item, as a folder of Parquet files.

    recs.parquet/
        part-00000000.parquet    the first block of users, or of pairs
        part-00000001.parquet
        _job.json                what is scored: checkpoint, data, input, k, rules

Rank r of W scores the blocks r, r + W, ..., and each file appears in one rename. So any number of ranks
writes the same files, and a run that was interrupted continues with those that are missing. Until all are
there, the folder is called `.recs.parquet.partial`. Readers of Parquet take the folder as one table, and skip
names that begin with "_".
"""

from __future__ import annotations

import codecs
import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet
import torch

from recsuite.checkpoint.format import digest_of_manifest
from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.datasets.tables.values import NO, YES
from recsuite.errors import UserError, counted, printable
from recsuite.files import digest_of, digest_of_bytes, explained, flush, held, remove, replacing
from recsuite.metrics import spread_of
from recsuite.models.heads import TwoSided
from recsuite.runtime.console import say
from recsuite.serving.request import check_caps, check_distance, check_k
from recsuite.serving.served import ServedModel

# Users or pairs of one file at most: a rank holds the histories and scores of one block.
BLOCK = 4096
JOB, PART = "_job.json", "part-{:08d}.parquet"
RANK, SCORE = "rank", "score"
# Formats of texts as pyarrow calls them.
TEXTS = ("csv", "json")
# First bytes of texts in other encodings than UTF-8.
MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, codecs.BOM_UTF32_BE)
# Endings of files with users or pairs, and their formats as pyarrow calls them.
DATASET_FORMATS = {".parquet": "parquet", ".csv": "csv", ".arrow": "ipc", ".feather": "ipc", ".jsonl": "json"}


@dataclass
class Counts:
    """Counts of one rank: rows that it scored, rows whose file was there already, and unknown users and items
    among the former.
    """

    rows: int = 0
    there: int = 0
    unknown: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ListRules:
    """Rules of the lists of users, before the best k items are taken.

    candidates: a file with a column of items, the only ones to list; in_stock: a column of the items' table,
    in which they have a yes or a number above 0; exclude: a file of pairs of a user and an item that are not
    listed; at_most, least_distance: see `ServedModel.recommend`.
    """

    candidates: Path | None = None
    in_stock: str = ""
    exclude: Path | None = None
    at_most: Mapping[str, int] = field(default_factory=dict)
    least_distance: float | None = None

    @property
    def columns(self) -> list[str]:
        """Features of items, or columns of their table, that the rules read."""
        return [*self.at_most, *([self.in_stock] if self.in_stock else [])]


class BatchScoring:
    """Scores of the k best items of users, or of pairs, for a folder.

    model: to which the data of its training were given (`ServedModel.open(..., data_path=...)`); path: a file
    of users, with the column of their ids, or of pairs, with those of both, called as in the data; None for
    all users of the data. k: items for each user; None for pairs. rules: of the lists of users.

    Raises:
        UserError: for a k below 1, for a file that cannot be read, and for rules that the model or its data
            cannot follow.
    """

    def __init__(
        self, model: ServedModel, path: Path | None, k: int | None, rules: ListRules | None = None
    ) -> None:
        self.model, self.path, self.k = model, path, k
        self.schema = model.snapshot.schema
        # Where the items of users are found; None for the CPU.
        self.device: torch.device | None = None
        if k is not None:
            check_k(k)
        # Names of features by their columns, which the file must have.
        entities = (USER, ITEM) if k is None else (USER,)
        self.ids = {self.schema.column_of(entity): self.schema.name_of(entity) for entity in entities}
        self.counts = Counts(unknown=dict.fromkeys(self.ids.values(), 0))
        # Columns of pairs by the features of the event that they hold, such as a device.
        self.inputs: dict[str, str] = {}
        if path is not None:
            self._check_file(path)
        self.rules = None if rules in (None, ListRules()) else RulesOfModel(model, rules or ListRules())

    def use(self, device: torch.device) -> str:
        """Find the items of users on a device where that is possible; return in one line what it does."""
        if device.type == "cpu":
            return ""
        if self.k is None:
            return "scores of pairs are computed on the CPU"
        if not isinstance(self.model.snapshot.head, TwoSided):
            return "lists are made on the CPU: the model has no vectors"
        self.device = device
        return "lists are made on the GPU"

    @property
    def noun(self) -> str:
        """Plural of what is scored."""
        return "pairs" if self.k is None else f"{self.schema.user}s"

    def count(self) -> int:
        """Return the number of rows."""
        if self.path is None:
            return len(self._all_users())
        with _reading(self.path):
            return int(self._dataset.count_rows())

    def _all_users(self) -> list[Any]:
        assert self.model.data is not None
        return self.model.data.users.ids

    def _check_file(self, path: Path) -> None:
        self._dataset = dataset_of(path, self.ids, self.model)
        table = self._dataset.schema
        if self.k is not None:
            return
        if SCORE in table.names:
            raise UserError(f"{path} has a column {SCORE} already; leave it out.")
        for feature in self.model.snapshot.features:
            name = feature.name if feature.name in table.names else feature.column
            if feature.entity == EVENT and name in table.names:
                self.inputs[feature.name] = name

    def describe_inputs(self) -> str:
        """Describe in one line the columns of pairs that count, and those that do not, or what rules read."""
        if self.k is not None or self.path is None:
            return "; ".join(self.rules.notes) if self.rules else ""
        used = [*self.ids, *self.inputs.values()]
        others = [name for name in self._dataset.schema.names if name not in used]
        ignored = f", not on {printable(', '.join(others))}" if others else ""
        return f"scores depend on the columns {', '.join(used)}{ignored}"

    def job(self) -> dict[str, Any]:
        """Return what is scored; two runs with an equal one write the same files."""
        all_users = json.dumps(self._all_users()).encode() if self.path is None else b""
        rows = digest_of(self.path) if self.path else digest_of_bytes(all_users)
        snapshot = self.model.snapshot
        assert self.model.data is not None
        rules = {"rules": self.rules.digests} if self.rules else {}
        return {
            "model": digest_of_manifest(snapshot.folder),
            "step": snapshot.manifest.progress.step,
            # Histories, and items that a user had, come from there.
            "data": self.model.data.digest(),
            "new_items": self.model.lists_new_items,
            "rows": rows,
            "k": self.k,
            "block": BLOCK,
            **rules,
        }

    def blocks(self) -> Iterator[pyarrow.Table]:
        """Yield the rows in tables of at most BLOCK, the same ones on every rank.

        Raises:
            UserError: when the file is damaged, or has values that are no ids.
        """
        if self.path is None:
            (column,), ids = self.ids, self._all_users()
            for first in range(0, len(ids), BLOCK):
                yield pyarrow.table({column: ids[first : first + BLOCK]})
            return
        batches = self._dataset.to_batches(batch_size=BLOCK)
        while True:
            with _reading(self.path):
                batch = next(batches, None)
            if batch is None:
                return
            if batch.num_rows:
                yield _with_plain_texts(pyarrow.Table.from_batches([batch]))

    def write(self, folder: Path, rank: int, world_size: int, done: Callable[[int], None]) -> Counts:
        """Write the files of this rank that are missing; return the counts of those. Not collective.

        done: called with the number of rows that were passed over so far.

        Raises:
            UserError: see `blocks`; and when a file cannot be written.
        """
        passed = 0
        for number, block in enumerate(self.blocks()):
            part = folder / PART.format(number)
            if number % world_size == rank and part.exists():
                self.counts.there += len(block)
            elif number % world_size == rank:
                table = self.scored(block, passed)
                advice = "make room, and start again: it continues with this file"
                with explained(f"Cannot write {part}", advice), replacing(part) as aside:
                    pyarrow.parquet.write_table(table, aside)
                    flush(aside)
                self.counts.rows += len(block)
            passed += len(block)
            done(passed)
        return self.counts

    def scored(self, block: pyarrow.Table, first: int = 0) -> pyarrow.Table:
        """Return the rows with their scores: a row for each of the k items of each user, or for each pair.

        first: number of rows before these.
        """
        if self.path:
            check_rows(self.path, block, self.ids, first)
        ids = {name: block[column].to_pylist() for column, name in self.ids.items()}
        for name, given in ids.items():
            known = self.model.snapshot.known(name, given).tolist()
            unknown = [each for each, is_known in zip(given, known, strict=True) if not is_known]
            if name == self.schema.item:
                # Those of the data are known by their features.
                without = {*self.model.unknown_items(unknown)}
                unknown = [each for each in unknown if each in without]
            self.counts.unknown[name] += len(unknown)
        if self.k is None:
            return self._with_scores(block, ids)
        users = ids[self.schema.user]
        rules = self.rules.arguments(users) if self.rules else {}
        items, positions, scores = self.model.best(users, self.k, device=self.device, **rules)
        user, rank = (positions >= 0).nonzero(as_tuple=True)
        item = pyarrow.array(items.ids).take(pyarrow.array(positions[user, rank].numpy()))
        added = {
            RANK: pyarrow.array(rank.numpy() + 1, pyarrow.int32()),
            self.schema.column_of(ITEM): item,
            SCORE: pyarrow.array(scores[user, rank].numpy()),
        }
        rows = block.select([self.schema.column_of(USER)]).take(pyarrow.array(user.numpy()))
        for name, values in added.items():
            rows = rows.append_column(name, values)
        return rows

    def _with_scores(self, block: pyarrow.Table, ids: dict[str, list[Any]]) -> pyarrow.Table:
        told = {name: block[column].to_pylist() for name, column in self.inputs.items()}
        scores = self.model.score({**ids, **told}).numpy()
        if scores.ndim == 1:
            return block.append_column(SCORE, pyarrow.array(scores))
        for name, of_label in zip(self.schema.label_names, scores.T, strict=True):
            block = block.append_column(f"{SCORE}_{name}", pyarrow.array(np.ascontiguousarray(of_label)))
        return block


class RulesOfModel:
    """Rules with what they read: files, and columns of the items' table.

    notes: what was read, and what of it is ignored; digests: of all of it, for the record of the job.

    Raises:
        UserError: for a file or a column that cannot be read, or has no item that can be listed, and for
            rules that the model cannot follow.
    """

    def __init__(self, model: ServedModel, rules: ListRules) -> None:
        check_caps(rules.at_most)
        check_distance(rules.least_distance or 0)
        self.model, self.rules = model, rules
        # A candidate may be new, whatever --new_items says, as in `ServedModel.recommend`.
        self.schema, items = model.snapshot.schema, model.items(with_new=True if rules.candidates else None)
        self.positions, self.ids = items.positions, items.ids
        # Now, so that all ranks refuse what the model cannot follow.
        for name in rules.at_most:
            items.categorize(name, model.values_of_items)
        if rules.least_distance:
            items.require_vectors("least_distance")
        self.notes: list[str] = []
        self.candidates = self._candidates()
        self._items_of: dict[Any, np.ndarray] = {}
        if rules.exclude:
            self._items_of = self._excluded(rules.exclude)
        self.digests: dict[str, Any] = {
            "candidates": None if self.candidates is None else _digest(self.candidates),
            "exclude": digest_of(rules.exclude) if rules.exclude else None,
            "at_most": dict(rules.at_most),
            "values": _digest([[*model.values_of_items(name).items()] for name in rules.at_most]),
            "least_distance": rules.least_distance,
        }

    def arguments(self, users: Sequence[Any]) -> dict[str, Any]:
        """Return the arguments of `ServedModel.best` for some users."""
        nothing = np.empty(0, np.int64)
        lists = [[self.ids[position] for position in self._items_of.get(user, nothing)] for user in users]
        return {
            "candidates": self.candidates,
            "also_exclude": lists if self.rules.exclude else None,
            "at_most": self.rules.at_most,
            "least_distance": self.rules.least_distance,
        }

    def _candidates(self) -> list[Any] | None:
        """Return the items that the file and the column allow, in the order of the items; None for all."""
        rules, schema, number = self.rules, self.schema, len(self.ids)
        allowed = np.ones(number, bool)
        if rules.candidates:
            column = schema.column_of(ITEM)
            table = table_of(rules.candidates, {column: schema.item}, self.model)
            listed, unknown = self._positions(table[column])
            allowed[:] = False
            allowed[listed[listed >= 0]] = True
            if unknown:
                self.notes.append(f"{rules.candidates} has {counted(unknown, f'unknown {schema.item}')}")
        if rules.in_stock:
            values = self.model.values_of_items(rules.in_stock)
            allowed &= [_is_in_stock(rules.in_stock, values.get(item)) for item in self.ids]
            lacking = sum(values.get(item) is None for item in self.ids)
            if lacking:
                self.notes.append(f"{counted(lacking, schema.item)} without {rules.in_stock}: not in stock")
        if not (rules.candidates or rules.in_stock):
            return None
        if not allowed.any():
            places = [str(rules.candidates or ""), rules.in_stock and f"the column {rules.in_stock}"]
            raise UserError(
                f"{' and '.join(filter(None, places))} allow none of the {number:,} {schema.items} that the "
                f"model can list; give the ids of the column {schema.column_of(ITEM)} as in the data."
            )
        self.notes.append(f"{int(allowed.sum()):,} of {number:,} {schema.items} are candidates")
        return [self.ids[position] for position in np.flatnonzero(allowed)]

    def _positions(self, column: pyarrow.ChunkedArray) -> tuple[np.ndarray, int]:
        """Return the positions of items, -1 for an unknown one, and the number of distinct unknown ones."""
        codes, distinct = pandas.factorize(column.to_pandas())
        # Refuses ids of another type.
        self.model.snapshot.known(self.schema.item, distinct.tolist())
        places = np.array([self.positions.get(each, -1) for each in distinct.tolist()], np.int64)
        return places[codes], int((places < 0).sum())

    def _excluded(self, path: Path) -> dict[Any, np.ndarray]:
        """Return the positions of the items that each user must not get, from a file of pairs."""
        schema, model = self.schema, self.model
        user, item = schema.column_of(USER), schema.column_of(ITEM)
        table = table_of(path, {user: schema.user, item: schema.item}, model)
        positions, unknown_items = self._positions(table[item])
        codes, distinct = pandas.factorize(table[user].to_pandas())
        users = distinct.tolist()
        assert model.data is not None
        # One of the data alone may be scored too.
        strangers = [each for each in users if each not in model.data.users.places]
        unknown_users = len(strangers) - int(model.snapshot.known(schema.user, strangers).sum())
        unknown = ((unknown_users, schema.user), (unknown_items, schema.item))
        shown = [counted(number, f"unknown {name}") for number, name in unknown if number]
        self.notes.append(", ".join([f"{path} excludes {counted(len(codes), 'pair')}", *shown]))
        order = np.argsort(codes, kind="stable")
        order = order[positions[order] >= 0]
        ends = np.searchsorted(codes[order], np.arange(1, len(users)))
        return dict(zip(users, np.split(positions[order], ends), strict=True)) if users else {}


def _is_in_stock(column: str, value: Any) -> bool:
    """Return True for a yes or a number above 0, False for a no, other numbers and none.

    Raises:
        UserError: for another value; names the column.
    """
    text = str("" if value is None else value).strip().lower()
    if text in ("", *NO):
        return False
    with contextlib.suppress(ValueError):
        return text in YES or float(text) > 0
    raise UserError(
        f"The column {column} must have yes or no, or numbers, got {printable(value)}; give another "
        "--in_stock."
    )


def _digest(values: Any) -> str:
    return digest_of_bytes(json.dumps(values, default=str).encode())


def dataset_of(path: Path, ids: Mapping[str, str], model: ServedModel) -> pyarrow.dataset.Dataset:
    """Open a file with columns of ids. ids: features of the model by these columns.

    Raises:
        UserError: when it cannot be read, or lacks one of them.
    """
    if path.suffix not in DATASET_FORMATS:
        raise UserError(
            f"{path} must end in one of {', '.join(DATASET_FORMATS)}; convert it to one of these."
        )
    with explained(f"Cannot read {path}", "give another file"), path.open("rb") as file:
        start = file.read(4)
    kind: Any = DATASET_FORMATS[path.suffix]
    if kind in TEXTS and start.startswith(MARKS):
        raise UserError(
            f"Cannot read {path}: it is text in UTF-16 or UTF-32, and must be in UTF-8. Fix: convert it "
            "with iconv -t UTF-8 -f UTF-16 (or UTF-32)."
        )
    if kind == "csv":
        # "007" may be an id.
        types = {column: _type_of(model, name) for column, name in ids.items()}
        options = pyarrow.csv.ConvertOptions(column_types=types)
        kind = pyarrow.dataset.CsvFileFormat(convert_options=options)
    with _reading(path):
        dataset = pyarrow.dataset.dataset(path, format=kind)
    missing = [column for column in ids if column not in dataset.schema.names]
    if missing:
        raise UserError(
            f"{path} has the columns {printable(', '.join(dataset.schema.names))}, and no {missing[0]}; name "
            "the columns of ids as in the data."
        )
    return dataset


def table_of(path: Path, ids: Mapping[str, str], model: ServedModel) -> pyarrow.Table:
    """Return the columns of ids of a file, see `dataset_of`.

    Raises:
        UserError: see `dataset_of`; also for a row without an id.
    """
    dataset = dataset_of(path, ids, model)
    with _reading(path):
        table = _with_plain_texts(dataset.to_table(columns=[*ids]))
    check_rows(path, table, ids)
    return table


def check_rows(path: Path, block: pyarrow.Table, columns: Iterable[str], first: int = 0) -> None:
    """Refuse rows of a file that lack an id. first: number of rows before these."""
    for column in columns:
        # Arrow reads a missing text of a CSV file as an empty one.
        lacks = [value in (None, "") or value != value for value in block[column].to_pylist()]
        if any(lacks):
            below = " below its header" * str(path).endswith(".csv")
            raise UserError(
                f"{path} has a row without {column}, row {first + lacks.index(True) + 1}{below}; remove it, "
                "and start again."
            )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raise a UserError for a file that pyarrow cannot read."""
    try:
        yield
    except (pyarrow.ArrowInvalid, OSError) as error:
        # pyarrow puts the name of the file before it, several times.
        reason = printable(str(error).rpartition("Invalid: ")[2].rstrip("."))
        raise UserError(f"Cannot read {path}: {reason}. Fix: correct the file, or give another.") from None


def _with_plain_texts(table: pyarrow.Table) -> pyarrow.Table:
    """Return a table with texts of the type that all functions of Arrow take."""
    kinds = pyarrow.types
    for place, column in enumerate(table.schema):
        if kinds.is_string_view(column.type) or kinds.is_binary_view(column.type):
            plain = pyarrow.string() if kinds.is_string_view(column.type) else pyarrow.binary()
            table = table.set_column(place, column.name, table[place].cast(plain))
    return table


def _type_of(model: ServedModel, name: str) -> pyarrow.DataType:
    return pyarrow.string() if model.snapshot.kind_of(name) is str else pyarrow.int64()


def described(everyones: Sequence[Counts], folder: Path, seconds: float, noun: str) -> str:
    """Describe in one line what all ranks have written into a folder; noun: of a row, plural."""
    rows, there = (sum(getattr(counts, name) for counts in everyones) for name in ("rows", "there"))
    rate = f" in {seconds:.2f} s, {rows / seconds:,.0f} {noun}/s" if rows else ""
    before = f"; {there:,} were there already" if there else ""
    unknown = {name: sum(counts.unknown[name] for counts in everyones) for name in everyones[0].unknown}
    new = ", ".join(f"{number:,} with an unknown {name}" for name, number in unknown.items() if number)
    return f"scored {rows:,} {noun}{rate}{before}{new and f'; {new}'}; {folder} is complete"


def describe_lists(output: Path, model: ServedModel, candidates: Sequence[Any] | None = None) -> str:
    """Describe in one line how the items of all lists are spread over those they may have, see `Spread`.

    Reads the written files. candidates: the only items that are listed; None for all.
    """
    assert model.data is not None
    schema, ids = model.snapshot.schema, model.data.items.ids
    positions, listed = model.data.items.places, np.zeros(len(ids), np.int64)
    column = schema.column_of(ITEM)
    for batch in pyarrow.dataset.dataset(sorted(output.glob("part-*"))).to_batches(columns=[column]):
        counts = pyarrow.compute.value_counts(batch[column])
        for entry in counts.to_pylist():
            listed[positions[entry["values"]]] += entry["counts"]
    has_row = model.snapshot.known(schema.item, ids).numpy()
    is_listed = np.ones_like(has_row) if model.lists_new_items else has_row
    if candidates is not None:
        is_listed = np.zeros_like(has_row)
        is_listed[[positions[item] for item in candidates]] = True
    spread = spread_of(listed, model.data.item_counts(), is_listed, has_row, lambda place: ids[place])
    advice = model.snapshot.task.few_listed
    return spread.described(schema.items, advice) if spread else f"no {schema.item} is in a list"


def describe_short(output: Path, batch: BatchScoring) -> str:
    """Describe in one line the users with fewer than k items; "" without one. Reads the written files."""
    dataset = pyarrow.dataset.dataset(sorted(output.glob("part-*")))
    number = batch.count() - dataset.count_rows(filter=pyarrow.compute.field(RANK) == batch.k)
    if not number:
        return ""
    users, items = counted(number, batch.schema.user), batch.schema.items
    return f"{users} got fewer than {batch.k} {items}: no more may be listed"


def check_free(output: Path) -> None:
    """Refuse an output that is no folder of scores. Reads no model, so it can come first.

    Raises:
        UserError: when it exists and is anything else.
    """
    with explained(f"Cannot read {output}", "give another --output"):
        if output.exists() and not (output / JOB).is_file():
            raise UserError(f"{output} exists already, and holds no scores; give another --output.")


@contextlib.contextmanager
def writing(output: Path) -> Iterator[None]:
    """Hold the lock of an output against other scorings. Call on rank 0.

    Raises:
        UserError: when another one writes it, or the folder cannot be written.
    """
    refusal = f"Another process is scoring into {output}; wait for it."
    with contextlib.ExitStack() as stack:
        with explained(f"Cannot write to {output.parent}", "give another --output"):
            output.parent.mkdir(parents=True, exist_ok=True)
            lock = output.with_name(f".{output.name}.lock")
            descriptor = stack.enter_context(held(lock, refusal))
            # The process that held it may have removed it meanwhile, and another one may hold a new file.
            if not _is_file_of(descriptor, lock):
                raise UserError(refusal)
            stack.callback(lock.unlink, missing_ok=True)
        yield


def _is_file_of(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def begin(output: Path, job: dict[str, Any]) -> Path | None:
    """Return the folder to write the files of a job into, or None if they are all there. Call on rank 0.

    A folder of another job that was not finished is removed.

    Raises:
        UserError: when `output` holds other scores, or cannot be written.
    """
    check_free(output)
    partial = output.with_name(f".{output.name}.partial")
    with explained(f"Cannot write to {output.parent}", "give another --output"):
        if output.exists():
            there = _job_in(output)
            if there is None:
                raise UserError(
                    f"{output / JOB} is damaged, so nothing says what the scores beside it are; remove "
                    f"{output}, or give another --output."
                )
            if there != job:
                raise UserError(
                    f"{output} holds scores of another model, data, input, --k or rules; give another "
                    "--output, or remove it."
                )
            return None
        written = partial / JOB
        there = _job_in(partial)
        if written.exists() and there is None:
            say(f"{written} is damaged, as after a power cut: the scoring starts anew")
        if partial.exists() and there != job:
            remove(partial)
        partial.mkdir(parents=True, exist_ok=True)
        # Of a rank that was killed.
        for path in partial.glob(".part-*"):
            remove(path)
        with replacing(written) as aside:
            aside.write_bytes(json.dumps(job, indent=1).encode())
            flush(aside)
        flush(partial)
    return partial


def _job_in(folder: Path) -> Any:
    """Return the job that a folder records; None if it records none, or the record is damaged."""
    try:
        return json.loads((folder / JOB).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None


def end(partial: Path, output: Path) -> None:
    """Give the folder its name. Call on rank 0, after all ranks have written their files.

    Raises:
        UserError: when it cannot, or when there is no file.
    """
    if not any(partial.glob("part-*")):
        raise UserError("There is no row to score; give a file with some.")
    with explained(f"Cannot write {output}"):
        flush(partial)
        os.rename(partial, output)
