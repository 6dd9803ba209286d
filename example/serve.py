"""Answer over HTTP from the newest model of a training that goes on: an example of a service, not a product.

    ./run.sh dump --save_dir dumps       a training that writes checkpoints; with --inc_dump deltas too
    python serve.py --save_dir dumps     beside it, before or after it has begun
    python serve.py --data_path FOLDER   and of users and items all is known that the data of the training say

    curl localhost:8000/health
    curl localhost:8000/score -H "Content-Type: application/json" -d '{"user": [1, 1], "movie": [2, 3]}'
    curl localhost:8000/recommend -H "Content-Type: application/json" -d '{"users": [1], "k": 5}'

Every answer names the step that all of it comes from, and the users and items that the model has no row
of. Without --data_path users and items are known by their ids alone. There is no password; without --host
it listens to this machine alone.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.datasets.schema import AUDIENCE, HISTORY, ITEM
from recsuite.errors import UserError
from recsuite.runtime.console import say
from recsuite.tools import script

if TYPE_CHECKING:
    from fastapi import FastAPI

    from recsuite.datasets.schema import Schema
    from recsuite.serving.served import Follower, ServedModel

# Bytes: a request is in memory before anything of it is looked at.
LARGEST_REQUEST = 2**22
INSTALL = "pip install --no-deps -r requirements-serve.txt"


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM; returns the exit status: 2 for a user's mistake."""
    return script.exit_status(lambda: serve(parse(argv)))


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--save_dir", type=Path, default=Path("dumps"), help="where the training writes")
    parser.add_argument("--data_path", default="", help="the data of the training, read once at the start")
    parser.add_argument(
        "--checkpoint", choices=("best", "latest"), default="best", help="which checkpoint is followed: best"
    )
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen at: 127.0.0.1 by default")
    parser.add_argument("--port", type=int, default=8000, help="8000 by default; 0 takes any that is free")
    return parser.parse_args(argv)


def serve(flags: argparse.Namespace) -> int:
    """Wait for the first model, then answer from the newest one."""
    try:
        import uvicorn
    except ImportError as error:
        raise UserError(f"serve.py needs {error.name}, which is not installed; run {INSTALL}") from None
    from recsuite.serving.followers.following import follow, wait_for_first
    from recsuite.serving.served import Follower

    with bound(flags.host, flags.port) as port:
        wait_for_first(flags.save_dir)
        follower = Follower(flags.save_dir, checkpoint=flags.checkpoint)
        tell(follower.model, flags)
        server = uvicorn.Server(uvicorn.Config(service(follower), log_level="warning"))
        threading.Thread(target=follow, args=(follower, threading.Event()), daemon=True).start()
        # Whoever reads the next line may connect at once: the kernel keeps him until the server has started.
        port.listen()
        say(f"serving {flags.save_dir} at http://{flags.host}:{port.getsockname()[1]}")
        server.run(sockets=[port])
    return 0


def tell(model: ServedModel, flags: argparse.Namespace) -> None:
    """Have the model take users and items from the data, where they are given; else say what it lacks."""
    if flags.data_path:
        from recsuite.serving import recommend

        recommend.tell(model, flags.data_path, str(flags.save_dir))
        return
    from recsuite.serving.served import WITHOUT_HISTORIES

    if model.snapshot.takes_history:
        say(WITHOUT_HISTORIES)
    of_items = {*model.snapshot.names_of((ITEM, AUDIENCE))} - {model.snapshot.schema.item}
    if of_items:
        say(
            f"what is recommended knows nothing of {', '.join(sorted(of_items))}, and is worse for it; give "
            "--data_path, the data of the training"
        )


def bound(host: str, number: int) -> contextlib.closing[socket.socket]:
    """A socket at the address. Nobody can connect yet: before the first model there is nothing to ask."""
    port = socket.socket()
    try:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind((host, number))
        return contextlib.closing(port)
    except (OSError, OverflowError) as error:
        port.close()
        raise UserError(f"--host {host} --port {number} cannot be had: {error}; give another one.") from None


