"""Extras by name: the only place where the core names them. `recsuite.PUBLIC` has their public names."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from recsuite.errors import UserError

EXTRAS: Mapping[str, str] = {
    "dialects": "recsuite.extras.dialects",
    "doctor": "recsuite.extras.doctor",
    "gaussian": "recsuite.extras.gaussian",
    "graph": "recsuite.extras.graph",
    "guess": "recsuite.extras.guess.proposal",
    "index": "recsuite.extras.index",
    "json_lines": "recsuite.extras.json_lines",
    "kafka": "recsuite.extras.kafka",
    "leakage": "recsuite.extras.leakage",
    "names": "recsuite.extras.guess.names",
    "profiler": "recsuite.extras.profiler",
    "recommend": "recsuite.extras.recommend",
    "report": "recsuite.extras.reports.report",
    "schema": "recsuite.extras.guess.writer",
    "segments": "recsuite.extras.reports.segments",
    "stores": "recsuite.extras.stores.objects",
    "trackers": "recsuite.extras.reports.trackers",
    "urls": "recsuite.extras.stores.urls",
}
# --initial_rows, which is the name of an extra, to its function that makes the rows, see `Training.shard`.
INITIAL_ROWS: Mapping[str, str] = {"gaussian": "gaussian_rows"}
# Format of a table to the extra that reads it and its reader, a `tables.formats.FileReader`.
READERS: Mapping[str, tuple[str, str]] = {"jsonl": ("json_lines", "JsonLines")}


def extra(name: str) -> ModuleType:
    """Import and return the module of an extra.

    Raises:
        UserError: when this installation lacks the extra.
    """
    try:
        return importlib.import_module(EXTRAS[name])
    except ModuleNotFoundError as error:
        # A package that an extra needs is refused by the extra, with what to install.
        if error.name is None or not EXTRAS[name].startswith(error.name):
            raise
        raise UserError(
            f"This installation of recsuite lacks {EXTRAS[name]}, which these flags require. Fix: install "
            "the whole package, with its folder extras."
        ) from error


def reader_of(file_format: str) -> Any:
    """Import and return the reader of tables of a format.

    Raises:
        UserError: when this installation lacks the extra.
    """
    name, reader = READERS[file_format]
    return getattr(extra(name), reader)
