"""What this machine lets the process have, and that the process does not outlive its parent.

Reads /proc and /sys; imports nothing heavy, so a data worker may import it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, even while it is blocked. On Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def allowed_memory() -> int:
    """Bytes that this process may use: the machine's memory, and the limits of its cgroup and those above."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [limit for limit in map(_memory_limit, _cgroup_folders("memory")) if limit is not None]
    return min([machine, *limits])


def allowed_cores() -> int:
    """Cores that this process may use: its affinity, and the CPU quota of its cgroup and those above."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for quota in map(_cpu_quota, _cgroup_folders("cpu")) if quota is not None]
    return max(1, int(min([affinity, *quotas])))


def _cgroup_folders(controller: str) -> list[Path]:
    """Folders of this process's cgroup and those above it, for versions 1 and 2; not all need exist."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    roots = [CGROUP_ROOT, CGROUP_ROOT / controller]
    folders = list(roots)
    for line in lines:
        # "0::/a/b" in version 2, "4:cpu,cpuacct:/a/b" in version 1.
        _, controllers, path = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            below = Path(path.strip("/"))
            folders += [root / part for root in roots for part in (below, *below.parents)]
    return folders


def _cpu_quota(folder: Path) -> float | None:
    """Cores' worth of time that one cgroup may use; None where it sets no limit."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota = (folder / "cpu.cfs_quota_us").read_text()
            period = (folder / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        # No such file, or the word "max".
        return None


def _memory_limit(folder: Path) -> int | None:
    """Bytes that one cgroup may use; None where it sets no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        try:
            return int((folder / name).read_text())
        except (OSError, ValueError):
            # No such file, or the word "max".
            continue
    return None
