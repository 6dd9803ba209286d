"""Running the example as a user does: other processes, a deadline, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "example" / "example.py"
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def run_command(
    command: list[str], *, cwd: Path = ROOT, timeout: float = 120, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of its own; at the deadline all of it is killed and the test fails."""
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        raise AssertionError(f"{command} still ran after {timeout} s:\n{output}\n{errors}") from None
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run this Python with arguments."""
    return run_command([sys.executable, *map(str, arguments)], **options)


def torchrun(num_ranks: int, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Launch a script on several processes of this machine."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return python(*launcher, *arguments, **options)


def succeeded(result: subprocess.CompletedProcess[str]) -> str:
    """The standard output of a command that ended well."""
    assert result.returncode == 0, f"status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def read_json(path: Path) -> Any:
    """What a JSON file holds."""
    return json.loads(path.read_text())
