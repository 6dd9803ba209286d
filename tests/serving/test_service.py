"""The service as a client meets it: each answer is of the one step that it names, while deltas arrive."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import inspect
import json
import re
import runpy
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from example import make_model
from recsuite.config.config import Config
from recsuite.datasets.movielens.source import SCHEMA
from recsuite.errors import UserError
from recsuite.extras.recommend.recommend import open_viewer, recommend
from recsuite.serving import followers
from recsuite.serving.followers import follow, from_one_snapshot
from recsuite.serving.served import Follower, ServedModel
from recsuite.serving.snapshot import VocabularyTable
from tests.support.launch import ROOT, free_port, started, wait_for
from tests.support.meanwhile import meanwhile
from tests.support.published import copied, publish_state, state
from tests.support.random_model import GENRES, ITEMS, snapshot_of

httpx = pytest.importorskip("httpx", reason="needs the package httpx, of requirements-dev.txt")
pytest.importorskip("fastapi_offline", reason="needs the package fastapi-offline, of requirements.txt")
serve = pytest.importorskip("serve")

# The launch runs within the first test.
SERVE = ROOT / "example" / "serve.py"
ENV = {"PYTHONPATH": str(ROOT / "example")}
OWN_SCRIPT = """
import example
import serve

def make_model(data, args):
    print("made by the script", flush=True)
    return example.make_model(data, args)

raise SystemExit(serve.main(model=make_model))
"""
VALUES: dict[str, list[Any]] = {"user": [1, 2, 3, -7] * 50, "movie": [*range(1, 201)]}


@dataclasses.dataclass
class Service:
    """A client of a running service, the lines until it served, and the folder that it follows."""

    client: Any
    said: list[str]
    save_dir: Path


@pytest.fixture(scope="module")
def service(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service of a script with a model of its own, without the data of the training.

    It was started before there was a folder, and answered 503 until the first checkpoint.
    """
    folder, said = tmp_path_factory.mktemp("service"), list[str]()
    save_dir, address = folder / "dumps", f"http://127.0.0.1:{(port := free_port())}"
    (folder / "own.py").write_text(OWN_SCRIPT)
    flags = ["--save_dir", str(save_dir), "--port", str(port), "--checkpoint", "latest", "--wait"]
    with (
        started([sys.executable, str(folder / "own.py"), *flags], real=True, env=ENV) as process,
        httpx.Client(base_url=address, timeout=60, trust_env=False) as client,
    ):
        assert process.stdout is not None
        wait_for(process, "waiting for the first checkpoint")
        for reply in (client.get("/health"), client.post("/score", json=VALUES), client.get("/docs")):
            assert (reply.status_code, reply.headers["Retry-After"]) == (503, "5")
            assert f"no checkpoint in {save_dir} yet" in reply.json()["error"]
        publish_state(trained_folder / "dumps", 8, save_dir)
        while not (line := process.stdout.readline()).startswith("serving "):
            assert line
            said.append(line)
        assert line.split()[-1] == address
        yield Service(client, said, save_dir)


@contextlib.contextmanager
def main_in_a_thread(*flags: str) -> Iterator[Any]:
    """A client of serve.py in a thread of this process, which follows no later checkpoint."""
    servers, end = list[Any](), threading.Event()
    make = serve.server_of

    def kept(app: Any) -> Any:
        servers.append(make(app))
        return servers[-1]

    with (
        mock.patch.object(serve, "server_of", kept),
        mock.patch.object(followers, "follow", side_effect=lambda *_: end.wait()),
    ):
        thread = threading.Thread(target=serve.main, args=([*flags, "--port", "0"],), daemon=True)
        thread.start()
        try:
            wait_until(lambda: servers and servers[0].started)
            host, port = servers[0].servers[0].sockets[0].getsockname()
            with httpx.Client(base_url=f"http://{host}:{port}", timeout=60, trust_env=False) as client:
                wait_until(lambda: client.get("/health").status_code == 200)
                yield client
        finally:
            end.set()
            for server in servers:
                server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def test_a_script_serves_a_model_of_its_own(service: Service) -> None:
    scores = service.client.post("/score", json=VALUES).json()["scores"]
    assert "made by the script\n" in service.said
    assert scores == ServedModel.open(service.save_dir, "latest", model=make_model).score(VALUES).tolist()


def test_each_answer_under_load_is_that_of_the_step_that_it_names(
    service: Service, trained_folder: Path
) -> None:
    dumps, client = trained_folder / "dumps", service.client
    # Deltas, and a full checkpoint at the end.
    steps = [8, 10, 12, 14, 16]
    models = {step: ServedModel.open(state(dumps, step), model=make_model) for step in steps}
    scores = {step: model.score(VALUES).tolist() for step, model in models.items()}
    items = {step: [[*each] for each in model.recommend([1], 5)[0]] for step, model in models.items()}
    answers: list[tuple[str, dict[str, Any]]] = []

    def load() -> None:
        for path, name, body in (
            ("/score", "scores", VALUES),
            ("/recommend", "items", {"users": [1], "k": 5}),
        ):
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            answers.append((name, reply.json()))

    with meanwhile(load, 2):
        for step in steps[1:]:
            publish_state(dumps, step, service.save_dir)
            deadline = time.monotonic() + 300
            while (health := client.get("/health").json())["step"] < step:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert health["checkpoint"] == state(dumps, step).name
            assert health["age_seconds"] > 0
    assert {reply["step"] for _, reply in answers} >= set(steps[1:-1])
    for name, reply in answers:
        if name == "scores":
            assert reply["scores"] == pytest.approx(scores[reply["step"]], abs=1e-6)
            others = [step for step in steps if step != reply["step"]]
            assert all(reply["scores"] != pytest.approx(scores[step], abs=1e-6) for step in others)
        else:
            wanted = items[reply["step"]]
            assert [item for item, _ in reply["items"][0]] == [item for item, _ in wanted]
            got = [score for _, score in reply["items"][0]]
            assert got == pytest.approx([score for _, score in wanted], abs=1e-6)


