"""The texts that ids stand for, for people: a table itself needs none of them.

"texts.ids" int64 [n], ascending; "texts.bytes" uint8, the texts in UTF-8, one after the other; "texts.ends"
int64 [n], where each ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from recsuite.errors import UserError, printable


@dataclass(frozen=True)
class Texts:
    """Texts by their ids. ids: int64 [n], ascending; texts: their UTF-8, object [n]."""

    ids: np.ndarray
    texts: np.ndarray

    @classmethod
    def of(cls, ids: np.ndarray, texts: Iterable[bytes]) -> Texts:
        """Texts in any order."""
        held = np.empty(len(ids), object)
        held[:] = list(texts)
        order = np.argsort(ids, kind="stable")
        return cls(ids[order], held[order])

    @classmethod
    def none(cls) -> Texts:
        """No text."""
        return cls(np.empty(0, np.int64), np.empty(0, object))

    @classmethod
    def of_arrays(cls, ids: np.ndarray, content: np.ndarray, ends: np.ndarray) -> Texts:
        """As a file has them.

        Raises:
            ValueError: when the ends do not ascend, or are not those of the bytes.
        """
        begins = np.concatenate([[0], ends[:-1]]) if len(ends) else ends
        if (ends < begins).any() or (ends[-1:] != len(content)).any() or (not len(ends) and len(content)):
            raise ValueError("texts do not end where they should")
        whole = content.tobytes()
        return cls.of(ids, [whole[begin:end] for begin, end in zip(begins, ends, strict=True)])

    def arrays(self) -> dict[str, np.ndarray]:
        """As a file has them."""
        ends = np.cumsum([len(text) for text in self.texts], dtype=np.int64)
        content = np.frombuffer(b"".join(self.texts), np.uint8)
        return {"texts.ids": self.ids, "texts.bytes": content, "texts.ends": ends}

    def of_ids(self, ids: np.ndarray) -> Texts:
        """Those of some ids; of ids without a text there is none."""
        which = np.isin(self.ids, ids)
        return Texts(self.ids[which], self.texts[which])

    def with_others(self, others: Texts, table: str) -> Texts:
        """Both together.

        Raises:
            UserError: when one id stands for two texts; names both.
        """
        ids = np.concatenate([self.ids, others.ids])
        texts = np.concatenate([self.texts, others.texts])
        order = np.argsort(ids, kind="stable")
        ids, texts = ids[order], texts[order]
        same = ids[1:] == ids[:-1]
        for place in np.flatnonzero(same & (texts[1:] != texts[:-1])):
            one, other = (printable(text.decode("utf-8", "replace")) for text in texts[place : place + 2])
            raise UserError(
                f"{one!r} and {other!r} of {table} have the same id, {ids[place]}; write one otherwise."
            )
        first = np.concatenate([np.ones(len(ids[:1]), bool), ~same])
        return Texts(ids[first], texts[first])
