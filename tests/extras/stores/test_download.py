"""Downloads from a server on this machine that fails in the ways of real ones; no network is needed."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from recsuite.config.sections import DATASETS
from recsuite.errors import UserError
from recsuite.extras.stores import download, urls
from tests.support.launch import PATIENCE, started

RATINGS = bytes(range(250)) * 200
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
DROPPED = OK + b"Content-Length: 100\r\n\r\nabc"


def archive(*names: str) -> bytes:
    """A zip file, not compressed, so that a test can damage its bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as zipped:
        for name in names:
            zipped.writestr(name, "" if name.endswith("/") else RATINGS)
    return buffer.getvalue()


GOOD = archive("ml-1m/", "ml-1m/ratings.dat", "ml-1m/extra/README")


def sent(body: bytes) -> bytes:
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


def refused(status: int, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d Words\r\nConnection: close\r\nContent-Length: 0\r\n%b\r\n" % (status, head)


class Mirror:
    """A server of bytes, not of HTTP: a connection gets the next answer, and all later ones the last answer.

    An answer is a start, and a piece that follows again and again until the client ends the connection; b""
    for a silent server, None for the end of the connection.
    """

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.answers: list[tuple[bytes, bytes | None]] = []
        self.paths: list[str] = []
        self.ended = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def answer(self, *starts: bytes, again: bytes | None = None) -> None:
        self.answers += [(start, again) for start in starts]

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection = self.listener.accept()[0]
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                threading.Thread(target=self._talk, args=(connection, *answer), daemon=True).start()

    def _talk(self, connection: socket.socket, start: bytes, again: bytes | None) -> None:
        with connection, suppress(OSError):
            # The first bytes of TLS hold no path.
            self.paths.append(str([*connection.recv(4096).split(), b"", b""][1], "latin-1"))
            connection.sendall(start)
            while again is not None and not self.ended.wait(0.02):
                connection.sendall(again)

    def close(self) -> None:
        self.ended.set()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    mirror = Mirror()
    monkeypatch.setenv("MOVIELENS_MIRROR", mirror.address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(download, "DEADLINE_SECONDS", 60)
    for name in ("ml-1m", "ml-10m"):
        monkeypatch.setitem(download.ARCHIVES, name, (hashlib.md5(GOOD).hexdigest(), 6))
    yield mirror
    mirror.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data" / "ml-1m"


def refusal(folder: Path, name: str = "ml-1m") -> str:
    """The sentence of a download that fails as it should: with a remedy, and nothing is left on the disk."""
    before = sorted(folder.parent.parent.rglob("*"))
    with pytest.raises(UserError) as caught:
        download.download(name, folder)
    assert sorted(folder.parent.parent.rglob("*")) == before
    sentence = str(caught.value)
    assert f"place the unpacked files in {folder} by hand, or use --dataset synthetic." in sentence
    return sentence


def assert_complete(folder: Path) -> None:
    assert (folder / "ratings.dat").read_bytes() == RATINGS
    assert (folder / "extra" / "README").read_bytes() == RATINGS
    assert list(folder.parent.iterdir()) == [folder]


def test_every_real_data_set_of_the_command_line_can_be_downloaded() -> None:
    assert sorted(download.ARCHIVES) == sorted(set(DATASETS) - {"synthetic"})


def test_a_set_is_unpacked_and_one_line_names_its_address_and_size(
    mirror: Mirror, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOVIELENS_MIRROR", mirror.address.replace("//", "//user:hunter2@") + "/")
    mirror.answer(sent(GOOD))
    download.download("ml-10m", folder)
    assert_complete(folder)
    assert capsys.readouterr().out == f"Downloading {mirror.address}/ml-10m.zip (6 MB)\n"
    assert mirror.paths == ["/ml-10m.zip"]


@pytest.mark.parametrize("is_link", [False, True])
def test_a_download_fills_an_empty_folder_and_the_target_of_a_link(
    mirror: Mirror, folder: Path, tmp_path: Path, is_link: bool
) -> None:
    target = tmp_path / "scratch" / "movies" if is_link else folder
    if is_link:
        folder.symlink_to(target)
    else:
        folder.mkdir()
    mirror.answer(sent(GOOD))
    download.download("ml-1m", folder)
    assert folder.is_symlink() == is_link
    assert_complete(target)


def test_a_download_that_fails_for_a_moment_is_tried_again(
    mirror: Mirror, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror.answer(refused(503), DROPPED, DROPPED, sent(GOOD))
    download.download("ml-1m", folder)
    assert_complete(folder)
    _, *tries = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in tries] == [
        f"Trying {mirror.address}/ml-1m.zip again in 0.0 s"
    ] * 3
    assert tries[0].endswith("the server answers with status 503")


@pytest.mark.parametrize(
    ("answer", "reason", "attempts"),
    [
        (refused(404), "it is not there", 1),
        (refused(500), "the server answers with status 500", 4),
        (DROPPED, "the connection failed (ClientPayloadError)", 4),
        (sent(b"<html>Log in to use this network</html>"), "its md5 is", 1),
        (refused(302, b"Location: file:///etc/passwd\r\n"), "NonHttpUrlRedirectClientError", 1),
        (refused(302, b"Location: /ml-1m.zip\r\n"), "TooManyRedirects", 10),
    ],
)
def test_a_download_that_fails_gives_one_message_and_leaves_nothing(
    mirror: Mirror, folder: Path, answer: bytes, reason: str, attempts: int
) -> None:
    mirror.answer(answer)
    sentence = refusal(folder)
    assert sentence.startswith(f"Cannot get {mirror.address}/ml-1m.zip: ")
    assert reason in sentence
    assert len(mirror.paths) == attempts


def test_a_redirect_is_followed(mirror: Mirror, folder: Path) -> None:
    mirror.answer(refused(301, b"Location: /elsewhere\r\n"), sent(GOOD))
    download.download("ml-1m", folder)
    assert_complete(folder)
    assert mirror.paths == ["/ml-1m.zip", "/elsewhere"]


def test_a_silent_server_is_given_up(mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "SILENT_SECONDS", 0.1)
    mirror.answer(b"", again=b"")
    assert "the server was silent for" in refusal(folder)
    assert len(mirror.paths) == 4


SLOW = {
    "header": (OK + b"X-Slow: ", b"o"),
    "body": (OK + b"\r\n", b"o"),
    # The head of a record of 16,384 bytes, and then one of them at a time.
    "https": (b"\x16\x03\x03\x40\x00", b"\x02"),
}


@pytest.mark.parametrize("where", SLOW)
def test_a_server_that_sends_slowly_is_given_up_at_the_deadline(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    start, again = SLOW[where]
    mirror.answer(start, again=again)
    if where == "https":
        monkeypatch.setenv("MOVIELENS_MIRROR", mirror.address.replace("http:", "https:"))
    monkeypatch.setattr(download, "DEADLINE_SECONDS", 0.5)
    begin = time.monotonic()
    assert ": it was not complete after 0.5 s. Fix: place" in refusal(folder)
    assert time.monotonic() - begin < 5 * PATIENCE


def test_a_slow_name_lookup_ends_at_the_deadline(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object, **__: object) -> NoReturn:
        mirror.ended.wait(10 * PATIENCE)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(download, "DEADLINE_SECONDS", 0.5)
    monkeypatch.setenv("MOVIELENS_MIRROR", "http://movies.invalid")
    begin = time.monotonic()
    assert "it was not complete after 0.5 s" in refusal(folder)
    assert time.monotonic() - begin < 5 * PATIENCE
    mirror.ended.set()


@pytest.mark.parametrize("address", ["file:///copies", "http://[half", "http://127.0.0.1:9"])
def test_a_mirror_that_is_no_address_or_does_not_listen_is_refused(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv("MOVIELENS_MIRROR", address)
    sentence = refusal(folder)
    assert address.startswith("http://") or "MOVIELENS_MIRROR must begin with https:// or http://" in sentence
    assert not address.endswith(":9") or "the connection failed (Connection refused)" in sentence


LOCATE = """
import sys
from recsuite.config.config import Config
from recsuite.datasets.movielens.source import locate
locate(Config.of(dataset="ml-latest-small", data_path=sys.argv[1]).data, 0)
"""


def test_two_processes_at_once_download_once(mirror: Mirror, folder: Path) -> None:
    content = archive("ml-latest-small/ratings.csv", "ml-latest-small/movies.csv")
    mirror.answer(sent(hashlib.md5(content).hexdigest().encode()), sent(content))
    command = [sys.executable, "-c", LOCATE, str(folder)]
    with started(command) as one, started(command) as other:
        assert (one.wait(30 * PATIENCE), other.wait(30 * PATIENCE)) == (0, 0)
    assert mirror.paths == ["/ml-latest-small.zip.md5", "/ml-latest-small.zip"]
    assert (folder / "ratings.csv").read_bytes() == RATINGS


def test_a_killed_download_leaves_only_its_lock(mirror: Mirror, folder: Path) -> None:
    mirror.answer(sent(b"0" * 32))
    mirror.answer(OK + b"Content-Length: 99999\r\n\r\n", again=b"abc")
    with started([sys.executable, "-c", LOCATE, str(folder)]) as process:
        while len(mirror.paths) < 2 and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert [path.name for path in folder.parent.iterdir()] == [".ml-1m.lock"]


def test_the_next_download_removes_files_of_a_killed_one(mirror: Mirror, folder: Path) -> None:
    left = folder.with_name(".ml-1m.download")
    left.mkdir()
    (left / "users.dat").touch()
    mirror.answer(sent(GOOD))
    download.download("ml-1m", folder)
    assert_complete(folder)
    assert not (folder / "users.dat").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))])
def test_an_interrupt_or_a_full_disk_leaves_nothing(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def copy(source: object, target: io.FileIO) -> NoReturn:
        target.write(b"half")
        raise error

    monkeypatch.setattr(shutil, "copyfileobj", copy)
    mirror.answer(sent(GOOD))
    with pytest.raises((KeyboardInterrupt, UserError), match=r"^$|No space left on device"):
        download.download("ml-1m", folder)
    assert list(folder.parent.iterdir()) == []


def test_a_disk_that_fills_during_the_download_is_not_tried_again(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FullDisk(io.BytesIO):
        def write(self, _: object) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: FullDisk())
    mirror.answer(sent(GOOD))
    assert ": No space left on device. Fix: " in refusal(folder)
    assert len(mirror.paths) == 1


def test_a_download_into_a_folder_that_is_not_empty_changes_nothing(mirror: Mirror, folder: Path) -> None:
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert f"{folder} is not empty" in refusal(folder)
    assert mirror.paths == []


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"no zip", "not a zip file"), (GOOD.replace(RATINGS[:9], b"?" * 9), "not a zip file"), (archive(), "")],
)
def test_an_archive_that_cannot_be_unpacked_is_refused(
    mirror: Mirror, folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    monkeypatch.setitem(download.ARCHIVES, "ml-1m", (hashlib.md5(content).hexdigest(), 6))
    mirror.answer(sent(content))
    assert reason in refusal(folder)


def test_an_archive_cannot_write_outside_the_folder(mirror: Mirror, folder: Path, tmp_path: Path) -> None:
    content = archive("ml-latest/ratings.csv", "ml-latest/../../evil", "/evil-movielens", "../evil")
    mirror.answer(sent(hashlib.md5(content).hexdigest().encode()), sent(content))
    download.download("ml-latest", folder)
    assert {path.parent for path in tmp_path.rglob("*") if path.is_file()} == {folder}
    assert not Path("/evil-movielens").exists()


@pytest.mark.parametrize("form", ["MD5 (ml-latest-small.zip) = {}\n", "{}  ml-latest-small.zip\n"])
def test_a_set_that_changes_is_checked_against_the_digest_beside_it(
    mirror: Mirror, folder: Path, form: str
) -> None:
    mirror.answer(sent(form.format(hashlib.md5(GOOD).hexdigest()).encode()), sent(GOOD))
    download.download("ml-latest-small", folder)
    assert_complete(folder)
    assert mirror.paths == ["/ml-latest-small.zip.md5", "/ml-latest-small.zip"]


@pytest.mark.parametrize(
    ("beside", "reason"),
    [
        (refused(404), "it is not there"),
        (sent(b"<html>hello</html>"), "ml-latest-small.zip.md5 holds no md5"),
        (sent(b"0" * 32), f"its md5 is {hashlib.md5(GOOD).hexdigest()} and must be {'0' * 32}"),
    ],
    ids=["missing", "meaningless", "wrong"],
)
def test_a_set_that_changes_is_refused_without_its_right_digest(
    mirror: Mirror, folder: Path, beside: bytes, reason: str
) -> None:
    mirror.answer(beside, sent(GOOD))
    assert reason in refusal(folder, "ml-latest-small")
