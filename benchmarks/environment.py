"""Where a figure comes from: a benchmark writes this beside what it measured."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "example"))

from machine import allowed_cores, available_memory
from stack import stack_versions

CPUINFO = Path("/proc/cpuinfo")


def describe() -> dict[str, object]:
    """The machine in words, the versions of the stack, and the time, in UTC."""
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": stack_versions(),
    }


def describe_machine() -> str:
    """Cores that this process may use, what they are, and memory."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    return f"{allowed_cores()} cores of {name}, {available_memory()[1] / 2**30:.0f} GiB, {platform.system()}"
