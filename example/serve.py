"""Serve the best model of a running training over HTTP: an example of a service, not a product.

    ./run.sh dump                        a training that writes checkpoints
    python serve.py                      beside it; with --wait also before the folder is there
    python serve.py --checkpoint latest  with --inc_dump its deltas too, validated or not
    python serve.py --data_path FOLDER   with features and histories from the data of the training

    curl localhost:8000/health
    curl localhost:8000/score -H "Content-Type: application/json" -d '{"user": [1, 1], "movie": [2, 3]}'
    curl localhost:8000/recommend -H "Content-Type: application/json" -d '{"users": [1], "k": 5}'

A page at localhost:8000/docs has all requests and answers, and sends them. Every answer has the step of its
model, and the users and items that are out of vocabulary. Until there is a checkpoint, it is 503 with the
reason. Without --data_path only the ids of users and items are known. There is no password; without --host it
accepts connections from this machine only, and answers to a host of another name than localhost with "Invalid
host header", unless --allowed_hosts has it, as for a proxy that keeps the name.
"""

import argparse
import contextlib
import itertools
import json
import math
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
# Maximum cosines of items with those of histories, for least_distance.
MOST_COSINES = 500_000_000
# Answers computed in parallel, and seconds that another request waits.
COMPUTATIONS, QUEUE_SECONDS = 4, 5
# Seconds: for a client to send a request or to read an answer, of failed updates until /health returns 503,
# and for the last answers when the server stops.
CLIENT_SECONDS, FAILING_SECONDS, STOP_SECONDS = 30, 60, 10
# asyncio accepts BACKLOG connections at once before it reports the first one, and does so twice.
MOST_CONNECTIONS, BACKLOG = 256, 64
# Descriptors for those connections, for files, and for libraries.
OTHER_DESCRIPTORS = 2 * BACKLOG + 64
# Statuses of errors.
FAULTS = {"4XX": "a mistake of the request", "503": "no model yet, or too much at once: try again later"}
# The package that has the files of the page of requests, and what a browser may load for it.
PAGE = "fastapi_offline"
POLICY = "default-src 'self' 'unsafe-inline'; img-src 'self' data:"
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
    parser.add_argument(
        "--save_dir", type=folder_at, default=Path("dumps/example"), help="where the training writes"
    )
    help_text = "answer 503 until there is a --save_dir; without it, a folder that is not there is a mistake"
    parser.add_argument("--wait", action="store_true", help=help_text)
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
    """Answer from the newest model, and with 503 until there is a first one."""
    require_installed("serve.py", "fastapi", "uvicorn", PAGE)
    from recsuite.serving.catalogue import UnknownCandidatesWarning
    from recsuite.serving.followers import follow, retried, wait_for_first
    from recsuite.serving.served import Follower

    if model is None:
        from example import make_model as model
    hosts = hosts_of(flags.allowed_hosts, flags.host)
    save_dir, failures = flags.save_dir, list[BaseException]()
    if not (flags.wait or retried(save_dir.exists)):
        raise UserError(
            f"--save_dir {save_dir} does not exist. Fix: give the folder of a training, or --wait if one "
            "will make it."
        )
    if flags.data_path and not retried(folder_at(flags.data_path).exists):
        raise UserError(f"--data_path {flags.data_path} does not exist. Fix: give the data of the training.")

    def run() -> None:
        try:
            wait_for_first(save_dir, flags.checkpoint)
            first.reason = f"The model in {save_dir} is being loaded; try again later."
            given = flags.checkpoint, model, flags.accept_changed_model, flags.data_path, flags.new_items
            follower = retried(lambda: Follower(save_dir, None, *given))
            if not flags.data_path:
                say_what_is_missing(follower.model)
            first.app = service(follower, thread.is_alive, hosts)
        except BaseException as error:
            failures.append(error)
            server.should_exit = True
            return
        say(f"serving {save_dir} at http://{flags.host}:{port.getsockname()[1]}")

        def tell() -> None:
            manifest = follower.model.snapshot.manifest
            # A stream has a delta each second.
            if manifest.link is None:
                say(f"serving step {manifest.progress.step} of run {manifest.run} now")

        follow(follower, threading.Event(), tell)

    with bound(flags.host, flags.port) as port:
        # The answer names them. A log of them would grow without limit.
        warnings.simplefilter("ignore", UnknownCandidatesWarning)
        first = UntilServed(f"There is no checkpoint in {save_dir} yet; try again later.", hosts)
        server, thread = server_of(first), threading.Thread(target=run, daemon=True)
        # Before the server has started, the kernel queues connections.
        port.listen()
        thread.start()
        with ended_by_sigterm(server):
            server.run(sockets=[port])
    for error in failures:
        raise error
    return 0


