"""Scripts that start trainings, ended by a signal."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.launch import started, wait_for

# A training that ends after one signal; at a second one it would end at once.
TRAINING = """
import os, signal, sys, time
from pathlib import Path

def end(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(0.3)
    Path(sys.argv[1], "checkpoint").write_text("")
    raise SystemExit(128 + number)

signal.signal(signal.SIGTERM, end)
# In one step, as the script looks for it.
Path(sys.argv[1], "new").write_text(str(os.getpid()))
Path(sys.argv[1], "new").rename(Path(sys.argv[1], "training"))
time.sleep(60)
"""
SCRIPT = """
import sys, time
from recsuite.tools.script import exit_status, run_script
from recsuite.extras.trainings import started, working_folder

def work():
    with working_folder("told-to-end-") as folder, started({"training": ["-c", TRAINING, folder.parent]}):
        while not (folder.parent / "training").exists():
            time.sleep(0.01)
        print("began", flush=True)
        time.sleep(60)

run_script(lambda: exit_status(work))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_script_that_a_signal_ends_leaves_a_checkpoint_and_no_folder_or_training(
    number: signal.Signals, tmp_path: Path
) -> None:
    with started(
        [sys.executable, "-c", f"TRAINING = {TRAINING!r}\n{SCRIPT}"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        real=True,
        start_new_session=True,
    ) as process:
        wait_for(process, "began")
        assert any(path.name.startswith("told-to-end-") for path in tmp_path.iterdir())
        # As a terminal does: to all processes of its group.
        os.killpg(process.pid, number)
        process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert {path.name for path in tmp_path.iterdir()} == {"training", "checkpoint"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "training").read_text()), 0)
