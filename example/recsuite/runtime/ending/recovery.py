"""What to do after a launch that ended by no mistake of the program's, and from where it can go on."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from recsuite.errors import UserError

if TYPE_CHECKING:
    from recsuite.config.config import Config

# A shared folder may have been on the machine that is gone, and then nothing answers.
FOLDER_SECONDS = 3.0
MACHINES = " on the machines that are left, with their number as NNODES and one of them in RDZV_ENDPOINT"


def way_on(config: Config | None, where: str = "") -> str:
    """What a launch with the same flags can go on from; config: None for a script with flags of its own.

    where: on which machines to start again.
    """
    again = f"start again{where}"
    if config is None or "train" not in config.modes:
        return again
    if not config.checkpoint.dumps:
        return f"{again}, with --dump to have something that --resume can go on from"
    save_dir = Path(config.checkpoint.save_dir)
    found: list[str] = []
    thread = threading.Thread(target=_look_in, args=(save_dir, found), name="newest", daemon=True)
    thread.start()
    thread.join(FOLDER_SECONDS)
    return f"{again}; {found[0] if found else f'--resume goes on from the last checkpoint in {save_dir}'}"


def after_lost_peer(config: Config | None, spans_machines: bool) -> str:
    """What to do when ranks are gone, in words that end a report of it."""
    done, most = (
        int(os.environ.get(f"TORCHELASTIC_{name}", 0)) for name in ("RESTART_COUNT", "MAX_RESTARTS")
    )
    if done < most:
        anew = "" if config is None or config.checkpoint.resume else "; without --resume they begin anew"
        return f"torchrun tries to start the ranks again (restart {done + 1} of {most}){anew}."
    return f"What to do: {way_on(config, MACHINES if spans_machines else '')}."


def _look_in(save_dir: Path, found: list[str]) -> None:
    # Each data worker imports what the example does, and needs none of this.
    from recsuite.checkpoint.storage.directory import newest_in

    # What cannot be read now may be readable when somebody starts again.
    with contextlib.suppress(UserError):
        newest = newest_in(save_dir)
        found.append(f"--resume goes on from {newest}" if newest else f"{save_dir} holds no checkpoint yet")
