"""Where a figure comes from, and where it goes: what all benchmarks write beside what they measured."""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from figures import bar_lines

from recsuite.files import replace_file
from recsuite.runtime.host import allowed_cores, available_memory, installed_versions

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
EXAMPLE = ROOT / "example" / "example.py"
CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, Any]:
    """The machine in words, the versions of the stack, and the time, in UTC."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": installed_versions(),
    }


def in_words(about: dict[str, Any]) -> str:
    """Where figures come from, in a line: about has what `describe` says, and "fbgemm" names itself."""
    versions = [f"{name} {version}" for name, version in about["versions"].items() if name != "fbgemm"]
    return f"{about['machine']}; {', '.join(versions)}, {about['versions']['fbgemm']}; {about['date'][:10]}."


def describe_machine() -> str:
    """Cores that this process may use, what they are, and memory."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{allowed_cores()} cores of {name}, {available_memory()[1] / 2**30:.0f} GiB, {platform.system()}"


def torchrun(num_ranks: int) -> list[str]:
    """The beginning of a command that launches so many ranks on this machine."""
    # By its module: the command "torchrun" may be another Python's.
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={num_ranks}",
    ]


def make_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser that shows the docstring of a benchmark, with the flags that `finish` obeys."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="folder that gets the JSON and the picture, if any")
    parser.add_argument("--write", action="store_true", help="into docs/, with its tables")
    return parser


def finish(
    name: str,
    result: dict[str, Any],
    text: str,
    flags: argparse.Namespace,
    draw: Callable[[dict[str, Any], Path], None] | None = None,
    page: Path | None = None,
    marks: tuple[str, str] | None = None,
) -> None:
    """Show a result, as text and with its bars; put NAME.json, and NAME.png if it is drawn, into --report.

    With --write into docs as well, and the text between the marks of a page, if it has one.
    """
    print(f"{text}\n\n{bar_lines(result['bars'])}")
    for folder in (flags.report, DOCS if flags.write else None):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / f"{name}.json", f"{json.dumps(result, indent=1)}\n".encode())
            if draw is not None:
                draw(result, folder / f"{name}.png")
    if flags.write and page and marks:
        write_between(page, marks, text)


def write_between(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two marks of a page.

    Raises:
        ValueError: when the page does not have them.
    """
    first, last = map(re.escape, marks)
    block = f"{marks[0]}\n{text}\n{marks[1]}"
    # A function, because a backslash in the text would be read as a group in a replacement that is a string.
    after, places = re.subn(f"{first}.*{last}", lambda match: block, page.read_text(), flags=re.DOTALL)
    if not places:
        raise ValueError(f"{page.name} has no place for the tables: {marks[0]} and {marks[1]} are missing")
    page.write_text(after)