def service(follower: Follower) -> FastAPI:
    """What answers requests from the model of a follower, in threads."""
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse

    from recsuite.serving.followers.following import of_one_moment, unknown_of

    app, model = FastAPI(title="recommendations"), follower.model
    app.add_middleware(Limited, refusal=JSONResponse)

    @app.exception_handler(UserError)
    def refuse(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": str(error)}, status_code=400)

    @app.exception_handler(RequestValidationError)
    def misunderstand(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse({"error": f"{request.url.path} takes one JSON object."}, status_code=422)

    @app.get("/health")
    def health() -> dict[str, Any]:
        age, now = of_one_moment(follower, lambda: model.age)
        step, kind = now.manifest.progress.step, "delta" if now.manifest.link else "step"
        return {"step": step, "age_seconds": age, "checkpoint": f"{kind}-{step:09d}"}

    def answered(name: str, ask: Callable[[], Any], ids_of: Callable[[Schema], Any]) -> dict[str, Any]:
        answer, snapshot = of_one_moment(follower, ask)
        # Only now: the model has refused what is no list of ids.
        unknown = unknown_of(snapshot, *ids_of(snapshot.schema))
        about = {"step": snapshot.manifest.progress.step, "run": snapshot.manifest.run}
        return {name: answer, "unknown": unknown, **about}

    # `def` and not `async def`: they compute, and so get a thread each.
    @app.post("/score")
    def score(values: dict[str, Any]) -> dict[str, Any]:
        return answered(
            "scores",
            lambda: model.score(values).tolist(),
            lambda schema: ids_of_values(values, schema),
        )

    @app.post("/recommend")
    def recommend(request: dict[str, Any]) -> dict[str, Any]:
        if strange := request.keys() - {"users", "k", "events", "exclude", "candidates"}:
            raise UserError(f"/recommend takes users, k, events, exclude, candidates, not {min(strange)!r}.")
        return answered(
            "items", lambda: model.recommend(**request), lambda schema: ids_of_request(request, schema)
        )

    return app


def ids_of_values(values: dict[str, Any], schema: Schema) -> tuple[list[Any], list[Any]]:
    """The users and the items that values of features name, histories too."""
    histories = (mine or [] for mine in values.get(HISTORY) or [])
    return values.get(schema.user, []), [*values.get(schema.item, []), *itertools.chain(*histories)]


def ids_of_request(request: dict[str, Any], schema: Schema) -> tuple[list[Any], list[Any]]:
    """The users and the items that a request for recommendations names."""
    users, items = request.get("users") or [], list[Any]()
    if isinstance(users, dict):
        users, items = ids_of_values(users, schema)
    lists = [[item for item, _ in mine] for mine in request.get("events") or []]
    return users, [*items, *(request.get("candidates") or []), *itertools.chain(*lists)]


class Limited:
    """Answers requests of more than LARGEST_REQUEST bytes with status 413, and passes on all others.

    app: what answers those, refusal: what makes an answer of a JSON object; both as in ASGI.
    """

    def __init__(self, app: Any, refusal: Callable[..., Any]) -> None:
        self.app, self.refusal = app, refusal

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        # All of it is read here: what the client says of its length may be wrong, or missing.
        body, is_over = b"", False
        while not is_over and len(body) <= LARGEST_REQUEST:
            message = await receive()
            body += message.get("body", b"")
            is_over = not message.get("more_body", False)
        if len(body) > LARGEST_REQUEST:
            sentence = f"A request has at most {LARGEST_REQUEST:,} bytes; send several smaller ones."
            await self.refusal({"error": sentence}, status_code=413)(scope, receive, send)
            return
        parts = iter([{"type": "http.request", "body": body}])

        async def again() -> Any:
            return next(parts, None) or await receive()

        await self.app(scope, again, send)


if __name__ == "__main__":
    script.run_script(main)
