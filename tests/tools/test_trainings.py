"""What a script that starts trainings leaves behind when it is told to end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.launch import started, wait_for

SCRIPT = """
import sys, time
from recsuite.tools.script import exit_status, run_script
from recsuite.tools.trainings import started, working_folder

def work():
    sleeping = {"training": ["-c", "import time; time.sleep(60)"]}
    with working_folder("told-to-end-") as folder, started(sleeping) as begun:
        (folder.parent / "pid").write_text(str(begun["training"].pid))
        print("began", flush=True)
        time.sleep(60)

run_script(lambda: exit_status(work))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_is_told_to_end_leaves_neither_its_folder_nor_a_training(
    number: signal.Signals, tmp_path: Path
) -> None:
    with started([sys.executable, "-c", SCRIPT], env={**os.environ, "TMPDIR": str(tmp_path)}) as process:
        wait_for(process, "began")
        assert sorted(path.name[:12] for path in tmp_path.iterdir()) == ["pid", "told-to-end-"]
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert [path.name for path in tmp_path.iterdir()] == ["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
