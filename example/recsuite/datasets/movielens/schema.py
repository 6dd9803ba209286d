"""The table of features of MovieLens: what a model learns about a user and a movie.

Parsing, batches, embedding tables and tests all derive from it; adding a feature is one section of the
schema.toml beside this file, if the files have its column.
"""

from __future__ import annotations

from pathlib import Path

from recsuite.datasets.tables.description.reader import read_schema

SCHEMA = read_schema(Path(__file__).with_name("schema.toml")).schema()
