"""Partition a log of events by user with Ray Data, for trainings in which no machine reads all of it.

    python example/prepare.py --input log --output parts --partitions 64 --user user_id --item item_id --time time

The log is a folder or URL (`s3://...`) with Parquet, CSV or JSON lines. `--output` is a folder that all machines see:

    parts/schema.toml                                meaning of the columns; add features there
    parts/events/part=00000/split=train/*.parquet    also split=validation and split=test
    parts/users/part=00000/*.parquet, parts/items.parquet

It runs on this machine, or on a cluster with `--address`. Requires `pip install "ray[data]"`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv, fs, parquet, types

import recsuite as rs
from recsuite.files import replacing

SPLITS = ("train", "validation", "test")
FORMATS = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
UNITS = {"unix": 1e11, "unix_ms": 1e14, "unix_us": 1e17, "unix_ns": 1e20}
# A text that is no time has the least number as its time.
NO_TIME = np.iinfo(np.int64).min
# Ranges of times that are counted in one pass over the events.
RANGES = 2**16


def read(path: str, ids: Sequence[str], needed: Sequence[str]) -> Any:
    """Return the rows below a path, which must have the needed columns. ids: texts in CSV files, such as 007."""
    import ray.data

    try:
        store, root = fs.FileSystem.from_uri(path if "://" in path else str(Path(path).resolve()))
        entry = store.get_file_info(root)
        below = [entry] if entry.is_file else store.get_file_info(fs.FileSelector(root, recursive=True))
    except (OSError, pa.ArrowException) as error:
        raise rs.UserError(f"Cannot read {path}: {str(error).splitlines()[0]}") from None
    names = [each.path for each in below if each.is_file]
    files = {name: kind for name in names for end, kind in FORMATS.items() if end in Path(name).suffixes}
    kinds = sorted({*files.values()})
    if len(kinds) != 1:
        raise rs.UserError(f"{path} must have files of one of parquet, csv and json, got {', '.join(kinds) or 'none'}.")
    texts = csv.ConvertOptions(strings_can_be_null=True, column_types=dict.fromkeys(ids, pa.string()))
    more = {"csv": {"convert_options": texts}, "json": {"lines": True, "file_extensions": None}}
    rows = getattr(ray.data, f"read_{kinds[0]}")([*files], filesystem=store, **more.get(kinds[0], {}))
    columns = rows.columns() or []
    for name in needed:
        if name not in columns:
            raise rs.UserError(f"{path} has no column {name}; it has {', '.join(columns)}.")
    if taken := {"part", "split"} & {*columns}:
        raise rs.UserError(f"{path} has a column {min(taken)}, the name of a folder of --output. Fix: rename it.")
    return rows


def mapped(rows: Any, function: Any, **arguments: Any) -> Any:
    """Return rows with a function applied to each block, which is one table of Arrow."""
    return rows.map_batches(function, batch_format="pyarrow", batch_size=None, fn_kwargs=arguments)


# --- functions of a block, or of a partition ---


def ticks_of(times: Any) -> np.ndarray:
    """Return times as int64: microseconds, or the unit of a column of numbers."""
    if types.is_string(times.type) or types.is_large_string(times.type):
        parsed = pd.to_datetime(times.to_pandas(), format="ISO8601", errors="coerce", utc=True)
        return parsed.dt.tz_localize(None).to_numpy("datetime64[us]").astype(np.int64)
    if types.is_temporal(times.type):
        times = times.cast(pa.timestamp("us"), safe=False)
    elif types.is_floating(times.type):
        times = pc.floor(times)
    return np.asarray(times.cast(pa.int64()))


def complete(events: pa.Table, needed: Sequence[str]) -> pa.Table:
    """Return the rows with a value in each needed column."""
    for name in needed:
        events = events.filter(pc.invert(pc.is_null(events[name], nan_is_null=True)))
    return events


def found_in(events: pa.Table, needed: Sequence[str]) -> dict[str, list[Any]]:
    """Return numbers of rows, types of the needed columns, and the ends and faults of times and labels."""
    whole = complete(events, needed)
    ticks, time = ticks_of(whole[needed[2]]), events[needed[2]].type
    given = pd.Series(pc.unique(whole[needed[-1]]).to_pylist() if needed[3:] else [], dtype=object)
    labels = pd.to_numeric(given, errors="coerce")
    return {
        **{name: [None if types.is_null(events[name].type) else str(events[name].type)] for name in needed},
        "num rows": [len(events)],
        "num complete": [len(whole)],
        "first time": [ticks.min(initial=2**62)],
        "last time": [ticks.max(initial=-(2**62))],
        "is number": [types.is_integer(time) or types.is_floating(time)],
        "no time": [str(whole[needed[2]][ticks.argmin()]) if NO_TIME in ticks else None],
        "lowest": [labels.min()],
        "highest": [labels.max()],
        "is yes_no": [{*labels} <= {0, 1}],
        "no label": [str(given[labels.isna()].iloc[0]) if labels.isna().any() else None],
    }


def with_part(rows: pa.Table, user: str, partitions: int) -> pa.Table:
    """Add the partition of each row: a hash of the user's id as a text, the same for 7 and "7"."""
    users = rows[user].cast(pa.string()).to_pandas().to_numpy(object)
    names = pa.array([f"{number:05d}" for number in range(partitions)])
    return rows.append_column("part", names.take(pa.array(pd.util.hash_array(users) % partitions)))


