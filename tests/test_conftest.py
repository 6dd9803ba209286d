"""Tests run where not everything is installed, see the GPUs that they are given, and end when they hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.launch import GPUS, NO_GPUS, ROOT, SUPPORT, python

PYTEST = SUPPORT / "run_pytest.py"
WANTED = "GPUS_THAT_A_TEST_WANTS"


@pytest.mark.skipif(WANTED not in os.environ, reason="for the tests that the next one starts")
def test_only_launched_processes_see_gpus() -> None:
    assert os.environ.items() >= NO_GPUS.items()
    assert GPUS["CUDA_VISIBLE_DEVICES"] == os.environ[WANTED]


@pytest.mark.parametrize("without", [("xdist", "instafail", "timeout"), ("instafail",)])
def test_plugins_may_be_missing_and_every_process_has_the_gpus(without: tuple[str, ...]) -> None:
    # As somebody starts them, who has not run tests before.
    env = {name: value for name, value in os.environ.items() if name != "GPUS_FOR_TESTS"}
    env |= {"CUDA_VISIBLE_DEVICES": "5", WANTED: "5"}
    plugins = [word for plugin in without for word in ("-p", f"no:{plugin}")]
    # One process is enough.
    plugins += [] if "xdist" in without else ["-n", "1"]
    command = [sys.executable, str(PYTEST), *plugins, "-q", __file__, "-k", "only_launched_processes"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1000)
    assert "1 passed" in result.stdout, result.stdout + result.stderr


def test_a_run_without_all_or_a_path_is_of_the_core_and_names_the_rest() -> None:
    words = ("-n", "0", "-q", "--collect-only", "-o", "testpaths=tests/docs")
    core, everything = (python(PYTEST, *words, *flags).stdout for flags in ((), ("--all",)))
    for name in (
        "tests/docs/test_deploy.py::",
        "test_commands.py::test_a_command_gives_the_documented_output[python example/ray_train.py",
    ):
        assert (name in core, name in everything) == (False, True)
    assert ("docs/test_deploy.py" in core, "Not run without --all" in everything) == (True, False)


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        (("test_ranks_on_gpus.py", "-k", "killed"), 0, "1, 2 and 3 ranks on the CPU over gloo: 1 passed"),
        # All of them are skipped.
        (("test_devices.py", "-m", "gpu"), 1, "no ranks: 0 passed"),
    ],
)
def test_smoke_names_ranks_and_backend_and_fails_if_nothing_passed(
    words: tuple[str, ...], status: int, line: str
) -> None:
    folder = ROOT / "tests" / "training"
    result = python(PYTEST, "--smoke", "-n", "0", "-q", folder / words[0], *words[1:], env=NO_GPUS)
    assert result.returncode == status, result.stdout
    assert result.stdout.splitlines()[-1].startswith(f"smoke: {line}, ")


@pytest.mark.skipif(WANTED not in os.environ, reason="for the test of a run that hangs")
def test_that_hangs() -> None:
    # Longer than the run that starts it may take; only a signal that cannot be ignored ends it sooner.
    subprocess.run(["sh", "-c", "trap '' TERM INT; sleep 120 & wait"], check=True)


def test_ci_ends_when_a_test_hangs_and_names_it(tmp_path: Path) -> None:
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    hanging = f"{sys.executable} -m pytest -n 1 -q {__file__} -k test_that_hangs"
    script = tmp_path / "run.sh"
    script.write_text(f'#!/bin/sh\n[ "$1" != test ] || {{ cd {ROOT} && exec {hanging}; }}\n')
    script.chmod(0o755)
    env = os.environ | {WANTED: "", "CI_DEADLINE": "30"}
    start = time.monotonic()
    result = subprocess.run(
        ["bash", ".ci/run"],
        cwd=tmp_path,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert result.returncode == 137
    assert time.monotonic() - start < 90
    assert "these tests had not ended:\ntests/test_conftest.py::test_that_hangs" in result.stderr
