"""Whose the other ends of this process's connections are, where all ranks are on one machine.

gloo connects ranks through ports on the loopback address, and takes whoever comes first for the rank that it
waits for. Another user of the machine can come first; what he sends must not be unpickled. The kernel knows
the owner of every connection.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from recsuite.errors import BrokenLaunchError, UserError
from recsuite.runtime.launch import read_launch

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
# How the kernel writes that a socket waits for connections.
LISTENS = "0A"
# A connection that is being opened or closed has no owner for a moment: it is looked at again for a second.
LOOKS = 20
LOOK_SECONDS = 0.05


@dataclass(frozen=True)
class Connection:
    """One end of a connection, or a socket that waits for one; inode: 0 when its process has closed it."""

    local: str
    remote: str
    state: str
    user: int
    inode: int

    @property
    def port(self) -> int:
        """The port of this end."""
        return int(self.local.rpartition(":")[2], 16)


def connections() -> list[Connection]:
    """All TCP sockets of this network namespace; none where the kernel does not tell."""
    found = []
    for table in TABLES:
        with contextlib.suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                fields = line.split()
                found.append(Connection(fields[1], fields[2], fields[3], int(fields[7]), int(fields[9])))
    return found


def own_sockets() -> set[int]:
    """The inodes of the sockets of this process."""
    found = set()
    for descriptor in Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(descriptor))
            found |= {int(match[1])} if match else set()
    return found


class Visitors:
    """Those who came to the ports of this process; each is looked at once."""

    def __init__(self) -> None:
        # Inodes: addresses and ports are used again, an open socket's inode is not.
        self._known: set[int] = set()

    def check(self) -> None:
        """Refuse to continue when one of them is another user. Those that this process went to are where its
        own ranks said that they are.

        Raises:
            UserError: when there is one.
            BrokenLaunchError: when one has gone: what it sent may still be read.
        """
        for _ in range(LOOKS):
            strangers = self._strangers()
            if not strangers:
                return
            for connection, peer in strangers:
                # Root may do all anyway.
                if peer is not None and peer.inode and peer.user not in (0, os.geteuid()):
                    raise UserError(
                        f"User {peer.user} is connected to port {connection.port} of this rank in the place "
                        "of another rank, and nothing that comes from there is believed; find out who"
                        " connects to the ports of this machine, and start again."
                    )
            # The kernel's tables change while they are read.
            time.sleep(LOOK_SECONDS)
        port = strangers[0][0].port
        raise BrokenLaunchError(
            f"a connection came to port {port} of this rank, as from a program that tries ports, and went "
            "before it was known whose it was; nothing that came from there is believed"
        )

    def _strangers(self) -> list[tuple[Connection, Connection | None]]:
        """Connections that nothing good is known of, with their other ends."""
        everyones, mine = connections(), own_sockets()
        ends = {(end.local, end.remote): end for end in everyones}
        own = [end for end in everyones if end.inode in mine]
        ports = {end.port for end in own if end.state == LISTENS}
        strangers = []
        for end in own:
            if end.state != LISTENS and end.port in ports and end.inode not in self._known:
                peer = ends.get((end.remote, end.local))
                if peer is not None and peer.inode and peer.user in (0, os.geteuid()):
                    self._known.add(end.inode)
                else:
                    strangers.append((end, peer))
        return strangers


# Those who came to the ports of this process.
VISITORS = Visitors()


def check_visitors() -> None:
    """Look who the others are, if all are on this machine: what they send is unpickled. Not collective."""
    launch = read_launch()
    # Of an end on another machine the kernel here knows no owner: a network between machines has to be
    # trusted.
    if launch.world_size == launch.local_world_size > 1:
        VISITORS.check()
