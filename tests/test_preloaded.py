"""A Python that is forked from one that has imported is what one is that was started."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.launch import LAUNCHER, PATIENCE, ROOT, cores, free_port, run_command, started, succeeded
from tests.support.starting import REAL_WORKERS

# Before anything of the project's is imported, and with nothing but what Python has imported by itself.
TELL = """
import builtins, json, os, signal, sys, tempfile, threading
from pathlib import Path
own = Path("/proc/self")
print("unbuffered" if sys.stdout.write_through else "buffered", file=sys.stderr)
print(json.dumps({
    "argv": sys.argv,
    "main": [__name__, __file__, sys.modules["__main__"].__file__],
    "folder": os.getcwd(),
    "temporary": tempfile.gettempdir(),
    "env": dict(os.environ),
    "path": sys.path,
    "input": sys.stdin.read(),
    "leads a session": os.getsid(0) == os.getpid(),
    "parent": os.getppid(),
    "handlers": {number.name: str(signal.getsignal(number)) for number in signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "files": sorted(os.listdir("/proc/self/fd")),
    "project": sorted(name for name in sys.modules if name.split(".")[0] in ("tests", "example")),
    "threads": threading.active_count(),
    "cores": sorted(os.sched_getaffinity(0)),
    "print": str(builtins.print),
    "streams": [[file.fileno(), file.line_buffering, file.errors] for file in (sys.stdout, sys.stderr)],
    "command": [word for word in (own / "cmdline").read_text().split("\\0") if word],
    "shown": sorted(word for word in (own / "environ").read_text().split("\\0") if word),
}))
"""
END = """
import atexit, sys, threading, time
atexit.register(print, "left")
threading.Thread(target=lambda: (time.sleep(0.05), print("waited"))).start()
{end}
"""
# In one write: two processes share the pipe.
CHILD = """
import os
os.write(1, f"{os.getppid()} {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n".encode())
"""
# With arguments of another kind than those of the library: it has not been compiled before.
COMPILE = """
import numpy as np
from recsuite.models.loops import multiply_biased
vectors, numbers = np.zeros((1, 2), "float64"), np.zeros(1, "float64")
print(any(str(kind).count("float64") == 5 for kind in multiply_biased.signatures))
multiply_biased(vectors, vectors, numbers, vectors, numbers)
"""
CHANGE = """
import subprocess, sys
from recsuite.config import config
if len(sys.argv) == 1:
    config.Config, config.added = type("NEW", (config.Config,), {}), True
    config.sections()
    print("changed", config.Config.__name__, config.sections.cache_info().currsize, flush=True)
    subprocess.run([sys.executable, __file__, "child"], check=True)
else:
    assert not hasattr(config, "added")
    print("child", config.Config.__name__, config.sections.cache_info().currsize)
"""

WORKERS = """
import multiprocessing, os, sys
def work(parent, to):
    to.send(f"{'child' if os.getppid() == parent else 'no child'} of its starter, {'torch' in sys.modules}")
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=work, args=(os.getpid(), theirs))
        process.start()
        print(ours.recv())
        process.join()
        assert process.exitcode == 0
