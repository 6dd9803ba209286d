"""A schema.toml read into its dataclasses: which sections and keys there are, and which there must be."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from recsuite.datasets.schema import CLICKS, COUNT, RATING, YES_NO
from recsuite.datasets.tables.description.faults import Place, nearest, place_of, shortened, shown
from recsuite.datasets.tables.description.validator import validate
from recsuite.datasets.tables.schema_file import (
    CATEGORY,
    LIKED_COUNT,
    LIKED_SHARE,
    LIST,
    NUMBER,
    FeatureColumn,
    Files,
    ItemColumn,
    LabelColumn,
    TableSchema,
    TimestampColumn,
    UserColumn,
    WeightColumn,
)
from recsuite.errors import UserError, printable
from recsuite.files import explained

# Python 3.10 has it under the name that it had before it was Python's own.
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SECTIONS = {
    "files": Files,
    "user": UserColumn,
    "item": ItemColumn,
    "label": LabelColumn,
    "weight": WeightColumn,
    "timestamp": TimestampColumn,
}
FEATURES = "features"
# A schema of a thousand features and a thousand more as comments has a hundredth of this.
MOST_BYTES = 2**24
# The keys of one kind of label, or of feature, besides those of all: with another kind they say nothing.
KEYS_OF_LABELS = {
    RATING: ("column", "lowest", "highest", "liked", "drop", "weight"),
    YES_NO: ("column", "drop", "weight"),
    CLICKS: (),
    COUNT: ("column", "liked", "drop", "weight"),
}
KEYS_OF_FEATURES = {CATEGORY: ("ids",), LIST: ("separator", "ids"), NUMBER: ("input",)}
# What may be left out of them.
OPTIONAL = ("liked", "drop", "weight", "separator", "input", "ids")
# What to write of a rating without its scale.
ENDS = "both ends of the scale, such as lowest = 1 and highest = 5"

S = TypeVar("S")


class IncompleteSchemaError(UserError):
    """A schema without a section or a key that there must be; what it says may be right."""


def read_schema(path: Path) -> TableSchema:
    """What a schema.toml says, checked as far as that is possible without the files that it is about.

    Raises:
        UserError: one sentence with the section, the key, its value and the nearest one that exists.
    """
    return parse_schema(_text(path), path)


def given_in(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a schema.toml that may lack sections and keys, and those that it has, by their names.

    Raises:
        UserError: for what is wrong with those, as far as that is known without the others.
    """
    place, text = place_of(path), _text(path)
    found = _parsed(place, text)
    with suppress(IncompleteSchemaError):
        _schema(place, found)
    # Of several labels a guess completes the first one alone.
    labels = found.get("label", {})
    if isinstance(labels, list):
        found |= {"label": labels[0] if labels else {}, "more_labels": labels[1:]}
    return text, found


def parse_schema(text: str, path: Path | str = "schema.toml") -> TableSchema:
    """The same from a text; `path` is what sentences call it.

    Raises:
        UserError: see `read_schema`.
    """
    place = place_of(path)
    schema = _schema(place, _parsed(place, text))
    validate(schema, path=path)
    return schema


def _text(path: Path) -> str:
    place = place_of(path)
    with explained(f"{place.path} cannot be read"), path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise place.fault(f"is larger than {MOST_BYTES:,} bytes, which no schema is")
    try:
        # Editors of Windows put three bytes in front.
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise place.fault(f"is not UTF-8 at byte {error.start:,}; save it as UTF-8") from None