@contextlib.contextmanager
def ended_by_sigterm(server: "uvicorn.Server") -> Iterator[None]:
    """Let a SIGTERM end a server and nothing else: uvicorn raises the signal again after the last answers."""
    # Python allows handlers in the main thread alone.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class UntilServed:
    """ASGI application that answers each request with 503 and a reason until `app` is set, and then as that.

    hosts: see `hosts_of`.
    """

    def __init__(self, reason: str, hosts: Collection[str] = (ANY,)) -> None:
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        self.reason = reason
        self.app: Any = TrustedHostMiddleware(self._refuse, allowed_hosts=[*hosts], www_redirect=False)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        await self.app(scope, receive, send)

    async def _refuse(self, scope: Any, receive: Any, send: Any) -> None:
        # Loaded with the middleware. FastAPI's import takes seconds on a busy machine, and a probe waits one.
        from starlette.responses import JSONResponse

        answer = JSONResponse({"error": self.reason}, 503, {"Retry-After": str(QUEUE_SECONDS)})
        await answer(scope, receive, send)


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
    """Return a socket at the address, which does not listen yet."""
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
    from fastapi.openapi.docs import get_swagger_ui_html
    from fastapi.responses import JSONResponse, Response
    from fastapi.routing import APIRoute
    from fastapi.staticfiles import StaticFiles
    from pydantic_core import from_json
    from starlette.exceptions import HTTPException
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import ClientDisconnect

    from recsuite.serving.followers import from_one_snapshot, unknown_of
    from recsuite.serving.schemas import ERROR

    # Without the pages of FastAPI, which load scripts from another server.
    app = FastAPI(title="recommendations", version=rs.__version__, docs_url=None, redoc_url=None)
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[*hosts], www_redirect=False)
    app.mount("/assets", StaticFiles(packages=[(PAGE, "static")]))
    model, slots = follower.model, anyio.Semaphore(COMPUTATIONS)
    requests, answers, examples = bodies(model), answers_of(model.snapshot), examples_of(model)

    def described(path: str) -> dict[str, Any]:
        responses = {status: in_json(ERROR, text) for status, text in FAULTS.items()}
        if path == "/health":
            responses["503"] = in_json({"anyOf": [answers[path], ERROR]}, FAULTS["503"])
        about: dict[str, Any] = {"responses": {**responses, "200": in_json(answers[path], "the answer")}}
        if path in requests:
            body = in_json(requests[path], "the request", examples[path])
            about["openapi_extra"] = {"requestBody": {"required": True, **body}}
        return about

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
            # Features are checked with their values, because another training may have others.
            if request.url.path != "/score":
                check_fields(request.url.path, values, requests[request.url.path])
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

    @app.get("/", **described("/"))
    async def index() -> list[dict[str, str]]:
        """This list."""
        here = [route for route in app.routes if isinstance(route, APIRoute)]
        own = {f"{min(route.methods or ())} {route.path}": route.description.split("\n")[0] for route in here}
        return [{"endpoint": endpoint, "answer": answer} for endpoint, answer in own.items()]

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        """A page that shows and sends the requests; GET /openapi.json has their schemas."""
        # Relative addresses, for a proxy with a prefix; and no validator, which is another server.
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=app.title,
            swagger_js_url="assets/swagger-ui-bundle.js",
            swagger_css_url="assets/swagger-ui.css",
            swagger_favicon_url="assets/favicon.png",
            swagger_ui_parameters={"validatorUrl": None},
        )
        page.headers["Content-Security-Policy"] = POLICY
        return page

    # Not in a thread, and without a lock: it answers while everything else computes.
    @app.get("/health", **described("/health"))
    async def health() -> Response:
        """Step, age and name of the served checkpoint, and the last failure to follow; 503 while it lasts."""
        snapshot, ends = model.snapshot, not is_following()
        looked = time.monotonic() - follower.looked
        failure = "The thread that follows the training has ended; restart the server." if ends else ""
        failure = follower.failure or failure
        step, kind = snapshot.manifest.progress.step, "delta" if snapshot.manifest.link else "step"
        about = {"step": step, "age_seconds": snapshot.age, "checkpoint": f"{kind}-{step:09d}"}
        about["run"] = snapshot.manifest.run
        about |= {"looked_seconds_ago": round(looked, 1), "failure": failure or None}
        is_ill = ends or (bool(failure) and looked > FAILING_SECONDS)
        return JSONResponse(about, 503 if is_ill else 200)

    @app.post("/score", **described("/score"))
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

    async def best(request: Request, what: str, find: Callable[..., Any]) -> Response:
        def answer(wanted: dict[str, Any]) -> dict[str, Any]:
            names = wanted.pop("features", None)

            def ask() -> Any:
                check_lists(model, what, wanted, names)
                return with_values(model, find(**wanted), names)

            return answered("items", ask, lambda schema: ids_of_request(wanted, schema))

        return await computed(request, answer)

    @app.post("/recommend", **described("/recommend"))
    async def recommend(request: Request) -> Response:
        """The k items with the highest scores for each user."""
        return await best(request, "users", model.recommend)

    @app.post("/similar", **described("/similar"))
    async def similar(request: Request) -> Response:
        """For each item the k others with the highest cosines to it."""
        return await best(request, "items", model.similar_items)

    @app.post("/search", **described("/search"))
    async def search(request: Request) -> Response:
        """For each vector the k items with the highest scores, as for a user with that vector."""
        return await best(request, "vectors", model.search)

    @app.post("/vectors", **described("/vectors"))
    async def vectors(request: Request) -> Response:
        """Vectors of users, for /search, or of items."""

        def answer(wanted: dict[str, Any]) -> dict[str, Any]:
            if not wanted or ("items" in wanted and len(wanted) > 1):
                raise UserError(
                    "/vectors takes users, with or without events, or items. Fix: give one of them."
                )
            find = model.item_vectors if "items" in wanted else model.user_vectors

            def ask() -> Any:
                width = model.items().vectors[0:1].numel()
                check_size("numbers of vectors", width * number_of(wanted), MOST_PAIRS)
                return find(**wanted).tolist()

            return answered("vectors", ask, lambda schema: ids_of_request(wanted, schema))

        return await computed(request, answer)

    return app


