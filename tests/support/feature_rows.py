"""Rows as a model gets them, made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from recsuite.models.rows import FeatureRows


def feature_rows(found: Mapping[str, Any], scale: float = 1.0) -> FeatureRows:
    """Rows of looked-up features; those are lists of which an event has not exactly one value."""
    lists = [name for name, each in found.items() if not bool((each.lengths() == 1).all())]
    rows = next(iter(found.values())).values()
    return FeatureRows(found, torch.tensor(scale, dtype=rows.dtype), lists)
