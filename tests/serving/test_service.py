"""The service as a client meets it: each answer is of the one step that it names, while deltas arrive."""

from __future__ import annotations

import contextlib
import inspect
import re
import runpy
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recsuite.checkpoint.storage.directory import deltas_in, full_checkpoints_in, step_of
from recsuite.checkpoint.storage.writer import publish
from recsuite.config.config import Config
from recsuite.datasets.movielens.schema import SCHEMA
from recsuite.serving.followers.following import of_one_moment
from recsuite.serving.recommend import open_viewer, recommend
from recsuite.serving.served import Follower, ServedModel
from tests.support.launch import ROOT, free_port, started, wait_for

httpx = pytest.importorskip("httpx", reason="needs the package httpx, of requirements-dev.txt")
pytest.importorskip("fastapi", reason="needs the package fastapi, of requirements-serve.txt")

# The launch runs within the first test.
SERVE = ROOT / "example" / "serve.py"
ENV = {"PYTHONPATH": str(ROOT / "example")}
VALUES: dict[str, list[Any]] = {"user": [1, 2, 3, -7] * 50, "movie": [*range(1, 201)]}


def states(dumps: Path) -> dict[int, Path]:
    """The checkpoints of a training, by step."""
    return {step_of(path): path for path in (*full_checkpoints_in(dumps), *deltas_in(dumps))}


def publish_copy(state: Path, save_dir: Path) -> None:
    """What a trainer does when it writes a checkpoint."""
    making = save_dir / f".making-{state.name}"
    shutil.copytree(state, making)
    publish(making, save_dir / state.name, keep=9)


@contextlib.contextmanager
def serving(
    save_dir: Path, *flags: str, said: list[str] | None = None
) -> Iterator[tuple[Any, subprocess.Popen[str]]]:
    """A client of a running service, and the service; said: gets its lines until it serves."""
    command = [
        sys.executable,
        str(SERVE),
        "--save_dir",
        str(save_dir),
        "--port",
        "0",
        "--checkpoint",
        "latest",
    ]
    command += flags
    with started(command, real=True, env=ENV) as process:
        assert process.stdout is not None
        lines = [] if said is None else said
        while not (line := process.stdout.readline()).startswith("serving "):
            assert line
            lines.append(line)
        assert "http://127.0.0.1:" in line
        with httpx.Client(base_url=line.split()[-1], timeout=60, trust_env=False) as client:
            yield client, process


def first_two(dumps: Path, tmp_path: Path) -> Path:
    """A folder with the first two checkpoints of a training."""
    folder = tmp_path / "dumps"
    folder.mkdir()
    for step in (0, 2):
        publish_copy(states(dumps)[step], folder)
    return folder


@pytest.fixture
def save_dir(trained_folder: Path, tmp_path: Path) -> Path:
    return first_two(trained_folder / "dumps", tmp_path)


