"""Turn a fork of a process that has imported into the program of a command.

Its arguments, environment, folder, files and session are the command's, the project's modules are as an
import leaves them, and what it starts in turn is forked from it in the same way, so that a launcher is the
parent of its ranks as always.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.machinery
import io
import itertools
import logging
import multiprocessing.forkserver
import multiprocessing.process
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import pkgutil
import runpy
import signal
import sys
import tempfile
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from numba.core.caching import IndexDataCacheFile
from numba.core.dispatcher import Dispatcher

import recsuite
from tests.support.starting import FORK, PREEXEC, REAL_WORKERS, spawn, start, words_of

IMPORTED = ("pandas", "torch", "torch.distributed.run", "torch.utils.data", "torchrec", "fbgemm_gpu")


@contextlib.contextmanager
def imported() -> Iterator[Fresh]:
    """Import what takes long; forks of this process become programs."""
    for name in (*IMPORTED, *_modules_of_project()):
        importlib.import_module(name)
    # The first call of a compiled loop takes numba half a second.
    loops: Any = importlib.import_module("recsuite.datasets.preparation.loops")
    loops.grouped(importlib.import_module("numpy").zeros(1, "int32"), 1)
    # For the time of a signal, Arrow keeps a pipe, which a fork that closes what it has inherited would lack.
    importlib.import_module("pyarrow").enable_signal_handlers(False)
    # torch's own seeks the module of each call among all that are imported: half a second in each launcher.
    rendezvous: Any = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    rendezvous.get_method_name = _name_of_caller
    # Ranks that wait for each other leave the cores to the tests beside them.
    exchange: Any = importlib.import_module("recsuite.sharding.exchange")
    exchange.SPIN_SECONDS, exchange.NAP_SECONDS = 0, 0.002
    # Or each fork would copy all that was imported, page by page, as its collector marks what is there.
    gc.freeze()
    # The project's modules are compiled once for all forks, wherever else Python would keep them.
    with tempfile.TemporaryDirectory(prefix="bytecode-") as bytecode:
        yield Fresh(bytecode)


def _modules_of_project() -> list[str]:
    found = pkgutil.walk_packages(recsuite.__path__, "recsuite.")
    return [module.name for module in found if not module.name.endswith(".__main__")]


def _name_of_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name


class Fresh:
    """State of a Python after its imports, which a fork restores before it becomes a program of its own."""

    def __init__(self, bytecode: str) -> None:
        # What only this process has in front of what every Python has.
        own = {sys.path[0], *os.environ.get("PYTHONPATH", "").split(os.pathsep)}
        self._bytecode = bytecode
        self._paths = [path for path in sys.path if path not in own]
        self._print = builtins.print
        self._filters = list(warnings.filters)
        self._loggers = {logger: _state_of(logger) for logger in _loggers()}
        found = {name: module for name, module in sys.modules.items() if name.startswith("recsuite")}
        self._project = {name: (module, dict(vars(module))) for name, module in found.items()}
        values = [value for module in found.values() for value in vars(module).values()]
        self._caches = {value for value in values if isinstance(value, functools._lru_cache_wrapper)}
        loops: Iterator[Any] = (value for value in values if isinstance(value, Dispatcher))
        self._loops = {loop for loop in loops if loop._cache.cache_path}
        self._loaded: set[Path] = set()

    def load_loops(self) -> None:
        """Load the machine code of compiled loops that is new on disk: each rank would take 0.3 seconds."""
        for loop in self._loops:
            cache = loop._cache
            for index in Path(cache.cache_path).glob(f"{cache._impl.filename_base}.*.nbi"):
                if index not in self._loaded:
                    self._loaded.add(index)
                    stamp = cache._impl.locator.get_source_stamp()
                    for arguments, *_ in IndexDataCacheFile(
                        cache.cache_path, index.stem, stamp
                    )._load_index():
                        loop.compile(arguments)

    def become(self, command: list[str], **request: Any) -> NoReturn:
        """Be what a command says, to its end."""
        try:
            self._begin(command, **request)
        except BaseException:
            # Who forked is not to be there twice.
            traceback.print_exc()
            os._exit(1)
        _end_with(functools.partial(self._run, words_of(command)))

    def _begin(
        self,
        command: list[str],
        folder: str,
        env: Mapping[str, str],
        new_session: bool,
        cores: list[int],
        files: list[int],
        kept: Sequence[int] = (),
    ) -> None:
        if new_session:
            os.setsid()
        os.sched_setaffinity(0, cores)
        _take(files, kept, buffered="-u" not in command[:2] and not env.get("PYTHONUNBUFFERED"))
        os.chdir(folder)
        # What a spawned worker finds the script by.
        multiprocessing.process.ORIGINAL_DIR = folder  # type: ignore[attr-defined]
        os.environ.clear()
        os.environ.update(env)
        _show(command, env)
        self._mask_ids()
        sys.dont_write_bytecode, sys.pycache_prefix = False, self._bytecode
        # What it starts in turn.
        setattr(*FORK, self._start)
        if not env.keys() >= REAL_WORKERS.keys():
            multiprocessing.util.spawnv_passfds = functools.partial(spawn, self._fork)

    def _start(self, *arguments: Any) -> int:
        return start(functools.partial(self._fork, prepare=arguments[PREEXEC]), *arguments)

    def _fork(
        self,
        request: dict[str, Any],
        files: list[int],
        kept: Sequence[int] = (),
        prepare: Callable[[], None] | None = None,
    ) -> int:
        # The handlers of who forks are not for signals to the new process, which has none until it is told.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        pid = os.fork()
        if pid == 0:
            if prepare is not None:
                prepare()
            self.become(**request, files=files, kept=kept)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return pid

    def _mask_ids(self) -> None:
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
        if "-c" in words[:-1]:
            self._run_code(*words[words.index("-c") + 1 :])
            return
        added = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        is_module = words[0] == "-m"
        first = os.getcwd() if is_module else str(Path(words[0]).parent.absolute())
        sys.path[:] = [first, *filter(None, added), *self._paths]
        sys.argv[:] = words[is_module:]
        self._renew_project()
        if is_module:
            run_module(words[1])
        else:
            runpy.run_path(words[0], run_name="__main__")

    def _run_code(self, code: str, *arguments: str) -> None:
        """Run the code by which `multiprocessing` starts a process; the path comes from the parent."""
        self._renew_project()
        sys.argv[:] = ["-c", *arguments]
        sys.modules["__main__"] = main = types.ModuleType("__main__")
        exec(code, vars(main))

    def _renew_project(self) -> None:
        """Have the project's modules be as an import leaves them; where another copy comes first, unknown."""
        for name in list(filter(_is_of_project, sys.modules)):
            del sys.modules[name]
        # Folders that were not there when they were last looked for may be there now.
        importlib.invalidate_caches()
        found = importlib.machinery.PathFinder.find_spec("recsuite", sys.path)
        if found is None or found.origin != self._project["recsuite"][0].__file__:
            return
        for name, (module, variables) in self._project.items():
            vars(module).clear()
            vars(module).update(variables)
            sys.modules[name] = module
        for cache in self._caches:
            cache.cache_clear()


def run_module(name: str) -> None:
    """Run a module as `python -m` does, also one that has been imported."""
    # Python warns of one that will be there twice.
    if not hasattr(sys.modules.get(name), "__path__"):
        sys.modules.pop(name, None)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _is_of_project(name: str) -> bool:
    return name.partition(".")[0] in ("recsuite", "tests", "benchmarks", "example")


def _take(files: list[int], kept: Sequence[int], buffered: bool) -> None:
    """Make files the standard ones, and close all others that are not to be kept."""
    copies = [os.dup(file) for file in files]
    for number, copy in enumerate(copies):
        os.dup2(copy, number)
    for before, after in itertools.pairwise([2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]):
        os.closerange(before + 1, after)
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
