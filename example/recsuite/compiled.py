"""Loops that numba compiles at their first use, with machine code that is kept on disk."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile

from recsuite.files import digest_of_bytes

Loop = TypeVar("Loop", bound=Callable[..., object])


class MachineCode(FunctionCache):
    """numba's files of machine code, with names of their own for each source and kind of arguments.

    numba numbers the files of a loop. So two processes that compile it for other arguments at once, or a kill
    between its index and the code, can give an index the code of something else (numba/numba#4807). A damaged
    file, or a full disk, counts as no file: the loop is compiled again.
    """

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        self._choose_file(sig, target_context.codegen())
        try:
            return super()._load_overload(sig, target_context)
        # What damage raises depends on the damage.
        except Exception:
            with contextlib.suppress(OSError):
                self._cache_file.flush()
            return None

    def _save_overload(self, sig: Any, data: Any) -> None:
        with contextlib.suppress(OSError):
            self._choose_file(sig, data.codegen)
            super()._save_overload(sig, data)

    def _choose_file(self, sig: Any, codegen: Any) -> None:
        stamp = self._impl.locator.get_source_stamp()
        key = digest_of_bytes(repr((stamp, self._index_key(sig, codegen))).encode())
        name = f"{self._impl.filename_base}.{key}"
        self._cache_file = IndexDataCacheFile(self._cache_path, name, stamp)


def compiled(loop: Loop, fastmath: Collection[str] = ()) -> Loop:
    """Compile a loop. The machine code is kept beside its source, or in the user's cache folder.

    fastmath: LLVM's names of what it may change.
    """
    # "numpy": a division by zero raises nothing, so that the compiler may use vectors.
    made = numba.njit(loop, nogil=True, error_model="numpy", fastmath={*fastmath})
    # A RuntimeError: neither folder can be written.
    with contextlib.suppress(RuntimeError):
        made._cache = MachineCode(loop)
    return made


def vectorised(loop: Loop) -> Loop:
    """Compile a loop that may add up numbers in another order, so that it uses vectors; NaN stays NaN."""
    return compiled(loop, fastmath=("reassoc", "contract"))


def inlined(part: Loop) -> Loop:
    """Compile a part of loops into each of them: a call would count the references to its arrays."""
    return numba.njit(part, nogil=True, error_model="numpy", inline="always")
