"""Places of files: a folder of this machine, or what the extra of object stores and servers has for a URL."""

from __future__ import annotations

import abc
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

from recsuite.errors import UserError
from recsuite.files import local, replace_file
from recsuite.hooks import extra


def is_remote(path: str) -> bool:
    """True if a path is a URL, but not that of a local file."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None and not path.startswith("file://")


def shown(path: str) -> str:
    """Return a path as shown in messages; a URL without user, password, query and fragment."""
    if not is_remote(path):
        return path
    try:
        parts = urlsplit(path)
    except ValueError:
        return f"{path.partition('://')[0]}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def folder_at(place: Path | str, flag: str = "") -> Path:
    """Return a folder of this machine, or for a URL an `ObjectPath`, with the same methods.

    flag: the name of the flag that gave it.

    Raises:
        UserError: for a URL of no object store, or with a login or a query.
    """
    if isinstance(place, ObjectPath):
        return cast(Path, place)
    if is_remote(str(place)):
        return extra("stores").object_at(str(place), flag)
    return local(place, flag)


def open_raw(path: str) -> io.RawIOBase:
    """Open a file of this machine or behind a URL for reading.

    Raises:
        OSError: when it cannot be opened; for a URL a UserError.
    """
    return extra("urls").RemoteFile(path) if is_remote(path) else io.FileIO(path)


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file, in one rename or as one object.

    Raises:
        OSError: when it cannot be written.
    """
    if isinstance(path, ObjectPath):
        path.put(content)
    else:
        replace_file(path, content)


class ObjectError(OSError, UserError):
    """Failed request to an object store: a sentence by itself, and a reason where another one is said."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"A request to {shown(url)} failed: {reason}. Fix: check the address, the login and the network."
        )
        self.url, self.strerror = url, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.strerror)


class ObjectPath(abc.ABC):
    """Object, or prefix of objects, in an object store.

    It has the methods of a `Path` that checkpoints need, and those below. A failure is an OSError, see
    `ObjectError`. An object is there as a whole or not at all, so nothing needs a rename.
    """

    if TYPE_CHECKING:
        # The methods of a Path are not declared again.
        def __getattr__(self, name: str) -> Any: ...

        def __truediv__(self, name: str) -> Any: ...

    @abc.abstractmethod
    def holding(self, name: str) -> dict[str, str]:
        """Return the name of each prefix below this one with an object of this name, and its version."""

    @abc.abstractmethod
    def open_tensors(self) -> Any:
        """Return the tensors of a safetensors file, with the methods of `safe_open`."""

    @abc.abstractmethod
    def put(self, content: bytes, is_new: bool = False) -> None:
        """Write an object. is_new: only if it is not there, in one conditional request.

        Raises:
            FileExistsError: with is_new, when it is there.
        """

    @abc.abstractmethod
    def upload(self, source: Path) -> None:
        """Write an object from a file of this machine."""

    @abc.abstractmethod
    def download(self, target: Path) -> None:
        """Write an object into a file of this machine."""

    @abc.abstractmethod
    def link_to(self, name: str) -> None:
        """Make this a link to another name beside it, which `resolve` follows."""

    @abc.abstractmethod
    def move_to(self, target: Any, names: Sequence[str], last: str) -> None:
        """Move objects of a prefix, and remove the others. last: is written last and removed first."""

    @abc.abstractmethod
    def remove(self, first: str = "") -> None:
        """Remove all objects of a prefix. first: the name of the object that goes before the others."""
