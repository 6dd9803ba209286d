"""Extras by the hook of the core that they serve.

The core imports extras by this table alone; `recsuite.PUBLIC` has their public names.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

# --initial_rows to the function that makes the rows, see `Training.shard`.
INITIAL_ROWS: Mapping[str, str] = {"gaussian": "recsuite.extras.gaussian:gaussian_rows"}


def extra(place: str) -> Callable[..., Any]:
    """Return a function of an extra, which is imported when it is called; place: "module:name"."""
    module, _, name = place.partition(":")

    def call(*arguments: Any) -> Any:
        return getattr(importlib.import_module(module), name)(*arguments)

    return call
