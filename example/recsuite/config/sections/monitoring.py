"""The flags of what is recorded of a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.section import Section, require


@dataclass(frozen=True)
class MonitoringConfig(Section):
    """What is recorded of a training."""

    MOST: ClassVar = {"profile": 10_000}

    doctor: bool = False
    """Examine this machine and print one page: versions, device, cores, memory, whether two processes meet,
    data; trains nothing."""

    report_dir: str = ""
    """Folder that gets metrics.json and curves.png; empty means no report."""

    profile: int = 0
    """Training steps that rank 0 records with PyTorch's profiler after a warm-up, for a table of the
    costliest operations and a trace.json in --report_dir or the current folder; 0 means none."""

    tensorboard: bool = False
    """Write losses, learning rates, speed and metrics for TensorBoard into --report_dir/tensorboard."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(
            bool(self.report_dir) or not self.tensorboard,
            "--tensorboard writes into --report_dir, and there is none; give one",
        )
        self.require_at_least_0("profile")
