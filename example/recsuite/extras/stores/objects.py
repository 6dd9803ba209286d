"""Folders of an object store, by fsspec."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

from recsuite.errors import UserError
from recsuite.extras.stores.urls import RemoteFile, filesystem, marks_of, reason_of_failure, status_of
from recsuite.files import local
from recsuite.places import ObjectError, ObjectPath, shown

# Kinds of stores that can be used as folders, because an object appears as a whole.
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")


def object_at(url: str, flag: str) -> Path:
    """Return the folder of an object store at a URL, see `places.folder_at`.

    Raises:
        UserError: for a URL of no store, or with a login or a query, which would be written into files.
    """
    if url.partition("://")[0] not in STORES:
        return local(url, flag)
    parts = urlsplit(url)
    # An account of Azure stands after the container and an "@".
    login = parts.netloc.rpartition("@")[0]
    has_login = bool(login) if parts.scheme in ("s3", "s3a", "gs", "gcs") else ":" in login
    if has_login or parts.query or parts.fragment:
        raise UserError(
            f"{flag and f'--{flag} '}{shown(url)} must not hold a login or a query; give them by the "
            "environment, such as AWS_PROFILE."
        )
    if not parts.netloc:
        raise UserError(f"{flag and f'--{flag} '}{url} names no bucket; give {parts.scheme}://BUCKET/FOLDER.")
    return cast(Path, FsspecPath(url.rstrip("/")))


@dataclass(frozen=True, order=True)
class FsspecPath(ObjectPath):
    """`ObjectPath` in a store of fsspec: s3, gcs, abfs or memory. url: without a slash at the end."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> FsspecPath:
        return FsspecPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> FsspecPath:
        """The URL without its last part."""
        return FsspecPath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> FsspecPath:
        """Return the path of another name beside this one."""
        return self.parent / name

    def absolute(self) -> FsspecPath:
        """Return this path."""
        return self

    def resolve(self) -> FsspecPath:
        """Return the path that a link names, see `link_to`; any other path itself."""
        with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
            return self.with_name(str(json.loads(self.read_bytes())[LINK]))
        return self

    def is_symlink(self) -> bool:
        """Return True for a link, see `link_to`."""
        return self.resolve() != self

    def link_to(self, name: str) -> None:
        """Make this a link to another name beside it: a small object of JSON."""
        self.put(json.dumps({LINK: name}).encode())

    @contextlib.contextmanager
    def _requests(self) -> Iterator[tuple[Any, str]]:
        """Yield the file system and the path in it; a missing or an existing object keeps its own error."""
        try:
            yield filesystem(self.url)
        except FileNotFoundError as error:
            # The message is a path, or a sentence of the store on a bucket.
            reason = "it is not there" if self.name in str(error) else str(error)
            raise FileNotFoundError(errno.ENOENT, reason) from None
        except (FileExistsError, UserError):
            raise
        except Exception as error:
            # Without a cause, which may hold the address with its secrets.
            raise ObjectError(self.url, reason_of_failure(error)) from None

    def _info(self) -> dict[str, Any]:
        with self._requests() as (fs, path):
            info: dict[str, Any] = fs.info(path)
        return info

    def exists(self) -> bool:
        """Return True for an object or a prefix of objects."""
        with contextlib.suppress(FileNotFoundError):
            return bool(self._info())
        return False

    def is_file(self) -> bool:
        """Return True for an object."""
        with contextlib.suppress(FileNotFoundError):
            return self._info()["type"] == "file"
        return False

    def is_dir(self) -> bool:
        """Return True for a prefix of objects."""
        return self.exists() and not self.is_file()

    def stat(self) -> SimpleNamespace:
        """Return the size in bytes as `st_size`."""
        return SimpleNamespace(st_size=self._info()["size"])

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a prefix is there with its first object."""

    def iterdir(self) -> Iterator[FsspecPath]:
        """Yield the objects and prefixes below this one."""
        with self._requests() as (fs, path):
            listed = fs.ls(path, detail=False)
        keys = {key.rstrip("/") for key in listed} - {path.rstrip("/")}
        return map(self.__truediv__, sorted(key.rpartition("/")[2] for key in keys))

    def rglob(self, name: str) -> Iterator[FsspecPath]:
        """Yield the objects of this name anywhere below."""
        with self._requests() as (fs, path):
            listed = fs.find(path)
        keys = [key.removeprefix(f"{path.rstrip('/')}/") for key in listed]
        return (self / key for key in sorted(keys) if key.rpartition("/")[2] == name)

    def holding(self, name: str) -> dict[str, str]:
        """Return the name of each prefix below this one with an object of this name, and its version."""
        with self._requests() as (fs, path):
            objects = fs.find(path, detail=True)
        ends = f"/{name}"
        return {
            key.removesuffix(ends).rpartition("/")[2]: "\n".join(marks_of(info)) or str(info.get("created"))
            for key, info in objects.items()
            if key.endswith(ends) and key.count("/") == path.rstrip("/").count("/") + 2
        }

    def read_bytes(self) -> bytes:
        """Return the content of an object."""
        with self._requests() as (fs, path):
            return bytes(fs.cat_file(path))

    def read_text(self) -> str:
        """Return the content of an object as text."""
        return self.read_bytes().decode()

    def read_ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return ranges of bytes of an object, read at the same time."""
        with self._requests() as (fs, path):
            ranges: list[bytes] = fs.cat_ranges(
                [path] * len(begins), list(begins), list(ends), on_error="raise"
            )
        return ranges

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """Open an object for reading, block by block."""
        return RemoteFile(self.url)

    def open_tensors(self) -> Any:
        """Return the tensors of a safetensors file, with the methods of `safe_open`."""
        # Not at the top: a data worker imports no torch.
        from recsuite.extras.stores.tensors import ObjectTensors

        return ObjectTensors(self)

    def put(self, content: bytes, is_new: bool = False) -> None:
        """Write an object. is_new: only if it is not there, in one conditional request.

        Raises:
            FileExistsError: with is_new, when it is there.
        """
        with self._requests() as (fs, path):
            try:
                fs.pipe_file(path, content, mode="create" if is_new else "overwrite")
            except Exception as error:
                # Of two writers at the same time, S3 answers one with 409.
                if is_new and status_of(error) in (409, 412):
                    raise FileExistsError(errno.EEXIST, "it is there already") from None
                raise

    def upload(self, source: Path) -> None:
        """Write an object from a file of this machine."""
        with self._requests() as (fs, path):
            fs.put_file(str(source), path)

    def download(self, target: Path) -> None:
        """Write an object into a file of this machine."""
        with self._requests() as (fs, path):
            fs.get_file(path, str(target))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove an object."""
        try:
            with self._requests() as (fs, path):
                fs.rm_file(path)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def remove(self, first: str = "") -> None:
        """Remove all objects of a prefix. first: the name of the object that goes before the others."""
        if first:
            (self / first).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError), self._requests() as (fs, path):
            fs.rm(path, recursive=True)

    def move_to(self, target: FsspecPath, names: Sequence[str], last: str) -> None:
        """Move objects of a prefix, and remove the others. last: is written last and removed first."""
        with self._requests() as (fs, path):
            for name in [*names, last]:
                fs.cp_file(f"{path}/{name}", f"{filesystem(target.url)[1]}/{name}")
        self.remove(last)


# Key of the content of a link.
LINK = "checkpoint"
