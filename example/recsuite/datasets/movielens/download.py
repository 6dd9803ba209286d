"""Fetches a MovieLens set from GroupLens, or from a mirror, and unpacks it: complete or absent.

data/                   the parent, on whose file system everything happens
  .ml-1m.x7k2/          temporary; if the process is killed, gone at the next download
    archive.zip         grows, is resumed after a fault, is unpacked only when its digest is right
    unpacked/ml-1m/     renamed to data/ml-1m at the very end
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import http.client
import os
import re
import shutil
import socket
import ssl
import stat
import struct
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from recsuite.errors import UserError, printable

SOURCE = "https://files.grouplens.org/datasets/movielens/"

# The md5 of each archive. Six sets are frozen: their digests are the ones GroupLens publishes beside the
# zip, and many public projects record the same. The two others are made anew from time to time, so a
# digest written here would become wrong; None means the one that lies beside the zip today, which shows
# a damaged transfer but proves nothing about who made the file.
ARCHIVES: dict[str, str | None] = {
    "ml-100k": "0e33842e24a9c977be4e0107933c0723",
    "ml-1m": "c4d9eecfca2ab87c1945afe126590906",
    "ml-10m": "ce571fd55effeba0271552578f2648bd",
    "ml-20m": "cd245b17a1ae2cc31bb14903e1204af3",
    "ml-25m": "6b51fb2759a8657d3bfcbfc42b592ada",
    "ml-32m": "d472be332d4daa821edc399621853b57",
    "ml-latest-small": None,
    "ml-latest": None,
}

# What GroupLens states, in MB. Twice as much is taken, for ml-latest grows; a server may not fill the disk.
MEGABYTES = {
    "ml-100k": 5,
    "ml-1m": 6,
    "ml-10m": 66,
    "ml-20m": 199,
    "ml-25m": 262,
    "ml-32m": 239,
    "ml-latest-small": 1,
    "ml-latest": 351,
}
# What may be in a temporary folder.
CONTENT = {"archive.zip", "archive.zip.md5", "unpacked"}
MAX_DIGEST_FILE = 4096
# Every set unpacks to less than 2 GiB and 30 files; what claims more than this is a mistake or a zip bomb.
MAX_UNPACKED = 8 * 2**30
MAX_MEMBERS = 1000
BLOCK = 64 * 2**10


class _DownloadError(Exception):
    """Why the set cannot be had, in plain words that fit into a sentence."""


class _PassingError(_DownloadError):
    """A failure that the next attempt may not meet."""


@dataclass(frozen=True)
class _Patience:
    """How long, and how often, the server may be waited for."""

    timeout: float
    deadline: float
    attempts: int
    backoff: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """The seconds until the deadline; raises `_DownloadError` when there are none."""
        left = self.start + self.deadline - time.monotonic()
        if left <= 0:
            raise _DownloadError(f"it was not complete after {self.deadline:g} seconds")
        return left


def download(
    name: str,
    folder: Path,
    *,
    timeout: float = 30.0,
    deadline: float = 3600.0,
    attempts: int = 4,
    backoff: float = 1.0,
) -> None:
    """Make `folder` hold the unpacked files of the MovieLens set `name`.

    `timeout` bounds each wait for the server and `deadline` all of them, in seconds, whatever the server
    sends meanwhile; `backoff` is the pause before the second of `attempts`, and doubles. The caller sees to
    it that one process per file system does this. The environment variable MOVIELENS_MIRROR replaces the
    address of GroupLens.

    Raises:
        UserError: when the set cannot be had; then `folder` is as it was, absent or empty, and nothing
            temporary is left. Also when `folder` holds anything, which is never touched.
    """
    url = (os.environ.get("MOVIELENS_MIRROR") or SOURCE).rstrip("/") + f"/{name}.zip"
    patience = _Patience(timeout, deadline, attempts, backoff)
    try:
        # Behind a link lies the disk that the user chose; the temporary files belong there too.
        _install(name, url, Path(os.path.realpath(folder)), patience)
    except (_DownloadError, OSError) as error:
        reason = _words(error)
        if isinstance(error, OSError):
            reason = f"the disk of {folder.parent} reports '{reason}'"
        raise UserError(
            f"Cannot get {printable(url)}: {reason}; "
            f"place the unpacked files yourself in {folder}, or use --dataset synthetic."
        ) from error


def _install(name: str, url: str, folder: Path, patience: _Patience) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise _DownloadError(f"{folder} is not empty, and nothing in it is overwritten")
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Whoever calls holds the lock, so such a folder was left by a process that was killed.
    for leftover in filter(_is_leftover, folder.parent.glob(f".{folder.name}.*")):
        shutil.rmtree(leftover)
    # A cleanup that stumbles must not turn a finished download into a failure.
    with tempfile.TemporaryDirectory(
        dir=folder.parent, prefix=f".{folder.name}.", ignore_cleanup_errors=True
    ) as temporary:
        archive = Path(temporary, "archive.zip")
        digest = ARCHIVES[name] or _published_digest(url, Path(temporary, "archive.zip.md5"), patience)
        _fetch(url, archive, digest, 2 * MEGABYTES[name] * 10**6, patience)
        # Renaming onto an empty folder replaces it; onto one that was filled meanwhile it fails.
        _unpack(archive, Path(temporary, "unpacked")).rename(folder)


def _is_leftover(path: Path) -> bool:
    """Whether `_install` made a folder: a user may have given one of his own such a name."""
    if path.is_symlink() or not path.is_dir():
        return False
    return {found.name for found in path.iterdir()} <= CONTENT


def _published_digest(url: str, path: Path, patience: _Patience) -> str:
    try:
        _fetch(f"{url}.md5", path, None, MAX_DIGEST_FILE, patience)
    except _DownloadError as error:
        raise _DownloadError(f"its digest {url}.md5 cannot be had ({error})") from error
    # Either `MD5 (ml-latest.zip) = <digest>` or `<digest>  ml-latest.zip`.
    match = re.search(r"\b[0-9a-f]{32}\b", path.read_text("ascii", "replace").lower())
    if match is None:
        raise _DownloadError(f"its digest file {url}.md5 holds no md5")
    return match.group()


def _fetch(url: str, path: Path, digest: str | None, limit: int, patience: _Patience) -> None:
    failed = 0
    while True:
        try:
            return _attempt(url, path, digest, limit, patience)
        except _PassingError as error:
            failed += 1
            if failed >= patience.attempts:
                raise
            pause = min(patience.backoff * 2 ** (failed - 1), patience.left())
            print(f"Trying {printable(url)} again in {pause:.1f} s: {error}", flush=True)
            time.sleep(pause)


def _attempt(url: str, path: Path, digest: str | None, limit: int, patience: _Patience) -> None:
    """Complete the file at `path` from where the last attempt left it, if the server can do that."""
    first = not path.exists()
    offset = 0 if first else path.stat().st_size
    with (
        _opener(patience) as opener,
        _open(opener, url, offset, patience) as response,
        path.open("ab") as file,
    ):
        if response.status != http.client.PARTIAL_CONTENT:
            offset = 0
            file.truncate(0)
        _check_size(offset + (response.length or 0), limit)
        if first and digest:
            size = "size unknown" if response.length is None else f"{response.length / 1e6:.1f} MB"
            print(f"Downloading {printable(url)} ({size})", flush=True)
        for block in _blocks(response, patience):
            offset += len(block)
            _check_size(offset, limit)
            file.write(block)
    if digest and (actual := _md5(path)) != digest:
        # Nobody knows which bytes are wrong, so none is kept.
        os.truncate(path, 0)
        raise _PassingError(f"the bytes are not the published ones (md5 {actual} instead of {digest})")


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise _DownloadError(f"the server sends {size:,} bytes or more, and {limit:,} is the limit")


def _md5(path: Path) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            md5.update(block)
    return md5.hexdigest()


@contextmanager
def _opener(patience: _Patience) -> Iterator[urllib.request.OpenerDirector]:
    """What opens addresses; at the deadline all of its connections are shut, whatever waits for them.

    A timeout bounds each wait for bytes, and many of those stand in loops without an end: a status line or a
    TLS handshake of one byte now and then, headers, answers "100 Continue", what follows a chunk's size.
    """
    # Duplicates, because urllib closes its own, and TLS takes them over.
    connections: list[socket.socket] = []

    def connect(address: tuple[str, int], timeout: float, _: object = None) -> socket.socket:
        # One is in use at a time: it was a redirect.
        hang_up()
        connection = _connect(address, timeout, patience)
        connections.append(connection.dup())
        # The timer may have struck just before.
        patience.left()
        return connection

    def hang_up() -> None:
        for connection in connections:
            # Or the server was quicker.
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # A little late, so that whoever finds the line dead finds the deadline passed.
    timer = threading.Timer(patience.left() + 0.01, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield urllib.request.build_opener(_Http(connect), _Https(connect), _Redirects)
    finally:
        timer.cancel()
        timer.join()
        for connection in connections:
            connection.close()


def _connect(address: tuple[str, int], timeout: float, patience: _Patience) -> socket.socket:
    """A connection, made in a thread of its own: nothing interrupts the look-up of a name."""
    made: concurrent.futures.Future[socket.socket] = concurrent.futures.Future()

    def connect() -> None:
        try:
            made.set_result(socket.create_connection(address, timeout))
        except Exception as error:
            made.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    concurrent.futures.wait([made], patience.left() + 0.01)
    patience.left()
    return made.result()


class _Connecting(urllib.request.AbstractHTTPHandler):
    """Opens addresses over connections that a function makes."""

    def __init__(self, connect: Callable[..., socket.socket]) -> None:
        super().__init__()
        self.connect = connect

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> Any:
        def make(*arguments: Any, **named: Any) -> http.client.HTTPConnection:
            connection = http_class(*arguments, **named)
            # Made for this purpose, if not public; a test notices should it ever be without effect.
            connection._create_connection = self.connect
            return connection

        return super().do_open(make, req, **options)


class _Http(_Connecting, urllib.request.HTTPHandler):
    pass


class _Https(_Connecting, urllib.request.HTTPSHandler):
    pass


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https alone."""

    inf_msg = "in a circle: "

    def http_error_302(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
    ) -> Any:
        # Or its text would be read to the end, and it need not have one.
        fp.close()
        place = urllib.parse.urljoin(req.full_url, headers.get("location") or headers.get("uri") or "")
        if not place.startswith(("https://", "http://")):
            raise _DownloadError(
                f"the server redirects to {printable(place)}, which is neither https:// nor http://"
            )
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def _open(
    opener: urllib.request.OpenerDirector, url: str, offset: int, patience: _Patience
) -> http.client.HTTPResponse:
    if not url.startswith(("https://", "http://")):
        raise _DownloadError("MOVIELENS_MIRROR has to begin with https:// or http://")
    with _network_errors_in_words(patience):
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        request = urllib.request.Request(url, headers=headers)
        response = opener.open(request, timeout=min(patience.timeout, patience.left()))
        assert isinstance(response, http.client.HTTPResponse)
        return response


