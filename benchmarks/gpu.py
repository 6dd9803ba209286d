"""Measure all that is to be seen on one GPU, in one command of less than nine minutes.

    python benchmarks/gpu.py --report FOLDER            everything; FOLDER/gpu.json grows as figures come
    python benchmarks/gpu.py --only commands steps      some sections
    python benchmarks/gpu.py --small                    the miniature, which a CPU runs too
    python benchmarks/gpu.py --figures gpu.json --write what was measured elsewhere, into the documents

A section is a process of its own with a time of its own: one that fails leaves what went wrong beside what it
found until then, and one that is cut off leaves what it found. Needs no network; 16 GB of memory and 64 GB on
the disk of --folder are used where they are there. Measures; asserts nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from environment import DOCS, describe, finish, make_parser
from gpu_device import Settings
from gpu_runner import Section, run_sections
from gpu_tables import judge, render

from recsuite.files import replace_file

PAGE = DOCS / "performance.md"
MARKS = ("<!-- gpu: made by benchmarks/gpu.py -->", "<!-- end of gpu -->")
# A command that may take ten minutes has to end by itself.
SECONDS = 520.0
# What a section may take to end by itself.
MARGIN = 2.0
# In the order of how much each tells: its script, and seconds.
SECTIONS = {
    "machine": ("gpu_device.py", 60),
    "doctor": ("gpu_commands.py", 40),
    "commands": ("gpu_commands.py", 130),
    "steps": ("gpu_steps.py", 60),
    "training": ("gpu_training.py", 140),
    "ncf": ("gpu_training.py", 45),
    "lookup": ("gpu_lookup.py", 40),
    "disk": ("gpu_disk.py", 90),
}
# Always measured: without it the other figures are of no known device.
FIRST = "machine"


def main() -> None:
    """Measure and show, and write if that is asked for."""
    flags = _parse_flags()
    if flags.figures:
        result = json.loads(flags.figures.read_text())
        result["bars"] = judge(result)
    else:
        result = measure(flags)
    if flags.write and (result["small"] or kind_of(result) != "cuda"):
        sys.exit("gpu.py: these figures are of no GPU or of the miniature, and no document tells of such")
    finish("gpu", result, render(result), flags, page=PAGE, marks=MARKS)


def _parse_flags() -> argparse.Namespace:
    parser = make_parser(__doc__)
    names = [name for name in SECTIONS if name != FIRST]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="these sections alone")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="after which it ends (default: 520)")
    parser.add_argument("--small", action="store_true", help="the miniature: its figures mean nothing")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; the default is that of /tmp")
    parser.add_argument("--figures", type=Path, help="show what is in this JSON, and measure nothing")
    flags = parser.parse_args()
    if flags.write and flags.small:
        parser.error("the figures of --small mean nothing, and --write would put them into the documents")
    if not flags.figures:
        # What was measured elsewhere is in its file already.
        flags.report = flags.report or Path(".")
    return flags


def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run, which lie in the JSON of --report as soon as they are there."""
    end = time.monotonic() + flags.seconds
    result: dict[str, Any] = {**describe(), "small": flags.small, "sections": {}, "bars": []}
    flags.report.mkdir(parents=True, exist_ok=True)
    keep = partial(_keep, result, flags.report / "gpu.json")
    with tempfile.TemporaryDirectory(prefix="gpu-", dir=flags.folder) as folder:
        sections = [_section(name, Path(folder), flags.small) for name in (FIRST, *flags.only)]
        run_sections(sections[:1], flags.seconds, keep)
        if kind_of(result) == "cpu" and not flags.small:
            sys.exit("gpu.py: torch sees no GPU; give --small for the miniature, which a CPU runs too")
        run_sections(sections[1:], end - time.monotonic(), keep)
    return result


def _section(name: str, folder: Path, small: bool) -> Section:
    script, seconds = SECTIONS[name]

    def command(left: float) -> Sequence[str]:
        mine = folder / name
        mine.mkdir()
        settings = Settings(name, str(mine), left - MARGIN, small)
        path = Path(__file__).parent / script
        return [sys.executable, str(path), json.dumps(dataclasses.asdict(settings))]

    return Section(name, command, seconds)


def _keep(result: dict[str, Any], path: Path, name: str, found: dict[str, Any]) -> None:
    """Write all that is known now, in one rename: whoever is cut off after this has it."""
    result["sections"][name] = found
    result["bars"] = judge(result)
    replace_file(path, f"{json.dumps(result, indent=1)}\n".encode())
    if "seconds" in found or not found["results"]:
        print(f"{name}: {found.get('error', 'all of it')}, {found.get('seconds', 0)} s", flush=True)
    else:
        print(f"{name}: {json.dumps(found['results'][-1])}", flush=True)


def kind_of(result: dict[str, Any]) -> str:
    """The kind of the device that was measured; "unknown" where that failed."""
    machine = result["sections"].get(FIRST, {"results": []})
    return str(next((each["device"]["kind"] for each in machine["results"] if "device" in each), "unknown"))


if __name__ == "__main__":
    main()
