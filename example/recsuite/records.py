"""JSON that nobody vouches for: read into typed records, and sealed with a digest of its own.

A file of ours is read back by programs of other ages, after copies and crashes, and by a server from wherever
it came. So each value is held against its type before anything is done with it, and a text that is shown in a
sentence can do nothing to a terminal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from recsuite.files import digest_of_bytes

# The name of a record's own digest in it.
SEAL = "xxh3_128"
# More than anything counts here; below it every whole number is exact as a float and in other languages too.
LARGEST = 2**53
# No path on Linux is longer.
LONGEST_TEXT = 4096
# Flags that name a folder or a file, in whose name there may be any character.
PATHS = ("data_path", "schema", "cache_dir", "save_dir", "report_dir", "load", "export")
# What may hold names of files.
NAMED = {*PATHS, "events_per_file"}
# Of a field of a record: a file has it only where it is not the default, so older files need not have it.
OPTIONAL = {"is_optional": True}


def sealed(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a record with their own digest, which tells whether any of them was changed."""
    rest = {name: value for name, value in fields.items() if name != SEAL}
    # In one form, whatever the order and the spaces in the file: other programs may write it in their own
    # way.
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return {**rest, SEAL: digest_of_bytes(text.encode())}


def parsed(content: bytes) -> Any:
    """What JSON says; names that come twice, NaN and infinities are refused.

    Raises:
        ValueError: when it is not JSON, or too deep.
    """
    try:
        # Python would keep the last of two values with one name, where another program may keep the first.
        return json.loads(content, object_pairs_hook=_once, parse_constant=_not_a_number)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    refuse_twice([name for name, _ in pairs])
    return dict(pairs)


def refuse_twice(names: list[str]) -> None:
    """Raise ValueError for the first name that comes a second time."""
    if len({*names}) < len(names):
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise ValueError(f"{twice!r} is there twice")


def _not_a_number(text: str) -> None:
    raise ValueError(f"{text} is not a number")


def plain(record: Any) -> Any:
    """A record, and all records in it, as JSON can have them; fields that are OPTIONAL and have their default
    are left out. `typed` is the inverse.
    """
    if isinstance(record, dict):
        return {name: plain(value) for name, value in record.items()}
    if isinstance(record, (list, tuple)):
        return [plain(value) for value in record]
    if not dataclasses.is_dataclass(record):
        return record
    fields = {field.name: (field, getattr(record, field.name)) for field in dataclasses.fields(record)}
    return {
        name: plain(value)
        for name, (field, value) in fields.items()
        if not (field.metadata == OPTIONAL and value == field.default)
    }


def typed(kind: Any, found: Any, name: str = "it", least: int = 0) -> Any:
    """A value of a type, of what JSON held for it: a dataclass, also of such, a list, tuple or dict of a
    type, a text, number or truth value, one of these or None, or Any.

    name: what an error calls the value; least: the lowest whole number, for most of them count something.

    Raises:
        TypeError, ValueError: when the value is not of that type, or a field is missing or unknown.
    """
    origin, of = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return typed(next((one for one in of if type(found) is one), of[0]), found, name, least)
    if kind is Any:
        return found
    if dataclasses.is_dataclass(kind):
        # What a reader puts beside what the file holds is such a record already.
        return found if type(found) is kind else _record(kind, _plain(dict, found, name), least)
    if origin is dict:
        held = _plain(dict, found, name).items()
        return {_plain(str, key, name): typed(of[1], value, key, least) for key, value in held}
    if origin is list:
        return [typed(of[0], value, name, least) for value in _plain(list, found, name)]
    if origin is tuple:
        values = _plain(list, found, name)
        kinds = of[:1] * len(values) if of[-1] is Ellipsis else of
        return tuple(typed(kind, value, name, least) for kind, value in zip(kinds, values, strict=True))
    return _plain(kind, found, name, least)


def _record(kind: Any, found: dict[str, Any], least: int) -> Any:
    fields = _types_of(kind)
    # Also those with a default, unless they are optional: what is missing may be damage.
    needed = {field.name for field in dataclasses.fields(kind) if field.metadata != OPTIONAL}
    if not needed <= found.keys() <= fields.keys():
        raise ValueError(f"{kind.__name__} has {', '.join(found)} instead of {', '.join(fields)}")
    return kind(**{name: typed(fields[name], value, name, least) for name, value in found.items()})


# Reading the hints takes longer than the rest of a record, and a chain has many records.
_types_of = functools.cache(get_type_hints)


def _plain(kind: type[Any], found: Any, name: str, least: int = 0) -> Any:
    # Compared by type itself: a truth value is an int to Python.
    if type(found) is int and not (least if kind is int else -LARGEST) <= found <= LARGEST:
        raise ValueError(f"{name} is {found}")
    if type(found) is int and kind is float:
        # Other languages write a float that is a whole number like an int.
        return float(found)
    if type(found) is not kind:
        raise TypeError(f"{name} is {found!r} and not of type {kind.__name__}")
    if kind is str and not ((found.isprintable() or name in NAMED) and len(found) <= LONGEST_TEXT):
        raise ValueError(f"{name} is {found!r}")
    return found
