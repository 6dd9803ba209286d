"""Graphs of exports, each traced once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from recsuite.extras.graph import graph


@contextlib.contextmanager
def one_graph() -> Iterator[None]:
    """Within this, all exports get the first graph: they are of one model, and a graph has no rows."""
    write, content = graph.write_graph, list[bytes]()

    def write_once(folder: Path, snapshot: Any, kind: str) -> Path:
        path = folder / graph.FILES[kind]
        if content:
            path.write_bytes(content[0])
        else:
            content.append(write(folder, snapshot, kind).read_bytes())
        return path

    with mock.patch.object(graph, "write_graph", write_once):
        yield