def settled(events: pa.Table, needed: Sequence[str], duplicates: str) -> pa.Table:
    """Return the events of a partition, one of each user and item unless all are kept."""
    user, item, time, *label = needed
    frame = events.select([user, item, *label]).to_pandas().assign(**{time: ticks_of(events[time])})
    # Of one time, the larger label is the later: there is no order of rows after a shuffle.
    frame = frame.sort_values([time, user, item, *label])
    if duplicates != "keep":
        frame = frame.drop_duplicates([user, item], keep=duplicates)
    return events.take(pa.array(frame.index))


def times_in(events: pa.Table, time: str, first: int, width: int) -> pa.Table:
    """Return the numbers of events in ranges of times from `first` on, of those that are not empty."""
    place = (ticks_of(events[time]) - first) // width
    place, number = np.unique(place[(place >= 0) & (place < RANGES)], return_counts=True)
    return pa.table({"place": place, "number": number})


def with_split(events: pa.Table, needed: Sequence[str], cut: int, share: float) -> pa.Table:
    """Add the split of each event. Validation is drawn by a hash: the newest would tell most about the test."""
    drawn = pd.util.hash_pandas_object(events.select([*needed[:3]]).to_pandas(), index=False) / 2**64
    split = np.where(ticks_of(events[needed[2]]) >= cut, 2, np.where(drawn < share, 1, 0))
    return events.append_column("split", pa.array(SPLITS).take(pa.array(split)))


# --- passes over all blocks ---


def look(events: Any, needed: Sequence[str], path: str) -> pd.Series:
    """Return what `found_in` finds, of all blocks. Refuse what cannot be used."""
    found = mapped(events.select_columns([*needed]), found_in, needed=needed).to_pandas()
    for name in needed:
        if len(kinds := sorted({*found[name].dropna()})) > 1:
            raise rs.UserError(f"{path} has a column {name} of several types: {', '.join(kinds)}.")
    for what, fix in (("time", "ISO 8601 or numbers since 1970"), ("label", "numbers")):
        if bad := [*found[f"no {what}"].dropna()]:
            raise rs.UserError(f"Cannot read {path}: {bad[0]} is no {what}. Fix: write {fix}.")
    if not found["num complete"].sum():
        raise rs.UserError(f"{path} holds no event with {', '.join(needed)}.")
    how = {"num rows": "sum", "num complete": "sum", "first time": "min", "last time": "max", "is number": "any"}
    return found.agg({**how, "lowest": "min", "highest": "max", "is yes_no": "all"})