def test_a_mistake_gives_one_message_and_the_service_continues(service: Service) -> None:
    mistakes: dict[str, list[tuple[Any, int, str]]] = {
        "/score": [
            ({"usr": [1]}, 400, "There is no feature usr; the model has"),
            ({"user": [1], "movie": ["a"]}, 400, "movie takes values of type int, not 'a'"),
            ({"user": 1, "movie": [1]}, 400, "user takes a list with an entry for each"),
            ([1], 422, "/score takes one JSON object."),
        ],
        "/recommend": [
            ({"users": [1], "k": 0}, 400, "k must be a whole number of at least 1, got 0"),
            ({"users": [1], "kk": 3}, 400, "/recommend takes users, k, events, exclude, candidates"),
            ({}, 400, "recommend requires users or events"),
        ],
    }
    for path, cases in mistakes.items():
        for body, status, sentence in cases:
            reply = service.client.post(path, json=body)
            assert (reply.status_code, sentence in reply.json()["error"]) == (status, True), reply.text
    assert service.client.post("/score", json={"user": [-5], "movie": [1]}).status_code == 200


def test_an_answer_lists_unknown_ids_and_requests_are_limited(service: Service) -> None:
    client = service.client
    body: dict[str, Any] = {"user": [1, -7, -7, None], "movie": [1, 2, -3, 1]}
    assert client.post("/score", json=body).json()["unknown"] == {"user": [-7], "movie": [-3]}
    body = {"users": [1, -7], "events": [[(-4, 3.0)], []], "candidates": [1, -5]}
    assert client.post("/recommend", json=body).json()["unknown"] == {"user": [-7], "movie": [-5, -4]}
    body = {"users": {"user": [1], "history": [[1, -6]], "history_ratings": [[4.0, 4.0]]}}
    assert client.post("/recommend", json=body).json()["unknown"] == {"user": [], "movie": [-6]}
    assert client.post("/score", json={**body["users"], "movie": [1]}).json()["unknown"] == {
        "user": [],
        "movie": [-6],
    }
    body = {"users": {"user": [1]}, "k": 1}
    assert client.post("/recommend", json=body).json()["unknown"] == {"user": [], "movie": []}
    body = {"users": [1], "events": [[1]]}
    assert client.post("/recommend", json=body).status_code == 400
    large = b'{"user": [' + b"1, " * 2**21 + b"1]}"
    # Also where nobody says beforehand how long it is.
    for content in (large, iter([large[: 2**20], large[2**20 :]])):
        reply = client.post("/score", content=content, headers={"Content-Type": "application/json"})
        assert reply.status_code == 413
        assert reply.json()["error"] == "A request has at most 4,194,304 bytes; send several smaller ones."
    assert client.get("/health").status_code == 200


def test_recommend_takes_the_rules_of_lists_as_json() -> None:
    follower = random_follower()
    movies = [*range(3, 3 * ITEMS + 1, 3)]
    follower.model.describe_items({"movie": movies, "genres": [[GENRES[movie % 4 % 3]] for movie in movies]})
    rules: dict[str, Any] = {
        "candidates": [3, 6, 9, 12, 15, -4],
        "also_exclude": [[6], []],
        "at_most": {"genres": 1},
        "least_distance": 0.05,
    }
    asked = {"events": [[(3, 4.0)], [(30, 2.0)]], "k": 3, **rules}
    wanted = follower.model.recommend(**asked)
    with answering(serve.service(follower)) as (client, _):
        answer = client.post("/recommend", json=asked).json()
        assert answer["items"] == [[[*pair] for pair in mine] for mine in wanted]
        assert answer["unknown"] == {"user": [], "movie": [-4]}
        for wrong in ({"at_most": {"genres": 0}}, {"at_most": {"brand": 1}}, {"least_distance": 3}):
            assert client.post("/recommend", json={**asked, **wrong}).status_code == 400
    # The first user had 3, and 6 is excluded: 9, and one of 12 and 15 of one genre.
    assert [len(mine) for mine in wanted] == [2, 3]


