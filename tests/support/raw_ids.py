"""The raw ids of events, of which a `RawData` holds positions."""

from __future__ import annotations

import numpy as np

from recsuite.datasets.schema import RawData


def users_of(raw: RawData) -> np.ndarray:
    """The raw id of each event's user, [events]."""
    return raw.users["user_id"].to_numpy()[raw.events.user]


def items_of(raw: RawData, column: str = "movie_id") -> np.ndarray:
    """The raw id of each event's item, [events]."""
    return raw.items[column].to_numpy()[raw.events.item]