def cut_of(events: Any, time: str, found: pd.Series, share: float) -> int:
    """Return the time at which the test begins: of the newest `share` of the events, and others of that time."""
    first, before, place = int(found["first time"]), 0, -1
    width = (int(found["last time"]) - first) // RANGES + 1
    while True:
        counts = np.zeros(RANGES, np.int64)
        for block in mapped(events, times_in, time=time, first=first, width=width).iter_batches():
            np.add.at(counts, block["place"], block["number"])
        place = int(counts.sum() - round(counts.sum() * share)) if place < 0 else place
        ends = before + counts.cumsum()
        at = int(np.searchsorted(ends, place, side="right"))
        if at < RANGES:
            before, first = int(ends[at] - counts[at]), first + at * width
        if at == RANGES or width == 1 and before == 0:
            raise rs.UserError(f"--test_fraction {share} leaves no event for training or test, by their times.")
        if width == 1:
            return first
        width = (width - 1) // RANGES + 1


def counts_of(events: Any, args: argparse.Namespace) -> pd.DataFrame:
    """Return the numbers of events, users and items of each split, and print them beside the sizes of partitions."""

    def counted(rows: Any, *keys: str) -> Any:
        return rows.select_columns([*keys]).groupby([*keys], num_partitions=min(args.partitions, 64)).count()

    sizes = counted(events, "part", "split").to_pandas().set_index(["part", "split"])["count()"]
    columns = {"events": sizes.groupby("split").sum()}
    for name, column in (("users", args.user), ("items", args.item)):
        distinct = counted(counted(events, "split", column), "split").to_pandas()
        columns[name] = distinct.set_index("split")["count()"]
    counts = pd.DataFrame(columns).reindex(SPLITS).fillna(0).astype(int)
    of_part = sizes.groupby("part").sum()
    if empty := args.partitions - len(of_part):
        raise rs.UserError(f"{empty} of {args.partitions} partitions hold no event. Fix: give fewer --partitions.")
    print(counts.to_string())
    print(f"partitions: {of_part.min():,} events in the smallest, {of_part.max():,} in the largest")
    return counts


