"""URLs of servers and object stores, by fsspec: requests, failures in a sentence, folders of a store."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import urlsplit

from recsuite.errors import UserError
from recsuite.files import local, replace_file

# Seconds to connect, seconds without data, and seconds of a request for a block or a whole file.
CONNECT_SECONDS, SILENT_SECONDS, REQUEST_SECONDS = 30.0, 60.0, 3600.0
# Bytes per request.
BLOCK_BYTES = 2**23
# Names of the digests, versions and times that a server may keep of a file.
MARKS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "VersionId", "versionId", "generation"),
    *("Last-Modified", "LastModified", "mtime", "modified", "updated"),
)
REASONS = {
    401: "it asks for a login",
    403: "this login is not allowed to do it, or has expired",
    404: "it is not there",
}


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


@contextlib.contextmanager
def explained_remote(url: str) -> Iterator[None]:
    """Turn any failure of a request into a UserError of one sentence.

    Raises:
        UserError: instead of what the libraries raise, which is of many kinds.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # No cause: it may hold the address with its secrets.
        raise UserError(
            f"Cannot read {shown(url)}: {reason_of_failure(error)}. Fix: check the address, the login and "
            "the network, or copy the file to this machine."
        ) from None


def reason_of_failure(error: BaseException) -> str:
    """Return the reason why a request failed, in this program's words."""
    # fsspec reports every HTTP error as a missing file.
    if isinstance(error, FileNotFoundError) and error.__cause__:
        return reason_of_failure(error.__cause__)
    kind, status = type(error).__name__, status_of(error)
    status = {"FileNotFoundError": 404, "PermissionError": 403}.get(kind, status)
    if status:
        return REASONS.get(status, f"the server answers with status {status}")
    # By its name: each library has its own.
    if isinstance(error, TimeoutError) or "Timeout" in kind:
        return f"the server was silent for {SILENT_SECONDS:.0f} s"
    if "Credentials" in kind:
        return "it needs a login, such as one that AWS_PROFILE names"
    # The number of a TLS or name resolution error is not a system errno.
    number = 0 if "SSL" in kind else getattr(error, "errno", None) or 0
    return f"the connection failed ({os.strerror(number) if number > 0 else kind})"


def marks_of(info: dict[str, Any]) -> list[str]:
    """Return the digests, versions and times that a server keeps of a file. info: what fsspec says of it."""
    return [f"{name}={info[name]}" for name in MARKS if info.get(name)]


def status_of(error: BaseException) -> int | None:
    """Return the status of the answer to a request that failed; None without an answer."""
    # s3fs keeps the answer in the cause of its own error.
    response = getattr(error if hasattr(error, "response") else error.__cause__, "response", None)
    answer = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    return getattr(error, "status", None) or answer.get("HTTPStatusCode")


def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it.

    Raises:
        UserError: for an unknown kind of address, and where a package is missing.
    """
    import fsspec
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0].lower()
    if scheme not in fsspec.available_protocols():
        raise UserError(f"{shown(url)} is of an unknown kind; give a folder, a file, s3:// or https://.")
    try:
        if scheme in ("http", "https"):
            # An HTTP address may hold "::"; in other addresses it joins two of them.
            fs, path = fsspec.filesystem(scheme, **_options(scheme)), url
        else:
            fs, path = url_to_fs(url, **_options(scheme))
    except ImportError as error:
        raise UserError(f"{shown(url)} requires a package that is not installed: {error}.") from None
    # s3fs tries five times, on top of the retries and deadlines of botocore. Twice: botocore does not try
    # again where the answer ends in the middle.
    if hasattr(fs, "retries"):
        fs.retries = 2
    return fs, path


def _options(scheme: str) -> dict[str, Any]:
    """Return the deadlines as options of a file system. Listings are not cached: files change."""
    plain: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(REQUEST_SECONDS, CONNECT_SECONDS, SILENT_SECONDS)
        # trust_env: use the proxies of the environment.
        plain["client_kwargs"] = {"timeout": timeout, "trust_env": True}
    elif scheme in ("s3", "s3a"):
        waits = {"connect_timeout": CONNECT_SECONDS, "read_timeout": SILENT_SECONDS}
        plain["config_kwargs"] = {**waits, "retries": {"max_attempts": 2}}
    return plain


class RemoteFile(io.RawIOBase):
    """A file behind a URL, read block by block; every failure is a UserError."""

    def __init__(self, url: str) -> None:
        with explained_remote(url):
            fs, path = filesystem(url)
            self._file = fs.open(path, "rb", block_size=BLOCK_BYTES, cache_type="readahead")
        self._url = url

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True unless the server sends the file only as a whole."""
        return bool(self._file.seekable())

    def readinto(self, block: Any) -> int:
        """Read into a block, as far as data are left."""
        with explained_remote(self._url):
            found = self._file.read(len(block))
        block[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position."""
        with explained_remote(self._url):
            self._file.seek(offset, whence)
        return int(self._file.tell())

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(Exception):
            self._file.close()
        super().close()


# Kinds of stores that take the place of a folder: an object is there as a whole or not at all.
STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "memory")


class ObjectError(OSError, UserError):
    """Failed request to an object store: a sentence by itself, and a reason where another one is said."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(
            f"A request to {shown(url)} failed: {reason}. Fix: check the address, the login and the network."
        )
        self.url, self.strerror = url, reason

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.url, self.strerror)