def bodies(model: "ServedModel") -> dict[str, dict[str, Any]]:
    """Return the JSON schema of the body of each request, with the features of a model."""
    from recsuite.serving.request import AS_TRAINED, SEEN
    from recsuite.serving.schemas import NUMBER, events_of, features_of, ids_of, list_of, object_of
    from recsuite.serving.snapshot import EVERYTHING

    snapshot, names = model.snapshot, model.item_names
    items = list_of(ids_of(snapshot, snapshot.schema.item))
    ids = list_of(ids_of(snapshot, snapshot.schema.user))
    users = {"anyOf": [ids, features_of(snapshot, (USER, EVENT, HISTORY))]}
    events = list_of(events_of(snapshot))
    k = {"type": "integer", "minimum": 1, "default": 10}
    shown = list_of({"enum": names} if names else {"type": "string"})
    fields = {
        "users": users,
        "k": k,
        "events": events,
        "exclude": {"anyOf": [{"enum": [AS_TRAINED, SEEN, None]}, list_of(items)], "default": AS_TRAINED},
        "candidates": items,
        "also_exclude": list_of(items),
        "at_most": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1}},
        "least_distance": {"type": "number", "minimum": 0, "maximum": 2},
        "features": shown,
    }
    vectors = {
        "vectors": list_of(list_of(NUMBER)),
        "k": k,
        "approximate": {"type": "boolean"},
        "features": shown,
    }
    return {
        "/score": features_of(snapshot, EVERYTHING),
        "/recommend": object_of(fields),
        "/similar": object_of({"items": items, "k": k, "features": shown}, ["items"]),
        "/search": object_of(vectors, ["vectors"]),
        "/vectors": object_of({"users": users, "events": events, "items": items}),
    }


