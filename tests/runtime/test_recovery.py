"""Message of a rank that lost its peers, and errors that keep their traceback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recsuite.config.config import Config
from recsuite.errors import BrokenLaunchError, LostPeerError
from recsuite.runtime import ending
from recsuite.runtime.ending import identify_lost_peers, report_broken_launch
from recsuite.runtime.peers import ALL_ANSWER, is_said
from recsuite.runtime.process import MACHINES, REFUSED, after_lost_peer, recovery_advice

HERE = Config()
GONE = "rank 1 on node-1 has ended; seen by rank 0 on node-0"
CLOSED = "[gloo/transport/tcp/pair.cc:538] Connection closed by peer [10.77.0.2]:1234"
LATE = "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("error", "first"),
    [(CLOSED, GONE), (LATE, f"a rank has not responded for --timeout 300 seconds: {GONE}")],
)
def test_an_error_of_a_collective_names_the_lost_rank(
    error: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "lost_peers", lambda: GONE)
    with pytest.raises(BrokenLaunchError) as found:
        identify_lost_peers(RuntimeError(error), HERE)
    assert str(found.value) == (
        f"{first}. What to do: start again, with --dump to have something that --resume can continue from."
    )


@pytest.mark.parametrize("error", [RuntimeError(CLOSED), LostPeerError("timed out: rank 1 has sent no rows")])
def test_an_error_of_a_collective_that_no_lost_rank_explains_keeps_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "lost_peers", lambda: ALL_ANSWER)
    with pytest.raises(LostPeerError, match=ALL_ANSWER) as found:
        identify_lost_peers(error, HERE)
    assert not isinstance(found.value, BrokenLaunchError)
    assert found.value.__cause__ is error
    # Nor is a fault of the program's own one of the launch.
    monkeypatch.setattr(ending, "lost_peers", lambda: GONE)
    identify_lost_peers(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), HERE)


def test_a_stray_connection_keeps_its_own_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "lost_peers", lambda: ALL_ANSWER)
    with pytest.raises(BrokenLaunchError, match=r"a connection came to port 7[.] What to do: start again"):
        identify_lost_peers(BrokenLaunchError("a connection came to port 7"), HERE)


def test_a_lost_rank_is_printed_once_and_marked_as_printed_for_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setattr(ending, "LOST_PEER_SECONDS", 0)
    report_broken_launch(BrokenLaunchError("rank 1 is gone."))
    assert capsys.readouterr().err == "example.py: rank 1 is gone.\n"
    assert is_said(json.loads(path.read_text())["message"])
    ending.record_crash(ValueError("ours"))
    assert not is_said(json.loads(path.read_text())["message"])
    assert not is_said("Signal 9 (SIGKILL) received by PID 77")


def test_a_launch_continues_from_an_existing_checkpoint_or_is_restarted_by_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 4), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "node-0")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert recovery_advice(Config.of(load=str(tmp_path))) == "start again"
    config = Config.of(dump=True, save_dir=str(tmp_path))
    there = (
        f"start again{MACHINES}; --resume continues from the last checkpoint in {tmp_path}, if there is one"
    )
    assert after_lost_peer(config) == f"What to do: {there}."
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    again = "torchrun restarts the ranks (restart 2 of 3)"
    assert after_lost_peer(config) == f"{again}; without --resume they {REFUSED}."
    for other in (Config(), config.replaced(move_aside=True)):
        assert after_lost_peer(other) == f"{again}; without --resume they start from the beginning."
    assert after_lost_peer(config.replaced(resume=True)) == f"{again}."
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "3")
    assert after_lost_peer(config) == f"What to do: {there}."