def test_missing_packages_are_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert serve.main(["--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "serve.py requires uvicorn, which is not installed. Fix: pip install uvicorn" in said


def test_a_request_is_repeated_after_a_concurrent_delta_and_blocks_further_deltas() -> None:
    follower = SimpleNamespace(model=SimpleNamespace(snapshot=0), changing=threading.Lock())
    asked: list[bool] = []

    def ask() -> int:
        asked.append(follower.changing.locked())
        # Deltas come as fast as requests are answered, unless they have to wait.
        if not asked[-1]:
            follower.model.snapshot += 1
        return len(asked)

    assert from_one_snapshot(follower, ask) == (2, 1)  # type: ignore[arg-type]
    assert asked == [False, True]
    assert not follower.changing.locked()


@pytest.mark.parametrize("is_newer", [True, False])
def test_a_request_that_fails_by_a_change_of_model_is_repeated_once(is_newer: bool) -> None:
    follower = SimpleNamespace(model=SimpleNamespace(snapshot=0), changing=threading.Lock())
    asked: list[int] = []

    def ask() -> str:
        asked.append(follower.model.snapshot)
        if asked == [0]:
            follower.model.snapshot += is_newer
            raise UserError("There is no feature age.")
        return "an answer"

    if is_newer:
        assert from_one_snapshot(follower, ask) == ("an answer", 1)  # type: ignore[arg-type]
    else:
        with pytest.raises(UserError, match="no feature age"):
            from_one_snapshot(follower, ask)  # type: ignore[arg-type]
    assert asked == [0, 1][: 1 + is_newer]


def test_a_used_port_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        assert serve.main(["--save_dir", str(tmp_path), "--port", port]) == 2
    said = capsys.readouterr().err
    assert f"Cannot bind 127.0.0.1:{port}: " in said
    assert said.count("\n") == 1


def test_a_server_without_the_data_of_the_training_names_the_missing_features(
    service: Service,
) -> None:
    said = "".join(service.said)
    assert "item features (genres, year) are missing, so recommendations are worse" in said
    assert "takes the history of a user, and gets none" in said
    alone = service.client.post("/recommend", json={"users": [1], "k": 5}).json()["items"]
    model = ServedModel.open(service.save_dir, "latest", model=make_model)
    with pytest.warns(UserWarning, match="takes the history of a user, and gets none"):
        assert alone == [[[*pair] for pair in model.recommend([1], 5)[0]]]


def test_a_missing_folder_is_refused_and_an_empty_one_is_waited_for_until_sigterm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--save_dir", str(tmp_path / "typo"), "--port", "0"]) == 2
    assert f"--save_dir {tmp_path / 'typo'} does not exist. Fix: " in capsys.readouterr().err
    port = free_port()
    command = [sys.executable, str(SERVE), "--save_dir", str(tmp_path), "--port", str(port)]
    with started(command) as process:
        wait_for(process, "waiting for the first checkpoint")
        reply = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60, trust_env=False)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
    assert (reply.status_code, reply.json().keys()) == (503, {"error"})
    assert (process.returncode, output, errors) == (0, "", "")


def test_an_application_without_a_model_answers_its_hosts_alone() -> None:
    first = serve.UntilServed("a reason", hosts=["localhost"])
    with answering(first) as (client, _):
        for host, status in (("localhost", 503), ("evil.com", 400)):
            assert client.get("/health", headers={"Host": host}).status_code == status
        first.app = serve.service(random_follower())
        assert client.get("/health").status_code == 200


@pytest.mark.usefixtures("quick_looks")
def test_a_wait_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(followers, "REMIND_SECONDS", 0.0)
    looks = iter([False, False, True])
    monkeypatch.setattr(followers, "_has_learned", lambda *_: next(looks))
    followers.wait_for_first(tmp_path)
    first, again = capsys.readouterr().out.splitlines()
    assert again.startswith(f"{first}, for 0 s")


def test_command_line_http_and_python_recommend_and_score_the_same(
    trained_folder: Path, synthetic_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_dir, data = trained_folder / "dumps", str(synthetic_folder)
    with main_in_a_thread("--save_dir", str(save_dir), "--data_path", data) as client:
        (served,) = client.post("/recommend", json={"users": [1], "k": 5}).json()["items"]
        step = client.get("/health").json()["step"]
        pairs = {"user": [1] * 5, "movie": [item for item, _ in served]}
        scored = client.post("/score", json=pairs).json()["scores"]
        wanted = {"users": [1], "k": 2, "features": ["title", "genres"]}
        (shown,) = client.post("/recommend", json=wanted).json()["items"]
    model = ServedModel.open(save_dir, model=make_model, data_path=data)
    (found,) = model.recommend([1], 5)
    assert (step, served) == (model.progress.step, [[*pair] for pair in found])
    # A pair has one score, whoever asks for it, and what a request says counts before the data.
    assert scored == model.score(pairs).tolist() == pytest.approx([score for _, score in found], abs=1e-5)
    assert model.score({**pairs, "history": [[]] * 5, "history_ratings": [[]] * 5}).tolist() != scored
    with pytest.warns(UserWarning, match="takes the history of a user, and gets none"):
        assert ServedModel.open(save_dir, model=make_model).score(pairs).tolist() != scored
    # Other than without histories.
    with pytest.warns(UserWarning, match="takes the history of a user, and gets none"):
        assert ServedModel.open(save_dir, model=make_model).recommend([1], 5) != [found]
    capsys.readouterr()
    flags = {"save_dir": str(save_dir), "data_path": data, "user": "1", "top": 5}
    recommend(Config.of(recommend=True, **flags), flags.keys(), make_model)
    rows = re.findall(r"^\|    [1-5] \| (.+?) +\| +([\d.]+) \|$", capsys.readouterr().out, re.MULTILINE)
    items = open_viewer(model, Config.of(**flags, recommend=True), flags.keys()).raw.items
    titles = dict(zip(items["movie_id"], items["title"], strict=True))
    lowest, highest = SCHEMA.lowest_label, SCHEMA.highest_label
    genres = dict(zip(items["movie_id"], items["genres"], strict=True))
    about = [{"title": titles[item], "genres": list(genres[item])} for item, _ in found[:2]]
    assert shown == [[*pair, values] for pair, values in zip(found, about, strict=False)]
    assert rows == [(titles[item], f"{min(max(score, lowest), highest):.3f}") for item, score in found]


def test_one_checkpoint_is_the_default_of_command_line_http_and_python() -> None:
    of_python = {
        inspect.signature(call).parameters["checkpoint"].default for call in (ServedModel.open, Follower)
    }
    served = runpy.run_path(str(SERVE))["parse"]([]).checkpoint
    assert {*of_python, served, Config().checkpoint.checkpoint} == {"best"}


def test_a_follower_of_the_best_checkpoint_passes_over_a_later_one_that_is_worse(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumps = trained_folder / "dumps"
    save_dir = copied(dumps, tmp_path / "dumps", 2)
    best = save_dir / "delta-000000002"
    for module in ("serving.served", "checkpoint.chain"):
        monkeypatch.setattr(f"recsuite.{module}.best_in", lambda folder: best)
    follower, newest = (
        Follower(save_dir, model=make_model),
        Follower(save_dir, model=make_model, checkpoint="latest"),
    )
    publish_state(dumps, 8, save_dir)
    assert [each.refresh() for each in (follower, newest)] == [False, True]
    assert [each.model.progress.step for each in (follower, newest)] == [2, 8]
    # Until that one is the best.
    best = save_dir / state(dumps, 8).name
    publish_state(dumps, 10, save_dir)
    follower.refresh()
    assert follower.model.progress.step == 8


JSON = {"Content-Type": "application/json"}


def random_follower(task: str = "ranking") -> Any:
    """Of a model of random rows, which no training changes."""
    snapshot = snapshot_of(task)
    manifest = dataclasses.replace(snapshot.manifest, time="2026-01-01T00:00:00+00:00")
    model = ServedModel(dataclasses.replace(snapshot, manifest=manifest))
    return SimpleNamespace(
        model=model, changing=threading.Lock(), failure="", looked=time.monotonic(), refresh=lambda: False
    )


@contextlib.contextmanager
def answering(app: Any) -> Iterator[tuple[Any, Any]]:
    """A client of an application that a thread of this process serves, and its server."""
    server = serve.server_of(app)
    with serve.bound("127.0.0.1", 0) as port:
        address = f"http://127.0.0.1:{port.getsockname()[1]}"
        thread = threading.Thread(target=server.run, args=([port],), daemon=True)
        thread.start()
        # Until then the port refuses connections.
        wait_until(lambda: server.started)
        try:
            with httpx.Client(base_url=address, timeout=60, trust_env=False) as client:
                yield client, server
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def wait_until(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def following_of(follower: Any) -> Iterator[threading.Thread]:
    stop = threading.Event()
    thread = threading.Thread(target=follow, args=(follower, stop), daemon=True)
    thread.start()
    yield thread
    stop.set()
    thread.join(60)
    assert not thread.is_alive()


@pytest.fixture
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followers, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(followers, "LONGEST_PAUSE", 0.04)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ELOOP, "Too many levels of symbolic links"),
        UserError("the file is damaged"),
    ],
    ids=lambda error: type(error).__name__,
)
@pytest.mark.usefixtures("quick_looks")
def test_following_survives_any_exception_which_is_printed_once_and_shown_while_it_lasts(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    looks: list[float] = []
    outcome: list[Exception] = [error]

    def refresh() -> bool:
        looks.append(time.monotonic())
        if outcome:
            raise outcome[0]
        return False

    follower = random_follower()
    follower.refresh = refresh
    with following_of(follower) as thread:
        wait_until(lambda: len(looks) >= 6)
        assert thread.is_alive()
        assert type(error).__name__ in follower.failure or str(error) in follower.failure
        outcome.clear()
        wait_until(lambda: follower.failure == "")
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == (not isinstance(error, UserError))
    assert shown.count(type(error).__name__ if "Traceback" in shown else str(error)) == 1
    # The pauses grow up to the longest one.
    assert looks[3] - looks[2] >= 0.04


@pytest.mark.usefixtures("quick_looks")
def test_following_continues_where_its_error_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def refresh() -> bool:
        looks.append(1)
        raise OSError(len(looks))

    class Closed:
        def write(self, text: str) -> None:
            raise BrokenPipeError

    follower = random_follower()
    follower.refresh = refresh
    monkeypatch.setattr(sys, "stderr", Closed())
    with following_of(follower):
        wait_until(lambda: len(looks) > 3)


@pytest.mark.usefixtures("quick_looks")
def test_a_link_to_itself_in_place_of_the_folder_stops_following_only_while_it_exists(
    trained_folder: Path, tmp_path: Path
) -> None:
    save_dir = copied(trained_folder / "dumps", tmp_path / "dumps", 2)
    follower, aside = Follower(save_dir, model=make_model), save_dir.with_name("aside")
    with following_of(follower):
        save_dir.rename(aside)
        save_dir.symlink_to(save_dir)
        # As a folder that is not there, such a link is no failure.
        looked = follower.looked
        wait_until(lambda: follower.looked > looked and not follower.failure)
        save_dir.unlink()
        aside.rename(save_dir)
        publish_state(trained_folder / "dumps", 4, save_dir)
        wait_until(lambda: follower.model.progress.step == 4 and not follower.failure)


def test_health_is_503_once_following_has_failed_for_a_minute_or_its_thread_has_ended() -> None:
    follower, alive = random_follower(), [True]
    with answering(serve.service(follower, lambda: alive[0])) as (client, _):
        reply = client.get("/health")
        assert (reply.status_code, reply.json()["failure"]) == (200, None)
        follower.failure = "MemoryError: "
        assert (client.get("/health").status_code, client.get("/health").json()["failure"]) == (
            200,
            "MemoryError: ",
        )
        follower.looked -= serve.FAILING_SECONDS + 1
        reply = client.get("/health")
        assert (reply.status_code, reply.json()["looked_seconds_ago"] > serve.FAILING_SECONDS) == (503, True)
        follower.failure = ""
        assert client.get("/health").status_code == 200
        alive[0] = False
        assert client.get("/health").status_code == 503
        assert "has ended; restart the server" in client.get("/health").json()["failure"]


def test_an_answer_beyond_the_limits_is_refused_before_anything_is_computed() -> None:
    over = serve.MOST_PAIRS // ITEMS + 1
    too_many = {"user": [1] * 100_001, "movie": [3] * 100_001}
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("/score", too_many, "pairs must be at most 100,000, got 100,001"),
        ("/recommend", {"users": [1] * 11, "k": 10_000}, "users x k must be at most 100,000, got 110,000"),
        ("/recommend", {"users": [1], "k": 10**4000}, "users x k must be at most 100,000, got 10,000,000,"),
        ("/recommend", {"users": {"user": [1] * over}, "k": 1}, "users x items must be at most 2,000,000,"),
        ("/recommend", {"events": [[[3, 4.0]]] * over, "k": 1}, "users x items must be at most 2,000,000,"),
        ("/recommend", {"users": [1] * 21, "candidates": [3] * 100_000, "k": 1}, "got 2,100,000"),
        (
            "/recommend",
            {"events": [[[3, 4.0]] * 5_001], "candidates": [3] * 100_000, "k": 1, "least_distance": 0.1},
            "users x items x histories must be at most 500,000,000, got 500,100,000",
        ),
    ]
    follower = random_follower()
    with answering(serve.service(follower)) as (client, _):
        for path, body, sentence in cases:
            reply = client.post(path, json=body)
            assert (reply.status_code, sentence in reply.json()["error"]) == (400, True), reply.text[:500]
            assert reply.json()["error"].endswith("send several smaller requests.")
            assert len(reply.text) < 1000
        assert client.post("/score", json={"user": [1] * 100_000, "movie": [3] * 100_000}).status_code == 200
        # Each with the history that the data have.
        follower.model._data = SimpleNamespace(longest=30)
        reply = client.post("/score", json={"user": [1] * 66_667, "movie": [3] * 66_667})
        assert (reply.status_code, "pairs x histories of the data must be" in reply.text) == (400, True)
        follower.model._data = None
        body = {"users": [1] * (over - 1), "k": 1}
        assert len(client.post("/recommend", json=body).json()["items"]) == over - 1
        body = {"users": [1], "k": 100_000}
        assert len(client.post("/recommend", json=body).json()["items"][0]) == ITEMS


def test_health_answers_during_full_load_and_further_requests_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    follower, go_on, running = random_follower(), threading.Event(), list[int]()
    compute = follower.model.recommend

    def recommend(**request: Any) -> Any:
        running.append(1)
        assert go_on.wait(60)
        return compute(**request)

    follower.model.recommend = recommend
    monkeypatch.setattr(serve, "QUEUE_SECONDS", 1)
    statuses: list[int] = []
    with answering(serve.service(follower)) as (client, _):

        def ask() -> None:
            statuses.append(client.post("/recommend", json={"users": [1]}).status_code)

        threads = [threading.Thread(target=ask) for _ in range(serve.COMPUTATIONS)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(running) == serve.COMPUTATIONS)
        begin = time.monotonic()
        # It waits for no lock either, which who reads a new checkpoint holds.
        with follower.changing:
            assert client.get("/health").status_code == 200
            assert time.monotonic() - begin < 1
        late = client.post("/score", json={"user": [1], "movie": [3]})
        assert (late.status_code, late.headers["Retry-After"]) == (503, "1")
        assert "try again later" in late.json()["error"]
        go_on.set()
        for thread in threads:
            thread.join(60)
    assert statuses == [200] * serve.COMPUTATIONS


def silent(client: Any, sent: bytes = b"") -> socket.socket:
    """A connection that has sent something, and nothing more."""
    connection = socket.create_connection(("127.0.0.1", client.base_url.port), timeout=60)
    connection.sendall(sent)
    return connection


HEAD = b"POST /score HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 20\r\n\r\n"


def test_idle_connections_are_closed_for_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "MOST_CONNECTIONS", 20)
    with answering(serve.service(random_follower())) as (client, server), contextlib.ExitStack() as stack:
        here = [
            stack.enter_context(contextlib.closing(silent(client, sent)))
            for sent in (b"", b"GET /hea", HEAD, HEAD + b"{") * 20
        ]
        assert client.get("/health").status_code == 200
        assert client.post("/score", json={"user": [1], "movie": [3]}).status_code == 200
        # With the algorithm of Nagle an answer would wait 40 ms for the client's acknowledgement of its head.
        assert all(
            each.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            for each in server.server_state.connections
        )
        assert len(server.server_state.connections) <= 21
        # The one that has waited longest is told why.
        assert b"There are more than 20 connections; try again later." in here[0].recv(10_000)


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEAD, HEAD + b'{"user"'])
def test_a_request_that_is_not_complete_in_time_is_answered_with_408(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "CLIENT_SECONDS", 0.3)
    with (
        answering(serve.service(random_follower())) as (client, _),
        contextlib.closing(silent(client, sent)) as late,
    ):
        reply = late.makefile("rb").read()
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"A request must be complete within 0.3 s" in reply
    assert capfd.readouterr().err == ""


