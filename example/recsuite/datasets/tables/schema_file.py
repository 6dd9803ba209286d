"""A schema.toml: reading and parsing."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from recsuite.datasets.schema import (
    CLICKS,
    COUNT,
    RATING,
    YES_NO,
)
from recsuite.datasets.tables.sections import (
    CATEGORY,
    FEATURES,
    LIKED_COUNT,
    LIKED_SHARE,
    LIST,
    NUMBER,
    SECTIONS,
    VECTOR,
    FeatureColumn,
    LabelColumn,
    TableSchema,
)
from recsuite.datasets.tables.validation import SchemaPlace, nearest, place_of, shortened, shown, validate
from recsuite.errors import UserError, printable
from recsuite.files import explained

# Python 3.10 has no tomllib: tomli is the same parser.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# A schema with a thousand features and a thousand more as comments has a hundredth of this size.
MOST_BYTES = 2**24
# Keys of one kind of label, or of feature, besides the common ones. With another kind they have no effect.
KEYS_OF_KINDS: dict[type, dict[str, tuple[str, ...]]] = {
    LabelColumn: {
        RATING: ("column", "lowest", "highest", "liked", "drop", "weight"),
        YES_NO: ("column", "drop", "weight"),
        CLICKS: (),
        COUNT: ("column", "liked", "drop", "weight"),
    },
    FeatureColumn: {
        CATEGORY: ("ids",),
        LIST: ("separator", "ids"),
        NUMBER: ("input",),
        VECTOR: ("length",),
    },
}
# The optional ones of them.
OPTIONAL = ("liked", "drop", "weight", "separator", "input", "ids")
# Keys that are written although they have their default value.
WRITTEN = ("noun", "format", "lowest", "highest", "liked", "input", "separator")
# Fix for a rating without its scale.
ENDS = "both ends of the scale, such as lowest = 1 and highest = 5"

S = TypeVar("S")


class IncompleteSchemaError(UserError):
    """Schema that lacks a required section or key; the rest may be right."""


def read_schema(path: Path) -> TableSchema:
    """Read a schema.toml, and check it as far as possible without the files that it describes.

    Raises:
        UserError: one sentence with the section, the key, its value and the nearest one that exists.
    """
    return parse_schema(_text(path), path)


def given_in(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of a schema.toml that may be incomplete, and its sections and keys by their names.

    Raises:
        UserError: for what is wrong with those, as far as that is known without the others.
    """
    text = _text(path)
    return text, given_of(text, path)


def given_of(text: str, path: Path | str) -> dict[str, Any]:
    """As `given_in`, of a text; `path` is its name in messages."""
    place = place_of(path)
    sections = _parsed(place, text)
    with suppress(IncompleteSchemaError):
        _schema(place, sections)
    # If there are several labels, a guess completes only the first.
    sections, more = _with_first_label(sections)
    return {**sections, "more_labels": more}


def parse_schema(text: str, path: Path | str = "schema.toml") -> TableSchema:
    """Read a schema from a text; `path` is its name in messages.

    Raises:
        UserError: see `read_schema`.
    """
    place = place_of(path)
    schema = _schema(place, _parsed(place, text))
    validate(schema, path=path)
    return schema


def _text(path: Path) -> str:
    place = place_of(path)
    with explained(f"Cannot read {place.path}"), path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise place.fault(f"is larger than {MOST_BYTES:,} bytes, which no schema is")
    try:
        # Windows editors write a byte order mark of three bytes.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise place.fault(f"is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


