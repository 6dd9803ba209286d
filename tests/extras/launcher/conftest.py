"""Ranks that meet and do no more."""

from __future__ import annotations

from pathlib import Path

import pytest

# Ranks that meet, wait for the file "go", and then tell each other something.
RANKS = """
import sys, time
from pathlib import Path
import example
from recsuite.config.config import Config
from recsuite.runtime.process import all_gather_object
from recsuite.runtime.process import cleanup_runtime, init_runtime
from recsuite.tools import script
folder = Path({folder!r})

def run(config, given, *others):
    context = init_runtime(config)
    print("met", context.rank, len(all_gather_object(lambda: 1)))
    while not (folder / "go").exists():
        time.sleep(0.05)
    print("told", all_gather_object(lambda: context.rank))
    cleanup_runtime()

script.run = run
if __name__ == "__main__":
    sys.exit(example.main([]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "meet.py"
    script.write_text(RANKS.format(folder=str(tmp_path)))
    return script
