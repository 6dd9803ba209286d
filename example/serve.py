"""Serve the best model of a running training over HTTP: an example of a service, not a product.

    ./run.sh dump --save_dir dumps       a training that writes checkpoints
    python serve.py --save_dir dumps     beside it, before or after it has begun
    python serve.py --checkpoint latest  with --inc_dump its deltas too, validated or not
    python serve.py --data_path FOLDER   with features and histories from the data of the training

    curl localhost:8000/health
    curl localhost:8000/score -H "Content-Type: application/json" -d '{"user": [1, 1], "movie": [2, 3]}'
    curl localhost:8000/recommend -H "Content-Type: application/json" -d '{"users": [1], "k": 5}'

Every answer has the step of its model, and the users and items that are out of vocabulary. Without
--data_path only the ids of users and items are known. There is no password; without --host it accepts
connections from this machine only, and answers to a host of another name than localhost with "Invalid host
header", unless --allowed_hosts has it, as for a proxy that keeps the name.
"""

import argparse
import contextlib
import html
import itertools
import json
import re
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import recsuite as rs
from recsuite.datasets.schema import EVENT, HISTORY, ITEM, USER
from recsuite.errors import MAX_CHARACTERS, UserError, printable
from recsuite.hooks import require_installed
from recsuite.places import folder_at
from recsuite.runtime.console import say
from recsuite.runtime.host import descriptor_limit

if TYPE_CHECKING:
    import uvicorn
    from fastapi import FastAPI

    from recsuite.datasets.schema import Schema
    from recsuite.models.tasks import ModelMaker
    from recsuite.serving.served import Follower, ServedModel
    from recsuite.serving.snapshot import Snapshot

# Bytes. A limit, because a request is in memory before any check.
LARGEST_REQUEST = 2**22
# Parts of a body in any size, and least bytes of a part after them, on average: each part, such as a chunk,
# takes the time of some 5 microseconds, in which no other request is read.
FREE_PARTS, LEAST_PART = 1000, 64
# Maximum (item, score) pairs of one answer, and (user, item) pairs scored for it; docs/serving.md has their
# cost.
MOST_ANSWERS, MOST_PAIRS = 100_000, 2_000_000
# Answers computed in parallel, and seconds that another request waits.
COMPUTATIONS, QUEUE_SECONDS = 4, 5
# Seconds: for a client to send a request or to read an answer, of failed updates until /health returns 503,
# and for the last answers when the server stops.
CLIENT_SECONDS, FAILING_SECONDS, STOP_SECONDS = 30, 60, 10
# asyncio accepts BACKLOG connections at once before it reports the first one, and does so twice.
MOST_CONNECTIONS, BACKLOG = 256, 64
# Descriptors for those connections, for files, and for libraries.
OTHER_DESCRIPTORS = 2 * BACKLOG + 64
# Names of this machine in requests from itself.
LOCAL, ANY = ("localhost", "127.0.0.1", "[::1]"), "*"