def _parsed(place: SchemaPlace, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "; texts stand in quotes" * ("Invalid value" in str(error))
        raise UserError(f"{place.path} is not TOML: {printable(error)}{hint}.") from None
    except ValueError:
        raise place.fault("holds a number or a date that is too large to be read") from None
    except RecursionError:
        raise place.fault("is not a schema: its lists are nested too deep") from None


def _with_first_label(sections: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Return the sections with the first of several labels as [label], and the other labels."""
    labels = sections.get("label")
    if not isinstance(labels, list) or not labels:
        return sections, []
    return {**sections, "label": labels[0]}, labels[1:]


def _schema(place: SchemaPlace, sections: dict[str, Any]) -> TableSchema:
    for name in sections:
        if name not in (*SECTIONS, FEATURES):
            raise place.fault(
                f"[{shortened(name)}] is not a known section; {nearest(name, (*SECTIONS, FEATURES))}"
            )
    features, lacking = _features(place, sections.get(FEATURES, {})), None
    sections, more = _with_first_label(sections)
    read: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        try:
            if name in sections:
                read[name] = _section(place.at(name), sections[name], kind)
            elif name in ("user", "item", "label"):
                raise IncompleteSchemaError(str(place.fault(f"has no section [{name}]; write one")))
        except IncompleteSchemaError as error:
            # Errors in other sections come first: a guess cannot fix them.
            lacking = lacking or error
    if lacking:
        raise lacking
    read["more_labels"] = tuple(
        _section(place.at(f"label {number}"), each, LabelColumn) for number, each in enumerate(more, 2)
    )
    return TableSchema(**read, features=features)


def _features(place: SchemaPlace, sections: object) -> dict[str, FeatureColumn]:
    if not isinstance(sections, dict):
        raise place.fault(f"{FEATURES} = {shown(sections)} is not a section; write [features.NAME] instead")
    return {
        name: _section(place.at(f"{FEATURES}.{name}"), section, FeatureColumn)
        for name, section in sections.items()
    }


def _section(place: SchemaPlace, given: object, kind: type[S]) -> S:
    """Return one section as its dataclass."""
    if not isinstance(given, dict):
        raise place.fault(f"is {shown(given)}, and not a section with keys of its own")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in given:
        if key not in fields:
            raise place.wrong(key, given[key], f"is not a key of this section; {nearest(key, fields)}")
        if fields[key].type == "str" and not isinstance(given[key], str):
            raise place.wrong(key, given[key], "is not text")
    _require(place, given, [name for name, field in fields.items() if field.default is dataclasses.MISSING])
    values = {key: _float(value) if fields[key].type == "float" else value for key, value in given.items()}
    if kind in KEYS_OF_KINDS:
        _check_keys_of_kind(place, values, KEYS_OF_KINDS[kind])
    if kind is LabelColumn:
        values = {**_defaults_of_label(values), **values}
    return kind(**values)


def _require(place: SchemaPlace, given: Mapping[str, object], names: Iterable[str]) -> None:
    for name in names:
        if name not in given:
            what = ENDS if name in ("lowest", "highest") else "one"
            raise IncompleteSchemaError(str(place.fault(f"has no {name}; write {what}")))


def _float(value: object) -> object:
    """Return an integer as a float if it fits; the validator refuses the others."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _check_keys_of_kind(
    place: SchemaPlace, values: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]
) -> None:
    """Refuse keys of another kind, and missing keys of this kind."""
    kind = values["kind"]
    # The validator reports the known kinds.
    if not isinstance(kind, str) or kind not in keys:
        return
    for key in values:
        if key not in keys[kind] and any(key in others for others in keys.values()):
            raise place.wrong(key, values[key], f'says nothing where kind = "{kind}"; remove it')
    _require(place, values, [key for key in keys[kind] if key not in OPTIONAL])


def _defaults_of_label(values: Mapping[str, Any]) -> dict[str, float]:
    """Default for `liked` of a rating or a count."""
    if values["kind"] == COUNT:
        return {"liked": LIKED_COUNT}
    ends = values.get("lowest"), values.get("highest")
    if values["kind"] == RATING and isinstance(ends[0], float) and isinstance(ends[1], float):
        return {"liked": ends[0] + LIKED_SHARE * (ends[1] - ends[0])}
    return {}


def toml_of(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, float):
        return repr(value)
    # TOML's rules for a text are those of JSON, except for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
