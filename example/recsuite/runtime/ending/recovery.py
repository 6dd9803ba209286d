"""What to do after a launch that lost a process or a machine, and from which checkpoint it can continue."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.errors import UserError, harmless
from recsuite.runtime.launch import read_launch

if TYPE_CHECKING:
    from recsuite.config.config import Config

# A shared folder may have been on the machine that is gone, and then nothing answers.
FOLDER_SECONDS = 3.0
MACHINES = " on the machines that are left, with their number as NNODES and one of them in RDZV_ENDPOINT"


@dataclass(frozen=True)
class Recovery:
    """What a launch with the same flags can continue from.

    config: None for a script with flags of its own; newest_in: finds the newest checkpoint of a folder. The
    caller passes it, because the runtime knows nothing of checkpoints; without it only the folder is named.
    """

    config: Config | None
    newest_in: Callable[[Path], Path | None] | None = None

    def how_to_continue(self, where: str = "") -> str:
        """A sentence without its full stop; where: on which machines to start again."""
        again = f"start again{where}"
        if self.config is None or "train" not in self.config.modes:
            return again
        if not self.config.checkpoint.writes:
            return f"{again}, with --dump to have something that --resume can continue from"
        save_dir = Path(self.config.checkpoint.save_dir)
        # What is said if the thread finds nothing in time.
        found = [f"--resume continues from the last checkpoint in {harmless(save_dir)}"]
        # A thread, because a call into a file system that does not answer cannot be interrupted, only left
        # behind.
        thread = threading.Thread(target=self._look_in, args=(save_dir, found), name="newest", daemon=True)
        thread.start()
        thread.join(FOLDER_SECONDS)
        return f"{again}; {found[-1]}"

    def after_lost_peer(self) -> str:
        """What to do when ranks are gone: the last sentence of a report of that."""
        done, most = (
            int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")
        )
        if done < most:
            is_new = self.config is not None and not self.config.checkpoint.resume
            anew = "; without --resume they begin anew" if is_new else ""
            return f"torchrun tries to start the ranks again (restart {done + 1} of {most}){anew}."
        return f"What to do: {self.how_to_continue(MACHINES if read_launch().spans_machines else '')}."

    def _look_in(self, save_dir: Path, found: list[str]) -> None:
        if self.newest_in is None:
            return
        # What cannot be read now may be readable when somebody starts again.
        with contextlib.suppress(UserError):
            newest = self.newest_in(save_dir)
            none = f"{harmless(save_dir)} holds no checkpoint yet"
            found.append(f"--resume continues from {harmless(newest)}" if newest else none)
