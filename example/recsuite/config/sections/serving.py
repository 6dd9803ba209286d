"""The flags of what is done with a checkpoint without a training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recsuite.config.section import Section, require


@dataclass(frozen=True)
class ServingConfig(Section):
    """What is exported or recommended from a checkpoint."""

    POSITIVE: ClassVar = ("top",)
    MOST: ClassVar = {"top": 10_000}

    export: str = ""
    """New folder that gets the --checkpoint in --save_dir, whole and without its optimizer, for a server."""

    recommend: bool = False
    """Print what the --checkpoint in --save_dir recommends to --user."""

    user: str = ""
    """Raw id of the user that --recommend is for."""

    top: int = 10
    """How many items --recommend prints."""

    follow: bool = False
    """Have --recommend print again whenever the trainer writes another --checkpoint."""

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
