"""The other ranks: a rank shows that it is alive, and checks which of the others still answer.

A failed collective reports only a timeout or a lost address, and each of many ranks may name another one.
Here a rank asks all others directly.

The waits of a training have --timeout as their deadline. But while data are prepared or a checkpoint is
written a rank may wait for hours, and some calls into libraries have no deadline at all. A thread ends a rank
that waits there for a stopped process or for an unreachable machine.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import itertools
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from recsuite.errors import LostPeerError, with_script_name
from recsuite.runtime.host import stat_fields

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def leave_for_torchrun(message: str, text: str, is_said: bool = False) -> None:
    """Write a message and its explanation for torchrun; without torchrun do nothing.

    is_said: true if the rank has printed it all in a sentence, which a report would only repeat.
    """
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file:
        details = {"py_callstack": text, "timestamp": str(int(time.time())), "is_said": is_said}
        # Renamed into place, because torchrun ends with a traceback if it finds half a file.
        aside = Path(f"{error_file}.{threading.get_ident()}")
        with contextlib.suppress(OSError):
            aside.write_text(json.dumps({"message": {"message": message, "extraInfo": details}}))
            aside.replace(error_file)


def is_said(message: Any) -> bool:
    """True if the rank has printed the message that torchrun found in its file."""
    return isinstance(message, dict) and bool(message.get("extraInfo", {}).get("is_said"))


# Seconds in which a live rank answers, on a busy machine and a slow network.
ANSWER_SECONDS = 3.0
# Number of ranks asked at the same time.
AT_ONCE = 64
# Request to Linux for the address of an interface.
SIOCGIFADDR = 0x8915
UNREACHABLE, ENDED, SILENT = "cannot be reached", "has ended", "does not answer"
ALL_ANSWER = "all other ranks answer, and one is late"
PLURAL = {UNREACHABLE: UNREACHABLE, ENDED: "have ended", SILENT: "do not answer"}


@dataclass(frozen=True)
class RemoteRank:
    """A rank, the name of its machine, and the address where it answers."""

    rank: int
    host: str
    address: str
    port: int

    def fault(self) -> str:
        """Return the fault of this rank; "" if it answers."""
        # A loopback address is of no use to another machine.
        is_elsewhere = self.host != socket.gethostname() and ipaddress.ip_address(self.address).is_loopback
        try:
            where = (self.host if is_elsewhere else self.address, self.port)
            connection = socket.create_connection(where, ANSWER_SECONDS)
        except ConnectionRefusedError:
            return ENDED
        except OSError:
            return UNREACHABLE
        with connection:
            # The kernel accepts connections for a stopped process; only an answer shows that it runs.
            try:
                return "" if connection.recv(1) else ENDED
            except TimeoutError:
                return SILENT
            except OSError:
                return ENDED


class Peers:
    """Connections from one rank to all others, which it answers until it is closed.

    Waits for all of them. store: the store of this attempt's ranks alone; master: the name of the machine
    that all can reach; spans_machines: true if they are on several. Collective: every rank.

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
        # Other machines cannot reach a loopback address of this one.
        bound = "" if spans_machines and ipaddress.ip_address(address).is_loopback else address
        # The kernel chooses the port; the others find it in the store.
        # All others may ask at once, and a stopped rank accepts none of them.
        self._server = socket.create_server((bound, 0), family=family, backlog=max(128, world_size))
        threading.Thread(target=self._answer, name="answers", daemon=True).start()
        self.mine = RemoteRank(rank, socket.gethostname(), address, self._server.getsockname()[1])
        self.others = self._meet(store, world_size, deadline)

    def fault(self) -> str:
        """Return the ranks that do not answer, and their machines. Takes some seconds. Not collective."""
        # In parallel, because each silent rank takes the full three seconds.
        with ThreadPoolExecutor(AT_ONCE) as pool:
            faults = pool.map(RemoteRank.fault, self.others)
            asked = zip(self.others, faults, strict=True)
            lost = [(peer.host, fault, peer.rank) for peer, fault in asked if fault]
        if not lost:
            return ALL_ANSWER
        texts = []
        for (host, fault), group in itertools.groupby(sorted(lost), lambda entry: entry[:2]):
            ranks = [rank for *_, rank in group]
            texts.append(f"{_named(ranks)} on {host} {fault if len(ranks) == 1 else PLURAL[fault]}")
        return f"{'; '.join(texts)}; seen by rank {self.mine.rank} on {self.mine.host}"

    def interface(self) -> str:
        """Return the network interface by which ranks on other machines reach this one, or "".

        It is needed if this machine's name resolves to its loopback address, as Debian installs it: gloo
        would give that address to the others.
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
        """Stop answering."""
        # Only this wakes the thread.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _meet(self, store: dist.Store, world_size: int, deadline: float) -> list[RemoteRank]:
        mine = self.mine
        store.set(f"peer/{mine.rank}", json.dumps([mine.host, mine.address, mine.port]))
        keys = [f"peer/{rank}" for rank in range(world_size)]
        seconds = max(1.0, deadline - time.monotonic())
        try:
            store.wait(keys, timedelta(seconds=seconds))
        except RuntimeError as error:
            missing = [0]
            # The store itself may be lost; it is with rank 0, or with its launcher.
            with contextlib.suppress(RuntimeError):
                missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise LostPeerError(
                f"{_named(missing)} of {world_size} did not connect: rank {mine.rank} on {mine.host} waited "
                f"{seconds:.0f} s"
            ) from error
        peers = [RemoteRank(rank, *json.loads(address)) for rank, address in enumerate(map(store.get, keys))]
        return [peer for peer in peers if peer.rank != mine.rank]

    def _answer(self) -> None:
        # Ends when the server is closed.
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._server.accept()
                with connection, contextlib.suppress(OSError):
                    # Any byte will do: it shows that a thread of this process runs.
                    connection.send(b"!")


def _own_address(master: str) -> tuple[socket.AddressFamily, str]:
    """Return the address from which this machine reaches another one, without sending anything."""
    error = OSError(f"{master} has no address")
    for family, *_, where in socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # For datagrams this makes the kernel choose a route, and with it an address of this machine.
            try:
                probe.connect(where)
                return family, probe.getsockname()[0]
            except OSError as failure:
                error = failure
    raise error


def _interface_of(address: str) -> str:
    """Return the name of the interface with an IPv4 address; "" if the system does not tell it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            # An interface without an address has no answer.
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asked, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