def _parsed(place: Place, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        hint = "; texts stand in quotes" * ("Invalid value" in str(error))
        raise place.unreadable(f"is not TOML: {printable(error)}{hint}") from None
    except ValueError:
        raise place.fault("holds a number or a date that is too large to be read") from None
    except RecursionError:
        raise place.fault("is not a schema: its lists are nested too deep") from None


def _schema(place: Place, found: dict[str, Any]) -> TableSchema:
    for name in found:
        if name not in (*SECTIONS, FEATURES):
            raise place.fault(
                f"[{shortened(name)}] is not a known section; {nearest(name, (*SECTIONS, FEATURES))}"
            )
    features, lacking = _features(place, found.get(FEATURES, {})), None
    labels = found.get("label")
    if isinstance(labels, list) and labels:
        found = {**found, "label": labels[0]}
    more = labels[1:] if isinstance(labels, list) else []
    read: dict[str, Any] = {}
    for name, kind in SECTIONS.items():
        try:
            if name in found:
                read[name] = _section(place.at(name), found[name], kind)
            elif name in ("user", "item", "label"):
                raise IncompleteSchemaError(str(place.fault(f"has no section [{name}]; write one")))
        except IncompleteSchemaError as error:
            # What is wrong with other sections comes first: a guess cannot mend it.
            lacking = lacking or error
    if lacking:
        raise lacking
    read["more_labels"] = tuple(
        _section(place.at(f"label {number}"), each, LabelColumn) for number, each in enumerate(more, 2)
    )
    return TableSchema(**read, features=features)


def _features(place: Place, found: object) -> dict[str, FeatureColumn]:
    if not isinstance(found, dict):
        raise place.fault(f"{FEATURES} = {shown(found)} is not a section; write [features.NAME] instead")
    return {
        name: _section(place.at(f"{FEATURES}.{name}"), section, FeatureColumn)
        for name, section in found.items()
    }


def _section(place: Place, found: object, kind: type[S]) -> S:
    """One section as its dataclass."""
    if not isinstance(found, dict):
        raise place.fault(f"is {shown(found)}, and not a section with keys of its own")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in found:
        if key not in fields:
            raise place.wrong(key, found[key], f"is not a key of this section; {nearest(key, fields)}")
        if fields[key].type == "str" and not isinstance(found[key], str):
            raise place.wrong(key, found[key], "is not text")
    _require(place, found, [name for name, field in fields.items() if field.default is dataclasses.MISSING])
    values = {key: _float(value) if fields[key].type == "float" else value for key, value in found.items()}
    if kind is LabelColumn:
        _check_keys_of_kind(place, values, KEYS_OF_LABELS)
        values = {**_defaults_of_label(values), **values}
    if kind is FeatureColumn:
        _check_keys_of_kind(place, values, KEYS_OF_FEATURES)
    return kind(**values)


def _require(place: Place, found: Mapping[str, object], names: Iterable[str]) -> None:
    for name in names:
        if name not in found:
            what = ENDS if name in ("lowest", "highest") else "one"
            raise IncompleteSchemaError(str(place.fault(f"has no {name}; write {what}")))


def _float(value: object) -> object:
    """An integer as a float, where there is one; the validator refuses the others."""
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    try:
        return float(value)
    except OverflowError:
        return value


def _check_keys_of_kind(place: Place, values: Mapping[str, Any], keys: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse keys that another kind has, and the lack of those that this kind needs."""
    kind = values["kind"]
    # The validator says which kinds there are.
    if not isinstance(kind, str) or kind not in keys:
        return
    for key in values:
        if key not in keys[kind] and any(key in others for others in keys.values()):
            raise place.wrong(key, values[key], f'says nothing where kind = "{kind}"; leave it out')
    _require(place, values, [key for key in keys[kind] if key not in OPTIONAL])


def _defaults_of_label(values: Mapping[str, Any]) -> dict[str, float]:
    """From where on an item counts as liked, of a rating or a count."""
    if values["kind"] == COUNT:
        return {"liked": LIKED_COUNT}
    ends = values.get("lowest"), values.get("highest")
    if values["kind"] == RATING and isinstance(ends[0], float) and isinstance(ends[1], float):
        return {"liked": ends[0] + LIKED_SHARE * (ends[1] - ends[0])}
    return {}
