"""Download of MovieLens.

A set is downloaded from GroupLens, or from a mirror, completely or not at all. The archive is an unnamed
file, which ends with the process. It is unpacked into a hidden folder beside the final one, which gets its
name in one rename at the end.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import tempfile
import time
import zipfile
from pathlib import Path
from typing import IO

from recsuite.errors import printable
from recsuite.extras.stores import urls
from recsuite.files import explained, remove, replacing
from recsuite.places import shown
from recsuite.runtime.console import say

SOURCE = "https://files.grouplens.org/datasets/movielens/"
# The md5 of each archive, and its size in MB. Six sets are frozen: their digests are those that GroupLens
# publishes beside the zip. The two others are updated from time to time: "" means the digest that is beside
# the zip at the time of the download, which detects a damaged transfer.
ARCHIVES = {
    "ml-100k": ("0e33842e24a9c977be4e0107933c0723", 5),
    "ml-1m": ("c4d9eecfca2ab87c1945afe126590906", 6),
    "ml-10m": ("ce571fd55effeba0271552578f2648bd", 66),
    "ml-20m": ("cd245b17a1ae2cc31bb14903e1204af3", 199),
    "ml-25m": ("6b51fb2759a8657d3bfcbfc42b592ada", 262),
    "ml-32m": ("d472be332d4daa821edc399621853b57", 239),
    "ml-latest-small": ("", 1),
    "ml-latest": ("", 351),
}
# The deadline is for all attempts together, even while the server sends data. The pause doubles.
DEADLINE_SECONDS, ATTEMPTS, PAUSE_SECONDS = 3600.0, 4, 1.0


def download(name: str, folder: Path) -> None:
    """Download the MovieLens set `name` and unpack its files into `folder`.

    The caller has to make sure that one process at a time does this. The environment variable
    MOVIELENS_MIRROR replaces the address of GroupLens.

    Raises:
        UserError: when the download fails, or `folder` is not empty; then `folder` is as it was.
    """
    url = f"{(os.environ.get('MOVIELENS_MIRROR') or SOURCE).rstrip('/')}/{name}.zip"
    address = printable(shown(url))
    # A link may lead to another disk; the temporary files belong there too.
    home = Path(os.path.realpath(folder))
    aside, end = home.with_name(f".{home.name}.download"), time.monotonic() + DEADLINE_SECONDS
    digest, megabytes = ARCHIVES[name]
    advice = f"place the unpacked files in {folder} by hand, or use --dataset synthetic"
    with explained(f"Cannot get {address}", advice):
        if not url.startswith(("https://", "http://")):
            raise OSError("MOVIELENS_MIRROR must begin with https:// or http://")
        if home.exists() and any(home.iterdir()):
            raise OSError(f"{folder} is not empty, and nothing in it is overwritten")
        home.parent.mkdir(parents=True, exist_ok=True)
        # A killed process may have left one.
        remove(aside)
        with tempfile.TemporaryFile(dir=home.parent) as archive, replacing(home, aside):
            digest = digest or _published_digest(f"{url}.md5", end)
            say(f"Downloading {address} ({megabytes} MB)")
            _fetch(url, archive, end)
            if (md5 := _md5(archive)) != digest:
                raise OSError(f"its md5 is {md5} and must be {digest}")
            _unpack(archive, aside)


def _published_digest(url: str, end: float) -> str:
    beside = io.BytesIO()
    _fetch(url, beside, end)
    # Either `MD5 (ml-latest.zip) = <digest>` or `<digest>  ml-latest.zip`.
    match = re.search(rb"\b[0-9a-f]{32}\b", beside.getvalue().lower())
    if match is None:
        raise OSError(f"{printable(shown(url))} holds no md5")
    return match.group().decode()


def _fetch(url: str, file: IO[bytes], end: float) -> None:
    """Write the content of a URL to a file, with a few attempts until `end`, in `time.monotonic` seconds."""
    fs, path = urls.filesystem(url)
    for attempt in range(ATTEMPTS):
        file.seek(0)
        file.truncate()
        try:
            # The timeout of fsspec is for the whole request, not for a single wait.
            fs.get_file(path, file, timeout=max(end - time.monotonic(), 0.001))
            return
        except Exception as error:
            # An error of the disk: network errors have their own classes.
            if type(error) is OSError:
                raise
            left, kind = end - time.monotonic(), type(error).__name__
            reason = urls.reason_of_failure(error)
            if left < 0.01:
                reason = f"it was not complete after {DEADLINE_SECONDS:,g} s"
            # Errors that would come again: an address, a certificate, a refusal.
            lasting = isinstance(error, (FileNotFoundError, ValueError)) or "Redirect" in kind
            if lasting or left < 0.01 or getattr(error, "status", 500) < 500 or attempt == ATTEMPTS - 1:
                # Without the cause: it may contain the address with its secrets.
                raise OSError(reason) from None
            pause = min(PAUSE_SECONDS * 2**attempt, left)
            say(f"Trying {printable(shown(url))} again in {pause:.1f} s: {reason}")
            time.sleep(pause)


def _md5(file: IO[bytes]) -> str:
    md5 = hashlib.md5(usedforsecurity=False)
    file.seek(0)
    while block := file.read(2**20):
        md5.update(block)
    return md5.hexdigest()


def _unpack(archive: IO[bytes], into: Path) -> None:
    """Extract the files in the single folder of an archive to a new folder."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            for member in zipped.infolist():
                # zipfile sanitises names with "..", so they stay within the folder.
                member.filename = member.filename.partition("/")[2]
                if member.filename:
                    zipped.extract(member, into)
    except OSError:
        raise
    # Damage may raise any error of zipfile and its decoders.
    except Exception as error:
        raise OSError(f"it is not a zip file that can be read ({printable(error)})") from error
