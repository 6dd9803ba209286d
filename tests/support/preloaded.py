"""A Python that has imported torch, TorchRec and FBGEMM, and forks into each Python that a test starts.

    with preloaded():
        process = subprocess.Popen([sys.executable, "example/example.py", "--epochs", "1"])

Those imports take four seconds of a core in every rank, and tests launch hundreds of ranks. So a process that
has done them once becomes, by a fork, what the command says: its arguments, environment, folder, files and
session are the command's, the project's own modules are imported anew, and what it starts in turn is forked
from it in the same way, so that a launcher is the parent of its ranks as always. `Popen` is the ordinary one,
of an ordinary child of this process: only the call of the system that it makes is another. It may run in the
namespaces of another process, as on a machine of `tests/cluster/machines.py`, and stays this one's child.

What a library reads when it is loaded is read before the fork: a test of OMP_NUM_THREADS, TORCH_CPP_LOG_LEVEL
or of a GPU starts a real one.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import importlib
import io
import json
import logging
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
IMPORTED = (
    *("pandas", "torch", "torch.distributed.run", "torch.utils.data", "torchrec", "fbgemm_gpu"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg"),
)
MODULES = ("recsuite.launcher", "torch.distributed.run")
PR_SET_CHILD_SUBREAPER = 36
# In the order to enter them: "user" gives the right to the others, and in "mnt" /proc is another.
SPACES = ("user", "ipc", "uts", "net", "pid", "mnt")
LARGEST_REQUEST = 2**20
# For the command line and the environment that a fork shows others.
ROOM = "." * 20_000
SECONDS = 120


def is_quick(command: Sequence[str]) -> bool:
    """Whether a command starts a Python with a script, or with a module that launches one."""
    words = _words(command)
    is_script = bool(words) and words[0].endswith(".py")
    return command[0] == sys.executable and (is_script or (words[:1] == ["-m"] and words[1] in MODULES))


def _words(command: Sequence[str]) -> Sequence[str]:
    """What follows the Python, and its flag for output without buffers."""
    return command[2:] if command[1:2] == ["-u"] else command[1:]


# --- the process that asks ---


@contextlib.contextmanager
def preloaded(within: int | None = None, library: Path | None = None) -> Iterator[None]:
    """Within this, `Popen` starts scripts of this Python as forks of one that has imported.

    within: a process in whose namespaces they run; library: what LD_PRELOAD in their environment would name.
    """
    ask = functools.partial(_ask, _server(library), within)
    with mock.patch("subprocess._fork_exec", functools.partial(_start, ask)):
        yield


def _start(fork: Callable[..., int], *arguments: Any) -> int:
    """What `Popen` calls to make a process: the process id of the new child.

    arguments: as in `subprocess.py`, of which those up to the session are the same in every Python from 3.10.
    """
    command = [os.fsdecode(word) for word in arguments[0]]
    if not is_quick(command):
        return REAL_FORK(*arguments)
    folder, variables, pipes, new_session = arguments[4], arguments[5], arguments[6:12], arguments[15]
    given = os.environb if variables is None else dict(word.split(b"=", 1) for word in variables)
    files = [pipes[0], pipes[3], pipes[5]]
    request = {
        "command": command,
        "folder": os.fspath(folder or os.getcwd()),
        "env": {os.fsdecode(name): os.fsdecode(value) for name, value in given.items()},
        "new_session": bool(new_session),
        "cores": sorted(os.sched_getaffinity(0)),
    }
    return fork(request, [number if file < 0 else file for number, file in enumerate(files)])


REAL_FORK = subprocess._fork_exec  # type: ignore[attr-defined]


def _ask(connection: socket.socket, within: int | None, request: dict[str, Any], files: list[int]) -> int:
    """Have the server start a process, which is a child of this one."""
    # The orphan that the server makes becomes a child of this process. Other orphans, whom tests look for,
    # go where they always go.
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        message = json.dumps({"parent": os.getpid(), "within": within, **request})
        socket.send_fds(connection, [message.encode()], files)
        assert select.select([connection], [], [], SECONDS)[0], f"no process after {SECONDS} s"
        return int(connection.recv(64))
    finally:
        _prctl(PR_SET_CHILD_SUBREAPER, 0)


@functools.cache
def _server(library: Path | None) -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            # On a busy machine, threads that spin while they wait take the cores from those they wait for.
            "OMP_WAIT_POLICY": "passive",
            "ROOM": ROOM,
            **({"LD_PRELOAD": str(library)} if library else {}),
        }
        subprocess.Popen(
            [sys.executable, "-u", __file__, str(theirs.fileno()), ROOM],
            env=environment,
            pass_fds=[theirs.fileno()],
        )
    assert select.select([ours], [], [], SECONDS)[0], f"nothing imported after {SECONDS} s"
    assert ours.recv(64) == b"ready"
    return ours


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# --- the process that has imported ---


@contextlib.contextmanager
def imported() -> Iterator[Fresh]:
    """Import what takes long; forks of this process become programs."""
    for name in IMPORTED:
        importlib.import_module(name)
    # For the time of a signal, Arrow keeps a pipe, which a fork that closes what it has inherited would lack.
    importlib.import_module("pyarrow").enable_signal_handlers(False)
    # The project's modules are compiled once for all forks, wherever else Python would keep them.
    with tempfile.TemporaryDirectory(prefix="bytecode-") as bytecode:
        yield Fresh(bytecode)


def serve(connection: socket.socket) -> None:
    """Start a process for each request, until who asks is gone."""
    with imported() as fresh:
        connection.send(b"ready")
        while True:
            message, files, *_ = socket.recv_fds(connection, LARGEST_REQUEST, 3)
            if not message:
                return
            connection.send(str(_orphan(json.loads(message), files, fresh)).encode())
            for file in files:
                os.close(file)


def _orphan(request: dict[str, Any], files: list[int], fresh: Fresh) -> int:
    """The process id of a new process, whose parent ends at once."""
    parent, within = request.pop("parent"), request.pop("within")
    reading, writing = os.pipe()
    between = os.fork()
    if between == 0:
        if within is not None:
            _enter(within)
        pid = os.fork()
        if pid == 0:
            # In a namespace of processes a parent outside has the number 0.
            while os.getppid() not in (parent, 0):
                time.sleep(0.0005)
            fresh.become(**request, files=files)
        os.write(writing, str(pid).encode())
        os._exit(0)
    os.waitpid(between, 0)
    pid = int(os.read(reading, 64))
    os.close(reading)
    os.close(writing)
    return pid


def _enter(pid: int) -> None:
    """Have the forks of this process run in the namespaces of another one."""
    paths = [(f"/proc/{pid}/ns/{name}", f"/proc/self/ns/{name}") for name in SPACES]
    files = [os.open(path, os.O_RDONLY) for path, own in paths if not os.path.samefile(path, own)]
    for file in files:
        if ctypes.CDLL(None).setns(file, 0) != 0:
            raise OSError(f"cannot enter a namespace of process {pid}")


class Fresh:
    """What a Python is that has only imported, and how a fork becomes a program of its own."""

    def __init__(self, bytecode: str) -> None:
        own = str(Path(__file__).parent)
        self._bytecode = bytecode
        self._paths = [path for path in sys.path if path != own]
        self._print = builtins.print
        self._filters = list(warnings.filters)
        self._loggers = {logger: _state_of(logger) for logger in _loggers()}

    def become(self, command: list[str], **request: Any) -> NoReturn:
        """Be what a command says, to its end."""
        try:
            self._begin(command, **request)
        except BaseException:
            # Who forked is not to be there twice.
            traceback.print_exc()
            os._exit(1)
        _end_with(functools.partial(self._run, _words(command)))

    def _begin(
        self,
        command: list[str],
        folder: str,
        env: Mapping[str, str],
        new_session: bool,
        cores: list[int],
        files: list[int],
    ) -> None:
        if new_session:
            os.setsid()
        os.sched_setaffinity(0, cores)
        _take(files, buffered="-u" not in command[:2] and not env.get("PYTHONUNBUFFERED"))
        os.chdir(folder)
        # What a spawned worker finds the script by.
        multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(env)
        _show(command, env)
        self._forget()
        sys.dont_write_bytecode, sys.pycache_prefix = False, self._bytecode
        # What it starts in turn; in the children of its own this module is the one that it was.
        subprocess._fork_exec = functools.partial(_start, self._fork)  # type: ignore[attr-defined]

    def _fork(self, request: dict[str, Any], files: list[int]) -> int:
        # The handlers of who forks are not for signals to the new process, which has none until it is told.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            self.become(**request, files=files)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _forget(self) -> None:
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None) or ""
            if name != "__main__" and file.startswith(f"{ROOT}{os.sep}") and ".venv" not in file:
                del sys.modules[name]
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        # Also where a shell has started the tests in the background, which ignore Ctrl-C there.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        builtins.print, sys.excepthook = self._print, sys.__excepthook__
        # It is that of TMPDIR.
        tempfile.tempdir = None
        warnings.filters = list(self._filters)
        for logger in _loggers():
            logger.__dict__.update(self._loggers.get(logger, _state_of(logging.Logger("new"))))
        atexit._clear()
        # What the one that it is forked from has started for its workers is not this one's.
        multiprocessing.resource_tracker._resource_tracker.__init__()  # type: ignore[misc]
        multiprocessing.forkserver._forkserver.__init__()  # type: ignore[misc]

    def _run(self, words: Sequence[str]) -> None:
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if words[0] == "-m":
            sys.path[:] = [os.getcwd(), *filter(None, added), *self._paths]
            sys.argv[:] = words[1:]
            # Imported with torch, it would be run a second time, with a warning.
            sys.modules.pop(words[1], None)
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[:] = [str(Path(words[0]).parent.absolute()), *filter(None, added), *self._paths]
            sys.argv[:] = words
            runpy.run_path(words[0], run_name="__main__")


def _take(files: list[int], buffered: bool) -> None:
    """Make files the standard ones, and close all others."""
    copies = [os.dup(file) for file in files]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = _output(1, buffered, os.isatty(1), sys.stdout.errors)
    sys.stderr = _output(2, buffered, True, sys.stderr.errors)


def _output(number: int, buffered: bool, by_lines: bool, errors: str | None) -> io.TextIOWrapper:
    file: Any = os.fdopen(number, "wb", buffering=-1 if buffered else 0, closefd=False)
    return io.TextIOWrapper(
        file, errors=errors, line_buffering=buffered and by_lines, write_through=not buffered
    )


def _show(command: list[str], env: Mapping[str, str]) -> None:
    """Have others see in /proc what this process is now, by which tests find it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    variables = [f"{name}={value}" for name, value in env.items()]
    # Where the arguments and the environment begin and end, in proc(5) fields 48 to 51.
    for number, words in ((45, command), (47, variables)):
        start, end = int(fields[number]), int(fields[number + 1])
        text = "".join(f"{word}\0" for word in words).encode(errors="surrogateescape")
        assert len(text) < end - start, f"{len(text)} bytes are too many to show"
        ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def _end_with(program: Callable[[], None]) -> NoReturn:
    """Run a program, and end as Python ends after it."""
    status, is_interrupted = 0, False
    try:
        program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status, is_interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _loggers() -> list[logging.Logger]:
    known = logging.Logger.manager.loggerDict.values()
    return [logging.root, *(logger for logger in known if isinstance(logger, logging.Logger))]


def _state_of(logger: logging.Logger) -> dict[str, Any]:
    return {
        "level": logger.level,
        "handlers": list(logger.handlers),
        "filters": list(logger.filters),
        "propagate": logger.propagate,
        "disabled": logger.disabled,
    }


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
