"""Partition a log of events by user with Ray Data, for trainings in which no machine reads all of it.

    python example/prepare.py --input log --output parts --partitions 64 --user user --item item --time at

The log is a folder or URL (`s3://...`) of Parquet, CSV or JSON lines. The output, for all machines to read:

    parts/schema.toml                                meaning of the columns; add features there
    parts/events/part=00000/split=train/*.parquet    also split=validation and split=test
    parts/users/part=00000/*.parquet, parts/items.parquet

It runs on this machine, or on a cluster with `--address`. Requires `pip install "ray[data]"`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, dataset, fs, parquet, types

import recsuite as rs
from recsuite.datasets.tables.files import MAX_FILES
from recsuite.files import replacing

SPLITS = ("train", "validation", "test")
FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
# Ends of names behind that of the format.
PACKED = (".gz", ".zst")
# The times since 1970 that are below these are in these units.
UNITS = {"unix": 1e11, "unix_ms": 1e14, "unix_us": 1e17, "unix_ns": 1e20}
# Least time, and bits by which a pass over the events narrows the times among which the test begins.
FIRST, BITS = -(2**62), 16


def read(path: str, needed: Sequence[str]) -> Any:
    """Return the rows of all files below a path, which must have some columns, first the ids."""
    import ray.data

    try:
        store, root = fs.FileSystem.from_uri(path if "://" in path else str(Path(path).resolve()))
        entry = store.get_file_info(root)
        below = [entry] if entry.is_file else store.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise rs.UserError(f"Cannot read {path}: {str(error).splitlines()[0]}") from None
    # Not checksums and marks of other programs, and not backups such as log.csv.bak.
    paths = [Path(each.path) for each in below if each.is_file and each.base_name[0] not in "._"]
    ends = {str(path): [end for end in path.suffixes if end not in PACKED][-1:] for path in paths}
    files = {name: FORMATS[end[0]] for name, end in ends.items() if end and end[0] in FORMATS}
    if len(kinds := sorted({*files.values()})) != 1:
        raise rs.UserError(
            f"{path} must hold Parquet, CSV or JSON lines, got {' and '.join(kinds) or 'none'}."
        )
    # In CSV files ids stay texts, such as 007.
    texts = csv.ConvertOptions(strings_can_be_null=True, column_types=dict.fromkeys(needed[:2], pa.string()))
    more = {"csv": {"convert_options": texts}, "json": {"file_extensions": None}}
    rows = getattr(ray.data, f"read_{kinds[0]}")([*files], filesystem=store, **more.get(kinds[0], {}))
    columns = rows.columns() or []
    for name in needed:
        if name not in columns:
            raise rs.UserError(f"{path} has no column {name}; it has {', '.join(columns)}.")
    if taken := {"part", "split"} & {*columns}:
        raise rs.UserError(f"{path} has a column {min(taken)}, as the output's folders. Fix: rename it.")
    return rows


def mapped(rows: Any, function: Any, **arguments: Any) -> Any:
    """Return rows with a function applied to each block, a table of Arrow."""
    return rows.map_batches(function, batch_format="pyarrow", batch_size=None, fn_kwargs=arguments)


def ticks_of(times: Any) -> np.ndarray:
    """Return times as int64: microseconds, or the unit of a column of numbers."""
    if types.is_string(times.type) or types.is_large_string(times.type):
        parsed = pd.to_datetime(times.to_pandas(), format="ISO8601", errors="coerce", utc=True)
        if parsed.isna().any():
            raise ValueError(f"{times[int(parsed.isna().argmax())]} is no time. Fix: write ISO 8601.")
        return parsed.dt.tz_localize(None).to_numpy("datetime64[us]").astype(np.int64)
    if types.is_temporal(times.type):
        times = times.cast(pa.timestamp("us"), safe=False)
    elif types.is_floating(times.type):
        times = pc.floor(times)
    return np.asarray(times.cast(pa.int64()))


def complete(events: pa.Table, needed: Sequence[str], time: str) -> pa.Table:
    """Return the rows with a value in each needed column, of which times must be readable."""
    for name in needed:
        events = events.filter(pc.invert(pc.is_null(events[name], nan_is_null=True)))
    ticks_of(events[time])
    return events


def with_part(rows: pa.Table, user: str, partitions: int) -> pa.Table:
    """Add the partition of each row: MD5 of the user's id as a text, the same for 7 and "7" and in DuckDB."""
    users = rows[user].cast(pa.string()).combine_chunks().dictionary_encode()
    texts = [text.encode() for text in users.dictionary.to_pylist()]
    digests = [hashlib.md5(text, usedforsecurity=False).hexdigest() for text in texts]
    names = pa.array([f"{int(digest[:8], 16) % partitions:05d}" for digest in digests], pa.string())
    return rows.append_column("part", names.take(users.indices))