@pytest.mark.parametrize("ids", ["vocabulary", "dynamic"])
def test_each_answer_under_load_is_that_of_the_step_that_it_names(
    trained_folder: Path, dynamic_folders: dict[int, Path], tmp_path: Path, ids: str
) -> None:
    dumps = (trained_folder if ids == "vocabulary" else dynamic_folders[2]) / "dumps"
    found, save_dir = states(dumps), first_two(dumps, tmp_path)
    steps = [2, 4, 6, 8, 10, 12, 14, 16]
    models = {step: ServedModel.open(found[step]) for step in steps}
    scores = {step: model.score(VALUES).tolist() for step, model in models.items()}
    items = {step: [[*each] for each in model.recommend([1], 5)[0]] for step, model in models.items()}
    answers: list[tuple[str, dict[str, Any]]] = []
    failures: list[str] = []
    end = threading.Event()

    def load(client: Any) -> None:
        while not end.is_set():
            for path, name, body in (
                ("/score", "scores", VALUES),
                ("/recommend", "items", {"users": [1], "k": 5}),
            ):
                reply = client.post(path, json=body)
                if reply.status_code != 200:
                    failures.append(reply.text)
                    return
                answers.append((name, reply.json()))

    with serving(save_dir) as (client, _):
        threads = [threading.Thread(target=load, args=(client,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            for step in steps[1:]:
                publish_copy(found[step], save_dir)
                deadline = time.monotonic() + 300
                while (health := client.get("/health").json())["step"] < step:
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                assert health["checkpoint"] == found[step].name
                assert health["age_seconds"] > 0
        finally:
            end.set()
            for thread in threads:
                thread.join()
    assert failures == []
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


def test_a_mistake_is_one_sentence_and_the_service_goes_on(save_dir: Path) -> None:
    mistakes: dict[str, list[tuple[Any, int, str]]] = {
        "/score": [
            ({"usr": [1]}, 400, "There is no feature usr; the model has"),
            ({"user": [1], "movie": ["a"]}, 400, "movie takes values of type int, not 'a'"),
            ({"user": 1, "movie": [1]}, 400, "user takes a list with an entry for each"),
            ([1], 422, "/score takes one JSON object."),
        ],
        "/recommend": [
            ({"users": [1], "k": 0}, 400, "k is 0; give how many"),
            ({"users": [1], "kk": 3}, 400, "/recommend takes users, k, events, exclude, candidates"),
            ({}, 400, "Nobody is given"),
        ],
    }
    with serving(save_dir) as (client, process):
        for path, cases in mistakes.items():
            for body, status, sentence in cases:
                reply = client.post(path, json=body)
                assert (reply.status_code, sentence in reply.json()["error"]) == (status, True), reply.text
        broken = client.post("/score", content=b"{", headers={"Content-Type": "application/json"})
        assert (broken.status_code, broken.json()["error"]) == (422, "/score takes one JSON object.")
        assert client.post("/score", json={"user": [-5], "movie": [1]}).status_code == 200
        taken = str(client.base_url.port)
        again = subprocess.run(
            [sys.executable, str(SERVE), "--save_dir", str(save_dir), "--port", taken],
            env={"PYTHONPATH": str(ROOT / "example"), "PATH": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert again.returncode == 2
        assert f"--port {taken} cannot be had" in again.stderr
        assert again.stderr.count("\n") == 1
        assert process.poll() is None


def test_an_answer_names_whom_the_model_does_not_know_and_a_request_has_a_limit(save_dir: Path) -> None:
    with serving(save_dir) as (client, _):
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
            assert (
                reply.json()["error"] == "A request has at most 4,194,304 bytes; send several smaller ones."
            )
        assert client.get("/health").status_code == 200


def test_whoever_lacks_the_packages_gets_the_command_that_installs_them(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['uvicorn'] = None; import serve; sys.exit(serve.main(['--port', '0']))"
    ended = subprocess.run(
        [sys.executable, "-c", hidden],
        env={"PYTHONPATH": str(ROOT / "example"), "PATH": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert "which is not installed; run pip install --no-deps -r requirements-serve.txt" in ended.stderr


def test_a_request_during_which_a_delta_comes_is_asked_once_more_and_deltas_wait_for_it() -> None:
    follower = SimpleNamespace(model=SimpleNamespace(snapshot=0), changing=threading.Lock())
    asked: list[bool] = []

    def ask() -> int:
        asked.append(follower.changing.locked())
        # Deltas come as fast as requests are answered, unless they have to wait.
        if not asked[-1]:
            follower.model.snapshot += 1
        return len(asked)

    assert of_one_moment(follower, ask) == (2, 1)  # type: ignore[arg-type]
    assert asked == [False, True]
    assert not follower.changing.locked()


def test_before_the_first_model_nobody_can_connect_and_a_port_that_is_taken_is_refused(
    trained_folder: Path, tmp_path: Path
) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, str(SERVE), "--save_dir", str(tmp_path), "--port", port]
        refused = subprocess.run(command, env=ENV, capture_output=True, text=True, timeout=120)
        assert refused.returncode == 2
        assert f"--host 127.0.0.1 --port {port} cannot be had" in refused.stderr
    # Another one: whoever asks the system for any may get what was just left.
    command[-1] = port = str(free_port())
    with started(command, real=True, env=ENV) as process:
        wait_for(process, "waiting for the first checkpoint")
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False)
        publish_copy(states(trained_folder / "dumps")[8], tmp_path)
        wait_for(process, "serving ")
        assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()["step"] == 8


def test_without_the_data_of_the_training_a_server_says_what_it_lacks(
    trained_folder: Path, tmp_path: Path
) -> None:
    save_dir, said = first_two(trained_folder / "dumps", tmp_path), list[str]()
    with serving(save_dir, said=said) as (client, _):
        assert "what is recommended knows nothing of genres, year, and is worse for it" in "".join(said)
        assert "takes the history of a user, and gets none" in "".join(said)
        alone = client.post("/recommend", json={"users": [1], "k": 5}).json()["items"]
    model = ServedModel.open(save_dir, "latest")
    with pytest.warns(UserWarning, match="takes the history of a user, and gets none"):
        assert alone == [[[*pair] for pair in model.recommend([1], 5)[0]]]


@pytest.mark.parametrize("checkpoint", ["best", "latest"])
def test_command_line_http_and_python_recommend_the_same(
    checkpoint: str, trained_folder: Path, synthetic_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_dir, data = trained_folder / "dumps", str(synthetic_folder)
    with serving(save_dir, "--data_path", data, "--checkpoint", checkpoint) as (client, _):
        (served,) = client.post("/recommend", json={"users": [1], "k": 5}).json()["items"]
        step = client.get("/health").json()["step"]
    model = ServedModel.open(save_dir, checkpoint, data_path=data)
    (found,) = model.recommend([1], 5)
    assert (step, served) == (model.progress.step, [[*pair] for pair in found])
    # Other than without histories.
    with pytest.warns(UserWarning, match="takes the history of a user, and gets none"):
        assert ServedModel.open(save_dir, checkpoint).recommend([1], 5) != [found]
    capsys.readouterr()
    flags = {"save_dir": str(save_dir), "data_path": data, "user": "1", "top": 5, "checkpoint": checkpoint}
    recommend(Config.of(recommend=True, **flags), flags.keys())
    rows = re.findall(r"^\|    [1-5] \| (.+?) +\| +([\d.]+) \|$", capsys.readouterr().out, re.MULTILINE)
    items = open_viewer(model, Config.of(**flags, recommend=True), flags.keys()).raw.items
    titles = dict(zip(items["movie_id"], items["title"], strict=True))
    lowest, highest = SCHEMA.lowest_label, SCHEMA.highest_label
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
    there, save_dir = states(trained_folder / "dumps"), first_two(trained_folder / "dumps", tmp_path)
    best = save_dir / "delta-000000002"
    for module in ("serving.served", "checkpoint.storage.choice"):
        monkeypatch.setattr(f"recsuite.{module}.best_in", lambda folder: best)
    follower, newest = Follower(save_dir), Follower(save_dir, checkpoint="latest")
    publish_copy(there[8], save_dir)
    assert [each.refresh() for each in (follower, newest)] == [False, True]
    assert [each.model.progress.step for each in (follower, newest)] == [2, 8]
    # Until that one is the best.
    best = save_dir / there[8].name
    publish_copy(there[10], save_dir)
    follower.refresh()
    assert follower.model.progress.step == 8
