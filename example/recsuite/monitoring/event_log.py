"""TensorBoard's files of a training, for --tensorboard."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.errors import UserError
from recsuite.monitoring.report import epoch_report, finite
from recsuite.monitoring.runs import numbers
from recsuite.training.callbacks import Callback, Epoch, Run, Step

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class EventLog(Callback):
    """Writes what a training does as scalars over its steps, on the rank that makes it.

    Every step's loss and learning rates; after an epoch what metrics.json holds of it, and in the end the
    test. Losses are written at the end of their epoch, when the device has been waited for anyway.

    Raises:
        UserError: when tensorboard is not installed.
    """

    def __init__(self, folder: Path, flags: Mapping[str, Any]) -> None:
        try:
            # Looked for now, and not with the first epoch: a missing package must not cost one.
            import torch.utils.tensorboard  # noqa: F401
        except ModuleNotFoundError as error:
            raise UserError(
                f"--tensorboard needs the package {error.name}, which is not installed; run ./run.sh setup."
            ) from error
        self.folder = folder
        self.flags = flags
        self._rates: dict[int, dict[str, float]] = {}
        self._writer: SummaryWriter | None = None
        self._last_step = 0

    def on_step(self, step: Step) -> None:
        """Keep the learning rates with which a step was made."""
        self._rates[step.progress.step] = dict(step.rates)

    def on_epoch(self, epoch: Epoch) -> None:
        """Write what an epoch was."""
        writer = self._opened(first_step=min(self._rates))
        for (step, rates), loss in zip(self._rates.items(), epoch.losses, strict=True):
            writer.add_scalar("loss", float(loss), step)
            for name, rate in rates.items():
                writer.add_scalar(f"learning_rate/{name}", rate, step)
        self._last_step = max(self._rates)
        self._rates = {}
        self._write_numbers(epoch_report(epoch))

    def on_end(self, run: Run) -> None:
        """Write the final test, if anything was trained."""
        if self._writer:
            self._write_numbers({"test": finite(run.test)})

    def close(self) -> None:
        """Have everything on disk."""
        if self._writer:
            self._writer.close()

    def _write_numbers(self, report: Mapping[str, Any]) -> None:
        assert self._writer
        # Over steps and not epochs, so that `purge_step` hides these too where another training wrote them.
        for name, value in numbers(report):
            self._writer.add_scalar(name, value, self._last_step)
        self._writer.flush()

    def _opened(self, first_step: int) -> SummaryWriter:
        # With the first epoch: only then is the first step of this process known, and where nothing is left
        # to train, no file is made.
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # What an earlier training wrote there from this step on is hidden: a resumed one continues its
            # curves, another one has its own.
            self._writer = SummaryWriter(str(self.folder), purge_step=first_step)
            rows = [f"| --{name} | `{value}` |" for name, value in self.flags.items()]
            self._writer.add_text(
                "config", "\n".join(["| flag | value |", "| --- | --- |", *rows]), first_step
            )
        return self._writer
