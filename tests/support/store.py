"""Object store on this machine for tests: moto's server of S3, and faults of stores on the way to it."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import pytest
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

if TYPE_CHECKING:
    # Python 3.10 has no such module.
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

BUCKET = "bucket"
# Whatever is logged or written must not have it.
SECRET = "a-secret-of-the-store"
ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>words of a server</Message></Error>"
STATUSES = {
    "SlowDown": "503 Slow Down",
    "InternalError": "500 Internal Server Error",
    "ExpiredToken": "400 Bad Request",
    "AccessDenied": "403 Forbidden",
}


@dataclass
class Fault:
    """Answer to a request instead of that of the store.

    code: of the error, "cut" for a connection that ends without an answer, "unheard" for one that ends so
    after the request was carried out, or "half" for one that ends in the middle of the answer; number: of
    requests, of which `after` succeed before; method, key: of the requests, all by default.
    """

    code: str
    number: int = 10**9
    after: int = 0
    method: str = ""
    key: str = ""


@dataclass
class Store:
    """A running store.

    requests: method, key and bytes of each answer; hidden: keys that lists lack; seconds: before an answer.
    """

    url: str = ""
    fault: Fault | None = None
    hidden: str = ""
    seconds: float = 0.0
    requests: list[tuple[str, str, int]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """Environment of a client."""
        keys = {"AWS_ACCESS_KEY_ID": "a-key", "AWS_SECRET_ACCESS_KEY": SECRET}
        return {**keys, "AWS_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "us-east-1"}

    def application(self, moto: WSGIApplication) -> WSGIApplication:
        """The store as a program of WSGI."""
        lock = threading.Lock()

        def meets(method: str, key: str) -> Fault | None:
            fault = self.fault
            if fault is None or fault.method not in ("", method) or not re.search(fault.key, key):
                return None
            with lock:
                fault.after -= 1
                if fault.after >= 0 or fault.number <= 0:
                    return None
                fault.number -= 1
            return fault

        def serve(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
            method, key = environ["REQUEST_METHOD"], environ["PATH_INFO"]
            time.sleep(self.seconds)
            fault = meets(method, key)
            if fault and fault.code in ("cut", "unheard"):
                # No answer comes.
                if fault.code == "unheard":
                    b"".join(moto(environ, cast(Any, partial(_note, []))))
                environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
                raise ConnectionResetError
            if fault and fault.code != "half":
                start(STATUSES[fault.code], [("Content-Type", "application/xml")])
                return [b"" if method == "HEAD" else ERROR.format(code=fault.code).encode()]
            begun: list[Any] = []
            note: Any = partial(_note, begun)
            content = b"".join(moto(environ, note))
            if self.hidden and "list-type" in environ.get("QUERY_STRING", ""):
                entry = rf"<Contents>(?:(?!</Contents>).)*{self.hidden}.*?</Contents>"
                content = re.sub(entry.encode(), b"", content, flags=re.DOTALL)
            status, headers = begun[:2]
            if method != "HEAD":
                headers = [pair for pair in headers if pair[0].lower() != "content-length"]
                headers.append(("Content-Length", str(len(content))))
            start(status, headers)
            if fault and fault.code == "half":
                content = content[: len(content) // 2]
            self.requests.append((method, key, len(content)))
            return [content]

        return serve


def _note(begun: list[Any], *arguments: Any) -> None:
    begun.extend(arguments)


class _Silent(WSGIRequestHandler):
    def log(self, kind: str, message: str, *arguments: Any) -> None:
        """Say nothing."""


@contextlib.contextmanager
def running() -> Iterator[Store]:
    """A store with an empty bucket."""
    import boto3
    import fsspec

    # A client of this process keeps the address of the store before.
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    store = Store()
    moto = DomainDispatcherApplication(create_backend_app)
    server = make_server("127.0.0.1", 0, store.application(moto), threaded=True, request_handler=_Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.url = f"http://127.0.0.1:{server.port}"
    options = {"aws_access_key_id": "a-key", "aws_secret_access_key": SECRET, "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=store.url, **options).create_bucket(Bucket=BUCKET)
    try:
        yield store
    finally:
        server.shutdown()


# --- kills ---

# In the memory of this process, where requests are cheap, and after each request to the store.
KILLS = [("memory", 5), pytest.param("s3", 1, marks=pytest.mark.soak)]


class Refusing:
    """A file system of which a fault refuses requests."""

    def __init__(self, fs: Any, fault: Fault) -> None:
        self.fs, self.fault = fs, fault

    def __getattr__(self, name: str) -> Any:
        self.fault.after -= 1
        if self.fault.after < 0:
            self.fault.number -= 1
            raise PermissionError
        return getattr(self.fs, name)


@contextlib.contextmanager
def ended_after(number: int, place: Any, store: Store) -> Iterator[Fault]:
    """Refuse all requests after so many of them; in the memory of this process a request is a call."""
    from recsuite.extras.stores.urls import filesystem

    fault = Fault("AccessDenied", after=number)

    def refusing(url: str) -> tuple[Any, str]:
        fs, path = filesystem(url)
        return Refusing(fs, fault), path

    if place.url.startswith("memory"):
        with mock.patch("recsuite.extras.stores.objects.filesystem", refusing):
            yield fault
    else:
        store.fault = fault
        yield fault
        store.fault = None
