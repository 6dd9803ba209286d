"""Extras by name: the only place where the core names them. `recsuite.PUBLIC` has their public names."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from recsuite.errors import UserError, script_name

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
    "partitions": ("recsuite.extras.partitions.flags", "PartitionsConfig"),
}
# --initial_rows, which is the name of an extra, to its function that makes the rows, see `Training.shard`.
INITIAL_ROWS: Mapping[str, str] = {"gaussian": "gaussian_rows"}
# Format of a table to the extra that reads it and its reader, a `tables.formats.FileReader`.
READERS: Mapping[str, tuple[str, str]] = {"jsonl": ("json_lines", "JsonLines")}
# --synthetic_kind, which is the name of an extra, to its `movielens.synthetic.World`.
WORLDS: Mapping[str, str] = {"drifting": "DriftingWorld"}

# Module of a package that only extras and scripts use, to its name for pip and that of the optional
# dependencies of the wheel that have it.
PACKAGES: Mapping[str, tuple[str, str]] = {
    "aiohttp": ("aiohttp", "stores"),
    "confluent_kafka": ("confluent-kafka", "kafka"),
    "faiss": ("faiss-cpu", "index"),
    "fastapi": ("fastapi", "serve"),
    "fastapi_offline": ("fastapi-offline", "serve"),
    "fsspec": ("fsspec", "stores"),
    "mlflow": ("mlflow-skinny", "mlflow"),
    "onnx": ("onnx", "onnx"),
    "onnxscript": ("onnxscript", "onnx"),
    "s3fs": ("s3fs", "s3"),
    "tensorboard": ("tensorboard", "reports"),
    "uvicorn": ("uvicorn", "serve"),
}
# Scripts that others import when they need them.
SCRIPTS = ("example", "retrieval", "sequential")


def extra(name: str) -> ModuleType:
    """Import and return the module of an extra.

    Raises:
        UserError: when this installation lacks the extra.
    """
    return required(EXTRAS[name])


def optional(name: str) -> ModuleType | None:
    """Import and return the module of an extra; return None if this installation lacks it."""
    return _imported(EXTRAS[name])


def required(name: str) -> ModuleType:
    """Import and return a module by its full name.

    Raises:
        UserError: when this installation lacks it.
    """
    module = _imported(name)
    if module is None:
        raise UserError(_refusal(name))
    return module


def require_installed(subject: str, *names: str) -> None:
    """Check for extras and packages, by the full names of their modules, without importing them.

    Raises:
        UserError: for the first one that this installation lacks, with what to install.
    """
    for name in names:
        if _is_installed(name):
            continue
        if name not in PACKAGES:
            raise UserError(_refusal(name))
        package, group = PACKAGES[name]
        # First the package: for recsuite[...] pip also installs the CUDA wheel that torchrec requires.
        raise UserError(
            f"{subject} requires {package}, which is not installed. Fix: pip install {package}, which is one "
            f"of recsuite[{group}]."
        )


def _is_installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # The package that it is in.
        return False


def describe_missing(error: BaseException) -> str:
    """Return a sentence for a script that imports a missing extra, or a missing script; "" for others."""
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    if name in SCRIPTS:
        return f"This requires {name}.py, which is not beside {script_name()}. Fix: copy it there too."
    return _refusal(name) if f"{name}.".startswith("recsuite.extras.") else ""


def _refusal(name: str) -> str:
    return f"This requires {name}, which is not installed. Fix: install the whole package recsuite."


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


def missing_sections() -> list[str]:
    """Return the names of the sections that this installation lacks, sorted."""
    return sorted(SECTIONS.keys() - sections().keys())


def _imported(name: str) -> ModuleType | None:
    """Import a module; return None if this installation lacks it."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that an extra needs is refused by the extra, with what to install.
        if error.name is None or not name.startswith(error.name):
            raise
        return None
