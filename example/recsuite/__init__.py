"""Sharded recommenders: see docs/. Imports nothing until something is asked for: data workers import it."""

from __future__ import annotations

from typing import Any

__all__ = ["FittedModel", "fit"]


def __getattr__(name: str) -> Any:
    if name == "FittedModel":
        from recsuite.tools.fitted import FittedModel

        return FittedModel
    if name == "fit":
        from recsuite.tools.fitting import fit

        return fit
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