def _blocks(response: http.client.HTTPResponse, patience: _Patience) -> Iterator[bytes]:
    # Counted here: whether read1 counts `length` down differs between Python versions.
    expected, received = response.length, 0
    while expected is None or received < expected:
        with _network_errors_in_words(patience):
            # Not read, which waits for a whole block.
            block = response.read1(BLOCK)
        # What looks like the end may be the line that was shut.
        patience.left()
        if not block:
            break
        received += len(block)
        yield block
    if expected is not None and received < expected:
        raise _PassingError(f"the connection broke off after {received:,} of {expected:,} bytes")


@contextmanager
def _network_errors_in_words(patience: _Patience) -> Iterator[None]:
    """Turn what the network raises into a passing error, or a lasting one where trying again is no use."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        patience.left()
        kind = _PassingError if error.code >= 500 else _DownloadError
        raise kind(f"the server answers {error.code} {_words(error.reason)}") from error
    # Before ValueError, because a refused certificate is both.
    except (OSError, http.client.HTTPException) as error:
        patience.left()
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            raise _DownloadError(
                f"the server's certificate is not valid ({_words(getattr(cause, 'verify_message', cause))}), "
                "which setting MOVIELENS_MIRROR to the address of another copy avoids"
            ) from error
        raise _PassingError(f"the connection failed ({_words(cause)})") from error
    except (ValueError, OverflowError) as error:
        raise _DownloadError(f"this is not an address ({_words(error)})") from error


def _words(error: object) -> str:
    return printable(getattr(error, "strerror", None) or str(error) or type(error).__name__)


def _unpack(archive: Path, into: Path) -> Path:
    """Unpack `archive`, which may be hostile, and return its one folder inside `into`."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.infolist()
            top = _single_folder(members)
            size, free = sum(member.file_size for member in members), shutil.disk_usage(archive.parent).free
            if len(members) > MAX_MEMBERS:
                raise _DownloadError(
                    f"it holds {len(members):,} files, more than the {MAX_MEMBERS:,} allowed"
                )
            if size > MAX_UNPACKED:
                raise _DownloadError(f"it unpacks to {size:,} bytes, more than the {MAX_UNPACKED:,} allowed")
            if size > free:
                raise _DownloadError(f"it unpacks to {size:,} bytes and the disk has {free:,} free")
            zipped.extractall(into)
    # Damage surfaces wherever zipfile, its decoders and its unpacking of headers happen to stumble.
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError) as error:
        raise _DownloadError(f"it is not a zip file that can be read ({_words(error)})") from error
    return into / top


def _single_folder(members: list[zipfile.ZipInfo]) -> str:
    tops = set()
    for member in members:
        parts = member.filename.removesuffix("/").split("/")
        if {"", ".", ".."} & set(parts):
            raise _DownloadError(f"the archive holds the unsafe name {member.filename!r}")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise _DownloadError(f"the archive holds the link {member.filename!r}")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise _DownloadError(f"the archive holds {member.filename!r} in an unusual compression")
        if len(parts) == 1 and not member.is_dir():
            raise _DownloadError(f"the archive holds {member.filename!r} outside of a folder")
        tops.add(parts[0])
    if len(tops) != 1:
        raise _DownloadError(f"the archive holds {len(tops)} folders instead of one")
    return tops.pop()
