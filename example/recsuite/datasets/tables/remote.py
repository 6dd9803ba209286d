"""Files of tables, local or behind a URL, and their properties before they are read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from recsuite.errors import UserError
from recsuite.files import digest_of, explained

# Seconds to connect, seconds without data, and seconds of a request for a block or a whole file.
CONNECT_SECONDS, SILENT_SECONDS, REQUEST_SECONDS = 30.0, 60.0, 3600.0
# Bytes per request.
BLOCK_BYTES = 2**23
# Names of the digests, versions and times that a server may keep of a file.
MARKS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "VersionId", "versionId", "generation"),
    *("Last-Modified", "LastModified", "mtime", "modified", "updated"),
)
REASONS = {401: "it asks for a login", 403: "it may not be read with this login", 404: "it is not there"}


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
            f"{shown(url)} cannot be read: {reason_of_failure(error)}; check the address, the login and the "
            "network, or copy the file to this machine."
        ) from None


def reason_of_failure(error: BaseException) -> str:
    """Return the reason why a request failed, in this program's words."""
    # fsspec reports every HTTP error as a missing file.
    if isinstance(error, FileNotFoundError) and error.__cause__:
        return reason_of_failure(error.__cause__)
    kind, response = type(error).__name__, getattr(error, "response", None)
    in_answer = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = getattr(error, "status", None) or in_answer.get("HTTPStatusCode")
    status = {"FileNotFoundError": 404, "PermissionError": 403}.get(kind, status)
    if status:
        return REASONS.get(status, f"the server answers with status {status}")
    # fsspec has its own timeout error; it is a TimeoutError only since Python 3.11.
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) or "Timeout" in kind:
        return f"the server was silent for {SILENT_SECONDS:.0f} s"
    if "Credentials" in kind:
        return "it needs a login, such as one that AWS_PROFILE names"
    # The number of a TLS or name resolution error is not a system errno.
    number = 0 if "SSL" in kind else getattr(error, "errno", None) or 0
    return f"the connection failed ({os.strerror(number) if number > 0 else kind})"


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
        raise UserError(f"{shown(url)} needs a package that is not installed: {error}.") from None
    # s3fs retries five times, on top of the retries and deadlines of botocore.
    if hasattr(fs, "retries"):
        fs.retries = 1
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


def size_of(url: str) -> int:
    """Return the size in bytes; -1 if the server does not report it."""
    size = _info(url).get("size")
    return -1 if size is None else int(size)


def mark_of(url: str) -> str:
    """Return a mark of a file's content, 32 characters: another content has another mark.

    It comes from the digest, version or time that the server reports. The server is trusted, and the mark
    proves nothing about later reads. If the server reports none of them, every byte is read.
    """
    info = _info(url)
    marks = [f"{name}={info[name]}" for name in MARKS if info.get(name)]
    if not marks:
        return _digest_of_content(url)
    return xxhash.xxh3_128_hexdigest("\n".join([shown(url), f"size={info.get('size')}", *marks]).encode())


def _info(url: str) -> dict[str, Any]:
    with explained_remote(url):
        fs, path = filesystem(url)
        return dict(fs.info(path))


def _digest_of_content(url: str) -> str:
    digest = xxhash.xxh3_128()
    with contextlib.closing(RemoteFile(url)) as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def list_files(url: str) -> list[str]:
    """Return the URLs of the files below a folder or that match a pattern; for a file, its own URL."""
    with explained_remote(url):
        fs, path = filesystem(url)
        # The query of an address may hold these characters, but is not a pattern.
        if set("*[") & set(path.partition("?")[0]):
            found = fs.glob(path)
        elif path.startswith("http") and not path.endswith("/"):
            found = [path]
        else:
            found = [path] if fs.isfile(path) else fs.find(path)
        return sorted(fs.unstrip_protocol(each) for each in found)


EVENTS, USERS, ITEMS = "events", "users", "items"
# Formats by the suffix of a name.
FORMATS = {
    **dict.fromkeys((".csv", ".txt", ".dat", ".data", ".inter", ".user", ".item"), "csv"),
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
}
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
# Name of a missing value in a partition.
MISSING_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """File of a table.

    path: as it is opened. format: csv, tsv, jsonl, parquet or arrow. compression: gzip, zstd or empty, by the
    name. size: in bytes, -1 if a server does not report it. partitions: (column, value) of its folders.
    encoding, delimiter: of text. columns: their names, if the text has no header.
    """

    # Never shown: an address may hold a password.
    path: str = field(repr=False)
    format: str
    compression: str = ""
    size: int = 0
    partitions: tuple[tuple[str, str], ...] = ()
    encoding: str = "utf-8"
    delimiter: str = ""
    columns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        """Name for messages: the path, or the URL without secrets."""
        return shown(self.path)

    @property
    def is_text(self) -> bool:
        """True if all its columns are texts."""
        return self.format in ("csv", "tsv")

    # Cached: a run needs it twice, and it reads all bytes.
    @functools.cached_property
    def digest(self) -> str:
        """Digest of the bytes; for a URL, see `mark_of`."""
        if is_remote(self.path):
            return mark_of(self.path)
        with explained(f"{self.name} cannot be read", "give a file that can"):
            return digest_of(Path(self.path))


@dataclass(frozen=True)
class Tables:
    """Files of each role, in the order of their paths; there is at least one of events.

    root: the given folder or URL. ignored: the names of the files there that are no tables.
    """

    root: str = field(repr=False)
    events: tuple[File, ...]
    users: tuple[File, ...] = ()
    items: tuple[File, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, tuple[File, ...]]:
        """Files by role."""
        return {EVENTS: self.events, USERS: self.users, ITEMS: self.items}

    @property
    def files(self) -> tuple[File, ...]:
        """All files."""
        return (*self.events, *self.users, *self.items)

    def name_of(self, file: File) -> str:
        """Return a file's path relative to the root; it is the same in a copy of the folder."""
        return file.name.removeprefix(self.root).lstrip("/")
