"""The flags of a training that follows a stream of events."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from recsuite.config.durations import Duration, duration
from recsuite.config.section import Section, require

# Flags that say something of passes over a fixed set, and why a stream has no use for each.
NOT_IN_A_STREAM = {
    "epochs": "a stream is learned from once",
    "patience": "a stream has no epoch after which it could stop early",
    "split": "each window of a stream is predicted before it is learned from, which is its test",
    "test_fraction": "each window of a stream is predicted before it is learned from, which is its test",
    "validation_fraction": "each window of a stream is predicted before it is learned from",
}


@dataclass(frozen=True)
class StreamConfig(Section):
    """Training that follows the events in the order of time, window after window."""

    stream: bool = False
    """Train on the ratings in the order of time: each --window is first predicted, then learned from once."""

    window: str = "1d"
    """What is predicted and then learned from at once with --stream: a span of the ratings' own time, such as
    12h or 1d, counted from 1970 in UTC, or a number of ratings."""

    follow_data: bool = False
    """With --stream, wait at the end of the data for files to grow and for new ones, until told to end."""

    @property
    def span(self) -> Duration:
        """How long a window is, in seconds or in events."""
        return duration("window", self.window, "events")

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        for name in ("window", "follow_data"):
            require(
                self.stream or self.is_default(name),
                f"--{name} says how a stream is followed, and none is; give --stream too",
            )
        require(self.span.amount >= 1, f"--window {self.window} holds nothing; give 1d, say")


def check_given(stream: bool, given: Collection[str], duplicates: str) -> None:
    """Refuse flags that a stream cannot have. given: the flags of the command line.

    Raises:
        UserError: names the first.
    """
    if not stream:
        return
    for name, reason in NOT_IN_A_STREAM.items():
        require(
            name not in given, f"--{name} and --stream exclude each other, because {reason}; leave one out"
        )
    require(
        "duplicates" not in given or duplicates == "keep",
        f"--duplicates {duplicates} would choose among ratings that a stream meets one after the other; give "
        "--duplicates keep, or leave it out",
    )
