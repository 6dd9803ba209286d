"""A column on disk as an array in memory: mapped, so that the page cache holds it once for all processes."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from recsuite.errors import UserError


class MappedColumn:
    """One .npy file, mapped for reading. It may be removed while it is mapped; it must not be cut."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                np.lib.format.read_magic(file)
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self.values = np.frombuffer(self._map, dtype, int(np.prod(shape)), file.tell()).reshape(shape)
        except (OSError, ValueError) as error:
            raise UserError(
                f"The columns of the data set are gone or damaged: {path} ({error}); start again to have "
                "them made again."
            ) from None

    def check(self) -> None:
        """Refuse to go on with a file that was cut: touching a page beyond its end would kill the process.

        Raises:
            UserError: names the file and both sizes.
        """
        # The file's size now, against the mapping's.
        if self._map.size() < len(self._map):
            raise UserError(
                f"{self.path} had {len(self._map):,} bytes when it was opened and has {self._map.size():,} "
                "now; leave the columns alone while they are used, and start again to have them made again."
            )
