"""Tests run where not everything is installed, and give what they launch the GPUs of whoever started them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.launch import GPUS, NO_GPUS, ROOT

WANTED = "GPUS_THAT_A_TEST_WANTS"


@pytest.mark.skipif(WANTED not in os.environ, reason="for the tests that the next one starts")
def test_only_what_is_launched_sees_gpus() -> None:
    assert os.environ.items() >= NO_GPUS.items()
    assert GPUS["CUDA_VISIBLE_DEVICES"] == os.environ[WANTED]


@pytest.mark.parametrize("without", [("xdist", "instafail", "timeout"), ("instafail",)])
def test_plugins_may_be_missing_and_every_process_knows_the_gpus(without: tuple[str, ...]) -> None:
    # As somebody starts them, who has not run tests before.
    env = {name: value for name, value in os.environ.items() if name != "GPUS_FOR_TESTS"}
    env |= {"CUDA_VISIBLE_DEVICES": "5", WANTED: "5"}
    plugins = [word for plugin in without for word in ("-p", f"no:{plugin}")]
    # One process is enough.
    plugins += [] if "xdist" in without else ["-n", "1"]
    command = [sys.executable, "-m", "pytest", *plugins, "-q", __file__, "-k", "only_what_is_launched"]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1000)
    assert "1 passed" in result.stdout, result.stdout + result.stderr