def schema_of(args: argparse.Namespace, found: pd.Series, tables: dict[str, Any]) -> str:
    """Return a schema.toml, with other columns as features in comments."""
    unit = next(name for name, most in UNITS.items() if found["last time"] < most) if found["is number"] else "iso"
    label = {"kind": "yes_no" if found["is yes_no"] else "rating", "column": args.label}
    label |= {} if found["is yes_no"] else {"lowest": float(found["lowest"]), "highest": float(found["highest"])}
    sections = {
        "files": {name: "items.parquet" if name == "items" else name for name in tables},
        "user": {"column": args.user},
        "item": {"column": args.item},
        "label": label if args.label else {"kind": "clicks"},
        "timestamp": {"column": args.time, "format": unit},
    }
    for name, rows in tables.items():
        for column, kind in zip(rows.schema().names, rows.schema().types, strict=True):
            if column not in (args.user, args.item, args.label, args.time):
                kind = "number" if types.is_floating(kind) else "category"
                sections[f"features.{column}"] = {"of": name[:-1], "column": column, "kind": kind}
    text = ""
    for name, section in sections.items():
        mark = "# " if name.startswith("features.") else ""
        lines = [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
        text += "".join(f"{mark}{line}\n" for line in lines) + "\n"
    return text


def write(args: argparse.Namespace, folder: Path) -> None:
    """Write all files into a folder."""
    import ray

    needed = [name for name in (args.user, args.item, args.time, args.label) if name]
    log, of_user = read(args.input, needed[:2], needed), {"user": args.user, "partitions": args.partitions}
    others = {"users": (args.users, args.user), "items": (args.items, args.item)}
    tables = {name: read(path, [column], [column]) for name, (path, column) in others.items() if path}
    found = look(log, needed, args.input)
    duplicates = args.duplicates or ("last" if args.label else "first")
    parts = mapped(mapped(log, complete, needed=needed), with_part, **of_user)
    # Ray's shuffle: all events of a partition are in the memory of one process, and the rest may be on a disk.
    parts = parts.groupby("part", num_partitions=args.partitions).map_groups(
        settled, batch_format="pyarrow", fn_kwargs={"needed": needed, "duplicates": duplicates}
    )
    parts = parts.materialize()
    cut = cut_of(parts, args.time, found, args.test_fraction)
    events = mapped(parts, with_split, needed=needed, cut=cut, share=args.validation_fraction)
    events.write_parquet(str(folder / "events"), partition_cols=["part", "split"])
    if args.users:
        users = mapped(tables["users"], with_part, **of_user).repartition(args.partitions, keys=["part"])
        users.write_parquet(str(folder / "users"), partition_cols=["part"])
    if args.items:
        items = pa.concat_tables(ray.get(tables["items"].to_arrow_refs()), promote_options="permissive")
        parquet.write_table(items, folder / "items.parquet")
    num_events = counts_of(events, args)["events"].sum()
    print(f"skipped: {found['num rows'] - found['num complete']:,} rows without one of {', '.join(needed)}")
    print(f"dropped: {found['num complete'] - num_events:,} repeated events (--duplicates {duplicates})")
    (folder / "schema.toml").write_text(schema_of(args, found, {"events": log, **tables}))


def prepare(argv: Sequence[str] | None = None) -> int:
    """Read flags, and write partitions. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, text in (
        ("input", "file, folder or URL with the log"),
        ("output", "new folder"),
        ("user", "column of users"),
        ("item", "column of items"),
        ("time", "column of times: ISO 8601, or numbers since 1970"),
    ):
        parser.add_argument(f"--{name}", required=True, help=text)
    parser.add_argument("--label", default="", help="column of labels (default: each event is a click)")
    parser.add_argument("--users", default="", help="table with properties of users")
    parser.add_argument("--items", default="", help="table with properties of items")
    parser.add_argument("--partitions", type=int, default=64, help="each has to fit into memory (default: 64)")
    parser.add_argument("--test_fraction", type=float, default=0.2, help="newest share of events (default: 0.2)")
    parser.add_argument("--validation_fraction", type=float, default=0.05, help="of the rest (default: 0.05)")
    parser.add_argument("--duplicates", choices=("last", "first", "keep"), help="events of a user and an item")
    parser.add_argument("--address", help="of a cluster of Ray, such as auto (default: RAY_ADDRESS or this machine)")
    args = parser.parse_args(argv)
    out = Path(args.output)
    if "://" in args.output or out.exists():
        why = "exists" if out.exists() else "is a URL; copy the finished folder there"
        raise rs.UserError(f"--output {out} {why}. Fix: give a new folder.")
    if args.partitions < 1:
        raise rs.UserError(f"--partitions must be at least 1, got {args.partitions}.")
    for name in ("test_fraction", "validation_fraction"):
        if not 0 < getattr(args, name) < 1:
            raise rs.UserError(f"--{name} must be above 0 and below 1, got {getattr(args, name)}.")
    import ray.data

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(args.address, ignore_reinit_error=True, logging_level="error", log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    try:
        # Complete or absent.
        with replacing(out.resolve()) as folder:
            folder.mkdir(parents=True)
            write(args, folder)
    except ray.exceptions.RayError as error:
        raise rs.UserError(f"Ray: {str(error).strip().splitlines()[-1]}") from error
    script = "example.py" if args.label else "retrieval.py"
    print(f"train: torchrun --nproc_per_node 2 {script} --data_path {out} --partitions {args.partitions} --split files")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return the exit status: 2 for a user's mistake."""
    return rs.exit_status(lambda: prepare(argv))


if __name__ == "__main__":
    rs.run_script(main)