CHUNKED = HEAD.replace(b"Content-Length: 20", b"Transfer-Encoding: chunked")


def test_a_body_in_tiny_chunks_is_refused_and_one_in_larger_chunks_is_answered() -> None:
    body = json.dumps({"user": [1] * 300, "movie": [3] * 300}).encode()

    def chunks(size: int, of: bytes) -> bytes:
        parts = [of[begin : begin + size] for begin in range(0, len(of), size)]
        return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"

    with answering(serve.service(random_follower())) as (client, _):
        for sent, status in (
            (chunks(100, body), 200),
            (chunks(1, body), 413),
            (chunks(1, b"[" * 10**6), 413),
        ):
            with contextlib.closing(silent(client, CHUNKED)) as connection:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(sent)
                assert connection.recv(20).startswith(b"HTTP/1.1 %d " % status)
        assert client.get("/health").status_code == 200


def test_an_answer_that_is_not_read_in_time_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "CLIENT_SECONDS", 0.5)
    body = json.dumps({"users": [1] * 450, "k": ITEMS}).encode()
    sent = HEAD.replace(b"score", b"recommend").replace(b" 20", b" %d" % len(body)) + body
    with answering(serve.service(random_follower())) as (client, server):
        connection = socket.socket()
        # What the kernel takes for the client is no longer the server's.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", client.base_url.port))
        with contextlib.closing(connection):
            connection.sendall(sent)
            wait_until(lambda: server.server_state.total_requests == 1)
            wait_until(lambda: not server.server_state.connections)


