"""Connections that end: a request, what it answers, and every wait bounded by a deadline."""

from __future__ import annotations

import concurrent.futures
import http.client
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import IO, Any

from recsuite.errors import printable
from recsuite.files import reason_of

BLOCK = 64 * 2**10


class DownloadError(Exception):
    """Why the set cannot be had, in plain words that fit into a sentence."""


class PassingError(DownloadError):
    """A failure that the next attempt may not meet."""


@dataclass(frozen=True)
class Patience:
    """How long, and how often, the server may be waited for."""

    timeout: float
    deadline: float
    attempts: int
    backoff: float
    start: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """The seconds until the deadline; raises `DownloadError` when there are none."""
        left = self.start + self.deadline - time.monotonic()
        if left <= 0:
            raise DownloadError(f"it was not complete after {self.deadline:g} seconds")
        return left


@contextmanager
def connecting(patience: Patience) -> Iterator[urllib.request.OpenerDirector]:
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

    # A little late, so that a wait which this ends finds the deadline passed.
    timer = threading.Timer(patience.left() + 0.01, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield urllib.request.build_opener(_Http(connect), _Https(connect), _Redirects)
    finally:
        timer.cancel()
        timer.join()
        # Closing a duplicate ends no connection, and an error may hold on to the other.
        hang_up()
        for connection in connections:
            connection.close()


def _connect(address: tuple[str, int], timeout: float, patience: Patience) -> socket.socket:
    """A connection, made in a thread of its own: nothing interrupts the look-up of a name."""
    made: concurrent.futures.Future[socket.socket] = concurrent.futures.Future()

    def connect() -> None:
        try:
            made.set_result(socket.create_connection(address, timeout))
        except Exception as error:
            made.set_exception(error)

    left = patience.left()
    threading.Thread(target=connect, daemon=True).start()
    concurrent.futures.wait([made], left + 0.01)
    try:
        patience.left()
    except DownloadError:
        # One that comes too late is nobody's, and a server would wait for a request.
        made.add_done_callback(_close)
        raise
    return made.result()


def _close(made: concurrent.futures.Future[socket.socket]) -> None:
    if made.exception() is None:
        made.result().close()


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
            raise DownloadError(
                f"the server redirects to {printable(place)}, which is neither https:// nor http://"
            )
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def open_url(
    opener: urllib.request.OpenerDirector, url: str, offset: int, patience: Patience
) -> http.client.HTTPResponse:
    """The answer to a request for what lies at an address, from byte `offset` on.

    Raises:
        DownloadError: when there is none; a `PassingError` where trying again may help.
    """
    if not url.startswith(("https://", "http://")):
        raise DownloadError("MOVIELENS_MIRROR has to begin with https:// or http://")
    with _network_errors_in_words(patience):
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        request = urllib.request.Request(url, headers=headers)
        response = opener.open(request, timeout=min(patience.timeout, patience.left()))
        assert isinstance(response, http.client.HTTPResponse)
        return response


def blocks(response: http.client.HTTPResponse, patience: Patience) -> Iterator[bytes]:
    """What a server sends, as it arrives.

    Raises:
        DownloadError: at the deadline; a `PassingError` when the connection ends before the answer does.
    """
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
        raise PassingError(f"the connection broke off after {received:,} of {expected:,} bytes")


@contextmanager
def _network_errors_in_words(patience: Patience) -> Iterator[None]:
    """Turn what the network raises into a passing error, or a lasting one where trying again is no use."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        patience.left()
        kind = PassingError if error.code >= 500 else DownloadError
        raise kind(f"the server answers {error.code} {words_of(error.reason)}") from error
    # Before ValueError, because a refused certificate is both.
    except (OSError, http.client.HTTPException) as error:
        patience.left()
        cause = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(cause, ssl.SSLCertVerificationError):
            reason = words_of(getattr(cause, "verify_message", cause))
            raise DownloadError(
                f"the server's certificate is not valid ({reason}), "
                "which setting MOVIELENS_MIRROR to the address of another copy avoids"
            ) from error
        raise PassingError(f"the connection failed ({words_of(cause)})") from error
    except (ValueError, OverflowError) as error:
        raise DownloadError(f"this is not an address ({words_of(error)})") from error


def words_of(error: object) -> str:
    """What an error says, as one line that does nothing to a terminal."""
    said = reason_of(error) if isinstance(error, OSError) else str(error)
    return printable(said or type(error).__name__)