def settled(events: pa.Table, user: str, item: str, time: str, label: str, duplicates: str) -> pa.Table:
    """Return the events of a partition, one of each user and item unless all are kept."""
    order = [time, user, item, *([label] if label else [])]
    frame = events.select(order).to_pandas().assign(**{time: ticks_of(events[time])})
    # After a shuffle rows have no order. Of one time, the larger label is the later one; rows that are equal
    # in all these columns are in the order of their texts.
    tied, places = np.flatnonzero(frame.duplicated(keep=False)), np.arange(len(frame))
    texts = [repr(row) for row in events.take(pa.array(tied)).to_pylist()]
    places[tied] = tied[sorted(range(len(tied)), key=texts.__getitem__)]
    frame = frame.loc[places].sort_values(order, kind="stable")
    if duplicates != "keep":
        frame = frame.drop_duplicates([user, item], keep=duplicates)
    return events.take(pa.array(frame.index))


def times_in(events: pa.Table, time: str, first: int, shift: int) -> pa.Table:
    """Return the numbers of events in ranges of times from `first` on, of those that are not empty."""
    place = (ticks_of(events[time]) - first) >> shift
    place, number = np.unique(place[place >> BITS == 0], return_counts=True)
    return pa.table({"place": place, "number": number})


def cut_of(events: Any, time: str, share: float) -> int:
    """Return the first time of the test: the newest `share` of the events, and others of that time."""
    number = events.count()
    first, before, place = FIRST, 0, number - round(number * share)
    for shift in (48, 32, 16, 0) if 0 < place < number else ():
        counts = np.zeros(2**BITS, np.int64)
        for block in mapped(events, times_in, time=time, first=first, shift=shift).iter_batches():
            np.add.at(counts, block["place"], block["number"])
        ends = before + counts.cumsum()
        at = int(np.searchsorted(ends, place, side="right"))
        before, first = int(ends[at] - counts[at]), first + (at << shift)
    if before == 0:
        raise rs.UserError(f"--test_fraction {share} leaves no event for training or test, by their times.")
    return first


def with_split(events: pa.Table, user: str, item: str, time: str, cut: int, share: float) -> pa.Table:
    """Add the split of each event. A hash draws the validation: the newest would tell of the test."""
    drawn = pd.util.hash_pandas_object(events.select([user, item, time]).to_pandas(), index=False) / 2**64
    split = np.where(ticks_of(events[time]) >= cut, 2, np.where(drawn < share, 1, 0))
    return events.append_column("split", pa.array(SPLITS).take(pa.array(split)))


def counted(partition: pa.Table, user: str, item: str, label: str) -> pa.Table:
    """Return numbers of the splits of a written partition: events, users, items and the ends of labels."""
    events = dataset.dataset(partition["folder"][0].as_py(), format="parquet", partitioning="hive")
    found = events.to_table(columns=["split", user, item, *([label] if label else [])])
    ends = [(label, each) for each in ("min", "max", "count_distinct")] if label else []
    numbers = [([], "count_all"), (user, "count_distinct"), (item, "distinct"), *ends]
    names = ["split", "events", "users", "items", *(["lowest", "highest", "labels"] if label else [])]
    counts = found.group_by("split").aggregate(numbers).rename_columns(names)
    return counts.append_column("folder", pa.array(partition["folder"].to_pylist() * len(counts)))