def test_a_client_that_sends_half_a_request_does_not_keep_the_server_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "STOP_SECONDS", 1)
    begin = time.monotonic()
    with answering(serve.service(random_follower())) as (client, _):
        late = silent(client, HEAD)
        assert client.get("/health").status_code == 200
    assert time.monotonic() - begin < 20
    late.close()


def test_no_odd_request_is_answered_with_500_or_printed(capfd: pytest.CaptureFixture[str]) -> None:
    odd = ['"\\ud800"', "1e999", "NaN", "9" * 4000, "9" * 5000, "null", "[[]]", "{}", "true"]
    bodies = [
        b"",
        b"{",
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"\x1f\x8b\x08\0",
        b'"x"',
        b"\xff",
        b"\xff\xfe{\0}\0",
    ]
    for each in odd:
        bodies += [b'{"user": [%s], "movie": [3]}' % each.encode(), b'{"gender": [%s]}' % each.encode()]
        bodies += [b'{"users": [1], "k": %s}' % each.encode(), b'{"events": %s}' % each.encode()]
        bodies += [b'{"items": %s}' % each.encode(), b'{"vectors": %s}' % each.encode()]
        bodies += [b'{"users": [1], "features": [%s]}' % each.encode(), b'{"items": [[%s]]}' % each.encode()]
    heads = [{}, {"Content-Type": "text/plain"}, {**JSON, "Content-Encoding": "gzip"}]
    with answering(serve.service(random_follower())) as (client, _):
        replies = [
            client.post(path, content=body, headers=JSON)
            for path in ("/score", "/recommend", "/similar", "/search", "/vectors")
            for body in bodies
        ]
        replies += [client.post("/score", content=b"{}", headers=head) for head in heads]
        replies += [client.request(method, "/score") for method in ("GET", "HEAD", "PUT", "OPTIONS", "TRACE")]
        replies += [client.post("/health", content=b"x"), client.get("/nothing")]
        pipelined = silent(client, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * 20 + b"\0\r\n\r\n")
        answers = pipelined.makefile("rb").read()
        pipelined.close()
        gone = silent(client, HEAD + b"{")
        gone.close()
        assert client.get("/health").status_code == 200
    assert {reply.status_code for reply in replies} == {200, 400, 404, 405, 422}
    assert all("error" in reply.json() for reply in replies if reply.status_code != 200 and reply.content)
    assert (answers.count(b"HTTP/1.1 200 "), answers.count(b"HTTP/1.1 400 ")) == (20, 1)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("text", [b'"a\\udfff"', b'"\xed\xa0\x80"'])
