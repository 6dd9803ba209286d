"""Fetches a MovieLens set from GroupLens, or from a mirror, and unpacks it: complete or absent.

data/                   the parent, on whose file system everything happens
  .ml-1m.x7k2/          temporary; if the process is killed, gone at the next download
    archive.zip         grows, is resumed after a fault, is unpacked only when its digest is right
    unpacked/ml-1m/     renamed to data/ml-1m at the very end
"""

from __future__ import annotations

import hashlib
import http.client
import os
import re
import shutil
import stat
import struct
import tempfile
import time
import zipfile
import zlib
from pathlib import Path

from recsuite.datasets.movielens.connection import (
    BLOCK,
    DownloadError,
    PassingError,
    Patience,
    blocks,
    connecting,
    open_url,
    words_of,
)
from recsuite.errors import UserError, printable
from recsuite.runtime.console import say

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
    patience = Patience(timeout, deadline, attempts, backoff)
    try:
        # Behind a link lies the disk that the user chose; the temporary files belong there too.
        _install(name, url, Path(os.path.realpath(folder)), patience)
    except (DownloadError, OSError) as error:
        reason = words_of(error)
        if isinstance(error, OSError):
            reason = f"the disk of {folder.parent} reports '{reason}'"
        raise UserError(
            f"Cannot get {printable(url)}: {reason}; "
            f"place the unpacked files yourself in {folder}, or use --dataset synthetic."
        ) from error


def _install(name: str, url: str, folder: Path, patience: Patience) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise DownloadError(f"{folder} is not empty, and nothing in it is overwritten")
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


def _published_digest(url: str, path: Path, patience: Patience) -> str:
    try:
        _fetch(f"{url}.md5", path, None, MAX_DIGEST_FILE, patience)
    except DownloadError as error:
        raise DownloadError(f"its digest {url}.md5 cannot be had ({error})") from error
    # Either `MD5 (ml-latest.zip) = <digest>` or `<digest>  ml-latest.zip`.
    match = re.search(r"\b[0-9a-f]{32}\b", path.read_text("ascii", "replace").lower())
    if match is None:
        raise DownloadError(f"its digest file {url}.md5 holds no md5")
    return match.group()


def _fetch(url: str, path: Path, digest: str | None, limit: int, patience: Patience) -> None:
    failed = 0
    while True:
        try:
            return _attempt(url, path, digest, limit, patience)
        except PassingError as error:
            failed += 1
            if failed >= patience.attempts:
                raise
            pause = min(patience.backoff * 2 ** (failed - 1), patience.left())
            say(f"Trying {printable(url)} again in {pause:.1f} s: {error}")
            time.sleep(pause)


def _attempt(url: str, path: Path, digest: str | None, limit: int, patience: Patience) -> None:
    """Complete the file at `path` from where the last attempt left it, if the server can do that."""
    first = not path.exists()
    offset = 0 if first else path.stat().st_size
    with (
        connecting(patience) as opener,
        open_url(opener, url, offset, patience) as response,
        path.open("ab") as file,
    ):
        if response.status != http.client.PARTIAL_CONTENT:
            offset = 0
            file.truncate(0)
        _check_size(offset + (response.length or 0), limit)
        if first and digest:
            size = "size unknown" if response.length is None else f"{response.length / 1e6:.1f} MB"
            say(f"Downloading {printable(url)} ({size})")
        for block in blocks(response, patience):
            offset += len(block)
            _check_size(offset, limit)
            file.write(block)
    if digest and (actual := _md5(path)) != digest:
        # Nobody knows which bytes are wrong, so none is kept.
        os.truncate(path, 0)
        raise PassingError(f"the bytes are not the published ones (md5 {actual} instead of {digest})")


def _check_size(size: int, limit: int) -> None:
    if size > limit:
        raise DownloadError(f"the server sends {size:,} bytes or more, and {limit:,} is the limit")


def _md5(path: Path) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            md5.update(block)
    return md5.hexdigest()


def _unpack(archive: Path, into: Path) -> Path:
    """Unpack `archive`, which may be hostile, and return its one folder inside `into`."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.infolist()
            top = _single_folder(members)
            size, free = sum(member.file_size for member in members), shutil.disk_usage(archive.parent).free
            if len(members) > MAX_MEMBERS:
                raise DownloadError(f"it holds {len(members):,} files, more than the {MAX_MEMBERS:,} allowed")
            if size > MAX_UNPACKED:
                raise DownloadError(f"it unpacks to {size:,} bytes, more than the {MAX_UNPACKED:,} allowed")
            if size > free:
                raise DownloadError(f"it unpacks to {size:,} bytes and the disk has {free:,} free")
            zipped.extractall(into)
    # Damage surfaces wherever zipfile, its decoders and its unpacking of headers happen to stumble.
    except (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, ValueError) as error:
        raise DownloadError(f"it is not a zip file that can be read ({words_of(error)})") from error
    return into / top


def _single_folder(members: list[zipfile.ZipInfo]) -> str:
    tops = set()
    for member in members:
        parts = member.filename.removesuffix("/").split("/")
        if {"", ".", ".."} & set(parts):
            raise DownloadError(f"the archive holds the unsafe name {member.filename!r}")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise DownloadError(f"the archive holds the link {member.filename!r}")
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise DownloadError(f"the archive holds {member.filename!r} in an unusual compression")
        if len(parts) == 1 and not member.is_dir():
            raise DownloadError(f"the archive holds {member.filename!r} outside of a folder")
        tops.add(parts[0])
    if len(tops) != 1:
        raise DownloadError(f"the archive holds {len(tops)} folders instead of one")
    return tops.pop()
