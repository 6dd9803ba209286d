"""Files of events that somebody or something has damaged, or written in another way: drawn from a seed.

Run with a folder, `python -m tests.support.mutated_files FOLDER`, it reads the files in it, with a line of
JSON for each: the test does so in a process of its own, which damage may end.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.feather
import pyarrow.parquet

from recsuite.config.sections import DataConfig
from recsuite.datasets.tables.files import find_tables
from recsuite.datasets.tables.reading import read_tables
from recsuite.datasets.tables.sections import (
    FeatureColumn,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
)
from recsuite.errors import UserError
from tests.support.tables import ENDS, encoded

ROWS = 50
SCHEMA = TableSchema(
    UserColumn("user"),
    ItemColumn("item"),
    LabelColumn("rating", "stars", 1, 5, 4),
    timestamp=TimestampColumn("time", "unix"),
    features={
        "price": FeatureColumn("item", "price", "number"),
        "tags": FeatureColumn("item", "tags", "list"),
        "device": FeatureColumn("event", "device", "category"),
    },
)


@dataclass(frozen=True)
class Mutant:
    """A file's name and content; is_same: whether it holds what the plain file holds."""

    name: str
    content: bytes
    is_same: bool


def table() -> pyarrow.Table:
    """Content of the plain files."""
    return pyarrow.table(
        {
            "user": [f"u{row % 7}" for row in range(ROWS)],
            "item": [row * 37 % 11 - 3 for row in range(ROWS)],
            "stars": [1 + row % 5 for row in range(ROWS)],
            "time": [1_795_132_800 + row for row in range(ROWS)],
            "price": [None if row % 11 == 3 else row / 4 for row in range(ROWS)],
            "tags": [["a", "b"][: row % 3] for row in range(ROWS)],
            "device": ["web", "app", None][0:3] * (ROWS // 3) + ["web"] * (ROWS % 3),
        }
    )


def mutants(seed: int, number: int) -> list[Mutant]:
    """So many files, over all formats in turn: about a third of them only written in another way."""
    rng = random.Random(seed)
    made = []
    for index in range(number):
        end = ENDS[index % len(ENDS)]
        plain = encoded(table(), end)
        is_same = index // len(ENDS) % 3 == 0
        content = rewritten(end, rng) if is_same else rng.choice(DAMAGES)(plain, rng)
        made.append(Mutant(f"{index:03d}.{end}", content, is_same))
    return made


def rewritten(end: str, rng: random.Random) -> bytes:
    """The same table in other bytes."""
    order = table().column_names
    rng.shuffle(order)
    shuffled = table().select(order)
    if end == "parquet":
        sink = pyarrow.BufferOutputStream()
        compression = rng.choice(["none", "snappy", "gzip", "zstd"])
        pyarrow.parquet.write_table(shuffled, sink, rng.randint(1, ROWS), compression=compression)
        return bytes(sink.getvalue())
    if end == "arrow":
        sink = pyarrow.BufferOutputStream()
        compression, size = rng.choice(["uncompressed", "lz4", "zstd"]), rng.randint(1, ROWS)
        pyarrow.feather.write_feather(shuffled, sink, compression, chunksize=size)
        return bytes(sink.getvalue())
    if end == "stream.arrow":
        return encoded(shuffled, end)
    return _packed(rng.choice(REWRITES)(encoded(shuffled, end.partition(".")[0]), rng), end)


def _packed(text: bytes, end: str) -> bytes:
    """Packed as the name says, or as it does not: which of them it is, a file says itself."""
    if end.endswith(".gz"):
        half = len(text) // 2
        return gzip.compress(text[:half], mtime=0) + gzip.compress(text[half:], mtime=0)
    return bytes(pyarrow.compress(text, "zstd", asbytes=True)) if end.endswith(".zst") else text


# Each keeps what a text says.
REWRITES: list[Callable[[bytes, random.Random], bytes]] = [
    lambda text, rng: b"\xef\xbb\xbf" + text,
    lambda text, rng: text.replace(b"\n", b"\r\n"),
    lambda text, rng: text.decode().encode("utf-16"),
    lambda text, rng: text + b"\n" * rng.randint(1, 9),
    lambda text, rng: text.rstrip(b"\n"),
    lambda text, rng: text.replace(b"\n", b"\n\n"),
    lambda text, rng: text,
]


def _at(content: bytes, rng: random.Random, new: bytes, removed: int) -> bytes:
    place = rng.randrange(len(content))
    return content[:place] + new + content[place + removed :]


# Each is something that happens to files.
DAMAGES: list[Callable[[bytes, random.Random], bytes]] = [
    lambda content, rng: content[: rng.randrange(len(content))],
    lambda content, rng: content[rng.randrange(1, len(content)) :],
    lambda content, rng: _at(content, rng, rng.randbytes(1), 1),
    lambda content, rng: _at(content, rng, rng.randbytes(8), 8),
    lambda content, rng: _at(content, rng, b"", rng.randint(1, 40)),
    lambda content, rng: _at(content, rng, bytes(rng.randint(1, 64)), 0),
    lambda content, rng: _at(content, rng, bytes(64), 64),
    lambda content, rng: _at(content, rng, b'"', 0),
    lambda content, rng: _at(content, rng, b"\n", 0),
    lambda content, rng: _at(content, rng, b"[" * 200_000, 0),
    lambda content, rng: _at(content, rng, b"x" * 2_000_000, 0),
    lambda content, rng: content + content,
    lambda content, rng: content + rng.randbytes(rng.randint(1, 64)),
    lambda content, rng: rng.randbytes(len(content)),
    lambda content, rng: b"",
    lambda content, rng: content[: content.find(b"\n") + 1 or 16],
    lambda content, rng: gzip.compress(content, mtime=0)[: rng.randint(20, 200)],
    lambda content, rng: content[:40] + content[80:120] + content[40:80] + content[120:],
]


def told(path: Path) -> dict[str, Any]:
    """Outcome of reading a file: its values, a message, or a traceback."""
    try:
        raw = read_tables(find_tables(path), SCHEMA, DataConfig(cache_dir=str(path.parent / "cache")))
    except UserError as error:
        return {"refused": str(error)}
    except BaseException:
        return {"traceback": traceback.format_exc()}
    columns = {
        "items": [raw.items[name].tolist() for name in ("item", "price", "tags")],
        "users": raw.users["user"].tolist(),
        "device": repr(raw.events.features["device"]),
        **{name: getattr(raw.events, name).tolist() for name in ("user", "item", "label", "time")},
    }
    return {"values": repr(columns)}


def main() -> None:
    """Read all files of a folder, in the order of their names."""
    for path in sorted(Path(sys.argv[1]).glob("*.*")):
        start = time.monotonic()
        # Of an end of the process, the parent knows at which file.
        print(json.dumps({"name": path.name}), flush=True)
        print(json.dumps({**told(path), "seconds": time.monotonic() - start}), flush=True)


if __name__ == "__main__":
    main()
