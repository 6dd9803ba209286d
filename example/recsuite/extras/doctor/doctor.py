"""Check of this machine: its packages, device, memory and data, for a run with the same flags and ranks.

Downloads no data and writes none. Packages that may be broken are imported inside their check, so that the
other lines are printed in any case.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from recsuite.config.config import Config
from recsuite.errors import LINES, UserError, counted, escaped
from recsuite.files import reason_of
from recsuite.hooks import extra
from recsuite.runtime.host import (
    allowed_cores,
    check_versions,
    describe_memory,
    installed_versions,
    shown_bytes,
)
from recsuite.runtime.process import Launch, choose_device, read_launch

DRIVER = Path("/proc/driver/nvidia/version")


def diagnose(config: Config) -> int:
    """Print a line for each check, ok or fault, for the ranks of this launch on this machine. Not collective.

    Return the exit status: 1 if there is a fault.
    """
    launch, faults = read_launch(), 0
    checks: dict[str, Callable[[], str]] = {
        "versions": check_packages,
        "device": lambda: check_device(launch),
        "step": lambda: check_step(config, launch),
        "memory": describe_memory,
        "data": lambda: check_data(config),
    }
    for name, check in checks.items():
        text, fault = examined(check)
        faults += fault
        print(escaped(f"{'fault' if fault else 'ok':<5}  {name:<8}  {text}", LINES), flush=True)
    print(counted(faults, "fault") if faults else "No fault; `python -m torch.utils.collect_env` shows more.")
    return 1 if faults else 0


def examined(check: Callable[[], str]) -> tuple[str, bool]:
    """Return the text of a check, and True for a fault: an exception, because a run would fail there too."""
    try:
        return check(), False
    except UserError as error:
        return str(error), True
    # Any exception: a broken package may raise any type when it is imported.
    except Exception as error:
        return (
            f"{type(error).__name__}: {error}. Fix: delete .venv (or .venv-STACK) and run ./run.sh setup.",
            True,
        )


def check_packages() -> str:
    """Check the versions of the packages, and that they match."""
    check_versions()
    return ", ".join(f"{name} {version}" for name, version in installed_versions().items())


def check_device(launch: Launch) -> str:
    """Check the device that a run would choose, and that it responds."""
    import torch

    device, ranks = choose_device(launch), counted(launch.local_world_size, "rank")
    if device.type != "cuda":
        # A user may hide the GPUs on purpose.
        is_unused = DRIVER.is_file() and "CUDA_VISIBLE_DEVICES" not in os.environ
        unused = "; an NVIDIA driver is installed, but torch sees no GPU: try VARIANT=cuda ./run.sh setup"
        return f"CPU for {ranks}, with {counted(allowed_cores(), 'core')}{unused if is_unused else ''}"
    version = re.search(r"\s(\d+(\.\d+)+)\s", DRIVER.read_text()) if DRIVER.is_file() else None
    # The first operation on the device itself: a broken one fails here.
    free, total = torch.cuda.mem_get_info(device)
    return (
        f"{torch.cuda.get_device_name(device)}, {shown_bytes(free)} of {shown_bytes(total)} free, the first "
        f"of {torch.cuda.device_count()} for {ranks}; driver {version[1] if version else 'unknown'}, CUDA "
        f"{torch.version.cuda}, nccl {'.'.join(map(str, torch.cuda.nccl.version()))}"
    )


def check_step(config: Config, launch: Launch) -> str:
    """Check flags of tables, --precision, --data_device and --capture, as far as data and model allow.

    Raises:
        UserError: when a training would refuse one of them.
    """
    from recsuite.sharding.plan import check_tables
    from recsuite.training.captured import check_capture, why_eager
    from recsuite.training.device_batches import check_data_device, why_on_host
    from recsuite.training.state import check_precision

    device, wanted, if_possible = choose_device(launch), config.training, "where data and model allow it"
    check_tables(config, device, has_dynamic=config.tables.vocabulary == "dynamic")
    check_precision(wanted, device)
    on_host = why_on_host(config, device, launch.world_size)
    check_data_device(config, on_host)
    eager = "--capture is off" if wanted.capture == "off" else why_eager(config, device, on_host or "")
    check_capture(wanted.capture == "on", eager)
    batches = f"on the host, because {on_host}" if on_host else f"on the GPU {if_possible}"
    steps = f"eager, because {eager}" if eager else f"captured {if_possible}"
    return f"{wanted.precision}; batches are made {batches}; steps are {steps}"


def check_data(config: Config) -> str:
    """Check the folder of the data, and that they can be read; unlike a run it downloads none.

    Raises:
        UserError: when they cannot be read, or are another data set.
    """
    from recsuite.datasets.source import locate, look

    if config.stream.topic:
        with contextlib.closing(extra("kafka").Topic(config)) as topic:
            offsets = topic.ends().values()
        number = counted(sum(end - low for low, end in offsets), "message")
        return f"{config.stream.topic}: {number} in {counted(len(offsets), 'partition')}"
    try:
        folder, source = look(config.data, config.runtime.seed)
        if source is None:
            made = "drawn" if config.data.is_synthetic else "downloaded"
            return f"{folder}: not there yet, {made} at the first start"
        # Refuses files of another data set.
        locate(config.data, config.runtime.seed)
        for file in source.files:
            file.open().close()
    except OSError as error:
        raise UserError(
            f"Cannot read {error.filename or config.data.data_path}: {reason_of(error)}. Fix: give another "
            "--data_path, or change its mode."
        ) from None
    size = shown_bytes(sum(file.size for file in source.files))
    return f"{folder}: {counted(len(source.files), 'file')}, {size}"
