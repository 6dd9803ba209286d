"""The other ranks: on which machine each of them is, and which of them answer when something went wrong.

A collective that fails says that time is up, or that some address is gone, and of many ranks each says that
of another one. Here a rank asks all others directly.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from recsuite.errors import LostPeerError

if TYPE_CHECKING:
    import torch.distributed as dist

# What a rank that lives needs to answer, on a busy machine and a slow network.
ANSWER_SECONDS = 3.0
# Asked at the same time.
AT_ONCE = 64
# Asks Linux for the address of an interface.
SIOCGIFADDR = 0x8915
UNREACHABLE, ENDED, SILENT = "cannot be reached", "has ended", "does not answer"
ALL_ANSWER = "all other ranks answer, and one is late"
PLURAL = {UNREACHABLE: UNREACHABLE, ENDED: "have ended", SILENT: "do not answer"}


@dataclass(frozen=True)
class Peer:
    """A rank, the name of its machine, and where it answers."""

    rank: int
    host: str
    address: str
    port: int

    def fault(self) -> str:
        """What is wrong with it; nothing if it answers."""
        # An address of a machine's own loopback says nothing to another machine.
        is_elsewhere = self.host != socket.gethostname() and ipaddress.ip_address(self.address).is_loopback
        try:
            where = (self.host if is_elsewhere else self.address, self.port)
            connection = socket.create_connection(where, ANSWER_SECONDS)
        except ConnectionRefusedError:
            return ENDED
        except OSError:
            return UNREACHABLE
        with connection:
            # The kernel accepts connections for a process that is stopped; only an answer shows that it runs.
            try:
                return "" if connection.recv(1) else ENDED
            except TimeoutError:
                return SILENT
            except OSError:
                return ENDED


class Peers:
    """The ranks of a launch, from the point of view of one of them, which answers until it is closed.

    Waits for all of them. store: where ranks of this attempt alone meet; master: the name of the machine that
    all can reach; spans_machines: whether they are on several. Collective: every rank.

    Raises:
        LostPeerError: when some do not come before the deadline, on the monotonic clock.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        master: str,
        spans_machines: bool,
        deadline: float,
    ) -> None:
        family, address = _own_address(master)
        # Other machines reach no loopback address of this one.
        bound = "" if spans_machines and ipaddress.ip_address(address).is_loopback else address
        # A port that the kernel chooses; the others find it in the store.
        self._server = socket.create_server((bound, 0), family=family, backlog=128)
        threading.Thread(target=self._answer, name="answers", daemon=True).start()
        self.mine = Peer(rank, socket.gethostname(), address, self._server.getsockname()[1])
        self.others = self._meet(store, world_size, deadline)

    def fault(self) -> str:
        """Which of the others do not answer, and on which machines; takes some seconds. Not collective."""
        # At once, because each that is silent takes all of the three seconds.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            faults = pool.map(Peer.fault, self.others)
            asked = zip(self.others, faults, strict=True)
            found = [(peer.host, fault, peer.rank) for peer, fault in asked if fault]
        if not found:
            return ALL_ANSWER
        lost = []
        for (host, fault), group in itertools.groupby(sorted(found), lambda each: each[:2]):
            ranks = [rank for *_, rank in group]
            lost.append(f"{_named(ranks)} on {host} {fault if len(ranks) == 1 else PLURAL[fault]}")
        return f"{'; '.join(lost)}; seen by rank {self.mine.rank} on {self.mine.host}"

    def interface(self) -> str:
        """The network interface by which ranks on other machines reach this one, where this machine takes its
        own name for its loopback, as Debian installs it, and gloo would tell them that; else nothing.
        """
        with contextlib.suppress(OSError):
            if not ipaddress.ip_address(socket.gethostbyname(self.mine.host)).is_loopback:
                return ""
        there = [self.mine, *(peer for peer in self.others if peer.host != self.mine.host)]
        for peer in there:
            if not ipaddress.ip_address(peer.address).is_loopback:
                return _interface_of(_own_address(peer.address)[1])
        return ""

    def close(self) -> None:
        """Answer no more."""
        # Only this wakes the thread.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _meet(self, store: dist.Store, world_size: int, deadline: float) -> list[Peer]:
        mine = self.mine
        store.set(f"peer/{mine.rank}", json.dumps([mine.host, mine.address, mine.port]))
        keys = [f"peer/{rank}" for rank in range(world_size)]
        seconds = max(1.0, deadline - time.monotonic())
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = [0]
            # The store may be what is missing; it is with rank 0, or with its launcher.
            with contextlib.suppress(RuntimeError):
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise LostPeerError(
                f"{_named(missing)} of {world_size} never came: rank {mine.rank} on {mine.host} waited "
                f"{seconds:.0f} s"
            ) from error
        peers = [Peer(rank, *json.loads(told)) for rank, told in enumerate(map(store.get, keys))]
        return [peer for peer in peers if peer.rank != mine.rank]

    def _answer(self) -> None:
        # Ends when the server is closed.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, contextlib.suppress(OSError):
                    # Any byte will do; that a thread of this process ran to send it is the answer.
                    connection.send(b"!")


def _own_address(master: str) -> tuple[socket.AddressFamily, str]:
    """The address with which this machine goes to another one; nothing is sent.

    Raises:
        OSError: when there is no way there.
    """
    error = OSError(f"{master} has no address")
    for family, *_, where in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # For datagrams it makes the kernel choose a route, and with it an address of this machine.
            try:
                probe.connect(where)
                return family, probe.getsockname()[0]
            except OSError as found:
                error = found
    raise error


def _interface_of(address: str) -> str:
    """The name of the interface with an IPv4 address; nothing where the system cannot say."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            # One without an address has no answer.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
