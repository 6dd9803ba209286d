"""Flags of the recommendations for one user."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from recsuite.config.config import Config, ExtraSection
from recsuite.config.flag import flag
from recsuite.errors import require


@dataclass(frozen=True)
class RecommendConfig(ExtraSection):
    """Recommendations from a checkpoint."""

    recommend: bool = flag(False, "Print the recommendations of the --checkpoint in --save_dir for --user.")
    user: str = flag("", "Raw id of the user of --recommend.", requires=("recommend", True))
    top: int = flag(
        10, "Number of items that --recommend prints.", least=1, most=10_000, requires=("recommend", True)
    )
    follow: bool = flag(
        False, "Repeat --recommend for every new --checkpoint of a training.", requires=("recommend", True)
    )
    modes: ClassVar[tuple[str, ...]] = ("recommend",)
    serves: ClassVar[bool] = True

    def validate(self) -> None:
        """Refuse impossible values.

        Raises:
            UserError: for the first fault found.
        """
        super().validate()
        require(not self.recommend or bool(self.user), "--recommend requires --user, the raw id of a user")

    def run_alone(self, config: Config, given: Collection[str], model: Any) -> int:
        """Print the recommendations."""
        from recsuite.extras.recommend.recommend import recommend
        from recsuite.runtime.console import showing_progress
        from recsuite.tools.script import check_machine

        check_machine()
        with showing_progress():
            recommend(config, given, model)
        return 0