def test_a_lone_surrogate_is_a_mistake_of_the_request(text: bytes) -> None:
    with answering(serve.service(random_follower())) as (client, _):
        for body in (b'{"user": [%s], "movie": [3]}', b'{"gender": [%s], "movie": [3]}', b"{%s: [1]}"):
            reply = client.post("/score", content=body % text, headers=JSON)
            assert reply.status_code == 400
            assert "takes one JSON object in UTF-8" in reply.json()["error"]


def test_unknown_values_are_shortened_in_answers() -> None:
    follower, long = random_follower(), "x" * 1_000_000
    snapshot = follower.model.snapshot
    users = snapshot.tables["user"]
    assert isinstance(users, VocabularyTable)
    texts = {str(user): row for user, row in users.rows.items()}
    tables = {**snapshot.tables, "user": dataclasses.replace(users, rows=texts)}
    follower.model.replace(dataclasses.replace(snapshot, tables=tables))
    with answering(serve.service(follower)) as (client, _):
        for path, body in (
            ("/score", {long: [1]}),
            ("/score", {"user": [long], "movie": [3]}),
            ("/score", {"user": ["1"], "movie": [long]}),
            ("/recommend", {"users": ["1"], long: 3}),
            ("/recommend", {"users": [long], "k": 1}),
            ("/recommend", {"users": ["1"], "exclude": long}),
        ):
            reply = client.post(path, json=body)
            assert len(reply.content) < 1000
            assert "xxx..." in reply.text
        reply = client.post("/score", json={"user": ["y" * 300], "movie": [3]})
        assert reply.json()["unknown"]["user"] == ["y" * 300]