"""


def listen_to_ctrl_c() -> None:
    # What a shell starts in the background does not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def told(tmp_path: Path, *before: str, real: bool, **options: Any) -> dict[str, Any]:
    """Properties of the process of a script."""
    script = tmp_path / "tell.py"
    script.write_text(TELL)
    given = tmp_path / "given"
    given.write_text("some words")
    paths = f"{tmp_path}/first{os.pathsep}{tmp_path}/second"
    env = {"PYTHONPATH": paths, "TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "", "A_VARIABLE": "x=y\nz"}
    command = [sys.executable, *before, str(script), "--flag", "an argument"]
    options |= {"preexec_fn": listen_to_ctrl_c, "real": real}
    with given.open() as stdin:
        result = run_command(command, env=env, cwd=tmp_path, stdin=stdin, **options)
    found: dict[str, Any] = json.loads(succeeded(result))
    return {**found, "unbuffered": result.stderr == "unbuffered\n"}


@pytest.mark.parametrize("before", [[], ["-u"]])
@pytest.mark.parametrize("new_session", [False, True])
def test_a_fork_equals_a_started_python(tmp_path: Path, before: list[str], new_session: bool) -> None:
    real, fork = (told(tmp_path, *before, real=real, start_new_session=new_session) for real in (True, False))
    assert fork == real
    assert fork["parent"] == os.getpid()
    assert fork["project"] == []
    assert fork["leads a session"] == new_session
    assert fork["unbuffered"] == bool(before)
    # The script's folder, what the test gives, and what this Python has anyway.
    own, *given = fork["path"][:4]
    assert [own, *given] == [str(tmp_path), str(ROOT), f"{tmp_path}/first", f"{tmp_path}/second"]


def test_a_fork_may_use_the_cores_that_its_parent_may(tmp_path: Path) -> None:
    with cores(1):
        found = told(tmp_path, real=False)
    assert found["cores"] == [min(os.sched_getaffinity(0))]


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit()", 0),
        ("sys.exit(3)", 3),
        ("sys.exit(-1)", 255),
        ("sys.exit('a reason')", 1),
        ("raise ValueError('a fault')", 1),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import os; os._exit(5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_fork_ends_as_a_python_ends_that_was_started(tmp_path: Path, end: str, status: int) -> None:
    script = tmp_path / "end.py"
    script.write_text(END.format(end=end))
    real, fork = (run_command([sys.executable, str(script)], real=real) for real in (True, False))
    assert fork.returncode == real.returncode == status
    assert fork.stdout == real.stdout
    assert fork.stderr.splitlines()[-1:] == real.stderr.splitlines()[-1:]


def test_a_fork_obeys_signals_and_is_waited_for_like_any_child(tmp_path: Path) -> None:
    script = tmp_path / "wait.py"
    script.write_text("import time; print('here', flush=True); time.sleep(60)")
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        with started([sys.executable, str(script)]) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "here\n"
            process.send_signal(number)
            assert process.wait(10 * PATIENCE) == -number


@pytest.mark.parametrize("launcher", [LAUNCHER, ("-m", "torch.distributed.run")])
def test_the_ranks_of_a_forked_launcher_are_its_children(tmp_path: Path, launcher: tuple[str, str]) -> None:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    where = [f"--rdzv_endpoint=localhost:{free_port()}", "--nproc_per_node=2"]
    with started([sys.executable, "-u", *launcher, *where, str(script)]) as process:
        output, errors = process.communicate(timeout=300)
    assert sorted(output.splitlines()) == [f"{process.pid} {rank} 2" for rank in (0, 1)], errors


def test_a_fork_has_the_project_as_an_import_leaves_it(tmp_path: Path) -> None:
    script = tmp_path / "change.py"
    script.write_text(CHANGE)
    output = succeeded(run_command([sys.executable, str(script)]))
    assert output.splitlines() == ["changed NEW 1", "child Config 0"]


def test_a_fork_has_the_loops_that_another_one_compiled(tmp_path: Path) -> None:
    script = tmp_path / "compile.py"
    script.write_text(COMPILE)
    # The first one leaves the code on disk, where an earlier run of this test may have left it.
    outputs = [succeeded(run_command([sys.executable, str(script)])) for _ in range(2)]
    assert outputs[1] == "True\n"


def test_a_copy_of_the_project_that_comes_first_is_the_one_that_a_fork_imports(tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "recsuite"
    copy.mkdir(parents=True)
    (copy / "__init__.py").touch()
    script = tmp_path / "show.py"
    script.write_text("import sys, recsuite; print(recsuite.__file__, 'recsuite.config' in sys.modules)")
    output = succeeded(run_command([sys.executable, str(script)], env={"PYTHONPATH": str(copy.parent)}))
    assert output.split() == [str(copy / "__init__.py"), "False"]


@pytest.mark.parametrize("env", [{}, REAL_WORKERS])
def test_the_workers_of_a_fork_are_forks_unless_a_test_wants_real_ones(
    tmp_path: Path, env: dict[str, str]
) -> None:
    script = tmp_path / "workers.py"
    script.write_text(WORKERS)
    output = succeeded(run_command([sys.executable, str(script)], env=env))
    # "True" where torch is there before the worker has imported anything.
    assert output.splitlines() == [f"child of its starter, {env == {}}"] * 2
