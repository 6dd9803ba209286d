"""Two hundred damaged schemas: each is refused in one sentence, or says something possible."""

from __future__ import annotations

from pathlib import Path

import pytest

from recsuite.datasets.tables.schema_file import parse_schema, read_schema
from recsuite.datasets.tables.validation import validate
from recsuite.errors import UserError
from recsuite.extras.guess.writer import text_of
from tests.support.mutated_schemas import mutated_schemas

NUMBER, SEED = 200, 14
VALID = """
[files]
events = "events.parquet"
encoding = "utf-8"
delimiter = ","
[user]
column = "user_id"
noun = "customer"
[item]
column = "product_id"
title = "name"
[label]
kind = "rating"
column = "stars"
lowest = 1.0
highest = 5.0
liked = 4.0
[weight]
column = "confidence"
[timestamp]
column = "time"
format = "%Y-%m-%d %H:%M"
[features.price]
of = "item"
column = "price"
kind = "number"
input = "dense"
[features.tags]
of = "item"
column = "tags"
kind = "list"
separator = "|"
[features.weekday]
of = "event"
column = "weekday(timestamp)"
kind = "category"
[features.age]
of = "event"
column = "age_days(item.released)"
kind = "number"
"""
COLUMNS = {
    "events": ["user_id", "product_id", "stars", "confidence", "time", "price", "tags", "released", "name"]
}


def outcome(content: bytes, path: Path) -> str:
    """Return "read", "lacks a column" or "refused" for a schema, after checks of the result."""
    path.write_bytes(content)
    try:
        schema = read_schema(path)
    except UserError as error:
        check(str(error), path)
        return "refused"
    validate(schema, path=path)
    # It is whole: the library works with it, and a file can hold it.
    assert len(schema.schema().features) == 2 + len(schema.features)
    assert parse_schema(text_of(schema)) == schema
    try:
        validate(schema, COLUMNS, path)
    except UserError as error:
        check(str(error), path)
        return "lacks a column"
    return "read"


def check(sentence: str, path: Path) -> None:
    """A sentence of one line that helps the author of the file."""
    assert sentence.startswith(str(path))
    assert sentence.isprintable()
    assert len(sentence) - len(str(path)) < 400
    assert sentence[-1] in ".?"


# Each takes milliseconds, and none may hang.
@pytest.mark.timeout(60)
def test_each_of_200_damaged_schemas_is_refused_with_one_message_or_read(tmp_path: Path) -> None:
    path, outcomes = tmp_path / "schema.toml", []
    assert outcome(VALID.encode(), path) == "read"
    for name, content in mutated_schemas(VALID, NUMBER, SEED):
        try:
            outcomes.append(outcome(content, path))
        except Exception as error:
            raise AssertionError(f"{name}: {content[:2_000]!r}") from error
    assert len(outcomes) == NUMBER
    # Most damage is seen; some is none, such as a comment or another name of a feature.
    assert outcomes.count("refused") > NUMBER / 2
    assert min(outcomes.count(each) for each in ("read", "lacks a column")) >= 2


def test_the_same_seed_makes_the_same_schemas() -> None:
    assert [*mutated_schemas(VALID, 40, SEED)] == [*mutated_schemas(VALID, 40, SEED)]
    assert len({content for _, content in mutated_schemas(VALID, NUMBER, SEED)}) > 0.8 * NUMBER
