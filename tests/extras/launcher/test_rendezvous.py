"""Ranks of one machine: they meet in a private folder, and no other machine reaches their ports."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from tests.support.launch import environment, family, launched, run_command, started, wait_for

# As the kernel has it for a socket that waits for connections.
LISTENS = "0A"


def listening(pids: list[int]) -> list[str]:
    """The addresses and ports at which some processes wait for connections, as the kernel writes them."""
    inodes = set()
    for pid in pids:
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(descriptor))
    tables = [Path(f"/proc/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    ends = [line.split() for table in tables for line in table]
    return [end[1] for end in ends if end[3] == LISTENS and f"socket:[{end[9]}]" in inodes]


def test_a_launch_on_one_machine_listens_on_no_public_address(script: Path, tmp_path: Path) -> None:
    env = environment(tmp_path)
    with started(launched(script), env=env) as process:
        wait_for(process, "met", 2)
        launcher, *ranks = family(process.pid)
        assert listening([launcher]) == []
        found = listening(ranks)
        assert len(found) >= 2
        assert [end for end in found if not is_on_loopback(end)] == []
        (folder,) = (tmp_path / "temporary").glob("launch-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        (tmp_path / "go").touch()
        output, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    assert output.count("told [0, 1]") == 2
    assert list((tmp_path / "temporary").glob("launch-*")) == []


def test_restarted_ranks_rendezvous_again_and_the_restart_is_printed_with_one_message(
    script: Path, tmp_path: Path
) -> None:
    (tmp_path / "go").touch()
    text = script.read_text().replace(
        "    cleanup_runtime()",
        '    import os\n    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":\n'
        "        raise SystemExit(1)\n    cleanup_runtime()",
    )
    script.write_text(text)
    command = launched("--max_restarts=1", script)
    result = run_command(command, env=environment(tmp_path), timeout=90)
    assert result.returncode == 0, result.stderr
    # The first rank that exits may end the other one before it prints; after the restart both do.
    assert result.stdout.count("told [0, 1]") in (3, 4)
    said = "restarting the ranks: attempt 2 on this machine, with 2 ranks on 1 machine of --nnodes 1:1"
    # No word of other machines, of which there are none.
    assert [line for line in result.stderr.splitlines() if line.startswith("launcher: ")] == [
        f"launcher: {said}"
    ]
    assert list((tmp_path / "temporary").glob("*elastic*")) == []
    assert list((tmp_path / "temporary").glob("launch-*")) == []


def is_on_loopback(address_and_port: str) -> bool:
    """True if only this machine can reach an address of /proc/net/tcp."""
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
