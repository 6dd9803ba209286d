"""Events of a data set, as columns are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.config.sections import DataConfig
from recsuite.datasets.schema import RawData
from recsuite.datasets.tables.derived import add_user_days

# For types only: a rank that only trains must not import Arrow.
if TYPE_CHECKING:
    from recsuite.datasets.tables.source import TableSource


def read(
    source: TableSource, config: DataConfig, folder: Path | None = None, parts_folder: Path | None = None
) -> RawData:
    """Read all files of a set, and apply --duplicates to several events of one user and one item.

    folder: for temporary files; without one the data stay in memory. parts_folder: see
    `tables.reading.read_tables`.

    Raises:
        UserError: see `tables.source.TableSource.read`.
    """
    # Imported here: a rank with existing columns needs no compiled loops.
    from recsuite.datasets.preparation.splits import settle

    # Here, so that not every family of data sets has to do it.
    how = config.duplicates_of(source.schema.label_kind, bool(source.schema.event_types))
    raw = settle(source.read(parts_folder), how, source.schema, folder)
    if config.day_feature != "none" and source.has_times:
        add_user_days(raw, source.schema, folder)
    return raw
