"""Downloads from a server on this machine that breaks in every way a real one does; no network is needed."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import socket
import ssl
import stat
import tempfile
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

import download
from config import DATASETS
from errors import UserError

RATINGS = bytes(range(250)) * 200
EXPIRED = ssl.SSLCertVerificationError(1, "certificate verify failed: certificate has expired")


class Mirror:
    """Serves `files`; each entry of `faults` spoils one request, in order.

    A fault is a status to answer, a number of bytes after which the connection breaks off ("cut 100"), or
    "trickle", "silence" and "no length".
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.files: dict[str, bytes] = {}
        self.faults: list[str] = []
        self.ranges = True
        self.requests: list[tuple[str, str | None]] = []
        self.closed = threading.Event()
        self.monkeypatch = monkeypatch
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def publish(self, name: str, content: bytes) -> str:
        """Serve `content` as the archive of `name`, pin its digest, and return its address."""
        self.files[f"/{name}.zip"] = content
        self.monkeypatch.setitem(download.ARCHIVES, name, hashlib.md5(content).hexdigest())
        return f"{self.address}/{name}.zip"


def _handler(mirror: Mirror) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            mirror.requests.append((self.path, asked))
            fault = mirror.faults.pop(0) if mirror.faults else ""
            if fault == "silence":
                mirror.closed.wait(5)
            elif fault.isdigit() or self.path not in mirror.files:
                self.send_error(int(fault or 404))
            else:
                self.send_body(mirror.files[self.path], asked, fault)

        def send_body(self, body: bytes, asked: str | None, fault: str) -> None:
            start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and mirror.ranges else 0
            self.send_response(206 if start else 200)
            if fault != "no length":
                self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            if fault == "trickle":
                for byte in body:
                    self.wfile.write(bytes([byte]))
                    if mirror.closed.wait(0.02):
                        return
            end = start + int(fault.removeprefix("cut ")) if fault.startswith("cut") else None
            self.wfile.write(body[start:end])

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    mirror = Mirror(monkeypatch)
    # A trickle ends with the client hanging up, which is no news.
    monkeypatch.setattr(mirror.server, "handle_error", lambda *_: None)
    monkeypatch.setenv("MOVIELENS_MIRROR", mirror.address)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    thread = threading.Thread(target=mirror.server.serve_forever, args=(0.01,))
    thread.start()
    yield mirror
    mirror.closed.set()
    mirror.server.shutdown()
    mirror.server.server_close()
    thread.join()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "ml-1m"


