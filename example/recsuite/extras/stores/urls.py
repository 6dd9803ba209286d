"""Files behind URLs, by fsspec: requests with deadlines, and failures in a sentence."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from typing import Any

from recsuite.errors import UserError
from recsuite.files import digest_of_bytes, digest_of_open
from recsuite.hooks import require_installed
from recsuite.places import shown

# Seconds to connect, seconds without data, and seconds of a request for a block or a whole file.
CONNECT_SECONDS, SILENT_SECONDS, REQUEST_SECONDS = 30.0, 60.0, 3600.0
# Bytes per request.
BLOCK_BYTES = 2**23
# Names of the digests, versions and times that a server may keep of a file.
MARKS = (
    *("ETag", "etag", "Content-MD5", "Digest", "md5Hash", "VersionId", "versionId", "generation"),
    *("Last-Modified", "LastModified", "mtime", "modified", "updated"),
)
# Packages of the file systems of fsspec.
PACKAGES_OF = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs"}
REASONS = {
    401: "it asks for a login",
    403: "this login is not allowed to do it, or has expired",
    404: "it is not there",
}


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
        # Without a cause, which may hold the address with its secrets.
        raise UserError(
            f"Cannot read {shown(url)}: {reason_of_failure(error)}. Fix: check the address, the login and "
            "the network, or copy the file to this machine."
        ) from None


def reason_of_failure(error: BaseException) -> str:
    """Return the reason why a request failed, in a few words."""
    # fsspec reports every HTTP error as a missing file.
    if isinstance(error, FileNotFoundError) and error.__cause__:
        return reason_of_failure(error.__cause__)
    kind, status = type(error).__name__, status_of(error)
    status = {"FileNotFoundError": 404, "PermissionError": 403}.get(kind, status)
    if status:
        return REASONS.get(status, f"the server answers with status {status}")
    # By the name of the class, because each library has its own.
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
    scheme = url.partition("://")[0].lower()
    require_installed(shown(url), "fsspec", PACKAGES_OF.get(scheme, "fsspec"))
    import fsspec
    from fsspec.core import url_to_fs

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
            content = self._file.read(len(block))
        block[: len(content)] = content
        return len(content)

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
    marks = marks_of(info)
    if not marks:
        with RemoteFile(url) as file:
            return digest_of_open(file)
    return digest_of_bytes("\n".join([shown(url), f"size={info.get('size')}", *marks]).encode())


def _info(url: str) -> dict[str, Any]:
    with explained_remote(url):
        fs, path = filesystem(url)
        return dict(fs.info(path))


def list_files(url: str) -> list[str]:
    """Return the URLs of the files below a folder or that match a pattern; for a file, its own URL."""
    with explained_remote(url):
        fs, path = filesystem(url)
        # The query of an address may hold these characters, but is not a pattern.
        if set("*[") & set(path.partition("?")[0]):
            paths = fs.glob(path)
        elif path.startswith("http") and not path.endswith("/"):
            paths = [path]
        else:
            paths = [path] if fs.isfile(path) else fs.find(path)
        return sorted(fs.unstrip_protocol(file) for file in paths)
