"""Flag of the schema.toml that is written from the columns of tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, ClassVar

from recsuite.config.config import Config, ExtraSection
from recsuite.config.flag import flag


@dataclass(frozen=True)
class GuessConfig(ExtraSection):
    """A schema.toml for your own tables."""

    schema: str = flag(
        "",
        "Folder, file or URL of your own tables: write a schema.toml beside them that describes their "
        "columns, for you to correct, and exit.",
    )
    modes: ClassVar[tuple[str, ...]] = ("schema",)

    def run_alone(self, config: Config, given: Collection[str], model: Any) -> int:
        """Write a schema.toml beside the tables."""
        from recsuite.extras.guess.proposal import propose

        propose(self.schema).show()
        return 0