def folder_at(place: Path | str, flag: str = "") -> Path:
    """Return a folder of this machine, or for a URL one of an object store, with the same methods.

    flag: the name of the flag that gave it.

    Raises:
        UserError: for a URL with a login or a query, which would be written into files.
    """
    if isinstance(place, ObjectPath):
        return cast(Path, place)
    if str(place).partition("://")[0] not in STORES:
        return local(place, flag)
    parts = urlsplit(str(place))
    # An account of Azure stands after the container and an "@".
    login = parts.netloc.rpartition("@")[0]
    has_login = bool(login) if parts.scheme in ("s3", "s3a", "gs", "gcs") else ":" in login
    if has_login or parts.query or parts.fragment:
        raise UserError(
            f"{flag and f'--{flag} '}{shown(str(place))} must not hold a login or a query; give them by the "
            "environment, such as AWS_PROFILE."
        )
    if not parts.netloc:
        raise UserError(
            f"{flag and f'--{flag} '}{place} names no bucket; give {parts.scheme}://BUCKET/FOLDER."
        )
    return cast(Path, ObjectPath(str(place).rstrip("/")))


def write_whole(path: Path, content: bytes) -> None:
    """Write or replace a file, in one rename or as one object.

    Raises:
        OSError: when it cannot be written.
    """
    if isinstance(path, ObjectPath):
        path.put(content)
    else:
        replace_file(path, content)


@dataclass(frozen=True, order=True)
class ObjectPath:
    """Object, or prefix of objects, in a store of fsspec: s3, gcs, abfs or memory.

    It has the methods of a `Path` that checkpoints need. A failure is an OSError, see `ObjectError`. An
    object is there as a whole or not at all, so nothing needs a rename. url: without a slash at the end.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> ObjectPath:
        return ObjectPath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        """Last part of the URL."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> ObjectPath:
        """The URL without its last part."""
        return ObjectPath(self.url.rpartition("/")[0])

    def with_name(self, name: str) -> ObjectPath:
        """Return the path of another name beside this one."""
        return self.parent / name

    def absolute(self) -> ObjectPath:
        """Return this path."""
        return self

    def resolve(self) -> ObjectPath:
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
            # Its words are a path, or those of the store about a bucket.
            reason = "it is not there" if self.name in str(error) else str(error)
            raise FileNotFoundError(errno.ENOENT, reason) from None
        except (FileExistsError, UserError):
            raise
        except Exception as error:
            # No cause: it may hold the address with its secrets.
            raise ObjectError(self.url, reason_of_failure(error)) from None

    def _info(self) -> dict[str, Any]:
        with self._requests() as (fs, path):
            found: dict[str, Any] = fs.info(path)
        return found

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

    def iterdir(self) -> Iterator[ObjectPath]:
        """Yield the objects and prefixes below this one."""
        with self._requests() as (fs, path):
            found = fs.ls(path, detail=False)
        keys = {key.rstrip("/") for key in found} - {path.rstrip("/")}
        return map(self.__truediv__, sorted(key.rpartition("/")[2] for key in keys))

    def rglob(self, name: str) -> Iterator[ObjectPath]:
        """Yield the objects of this name anywhere below."""
        with self._requests() as (fs, path):
            found = fs.find(path)
        keys = [key.removeprefix(f"{path.rstrip('/')}/") for key in found]
        return (self / key for key in sorted(keys) if key.rpartition("/")[2] == name)

    def holding(self, name: str) -> dict[str, str]:
        """Return the name of each prefix below this one with an object of this name, and its version."""
        with self._requests() as (fs, path):
            found = fs.find(path, detail=True)
        ends = f"/{name}"
        return {
            key.removesuffix(ends).rpartition("/")[2]: "\n".join(marks_of(info)) or str(info.get("created"))
            for key, info in found.items()
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
            found: list[bytes] = fs.cat_ranges(
                [path] * len(begins), list(begins), list(ends), on_error="raise"
            )
        return found

    def open(self, mode: str = "rb", buffering: int = -1) -> Any:
        """Open an object for reading, block by block."""
        return RemoteFile(self.url)

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

    def move_to(self, target: ObjectPath, names: Sequence[str], last: str) -> None:
        """Move objects of a prefix, and remove the others. last: is written last and removed first."""
        with self._requests() as (fs, path):
            for name in [*names, last]:
                fs.cp_file(f"{path}/{name}", f"{filesystem(target.url)[1]}/{name}")
        self.remove(last)


# Key of the content of a link.
LINK = "checkpoint"
