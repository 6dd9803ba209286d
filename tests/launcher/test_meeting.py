"""Who can reach the ranks of one machine: nobody from outside, and no other user is believed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from recsuite.checkpoint.storage import writer
from recsuite.errors import BrokenLaunchError, UserError
from recsuite.launcher.meeting import LOCK, PREFIX, private_folder
from recsuite.runtime.peers import visitors
from recsuite.runtime.peers.visitors import LISTENS, Visitors, connections
from tests.support.launch import PATIENCE, environment, family, launched, run_command, started, wait_for

NOBODY = 65_534
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="acts as another user, which only root can")


def listening(pids: list[int]) -> list[visitors.Connection]:
    """The sockets of some processes that wait for connections."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(descriptor))
    return [end for end in connections() if end.state == LISTENS and f"socket:[{end.inode}]" in inodes]


@contextlib.contextmanager
def another_user(ports: list[int]) -> Iterator[list[bool]]:
    """Somebody else, connected to ports, who tells each a number as gloo's ranks do; True for each."""
    report, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _reach(ports, write)
        finally:
            os._exit(0)
    os.close(write)
    try:
        yield [True] * os.read(report, 1)[0]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(report)


def _reach(ports: list[int], report: int) -> None:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    kept = []
    for port in ports:
        # Not `create_connection`: that imports modules, which this user may not read.
        kept.append(socket.socket())
        kept[-1].connect(("127.0.0.1", port))
        kept[-1].sendall(bytes(8))
    os.write(report, bytes([len(kept)]))
    signal.pause()


def test_nothing_of_a_launch_on_one_machine_listens_on_an_address_that_others_reach(
    script: Path, tmp_path: Path
) -> None:
    env = environment(tmp_path)
    with started(launched(script), env=env) as process:
        wait_for(process, "met", 2)
        launcher, *ranks = family(process.pid)
        assert listening([launcher]) == []
        found = listening(ranks)
        assert len(found) >= 2
        assert [end for end in found if not is_on_loopback(end.local)] == []
        (folder,) = (tmp_path / "temporary").glob(f"{PREFIX}*")
        assert folder.stat().st_mode & 0o777 == 0o700
        (tmp_path / "go").touch()
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert output.count("told [0, 1]") == 2
    assert list((tmp_path / "temporary").glob(f"{PREFIX}*")) == []


@AS_ROOT
def test_another_user_who_connects_to_the_ranks_is_not_believed(script: Path, tmp_path: Path) -> None:
    with started(launched(script), env=environment(tmp_path)) as process:
        wait_for(process, "met", 2)
        ports = [int(end.local.rpartition(":")[2], 16) for end in listening(family(process.pid))]
        with another_user(ports) as connected:
            assert len(connected) == len(ports)
            (tmp_path / "go").touch()
            output, errors = process.communicate(timeout=300)
    assert process.returncode == 2, output + errors
    assert "told" not in output
    assert f"User {NOBODY} is connected to port" in errors
    assert "Traceback" not in errors


def test_ranks_meet_anew_when_they_are_restarted(script: Path, tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    text = script.read_text().replace(
        "    cleanup_runtime()",
        '    import os\n    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n'
        "        os.kill(os.getpid(), 9)\n    cleanup_runtime()",
    )
    script.write_text(text)
    command = launched("--max_restarts=1", script)
    result = run_command(command, env=environment(tmp_path), timeout=90)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("met") >= 4
    assert list((tmp_path / "temporary").glob("*elastic*")) == []
    assert list((tmp_path / "temporary").glob(f"{PREFIX}*")) == []


def test_who_goes_before_it_is_known_who_that_was_is_lost_and_who_is_known_may_go() -> None:
    known = Visitors()
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            accepted, _ = server.accept()
            known.check()
        with accepted:
            assert client.fileno() == -1
            known.check()
            with pytest.raises(BrokenLaunchError, match=r"came to port [0-9]+ of this rank, .* and went"):
                Visitors().check()


@AS_ROOT
def test_another_user_is_refused_and_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        wanted = pytest.raises(UserError, match=f"User {NOBODY} is connected to port {port} of this rank")
        with another_user([port]), server.accept()[0], wanted:
            Visitors().check()
        Visitors().check()


def is_on_loopback(address_and_port: str) -> bool:
    """Whether only this machine can reach an address, as /proc/net/tcp has it."""
    address = address_and_port.partition(":")[0]
    # The kernel writes words of 32 bits, the last byte first: 127.0.0.1 and ::1, and 127.0.0.1 as IPv6.
    return address.endswith("7F") or address == "0" * 24 + "01000000"


def test_addresses_are_read_as_the_kernel_writes_them() -> None:
    assert is_on_loopback("0100007F:1F90")
    assert is_on_loopback("0200007F:1F90")
    assert is_on_loopback("00000000000000000000000001000000:1F90")
    assert is_on_loopback("0000000000000000FFFF00000100007F:1F90")
    assert not is_on_loopback("00000000:1F90")
    assert not is_on_loopback("0200A8C0:1F90")
    assert not is_on_loopback("00000000000000000000000000000000:1F90")


def test_the_folder_of_a_killed_launch_goes_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    foreign, dead = tmp_path / f"{PREFIX}of-others", tmp_path / f"{PREFIX}dead"
    dumps = tmp_path / f"{PREFIX}dumps"
    for folder in (foreign, dumps, dead):
        folder.mkdir()
    # As a training leaves its --save_dir.
    (dumps / writer.LOCK).touch()
    (dead / LOCK).touch()
    (dead / "ranks-0").touch()
    with private_folder() as first, private_folder() as second:
        # One that runs is left alone, and so is what is none of a launch.
        assert {*tmp_path.iterdir()} == {foreign, dumps, first, second}
    assert {*tmp_path.iterdir()} == {foreign, dumps}


def test_a_look_at_the_peers_is_short() -> None:
    start = time.perf_counter()
    for _ in range(10):
        Visitors().check()
    assert (time.perf_counter() - start) / 10 < 0.1 * PATIENCE
