"""Scores of many users, or of many pairs of a user and an item, as a folder of Parquet files.

    recs.parquet/
        part-00000000.parquet    the first block of users, or of pairs
        part-00000001.parquet
        _job.json                what is scored: checkpoint, data, input, k

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet

from recsuite.checkpoint.format import digest_of_manifest
from recsuite.datasets.schema import EVENT, ITEM, USER
from recsuite.errors import UserError, printable
from recsuite.files import digest_of, digest_of_bytes, explained, flush, held, remove, replacing
from recsuite.metrics import spread_of
from recsuite.runtime.console import say
from recsuite.serving.request import check_k
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


class BatchScoring:
    """Scores of the k best items of users, or of pairs, for a folder.

    model: to which the data of its training were given (`ServedModel.open(..., data_path=...)`); path: a file
    of users, with the column of their ids, or of pairs, with those of both, called as in the data; None for
    all users of the data. k: items for each user; None for pairs.

    Raises:
        UserError: for a k below 1, and for a file that cannot be read.
    """

    def __init__(self, model: ServedModel, path: Path | None, k: int | None) -> None:
        self.model, self.path, self.k = model, path, k
        self.schema = model.snapshot.schema
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
        if path.suffix not in DATASET_FORMATS:
            raise UserError(
                f"{path} must end in one of {', '.join(DATASET_FORMATS)}; convert it to one of these, or "
                "give --users all."
            )
        with explained(f"Cannot read {path}", "give another file"), path.open("rb") as file:
            start = file.read(4)
        if DATASET_FORMATS[path.suffix] in TEXTS and start.startswith(MARKS):
            raise UserError(
                f"Cannot read {path}: it is text in UTF-16 or UTF-32, and must be in UTF-8. Fix: convert it "
                "with iconv -t UTF-8 -f UTF-16 (or UTF-32)."
            )
        self._dataset = self._opened(path)
        table = self._dataset.schema
        missing = [column for column in self.ids if column not in table.names]
        if missing:
            raise UserError(
                f"{path} has the columns {printable(', '.join(table.names))}, and no {missing[0]}; name the "
                "columns of ids as in the data."
            )
        if self.k is not None:
            return
        if SCORE in table.names:
            raise UserError(f"{path} has a column {SCORE} already; leave it out.")
        for feature in self.model.snapshot.features:
            name = feature.name if feature.name in table.names else feature.column
            if feature.entity == EVENT and name in table.names:
                self.inputs[feature.name] = name

    def describe_inputs(self) -> str:
        """Describe in one line the columns of pairs that count, and those that do not; "" for users."""
        if self.k is not None or self.path is None:
            return ""
        used = [*self.ids, *self.inputs.values()]
        others = [name for name in self._dataset.schema.names if name not in used]
        ignored = f", not on {printable(', '.join(others))}" if others else ""
        return f"scores depend on the columns {', '.join(used)}{ignored}"

    def _opened(self, path: Path) -> pyarrow.dataset.Dataset:
        kind: Any = DATASET_FORMATS[path.suffix]
        if kind == "csv":
            # "007" may be an id.
            types = {column: _type_of(self.model, name) for column, name in self.ids.items()}
            options = pyarrow.csv.ConvertOptions(column_types=types)
            kind = pyarrow.dataset.CsvFileFormat(convert_options=options)
        with _reading(path):
            return pyarrow.dataset.dataset(path, format=kind)

    def job(self) -> dict[str, Any]:
        """Return what is scored; two runs with an equal one write the same files."""
        all_users = json.dumps(self._all_users()).encode() if self.path is None else b""
        rows = digest_of(self.path) if self.path else digest_of_bytes(all_users)
        snapshot = self.model.snapshot
        assert self.model.data is not None
        return {
            "model": digest_of_manifest(snapshot.folder),
            "step": snapshot.manifest.progress.step,
            # Histories, and items that a user had, come from there.
            "data": self.model.data.digest(),
            "new_items": self.model.lists_new_items,
            "rows": rows,
            "k": self.k,
            "block": BLOCK,
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
        path = self.path
        for column in self.ids if path else ():
            # Arrow reads a missing text of a CSV file as an empty one.
            lacks = [value in (None, "") or value != value for value in block[column].to_pylist()]
            if any(lacks):
                below = " below its header" * str(path).endswith(".csv")
                raise UserError(
                    f"{path} has a row without {column}, row {first + lacks.index(True) + 1}{below}; remove "
                    "it, and start again."
                )
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
        items, positions, scores = self.model.best(ids[self.schema.user], self.k)
        user, rank = (positions >= 0).nonzero(as_tuple=True)
        item = pyarrow.array(items.ids).take(pyarrow.array(positions[user, rank].numpy()))
        added = {
            RANK: pyarrow.array(rank.numpy() + 1, pyarrow.int32()),
            self.schema.column_of(ITEM): item,
            SCORE: pyarrow.array(scores[user, rank].numpy()),
        }
        users = block.select([self.schema.column_of(USER)]).take(pyarrow.array(user.numpy()))
        for name, values in added.items():
            users = users.append_column(name, values)
        return users

    def _with_scores(self, block: pyarrow.Table, ids: dict[str, list[Any]]) -> pyarrow.Table:
        told = {name: block[column].to_pylist() for name, column in self.inputs.items()}
        scores = self.model.score({**ids, **told}).numpy()
        if scores.ndim == 1:
            return block.append_column(SCORE, pyarrow.array(scores))
        for name, of_label in zip(self.schema.label_names, scores.T, strict=True):
            block = block.append_column(f"{SCORE}_{name}", pyarrow.array(np.ascontiguousarray(of_label)))
        return block


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


def describe_lists(output: Path, model: ServedModel) -> str:
    """Describe in one line how the items of all lists are spread over the catalogue, see `Spread`.

    Reads the written files.
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
    spread = spread_of(listed, model.data.item_counts(), is_listed, has_row, lambda place: ids[place])
    return spread.described(schema.items) if spread else f"no {schema.item} is in a list"


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
                    f"{output} holds scores of another model, data, input or --k; give another --output, or "
                    "remove it."
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
