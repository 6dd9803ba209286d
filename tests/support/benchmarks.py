"""Import and run the benchmarks, which are scripts and no package."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import ROOT, python, read_json, succeeded

BENCHMARKS = ROOT / "benchmarks"


def benchmark(name: str) -> Any:
    """Import the module of a benchmark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        return importlib.import_module(name)


def measured(
    name: str, report: Path, *flags: object, result: str = "", timeout: float = 170
) -> tuple[Any, str]:
    """Run a benchmark; return the results that it writes and the text that it prints.

    result: name of its JSON, that of the benchmark by default.
    """
    script = BENCHMARKS / f"{name}.py"
    # First, because behind --train all flags are those of the example.
    printed = succeeded(python(script, "--report", report, *flags, timeout=timeout))
    return read_json(report / f"{result or name}.json"), printed
