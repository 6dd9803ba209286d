"""What to do after a launch that ended by no mistake of the program's, and from where it can go on."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.errors import UserError
from recsuite.runtime.launch import read_launch

if TYPE_CHECKING:
    from recsuite.config.config import Config

# A shared folder may have been on the machine that is gone, and then nothing answers.
FOLDER_SECONDS = 3.0
MACHINES = " on the machines that are left, with their number as NNODES and one of them in RDZV_ENDPOINT"


@dataclass(frozen=True)
class Recovery:
    """What a launch with the same flags can go on from.

    config: None for a script with flags of its own; newest_in: finds the newest checkpoint of a folder. It is
    handed in, because what a checkpoint is, is nothing that the runtime knows.
    """

    config: Config | None
    newest_in: Callable[[Path], Path | None] | None = None

    def way_on(self, where: str = "") -> str:
        """Words for where to start again, and from what; where: on which machines."""
        again = f"start again{where}"
        if self.config is None or "train" not in self.config.modes:
            return again
        if not self.config.checkpoint.dumps:
            return f"{again}, with --dump to have something that --resume can go on from"
        save_dir = Path(self.config.checkpoint.save_dir)
        found: list[str] = []
        thread = threading.Thread(target=self._look_in, args=(save_dir, found), name="newest", daemon=True)
        thread.start()
        thread.join(FOLDER_SECONDS)
        return f"{again}; {found[0] if found else f'--resume goes on from the last checkpoint in {save_dir}'}"

    def after_lost_peer(self) -> str:
        """What to do when ranks are gone, in words that end a report of it."""
        done, most = (
            int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")
        )
        if done < most:
            is_new = self.config is not None and not self.config.checkpoint.resume
            anew = "; without --resume they begin anew" if is_new else ""
            return f"torchrun tries to start the ranks again (restart {done + 1} of {most}){anew}."
        return f"What to do: {self.way_on(MACHINES if read_launch().spans_machines else '')}."

    def _look_in(self, save_dir: Path, found: list[str]) -> None:
        if self.newest_in is None:
            return
        # What cannot be read now may be readable when somebody starts again.
        with contextlib.suppress(UserError):
            newest = self.newest_in(save_dir)
            found.append(
                f"--resume goes on from {newest}" if newest else f"{save_dir} holds no checkpoint yet"
            )