def count(folder: Path, partitions: int, **columns: str) -> pd.DataFrame:
    """Return the numbers of all partitions, after printing those of the splits."""
    import ray.data

    folders = [{"folder": str(each)} for each in sorted((folder / "events").iterdir())]
    if empty := partitions - len(folders):
        raise rs.UserError(f"{empty} of {partitions} partitions hold no event. Fix: give fewer --partitions.")
    found = ray.data.from_items(folders).map_batches(
        counted, batch_format="pyarrow", batch_size=1, fn_kwargs=columns
    )
    items: dict[str, set[Any]] = {split: set() for split in SPLITS}
    numbers = []
    for row in found.iter_rows():
        items[row["split"]].update(row.pop("items"))
        numbers.append(row)
    table = pd.DataFrame(numbers)
    sums = table.groupby("split")[["events", "users"]].sum().reindex(SPLITS, fill_value=0)
    print(sums.assign(items=[len(items[split]) for split in SPLITS]))
    return table


def schema_of(args: argparse.Namespace, form: str, found: pd.DataFrame) -> str:
    """Return a schema.toml without features."""
    label = {"kind": "clicks"}
    if args.label:
        ends = float(found["lowest"].min()), float(found["highest"].max())
        is_yes_no = ends == (0, 1) and found["labels"].max() <= 2
        label = {"kind": "yes_no" if is_yes_no else "rating", "column": args.label}
    sections: dict[str, dict[str, Any]] = {
        "user": {"column": args.user},
        "item": {"column": args.item},
        "label": label,
        "timestamp": {"column": args.time, "format": form},
    }
    if label["kind"] == "rating":
        sections["label"] |= {"lowest": ends[0], "highest": ends[1]}
    texts = [
        "".join([f"[{name}]\n", *(f"{key} = {json.dumps(value)}\n" for key, value in section.items())])
        for name, section in sections.items()
    ]
    return "\n".join(texts)


def write(args: argparse.Namespace, folder: Path) -> None:
    """Write all files into a folder, and print how many events there are, and of what."""
    import ray

    pair = {"user": args.user, "item": args.item}
    needed = [*pair.values(), args.time, *([args.label] if args.label else [])]
    of_user = {"user": args.user, "partitions": args.partitions}
    log = read(args.input, needed)
    users = read(args.users, [args.user]) if args.users else None
    items = read(args.items, [args.item]) if args.items else None
    kinds = dict(zip(log.schema().names, log.schema().types, strict=True))
    is_number = {name: types.is_integer(kind) or types.is_floating(kind) for name, kind in kinds.items()}
    if args.label and not (is_number[args.label] or types.is_boolean(kinds[args.label])):
        raise rs.UserError(f"--label {args.label} must hold numbers, got {kinds[args.label]}.")
    num_rows = log.count()
    num_complete = mapped(log.select_columns(needed), complete, needed=needed, time=args.time).count()
    if num_complete == 0:
        raise rs.UserError(f"{args.input} holds no event with {', '.join(needed)}.")
    parts = mapped(mapped(log, complete, needed=needed, time=args.time), with_part, **of_user)
    # Ray's shuffle: a partition is in the memory of one process, the others may be on a disk.
    duplicates = args.duplicates or ("last" if args.label else "first")
    how = {**pair, "time": args.time, "label": args.label, "duplicates": duplicates}
    groups = parts.groupby("part", num_partitions=args.partitions)
    parts = groups.map_groups(settled, batch_format="pyarrow", fn_kwargs=how).materialize()
    cut = cut_of(parts, args.time, args.test_fraction)
    events = mapped(parts, with_split, **pair, time=args.time, cut=cut, share=args.validation_fraction)
    events.write_parquet(str(folder / "events"), partition_cols=["part", "split"])
    if users:
        users = mapped(users, with_part, **of_user).repartition(args.partitions, keys=["part"])
        users.write_parquet(str(folder / "users"), partition_cols=["part"])
    if items:
        blocks = ray.get(items.to_arrow_refs())
        parquet.write_table(pa.concat_tables(blocks, promote_options="permissive"), folder / "items.parquet")
    counts = count(folder, args.partitions, **pair, label=args.label)
    sizes = counts.groupby("folder")["events"].sum()
    print(f"partitions: {sizes.min():,} events in the smallest, {sizes.max():,} in the largest")
    print(f"skipped: {num_rows - num_complete:,} rows without one of {', '.join(needed)}")
    print(f"dropped: {num_complete - sizes.sum():,} repeated events (--duplicates {duplicates})")
    unit = next(name for name, most in UNITS.items() if cut < most) if is_number[args.time] else "iso"
    (folder / "schema.toml").write_text(schema_of(args, unit, counts))