@pytest.mark.parametrize(
    ("flag", "listens_at", "allowed", "refused"),
    [
        # A page of the Web may give its own name to 127.0.0.1.
        ("", "127.0.0.1", "127.0.0.1:8000 localhost LOCALHOST:80 [::1]:8000", "evil.com 127.0.0.1.evil.com"),
        ("", "127.0.0.5", "127.0.0.5:1 localhost", "evil.com:8000"),
        (
            "api.example.com, *.b.org",
            "127.0.0.1",
            "API.example.com:443 x.b.org localhost",
            "example.com b.org xb.org",
        ),
        (
            "api.example.com",
            "0.0.0.0",
            "api.example.com localhost",
            "evil.com [::2] a@b:x [ api.example.com.evil.com",
        ),
        ("", "0.0.0.0", "api.example.com evil.com 10.0.0.7:8000 [::2]", ""),
        ("*", "127.0.0.1", "evil.com", ""),
    ],
)
def test_requests_to_other_hosts_are_refused_where_no_other_machine_calls_or_names_are_given(
    flag: str, listens_at: str, allowed: str, refused: str
) -> None:
    app = serve.service(random_follower(), hosts=serve.hosts_of(flag, listens_at))
    with answering(app) as (client, _):
        for host in allowed.split():
            assert client.get("/health", headers={"Host": host}).status_code == 200
        for host in refused.split():
            for path in ("/health", "/openapi.json", "/docs", "/nothing"):
                reply = client.get(path, headers={"Host": host})
                assert (reply.status_code, reply.text) == (400, "Invalid host header")


@pytest.mark.parametrize("name", ["api.example.com:443", "http://a.com", "*a.com", "a.*.com"])
def test_what_is_no_name_of_a_host_is_refused_at_the_start(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--save_dir", str(tmp_path), "--port", "0", "--allowed_hosts", name]) == 2
    assert f"without ports, such as api.example.com or *.example.com, got {name}." in capsys.readouterr().err


def test_the_service_describes_its_routes_and_request_fields() -> None:
    with answering(serve.service(random_follower())) as (client, _):
        listed = {each["endpoint"]: each["answer"] for each in client.get("/").json()}
        posts = {f"POST /{name}" for name in ("score", "recommend", "similar", "search", "vectors")}
        assert listed.keys() == {"GET /", "GET /health", "GET /docs"} | posts
        assert all(listed.values())
        assert client.get("/redoc").status_code == 404
        paths = client.get("/openapi.json").json()["paths"]
        bodies = {
            path: paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]["properties"]
            for path in ("/score", "/recommend")
        }
    names = {"user", "gender", "age", "occupation", "movie", "year", "genres"}
    assert bodies["/score"].keys() == names | {"history", "history_ratings"}
    assert bodies["/score"]["genres"]["items"]["type"] == "array"
    arguments = {*inspect.signature(ServedModel.recommend).parameters} - {"self", "approximate"}
    assert bodies["/recommend"].keys() == arguments | {"features"}


def test_the_page_of_the_requests_and_what_it_loads_come_from_this_server() -> None:
    with answering(serve.service(random_follower())) as (client, _):
        page = client.get("/docs")
        assert "://" not in page.text
        loaded = re.findall(r"(?:src|href|url)\W+([\w./-]+)", page.text)
        assert {Path(address).suffix for address in loaded} == {".js", ".css", ".png", ".json"}
        for address in loaded:
            reply = client.get(f"/{address}")
            assert reply.status_code == 200
            assert address.endswith(".js") or not re.search(r"(url\(|@import)\W*(https?:)?//", reply.text)
        # A browser refuses what a script asks of another server.
        policy = page.headers["Content-Security-Policy"]
        sources = {source for part in policy.split(";") for source in part.split()[1:]}
        assert sources == {"'self'", "'unsafe-inline'", "data:"}


