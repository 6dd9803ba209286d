"""Files of tables, on this machine or behind a URL: what is known of them before they are read."""

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

# Seconds to connect, and seconds of silence; a request for a block, or for a file that comes as a whole.
CONNECT_SECONDS, SILENT_SECONDS, REQUEST_SECONDS = 30.0, 60.0, 3600.0
# What is asked for at once.
BLOCK_BYTES = 2**23
# Digests and versions that a server keeps of a file, and its times.
MARKS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "VersionId", "versionId", "generation"),
    *("Last-Modified", "LastModified", "mtime", "modified", "updated"),
)
REASONS = {401: "it asks for a login", 403: "it may not be read with this login", 404: "it is not there"}


def is_remote(path: str) -> bool:
    """Whether a path is a URL, other than of a file of this machine."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", path) is not None and not path.startswith("file://")


def shown(path: str) -> str:
    """A path as messages have it; of a URL without user, password, query and fragment."""
    if not is_remote(path):
        return path
    try:
        parts = urlsplit(path)
    except ValueError:
        return f"{path.partition('://')[0]}://..."
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextlib.contextmanager
def explained_remote(url: str) -> Iterator[None]:
    """Give any failure of a request as one sentence.

    Raises:
        UserError: instead of what the libraries raise, which is of many kinds.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        # Without a cause: it may hold the address with its secrets.
        raise UserError(
            f"{shown(url)} cannot be read: {reason_of_failure(error)}; check the address, the login and the "
            "network, or copy the file to this machine."
        ) from None


def reason_of_failure(error: BaseException) -> str:
    """Return the reason why a request failed, in words of this program."""
    # To fsspec, whatever a server of HTTP answers means that a file is not there.
    if isinstance(error, FileNotFoundError) and error.__cause__:
        return reason_of_failure(error.__cause__)
    kind, response = type(error).__name__, getattr(error, "response", None)
    in_answer = response.get("ResponseMetadata", {}) if isinstance(response, dict) else {}
    status = getattr(error, "status", None) or in_answer.get("HTTPStatusCode")
    status = {"FileNotFoundError": 404, "PermissionError": 403}.get(kind, status)
    if status:
        return REASONS.get(status, f"the server answers with status {status}")
    # fsspec has one of its own, which is a TimeoutError since Python 3.11 alone.
    if isinstance(error, (TimeoutError, asyncio.TimeoutError)) or "Timeout" in kind:
        return f"the server was silent for {SILENT_SECONDS:.0f} s"
    if "Credentials" in kind:
        return "it needs a login, such as one that AWS_PROFILE names"
    # That of TLS and of the look-up of a name is not one of the system.
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
            # Such an address may hold "::", which joins two addresses elsewhere.
            fs, path = fsspec.filesystem(scheme, **_options(scheme)), url
        else:
            fs, path = url_to_fs(url, **_options(scheme))
    except ImportError as error:
        raise UserError(f"{shown(url)} needs a package that is not installed: {error}.") from None
    # That of s3 tries again five times, each with the retries and deadlines of the library below it.
    if hasattr(fs, "retries"):
        fs.retries = 1
    return fs, path


def _options(scheme: str) -> dict[str, Any]:
    """Return the deadlines as each file system wants them. Found listings are not kept: files change."""
    plain: dict[str, Any] = {"use_listings_cache": False}
    if scheme in ("http", "https"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(REQUEST_SECONDS, CONNECT_SECONDS, SILENT_SECONDS)
        # Trusted: the proxies that the environment names.
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
        """It is."""
        return True

    def seekable(self) -> bool:
        """A server may send a file only as a whole."""
        return bool(self._file.seekable())

    def readinto(self, block: Any) -> int:
        """Fill a block as far as there is something."""
        with explained_remote(self._url):
            found = self._file.read(len(block))
        block[: len(found)] = found
        return len(found)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a position."""
        with explained_remote(self._url):
            self._file.seek(offset, whence)
        return int(self._file.tell())

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(Exception):
            self._file.close()
        super().close()


def size_of(url: str) -> int:
    """The size in bytes; -1 where the server does not say."""
    size = _info(url).get("size")
    return -1 if size is None else int(size)


def mark_of(url: str) -> str:
    """Return what tells the content of a file from another one, 32 characters.

    A digest, a version or a time changes with the bytes as far as the server keeps its word: it proves
    nothing about what is read later. Where the server says none of them, every byte is read.
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
    """The URLs of the files below one that is a folder, or that match it as a pattern; of a file itself."""
    with explained_remote(url):
        fs, path = filesystem(url)
        # The query of an address may hold these characters, and is no pattern.
        if set("*[") & set(path.partition("?")[0]):
            found = fs.glob(path)
        elif path.startswith("http") and not path.endswith("/"):
            found = [path]
        else:
            found = [path] if fs.isfile(path) else fs.find(path)
        return sorted(fs.unstrip_protocol(each) for each in found)


EVENTS, USERS, ITEMS = "events", "users", "items"
# By the ends of names.
FORMATS = {
    **dict.fromkeys((".csv", ".txt", ".dat", ".data", ".inter", ".user", ".item"), "csv"),
    **dict.fromkeys((".tsv", ".tab"), "tsv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq", ".parq"), "parquet"),
    **dict.fromkeys((".arrow", ".feather", ".ipc"), "arrow"),
}
COMPRESSIONS = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
# What writers of partitions call a missing value.
MISSING_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class File:
    """A file of a table.

    path: as it is opened. format: csv, tsv, jsonl, parquet or arrow. compression: gzip, zstd or empty, by the
    name. size: in bytes, -1 where a server does not say. partitions: (column, value) of the folders that it
    lies in. encoding, delimiter: of text. columns: their names, where the text has no line with them.
    """

    # An address may hold a password, and so this is never shown.
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
        """What messages call it: the path, or the URL without secrets."""
        return shown(self.path)

    @property
    def is_text(self) -> bool:
        """Whether its columns have no types but that of text."""
        return self.format in ("csv", "tsv")

    # Found once: a run asks for it twice, and reads all bytes for it.
    @functools.cached_property
    def digest(self) -> str:
        """What tells its content from another: the digest of the bytes; of a URL see `remote.mark_of`."""
        if is_remote(self.path):
            return mark_of(self.path)
        with explained(f"{self.name} cannot be read", "give a file that can"):
            return digest_of(Path(self.path))


@dataclass(frozen=True)
class Tables:
    """The files of each role, in the order of their paths; of events there is one at least.

    root: the folder or URL that was given. ignored: the names of what lies there and is no table.
    """

    root: str = field(repr=False)
    events: tuple[File, ...]
    users: tuple[File, ...] = ()
    items: tuple[File, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def roles(self) -> dict[str, tuple[File, ...]]:
        """The files by what they hold."""
        return {EVENTS: self.events, USERS: self.users, ITEMS: self.items}

    @property
    def files(self) -> tuple[File, ...]:
        """All of them."""
        return (*self.events, *self.users, *self.items)

    def name_of(self, file: File) -> str:
        """A file's name from the folder on: the same in a copy elsewhere."""
        return file.name.removeprefix(self.root).lstrip("/")