def archive(*names: str, link: str = "") -> bytes:
    """A zip file, not compressed, so that a test can count and damage its bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name in names:
            zipped.writestr(name, "" if name.endswith("/") else RATINGS)
        if link:
            member = zipfile.ZipInfo(link)
            member.external_attr = (stat.S_IFLNK | 0o777) << 16
            zipped.writestr(member, "/etc")
    return buffer.getvalue()


GOOD = archive("ml-1m/", "ml-1m/ratings.dat", "ml-1m/extra/README")


def fetch(
    folder: Path, name: str = "ml-1m", *, timeout: float = 2, deadline: float = 5, attempts: int = 3
) -> None:
    download.download(name, folder, timeout=timeout, deadline=deadline, attempts=attempts, backoff=0.01)


def refusal(folder: Path, url: str, name: str = "ml-1m", *, timeout: float = 2, deadline: float = 5) -> str:
    """The sentence of a download that fails as it should: with a way on, and without a trace on the disk."""
    before = everything_around(folder)
    with pytest.raises(UserError) as caught:
        fetch(folder, name, timeout=timeout, deadline=deadline)
    assert everything_around(folder) == before
    sentence = str(caught.value)
    assert url in sentence
    assert f"place the unpacked files yourself in {folder}" in sentence
    assert sentence.endswith("--dataset synthetic.")
    assert "\n" not in sentence
    assert ". " not in sentence
    return sentence


def everything_around(folder: Path) -> list[Path]:
    return sorted(folder.parent.parent.rglob("*"))


def assert_complete(folder: Path) -> None:
    assert (folder / "ratings.dat").read_bytes() == RATINGS
    assert (folder / "extra" / "README").read_bytes() == RATINGS
    assert list(folder.parent.iterdir()) == [folder]


def test_every_real_data_set_of_the_command_line_can_be_downloaded() -> None:
    assert sorted(download.ARCHIVES) == sorted(set(DATASETS) - {"synthetic"})


def test_a_set_is_unpacked_and_one_line_names_its_address_and_size(
    mirror: Mirror, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = mirror.publish("ml-1m", GOOD)
    fetch(folder)
    assert_complete(folder)
    assert capsys.readouterr().out == f"Downloading {url} (0.1 MB)\n"


def test_an_inner_folder_of_another_name_becomes_the_folder(mirror: Mirror, folder: Path) -> None:
    mirror.publish("ml-10m", archive("ml-10M100K/ratings.dat", "ml-10M100K/extra/README"))
    fetch(folder, "ml-10m")
    assert_complete(folder)


def test_an_empty_folder_is_filled(mirror: Mirror, folder: Path) -> None:
    folder.mkdir()
    mirror.publish("ml-1m", GOOD)
    fetch(folder)
    assert_complete(folder)


def test_a_linked_folder_is_filled_where_the_link_leads(mirror: Mirror, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    folder.symlink_to(tmp_path / "scratch" / "movies")
    mirror.publish("ml-1m", GOOD)
    fetch(folder)
    assert folder.is_symlink()
    assert_complete(tmp_path / "scratch" / "movies")


def test_the_mirror_may_end_in_a_slash(mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mirror.publish("ml-1m", GOOD)
    monkeypatch.setenv("MOVIELENS_MIRROR", f"{mirror.address}/")
    fetch(folder)
    assert mirror.requests == [("/ml-1m.zip", None)]


def test_a_download_broken_off_halfway_is_resumed(
    mirror: Mirror, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = mirror.publish("ml-1m", GOOD)
    mirror.faults = ["cut 60000", "cut 10000"]
    fetch(folder)
    assert_complete(folder)
    assert [asked for _, asked in mirror.requests] == [None, "bytes=60000-", "bytes=70000-"]
    start, *retries = capsys.readouterr().out.splitlines()
    assert start.startswith(f"Downloading {url}")
    assert len(retries) == 2
    assert all(url in line and "the connection broke off after" in line for line in retries)


def test_a_download_broken_off_starts_again_where_the_server_knows_no_ranges(
    mirror: Mirror, folder: Path
) -> None:
    mirror.publish("ml-1m", GOOD)
    mirror.faults = ["cut 60000"]
    mirror.ranges = False
    fetch(folder)
    assert_complete(folder)
    assert [asked for _, asked in mirror.requests] == [None, "bytes=60000-"]


def test_a_server_that_tells_no_size_is_understood(
    mirror: Mirror, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.publish("ml-1m", GOOD)
    mirror.faults = ["no length"]
    fetch(folder)
    assert_complete(folder)
    assert "(size unknown)" in capsys.readouterr().out


def test_wrong_bytes_are_fetched_again_from_the_start(mirror: Mirror, folder: Path) -> None:
    mirror.publish("ml-1m", GOOD)
    mirror.files["/ml-1m.zip"] = b"?" * len(GOOD)
    mirror.faults = ["cut 60000"]
    sentence = refusal(folder, f"{mirror.address}/ml-1m.zip")
    assert "not the published ones" in sentence
    assert [asked for _, asked in mirror.requests] == [None, "bytes=60000-", None]


def test_a_missing_file_is_asked_for_once(mirror: Mirror, folder: Path) -> None:
    assert "the server answers 404 Not Found" in refusal(folder, f"{mirror.address}/ml-1m.zip")
    assert len(mirror.requests) == 1


def test_a_server_error_is_tried_again(
    mirror: Mirror, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = mirror.publish("ml-1m", GOOD)
    mirror.faults = ["500", "503"]
    fetch(folder)
    assert_complete(folder)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"Trying {url} again in 0.0 s: the server answers 500 Internal Server Error"
    assert lines[2] == f"Downloading {url} (0.1 MB)"


def test_a_server_error_that_stays_is_a_refusal_after_the_last_attempt(mirror: Mirror, folder: Path) -> None:
    mirror.faults = ["500"] * 9
    assert "the server answers 500" in refusal(folder, mirror.publish("ml-1m", GOOD))
    assert len(mirror.requests) == 3


def test_a_trickle_ends_at_the_deadline(mirror: Mirror, folder: Path) -> None:
    url = mirror.publish("ml-1m", GOOD)
    mirror.faults = ["trickle"] * 9
    start = time.monotonic()
    assert "not complete after 0.3 seconds" in refusal(folder, url, deadline=0.3)
    assert time.monotonic() - start < 1.5
    assert len(mirror.requests) == 1


def test_a_silent_server_ends_at_the_timeout(mirror: Mirror, folder: Path) -> None:
    url = mirror.publish("ml-1m", GOOD)
    mirror.faults = ["silence"] * 9
    assert "timed out" in refusal(folder, url, timeout=0.1)
    assert len(mirror.requests) == 3


def test_a_refused_connection_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
    monkeypatch.setenv("MOVIELENS_MIRROR", address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    assert "Connection refused" in refusal(folder, f"{address}/ml-1m.zip")


@pytest.mark.parametrize("address", ["/copies", "file:///copies", "http://[half", "http://h\u00e4/"])
def test_a_mirror_that_is_no_address_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("MOVIELENS_MIRROR", address)
    refusal(folder, f"{address.rstrip('/')}/ml-1m.zip")


def test_an_expired_certificate_points_to_a_mirror_and_is_not_tried_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def urlopen(request: urllib.request.Request, timeout: float) -> NoReturn:
        calls.append(request.full_url)
        raise urllib.error.URLError(EXPIRED)

    monkeypatch.delenv("MOVIELENS_MIRROR", raising=False)
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    sentence = refusal(folder, "https://files.grouplens.org/datasets/movielens/ml-1m.zip")
    assert "certificate has expired" in sentence
    assert "MOVIELENS_MIRROR" in sentence
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (archive("ml-1m/a", "../evil"), "unsafe name '../evil'"),
        (archive("ml-1m/a", "ml-1m/../../../evil"), "unsafe name"),
        (archive("ml-1m/a", "/evil-movielens"), "unsafe name '/evil-movielens'"),
        (archive("ml-1m/a", link="ml-1m/evil"), "the link 'ml-1m/evil'"),
        (archive("ml-1m/a", "evil/b"), "2 folders instead of one"),
        (archive("ml-1m/a", "evil"), "'evil' outside of a folder"),
        (archive(), "0 folders instead of one"),
        (b"<html>Log in to use this network</html>", "not a zip file"),
        (GOOD.replace(RATINGS[:9], b"?" * 9), "not a zip file that can be read"),
    ],
    ids=["up", "up_inside", "absolute", "link", "two_folders", "file_on_top", "empty", "html", "damaged"],
)
def test_a_hostile_or_broken_archive_is_refused_and_writes_nothing(
    mirror: Mirror, folder: Path, content: bytes, reason: str
) -> None:
    assert reason in refusal(folder, mirror.publish("ml-1m", content))
    assert not Path("/evil-movielens").exists()


def test_an_archive_that_unpacks_to_too_much_is_refused(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "MAX_UNPACKED", 99_999)
    assert "100,000 bytes, more than the 99,999 allowed" in refusal(folder, mirror.publish("ml-1m", GOOD))


def test_an_archive_that_does_not_fit_on_the_disk_is_not_unpacked(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=70_000))
    sentence = refusal(folder, mirror.publish("ml-1m", GOOD))
    assert "100,000 bytes and the disk has 70,000 free" in sentence


class FullDisk(io.FileIO):
    """A file on a disk without room."""

    def write(self, _: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_that_fills_during_the_download_is_a_sentence_and_not_tried_again(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "open", lambda path, mode: FullDisk(path, mode.replace("b", "")))
    sentence = refusal(folder, mirror.publish("ml-1m", GOOD))
    assert f"the disk of {folder.parent} reports 'No space left on device'" in sentence
    assert len(mirror.requests) == 1


def test_a_disk_that_fills_during_unpacking_is_a_sentence(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "extractall", _half_then(OSError(errno.ENOSPC, "No space left")))
    assert "reports 'No space left'" in refusal(folder, mirror.publish("ml-1m", GOOD))


def test_an_interrupt_leaves_nothing(mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zipfile.ZipFile, "extractall", _half_then(KeyboardInterrupt()))
    mirror.publish("ml-1m", GOOD)
    with pytest.raises(KeyboardInterrupt):
        fetch(folder)
    assert list(folder.parent.iterdir()) == []


def _half_then(error: BaseException) -> object:
    def extractall(self: zipfile.ZipFile, path: Path) -> NoReturn:
        self.extract("ml-1m/ratings.dat", path)
        raise error

    return extractall


def test_a_folder_that_may_not_be_written_is_a_sentence(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdtemp(*_: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    assert "'Permission denied'" in refusal(folder, mirror.publish("ml-1m", GOOD))


def test_an_empty_folder_survives_a_failure(mirror: Mirror, folder: Path) -> None:
    folder.mkdir()
    refusal(folder, f"{mirror.address}/ml-1m.zip")
    assert folder.is_dir()


def test_a_folder_that_holds_anything_is_refused_untouched(mirror: Mirror, folder: Path) -> None:
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert f"{folder} is not empty" in refusal(folder, mirror.publish("ml-1m", GOOD))
    assert (folder / "mine.txt").read_text() == "mine"
    assert mirror.requests == []


def test_a_folder_filled_meanwhile_is_not_overwritten(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack = download._unpack

    def unpack_while_a_user_copies(archive: Path, into: Path) -> Path:
        folder.mkdir()
        (folder / "mine.txt").write_text("mine")
        return unpack(archive, into)

    monkeypatch.setattr(download, "_unpack", unpack_while_a_user_copies)
    mirror.publish("ml-1m", GOOD)
    with pytest.raises(UserError, match="Directory not empty"):
        fetch(folder)
    assert everything_around(folder) == [folder.parent, folder, folder / "mine.txt"]


@pytest.mark.parametrize("form", ["MD5 (ml-latest-small.zip) = {}\n", "{}  ml-latest-small.zip\n"])
def test_a_set_that_changes_is_checked_against_the_digest_beside_it(
    mirror: Mirror, folder: Path, form: str
) -> None:
    mirror.files["/ml-latest-small.zip"] = GOOD
    mirror.files["/ml-latest-small.zip.md5"] = form.format(hashlib.md5(GOOD).hexdigest()).encode()
    mirror.faults = ["503"]
    fetch(folder, "ml-latest-small")
    assert_complete(folder)
    paths = [path for path, _ in mirror.requests]
    assert paths == ["/ml-latest-small.zip.md5"] * 2 + ["/ml-latest-small.zip"]


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        (None, "cannot be had (the server answers 404 Not Found)"),
        (b"<html>hello</html>", "holds no md5"),
        (b"0" * 32, "not the published ones"),
    ],
    ids=["missing", "meaningless", "wrong"],
)
def test_a_set_that_changes_is_refused_without_its_right_digest(
    mirror: Mirror, folder: Path, beside: bytes | None, reason: str
) -> None:
    mirror.files["/ml-latest-small.zip"] = GOOD
    if beside is not None:
        mirror.files["/ml-latest-small.zip.md5"] = beside
    assert reason in refusal(folder, f"{mirror.address}/ml-latest-small.zip", "ml-latest-small")
