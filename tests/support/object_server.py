"""Servers on this machine: files over HTTP, and as much of S3 as reading wants."""

from __future__ import annotations

import contextlib
import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Handler(http.server.BaseHTTPRequestHandler):
    """Sends the files of a folder, or parts of them; below /BUCKET as S3 lists them."""

    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def log_message(self, *arguments: Any) -> None:
        """Say nothing."""

    def _answer(self, with_body: bool) -> None:
        address = urlsplit(self.path)
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        if self.server.silent:
            # Until the test is over: the client has a deadline.
            self.server.ended.wait()
            return
        if self.server.status:
            self._send(self.server.status, b"secret words of a server", {}, with_body)
            return
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        path = self.server.folder / unquote(address.path).lstrip("/")
        if "list-type" in query:
            self._send(200, self._listing(path, query), {"Content-Type": "application/xml"}, with_body)
        elif path.is_file():
            self._send_file(path, with_body)
        else:
            self._send(404, b"", {}, with_body)

    def _send_file(self, path: Path, with_body: bool) -> None:
        content = path.read_bytes()
        headers = {
            "ETag": f'"{hash(content) & (2**63 - 1):x}"',
            "Accept-Ranges": "bytes",
            "Last-Modified": "Fri, 20 Nov 2026 10:00:00 GMT",
        }
        status, asked = 200, self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            end = min(int(last) + 1 if last else len(content), len(content))
            headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(content)}"
            status, content = 206, content[int(first) : end]
        self._send(status, content, headers, with_body)

    def _send(self, status: int, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(content)

    def _listing(self, bucket: Path, query: dict[str, str]) -> bytes:
        """Objects below a prefix; with a delimiter, only objects and folders of one level."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        files, folders = [], set()
        for path in sorted(bucket.rglob("*")):
            key = path.relative_to(bucket).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            head, slash, _ = key[len(prefix) :].partition("/")
            if delimiter and slash:
                folders.add(f"{prefix}{head}/")
            else:
                size = path.stat().st_size
                files.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{size}</Size><ETag>&quot;x{size}&quot;</ETag>"
                    "<LastModified>2026-11-20T10:00:00.000Z</LastModified></Contents>"
                )
        commons = [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in sorted(folders)
        ]
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>{bucket.name}</Name><Prefix>{escape(prefix)}</Prefix><IsTruncated>false</IsTruncated>"
            f"<KeyCount>{len(files) + len(folders)}</KeyCount>{''.join(files)}{''.join(commons)}"
            "</ListBucketResult>"
        ).encode()


class Server(http.server.ThreadingHTTPServer):
    """A server of a folder; status: what it answers instead, silent: whether it answers at all."""

    daemon_threads = True
    # Of a client that waits for an answer.
    block_on_close = False

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.status, self.silent = folder, 0, False
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.ended = threading.Event()

    @property
    def address(self) -> str:
        """Host and port."""
        return f"127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server of the files of a folder, until the end of the block."""
    with Server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()
