"""Extras by name: the only place where the core names them. `recsuite.PUBLIC` has their public names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from recsuite.errors import UserError

EXTRAS: Mapping[str, str] = {
    "dialects": "recsuite.extras.dialects",
    "download": "recsuite.extras.stores.download",
    "drifting": "recsuite.extras.drifting",
    "gaussian": "recsuite.extras.gaussian",
    "guess": "recsuite.extras.guess.proposal",
    "index": "recsuite.extras.index",
    "json_lines": "recsuite.extras.json_lines",
    "kafka": "recsuite.extras.kafka",
    "leakage": "recsuite.extras.leakage",
    "names": "recsuite.extras.guess.names",
    "schema": "recsuite.extras.guess.writer",
    "spread": "recsuite.extras.reports.spread",
    "stores": "recsuite.extras.stores.objects",
    "trackers": "recsuite.extras.reports.trackers",
    "urls": "recsuite.extras.stores.urls",
    "warm": "recsuite.extras.warm",
}
# Sections of flags by their names, each a module and its class, see `ExtraSection`. In the order of
# --help_all.
SECTIONS: Mapping[str, tuple[str, str]] = {
    "reports": ("recsuite.extras.reports.flags", "ReportsConfig"),
    "doctor": ("recsuite.extras.doctor.flags", "DoctorConfig"),
    "guess": ("recsuite.extras.guess.flags", "GuessConfig"),
    "graph": ("recsuite.extras.graph.flags", "GraphConfig"),
    "recommend": ("recsuite.extras.recommend.flags", "RecommendConfig"),
}
# --initial_rows, which is the name of an extra, to its function that makes the rows, see `Training.shard`.
INITIAL_ROWS: Mapping[str, str] = {"gaussian": "gaussian_rows"}
# Format of a table to the extra that reads it and its reader, a `tables.formats.FileReader`.
READERS: Mapping[str, tuple[str, str]] = {"jsonl": ("json_lines", "JsonLines")}
# --synthetic_kind, which is the name of an extra, to its `movielens.synthetic.World`.
WORLDS: Mapping[str, str] = {"drifting": "DriftingWorld"}


def extra(name: str) -> ModuleType:
    """Import and return the module of an extra.

    Raises:
        UserError: when this installation lacks the extra.
    """
    return required(EXTRAS[name])


def required(name: str) -> ModuleType:
    """Import and return a module by its full name.

    Raises:
        UserError: when this installation lacks it.
    """
    module = _imported(name)
    if module is None:
        raise UserError(
            f"This requires {name}, which is not installed. Fix: install the whole package recsuite."
        )
    return module


def reader_of(file_format: str) -> Any:
    """Import and return the reader of tables of a format.

    Raises:
        UserError: when this installation lacks the extra.
    """
    name, reader = READERS[file_format]
    return getattr(extra(name), reader)


@functools.cache
def sections() -> Mapping[str, type[Any]]:
    """Return the classes of `SECTIONS` by name. An installation without an extra has none of its flags."""
    modules = {name: (_imported(module), kind) for name, (module, kind) in SECTIONS.items()}
    return {name: getattr(module, kind) for name, (module, kind) in modules.items() if module}


def _imported(name: str) -> ModuleType | None:
    """Import a module; return None if this installation lacks it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that an extra needs is refused by the extra, with what to install.
        if error.name is None or not name.startswith(error.name):
            raise
        return None
