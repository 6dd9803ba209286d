"""What looks at a training while it runs, without taking part in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recsuite.config.config import Config
from recsuite.runtime.process import RuntimeContext
from recsuite.training.stopwatch import Stopwatch

if TYPE_CHECKING:
    from torchrec.optim.keyed import CombinedOptimizer

    from recsuite.monitoring.event_log import EventLog
    from recsuite.monitoring.profiler import Profile
    from recsuite.training.trainer import Epoch


@dataclass(frozen=True)
class Watch:
    """The stopwatch of this rank and, on rank 0, what the flags ask for. Not collective."""

    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    profile: Profile | None = None
    log: EventLog | None = None

    @contextlib.contextmanager
    def steps(self) -> Iterator[None]:
        """Around the training steps of an epoch."""
        with self.profile.epoch() if self.profile else contextlib.nullcontext(), self.stopwatch.part("steps"):
            yield

    def after_step(self, step: int, optimizer: CombinedOptimizer) -> None:
        """This step of the training, from 1, is done with the optimizer; it may still be computed."""
        if self.profile:
            self.profile.after_step()
        if self.log:
            self.log.after_step(step, optimizer)

    def after_epoch(self, epoch: Epoch) -> None:
        """An epoch is trained and evaluated."""
        if self.log:
            self.log.after_epoch(epoch)

    def after_run(self, report: Mapping[str, Any]) -> None:
        """The training has its report."""
        if self.log:
            self.log.after_run(report)


@contextlib.contextmanager
def watching(config: Config, context: RuntimeContext) -> Iterator[Watch]:
    """What the configuration asks to look on; closed with the context. Not collective.

    Raises:
        UserError: when what is seen cannot be written.
    """
    stopwatch = Stopwatch()
    if context.rank != 0:
        yield Watch(stopwatch)
        return
    with contextlib.ExitStack() as stack:
        profile = log = None
        if config.monitoring.profile:
            from recsuite.monitoring.profiler import Profile

            profile = Profile(config.monitoring.profile, Path(config.monitoring.report_dir or "."), context)
        if config.monitoring.tensorboard:
            from recsuite.monitoring.event_log import EventLog

            log = EventLog(Path(config.monitoring.report_dir, "tensorboard"), config)
            stack.callback(log.close)
        yield Watch(stopwatch, profile, log)
        if profile:
            profile.finish()
