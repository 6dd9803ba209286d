"""Sections of benchmarks/gpu.py that run other programs: the tests of a GPU, and a whole run of the example.

gpu_commands.py SETTINGS    a section of benchmarks/gpu.py: "tests", "ranks" or "whole"
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from common import EXAMPLE, ROOT
from gpu_sections import Emit, SectionSettings, run_section

# Marks of the tests of a section.
MARKS = {"tests": "gpu and not multi_gpu", "ranks": "multi_gpu"}
# A line of pytest about one test, and one without a line of its own, whose fixture failed.
OUTCOME = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)")
# NCF's shape (He et al., 2017) with about as many users and items as ml-20m.
RATINGS, SMALL_RATINGS = 20_000_000, 60_000
WHOLE = (
    *("--dataset", "synthetic", "--history", "0", "--embedding_dim", "64"),
    *("--mlp_dims", "256,256,128,64", "--batch_size", "65536", "--epochs", "1", "--dump"),
)
# Last characters of the output of a failed command that are kept.
LAST_CHARACTERS = 1_500


def tests(settings: SectionSettings, emit: Emit) -> None:
    """Section "tests", of one rank on a GPU, or "ranks", of several; emit each outcome when it is known."""
    marked = re.compile(r"\b(multi_)?gpu\b")
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if marked.search(path.read_text())]
    pytest = (
        sys.executable,
        *["-m", "pytest", "-v", "-p", "no:cacheprovider", "-p", "no:xdist", "-m"],
        MARKS[settings.part],
    )
    with subprocess.Popen(
        [*pytest, *map(str, files)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        last = ""
        for line in process.stdout:
            last = (last + line)[-LAST_CHARACTERS:]
            if found := OUTCOME.match(line):
                emit({"test": found[1], "outcome": found[2].lower()})
    emit({"status": process.returncode, **({"output": last} if process.returncode else {})})


def whole(settings: SectionSettings, emit: Emit) -> None:
    """Section "whole": seconds of the parts of a run of one epoch, with its evaluations and a checkpoint."""
    folder = Path(settings.folder)
    flags = ["--data_path", str(folder / "ratings"), "--save_dir", str(folder / "dumps")]
    flags += ["--synthetic_ratings", str(settings.small_or(SMALL_RATINGS, RATINGS))]
    report = folder / "report"
    with tempfile.TemporaryFile("w+") as output:
        result = subprocess.run(
            [sys.executable, str(EXAMPLE), *WHOLE, *flags, "--report_dir", str(report)],
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        output.seek(0)
        if result.returncode != 0:
            raise RuntimeError(f"status {result.returncode}: {output.read()[-LAST_CHARACTERS:]}")
    emit(describe_run(json.loads((report / "metrics.json").read_text())))


def describe_run(found: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of training, evaluation and checkpoints of a run, and the events of each."""
    seconds, data = found["time"], found["data"]
    return {
        "trained": data["num_train"] * len(found["epochs"]),
        # The test predicts the validation events again, for the calibration of probabilities.
        "evaluated": data["num_validation"] * (len(found["epochs"]) + 1) + data["num_test"],
        "seconds": {
            "training": seconds["feed"] + seconds["steps"],
            "evaluation": seconds["evaluation"],
            "checkpoints": seconds["dumps"],
        },
    }


if __name__ == "__main__":
    run_section({"tests": tests, "ranks": tests, "whole": whole})