def main(argv: list[str] | None = None, model: "ModelMaker | None" = None) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit status: 2 for a user's mistake.

    model: makes a model of your own, as for the training; without it, `make_model` of example.py.
    """
    return rs.exit_status(lambda: serve(parse(argv), model))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Return the flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save_dir", type=folder_at, default=Path("dumps"), help="where the training writes")
    parser.add_argument("--data_path", default="", help="the data of the training, see docs/serving.md")
    help_text = "items that the training has not seen: exclude, include, or as_trained (default)"
    rules = ("as_trained", "exclude", "include")
    parser.add_argument("--new_items", choices=rules, default=rules[0], help=help_text)
    parser.add_argument(
        "--checkpoint", choices=("best", "latest"), default="best", help="which checkpoint is followed: best"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at: 127.0.0.1 by default")
    more = "besides localhost, such as api.example.com,*.example.org; default: any, if --host is of others"
    parser.add_argument("--allowed_hosts", default="", help=more)
    parser.add_argument("--port", type=int, default=8000, help="8000 by default; 0 takes any that is free")
    help_text = "use a model whose source has changed since"
    parser.add_argument("--accept_changed_model", action="store_true", help=help_text)
    return parser.parse_args(argv)


def serve(flags: argparse.Namespace, model: "ModelMaker | None" = None) -> int:
    """Wait for the first model, then answer from the newest one."""
    require_installed("serve.py", "fastapi", "uvicorn")
    from recsuite.serving.catalogue import UnknownCandidatesWarning
    from recsuite.serving.followers import follow, retried, wait_for_first
    from recsuite.serving.served import Follower

    if model is None:
        from example import make_model as model
    hosts = hosts_of(flags.allowed_hosts, flags.host)
    with bound(flags.host, flags.port) as port:
        wait_for_first(flags.save_dir, flags.checkpoint)
        given = flags.checkpoint, model, flags.accept_changed_model, flags.data_path, flags.new_items
        # The answer names them. A log of them would grow without limit.
        warnings.simplefilter("ignore", UnknownCandidatesWarning)
        follower = retried(lambda: Follower(flags.save_dir, None, *given))
        if not flags.data_path:
            say_what_is_missing(follower.model)
        thread = threading.Thread(target=follow, args=(follower, threading.Event()), daemon=True)
        server = server_of(service(follower, thread.is_alive, hosts))
        thread.start()
        # A client may connect after the next line: the kernel queues it until the server has started.
        port.listen()
        say(f"serving {flags.save_dir} at http://{flags.host}:{port.getsockname()[1]}")
        server.run(sockets=[port])
    return 0


def say_what_is_missing(model: "ServedModel") -> None:
    """Print what a model lacks without --data_path."""
    from recsuite.serving.served import NO_HISTORY_WARNING

    if model.snapshot.takes_history:
        say(NO_HISTORY_WARNING)
    of_items = {*model.snapshot.names_of((ITEM,))} - {model.snapshot.schema.item}
    if of_items:
        say(
            f"item features ({', '.join(sorted(of_items))}) are missing, so recommendations are worse; give "
            "--data_path, the data of the training"
        )


def bound(host: str, number: int) -> contextlib.closing[socket.socket]:
    """Return a socket at the address. It does not listen yet: before the first model there is no answer."""
    # With a protocol number, because asyncio disables Nagle's algorithm only then: an answer took 45 ms.
    port = socket.socket(proto=socket.IPPROTO_TCP)
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((host, number))
        return contextlib.closing(port)
    except (OSError, OverflowError) as error:
        port.close()
        raise UserError(
            f"Cannot bind {host}:{number}: {error}. Fix: give another --host or --port."
        ) from None


def hosts_of(names: str, listens_at: str) -> list[str]:
    """Return the hosts to which requests are answered. names: --allowed_hosts; listens_at: --host.

    Raises:
        UserError: for what is no name of a host.
    """
    given = [name.strip() for name in names.split(",") if name.strip()]
    if strange := [name for name in given if re.fullmatch(r"\*|(\*\.)?[\w.-]+|\[[\w:]+\]", name) is None]:
        raise UserError(
            "--allowed_hosts takes names without ports, such as api.example.com or *.example.com, got "
            f"{printable(strange[0])}. Fix: give names alone."
        )
    listens_at = f"[{listens_at}]" if ":" in listens_at else listens_at
    is_local = listens_at in LOCAL or listens_at.startswith("127.")
    return [*LOCAL, listens_at, *given] if given or is_local else [ANY]


def service(
    follower: "Follower",
    is_following: Callable[[], bool] = lambda: True,
    hosts: Collection[str] = (ANY,),
) -> "FastAPI":
    """Return the application that answers requests from the model of a follower, in threads.

    is_following: true while the thread that runs `following.follow` is alive; hosts: see `hosts_of`.
    """
    import anyio
    from fastapi import FastAPI, Request
    from fastapi.responses import HTMLResponse, JSONResponse, Response
    from fastapi.routing import APIRoute
    from pydantic_core import from_json
    from starlette.exceptions import HTTPException
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect

    from recsuite.serving.followers import from_one_snapshot, unknown_of

    # Without the pages of FastAPI, which load scripts from another server.
    app = FastAPI(title="recommendations", docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    model, slots = follower.model, anyio.Semaphore(COMPUTATIONS)
    of_score, of_recommend = bodies(model.snapshot)

    @app.exception_handler(UserError)
    async def refuse(request: Request, error: Exception) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(HTTPException)
    async def refuse_request(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    @app.exception_handler(ClientDisconnect)
    async def leave(request: Request, error: Exception) -> Response:
        return Response()

    async def body_of(request: Request) -> bytes:
        body, is_json = bytearray(), "json" in request.headers.get("content-type", "").lower()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_REQUEST:
                sentence = f"A request has at most {LARGEST_REQUEST:,} bytes; send several smaller ones."
                raise HTTPException(413, sentence)
        if not is_json:
            sentence = f"{request.url.path} takes one JSON object; send it as Content-Type: application/json."
            raise HTTPException(422, sentence)
        return bytes(body)

    async def computed(request: Request, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> Response:
        def compute() -> Response:
            try:
                values = from_json(body)
            except ValueError as error:
                raise UserError(
                    f"{request.url.path} takes one JSON object in UTF-8, and got none: {error}."
                ) from None
            if not isinstance(values, dict):
                raise HTTPException(422, f"{request.url.path} takes one JSON object.")
            return JSONResponse(answer(values))

        body = await body_of(request)
        try:
            with anyio.fail_after(QUEUE_SECONDS):
                await slots.acquire()
        except TimeoutError:
            sentence = f"{COMPUTATIONS} other answers take longer than {QUEUE_SECONDS} s; try again later."
            raise HTTPException(503, sentence, {"Retry-After": str(QUEUE_SECONDS)}) from None
        try:
            # A thread parses and writes JSON too, so that /health never waits for a large one.
            return await anyio.to_thread.run_sync(compute)
        finally:
            slots.release()

    def answered(name: str, ask: Callable[[], Any], ids_of: Callable[["Schema"], Any]) -> dict[str, Any]:
        answer, snapshot = from_one_snapshot(follower, ask)
        # Only now, after the model has refused values that are no list of ids.
        unknown = unknown_of(model, snapshot, *ids_of(snapshot.schema))
        shortened = {name: [*map(short, ids)] for name, ids in unknown.items()}
        about = {"step": snapshot.manifest.progress.step, "run": snapshot.manifest.run}
        return {name: answer, "unknown": shortened, **about}

    @app.get("/")
    async def index() -> list[dict[str, str]]:
        """This list."""
        here = [route for route in app.routes if isinstance(route, APIRoute)]
        own = {f"{min(route.methods or ())} {route.path}": route.description.split("\n")[0] for route in here}
        return [{"endpoint": endpoint, "answer": answer} for endpoint, answer in own.items()]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """A page with the schemas of the requests; GET /openapi.json has them as JSON."""
        return HTMLResponse(f"<pre>{html.escape(json.dumps(app.openapi(), indent=1))}</pre>")

    # Not in a thread, and without a lock: it answers while everything else computes.
    @app.get("/health")
    async def health() -> Response:
        """Step, age and name of the served checkpoint, and the last failure to follow; 503 while it lasts."""
        snapshot, ends = model.snapshot, not is_following()
        looked = time.monotonic() - follower.looked
        failure = "The thread that follows the training has ended; restart the server." if ends else ""
        failure = follower.failure or failure
        step, kind = snapshot.manifest.progress.step, "delta" if snapshot.manifest.link else "step"
        about = {"step": step, "age_seconds": snapshot.age, "checkpoint": f"{kind}-{step:09d}"}
        about |= {"looked_seconds_ago": round(looked, 1), "failure": failure or None}
        is_ill = ends or (bool(failure) and looked > FAILING_SECONDS)
        return JSONResponse(about, 503 if is_ill else 200)

    @app.post("/score", openapi_extra=of_score)
    async def score(request: Request) -> Response:
        """Scores of pairs of a user and an item, from an array for each feature, all of one length."""

        def answer(values: dict[str, Any]) -> dict[str, Any]:
            number = longest_of(values.values())
            check_size("pairs", number, MOST_ANSWERS)
            check_size("pairs x histories of the data", number * model.longest_history, MOST_PAIRS)
            return answered(
                "scores", lambda: model.score(values).tolist(), lambda schema: ids_of_values(values, schema)
            )

        return await computed(request, answer)

    @app.post("/recommend", openapi_extra=of_recommend)
    async def recommend(request: Request) -> Response:
        """The k items with the highest scores for each user."""

        def answer(wanted: dict[str, Any]) -> dict[str, Any]:
            names = of_recommend["requestBody"]["content"]["application/json"]["schema"]["properties"]
            if strange := wanted.keys() - names.keys():
                raise UserError(f"/recommend takes {', '.join(names)}, not {printable(min(strange))!r}.")

            def ask() -> Any:
                check_request(model, wanted)
                return model.recommend(**wanted)

            return answered("items", ask, lambda schema: ids_of_request(wanted, schema))

        return await computed(request, answer)

    return app


def bodies(snapshot: "Snapshot") -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the OpenAPI schemas of the bodies of /score and /recommend, with the features of a model."""
    from recsuite.serving.request import AS_TRAINED, SEEN
    from recsuite.serving.snapshot import EVERYTHING

    lists, array = {feature.name for feature in snapshot.features if feature.multi}, {"type": "array"}
    nested = {"type": "array", "items": {"type": "array", "items": {}}}

    def values_of(entities: Collection[str]) -> dict[str, Any]:
        names = snapshot.names_of(entities)
        fields = {name: nested if name in lists or name.startswith(HISTORY) else array for name in names}
        return {"type": "object", "additionalProperties": False, "properties": fields}

    fields = {
        "users": {"anyOf": [array, values_of((USER, EVENT, HISTORY))]},
        "k": {"type": "integer", "minimum": 1, "default": 10},
        "events": nested,
        "exclude": {"anyOf": [{"enum": [AS_TRAINED, SEEN, None]}, nested], "default": AS_TRAINED},
        "candidates": array,
    }
    wanted = {"type": "object", "additionalProperties": False, "properties": fields}
    score, recommend = (
        {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
        for schema in (values_of(EVERYTHING), wanted)
    )
    return score, recommend


def longest_of(lists: Iterable[Any]) -> int:
    """Return the length of the longest list among some values; other values are refused later."""
    return max((len(each) for each in lists if isinstance(each, list)), default=0)


def check_size(what: str, number: int, most: int) -> None:
    """Refuse a request whose answer would take too long or too much memory.

    Raises:
        UserError: with the limit.
    """
    if number > most:
        raise UserError(
            f"{what} must be at most {most:,}, got {printable(f'{number:,}')}; send several smaller requests."
        )


def check_request(model: "ServedModel", wanted: Mapping[str, Any]) -> None:
    """Check the size of a request for recommendations; other faults are refused later."""
    users, k, candidates = wanted.get("users"), wanted.get("k", 10), wanted.get("candidates")
    given = users.values() if isinstance(users, dict) else [users]
    number = longest_of([*given, wanted.get("events")])
    check_size("users x k", number * k if isinstance(k, int) else 0, MOST_ANSWERS)
    # For one user all items may be scored, without a limit.
    if number > 1:
        items = len(candidates) if isinstance(candidates, list) else len(model.items().ids)
        check_size("users x items", number * items, MOST_PAIRS)


def short(value: Any) -> Any:
    """Return an id of a request, shortened for the answer."""
    return printable(value) if len(str(value)) > MAX_CHARACTERS else value


def ids_of_values(values: dict[str, Any], schema: "Schema") -> tuple[list[Any], list[Any]]:
    """Return the users and the items in values of features, including histories."""
    histories = (mine or [] for mine in values.get(HISTORY) or [])
    return values.get(schema.user, []), [*values.get(schema.item, []), *itertools.chain(*histories)]


def ids_of_request(request: dict[str, Any], schema: "Schema") -> tuple[list[Any], list[Any]]:
    """Return the users and the items in a request for recommendations."""
    users, items = request.get("users") or [], list[Any]()
    if isinstance(users, dict):
        users, items = ids_of_values(users, schema)
    lists = [[item for item, _ in mine] for mine in request.get("events") or []]
    return users, [*items, *(request.get("candidates") or []), *itertools.chain(*lists)]


def server_of(app: Any) -> "uvicorn.Server":
    """Return an HTTP server for an ASGI application, with the limits at the top."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol(),
            ws="none",
            backlog=BACKLOG,
            timeout_graceful_shutdown=STOP_SECONDS,
            # A client's mistake is answered but not logged, because the log would grow without limit.
            log_level="error",
        )
    )


def protocol() -> type[Any]:
    """Return uvicorn's HTTP protocol with a limit on connections and on the time that a client may take."""
    import h11
    from uvicorn.protocols.http.h11_impl import H11Protocol

    most = min(MOST_CONNECTIONS, max(1, descriptor_limit() - OTHER_DESCRIPTORS))

    class Timely(H11Protocol):
        """A connection. Above `most`, a new one replaces the one that waits longest for its client."""

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.is_refused = False
            self.num_parts, self.num_bytes = 0, 0
            self.next_event = self.conn.next_event
            self.conn.next_event = self.next_counted  # type: ignore[method-assign]
            self.wait()
            here = [each for each in list[Any](self.connections) if not each.is_refused]
            if len(here) > most:
                waiting = [each for each in here if each.waits_for_client]
                min(waiting, key=lambda each: each.since).refuse(
                    "503 Service Unavailable", f"There are more than {most} connections; try again later."
                )

        def next_counted(self) -> Any:
            """Return the next event of the parser; refuse a body in too many parts."""
            event = h11.NEED_DATA if self.is_refused else self.next_event()
            if isinstance(event, h11.Data):
                self.num_parts, self.num_bytes = self.num_parts + 1, self.num_bytes + len(event.data)
                if self.num_parts > FREE_PARTS + self.num_bytes / LEAST_PART:
                    sentence = f"A body has parts of at least {LEAST_PART} bytes; send it in larger chunks."
                    self.refuse("413 Content Too Large", sentence)
                    return h11.NEED_DATA
            return event

        def connection_lost(self, exc: Exception | None) -> None:
            # The parser would refer to this connection, and this to the parser.
            del self.conn.next_event
            self.timer.cancel()
            super().connection_lost(exc)

        def on_response_complete(self) -> None:
            self.num_parts, self.num_bytes = 0, 0
            self.timer.cancel()
            self.wait()
            super().on_response_complete()

        def wait(self) -> None:
            self.timer = self.loop.call_later(CLIENT_SECONDS, self.end_late)
            self.since = self.loop.time()

        @property
        def waits_for_client(self) -> bool:
            """True if the client must send the rest of a request, or read the rest of an answer."""
            cycle = self.cycle
            return cycle is None or cycle.response_complete or cycle.more_body or self.flow.write_paused

        def end_late(self) -> None:
            if self.waits_for_client:
                self.refuse(
                    "408 Request Timeout",
                    f"A request must be complete within {CLIENT_SECONDS} s; send it at once.",
                )
            else:
                self.wait()

        def refuse(self, status: str, sentence: str) -> None:
            self.is_refused = True
            if self.cycle is None or not self.cycle.response_started:
                body = json.dumps({"error": sentence})
                head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
                self.transport.write(f"{head}\r\nConnection: close\r\n\r\n{body}".encode())
                self.transport.close()
            else:
                self.transport.abort()

    return Timely


if __name__ == "__main__":
    rs.run_script(main)
