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
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from recsuite.config.sections.data import DATASETS
from recsuite.datasets.movielens import download
from recsuite.errors import UserError
from tests.support.launch import PATIENCE

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
    assert time.monotonic() - start < 5 * PATIENCE
    assert len(mirror.requests) <= 2


def test_a_silent_server_ends_at_the_timeout(mirror: Mirror, folder: Path) -> None:
    url = mirror.publish("ml-1m", GOOD)
    mirror.faults = ["silence"] * 9
    assert "timed out" in refusal(folder, url, timeout=0.1)
    assert len(mirror.requests) == 3


class Line:
    """A server of bytes, not of HTTP: one start, then the same piece again and again, until hung up on."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.answers: list[tuple[bytes, bytes, float]] = []
        self.connections = 0
        self.bytes_sent = 0
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def answer(self, start: bytes, again: bytes = b"", pause: float = 0.02) -> None:
        """What the next connection gets; the last one named is for all that follow, too."""
        self.answers.append((start, again, pause))

    def _serve(self) -> None:
        while True:
            connection = self.listener.accept()[0]
            if not self.answers:
                connection.close()
                return
            self.connections += 1
            answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            with connection, suppress(OSError):
                self._talk(connection, *answer)

    def _talk(self, connection: socket.socket, start: bytes, again: bytes, pause: float) -> None:
        connection.recv(4096)
        connection.sendall(start)
        # Should the client wait for the end after all: a test that fails (no limit is as late), and no hang.
        end = time.monotonic() + 10 * PATIENCE
        while again and time.monotonic() < end and self.bytes_sent < 50e6:
            connection.sendall(again)
            self.bytes_sent += len(again)
            time.sleep(pause)

    def close(self) -> None:
        self.answers = []
        socket.create_connection(("127.0.0.1", self.port)).close()
        self.thread.join(20 * PATIENCE)
        self.listener.close()
        assert not self.thread.is_alive(), "a connection was left open"


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    line = Line()
    monkeypatch.setenv("MOVIELENS_MIRROR", f"http://127.0.0.1:{line.port}")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "127.0.0.1")
    yield line
    line.close()


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
SLOW = {
    "status line": (b"HTTP/1.1 200 ", b"O"),
    "header": (OK + b"X-Slow: ", b"o"),
    "headers": (OK, b"X-Slow: 1\r\n"),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (OK + b"\r\n", b"o"),
    "chunk extension": (CHUNKED + b"3;", b"o"),
    "trailer": (CHUNKED + b"3\r\nabc\r\n0\r\n", b"X-Slow: 1\r\n"),
    "headers of a redirect": (b"HTTP/1.1 302 Found\r\nLocation: /a\r\n", b"X-Slow: 1\r\n"),
    "body of a redirect": (b"HTTP/1.1 302 Found\r\nLocation: /a\r\n\r\n", b"o"),
    "body of a refusal": (b"HTTP/1.1 500 No\r\n\r\n", b"o"),
}


def assert_ended_at_the_deadline(folder: Path, url: str, name: str = "ml-1m") -> None:
    threads = threading.active_count()
    start = time.monotonic()
    assert "not complete after 0.3 seconds" in refusal(folder, url, name, deadline=0.3)
    assert time.monotonic() - start < 8 * PATIENCE
    # What reads may need a moment to find that its connection was closed.
    while threading.active_count() > threads:
        assert time.monotonic() - start < 12 * PATIENCE, threading.enumerate()
        time.sleep(0.02)


@pytest.mark.parametrize("name", ["ml-1m", "ml-latest"])
@pytest.mark.parametrize("where", [where for where in SLOW if not where.startswith("body of")])
def test_a_server_that_never_comes_to_an_end_is_left_at_the_deadline(
    line: Line, folder: Path, where: str, name: str
) -> None:
    line.answer(*SLOW[where])
    assert_ended_at_the_deadline(folder, f"http://127.0.0.1:{line.port}/{name}.zip", name)
    # On a busy machine a read may time out just before the deadline, and another attempt begin; or the server
    # has not yet accepted even the first when the client leaves.
    assert line.connections <= 2


@pytest.mark.parametrize("where", ["body of a redirect", "body of a refusal"])
def test_a_body_that_says_nothing_is_not_waited_for(line: Line, folder: Path, where: str) -> None:
    line.answer(*SLOW[where])
    line.answer(b"HTTP/1.1 404 Gone\r\n\r\n")
    assert "404 Gone" in refusal(folder, f"http://127.0.0.1:{line.port}/ml-1m.zip")
    assert line.connections == 2


def test_a_handshake_of_tls_that_never_ends_is_left_at_the_deadline(
    line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The head of a record of 16,384 bytes, and then one of them at a time.
    line.answer(b"\x16\x03\x03\x40\x00", b"\x02")
    monkeypatch.setenv("MOVIELENS_MIRROR", f"https://127.0.0.1:{line.port}")
    assert_ended_at_the_deadline(folder, f"https://127.0.0.1:{line.port}/ml-1m.zip")


def test_a_proxy_that_never_comes_to_an_end_is_left_at_the_deadline(
    line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.answer(*SLOW["headers"])
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{line.port}")
    monkeypatch.setenv("MOVIELENS_MIRROR", "https://movies.invalid")
    assert_ended_at_the_deadline(folder, "https://movies.invalid/ml-1m.zip")


def test_a_connection_that_is_made_after_the_deadline_is_closed(
    line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line.answer(*SLOW["body"])
    create = socket.create_connection
    made = []

    def create_late(*arguments: Any) -> socket.socket:
        time.sleep(0.5)
        made.append(create(*arguments))
        return made[0]

    with monkeypatch.context() as patched:
        patched.setattr(socket, "create_connection", create_late)
        assert_ended_at_the_deadline(folder, f"http://127.0.0.1:{line.port}/ml-1m.zip")
    assert [connection.fileno() for connection in made] == [-1]


def test_a_name_that_is_looked_up_for_long_is_left_at_the_deadline(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = threading.Event()

    def look_up(*_: object) -> NoReturn:
        found.wait(10 * PATIENCE)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setenv("MOVIELENS_MIRROR", "http://movies.invalid")
    start = time.monotonic()
    assert "not complete after 0.3 seconds" in refusal(
        folder, "http://movies.invalid/ml-1m.zip", deadline=0.3
    )
    assert time.monotonic() - start < 8 * PATIENCE
    found.set()


def test_a_port_that_none_has_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOVIELENS_MIRROR", "http://127.0.0.1:99999")
    refusal(folder, "http://127.0.0.1:99999/ml-1m.zip")


ENDLESS = b"a" * 2**16


@pytest.mark.parametrize(
    ("name", "limit"), [("ml-1m", "12,000,000"), ("ml-latest", "4,096")], ids=["archive", "digest"]
)
@pytest.mark.parametrize(
    "head",
    [b"\r\n", b"Content-Length: 99999999999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"],
    ids=["no length", "length", "chunked"],
)
def test_a_body_without_an_end_is_refused_at_the_limit(
    line: Line, folder: Path, name: str, limit: str, head: bytes
) -> None:
    chunked = b"chunked" in head
    line.answer(OK + head, b"10000\r\n" + ENDLESS + b"\r\n" if chunked else ENDLESS, 0)
    sentence = refusal(folder, f"http://127.0.0.1:{line.port}/{name}.zip", name)
    assert f"bytes or more, and {limit} is the limit" in sentence
    assert line.connections == 1
    assert line.bytes_sent < 30e6


def test_a_file_that_grows_with_every_attempt_is_refused_at_the_limit(
    line: Line, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(download.ARCHIVES, "ml-latest-small", "0" * 32)
    line.answer(b"HTTP/1.1 206 More\r\nContent-Length: 1500000\r\n\r\n" + b"a" * 600_000)
    sentence = refusal(folder, f"http://127.0.0.1:{line.port}/ml-latest-small.zip", "ml-latest-small")
    assert "the server sends 2,100,000 bytes or more, and 2,000,000 is the limit" in sentence
    assert line.connections == 2


def test_every_set_has_a_limit() -> None:
    assert sorted(download.MEGABYTES) == sorted(download.ARCHIVES)


@pytest.mark.parametrize(
    "place", ["ftp://127.0.0.1/ml-1m.zip", "file:///etc/passwd", "data:,hello", "gopher://a/"]
)
def test_a_redirect_that_leaves_the_web_is_refused(line: Line, folder: Path, place: str) -> None:
    line.answer(b"HTTP/1.1 302 Found\r\nLocation: %b\r\n\r\n" % place.encode())
    sentence = refusal(folder, f"http://127.0.0.1:{line.port}/ml-1m.zip")
    assert f"the server redirects to {place}, which is neither https:// nor http://" in sentence
    assert line.connections == 1


def test_a_redirect_on_the_web_is_followed(mirror: Mirror, line: Line, folder: Path) -> None:
    url = mirror.publish("ml-1m", GOOD)
    line.answer(b"HTTP/1.1 301 Moved\r\nLocation: %b\r\nContent-Length: 0\r\n\r\n" % url.encode())
    fetch(folder)
    assert_complete(folder)


def test_redirects_in_a_circle_are_a_sentence(line: Line, folder: Path) -> None:
    line.answer(b"HTTP/1.1 302 Found\r\nLocation: /ml-1m.zip\r\n\r\n")
    assert "302 in a circle: Found" in refusal(folder, f"http://127.0.0.1:{line.port}/ml-1m.zip")


EVIL = b"\x1b[2J\x07\x9b31m"


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 " + EVIL,
        b"HTTP/1.1 500 " + EVIL + b"x" * 9000,
        EVIL,
        b"HTTP/1.1 302 " + EVIL + b"\r\nLocation: file:///" + EVIL,
        b"HTTP/1.1 302 Found\r\nLocation: ftp://" + EVIL,
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:" + EVIL,
        b"HTTP/1.1 302 Found\r\nLocation: http://[" + EVIL,
        b"HTTP/1.1 200 OK\r\n\r\n" + EVIL + b"0" * 32,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + EVIL,
        b"HTTP/1.1 200 OK\r\nContent-Length: " + EVIL,
    ],
)
@pytest.mark.parametrize("name", ["ml-1m", "ml-latest"])
def test_what_a_server_says_does_nothing_to_a_terminal(
    line: Line, folder: Path, capsys: pytest.CaptureFixture[str], answer: bytes, name: str
) -> None:
    line.answer(answer + b"\r\n\r\n")
    sentence = refusal(folder, f"http://127.0.0.1:{line.port}/{name}.zip", name)
    assert sentence.isprintable()
    assert len(sentence) < 1000
    assert capsys.readouterr().out.replace("\n", "").isprintable()


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

    def refuse(_: object, request: urllib.request.Request, timeout: float) -> NoReturn:
        calls.append(request.full_url)
        raise urllib.error.URLError(EXPIRED)

    monkeypatch.delenv("MOVIELENS_MIRROR", raising=False)
    monkeypatch.setattr(urllib.request.OpenerDirector, "open", refuse)
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
        (
            archive(*(f"ml-1m/{number}/" for number in range(1001))),
            "1,001 files, more than the 1,000 allowed",
        ),
        (b"<html>Log in to use this network</html>", "not a zip file"),
        (GOOD.replace(RATINGS[:9], b"?" * 9), "not a zip file that can be read"),
    ],
    ids=[
        "up",
        "up_inside",
        "absolute",
        "link",
        "two_folders",
        "file_on_top",
        "empty",
        "many",
        "html",
        "damaged",
    ],
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


def test_what_a_killed_download_left_goes_and_what_only_has_such_a_name_stays(
    mirror: Mirror, folder: Path
) -> None:
    mirror.publish("ml-1m", GOOD)
    left, foreign = folder.with_name(".ml-1m.x7k2"), folder.with_name(".ml-1m.backup")
    for path in (left / "unpacked" / "ml-1m" / "ratings.dat", left / "archive.zip", foreign / "ratings.dat"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    link = folder.with_name(".ml-1m.link")
    link.symlink_to(foreign)
    fetch(folder)
    assert {*folder.parent.iterdir()} == {folder, foreign, link}
    assert (foreign / "ratings.dat").exists()


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