BEAT_SECONDS = 0.5
# Seconds between the checks of a rank that waits to leave.
LEAVING_SECONDS = 0.02
# Added to --timeout, so that a wait that ends in time is not cut off.
MARGIN_SECONDS = 0.5
# Added to --timeout, for calls that wait for the slowest rank and then do some work.
CALL_SECONDS = 2.0
# A pipe takes this many bytes in one write, without a reader.
LONGEST_TEXT = 4096


class Heartbeat:
    """Thread of one rank that checks the others.

    A lost peer is not a silent one: the launcher ends the ranks of its machine, and connections to other
    machines break. A rank that does not wait for a lost peer may continue for `timeout` seconds.

    timeout: seconds for which a process may be silent; advice: returns what to do when a rank is lost.
    """

    def __init__(self, timeout: float, local_rank: int, advice: Callable[[], str] = str) -> None:
        self.timeout = timeout
        self.advice = advice
        self.local_rank = local_rank
        # Only a launcher like torchrun. Another parent, such as a shell, may end or be stopped.
        self._launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else 0
        self._stopped_since: float | None = None
        self._call: tuple[float, str] | None = None
        # Finds which rank is silent.
        self.peers: Peers | None = None
        self._fault = ""
        # Time at which a connection to some rank broke.
        self._gone_since: float | None = None
        self._group: Any = None
        # The current collective, and its start time.
        self._round: tuple[torch.Tensor, Any, float] | None = None
        self._is_leaving = False
        self._over = threading.Event()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def within(self, doing: str) -> Iterator[None]:
        """End this process if the block takes much longer than --timeout."""
        self._call = time.monotonic() + self.timeout + CALL_SECONDS, doing
        try:
            yield
        finally:
            # An exception gets the time to be reported.
            self._call = None

    def begin(self) -> None:
        """Show the other ranks from now on that this one is alive. Collective: every rank."""
        import torch.distributed as dist

        # This thread reports a timeout, not gloo.
        deadline = timedelta(seconds=self.timeout + 20 * MARGIN_SECONDS)
        self._group = dist.new_group(backend="gloo", timeout=deadline)

    def fault(self) -> str:
        """Return the ranks that do not answer, and their machines, as known or asked now. Takes seconds."""
        return self._fault or (self.peers.fault() if self.peers else "")

    def leave(self) -> None:
        """Wait without a deadline until every rank is here or one is gone. Collective: every rank."""
        # The next round tells the others. The thread checks more often from now on, so that the end is
        # quick.
        self._is_leaving = True
        if self._group is not None:
            self._over.wait()

    def stop(self) -> None:
        """End the thread; safe to call twice."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._end.wait(LEAVING_SECONDS if self._is_leaving else BEAT_SECONDS):
                self._look_at_launcher()
                # A copy: the main thread may end the block in between.
                call = self._call
                if call is not None and time.monotonic() > call[0]:
                    self._die(f"{call[1]} took longer than --timeout {self.timeout:.0f}")
                gone = self._gone_since
                if gone is not None and time.monotonic() - gone > self.timeout:
                    # No other process may end it: launchers of several machines do not.
                    fault = self.fault()
                    self._end_without(
                        fault, f"this rank continued alone for --timeout {self.timeout:.0f} seconds: {fault}"
                    )
                if not self._over.is_set() and self._group is not None and not self._beat():
                    self._over.set()
        finally:
            # However this thread ends, no code may wait for it.
            self._over.set()

    def _beat(self) -> bool:
        """Check the current round of all ranks; return true if another round follows."""
        import torch
        import torch.distributed as dist

        if self._round is not None:
            all_leave, work, begin = self._round
            # Polled, not waited for: a thread that waits in gloo could check neither the launcher nor the
            # clock.
            if not work.is_completed():
                self._look_at_silence(time.monotonic() - begin)
                return True
            self._fault = ""
            try:
                work.wait()
            except RuntimeError:
                # A rank is gone. This one may continue with work that needs no other rank; see the class.
                self._gone_since = time.monotonic()
                return False
            if all_leave.item():
                return False
        all_leave = torch.tensor(int(self._is_leaving))
        # The minimum over ranks: 1 only when every rank is leaving.
        work = dist.all_reduce(all_leave, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._round = (all_leave, work, time.monotonic())
        return True

    def _look_at_silence(self, seconds: float) -> None:
        """Find the silent ranks while time is left, because that takes seconds; end when there is none."""
        if not self._fault and seconds > max(self.timeout - ANSWER_SECONDS, self.timeout / 2):
            self._fault = self.peers.fault() if self.peers else "a process was stopped"
        # Else the main thread has found the fault itself, and reports where it waited.
        is_here = not self._end.is_set()
        if self._fault and seconds > self.timeout + MARGIN_SECONDS and is_here:
            self._end_without(self._fault, in_silence(self._fault, self.timeout))

    def _look_at_launcher(self) -> None:
        """End a launcher that was stopped for too long: nothing else would."""
        if not self._launcher:
            return
        now = time.monotonic()
        if state_of(self._launcher) != "T":
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or now
        # The first rank prints, and ends all ranks of the machine; another one does only if that one cannot.
        late = 0.0 if self.local_rank == 0 else CALL_SECONDS
        if now - self._stopped_since > self.timeout + late:
            _say(f"the launcher was stopped for --timeout {self.timeout:.0f} seconds; ending it")
            # The kernel ends its ranks with it.
            os.kill(self._launcher, signal.SIGKILL)

    def _end_without(self, fault: str, sentence: str) -> NoReturn:
        """End because of lost ranks, with a sentence if it is known which they are."""
        if self.peers is None or fault == ALL_ANSWER:
            self._die(sentence)
        sentence = f"{sentence}. {self.advice()}"
        # The launcher ends the others meanwhile, and each would print the same.
        time.sleep(0.0 if self.local_rank == 0 else CALL_SECONDS)
        _say(sentence)
        leave_for_torchrun(sentence, sentence, is_said=True)
        os._exit(1)

    def _die(self, sentence: str) -> NoReturn:
        # The stack of the main thread, which cannot print it: it waits inside a library.
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame))
        leave_for_torchrun(sentence, stack)
        _say(sentence, f"Ending this rank, which waits here:\n{stack}")
        os._exit(1)


def in_silence(fault: str, timeout: float) -> str:
    """Return the message on ranks that did not answer before the timeout."""
    return f"a rank has not responded for --timeout {timeout:.0f} seconds: {fault}"


def state_of(pid: int) -> str:
    """Return the kernel's letter for the state of a process; "" if unavailable."""
    return next(iter(stat_fields(pid)), "")


def _say(sentence: str, explanation: str = "") -> None:
    """Write past Python's streams, which the main thread may have locked; skip it if nothing reads it."""
    text = f"{explanation}{with_script_name(sentence)}\n"
    if select.select([], [2], [], 0)[1]:
        os.write(2, text.encode()[-LONGEST_TEXT:])
