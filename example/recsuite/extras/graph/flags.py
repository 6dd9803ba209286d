"""Flags of exports with a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recsuite.config.config import ExtraSection
from recsuite.config.flag import flag
from recsuite.errors import require

# Formats of an export, and types of its rows.
EXPORT_FORMATS, ROW_TYPES = ("library", "torch", "onnx"), ("float32", "float16", "int8")


@dataclass(frozen=True)
class GraphConfig(ExtraSection):
    """Exports for other programs."""

    format: str = flag(
        EXPORT_FORMATS[0],
        "Graph of the dense part that --export adds for other programs, by torch.export or ONNX; none for "
        "library.",
        choices=EXPORT_FORMATS,
        requires=("export", True),
    )
    row_type: str = flag(
        ROW_TYPES[0],
        "Type of the rows in an export with a graph; int8 with a scale for each row.",
        choices=ROW_TYPES,
        requires=("export", True),
    )

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            self.format != EXPORT_FORMATS[0] or self.is_default("row_type"),
            f"--row_type {self.row_type} requires --format torch or onnx, for other programs",
        )

    def add_to_export(self, folder: Any, snapshot: Any, arrays: dict[str, Any]) -> tuple[Any, Any]:
        """Write the graph of --format, and convert the rows to --row_type."""
        if self.format == EXPORT_FORMATS[0]:
            return (), {}
        from recsuite.extras.graph.graph import convert_rows, write_graph

        convert_rows(arrays, self.row_type)
        return [write_graph(folder, snapshot, self.format)], {"row_type": self.row_type}
