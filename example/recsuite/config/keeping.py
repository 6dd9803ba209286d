"""The flags of checkpoints, and of what serves them."""

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
    """Train, and dump the model to --save_dir at the end of every epoch."""

    inc_dump: bool = False
    """Train, and dump increments to --save_dir: a full dump first, then at every moment to dump the rows that
    changed since the last one; with --dump the end of an epoch gets a full dump too."""

    resume: bool = False
    """Continue from the newest checkpoint in --save_dir, or begin where there is none; dumps like --dump, or
    with --inc_dump increments."""

    load: str = ""
    """Evaluate a dump or increment: the folder named, or the --checkpoint in --save_dir where none is
    named."""

    compact: bool = False
    """Fold the newest increments in --save_dir and the dump that they build on into one new dump."""

    until: int = -1
    """Step after which --load replays no more increments; -1 means all of them."""

    checkpoint: str = "best"
    """Which state in --save_dir is loaded, exported or asked: the best on the validation ratings, or the
    latest. --resume and --follow take the latest, --until and a folder that is named say it themselves."""

    save_dir: str = "dumps"
    """Folder of the dumps, the same one for all ranks."""

    dump_every: int = 0
    """Dump after every so many steps too; 0 means at the end of an epoch alone."""

    keep: int = 3
    """How many full dumps are kept: the newest; the best, and those that increments build on, stay too."""

    async_dump: bool = False
    """Write full checkpoints while the training continues, from a copy in memory."""

    @property
    def dumps(self) -> bool:
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
        for name in ("dump_every", "keep", "async_dump"):
            require(
                self.dumps or (self.compact and name == "keep") or self.is_default(name),
                f"--{name} says how dumps are made, and none are made; give --dump too",
            )
        require(
            self.until == -1 or bool(self.load),
            f"--until {self.until} says where a load stops, and none is asked for; give --load too",
        )
        require(self.until >= -1, f"--until {self.until} is not a step; give the number of one, 0 or more")
        self.require_at_least_0("dump_every")


@dataclass(frozen=True)
class ServingConfig(Section):
    """What becomes of a checkpoint without a training."""

    POSITIVE: ClassVar = ("top",)
    MOST: ClassVar = {"top": 10_000}

    export: str = ""
    """New folder that gets the --checkpoint in --save_dir, whole and without its optimizer, for a server."""

    recommend: bool = False
    """Print what the --checkpoint in --save_dir recommends to --user."""

    user: str = ""
    """Raw id of the user that --recommend is for."""

    top: int = 10
    """How many movies --recommend prints."""

    follow: bool = False
    """Have --recommend take the newest checkpoint, and print again whenever there is a newer one."""

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        for name in ("user", "top", "follow"):
            require(
                self.recommend or self.is_default(name),
                f"--{name} says what is recommended, and nothing is; give --recommend too",
            )
        require(not self.recommend or bool(self.user), "--recommend needs --user, the raw id of a user")
