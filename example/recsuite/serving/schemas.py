"""JSON schemas of the requests and answers of an HTTP service, with the features of its model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection
from typing import Any

from recsuite.datasets.schema import CLICKS, HISTORY, Feature, Schema
from recsuite.serving.request import HISTORY_AGES, HISTORY_RATINGS
from recsuite.serving.snapshot import IdTable, Snapshot

JsonSchema = dict[str, Any]
NUMBER: JsonSchema = {"type": "number"}
TEXT: JsonSchema = {"type": "string"}
ERROR: JsonSchema = {"type": "object", "required": ["error"], "properties": {"error": TEXT}}
# Of the types that raw values of categories have.
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean"}


def list_of(items: JsonSchema, **more: Any) -> JsonSchema:
    """Return the schema of a list. more: its further keywords."""
    return {"type": "array", "items": items, **more}


def object_of(fields: JsonSchema, required: Collection[str] = ()) -> JsonSchema:
    """Return the schema of an object without other fields. required: those that it must have."""
    return {"type": "object", "additionalProperties": False, "properties": fields, "required": [*required]}


def _or_none(schema: JsonSchema) -> JsonSchema:
    return {**schema, "type": [schema["type"], "null"]} if "type" in schema else schema


def ids_of(snapshot: Snapshot, name: str) -> JsonSchema:
    """Return the schema of a raw value of a category, such as an id; of any value if none was seen."""
    kind = snapshot.kind_of(name)
    return {"type": TYPES[kind]} if kind in TYPES else {}


def first_id(snapshot: Snapshot, name: str) -> list[Any]:
    """Return one id of users or items that has a row, in a list; an empty one if there is none."""
    table = snapshot.tables[name]
    if isinstance(table, IdTable):
        # Without the texts of all the others.
        return dataclasses.replace(table, ids=table.ids[:1]).raw_values()
    return [*itertools.islice(table.rows, 1)]


def features_of(snapshot: Snapshot, entities: Collection[str]) -> JsonSchema:
    """Return the schema of an object from each feature of some entities to a list of raw values."""
    features = {feature.name: feature for feature in snapshot.features}
    labels = _label_of(snapshot.schema)
    histories = {HISTORY_RATINGS: list_of(labels), HISTORY_AGES: list_of({**NUMBER, "minimum": 0})}
    fields = {
        name: list_of(histories[name] if name in histories else _value_of(snapshot, features[name]))
        for name in snapshot.names_of(entities)
    }
    return object_of(fields)


def _value_of(snapshot: Snapshot, feature: Feature) -> JsonSchema:
    """Return the schema of one raw value of a feature."""
    if feature.name == HISTORY:
        return list_of(ids_of(snapshot, snapshot.schema.item))
    if feature.number:
        width = feature.width
        vector = list_of(_or_none(NUMBER), minItems=width, maxItems=width)
        return _or_none(vector if width > 1 else NUMBER)
    value = _or_none(ids_of(snapshot, feature.name))
    return list_of(value) if feature.multi else value


def events_of(snapshot: Snapshot) -> JsonSchema:
    """Return the schema of the events of one user: pairs of an item and a label, or items clicked."""
    schema = snapshot.schema
    item = ids_of(snapshot, schema.item)
    pair = {"type": "array", "prefixItems": [item, _label_of(schema)], "minItems": 2, "maxItems": 2}
    is_click = schema.label_kind == CLICKS and not schema.event_types
    return list_of({"anyOf": [pair, item]} if is_click else pair)


def _label_of(schema: Schema) -> JsonSchema:
    """Return the schema of the label of an event in a history, which may be its type."""
    return {"anyOf": [{"enum": [*schema.event_types]}, NUMBER]} if schema.event_types else NUMBER


def listed(snapshot: Snapshot) -> JsonSchema:
    """Return the schema of lists of items, each with its score, and with its values if asked for."""
    item = snapshot.schema.item
    parts = [ids_of(snapshot, item), NUMBER, {"type": "object"}]
    pair = {"type": "array", "prefixItems": parts, "minItems": 2, "maxItems": 3}
    return list_of(list_of({**pair, "examples": [[*first_id(snapshot, item), 1.5]]}))


def answer_of(snapshot: Snapshot, name: str, result: JsonSchema) -> JsonSchema:
    """Return the schema of an answer: its result under a name, unknown ids, and the model that it is of."""
    schema = snapshot.schema
    unknown = object_of({each: {"type": "array"} for each in (schema.user, schema.item)}, ())
    fields = {name: result, "unknown": unknown, "step": {"type": "integer"}, "run": TEXT}
    return object_of(fields, fields)