def answers_of(snapshot: "Snapshot") -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each answer of status 200."""
    from recsuite.serving.schemas import NUMBER, TEXT, answer_of, list_of, listed, object_of

    best = answer_of(snapshot, "items", listed(snapshot))
    health = {
        **dict.fromkeys(("age_seconds", "looked_seconds_ago"), NUMBER),
        **{
            "step": {"type": "integer"},
            "checkpoint": TEXT,
            "run": TEXT,
            "failure": {"type": ["string", "null"]},
        },
    }
    each = object_of({"endpoint": TEXT, "answer": TEXT}, ["endpoint", "answer"])
    # Of a model with several labels each pair has a score for each of them.
    scores = {"anyOf": [list_of(NUMBER), list_of(list_of(NUMBER))]}
    return {
        "/": list_of(each),
        "/health": object_of(health, health),
        "/score": answer_of(snapshot, "scores", scores),
        **dict.fromkeys(("/recommend", "/similar", "/search"), best),
        "/vectors": answer_of(snapshot, "vectors", list_of(list_of(NUMBER))),
    }


def examples_of(model: "ServedModel") -> dict[str, Any]:
    """Return for each request a small body that this model answers."""
    from recsuite.serving.schemas import first_id

    schema, known = model.snapshot.schema, model.items()
    users, items = first_id(model.snapshot, schema.user), known.ids[:1]
    width = known.vectors[:1].numel()
    return {
        "/score": {schema.user: users, schema.item: items},
        "/recommend": {"users": users, "k": 5},
        "/similar": {"items": items, "k": 5},
        "/search": {"vectors": [[0.1] * width], "k": 5},
        "/vectors": {"users": users},
    }


def in_json(schema: dict[str, Any], description: str, example: Any = None) -> dict[str, Any]:
    """Return the OpenAPI description of a body in JSON."""
    content = {"schema": schema} if example is None else {"schema": schema, "example": example}
    return {"description": description, "content": {"application/json": content}}


def with_values(model: "ServedModel", lists: list[list[tuple[Any, float]]], names: Any) -> list[Any]:
    """Return lists of items and scores, each item with values of these names if there are any."""
    if names is None:
        return lists
    found = iter(model.item_values([item for mine in lists for item, _ in mine], names))
    return [[(*pair, plain(next(found))) for pair in mine] for mine in lists]


def plain(value: Any) -> Any:
    """Return a raw value of an item as JSON has it; None for NaN, and a text for a time."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)


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


def check_fields(path: str, values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Refuse a body with fields that its schema does not have, or without those that it requires."""
    names = schema["properties"]
    if strange := values.keys() - names.keys():
        raise UserError(f"{path} takes {', '.join(names)}, not {printable(min(strange))!r}.")
    if missing := [name for name in schema["required"] if name not in values]:
        raise UserError(f"{path} requires {missing[0]}, and got none.")


def number_of(wanted: Mapping[str, Any]) -> int:
    """Return the number of users, items or vectors of a request."""
    users = wanted.get("users")
    given = users.values() if isinstance(users, dict) else [users]
    return longest_of([*given, *(wanted.get(name) for name in ("events", "items", "vectors"))])


def check_lists(model: "ServedModel", what: str, wanted: Mapping[str, Any], names: Any) -> None:
    """Check the size of a request for k items for each of some users, items or vectors, as `what` says.

    names: of the values that each item gets. Other faults are refused later.
    """
    number, k, candidates = number_of(wanted), wanted.get("k", 10), wanted.get("candidates")
    in_answer = number * k if isinstance(k, int) else 0
    check_size(f"{what} x k", in_answer, MOST_ANSWERS)
    check_size(
        f"{what} x k x features", in_answer * len(names) if isinstance(names, list) else 0, MOST_ANSWERS
    )
    items = len(candidates) if isinstance(candidates, list) else len(model.items().ids)
    # For one user all items may be scored, without a limit.
    if number > 1:
        check_size(f"{what} x items", number * items, MOST_PAIRS)
    if wanted.get("least_distance"):
        cosines = number * items * longest_had(model, wanted)
        check_size(f"{what} x items x histories", cosines, MOST_COSINES)


def longest_had(model: "ServedModel", wanted: Mapping[str, Any]) -> int:
    """Return the number of items that a user of a request had at most, as given or else in the data."""
    users = wanted.get("users")
    values = users if isinstance(users, dict) else {model.snapshot.schema.user: users}
    given, ids = values.get(HISTORY, wanted.get("events")), values.get(model.snapshot.schema.user)
    if given is not None or model.data is None:
        return longest_of(given) if isinstance(given, list) else 0
    known = [each for each in ids if isinstance(each, str | int)] if isinstance(ids, list) else []
    return max((len(model.data.events(user)[0]) for user in known), default=0)


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
    # Clicks may be items alone.
    events = itertools.chain(*(request.get("events") or []))
    items += [event[0] if isinstance(event, list) else event for event in events]
    return users, [*(request.get("items") or []), *(request.get("candidates") or []), *items]


def server_of(app: Any) -> "uvicorn.Server":
    """Return an HTTP server for an ASGI application, with the limits at the top."""
    import uvicorn

    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol(),
            ws="none",
            lifespan="off",
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
