"""The flags of checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.section import Section, require

# What --load without a folder means.
NEWEST = "newest"


@dataclass(frozen=True)
class CheckpointConfig(Section):
    """When checkpoints are written, where, and which one is read."""

    CHOICES: ClassVar = {"checkpoint": ("best", "latest")}
    POSITIVE: ClassVar = ("keep",)

    dump: bool = False
    """Train, and write a full checkpoint to --save_dir at the end of every epoch."""

    inc_dump: bool = False
    """Train, and write deltas to --save_dir: a full checkpoint first, then deltas with the rows that changed
    since the last one; with --dump the end of an epoch gets a full checkpoint too."""

    resume: bool = False
    """Continue from the newest checkpoint in --save_dir, or begin where there is none; writes checkpoints
    like --dump, or deltas with --inc_dump."""

    load: str = ""
    """Evaluate a checkpoint: the folder named, or the --checkpoint in --save_dir where none is named."""

    compact: bool = False
    """Merge the newest deltas in --save_dir and the full checkpoint that they build on into a new one."""

    # Not None: the parser takes the type of a flag from its default.
    until: int = -1
    """Step after which --load applies no more deltas; -1 means all of them."""

    # The last epoch is often the best, but not always. One default wherever a model is served, so that all
    # give the same answer.
    checkpoint: str = "best"
    """Which checkpoint in --save_dir --load, --export, --recommend and serve.py take: the best on the
    validation ratings, or the latest. --resume always takes the latest; --until, or a folder after --load,
    names one instead."""

    save_dir: str = "dumps"
    """Folder of the checkpoints, the same one for all ranks."""

    dump_every: int = 0
    """Write a checkpoint after every so many steps too; 0 means at the end of an epoch alone."""

    keep: int = 3
    """How many full checkpoints are kept, the newest; the best, and those that deltas build on, stay too."""

    async_dump: bool = False
    """Write full checkpoints while the training continues, from a copy in memory."""

    @property
    def folder_to_load(self) -> str:
        """The folder that --load names, or --save_dir where it names none."""
        return self.load if self.load not in ("", NEWEST) else self.save_dir

    @property
    def writes(self) -> bool:
        """Whether checkpoints of the training are written."""
        return self.dump or self.inc_dump or self.resume

    @property
    def reads(self) -> bool:
        """Whether the work begins from a checkpoint, whose flags hold where none are given."""
        return bool(self.load) or self.compact or self.resume

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        # A flag that nothing reads would be ignored in silence.
        for name in ("dump_every", "keep", "async_dump"):
            require(
                self.writes or (self.compact and name == "keep") or self.is_default(name),
                f"--{name} says how checkpoints are written, and none are written; give --dump too",
            )
        require(
            self.until == -1 or bool(self.load),
            f"--until {self.until} says where a load stops, and none is asked for; give --load too",
        )
        require(self.until >= -1, f"--until {self.until} is not a step; give the number of one, 0 or more")
        self.require_at_least_0("dump_every")