def prepare(argv: Sequence[str] | None = None) -> int:
    """Read flags, and write partitions. Return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    for name, default, text in (
        ("input", None, "file, folder or URL with the log"),
        ("output", None, "new folder"),
        ("user", None, "column of users"),
        ("item", None, "column of items"),
        ("time", None, "column of times: ISO 8601, or numbers since 1970"),
        ("label", "", "column of labels; without it each event is a click"),
        ("users", "", "table with properties of users"),
        ("items", "", "table with properties of items"),
        ("partitions", 64, "number of partitions, each of which must fit into memory"),
        ("test_fraction", 0.2, "share of the events in the test, the newest"),
        ("validation_fraction", 0.05, "share of the other events in the validation"),
        ("address", "", "of a cluster of Ray; without it that of RAY_ADDRESS, or this machine"),
    ):
        kind = str if default is None else type(default)
        parser.add_argument(f"--{name}", type=kind, default=default, required=default is None, help=text)
    parser.add_argument(
        "--duplicates", choices=("last", "first", "keep"), help="of events of a user and item"
    )
    args = parser.parse_args(argv)
    out = Path(args.output).resolve()
    if "://" in args.output or out.exists():
        reason = "exists" if out.exists() else "is a URL; copy the folder there when it is complete"
        raise rs.UserError(f"--output {args.output} {reason}. Fix: give a new folder.")
    of_partition = len(SPLITS) + bool(args.users)
    most = (MAX_FILES - 1) // of_partition
    if not 1 <= args.partitions <= most:
        raise rs.UserError(
            f"--partitions must be between 1 and {most:,}, got {args.partitions}: a training reads at most "
            f"{MAX_FILES:,} files, and a partition has {of_partition}."
        )
    for name in ("test_fraction", "validation_fraction"):
        if not 0 < getattr(args, name) < 1:
            raise rs.UserError(f"--{name} must be above 0 and below 1, got {getattr(args, name)}.")
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    try:
        ray.init(args.address or None, ignore_reinit_error=True, logging_level="error", log_to_driver=False)
        # Complete or absent.
        with replacing(out) as folder:
            folder.mkdir(parents=True)
            write(args, folder)
    except (ray.exceptions.RayError, pa.ArrowException, OSError) as error:
        # In a report of Ray the error of a task comes first.
        found = re.search(r"^[\w.]*(?:Error|Exception|Invalid): .*", str(error), re.MULTILINE)
        raise rs.UserError(f"Ray stopped: {found[0] if found else str(error).splitlines()[0]}") from error
    script = os.path.relpath(Path(__file__).with_name("example.py" if args.label else "retrieval.py"))
    flags = f"--data_path {shlex.quote(str(args.output))} --partitions {args.partitions}"
    print(f"next: torchrun --standalone --nproc_per_node 2 {shlex.quote(script)} {flags}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""
    return rs.exit_status(lambda: prepare(argv))


if __name__ == "__main__":
    rs.run_script(main)