@pytest.mark.parametrize("task", ["rating", "ranking"])
def test_requests_and_answers_are_those_of_the_schemas(task: str) -> None:
    validators = pytest.importorskip("jsonschema", reason="needs a package of requirements-dev.txt")
    follower = random_follower(task)
    follower.model.describe_items({"movie": [3, 6, 9], "year": [1990, 1991, None]})

    def is_valid(value: Any, body: Any) -> bool:
        validators.Draft202012Validator.check_schema(schema := body["content"]["application/json"]["schema"])
        return bool(validators.Draft202012Validator(schema).is_valid(value))

    history = {"user": [1, None], "history": [[3], []], "history_ratings": [[4.5], []]}
    more: dict[str, list[dict[str, Any]]] = {
        "/score": [{**history, "movie": [3, -1], "genres": [["Drama"], []], "age": [18, None]}],
        "/recommend": [
            {"users": history, "exclude": [[3], []], "features": ["year"]},
            {"events": [[[3, 4.0]]], "exclude": None, "candidates": [3, -5]},
        ],
        "/similar": [{"items": [3], "features": ["movie", "year"]}],
        "/search": [],
        "/vectors": [{"items": [3, 9]}, {"events": [[[3, 4.0]]]}],
    }
    odd: dict[str, Any] = {
        "/score": {"user": 1},
        "/recommend": {"k": 0, "users": [1]},
        "/similar": {},
        "/search": {"vectors": [["a"]]},
        "/vectors": {"other": 1},
    }
    with answering(serve.service(follower)) as (client, _):
        paths = client.get("/openapi.json").json()["paths"]
        for path in ("/", "/health"):
            assert is_valid(client.get(path).json(), paths[path]["get"]["responses"]["200"])
        assert paths.keys() - more.keys() == {"/", "/health"}
        for path, bodies in more.items():
            about = paths[path]["post"]
            example = about["requestBody"]["content"]["application/json"]["example"]
            for body in (example, *bodies):
                assert is_valid(body, about["requestBody"])
                reply = client.post(path, json=body)
                assert reply.status_code == 200, reply.text
                assert is_valid(reply.json(), about["responses"]["200"]), reply.text
            assert not is_valid({**reply.json(), "step": "7"}, about["responses"]["200"])
            assert not is_valid(odd[path], about["requestBody"])
            reply = client.post(path, json=odd[path])
            assert reply.status_code == 400
            assert is_valid(reply.json(), about["responses"]["4XX"])
        follower.failure, follower.looked = "a reason", follower.looked - serve.FAILING_SECONDS - 1
        for reply in (client.get("/health"), SimpleNamespace(json=lambda: {"error": "a reason"})):
            assert is_valid(reply.json(), paths["/health"]["get"]["responses"]["503"])


def test_search_of_the_vectors_of_users_and_similar_items_are_those_of_python() -> None:
    follower = random_follower()
    model = follower.model
    with answering(serve.service(follower)) as (client, _):

        def asked(path: str, **body: Any) -> Any:
            reply = client.post(path, json=body)
            assert reply.status_code == 200, reply.text
            return reply.json()

        users = {"user": [1, -7], "history": [[3], []], "history_ratings": [[4.5], []]}
        vectors = asked("/vectors", users=users)["vectors"]
        assert vectors == model.user_vectors(users).tolist()
        found = asked("/search", vectors=vectors, k=3)
        assert found["items"] == asked("/recommend", users=users, k=3, exclude=None)["items"]
        assert (found["step"], found["unknown"]) == (7, {"user": [], "movie": []})
        wanted = [[[*pair] for pair in mine] for mine in model.similar_items([6, 63], 3)]
        assert asked("/similar", items=[6, 63], k=3)["items"] == wanted
        assert asked("/vectors", items=[6])["vectors"] == model.item_vectors([6]).tolist()
        over = serve.MOST_PAIRS // ITEMS + 1
        for path, body, sentence in (
            ("/similar", {"items": [-5]}, "Unknown movie -5"),
            ("/similar", {"items": [3] * 11, "k": 10_000}, "items x k must be at most 100,000"),
            ("/similar", {"k": 3}, "/similar requires items"),
            ("/search", {"vectors": [[1.0]]}, "vectors must have 8 numbers each"),
            ("/search", {"vectors": [[]]}, "vectors must have 8 numbers each"),
            ("/search", {"vectors": [[0.0] * 8], "approximate": "no"}, "approximate must be true or false"),
            ("/search", {"vectors": [[0.0] * 8] * over, "k": 1}, "vectors x items must be at most 2,000,000"),
            ("/search", {"vectors": [[0.0] * 8], "users": [1]}, "/search takes vectors, k, approximate"),
            (
                "/vectors",
                {"items": [3], "users": [1]},
                "/vectors takes users, with or without events, or items",
            ),
            ("/vectors", {"users": [1] * 250_001}, "numbers of vectors must be at most 2,000,000"),
        ):
            reply = client.post(path, json=body)
            assert (reply.status_code, sentence in reply.json()["error"]) == (400, True), reply.text


def test_items_of_an_answer_have_the_values_that_were_asked_for() -> None:
    follower = random_follower()
    with answering(serve.service(follower)) as (client, _):
        body = {"items": [6], "k": 1, "features": ["title"]}
        assert "requires a description of the items" in client.post("/similar", json=body).json()["error"]
        when = [SimpleNamespace(tolist=lambda: [0.5, float("nan")]), {1}]
        shown: dict[str, Any] = {"title": ["C", "B", "A"], "odd": [*when, float("inf")]}
        follower.model.describe_items({"movie": [9, 6, 3], "genres": [["War"], [], ["Drama"]]}, shown)
        (found,) = client.post("/similar", json={"items": [6], "features": [*shown, "genres"]}).json()[
            "items"
        ]
        assert {item: values for item, _, values in found} == {
            9: {"title": "C", "odd": [0.5, None], "genres": ["War"]},
            3: {"title": "A", "odd": None, "genres": ["Drama"]},
        }
        for features, sentence in (
            (["headline"], "no feature headline of an item; there are movie, genres, title, odd."),
            ("title", "features takes a list of names"),
            ([["title"]], "no feature ['title'] of an item"),
            (["title"] * 50_001, "items x k x features must be at most 100,000"),
        ):
            reply = client.post("/similar", json={**body, "features": features, "k": 2})
            assert (reply.status_code, sentence in reply.json()["error"]) == (400, True), reply.text


def test_clicks_of_a_request_may_be_items_alone() -> None:
    ids = serve.ids_of_request({"events": [["ab", ["cd", 1]], []], "items": ["ef"]}, SCHEMA)
    assert ids == ([], ["ef", "ab", "cd"])
