"""Flags of reports, segments, profiles and trackers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recsuite.config.config import Config, ExtraSection, check_is_folder
from recsuite.config.flag import flag
from recsuite.errors import require
from recsuite.places import folder_at, is_remote


@dataclass(frozen=True)
class ReportsConfig(ExtraSection):
    """Reports, trackers and profiles of a training."""

    report_dir: str = flag(
        "",
        "Folder, or URL of an object store, that gets metrics.json of a training, or test.json of --load; "
        "empty means no report.",
        per_machine=True,
    )
    by: str = flag(
        "",
        "Features with one value, separated by commas; the test is also reported for each of their values; "
        "history_length is the number of training ratings of the user.",
    )
    profile: int = flag(
        0,
        "Training steps that rank 0 records with PyTorch's profiler after a warm-up, for a table of the "
        "costliest operations and a trace.json in --report_dir or the current folder; 0 means none.",
        least=0,
        most=10_000,
        per_machine=True,
    )
    tensorboard: bool = flag(
        False,
        "Write losses, learning rates, speed and metrics for TensorBoard into --report_dir/tensorboard.",
        requires=("report_dir", True),
        per_machine=True,
    )

    def check(self, config: Config) -> None:
        """Check the flags, alone and with those of the core."""
        config.check_purpose(of_training=["profile", "tensorboard"], of_results=["report_dir", "by"])
        folder_at(self.report_dir, "report_dir")
        for name in ("profile", "tensorboard"):
            require(
                not (config.flags[name] and is_remote(self.report_dir)),
                f"--{name} requires a --report_dir on this machine, got {self.report_dir}",
            )
        check_is_folder(self.report_dir, "report_dir")
        require(
            not (self.by and config.stream.stream), "--by cannot be used with --stream, which has no test"
        )

    def observers(self, config: Config, context: Any) -> Iterator[Any]:
        """Yield the callbacks that the flags ask for."""
        # First, because the others write into this folder.
        if self.report_dir:
            from recsuite.extras.reports.report import make_report_dir

            make_report_dir(folder_at(self.report_dir))
        if self.profile:
            from recsuite.extras.reports.profiler import Profile

            yield Profile(self.profile, Path(self.report_dir or "."), context)
        if self.tensorboard:
            from recsuite.extras.reports.trackers import TensorBoardTracker

            yield TensorBoardTracker(Path(self.report_dir, "tensorboard"))

    def segments(self, columns: Any) -> Sequence[Any]:
        """Return the segments of --by."""
        names = [name.strip() for name in self.by.split(",") if name.strip()]
        if not names:
            return ()
        from recsuite.extras.reports.segments import segments_of

        return segments_of(columns, "test", names)

    def report_training(self, run: Any, seconds: Mapping[str, float], config: Config, context: Any) -> None:
        """Write metrics.json into --report_dir."""
        if self.report_dir:
            from recsuite.extras.reports.report import write_report

            write_report(folder_at(self.report_dir), run, seconds, config, context)

    def report_test(self, test: Any, columns: Any, config: Config) -> None:
        """Write test.json into --report_dir."""
        if self.report_dir:
            from recsuite.extras.reports.report import write_test

            write_test(folder_at(self.report_dir), test, columns, config)
