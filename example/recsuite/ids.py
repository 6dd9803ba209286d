"""64-bit ids of raw values, by which dynamic tables identify users, items and categories."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from recsuite.errors import UserError, printable

# Sentinel: marks an empty slot of a table, and stands for the unknown row in a batch.
UNKNOWN_ID = -(2**63)


def ids_of(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    """Ids of raw values, int64 [n]. A whole number is its own id; a text has its 64-bit XXH3 digest.

    values: texts, or whole numbers, which may be floats.

    Raises:
        UserError: for a value whose id is the sentinel, and for a number of more than 64 bits.
    """
    if len(values) == 0:
        return np.zeros(0, np.int64)
    is_text = isinstance(values[0], str)
    ids = _digests(values) if is_text else _numbers(values)
    taken = np.flatnonzero(ids == UNKNOWN_ID)
    if len(taken):
        raise UserError(
            f"The raw id {_shown(values[taken[0]])} is reserved: {UNKNOWN_ID} marks the empty places of a "
            "table. Fix: change it, or give --vocabulary fixed."
        )
    return ids


def check_distinct(name: str, values: Sequence[Any] | np.ndarray, ids: np.ndarray) -> None:
    """Refuse two values of a feature that have the same id. values: distinct, [n]; ids: theirs, int64 [n].

    Raises:
        UserError: names both.
    """
    order = np.argsort(ids, kind="stable")
    twice = np.flatnonzero(ids[order[1:]] == ids[order[:-1]])
    if len(twice):
        one, other = (_shown(values[order[place]]) for place in (twice[0], twice[0] + 1))
        raise UserError(
            f"{one} and {other}, two values of {name}, have the same 64-bit id {ids[order[twice[0]]]}, and "
            "would share a row. Fix: rename one of them, or give --vocabulary fixed."
        )


def check_kind(name: str, known: Sequence[Any] | None, values: np.ndarray) -> None:
    """Refuse texts if the known values were whole numbers: all ids would change.

    values: without missing ones.

    Raises:
        UserError: names the first that is no whole number.
    """
    if not known or isinstance(known[0], str) or not len(values) or not isinstance(values[0], str):
        return
    strange = next((value for value in values if not _is_whole(value)), values[0])
    raise UserError(
        f"The values of {name} must be whole numbers of 64 bits, as when this stream was last read, got "
        f"{printable(strange)[:60]!r}, which makes all of them texts. Fix: correct its file, or train again "
        "with --move_aside instead of --resume."
    )


def _is_whole(text: str) -> bool:
    try:
        return UNKNOWN_ID <= int(text) < -UNKNOWN_ID
    except ValueError:
        return False


def _digests(texts: Sequence[str] | np.ndarray) -> np.ndarray:
    # A text from a file that is not UTF-8 may hold lone surrogates.
    digests = [id_of_bytes(text.encode("utf-8", "surrogatepass")) for text in texts]
    return np.array(digests, np.uint64).view(np.int64)


def id_of_bytes(content: bytes) -> int:
    """XXH3 digest of a text's bytes, unsigned 64 bits."""
    return xxhash.xxh3_64_intdigest(content)


def _numbers(values: Sequence[Any] | np.ndarray) -> np.ndarray:
    if isinstance(values, np.ndarray) and values.dtype.kind == "i":
        return values.astype(np.int64)
    # Not by numpy: it would silently round or wrap around.
    wholes = [int(value) for value in values]
    ids = np.array([max(min(whole, 2**63 - 1), UNKNOWN_ID) for whole in wholes], np.int64)
    for value, whole, kept in zip(values, wholes, ids.tolist(), strict=True):
        if whole != value or whole != kept:
            raise UserError(
                f"The raw id {_shown(value)} must be a whole number of 64 bits. Fix: write it as a text, or "
                "give --vocabulary fixed."
            )
    return ids


def _shown(value: Any) -> str:
    return printable(repr(str(value)) if isinstance(value, str) else value)
